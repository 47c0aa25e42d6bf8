"""Record the exhaustive tables of tables/ on the real stack: every configuration at every load.

    python benchmarks/record_tables.py [dlrm mlp wide bert-mini ...]

A table is recorded in one of two ways. For a *quiet* table each cell is recorded three times for 1 s. The recordings
of a cell are a whole pass over all quiet tables apart, and each pass has its own order, so that no configuration
benefits from a single fast moment. A recording counts if the machine was fast before and after it (idle_machine.py);
otherwise it is repeated. For an *ungated* table each cell is recorded once for 2 s, whatever the machine does. Then a
fifth of the configurations is recorded again, on two servers one after the other, so that the recordings show how
much servers, moments and measurements differ.

A configuration that fails is tried again on a fresh server, and is entered as failed if it fails each time.
Recordings are appended to tables/recordings/ at once, so an interrupted command can be continued. At the end
tables/NAME.csv gets the median of each cell.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from lib.idle_machine import SlowdownMeter
from lib.measured_model import prepare_model
from lib.output import print_progress
from lib.recordings import PLANS, TABLES, RecordingPlan, median
from objectives.metrics import Measurement
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import DeploymentError, MeasurementError
from optimizer.core.interfaces import LoadGenerator, Target
from optimizer.core.trial import LoadPoint, Trial
from optimizer.deploy import runtime
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.target_settings import TargetSettings
from optimizer.measure.perf_analyzer import LocalRunner, PerfAnalyzer
from optimizer.options.run_options import RunOptions
from optimizer.store.trials_table import TrialsTable, read_run_table
from optimizer.study.task import Task

SLOW = 1.15  # times the shortest time of the fixed piece of work
ATTEMPTS = 4
LOADS = 4  # of each configuration: the profile's max_concurrency and its halves

Measured: TypeAlias = list[tuple[LoadPoint, Measurement]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", default=list(PLANS), help=f"tables to record: {', '.join(PLANS)} (all)"
    )
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in PLANS]
    if unknown:
        parser.error(f"no table is called {unknown[0]}: give some of {', '.join(PLANS)}")
    runtime.ensure(print_progress)
    for part in range(max(PLANS[name].parts for name in arguments.names)):
        for name in arguments.names:
            if part < PLANS[name].parts:
                record_part(name, part)
    for name in arguments.names:
        write_medians(name)


def record_part(name: str, part: int) -> None:
    """Make the recordings of a part of table ``name`` that are neither made nor failed."""
    task, plan = prepare(name), PLANS[name]
    table, loads = recordings(name, task), load_points(task)
    recorded = {trial.number: trial for trial in table.read()}
    trials = plan.trials(name, part, task.problem.space.candidates())
    missing = {trial: missing_loads(recorded.get(trial.number, trial), loads) for trial in trials}
    trials = [trial for trial in trials if missing[trial]]
    if not trials:
        return
    started = time.monotonic()
    with bench(task, plan) as used:
        for count, trial in enumerate(trials):
            try:
                for load, measurement in record(used, trial, missing[trial]):
                    table.append(trial, load, measurement)
            except DeploymentError as error:
                table.append_failure(trial.with_failure(error))
            except MeasurementError as error:
                table.append_failure(replace(trial, status="failed", reason=str(error)))
            seconds = time.monotonic() - started
            left = seconds / (count + 1) * (len(trials) - count - 1)
            print_progress(f"{name} part {part + 1}: {count + 1} of {len(trials)}, about {left / 60:.0f} min left")


def load_points(task: Task) -> list[LoadPoint]:
    """Return the loads of a table, ascending."""
    most = task.problem.max_concurrency
    return [LoadPoint(task.problem.request_batch_size, most >> halvings) for halvings in reversed(range(LOADS))]


def missing_loads(recorded: Trial, loads: Sequence[LoadPoint]) -> list[LoadPoint]:
    """Return the loads that are not measured yet; none if the configuration failed."""
    return [load for load in loads if recorded.status == "ok" and load not in dict(recorded.measurements)]


def record(used: Bench, trial: Trial, loads: Sequence[LoadPoint]) -> Measured:
    """Measure one deployment at ``loads``.

    After a failure the next attempt has a fresh server. Raises the last DeploymentError or MeasurementError if all
    attempts failed.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return used.measure(trial.candidate, loads)
        except (DeploymentError, MeasurementError) as error:
            print_progress(f"{trial.candidate}: {error} (attempt {attempt} of {ATTEMPTS})")
            used.renew()
            if attempt == ATTEMPTS:
                raise
    raise AssertionError("unreachable")


