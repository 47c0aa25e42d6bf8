"""A search by several workers at once, on a clock that is only counted: hours of 100 GPUs in minutes.

Course, searcher and load sweep are those of a run; only the server is made up (made_up_stack.py), and what a
deployment and a measurement take is counted instead of waited for. One process proposes what all the workers try, as
on a cluster.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field, replace

import numpy as np
from made_up_stack import Stack

from objectives.sla import worst_violation
from optimizer.budget import Budget
from optimizer.course import Course
from optimizer.interfaces import Searcher
from optimizer.measuring import Measuring
from optimizer.problem import Problem
from optimizer.replay.baselines import baselines
from optimizer.replay.engine import Unkept
from optimizer.stopwatch import Stopwatch
from optimizer.trial import Trial
from optimizer.trial_runner import TrialRunner

SPREAD = 0.1  # of the time that a trial takes, relative: no two workers keep in step


@dataclass(frozen=True)
class Pace:
    """Virtual seconds. ``charged``: a suggestion takes the seconds of a CPU that it really took, and workers wait for
    it; else nothing."""

    deploy_s: float = 2.0
    measure_s: float = 2.4
    charged: bool = False


@dataclass(frozen=True)
class Asked:
    """One question for what is next, with what was known then. ``took_s``: of a CPU, so that neighbours on the
    machine hardly count; with what was learned since the question before."""

    at_s: float
    finished: int
    running: int
    took_s: float
    answered: bool


@dataclass
class History:
    """What happened, in virtual seconds. ``best``: (when it was measured, infer/s), each better than all before;
    ``regret_basis``: (trials finished, infer/s of the best so far), one a trial.

    ``searching_s`` and ``waiting_s`` are the workers' together: while no suggestion was ready, and while there was
    none to be had before another trial ends.
    """

    workers: int
    trials: list[Trial] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    best: list[tuple[float, float]] = field(default_factory=list)
    best_after: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    searching_s: float = 0.0
    waiting_s: float = 0.0

    @property
    def duplicates(self) -> int:
        return len(self.trials) - len({trial.candidate for trial in self.trials})

    def until_s(self, infer_per_sec: float) -> float | None:
        """When so much had been measured within the bounds."""
        return next((at_s for at_s, found in self.best if found >= infer_per_sec), None)


def search(
    problem: Problem,
    searcher: Searcher,
    stack: Stack,
    workers: int,
    pace: Pace,
    seed: int = 0,
    max_trials: int | None = None,
    enough_infer_per_sec: float = float("inf"),
) -> History:
    """Until the searcher ends it, ``max_trials`` have begun, or the best so far is enough."""
    course = Course(problem, searcher, Budget(float("inf"), max_trials), Stopwatch(), baselines(problem.space))
    measuring = Measuring(stack, stack, Unkept(), stack)
    runner = TrialRunner(stack, measuring, course.baseline, lambda: float("inf"), course.stopwatch)
    random = np.random.default_rng(seed)
    history = History(workers)
    running: list[tuple[float, int, Trial]] = []  # a heap: when each ends
    found: list[tuple[float, float]] = []
    now_s, idle_from, blocked, learning_s = 0.0, [0.0] * workers, False, 0.0
    while True:
        while running and running[0][0] <= now_s:
            ended_s, _, trial = heapq.heappop(running)
            started = time.process_time()
            course.finished(trial)
            learning_s += time.process_time() - started
            idle_from.append(ended_s)
            blocked = False
            best = course.best()
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
        following = course.next([trial for *_, trial in running])
        took_s, learning_s = time.process_time() - started + learning_s, 0.0
        history.asked.append(Asked(now_s, len(course.trials), len(running), took_s, following is not None))
        now_s += took_s if pace.charged else 0.0
        if following is None:
            blocked = True
            continue
        role, trial = following
        history.searching_s += now_s - idle_from.pop(0)
        trial = runner.run(trial, role, course.rules(trial.candidate))
        slower = float(random.lognormal(0.0, SPREAD))
        at_s = now_s + slower * pace.deploy_s
        for _, measurement in trial.measurements:
            at_s += slower * pace.measure_s
            if measurement.stable and worst_violation(problem.constraints, measurement) <= 0:
                found.append((at_s, measurement.throughput_infer_per_sec or 0.0))
        heapq.heappush(running, (at_s, trial.number, replace(trial, deploy_seconds=slower * pace.deploy_s)))
    history.trials, history.ended_s = course.trials, now_s
    for at_s, infer_per_sec in sorted(found):
        if at_s <= now_s and (not history.best or infer_per_sec > history.best[-1][1]):
            history.best.append((at_s, infer_per_sec))
    return history
