"""Run the jobs of a benchmark in several processes, and count the CPU time of processes."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

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


def children_cpu_seconds() -> float:
    """Return the CPU time of the child processes that have ended."""
    used = os.times()
    return used.children_user + used.children_system