class Bench:
    """A server and a load generator. ``make_target`` creates a new server after a failure."""

    def __init__(
        self,
        make_target: Callable[[], Target],
        load_generator: LoadGenerator,
        slowdown_meter: SlowdownMeter | None = None,
    ) -> None:
        self._make_target = make_target
        self._load_generator = load_generator
        self._slowdown_meter = slowdown_meter
        self._target = make_target()

    def measure(self, candidate: Candidate, loads: Sequence[LoadPoint]) -> Measured:
        """Yield the measurement of one deployment at each of ``loads``. Raises DeploymentError, MeasurementError."""
        with self._target.deploy(candidate) as endpoint:
            self._load_generator.warm_up(endpoint, loads[0])
            return [(load, self._measure(endpoint, load)) for load in loads]

    def _measure(self, endpoint: Endpoint, load: LoadPoint) -> Measurement:
        """Measure at a moment when the machine is fast before and after, or else at the fastest moment."""
        if self._slowdown_meter is None:
            return self._load_generator.measure(endpoint, load)
        tries: list[tuple[float, Measurement]] = []
        while len(tries) < ATTEMPTS and (not tries or tries[-1][0] > SLOW):
            before = self._slowdown_meter.wait(SLOW)
            measurement = self._load_generator.measure(endpoint, load)
            tries.append((max(before, self._slowdown_meter.slowdown()), measurement))
        return min(tries, key=lambda one: one[0])[1]

    def renew(self) -> None:
        self.close()
        self._target = self._make_target()

    def close(self) -> None:
        self._target.close()


@contextlib.contextmanager
def bench(task: Task, plan: RecordingPlan) -> Iterator[Bench]:
    installed = runtime.ensure(print_progress)
    with tempfile.TemporaryDirectory() as scratch:
        logs = Path(scratch)
        load_generator = PerfAnalyzer(
            installed.perf_analyzer,
            LocalRunner(installed.perf_analyzer_libraries),
            logs / "perf_analyzer.log",
            input_data=task.input_data,
            window_ms=plan.window_ms,
            repeat=False,
        )

        def make_target() -> EmbeddedTarget:
            return EmbeddedTarget(task.source, TargetSettings(logs / "server.log", on_progress=print_progress))

        with contextlib.closing(Bench(make_target, load_generator, SlowdownMeter() if plan.gated else None)) as used:
            yield used


def prepare(name: str) -> Task:
    return prepare_model(RunOptions(str(TABLES / f"{name}.yaml")))


def recordings(name: str, task: Task) -> TrialsTable:
    path = TABLES / "recordings" / f"{name}.csv"
    path.parent.mkdir(exist_ok=True)
    return TrialsTable(path, task.source.name, task.problem.space.fields, cpu_count=task.problem.cpu_count)


def write_medians(name: str) -> None:
    """Write tables/NAME.csv with the median of each cell's recordings. Cells that failed each time are failed."""
    task, plan = prepare(name), PLANS[name]
    candidates, loads = task.problem.space.candidates(), load_points(task)
    recorded = {trial.number: trial for trial in recordings(name, task).read()}
    by_place: dict[int, list[Trial]] = {}
    for part in range(plan.parts):
        for trial in plan.trials(name, part, candidates):
            if missing_loads(recorded.get(trial.number, trial), loads):
                sys.exit(f"{name}: {trial.candidate} has not been recorded as often as planned at every load")
            by_place.setdefault(trial.number % len(candidates), []).append(recorded[trial.number])
    path = TABLES / f"{name}.csv"
    path.unlink(missing_ok=True)
    kept = read_run_table(TABLES / "recordings" / f"{name}.csv")
    cpu_count = (kept and kept.cpu_count) or task.problem.cpu_count  # early recordings do not have it
    table = TrialsTable(path, task.source.name, task.problem.space.fields, cpu_count=cpu_count)
    for place in range(len(candidates)):
        append_medians(table, place, by_place[place], loads)
    print_progress(f"wrote {path}")


def append_medians(table: TrialsTable, place: int, result: Sequence[Trial], loads: Sequence[LoadPoint]) -> None:
    """Append the rows of one configuration from all its recordings."""
    ok = [dict(trial.measurements) for trial in result if trial.status == "ok"]
    if not ok:
        table.append_failure(replace(result[-1], number=place))
    for load in loads if ok else ():
        table.append(Trial(place, result[0].candidate), load, median([measured[load] for measured in ok]))


if __name__ == "__main__":
    main()
