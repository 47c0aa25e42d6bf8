"""Simulate a search by several parallel workers on a virtual clock: hours of 100 GPUs in minutes.

Scheduler, searcher and load sweep are those of a run; only the server is simulated (simulated_stack.py), and the
clock advances by the duration of deployments and measurements instead of waiting. One process suggests for all
workers, as on a cluster. A suggestion takes its real CPU time, and workers wait for it.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field, replace

import numpy as np

from lib.simulated_stack import CONCURRENCIES, SPACES, SimulatedStack
from lib.simulated_tables import REQUEST_BATCH_SIZE
from objectives.sla import Sla
from optimizer.config.problem import Problem
from optimizer.core.budget import Budget
from optimizer.core.interfaces import Searcher
from optimizer.core.stopwatch import Stopwatch
from optimizer.core.trial import Trial
from optimizer.measure.measurer import Measurer
from optimizer.replay.replay import DiscardingRecord
from optimizer.results.progress_observers import QuietObserver
from optimizer.store.recording import baselines
from optimizer.study.scheduler import Scheduler
from optimizer.study.trial_runner import TrialRunner

WORKERS = (1, 8, 32, 100)  # numbers of workers
BOUND_MS = 20.0  # on p95
DEPLOY_SECONDS, MEASURE_SECONDS = 2.0, 2.4
SPREAD = 0.1  # relative deviation of a trial's duration, so that no two workers run in step


def problem_of(space: str) -> Problem:
    """Return the search of a space of SPACES."""
    sla = Sla.from_bounds({"p95": BOUND_MS})
    return Problem("m", SPACES[space], REQUEST_BATCH_SIZE, CONCURRENCIES[-1], sla=sla)


@dataclass
class History:
    """The events of a search, with times in virtual seconds.

    ``suggestion_s`` has the CPU time of each suggestion, with that of the observations since the last one. ``best``
    has (time, infer/s) of each improvement, and ``best_after`` the best infer/s after each trial. ``searching_s`` and
    ``waiting_s`` are summed over all workers: while no suggestion was ready, and while there could be none until
    another trial ended.
    """

    workers: int
    trials: list[Trial] = field(default_factory=list)
    suggestion_s: list[float] = field(default_factory=list)
    best: list[tuple[float, float]] = field(default_factory=list)
    best_after: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    searching_s: float = 0.0
    waiting_s: float = 0.0

    @property
    def duplicates(self) -> int:
        return len(self.trials) - len({trial.candidate for trial in self.trials})

    def until_s(self, infer_per_sec: float) -> float | None:
        """Return when a throughput within the bounds had been measured."""
        return next((at_s for at_s, throughput in self.best if throughput >= infer_per_sec), None)


def search(
    problem: Problem,
    searcher: Searcher,
    stack: SimulatedStack,
    workers: int,
    seed: int = 0,
    max_trials: int | None = None,
    enough_infer_per_sec: float = float("inf"),
) -> History:
    """Search until the searcher ends, ``max_trials`` have started, or the best result is good enough."""
    scheduler = Scheduler(problem, searcher, Budget(float("inf"), max_trials), Stopwatch(), baselines(problem.space))
    measuring = Measurer(stack, stack, DiscardingRecord(), QuietObserver())
    runner = TrialRunner(stack, measuring, scheduler.baseline, lambda: float("inf"))
    random = np.random.default_rng(seed)
    history = History(workers)
    running: list[tuple[float, int, Trial]] = []  # a heap of the times at which running trials end
    results: list[tuple[float, float]] = []
    now_s, idle_from, blocked, learning_s = 0.0, [0.0] * workers, False, 0.0
    while True:
        while running and running[0][0] <= now_s:
            ended_s, _, trial = heapq.heappop(running)
            started = time.process_time()
            scheduler.record_finished(trial)
            learning_s += time.process_time() - started
            idle_from.append(ended_s)
            blocked = False
            best = scheduler.best()
            history.best_after.append(best.throughput_infer_per_sec if best else 0.0)
        if history.best_after and history.best_after[-1] >= enough_infer_per_sec:
            break
        if not idle_from or blocked:
            if not running:
                break
            ends_s = max(now_s, running[0][0])
            history.waiting_s += len(idle_from) * (ends_s - now_s)
            idle_from = [ends_s] * len(idle_from)
            now_s = ends_s
            continue
        started = time.process_time()
        following = scheduler.next([trial for *_, trial in running])
        took_s, learning_s = time.process_time() - started + learning_s, 0.0
        history.suggestion_s.append(took_s)
        now_s += took_s
        if following is None:
            blocked = True
            continue
        role, trial = following
        history.searching_s += now_s - idle_from.pop(0)
        trial = runner.run(trial, role, scheduler.rules(trial.candidate)).trial
        slower = float(random.lognormal(0.0, SPREAD))
        at_s = now_s + slower * DEPLOY_SECONDS
        for _, measurement in trial.measurements:
            at_s += slower * MEASURE_SECONDS
            if measurement.stable and problem.sla.is_met(measurement):
                results.append((at_s, measurement.throughput_infer_per_sec or 0.0))
        heapq.heappush(running, (at_s, trial.number, replace(trial, deploy_seconds=slower * DEPLOY_SECONDS)))
    history.trials, history.ended_s = scheduler.trials, now_s
    for at_s, infer_per_sec in sorted(results):
        if at_s <= now_s and (not history.best or infer_per_sec > history.best[-1][1]):
            history.best.append((at_s, infer_per_sec))
    return history
