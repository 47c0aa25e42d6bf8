"""Record the exhaustive tables of tables/ on the real stack: every configuration at every load, three times.

    python benchmarks/record_tables.py [--passes 3] [dlrm mlp wide]

Each recording takes about 1 s; the recordings of a cell lie a whole pass over all tables apart, and each pass has
its own order, so that no configuration owes its place to one lucky moment. A cell is recorded between two moments
in which the machine was quick (see quiet.py), else anew. A configuration that fails is tried again on a fresh
server; one that fails each time is entered as failed. Recordings are appended to tables/recordings/ as they are
made: interrupted, the command goes on where it was. At the end tables/NAME.csv gets the median of each cell.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TypeAlias

from quiet import Quiet

from objectives.metrics import Measurement
from optimizer import batch_stats, runtime, task
from optimizer.deploy.embedded import EmbeddedTarget
from optimizer.errors import DeploymentError, MeasurementError
from optimizer.interfaces import Endpoint, LoadGenerator, Target
from optimizer.load.perf_analyzer import PerfAnalyzer
from optimizer.machine import hardware
from optimizer.options import RunOptions
from optimizer.store.trials_table import TrialsTable
from optimizer.task import Task
from optimizer.trial import Candidate, LoadPoint, Trial

TABLES = Path(__file__).with_name("tables")
NAMES = ("dlrm", "mlp", "wide")
CONCURRENCIES = (4, 8, 16, 32)
WINDOW_MS = 280  # perf_analyzer takes three, each a fifth longer than asked: 1 s
SLOW = 1.15  # times as long as the machine needs at its quickest
ATTEMPTS = 4

Measured: TypeAlias = list[tuple[LoadPoint, Measurement]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("names", nargs="*", metavar="NAME", default=list(NAMES), help=f"of {', '.join(NAMES)}")
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in NAMES]
    if unknown:
        parser.error(f"no table is called {unknown[0]}: give some of {', '.join(NAMES)}")
    runtime.ensure(say)
    for number in range(given.passes):
        for name in given.names:
            record_pass(name, number)
    for name in given.names:
        write_medians(name, given.passes)


def record_pass(name: str, number: int) -> None:
    """The ``number``-th recording of every cell of table ``name`` that is neither recorded yet nor failed."""
    what = prepare(name)
    table = recordings(name, what)
    candidates = what.problem.space.candidates()
    loads = [LoadPoint(what.problem.request_batch_size, concurrency) for concurrency in CONCURRENCIES]
    recorded = {trial.number: trial for trial in table.read()}
    trials = [Trial(number * len(candidates) + place, candidate) for place, candidate in enumerate(candidates)]
    random.Random(f"{name} {number}").shuffle(trials)
    missing = {trial: missing_loads(recorded.get(trial.number, trial), loads) for trial in trials}
    trials = [trial for trial in trials if missing[trial]]
    if not trials:
        return
    started = time.monotonic()
    with bench(what) as used:
        for count, trial in enumerate(trials):
            try:
                for load, measurement in record(used, trial, missing[trial]):
                    table.append(trial, load, measurement)
            except (DeploymentError, MeasurementError) as error:
                table.append_failure(replace(trial, status="failed", reason=str(error)))
            seconds = time.monotonic() - started
            left = seconds / (count + 1) * (len(trials) - count - 1)
            say(f"{name} pass {number + 1}: {count + 1} of {len(trials)}, about {left / 60:.0f} min left")


def missing_loads(recorded: Trial, loads: Sequence[LoadPoint]) -> list[LoadPoint]:
    """Those that are still to be measured: none where the configuration failed."""
    return [load for load in loads if recorded.status == "ok" and load not in dict(recorded.measurements)]


def record(used: Bench, trial: Trial, loads: Sequence[LoadPoint]) -> Measured:
    """One deployment measured at ``loads``.

    Where something fails the next try is on a fresh server. Raises the last DeploymentError or MeasurementError
    where all tries failed.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return used.measure(trial.candidate, loads)
        except (DeploymentError, MeasurementError) as error:
            say(f"{trial.candidate}: {error} (attempt {attempt} of {ATTEMPTS})")
            used.renew()
            if attempt == ATTEMPTS:
                raise
    raise AssertionError("unreachable")


