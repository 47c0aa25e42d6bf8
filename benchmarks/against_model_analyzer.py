"""tune against Model Analyzer's quick mode: same model, server, load generator, requests, bound and machine, one run.

    python benchmarks/against_model_analyzer.py [MODEL ...] [--out FOLDER] [--rounds 5] [--work FOLDER]

For each model (a name that tune knows, or a profile): tune as a user runs it, Model Analyzer 1.58 in an environment
of its own, tune again with windows as long as Model Analyzer's turned out to be, and both winners measured again in
turn by the same independent perf_analyzer runs. Environments and models are made before any clock starts.

Prints Markdown tables and keeps them, with every log, result and launch, in --out. A search that is already there
with the same settings is not run again. The targets: at most a fifth of the peer's wall time for the search (a tenth
is the goal), a third with the confirmation of the winner (a fifth), and a winner that is no worse.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from peer import model_analyzer
from peer.remeasure import WINDOW_MS, Level, best_level, levels, measure_in_turn, round_ratios
from peer.search import Found, Search
from pydantic import TypeAdapter
from quiet import Usage
from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer import model_config, runtime, task
from optimizer.deploy.leftovers import remove_leftovers
from optimizer.load.windows import FIRST_WINDOW_MS
from optimizer.machine import hardware
from optimizer.options import RunOptions
from optimizer.process import SupervisedProcess
from optimizer.task import Task

MODELS = ("dlrm", "benchmarks/tables/mlp.yaml")
OURS = "tune"
WINDOW_OVER_INTERVAL = 1.2  # perf_analyzer's windows last a fifth longer than its --measurement-interval
TARGETS = {"search": (5, 10), "with the winner's confirmation": (3, 5)}  # times faster: target, goal


@dataclass(frozen=True)
class Settings:
    """What is the same for every model."""

    rounds: int
    window_ms: int
    tune_options: tuple[str, ...]
    interval_ms: int | None  # of tune's second row; None: as the peer's windows turned out
    smoke: bool


@dataclass(frozen=True)
class Comparison:
    """Everything that was found out about one model."""

    model: str
    what: Task
    sla_ms: float
    bounds: model_analyzer.Bounds
    searches: tuple[Search, ...]  # ours, the peer's, ours with the peer's windows
    levels: tuple[Level, ...]


def main() -> None:
    given = arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = given.out or Path("results", "against_model_analyzer", time.strftime("%Y%m%d-%H%M%S"))
    out = folder.absolute()  # the peer's processes have folders of their own
    settings = Settings(
        rounds=2 if given.smoke else given.rounds,
        window_ms=250 if given.smoke else WINDOW_MS,
        tune_options=(*shlex.split(given.tune), *(("--budget", "20s", "--max-trials", "4") if given.smoke else ())),
        interval_ms=given.measurement_interval,
        smoke=given.smoke,
    )
    work = (given.work or runtime.cache_folder() / "peers").absolute()
    try:
        runtime.ensure(say)
        home = model_analyzer.install(work, say)
        tasks = {name: prepare(name) for name in given.models or (MODELS[1:] if given.smoke else MODELS)}
        out.mkdir(parents=True, exist_ok=True)
        text = "\n".join([heading(), *(section(compare(n, t, settings, home, out)) for n, t in tasks.items())])
    except KeyboardInterrupt:
        sys.exit(f"interrupted; what is done is in {folder}")
    finally:
        remove_leftovers()  # of a tune that was ended: its shared memory
    (out / "against_model_analyzer.md").write_text(text)
    print(text)
    say(f"kept in {folder}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="keep everything there (results/against_model_analyzer/TIME)")
    parser.add_argument("--rounds", type=int, default=5, help="in which both winners are measured again (5)")
    parser.add_argument("--work", type=Path, help="for the peer's environment (in tune's cache folder)")
    parser.add_argument("--tune", default="", metavar="OPTIONS", help='more options of tune, such as "--seed 1"')
    parser.add_argument(
        "--measurement-interval", type=int, metavar="MS", help="of tune's second row (as the peer's windows turn out)"
    )
    parser.add_argument("--smoke", action="store_true", help="a tiny space and short windows: does everything work?")
    parser.add_argument("models", nargs="*", help=f"names or profiles ({' '.join(MODELS)})")
    return parser.parse_args()


def prepare(model: str) -> Task:
    return task.prepare(RunOptions(model), replace(hardware.detect(), gpus=()), say)


# -- running ----------------------------------------------------------------------------------------------------


def compare(model: str, what: Task, settings: Settings, home: Path, out: Path) -> Comparison:
    """All searches of one model, one after the other, then the winners again."""
    sla_ms = sla(model, what)
    bounds = model_analyzer.Bounds.of(what)
    if settings.smoke:
        bounds = replace(bounds, most_batch=bounds.least_batch, most_instances=1, most_concurrency=4, sweeps=1)
    folder = out / re.sub(r"[^\w.-]+", "-", model)
    folder.mkdir(exist_ok=True)
    fixed = {"model": model, "facts": what.source.facts, "sla_ms": sla_ms}
    options = list(settings.tune_options)

    def ours(name: str, place: Path, interval_ms: int | None) -> Search:
        own = options if interval_ms is None else [*options, "--measurement-interval", f"{interval_ms}ms"]
        return kept(place, {**fixed, "options": own}, lambda: tune(name, model, sla_ms, own, interval_ms, place))

    first = ours(OURS, folder / "tune", None)
    peers_folder = folder / "model_analyzer"
    peers = kept(
        peers_folder,
        {**fixed, "version": model_analyzer.VERSION, "bounds": asdict(bounds)},
        lambda: model_analyzer.search(home, what, bounds, sla_ms, peers_folder),
    )
    interval_ms = settings.interval_ms or round(1000 * peers.window_seconds / WINDOW_OVER_INTERVAL)
    second = ours(f"{OURS}, windows as long as the peer's", folder / "tune_long", interval_ms)
    winners = {search.name: search.found for search in (first, peers) if search.found is not None}
    samples = measure_in_turn(
        what,
        winners,
        rounds=settings.rounds,
        window_ms=settings.window_ms,
        table=folder / "measured_again.csv",
        say=say,
    )
    return Comparison(model, what, sla_ms, bounds, (first, peers, second), tuple(levels(samples)))


def sla(model: str, what: Task) -> float:
    """The profile's bound on p95, which both tools are given."""
    for bound in what.problem.constraints:
        if bound.metric == "latency-p95":
            return float(bound.bound)
    sys.exit(f"{model}: its profile has no bound on p95 (sla: {{p95: 20ms}})")


