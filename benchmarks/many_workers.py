"""What 100 GPUs make of a search, and it of them: one search by 1, 8, 32 and 100 workers at once, simulated.

    python benchmarks/many_workers.py [--seeds 3] [--processes 2] [--json FILE] > benchmarks/many_workers.md

Each search is that of `tune`, on a made-up server and a clock that is counted (virtual_workers.py). What a suggestion
takes is measured, in seconds of a CPU, and holds up the workers that wait for one.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from made_up_stack import CONCURRENCIES, SPACES, Stack
from simulated_tables import REQUEST_BATCH_SIZE, SERVERS, Server, hidden_server
from virtual_workers import History, Pace, search

from objectives.metrics import METRICS
from objectives.sla import Constraint
from optimizer.machine import hardware
from optimizer.problem import Problem
from optimizer.report import words
from optimizer.search import SMALLEST_GAIN
from optimizer.search.ledger import Ledger
from optimizer.search.optuna import sampler_for
from optimizer.search.simulated import SimulatedSearcher
from optimizer.store.study import open_study
from optimizer.trial import Candidate

WORKERS = (1, 8, 32, 100)
BOUND_MS = 20.0
CLOSE = (0.05, 0.01)  # shares of the best by which what was found may fall short of it
FINALISTS = 2000  # cells that a short simulation puts first, of which the best is found exactly
PACE = Pace(charged=True)


@dataclass(frozen=True)
class Job:
    """``kind``: `together`; `heedless`, which does not know what runs; `one by one`. The latter two end after ``most``
    trials, not by themselves."""

    space: str
    server: str
    seed: int
    workers: int
    kind: str = "together"
    most: int | None = None


@dataclass(frozen=True)
class Outcome:
    """Of one search, times in virtual seconds; None where it was never reached. ``regrets``: after each trial.

    ``searching`` and ``waiting``: shares of the workers' time, for a suggestion and for another trial to end.
    """

    trials: int
    duplicates: int
    until_s: tuple[float | None, ...]
    ended_s: float
    regrets: tuple[float, ...]
    suggestion_s: tuple[float, ...]
    searching: float
    waiting: float

    @property
    def regret(self) -> float:
        return self.regrets[-1]

    def regret_after(self, trials: int) -> float:
        return self.regrets[min(trials, len(self.regrets)) - 1]


class HeedlessLedger(Ledger):
    """Repeats nothing, but tells of what runs only while nothing was measured."""

    def running(self) -> list[tuple[Candidate, int]]:
        return [] if self._observed else super().running()


def problem_of(space: str) -> Problem:
    bound = Constraint("latency-p95", BOUND_MS)
    return Problem("m", SPACES[space], REQUEST_BATCH_SIZE, CONCURRENCIES[-1], constraints=(bound,))


def searched(job: Job, stack: Stack, best: float) -> Outcome:
    """``best``: infer/s of the server's best configuration."""
    problem = problem_of(job.space)
    study = open_study(None, "many", problem, sampler_for("random", job.seed))
    searcher = SimulatedSearcher(problem, study, SMALLEST_GAIN if job.most is None else 0.0, job.seed)
    if job.kind == "heedless":
        searcher._ledger = HeedlessLedger(problem, study)
    history = search(problem, searcher, stack, job.workers, PACE, job.seed, job.most)
    return _outcome(history, best)


def _outcome(history: History, best: float) -> Outcome:
    workers_s = history.workers * history.ended_s
    return Outcome(
        trials=len(history.trials),
        duplicates=history.duplicates,
        until_s=tuple(history.until_s((1 - share) * best) for share in CLOSE),
        ended_s=history.ended_s,
        regrets=tuple(1 - found / best for found in history.best_after),
        suggestion_s=tuple(one.took_s for one in history.asked),
        searching=history.searching_s / workers_s,
        waiting=history.waiting_s / workers_s,
    )


def best_of(server: Server, space: str) -> float:
    """Infer/s of the best configuration and load within the bound."""
    cells = [(one, load) for one in SPACES[space].candidates() for load in CONCURRENCIES]
    quick = server.glance(cells, os.cpu_count() or 1)
    near = [i for i, (_, latency_ms) in enumerate(quick) if latency_ms <= 1.1 * BOUND_MS]
    finalists = [cells[i] for i in sorted(near, key=lambda i: -quick[i][0])[:FINALISTS]]
    p95 = METRICS["latency-p95"].value
    measured = server.measure(finalists, os.cpu_count() or 1)
    return max(m.throughput_infer_per_sec or 0.0 for m in measured if (p95(m) or math.inf) <= BOUND_MS)
