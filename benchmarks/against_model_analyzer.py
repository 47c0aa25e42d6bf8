"""Compare tune with Model Analyzer's quick mode: same model, server, load generator, requests, bound and machine.

    python benchmarks/against_model_analyzer.py [MODEL ...] [--out FOLDER] [--rounds 5] [--work FOLDER]

For each model (a built-in model or a profile) the steps are: tune as a user runs it; Model Analyzer 1.58 in an
environment of its own; tune again with windows as long as Model Analyzer's were; and both winners again, in turn, by
the same independent perf_analyzer runs. Environments and models are prepared before any clock starts.

Prints Markdown tables and stores them in --out with all logs, results and launches. A search that is already there
with the same settings is not repeated. Targets: the search takes at most a tenth of the peer's wall time, with the
confirmation of the winner at most a third, and at most a fifth of the peer's wall time plus that of the same
confirmation. The winner is no worse.
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
from pydantic import TypeAdapter
from tritonclient.grpc.model_config_pb2 import ModelConfig

from lib.measured_model import prepare_model
from lib.output import head, judged, print_progress, row
from lib.records import programs
from lib.tune_runs import TuneFailedError, run_tune
from model_analyzer_runs import quick_mode
from model_analyzer_runs.remeasure import WINDOW_MS, Level, best_level, levels, measure_in_turn, round_ratios
from model_analyzer_runs.search_cost import SearchCost, StatedResult
from optimizer.config import model_config
from optimizer.core.files import cache_folder
from optimizer.core.measurement_windows import FIRST_WINDOW_MS
from optimizer.deploy import runtime
from optimizer.deploy.server_process import remove_leftovers
from optimizer.machine import hardware
from optimizer.options.run_options import RunOptions
from optimizer.study.task import Task

MODELS = ("dlrm", "benchmarks/tables/mlp.yaml")
OURS = "tune"
WINDOW_OVER_INTERVAL = 1.2  # perf_analyzer's windows last a fifth longer than its --measurement-interval
# required ratios of wall times
SEARCH_TARGET, CONFIRMED_TARGET, BOTH_CONFIRMED_TARGET = 10, 3, 5


@dataclass(frozen=True)
class Settings:
    """The settings that all models share."""

    rounds: int
    window_ms: int
    tune_options: tuple[str, ...]
    interval_ms: int | None  # of tune's second row; None: as long as Model Analyzer's windows
    smoke: bool


@dataclass(frozen=True)
class ModelComparison:
    """All results for one model."""

    model: str
    task: Task
    sla_ms: float
    bounds: quick_mode.Bounds
    searches: tuple[SearchCost, ...]  # tune's, Model Analyzer's, and tune's with windows as long as Model Analyzer's
    levels: tuple[Level, ...]


def main() -> None:
    options = arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = options.out or Path("results", "against_model_analyzer", time.strftime("%Y%m%d-%H%M%S"))
    out = folder.absolute()  # the peer's processes have folders of their own
    settings = Settings(
        rounds=2 if options.smoke else options.rounds,
        window_ms=250 if options.smoke else WINDOW_MS,
        tune_options=(
            *shlex.split(options.tune),
            *(("--budget", "20s", "--max-trials", "4") if options.smoke else ()),
        ),
        interval_ms=options.measurement_interval,
        smoke=options.smoke,
    )
    work = (options.work or cache_folder() / "peers").absolute()
    try:
        runtime.ensure(print_progress)
        home = quick_mode.install(work, print_progress)
        tasks = {name: prepare(name) for name in options.models or (MODELS[1:] if options.smoke else MODELS)}
        out.mkdir(parents=True, exist_ok=True)
        text = "\n".join([heading(), *(section(compare(n, t, settings, home, out)) for n, t in tasks.items())])
    except KeyboardInterrupt:
        sys.exit(f"interrupted; what is done is in {folder}")
    finally:
        remove_leftovers()  # shared memory of a tune that was killed
    (out / "against_model_analyzer.md").write_text(text)
    print(text)
    print_progress(f"kept in {folder}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of all results (results/against_model_analyzer/TIME)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds in which both winners are measured again (5)")
    parser.add_argument("--work", type=Path, help="folder of the peer's environment (in tune's cache folder)")
    parser.add_argument("--tune", default="", metavar="OPTIONS", help='further options of tune, such as "--seed 1"')
    parser.add_argument(
        "--measurement-interval",
        type=int,
        metavar="MS",
        help="window of tune's second row (the peer's median window)",
    )
    parser.add_argument(
        "--smoke", action="store_true", help="check that everything works, with a tiny space and short windows"
    )
    parser.add_argument("models", nargs="*", help=f"model names or profiles ({' '.join(MODELS)})")
    return parser.parse_args()


def prepare(model: str) -> Task:
    return prepare_model(RunOptions(model))


# -- running ----------------------------------------------------------------------------------------------------


def compare(model: str, task: Task, settings: Settings, home: Path, out: Path) -> ModelComparison:
    """Run all searches of one model, one after the other, and measure the winners again."""
    sla_ms = sla(model, task)
    bounds = quick_mode.Bounds.of(task)
    if settings.smoke:
        bounds = replace(bounds, most_batch=bounds.least_batch, most_instances=1, most_concurrency=4, sweeps=1)
    folder = out / re.sub(r"[^\w.-]+", "-", model)
    folder.mkdir(exist_ok=True)
    fixed = {"model": model, "facts": task.source.facts, "sla_ms": sla_ms}
    options = list(settings.tune_options)

    def ours(name: str, place: Path, interval_ms: int | None) -> SearchCost:
        own = options if interval_ms is None else [*options, "--measurement-interval", f"{interval_ms}ms"]
        return kept(place, {**fixed, "options": own}, lambda: tune(name, model, sla_ms, own, interval_ms, place))

    first = ours(OURS, folder / "tune", None)
    peers_folder = folder / "model_analyzer"
    peers = kept(
        peers_folder,
        {**fixed, "version": quick_mode.VERSION, "bounds": asdict(bounds)},
        lambda: quick_mode.search(home, task, bounds, sla_ms, peers_folder),
    )
    interval_ms = settings.interval_ms or round(1000 * peers.window_seconds / WINDOW_OVER_INTERVAL)
    second = ours(f"{OURS}, windows as long as Model Analyzer's", folder / "tune_long", interval_ms)
    winners = {search.name: search.found for search in (first, peers) if search.found is not None}
    samples = measure_in_turn(
        task,
        winners,
        rounds=settings.rounds,
        window_ms=settings.window_ms,
        table=folder / "measured_again.csv",
        on_progress=print_progress,
    )
    return ModelComparison(model, task, sla_ms, bounds, (first, peers, second), tuple(levels(samples)))


def sla(model: str, task: Task) -> float:
    """Return the profile's bound on p95, which both tools get."""
    for bound in task.problem.sla:
        if bound.metric == "latency-p95":
            return float(bound.bound)
    sys.exit(f"{model}: its profile has no bound on p95 (sla: {{p95: 20ms}})")


