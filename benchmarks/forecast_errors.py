"""Compare the search's forecasts with its measurements: error, and coverage of the intervals, for each model.

    python benchmarks/forecast_errors.py [RUN|TABLE.csv ...] [--tune FOLDER] [--passes 3] > forecast_errors.md

A RUN is the folder of a finished run. A TABLE is searched under three bounds; trials.csv of `tune sweep` is one.
``--tune FOLDER`` first makes a run for each of MODELS in FOLDER, without confirmation; a repeated command keeps those
that are there. The recorded tables (tables/recordings/) are searched
under three bounds, each pass as a table of its own, so that its noise is that of single measurements.

The forecast of a measurement is computed again from the trials before its own, as the run did, at the speed that the
probe of its deployment shows. A warm start is not repeated. Only stable measurements at a concurrency count. Targets:
intervals of 80 % and 95 % cover 75 to 85 % and 92 to 98 % of the measurements. Prints Markdown; progress goes to
standard error.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lib.bounded_tables import bound_ms, feasible_shares
from lib.derived_tables import write_recordings
from lib.output import judged, measured_on, print_progress, print_title, row
from lib.recordings import PLANS, TABLES
from lib.tune_runs import TuneFailedError, run_tune
from objectives.metrics import LATENCY, METRICS
from optimizer.config.problem import Problem
from optimizer.core.budget import Budget
from optimizer.core.errors import TuneError
from optimizer.core.stopwatch import Stopwatch
from optimizer.core.trial import Trial
from optimizer.measure.measurer import Measurer
from optimizer.replay.replay import DiscardingRecord, recorded_problem
from optimizer.results.finished_run import read_run
from optimizer.results.progress_observers import QuietObserver
from optimizer.search import make_searcher
from optimizer.search.candidate_selector import fit_surrogate
from optimizer.store.recording import Recording, baselines, read_recording
from optimizer.store.run_folder import ENDED
from optimizer.study.scheduler import Scheduler
from optimizer.study.trial_runner import run_trials

MODELS = ("dlrm", "mlp", "bert-mini", "minilm-16", "text_recognition-small")
BUDGET = "3m"  # of a run of each of them
LEVELS = (0.5, 0.1, 0.9, 0.025, 0.975)  # the median, and the ends of the 80 % and of the 95 % interval
TARGETS = {"80 %": (0.75, 0.85), "95 %": (0.92, 0.98)}
PROOF = Path(__file__).with_name("simulator_proof.md")
MAX_TRIALS = 30
COLUMNS = (
    *("model", "source", "searches", "measurements"),
    *("throughput: median error", "in 80 %", "in 95 %"),
    *("latency: median error", "in 80 %", "in 95 %"),
)


@dataclass(frozen=True)
class Check:
    """A measured value and the quantiles of its forecast, at LEVELS."""

    measured: float
    quantiles: tuple[float, ...]

    @property
    def error(self) -> float:
        """The relative error of the median."""
        return abs(self.quantiles[0] / self.measured - 1)

    def is_inside(self, interval: int) -> bool:
        """Return whether the value is in the 80 % interval (0) or in the 95 % interval (1)."""
        low, high = self.quantiles[1 + 2 * interval : 3 + 2 * interval]
        return low <= self.measured <= high


@dataclass(frozen=True)
class SearchChecks:
    """The checks of throughput and latency of one search on ``model``; ``source`` is ``run`` or ``table``."""

    model: str
    source: str
    throughput: list[Check]
    latency: list[Check]


def main() -> None:
    arguments = _arguments()
    given = list[Path](arguments.runs)
    folders = [path for path in given if path.suffix != ".csv"]
    folders += _made_runs(arguments.tune) if arguments.tune else []
    searches = [*map(_of_run, folders), *_of_tables(arguments.passes)]
    for table in given:
        if table.suffix == ".csv":
            searches += _of_table(table, table.stem, 0)
    print_title("Forecasts of the search: latest measurement")
    print("\n".join(report(searches, _proof_errors())))
    print(f"\n{measured_on()}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="folder of a finished run, or a table")
    parser.add_argument("--tune", type=Path, metavar="FOLDER", help=f"make runs of {', '.join(MODELS)} in it first")
    parser.add_argument(
        "--passes", type=int, default=3, metavar="N", help="passes of each recorded table, 0 to 3 (3)"
    )
    return parser.parse_args()


# -- searches -----------------------------------------------------------------------------------------------------


def _made_runs(folder: Path) -> list[Path]:
    """Return the folder of a finished run of each of MODELS; the run is made if there is none."""
    runs = []
    for model in MODELS:
        earlier = [path.parent for path in sorted(folder.glob(f"{model}/*/run.json"))]
        made = [run for run in earlier if read_run(run).status in ENDED]
        if not made:
            print_progress(f"tune {model}")
            try:
                made = [run_tune(["--budget", BUDGET, "--no-confirmation", model], folder).folder]
            except TuneFailedError as error:
                sys.exit(f"{error}\nRepeat the command to continue; what is done is in {folder}")
        runs.append(made[-1])
    return runs


def _of_run(folder: Path) -> SearchChecks:
    try:
        run = read_run(folder)
    except TuneError as error:
        sys.exit(str(error))
    print_progress(f"run {folder}")
    return checks(run.problem.model, "run", run.problem, run.trials, run.options.seed)


def _of_tables(passes: int) -> Iterator[SearchChecks]:
    """Yield the checks of each pass of each recorded table, under each of its bounds."""
    with tempfile.TemporaryDirectory() as scratch:
        for path in sorted(TABLES.glob("*.csv")):
            for number in range(min(passes, PLANS[path.stem].passes)):
                table = Path(scratch, f"{path.stem}_{number}.csv")
                write_recordings(path.stem, [number], table)
                yield from _of_table(table, path.stem, number)


def _of_table(table: Path, name: str, seed: int) -> Iterator[SearchChecks]:
    """Yield the checks of a table under each of its bounds; ``name`` is that of its model."""
    try:
        recording = read_recording(table)
    except TuneError as error:
        sys.exit(str(error))
    for share in feasible_shares(name).values():
        problem = recorded_problem(recording, {"p95": bound_ms(recording, share)})
        print_progress(f"{table.stem}, p95 <= {min(problem.sla.bounds_ms(LATENCY)):g} ms")
        yield checks(name, "table", problem, search(recording, problem, seed), seed)


def search(recording: Recording, problem: Problem, seed: int) -> list[Trial]:
    """Return the trials of the default search on a recorded table."""
    server = recording.server
    searcher, budget = make_searcher("simulated", problem, seed), Budget(math.inf, MAX_TRIALS)
    scheduler = Scheduler(problem, searcher, budget, Stopwatch(), baselines(problem.space))
    return run_trials(scheduler, server, Measurer(server, server, DiscardingRecord(), QuietObserver()))


def checks(model: str, source: str, problem: Problem, trials: Sequence[Trial], seed: int) -> SearchChecks:
    """Return the checks of all stable measurements in ``trials``, each forecast from the trials before its own."""
    throughputs, latencies = list[Check](), list[Check]()
    ordered = sorted(trials, key=lambda trial: trial.number)
    for place, trial in enumerate(ordered):
        measured = [(load.concurrency, m) for load, m in trial.measurements if load.concurrency and m.stable]
        if not measured:
            continue
        try:
            surrogate = fit_surrogate(problem, ordered[:place], seed)
        except ValueError:  # nothing was measured before
            continue
        for concurrency, measurement in measured:
            throughput = measurement.throughput_infer_per_sec
            latency_ms = METRICS[surrogate.latency].value(measurement)
            if not throughput or not latency_ms:
                continue
            cell = problem.space.canonical(trial.candidate), concurrency
            try:
                forecast = surrogate.measurement_quantiles([cell], LEVELS, measurement.speed_probe_ms)
            except ValueError:  # its batches are larger than those of the space
                continue
            of_throughput, of_latency = (tuple(quantiles[:, 0].tolist()) for quantiles in forecast)
            throughputs.append(Check(throughput, of_throughput))
            latencies.append(Check(latency_ms / 1e3, of_latency))
    return SearchChecks(model, source, throughputs, latencies)


# -- report -------------------------------------------------------------------------------------------------------


def report(searches: Sequence[SearchChecks], proof: tuple[str, str]) -> list[str]:
    """Return the table in Markdown, and whether the targets are met over all runs and over all tables."""
    groups: dict[tuple[str, str], list[SearchChecks]] = {}
    for one in searches:
        if one.throughput:
            groups.setdefault((one.model, one.source), []).append(one)
    lines = [row(*COLUMNS), "| :-- | :-- |" + " --: |" * (len(COLUMNS) - 2)]
    lines += [row(*group, *_cells(own)) for group, own in groups.items()]
    totals: dict[str, list[SearchChecks]] = {}
    for (_, source), own in groups.items():
        totals.setdefault(source, []).extend(own)
    lines += [row("**all**", source, *_cells(own)) for source, own in totals.items()]
    lines += [
        "",
        "*In 80 %* is the share of the measurements that are within the 80 % interval. An error is relative to the",
        "measurement. For comparison: the simulation of a model that sleeps for known times has mean errors of",
        f"{proof[0]} in throughput and {proof[1]} in p95 ([simulator_proof.md](simulator_proof.md)). It is fitted to",
        "more measurements, and its service times are simpler.",
        "",
        "Targets for the coverage:",
        "",
    ]
    for source, own in totals.items():
        for metric, of_metric in _by_metric(own).items():
            for interval, (name, (least, most)) in enumerate(TARGETS.items()):
                share = _coverage(of_metric, interval)
                verdict = judged(least <= share <= most)
                lines.append(f"- {source}s, {metric}, {name}: {share:.1%} ({least:.0%} to {most:.0%}: {verdict})")
    return lines


def _cells(searches: Sequence[SearchChecks]) -> list[str]:
    by_metric = _by_metric(searches)
    cells = [f"{len(searches)}", f"{len(by_metric['throughput']):,}"]
    for of_metric in by_metric.values():
        cells.append(f"{statistics.median(check.error for check in of_metric):.1%}")
        cells += [f"{_coverage(of_metric, interval):.0%}" for interval in range(len(TARGETS))]
    return cells


def _by_metric(searches: Sequence[SearchChecks]) -> Mapping[str, list[Check]]:
    return {
        "throughput": [check for one in searches for check in one.throughput],
        "latency": [check for one in searches for check in one.latency],
    }


def _coverage(of_metric: Sequence[Check], interval: int) -> float:
    return statistics.fmean(check.is_inside(interval) for check in of_metric)


def _proof_errors() -> tuple[str, str]:
    """Return the mean errors of throughput and p95 that simulator_proof.py has written."""
    match = re.search(r"throughput MAPE ([\d.]+)% · p95 MAPE ([\d.]+)%", PROOF.read_text())
    if match is None:
        sys.exit(f"{PROOF}: states no errors; run benchmarks/simulator_proof.py --predict-only first")
    return f"{match[1]} %", f"{match[2]} %"


if __name__ == "__main__":
    main()
