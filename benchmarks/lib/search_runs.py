"""Run the replays of ``search_methods.py`` in processes, and keep their results in a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

from pydantic import TypeAdapter

from lib.bounded_tables import BoundedTable
from lib.measurement_noise import Noise, NoisyServer
from lib.process_pool import run_jobs
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
    for job, run in zip(missing, run_jobs(_run, missing, processes, _describe), strict=True):
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
