"""The course of a study: what is tried next, at which loads, and when the search is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from objectives import pareto
from objectives.metrics import METRICS
from optimizer.budget import Budget
from optimizer.errors import ServerFault
from optimizer.interfaces import Searcher
from optimizer.load.sweep import SweepRules, doubled, latency_bounds
from optimizer.problem import Problem
from optimizer.sharing.others import Nobody, Others
from optimizer.stopwatch import Stopwatch
from optimizer.trial import Candidate, Point, Trial, latest_points

FIRST_CONCURRENCY, FIRST_RATE = 4, 100
LOADS, COMPARED_LOADS = 3, 5  # that a deployment is measured at, one that is compared with
RATES, COMPARED_RATES = 5, 9  # the same in an open loop, where a load that is too high tells less
HOPELESS_DEPLOYMENTS = 3  # all failed: it is not the configuration


@dataclass
class Course:
    """``comparisons`` (role, candidate) come first, the baseline first of them; then what the searcher proposes,
    until it or the budget ends the search.

    ``trials`` are those that are finished. ``satisfied``: the searcher ended the search, not the budget. Where the
    study is shared with ``others``, what they have tried or are trying is left to them.
    """

    problem: Problem
    searcher: Searcher
    budget: Budget
    stopwatch: Stopwatch
    comparisons: Sequence[tuple[str, Candidate]]
    others: Others = field(default_factory=Nobody)
    trials: list[Trial] = field(default_factory=list)
    satisfied: bool = False

    @property
    def baseline(self) -> Candidate:
        return self.comparisons[0][1]

    def best(self) -> Point | None:
        """Of all workers' trials."""
        own = {trial.candidate for trial in self.trials}
        theirs = [trial for trial in self.others.trials() if trial.candidate not in own]
        first = self._free_number(())
        numbered = [replace(trial, number=first + place) for place, trial in enumerate(theirs)]
        points = latest_points([*self.trials, *numbered])
        return pareto.best(points, self.problem.objectives, self.problem.constraints)

    def next(self, running: Sequence[Trial] = ()) -> tuple[str, Trial] | None:
        """The next trial and its role. None where the search is over, or has to wait for one of ``running``."""
        if self._is_over(running):
            return None
        tried = {trial.candidate for trial in (*self.trials, *running)}
        lost = [("abandoned", candidate) for candidate in self.others.abandoned()]
        for role, candidate in (*self.comparisons, *lost):
            if candidate not in tried and self.others.claim(candidate, FIRST_CONCURRENCY):
                return role, self._numbered(candidate, running)
        others_run = self.others.are_running()  # what ends meanwhile may make more worth trying
        with self.stopwatch.searching():
            suggestion = self.searcher.suggest()
            canonical = {self.problem.space.canonical(candidate) for candidate in tried}
            # it did not ask for what is compared with, nor for what an earlier session began: both may be running
            while suggestion in canonical:
                suggestion = self.searcher.suggest()
        if suggestion is None:
            self.satisfied = not running and not others_run
            return None
        return "search", self._numbered(suggestion, running)

    def awaited(self) -> tuple[str, Trial] | None:
        """As ``next``, which is asked again once others have finished what may make more worth trying."""
        while (following := self.next()) is None and self._has_to_wait():
            self.others.wait(self.budget.search_seconds_left())
        return following

    def taken_up(self, unfinished: Trial) -> tuple[str, Trial] | None:
        """What an earlier session had begun, unless another worker has taken it up; then as ``awaited``."""
        if self.others.claim(unfinished.candidate, FIRST_CONCURRENCY):
            return "resumed", unfinished
        self.trials.append(unfinished)
        return self.awaited()

    def resume(self, trials: Sequence[Trial]) -> None:
        """Those of an earlier session; what did not deploy then may do so now."""
        self.trials.extend(trials)
        for trial in trials:
            self.searcher.observe(trial)

    def finished(self, trial: Trial, log: Path | None = None) -> None:
        """``log`` tells more of why it failed. Raises ServerFault where nothing at all can be deployed."""
        self.trials.append(trial)
        self.searcher.observe(trial)
        if len(self.trials) >= HOPELESS_DEPLOYMENTS and all(one.status == "failed" for one in self.trials):
            raise ServerFault(f"no configuration can be deployed: {trial.reason}", log=log)

    def rules(self, candidate: Candidate) -> SweepRules:
        """The sweep starts at the load that the searcher expects to be the best, else at that of the best so far.

        What is compared with needs its own best load; what is searched need only show that it is no better.
        """
        problem, best = self.problem, self.best()
        every = self.searcher.is_exhaustive and not problem.open_loop
        by_throughput = problem.objectives == (METRICS["throughput"],)
        compared = any(candidate == one for _, one in self.comparisons)
        searched = by_throughput and not compared and not every
        possible = problem.space.loads(candidate)
        if problem.open_loop:
            start = best.load.request_rate if best else FIRST_RATE
            max_loads = RATES if searched else COMPARED_RATES
        else:
            expected = self.searcher.expected_load(candidate)
            start = expected or (best.load.concurrency if best else FIRST_CONCURRENCY)
            max_loads = LOADS if searched else COMPARED_LOADS
        return SweepRules(
            problem.request_batch_size,
            problem.max_concurrency,
            latency_bounds(problem.constraints),
            start=start,
            open_loop=problem.open_loop,
            lowest=METRICS["throughput"] not in problem.objectives,
            throughput_floor=max((c.bound for c in problem.constraints if c.metric == "throughput"), default=0),
            to_beat=best.measurement.throughput_infer_per_sec if best and searched else None,
            loads=possible,
            max_loads=max_loads,
            every=(possible or doubled(problem.max_concurrency)) if every else (),
        )

    def _numbered(self, candidate: Candidate, running: Sequence[Trial]) -> Trial:
        return Trial(self._free_number(running), candidate)

    def _free_number(self, running: Sequence[Trial]) -> int:
        return max((trial.number for trial in (*self.trials, *running)), default=-1) + 1

    def _has_to_wait(self) -> bool:
        return not self.satisfied and not self._is_over(()) and self.budget.search_seconds_left() > 0

    def _is_over(self, running: Sequence[Trial]) -> bool:
        begun = len(self.trials) + len(running)
        if self.budget.max_trials is not None and begun >= self.budget.max_trials:
            return True
        return begun > 0 and self.budget.search_seconds_left() < self._usual_seconds()

    def _usual_seconds(self) -> float:
        """What a deployment and its first measurement usually took; the least that a new trial needs."""
        took = sorted(
            (trial.deploy_seconds or 0) + (trial.measurements[0][1].measure_seconds or 0)
            for trial in self.trials
            if trial.measurements
        )
        return took[len(took) // 2] if took else 0.0
