"""Run the replays of ``search_methods.py`` in processes, and keep their results in a file."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

from bounded_tables import BoundedTable
from pydantic import TypeAdapter
from rivals import searcher_factory

from objectives.metrics import METRICS
from optimizer.replay.engine import ReplayResult, recorded_problem, replay
from optimizer.replay.noise import Noise
from optimizer.store.recording import Recording, read_recording


@dataclass(frozen=True)
class ReplayJob:
    """One search of a table by a method of METHODS."""

    case: BoundedTable
    method: str
    seed: int
    max_trials: int
    noise: Noise | None = None

    @property
    def key(self) -> str:
        """Return the key of the job in the file of kept runs."""
        noise = asdict(self.noise) if self.noise else None
        case = self.case.table.stem, self.case.sla, self.case.bound_ms
        return json.dumps([*case, self.method, self.seed, self.max_trials, noise])


Runs = dict[ReplayJob, ReplayResult]
KEPT = TypeAdapter(ReplayResult)


def run_all(jobs: Sequence[ReplayJob], processes: int, file: Path | None) -> Runs:
    """Return the results of all jobs, without their recommendations.

    Those in ``file`` are not run again; the others are added to it.
    """
    kept = _read(file)
    runs = {job: kept[job.key] for job in jobs if job.key in kept}
    missing = [job for job in jobs if job not in runs]
    for job, run in zip(missing, _replayed(missing, processes), strict=True):
        runs[job] = run
        if file is not None:
            with file.open("a") as opened:
                opened.write(json.dumps([job.key, KEPT.dump_python(run)]) + "\n")
    return {job: runs[job] for job in jobs}


def _read(file: Path | None) -> dict[str, ReplayResult]:
    if file is None or not file.exists():
        return {}
    lines = map(json.loads, file.read_text().splitlines())
    return {key: KEPT.validate_python(run) for key, run in lines}


def _replayed(jobs: Sequence[ReplayJob], processes: int) -> Iterator[ReplayResult]:
    """Return each job's outcome, in order. Uses processes, because a search is mostly Python."""
    if not jobs:
        return
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # the processes fill the cores
    started = time.monotonic()
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for number, (job, run) in enumerate(zip(jobs, pool.map(_run, jobs), strict=True), 1):
            case = f"{job.case.table.stem} {job.case.sla}"
            line = f"{number} of {len(jobs)}, {time.monotonic() - started:.0f} s: {job.method}, {case}, {job.seed}"
            print(line, file=sys.stderr, flush=True)
            yield run


def _run(job: ReplayJob) -> ReplayResult:
    recording = _recording(job.case.table)
    problem = recorded_problem(recording, {job.case.statistic: job.case.bound_ms})
    if job.case.kind == "goodput":
        problem = replace(problem, objectives=(METRICS["goodput"],))
    best = recording.best(problem)
    assert best is not None, "bound_ms sees to it"
    factory = searcher_factory(job.method)
    result = replay(recording, problem, best, factory, job.seed, job.max_trials, noise=job.noise)
    return replace(result, recommended=None)


@lru_cache
def _recording(path: Path) -> Recording:
    return read_recording(path)