def kept(folder: Path, settings: dict[str, Any], search: Callable[[], Search]) -> Search:
    """The search of these settings that is in ``folder``, else a new one."""
    record, form = folder / "search.json", TypeAdapter(Search)
    plain = json.loads(json.dumps(settings))
    if record.exists() and (before := json.loads(record.read_text()))["settings"] == plain:
        say(f"{folder.parent.name}: {folder.name} is already there")
        return form.validate_python(before["search"])
    folder.mkdir(exist_ok=True)
    say(f"{folder.parent.name}: {folder.name} runs")
    found = search()
    record.write_text(json.dumps({"settings": plain, "search": asdict(found)}, indent=2) + "\n")
    return found


def tune(name: str, model: str, sla_ms: float, options: list[str], interval_ms: int | None, folder: Path) -> Search:
    """``tune --sla-p95 N MODEL`` as a user runs it."""
    seed = [] if "--seed" in options else ["--seed", "0"]
    command: list[str | Path] = [Path(sys.executable).with_name("tune"), "--sla-p95", f"{sla_ms:g}ms", "--json"]
    command += [*seed, "--out", folder, *options, model]
    log = folder / "tune.log"
    log.unlink(missing_ok=True)
    before, started = Usage.now(), time.monotonic()
    with SupervisedProcess(command, log=log) as process:
        while (exit_code := process.wait(0.5)) is None:
            pass
        wall_seconds = time.monotonic() - started
    others = Usage.now().others_since(before)
    if exit_code not in (0, 1):  # 1: no configuration meets the bound
        sys.exit(f"tune ended with exit code {exit_code}: {log.read_text().strip()[-500:]}")
    record = max(folder.glob("*/*/run.json"), key=lambda path: path.stat().st_mtime)
    info = json.loads(record.read_text())
    times, result = info["times"], info["result"]
    best = result["recommended"]
    return Search(
        name=name,
        wall_seconds=wall_seconds,
        confirm_seconds=times["confirm_seconds"],
        server_seconds=times["server_seconds"],
        load_generator_seconds=times["load_generator_seconds"],
        configurations=result["trials"],
        measurements=result["measurements"],
        launches=None,
        window_seconds=WINDOW_OVER_INTERVAL * (interval_ms or FIRST_WINDOW_MS) / 1000,
        others_share=others,
        found=best
        and Found(
            config=record.with_name("best").joinpath("config.pbtxt").read_text(),
            concurrency=best["concurrency"],
            throughput_infer_per_sec=best["throughput_infer_per_sec"],
            latency_p95_ms=best["latency_p95_ms"],
        ),
    )


# -- telling ----------------------------------------------------------------------------------------------------


def heading() -> str:
    machine = hardware.detect()
    return (
        f"{machine.cpu}, {machine.cpu_count} cores; {time.strftime('%Y-%m-%d %H:%M')}; tritonserver and "
        f"perf_analyzer {runtime.TRITON_VERSION}; Python {runtime.running_python()}; Model Analyzer "
        f"{model_analyzer.VERSION}; `{shlex.join(['python', *sys.argv])}`\n"
    )


