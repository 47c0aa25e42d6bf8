"""Record the exhaustive tables of tables/ on the real stack: every configuration at every load, three times.

    python benchmarks/record_tables.py [--passes 3] [dlrm mlp wide]

Each recording takes about 1 s; the recordings of a cell lie a whole pass over all tables apart, and each pass has
its own order, so that no configuration owes its place to one lucky moment. A configuration during which others
took more than OTHERS_LIMIT of the machine is recorded anew. Recordings are appended to tables/recordings/ as they
are made: interrupted, the command goes on where it was. At the end tables/NAME.csv gets the median of each cell.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import psutil

from objectives.metrics import Measurement
from optimizer import hardware, runtime, task
from optimizer.deploy.embedded import EmbeddedTarget
from optimizer.errors import DeploymentError, MeasurementError
from optimizer.options import RunOptions
from optimizer.perf_analyzer import PerfAnalyzer
from optimizer.task import Task
from optimizer.trial import LoadPoint, Trial
from optimizer.trials_table import TrialsTable

TABLES = Path(__file__).with_name("tables")
NAMES = ("dlrm", "mlp", "wide")
CONCURRENCIES = (4, 8, 16, 32)
WINDOW_MS = 280  # perf_analyzer takes three, each a fifth longer than asked: 1 s
OTHERS_LIMIT = 0.05  # of the cores' time: other processes, and what the hypervisor gave to other machines
ATTEMPTS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("names", nargs="*", default=list(NAMES), choices=NAMES)
    given = parser.parse_args()
    runtime.ensure(say)
    for number in range(given.passes):
        for name in given.names:
            record_pass(name, number)
    for name in given.names:
        write_medians(name, given.passes)


def record_pass(name: str, number: int) -> None:
    """The ``number``-th recording of every cell of table ``name`` that is not recorded yet."""
    what = prepare(name)
    table = recordings(name, what)
    candidates = what.problem.space.candidates()
    loads = [LoadPoint(what.problem.request_batch_size, concurrency) for concurrency in CONCURRENCIES]
    done = {trial.number: {load for load, _ in trial.measurements} for trial in table.read()}
    trials = [Trial(number * len(candidates) + place, candidate) for place, candidate in enumerate(candidates)]
    random.Random(f"{name} {number}").shuffle(trials)
    trials = [trial for trial in trials if len(done.get(trial.number, ())) < len(loads)]
    if not trials:
        return
    started = time.monotonic()
    with bench(what) as (target, load_generator):
        for count, trial in enumerate(trials):
            missing = [load for load in loads if load not in done.get(trial.number, set())]
            measurements = record(target, load_generator, trial, missing)
            for load, measurement in measurements:
                table.append(trial, load, measurement)
            seconds = time.monotonic() - started
            left = seconds / (count + 1) * (len(trials) - count - 1)
            say(f"{name} pass {number + 1}: {count + 1} of {len(trials)}, about {left / 60:.0f} min left")


def record(
    target: EmbeddedTarget, load_generator: PerfAnalyzer, trial: Trial, loads: list[LoadPoint]
) -> list[tuple[LoadPoint, Measurement]]:
    """One deployment measured at ``loads``; repeated while others disturb it, the least disturbed try counts."""
    tries: list[tuple[float, list[tuple[LoadPoint, Measurement]]]] = []
    while len(tries) < ATTEMPTS:
        wait_for_quiet()
        before = Usage.now()
        measurements = []
        try:
            with target.deploy(trial.candidate) as endpoint:
                load_generator.warm_up(endpoint, loads[0])
                for load in loads:
                    measurements.append((load, load_generator.measure(endpoint, load)))
        except (DeploymentError, MeasurementError) as error:
            say(f"{trial.candidate}: {error}; again")
            target.close()
            raise
        tries.append((Usage.now().others_since(before), measurements))
        if tries[-1][0] <= OTHERS_LIMIT:
            break
        say(f"{trial.candidate}: others took {tries[-1][0]:.0%} of the machine; again")
    return min(tries, key=lambda one: one[0])[1]


@dataclass(frozen=True)
class Usage:
    """CPU seconds since boot: of all cores, of them busy or stolen, and of this process and its descendants."""

    total: float
    busy: float
    own: float

    @classmethod
    def now(cls) -> Usage:
        times = psutil.cpu_times()
        busy = times.user + times.nice + times.system + times.irq + times.softirq + times.steal
        me = psutil.Process()
        own = 0.0
        for process in [me, *me.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                used = process.cpu_times()
                own += used.user + used.system + used.children_user + used.children_system
        return cls(busy + times.idle + times.iowait, busy, own)

    def others_since(self, before: Usage) -> float:
        """The share of the cores' time that went elsewhere."""
        return (self.busy - before.busy - (self.own - before.own)) / max(self.total - before.total, 1e-9)


def wait_for_quiet() -> None:
    while True:
        before = Usage.now()
        time.sleep(0.3)
        if Usage.now().others_since(before) <= 2 * OTHERS_LIMIT:
            return
        time.sleep(2)


@contextlib.contextmanager
def bench(what: Task) -> Iterator[tuple[EmbeddedTarget, PerfAnalyzer]]:
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
        with contextlib.closing(EmbeddedTarget(what.source, log=logs / "server.log", say=say)) as target:
            yield target, load_generator


def prepare(name: str) -> Task:
    return task.prepare(RunOptions(str(TABLES / f"{name}.yaml")), replace(hardware.detect(), gpus=()), say)


def recordings(name: str, what: Task) -> TrialsTable:
    path = TABLES / "recordings" / f"{name}.csv"
    path.parent.mkdir(exist_ok=True)
    return TrialsTable(path, what.source.name, what.problem.space.fields)


def write_medians(name: str, passes: int) -> None:
    """tables/NAME.csv: each figure the median of its cell's recordings."""
    what = prepare(name)
    candidates = what.problem.space.candidates()
    cells: dict[tuple[int, LoadPoint], list[Measurement]] = {}
    for trial in recordings(name, what).read():
        for load, measurement in dict(trial.measurements).items():
            cells.setdefault((trial.number % len(candidates), load), []).append(measurement)
    if any(len(found) < passes for found in cells.values()) or len(cells) < len(candidates) * len(CONCURRENCIES):
        sys.exit(f"{name}: not every cell has {passes} recordings")
    path = TABLES / f"{name}.csv"
    path.unlink(missing_ok=True)
    table = TrialsTable(path, what.source.name, what.problem.space.fields)
    for (place, load), found in sorted(cells.items()):
        table.append(Trial(place, candidates[place]), load, median(found))
    say(f"wrote {path}")


def median(found: list[Measurement]) -> Measurement:
    values: dict[str, object] = {}
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
