"""Show whether searches lose throughput by the configurations that they try, or by their choice of one of these.

    python benchmarks/tried_configurations.py [--kinds test training] [--seeds 4]

Repeats the searches of ``simulated`` in search_methods.py, with noise, and prints three mean regrets for each table
and bound. The first one is that of search_methods.py. The others use the highest throughput of a configuration within
the bound, interpolated between recorded loads, because a load between them may be the best one. They are the regret
of the configuration with the best measurement, and that of the best configuration that was tried.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bounded_tables import TABLES, BoundedTable, bounded_tables
from measurement_noise import Noise, NoisyServer
from processes import run_jobs
from recorded_noise import recorded_noise
from search_report import MAX_TRIALS, OWN
from tune_runs import row

from objectives.metrics import Measurement
from optimizer.core.endpoint import Endpoint
from optimizer.core.trial import Candidate, LoadPoint, Trial
from optimizer.machine import hardware
from optimizer.replay.engine import recorded_problem, replay
from optimizer.store.recording import Recording, read_recording

HEAD = ("table", "within", "regret", "of the configuration with the best measurement", "of the best tried")


class ObservedServer(NoisyServer):
    """A server with noise that keeps the latest measurement of each configuration and load."""

    def __init__(self, trials: Sequence[Trial], noise: Noise, seed: int) -> None:
        super().__init__(trials, noise, seed)
        self.measured: dict[tuple[Candidate, LoadPoint], Measurement] = {}

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        measurement = super().measure(endpoint, load, seconds)
        self.measured[endpoint.candidate, load] = measurement
        return measurement


@dataclass(frozen=True)
class Regrets:
    """The regrets of one search, as shares of the best throughput.

    Attributes:
        recommended: That of the recommendation, as search_methods.py computes it.
        chosen: That of the configuration with the best measurement, at its best load.
        tried: That of the best configuration that was tried, at its best load.
    """

    recommended: float
    chosen: float
    tried: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", choices=("test", "training"), nargs="+", default=["test", "training"])
    parser.add_argument("--seeds", type=int, default=4, metavar="N", help="use seeds 0 to N-1 (4)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        cases = list(bounded_tables(TABLES, Path(scratch), frozenset(arguments.kinds)))
    jobs = [(case, seed) for case in cases for seed in range(arguments.seeds)]
    regrets = dict(zip(jobs, run_jobs(_search, jobs, arguments.processes), strict=True))
    print(f"`{shlex.join(['python', 'benchmarks/tried_configurations.py', *sys.argv[1:]])}`\n")
    rows = [
        (case.table.stem, f"p95 {case.bound_ms:g} ms", *_means([regrets[job] for job in jobs if job[0] == case]))
        for case in cases
    ]
    totals = [
        (f"**{kind}**", "all", *_means([regrets[job] for job in jobs if job[0].kind == kind]))
        for kind in arguments.kinds
    ]
    alignment = ("---", "---", *["--:"] * 3)
    for cells in (HEAD, alignment, *rows, *totals):
        print(row(*cells))
    machine = hardware.detect()
    print(
        f"\nSeeds of each search: {arguments.seeds}; {machine.cpu}, {machine.cpu_count} cores; "
        f"{time.strftime('%Y-%m-%d')}"
    )


def _search(job: tuple[BoundedTable, int]) -> Regrets:
    """Return the regrets of one search."""
    case, seed = job
    recording = read_recording(case.table)
    problem = recorded_problem(recording, {case.statistic: case.bound_ms})
    best = recording.best(problem)
    assert best is not None, "each bound is met by a row"
    server = ObservedServer(recording.trials(), recorded_noise(case.table.stem), seed)
    result = replay(recording, problem, best, OWN, seed, MAX_TRIALS, server=server)
    highest = {
        candidate: _highest_throughput(recording, candidate, case.bound_ms)
        for candidate in {recording.space.canonical(recorded.candidate) for recorded in recording.rows}
    }
    within = {
        place: measurement.throughput_infer_per_sec or 0.0
        for place, measurement in server.measured.items()
        if measurement.stable and problem.sla.is_met(measurement)
    }
    chosen = max(within, key=lambda place: within[place], default=None)
    tried = {recording.space.canonical(candidate) for candidate, _ in server.measured}
    most = max(highest.values())
    return Regrets(
        result.regret,
        1 - highest[recording.space.canonical(chosen[0])] / most if chosen else 1.0,
        1 - max(highest[candidate] for candidate in tried) / most,
    )


def _highest_throughput(recording: Recording, candidate: Candidate, bound_ms: float) -> float:
    """Return the highest throughput within the bound, interpolated between neighboring loads; 0 if there is none."""
    curve = sorted(
        (recorded.load.concurrency, math.log(latency), throughput)
        for recorded in recording.rows
        if recorded.load and recording.space.canonical(recorded.candidate) == candidate
        if (latency := recorded.measurement.latency_p95_ms)
        if (throughput := recorded.measurement.throughput_infer_per_sec)
    )
    limit = math.log(bound_ms)
    highest = max((throughput for _, latency, throughput in curve if latency <= limit), default=0.0)
    for (_, lower, before), (_, higher, after) in pairwise(curve):
        if lower <= limit < higher:
            highest = max(highest, before + (after - before) * (limit - lower) / (higher - lower))
    return highest


def _means(regrets: Sequence[Regrets]) -> list[str]:
    means = (
        statistics.fmean(values)
        for values in zip(*((own.recommended, own.chosen, own.tried) for own in regrets), strict=True)
    )
    return [f"{mean:.1%}" for mean in means]


if __name__ == "__main__":
    main()