class Bench:
    """A server and a load generator on it. ``make_target`` makes the server anew after something failed on it."""

    def __init__(
        self, make_target: Callable[[], Target], load_generator: LoadGenerator, quiet: Quiet | None = None
    ) -> None:
        self._make_target = make_target
        self._load_generator = load_generator
        self._quiet = quiet
        self._target = make_target()

    def measure(self, candidate: Candidate, loads: Sequence[LoadPoint]) -> Measured:
        """One deployment at each of ``loads``. Raises DeploymentError, MeasurementError."""
        with self._target.deploy(candidate) as endpoint:
            self._load_generator.warm_up(endpoint, loads[0])
            return [(load, self._measure(endpoint, load)) for load in loads]

    def _measure(self, endpoint: Endpoint, load: LoadPoint) -> Measurement:
        """Between two moments in which the machine was quick; where none was found, in the quickest one."""
        if self._quiet is None:
            return self._load_generator.measure(endpoint, load)
        tries: list[tuple[float, Measurement]] = []
        while len(tries) < ATTEMPTS and (not tries or tries[-1][0] > SLOW):
            before = self._quiet.wait(SLOW)
            measurement = self._load_generator.measure(endpoint, load)
            tries.append((max(before, self._quiet.slowdown()), measurement))
        return min(tries, key=lambda one: one[0])[1]

    def renew(self) -> None:
        self.close()
        self._target = self._make_target()

    def close(self) -> None:
        self._target.close()


@contextlib.contextmanager
def bench(what: Task) -> Iterator[Bench]:
    installed = runtime.ensure(say)
    with tempfile.TemporaryDirectory() as scratch:
        logs = Path(scratch)
        load_generator = PerfAnalyzer(
            installed.perf_analyzer,
            installed.perf_analyzer_libraries,
            logs / "perf_analyzer.log",
            input_data=what.input_data,
            window_ms=WINDOW_MS,
            patience=False,
        )

        def make_target() -> EmbeddedTarget:
            return EmbeddedTarget(what.source, log=logs / "server.log", say=say)

        with contextlib.closing(Bench(make_target, load_generator, Quiet())) as used:
            yield used


def prepare(name: str) -> Task:
    return task.prepare(RunOptions(str(TABLES / f"{name}.yaml")), replace(hardware.detect(), gpus=()), say)


def recordings(name: str, what: Task) -> TrialsTable:
    path = TABLES / "recordings" / f"{name}.csv"
    path.parent.mkdir(exist_ok=True)
    return TrialsTable(path, what.source.name, what.problem.space.fields)


def write_medians(name: str, passes: int) -> None:
    """tables/NAME.csv: each figure the median of its cell's recordings; failed is what failed in each pass."""
    what = prepare(name)
    candidates = what.problem.space.candidates()
    recorded: dict[int, list[Trial]] = {}
    for trial in recordings(name, what).read():
        recorded.setdefault(trial.number % len(candidates), []).append(trial)
    loads = [LoadPoint(what.problem.request_batch_size, concurrency) for concurrency in CONCURRENCIES]
    for place, candidate in enumerate(candidates):
        found = recorded.get(place, [])
        if len(found) < passes or any(missing_loads(trial, loads) for trial in found):
            sys.exit(f"{name}: {candidate} has not been recorded {passes} times at every load")
    path = TABLES / f"{name}.csv"
    path.unlink(missing_ok=True)
    table = TrialsTable(path, what.source.name, what.problem.space.fields)
    for place in range(len(candidates)):
        append_medians(table, place, recorded[place], loads)
    say(f"wrote {path}")


def append_medians(table: TrialsTable, place: int, found: Sequence[Trial], loads: Sequence[LoadPoint]) -> None:
    """The rows of one configuration from all its recordings."""
    ok = [dict(trial.measurements) for trial in found if trial.status == "ok"]
    if not ok:
        table.append_failure(replace(found[-1], number=place))
    for load in loads if ok else ():
        table.append(Trial(place, found[0].candidate), load, median([measured[load] for measured in ok]))


def median(found: list[Measurement]) -> Measurement:
    """Each figure the median of those known; executions by size the sum, where all recordings have them."""
    values: dict[str, object] = {}
    if all(one.batch_stats for one in found):
        counted = batch_stats.total(batch_stats.from_text(one.batch_stats) for one in found)
        values["batch_stats"] = batch_stats.to_text(counted)
    for field in fields(Measurement):
        known = [value for one in found if isinstance(value := getattr(one, field.name), (int, float))]
        if field.name not in ("stable", "reason") and known:
            middle = statistics.median(known)
            values[field.name] = int(middle) if field.name == "requests" else round(middle, 4)
    return Measurement(**values, stable=True)  # type: ignore[arg-type]


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


if __name__ == "__main__":
    main()
