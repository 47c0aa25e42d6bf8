"""Run the replays of ``search_methods.py`` in processes, and keep their results in a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

from lib.bounded_tables import BoundedTable
from lib.measurement_noise import Noise, NoisyServer
from lib.process_pool import run_missing_jobs
from objectives.metrics import METRICS
from optimizer.replay.replay import ReplayResult, recorded_problem, replay
from optimizer.store.recording import Recording, read_recording
from other_searchers import searcher_factory


@dataclass(frozen=True)
class ReplayJob:
    """One search of a table by a method of METHODS."""

    case: BoundedTable
    method: str
    seed: int
    max_trials: int
    noise: Noise | None = None


Runs = dict[ReplayJob, ReplayResult]


def run_all(jobs: Sequence[ReplayJob], processes: int, file: Path | None) -> Runs:
    """Return the results of all jobs, without their recommendations.

    Those in ``file`` are not run again; the others are added to it.
    """
    return run_missing_jobs(_run, jobs, processes, file, ReplayResult, _key, _describe)


def _key(job: ReplayJob) -> list[object]:
    noise = asdict(job.noise) if job.noise else None
    return [job.case.table.stem, job.case.sla, job.case.bound_ms, job.method, job.seed, job.max_trials, noise]


def _describe(job: ReplayJob, _: ReplayResult) -> str:
    return f"{job.method}, {job.case.table.stem} {job.case.sla}, {job.seed}"


def _run(job: ReplayJob) -> ReplayResult:
    recording = _recording(job.case.table)
    problem = recorded_problem(recording, {job.case.statistic: job.case.bound_ms})
    if job.case.kind == "goodput":
        problem = replace(problem, objectives=(METRICS["goodput"],))
    factory = searcher_factory(job.method)
    server = NoisyServer(recording.trials(), job.noise, job.seed) if job.noise else None
    result = replay(recording, problem, factory, job.seed, job.max_trials, server=server)
    return replace(result, recommended=None)


@lru_cache
def _recording(path: Path) -> Recording:
    return read_recording(path)