def kept(folder: Path, settings: dict[str, Any], search: Callable[[], SearchCost]) -> SearchCost:
    """Return the stored search of these settings from ``folder``, or a new one."""
    record, form = folder / "search.json", TypeAdapter(SearchCost)
    plain = json.loads(json.dumps(settings))
    if record.exists() and (before := json.loads(record.read_text()))["settings"] == plain:
        print_progress(f"{folder.parent.name}: {folder.name} is stored already; not repeated")
        return form.validate_python(before["search"])
    folder.mkdir(exist_ok=True)
    print_progress(f"{folder.parent.name}: {folder.name} runs")
    result = search()
    record.write_text(json.dumps({"settings": plain, "search": asdict(result)}, indent=2) + "\n")
    return result


def tune(
    name: str, model: str, sla_ms: float, options: list[str], interval_ms: int | None, folder: Path
) -> SearchCost:
    """Run ``tune --sla-p95 N MODEL`` as a user does."""
    seed = [] if "--seed" in options else ["--seed", "0"]
    try:
        run = run_tune(["--sla-p95", f"{sla_ms:g}ms", "--json", *seed, *options, model], folder)
    except TuneFailedError as error:
        sys.exit(str(error))
    times, result = run.info["times"], run.result
    best = result["recommended"]
    return SearchCost(
        name=name,
        wall_seconds=run.wall_seconds,
        confirm_seconds=times["confirm_seconds"],
        server_seconds=times["server_seconds"],
        load_generator_seconds=times["load_generator_seconds"],
        configurations=result["trials"],
        measurements=result["measurements"],
        launches=None,
        window_seconds=WINDOW_OVER_INTERVAL * (interval_ms or FIRST_WINDOW_MS) / 1000,
        others_share=run.others_share,
        found=best
        and StatedResult(
            config=(run.folder / "best" / "config.pbtxt").read_text(),
            concurrency=best["concurrency"],
            throughput_infer_per_sec=best["throughput_infer_per_sec"],
            latency_p95_ms=best["latency_p95_ms"],
        ),
    )