def section(found: Comparison) -> str:
    ours, peers, second = found.searches
    problem = found.what.problem
    lines = [
        f"## {found.model}: p95 at most {found.sla_ms:g} ms, requests of {problem.request_batch_size}",
        "",
        *search_table(found.searches),
        "",
        *(line for one in (ours, second) for line in faster(one, peers)),
        "",
        f"Model Analyzer's space: {found.bounds}, dynamic batching on; it has no queue delay, preferred sizes or "
        f"threads. tune's: {len(problem.space):,} configurations, concurrency up to {problem.max_concurrency}.",
        "",
        *winners_table(found),
        "",
        *measured_again(found),
        "",
    ]
    return "\n".join(lines)


def search_table(searches: Sequence[Search]) -> list[str]:
    columns = [
        *("search s", "with confirmation s", "server s", "load generator s", "rest s"),
        *("configurations", "measurements", "perf_analyzer runs", "windows of s", "others' CPU"),
    ]
    lines = [row("", *columns), "| :-- |" + " --: |" * len(columns)]
    for one in searches:
        lines.append(
            row(
                one.name,
                f"{one.search_seconds:.0f}",
                f"{one.wall_seconds:.0f}" if one.confirm_seconds else "not confirmed",
                f"{one.server_seconds:.1f}",
                f"{one.load_generator_seconds:.1f}",
                f"{one.rest_seconds:.1f}",
                f"{one.configurations}",
                f"{one.measurements}",
                "not counted" if one.launches is None else f"{one.launches}",
                f"{one.window_seconds:.2f}",
                f"{one.others_share:.0%}",
            )
        )
    return lines


def faster(ours: Search, peers: Search) -> list[str]:
    """How many times less wall time than the peer's search, which ends without a confirmation."""
    lines = []
    times = (ours.search_seconds, ours.wall_seconds if ours.confirm_seconds else None)
    for (what, (target, goal)), seconds in zip(TARGETS.items(), times, strict=True):
        if seconds is None:
            lines.append(f"- {ours.name}: nothing was confirmed")
            continue
        ratio = peers.wall_seconds / seconds
        lines.append(
            f"- {ours.name}, {what}: **{ratio:.1f}x** less wall time "
            f"(target {target}x {met(ratio >= target)}, goal {goal}x {met(ratio >= goal)})"
        )
    return lines


def winners_table(found: Comparison) -> list[str]:
    lines = [row("winner, as claimed", "configuration", "concurrency", "infer/s", "p95 ms")]
    lines.append("| :-- | :-- | --: | --: | --: |")
    for one in found.searches:
        if one.found is None:
            lines.append(row(one.name, "none meets the bound", "-", "-", "-"))
            continue
        config = text_format.Parse(one.found.config, ModelConfig())
        candidate = model_config.candidate_of(config, tuple(found.what.problem.space.fields))
        throughput, p95_ms = one.found.throughput_infer_per_sec, one.found.latency_p95_ms
        lines.append(row(one.name, str(candidate), f"{one.found.concurrency}", f"{throughput:,.0f}", f"{p95_ms:.1f}"))
    return lines


def measured_again(found: Comparison) -> list[str]:
    """Both winners at every load, then the best ones against each other."""
    lines = [row("measured again", "concurrency", "infer/s, median (range)", "p95 ms, median (range)", "")]
    lines.append("| :-- | --: | --: | --: | :-- |")
    ours, peers = (best_level(found.levels, search.name, found.sla_ms) for search in found.searches[:2])
    for level in found.levels:
        throughputs = [sample.throughput for sample in level.samples]
        latencies = [sample.p95_ms for sample in level.samples]
        marks = ["best"] if level in (ours, peers) else [] if level.p95_ms <= found.sla_ms else ["misses the bound"]
        if unstable := sum(not sample.stable for sample in level.samples):
            marks.append(f"windows disagree in {unstable} of {len(level.samples)}")
        lines.append(
            row(
                level.winner,
                f"{level.concurrency}",
                f"{level.throughput:,.0f} ({min(throughputs):,.0f} to {max(throughputs):,.0f})",
                f"{level.p95_ms:.1f} ({min(latencies):.1f} to {max(latencies):.1f})",
                "; ".join(marks),
            )
        )
    return [*lines, "", verdict(ours, peers)]


def verdict(ours: Level | None, peers: Level | None) -> str:
    if ours is None or peers is None:
        missing = [name for name, level in ((OURS, ours), ("Model Analyzer", peers)) if level is None]
        return f"No ratio: at no load measured again does the winner of {' or of '.join(missing)} meet the bound."
    ratio, ratios = ours.throughput / peers.throughput, round_ratios(ours, peers)
    equal = "yes" if ratio >= 1 else "within noise (the rounds disagree)" if max(ratios) >= 1 else "no"
    return (
        f"tune's winner over Model Analyzer's, each at its best load: **{ratio:.2f}x** "
        f"(by round {min(ratios):.2f}x to {max(ratios):.2f}x). At least equal: {equal}."
    )


def met(yes: bool) -> str:
    return "met" if yes else "missed"


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
