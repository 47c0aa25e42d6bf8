"""Run the jobs of a benchmark in several processes, keep their results, and count the CPU time of processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from lib.json_lines import append_row, read_rows

JobT = TypeVar("JobT")
ResultT = TypeVar("ResultT")


def run_jobs(
    run: Callable[[JobT], ResultT],
    jobs: Sequence[JobT],
    processes: int,
    describe: Callable[[JobT, ResultT], str] = lambda job, result: f"{job}: {result}",
) -> Iterator[ResultT]:
    """Return the result of each job, in order. A line of ``describe`` on standard error reports each."""
    if not jobs:
        return
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # the processes fill the cores
    started = time.monotonic()
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for number, (job, result) in enumerate(zip(jobs, pool.map(run, jobs), strict=True), 1):
            took = f"{number} of {len(jobs)}, {time.monotonic() - started:.0f} s"
            print(f"{took}: {describe(job, result)}", file=sys.stderr, flush=True)
            yield result


def run_missing_jobs(
    run: Callable[[JobT], ResultT],
    jobs: Sequence[JobT],
    processes: int,
    file: Path | None,
    result_type: type[ResultT],
    key: Callable[[JobT], object],
    describe: Callable[[JobT, ResultT], str] = lambda job, result: f"{job}: {result}",
) -> dict[JobT, ResultT]:
    """Return the result of each job. Jobs whose result is in ``file`` are not run; other results are added to it.

    Each line of the file has the ``key`` of a job, which is a value of JSON, and its result. An incomplete line is
    ignored. Exits with a message if the file is of another benchmark.
    """
    form = TypeAdapter(result_type)
    row_form: TypeAdapter[tuple[Any, ResultT]] = TypeAdapter(tuple[Any, result_type])  # type: ignore[valid-type]
    kept = {json.dumps(known): result for known, result in (read_rows(file, row_form) if file is not None else ())}
    missing = [job for job in jobs if json.dumps(key(job)) not in kept]
    for job, result in zip(missing, run_jobs(run, missing, processes, describe), strict=True):
        kept[json.dumps(key(job))] = result
        if file is not None:
            append_row(file, [key(job), form.dump_python(result)])
    return {job: kept[json.dumps(key(job))] for job in jobs}


def run_in_own_process(run: Callable[..., ResultT], *arguments: object) -> ResultT:
    """Return ``run(*arguments)`` from a new process, so that ``peak_memory_bytes`` there is that of this call."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run, *arguments).result()


def children_cpu_seconds() -> float:
    """Return the CPU time of the child processes that have ended."""
    used = os.times()
    return used.children_user + used.children_system