# -- report -----------------------------------------------------------------------------------------------------


def heading() -> str:
    machine = hardware.detect()
    return (
        f"{machine.cpu}, {machine.cpu_count} cores; {time.strftime('%Y-%m-%d %H:%M')}; {programs()}; "
        f"Python {runtime.running_python()}; Model Analyzer {quick_mode.VERSION}; "
        f"`{shlex.join(['python', *sys.argv])}`\n"
    )


def section(comparison: ModelComparison) -> str:
    ours, peers, second = comparison.searches
    problem = comparison.task.problem
    lines = [
        f"## {comparison.model}: p95 at most {comparison.sla_ms:g} ms, requests of {problem.request_batch_size}",
        "",
        *search_table(comparison.searches),
        "",
        *(line for one in (ours, second) for line in faster(one, peers)),
        "",
        f"Model Analyzer's space: {comparison.bounds}, dynamic batching on; it has no queue delay, preferred sizes "
        f"or threads. tune's: {len(problem.space):,} configurations, concurrency up to {problem.max_concurrency}.",
        "",
        *winners_table(comparison),
        "",
        *measured_again(comparison),
        "",
    ]
    return "\n".join(lines)


def search_table(searches: Sequence[SearchCost]) -> list[str]:
    columns = [
        *("search s", "with confirmation s", "server s", "load generator s", "rest s"),
        *("configurations", "measurements", "perf_analyzer runs", "window s", "CPU share of others"),
    ]
    lines = head("", *columns)
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


def faster(ours: SearchCost, peers: SearchCost) -> list[str]:
    """Return the ratios of the peer's wall time, whose search ends without a confirmation, to tune's."""
    ratios = [("search", peers.wall_seconds / ours.search_seconds, SEARCH_TARGET)]
    if ours.confirm_seconds:
        confirmed = peers.wall_seconds + ours.confirm_seconds
        ratios += [
            ("with the winner's confirmation", peers.wall_seconds / ours.wall_seconds, CONFIRMED_TARGET),
            ("both with this confirmation", confirmed / ours.wall_seconds, BOTH_CONFIRMED_TARGET),
        ]
    lines = [
        f"- {ours.name}, {name}: **{ratio:.1f}x** less wall time (target {target}x {judged(ratio >= target)})"
        for name, ratio, target in ratios
    ]
    return lines if ours.confirm_seconds else [*lines, f"- {ours.name}: nothing was confirmed"]


def winners_table(comparison: ModelComparison) -> list[str]:
    lines = [row("winner, as its search reported it", "configuration", "concurrency", "infer/s", "p95 ms")]
    lines.append("| :-- | :-- | --: | --: | --: |")
    for one in comparison.searches:
        if one.found is None:
            lines.append(row(one.name, "none meets the bound", "-", "-", "-"))
            continue
        config = text_format.Parse(one.found.config, ModelConfig())
        candidate = model_config.candidate_of(config, tuple(comparison.task.problem.space.fields))
        throughput, p95_ms = one.found.throughput_infer_per_sec, one.found.latency_p95_ms
        lines.append(row(one.name, str(candidate), f"{one.found.concurrency}", f"{throughput:,.0f}", f"{p95_ms:.1f}"))
    return lines


def measured_again(comparison: ModelComparison) -> list[str]:
    """Return both winners at every load, and then the best ones compared."""
    lines = [row("measured again", "concurrency", "infer/s, median (range)", "p95 ms, median (range)", "")]
    lines.append("| :-- | --: | --: | --: | :-- |")
    ours, peers = (
        best_level(comparison.levels, search.name, comparison.sla_ms) for search in comparison.searches[:2]
    )
    for level in comparison.levels:
        throughputs = [sample.throughput for sample in level.samples]
        latencies = [sample.p95_ms for sample in level.samples]
        marks = (
            ["best"] if level in (ours, peers) else [] if level.p95_ms <= comparison.sla_ms else ["misses the bound"]
        )
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
        return (
            f"No ratio: the winner of {' and that of '.join(missing)} met the bound at no load when measured again."
        )
    ratio, ratios = ours.throughput / peers.throughput, round_ratios(ours, peers)
    equal = "yes" if ratio >= 1 else "within noise (the rounds disagree)" if max(ratios) >= 1 else "no"
    return (
        f"tune's winner over Model Analyzer's, each at its best load: **{ratio:.2f}x** "
        f"(by round {min(ratios):.2f}x to {max(ratios):.2f}x). At least equal: {equal}."
    )


if __name__ == "__main__":
    main()
