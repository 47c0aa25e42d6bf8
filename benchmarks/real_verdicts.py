"""Run tune many times on a quiet machine and next to a process that takes a core, and check each PASS at once.

    python benchmarks/real_verdicts.py [--runs 10] [--only MODEL CONDITION ...] [--budget 90s]
                                      [--work FOLDER] [--smoke]
    python benchmarks/real_verdicts.py --rows benchmarks/real_verdicts_epyc.runs

Runs `tune --sla-p95 20ms dlrm` and `tune --sla-p95 5ms mlp`, each ``--runs`` times on the machine as it is, as
often next to a process that takes one core for 0.1 s of every 0.3 s (disturbed), and as often next to one that takes
a core for 1 to 8 s at once and half of the time (irregular). Each round has one run of each kind, in an
order that --seed fixes. Each PASS is measured again at once, under the same disturbance, by perf_analyzer on three
plain servers: new tritonserver processes that load the config.pbtxt that tune wrote, 10 s of load each, at tune's
load.

The share of requests over the bound is read from perf_analyzer's quantiles of these 10 s. Its launch has three
windows, and the quantiles p50, p90, p95 and p99 in its CSV are those of all their requests. The logarithm of the
share is interpolated linearly between them, as in tune's search. So a share is over 5 % exactly if perf_analyzer's
p95 is over the bound, and between 1 % and 5 % the interpolation is on the right side of both ends. Beyond p99 the
last slope continues. Exports of single requests are not used, because writing them takes CPU time from the server.

Each run is one line of FOLDER/runs.jsonl, and its results folder is below FOLDER/results. A repeated command
continues where it ended, and prints the tables (Markdown) if nothing is left to do. A folder holds runs of one
machine only. With --rows, the tables of the rows in a file are printed on any machine, and nothing is run.

Targets: at least nine of ten runs PASS within the default budget; the median wall time of the quiet dlrm runs is at
most 3 minutes; tune's own time is at most 2 %, its ranking at most 4 %, its memory below 300 MB.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lib.disturbance import IRREGULAR, REGULAR, disturbed
from lib.idle_machine import CpuUsage
from lib.intervals import Interval, pooled_share, run_shares
from lib.output import head, judged, print_progress, row
from lib.plain_server import NotReadyError, perf_analyzer_for, plain_server, recorded_cpus
from lib.records import Records, this_machine
from lib.tune_runs import MOST_WALL_SECONDS, OwnTime, TuneFailedError, TuneRun, own_time_table, run_tune
from lib.verdict_runs import LEVEL, PASS, WORK, Remeasured, RunKind, VerdictRun, bounded_task, read_runs
from objectives.metrics import Measurement
from objectives.verdict import count_misses
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import TuneError
from optimizer.core.trial import LoadPoint
from optimizer.deploy import runtime
from optimizer.deploy.server_process import remove_leftovers
from optimizer.machine.speed_probe import SpeedProbe, probe_speed
from optimizer.measure.perf_analyzer import PerfAnalyzer
from optimizer.simulator.simulate import compile_simulator
from optimizer.study.task import Task

BOUNDS_MS = {"dlrm": 20.0, "mlp": 5.0}  # model -> bound on p95; at most 32 in flight, the mlp never misses 10 ms here
RUNS, SERVERS, LOAD_SECONDS = 10, 3, 10.0
SMOKE_BUDGET, SMOKE_LOAD_SECONDS, SMOKE_BOUND_MS = "60s", 2.0, 50.0  # a busy machine meets this bound, too
LEAST_PASS_SHARE = 0.9
CONDITIONS = {"quiet": None, "disturbed": REGULAR, "irregular": IRREGULAR}
COLUMNS = (
    *("runs", "PASS", "other ends", "wall s, median (longest)", "infer/s of PASS, median", "CV of it", "in flight"),
    *("share over the bound, pooled", "worst run", "runs over 5 %", "speed, slowest over fastest"),
)
RUN_COLUMNS = (
    *("runs", "seed", "verdict", "wall s", "CPU share of others", "max_batch_size", "delay µs", "instances"),
    *("in flight", "infer/s", "share over the bound, measured again", "p95 ms on each plain server"),
)


RUN_KINDS = tuple(RunKind(model, condition) for model in BOUNDS_MS for condition in CONDITIONS)


def main() -> None:
    arguments = _arguments()
    if arguments.rows:
        rows = Records(arguments.rows, VerdictRun).read()
        print("\n".join(report(rows, rows[0].machine if rows else "")))
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    work = (arguments.work or (WORK.with_name(f"{WORK.name}_smoke") if arguments.smoke else WORK)).absolute()
    machine, records = this_machine(), read_runs(work)
    done = {(run.kind, run.number) for run in records.read(machine)}
    wanted = [(number, kind) for number, kind in order(arguments.runs, arguments.seed) if _is_wanted(kind, arguments)]
    left = [(number, kind) for number, kind in wanted if (kind, number) not in done]
    bounds_ms = dict.fromkeys(BOUNDS_MS, SMOKE_BOUND_MS) if arguments.smoke else BOUNDS_MS
    bench = Bench(work, machine, bounds_ms, arguments.budget, smoke=arguments.smoke)
    try:
        if left:
            bench.prepare({kind.model for _, kind in left})
        for place, (number, kind) in enumerate(left, 1):
            print_progress(f"{place} of {len(left)}: {kind}, seed {number}")
            records.append(bench.run(kind, number))
    except (TuneFailedError, NotReadyError, TuneError) as error:
        sys.exit(f"{error}\nRepeat the command to continue; what is done is in {work}")
    except KeyboardInterrupt:
        sys.exit(f"interrupted; repeat the command to continue; what is done is in {work}")
    finally:
        remove_leftovers()
    print("\n".join(report(records.read(machine), machine)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, help=f"runs of each model under each condition ({RUNS})")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        choices=(*BOUNDS_MS, *CONDITIONS),
        metavar="WORD",
        help="only these models or conditions: dlrm, mlp, quiet, disturbed, irregular (all)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of the runs (0)")
    parser.add_argument("--budget", metavar="TIME", help="budget of each run; use a folder of its own (that of tune)")
    parser.add_argument("--work", type=Path, help=f"folder of all results ({WORK})")
    parser.add_argument(
        "--rows", type=Path, metavar="FILE", help="print the tables of the rows in FILE and run nothing"
    )
    parser.add_argument("--smoke", action="store_true", help="check that everything works: two short runs of mlp")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.only = [*arguments.only, "mlp"]
    arguments.runs = arguments.runs or (1 if arguments.smoke else RUNS)
    arguments.budget = arguments.budget or (SMOKE_BUDGET if arguments.smoke else None)
    return arguments


def _is_wanted(kind: RunKind, arguments: argparse.Namespace) -> bool:
    words = set(arguments.only)
    models, conditions = words & set(BOUNDS_MS), words & set(CONDITIONS)
    return kind.model in (models or BOUNDS_MS) and kind.condition in (conditions or CONDITIONS)


def order(runs: int, seed: int) -> Iterator[tuple[int, RunKind]]:
    """Yield (number, kind) of all runs: each number has one run of each kind, in random order."""
    chooser = random.Random(seed)
    for number in range(runs):
        kinds = list(RUN_KINDS)
        chooser.shuffle(kinds)
        yield from ((number, kind) for kind in kinds)


# -- running ------------------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """Runs tune below ``work`` and measures its recommendations again.

    Attributes:
        work: Folder of all results.
        machine: What ``this_machine`` returns.
        bounds_ms: Bound on p95 of each model.
        budget: Budget of each run; None for the default of tune.
        smoke: Take short loads, and measure also a recommendation that did not pass.
    """

    work: Path
    machine: str
    bounds_ms: Mapping[str, float]
    budget: str | None = None
    smoke: bool = False

    def __post_init__(self) -> None:
        self._tasks: dict[str, Task] = {}
        self._speed = SpeedProbe()

    def prepare(self, models: Iterable[str]) -> None:
        """Do what tune does once on a machine: install the server, build the models and compile the simulator."""
        self._installed = runtime.ensure(print_progress)
        compile_simulator(print_progress)
        for model in models:
            self._tasks[model] = bounded_task(model, self.bounds_ms[model])

    def run(self, kind: RunKind, number: int) -> VerdictRun:
        """Run tune with the seed ``number``, and measure a PASS again. ``prepare`` was called before.

        Raises TuneFailedError, NotReadyError, MeasurementError.
        """
        out = self.work / "results" / f"{kind.model}-{kind.condition}-{number}"
        shutil.rmtree(out, ignore_errors=True)  # of a run that was killed
        started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        bound_ms = self.bounds_ms[kind.model]
        options = ["--budget", self.budget] if self.budget else []
        words = ["--sla-p95", f"{bound_ms:g}ms", "--json", "--seed", str(number), *options, kind.model]
        (self.work / "results").mkdir(parents=True, exist_ok=True)
        with disturbed(self.work / "disturbance.log", CONDITIONS[kind.condition]):
            ended = run_tune(words, out)
            result, config = ended.result, ended.folder / "best" / "config.pbtxt"
            run = VerdictRun(
                model=kind.model,
                condition=kind.condition,
                number=number,
                machine=self.machine,
                bound_ms=bound_ms,
                started=started,
                verdict=ended.verdict,
                exit_code=ended.exit_code,
                wall_seconds=round(ended.wall_seconds, 3),
                others_share=round(ended.others_share, 4),
                times=ended.info["times"],
                recommended=result["recommended"],
                dynamic_batching=result["dynamic_batching"],
                confirmation=result["confirmation"],
                config=config.read_text() if config.exists() else "",
                remeasured=(),
            )
            print_progress(f"{kind}, seed {number}: {run.verdict} after {run.wall_seconds:.0f} s")
            if not (run.has_passed or (self.smoke and run.recommended)):
                return run
            return replace(run, remeasured=tuple(self._measure(run, ended) for _ in range(SERVERS)))

    def _measure(self, run: VerdictRun, ended: TuneRun) -> Remeasured:
        """Measure the recommendation on one plain server."""
        assert run.recommended is not None
        own_task, installed = self._tasks[run.model], self._installed
        server_cpus, client_cpus = (recorded_cpus(ended.info[f"{name}_cpu_list"]) for name in ("server", "client"))
        load = LoadPoint(run.recommended["request_batch_size"], concurrency=run.recommended["concurrency"])
        with tempfile.TemporaryDirectory() as scratch:
            perf_analyzer = perf_analyzer_for(own_task, installed, Path(scratch, "perf_analyzer.log"), client_cpus)
            log = Path(scratch, "server.log")
            with plain_server(own_task, run.config, installed, log, server_cpus) as endpoint:
                return self._load(perf_analyzer, endpoint, load, run.bound_ms)

    def _load(self, perf_analyzer: PerfAnalyzer, endpoint: Endpoint, load: LoadPoint, bound_ms: float) -> Remeasured:
        perf_analyzer.warm_up(endpoint, load)
        probe_before = probe_speed(self._speed.seconds)
        before = CpuUsage.now()
        measured = perf_analyzer.measure(endpoint, load, SMOKE_LOAD_SECONDS if self.smoke else LOAD_SECONDS)
        others_share = CpuUsage.now().others_since(before)
        probes_ms = (round(1000 * probe_before, 3), round(1000 * probe_speed(self._speed.seconds), 3))
        share = share_over(measured, bound_ms)
        p95_ms, p99_ms = measured.latency_p95_ms or 0.0, measured.latency_p99_ms or 0.0
        print_progress(f"  plain server: {share:.2%} over {bound_ms:g} ms, p95 {p95_ms:.1f} ms")
        return Remeasured(
            round(share, 6),
            measured.requests or 0,
            measured.throughput_infer_per_sec or 0.0,
            p95_ms,
            p99_ms,
            probes_ms,
            round(others_share, 4),
        )


def share_over(measured: Measurement, bound_ms: float) -> float:
    """Return the share of requests over ``bound_ms``, interpolated between the quantiles of perf_analyzer."""
    return count_misses([[measured]], bound_ms, LEVEL).share


# -- report -------------------------------------------------------------------------------------------------------


def report(runs: Sequence[VerdictRun], machine: str) -> list[str]:
    """Return the tables in Markdown."""
    groups = {str(kind): [run for run in runs if run.kind == kind] for kind in RUN_KINDS}
    groups = {name: own for name, own in groups.items() if own}
    if not groups:
        return ["no runs"]
    passed, least = sum(run.has_passed for run in runs), math.ceil(LEAST_PASS_SHARE * len(runs))
    lines = head("", *COLUMNS)
    lines += [row(name, *_figures(own)) for name, own in groups.items()]
    lines += ["", f"- PASS: {passed} of {len(runs)} (at least {least}: {judged(passed >= least)})"]
    if quiet := groups.get(str(RunKind("dlrm", "quiet"))):
        median = statistics.median(run.wall_seconds for run in quiet)
        lines.append(
            f"- quiet dlrm: {median:.0f} s in the median (at most {MOST_WALL_SECONDS:.0f} s: "
            f"{judged(median <= MOST_WALL_SECONDS)})"
        )
    lines += ["", "**Each run**", "", *head(*RUN_COLUMNS)]
    lines += [row(*cells) for own in groups.values() for cells in _run_cells(own)]
    lines += ["", "**tune's own time**", ""]
    own_times = {name: [OwnTime.of(run.wall_seconds, run.times) for run in own] for name, own in groups.items()}
    lines += own_time_table(own_times)
    days = sorted(run.started[:10] for run in runs)
    bounds = ", ".join(sorted({f"{run.model} p95 <= {run.bound_ms:g} ms" for run in runs}))
    lines += ["", f"{bounds}; intervals at 95 %; {machine}; {' to '.join(dict.fromkeys((days[0], days[-1])))}"]
    return lines


def _figures(runs: Sequence[VerdictRun]) -> list[str]:
    """Return the cells below COLUMNS."""
    passed = [run for run in runs if run.has_passed]
    others = sorted({run.verdict for run in runs} - {PASS})
    ends = ", ".join(f"{sum(run.verdict == end for run in runs)} {end}" for end in others) or "none"
    walls = [run.wall_seconds for run in runs]
    figures = [
        f"{len(runs)}",
        f"{len(passed)}",
        ends,
        f"{statistics.median(walls):.0f} ({max(walls):.0f})",
    ]
    if not passed:
        return [*figures, *["–"] * (len(COLUMNS) - len(figures))]
    entries = [run.recommended for run in passed if run.recommended is not None]
    throughputs = [float(entry["throughput_infer_per_sec"]) for entry in entries]
    in_flight = [int(entry["concurrency"]) for entry in entries]
    variation = statistics.stdev(throughputs) / statistics.fmean(throughputs) if len(passed) > 1 else None
    shares = [run.shares for run in passed]
    worst = max(run_shares(shares), key=lambda interval: interval.estimate)
    over = [interval for interval in run_shares(shares) if interval.estimate > 1 - LEVEL]
    surely = sum(interval.low > 1 - LEVEL for interval in over)
    probes_ms = [probe for run in passed for server in run.remeasured for probe in server.probes_ms]
    return [
        *figures,
        f"{statistics.median(throughputs):,.0f}",
        "–" if variation is None else f"{variation:.1%}",
        f"{min(in_flight)} to {max(in_flight)}",
        _percent(pooled_share(shares)),
        _percent(worst),
        f"{len(over)}, {surely} beyond their intervals",
        f"{max(probes_ms) / min(probes_ms):.2f}",
    ]


def _run_cells(runs: Sequence[VerdictRun]) -> Iterator[list[str]]:
    """Yield the cells below RUN_COLUMNS of each run of one kind."""
    shares = iter(run_shares([run.shares for run in runs if run.has_passed]))
    for run in sorted(runs, key=lambda run: not run.has_passed):
        best = run.recommended or {}
        names = ("max_batch_size", "max_queue_delay_us", "instance_count", "concurrency")
        throughput = best.get("throughput_infer_per_sec")
        yield [
            str(run.kind),
            f"{run.number}",
            run.verdict,
            f"{run.wall_seconds:.0f}",
            f"{run.others_share:.0%}",
            *(str(best.get(name, "–")) for name in names),
            "–" if throughput is None else f"{throughput:,.0f}",
            _percent(next(shares)) if run.has_passed else "–",
            ", ".join(f"{server.latency_p95_ms:.1f}" for server in run.remeasured) or "–",
        ]


def _percent(interval: Interval) -> str:
    return interval.text(".2%")


if __name__ == "__main__":
    main()
