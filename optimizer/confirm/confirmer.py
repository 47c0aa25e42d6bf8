"""Measures the finalists and the baseline again on fresh servers, in turn, until a recommendation holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from objectives import pareto
from objectives.confidence import Verdict
from optimizer.budget import Budget
from optimizer.confirm.plan import (
    FEWER_WINDOWS,
    LOWER_LOAD,
    SERVERS,
    Entrant,
    all_confirmed,
    done,
    entrant,
    lower,
    plan,
    shortened,
)
from optimizer.crashes import tried_again
from optimizer.errors import DeploymentError, ServerCrashed
from optimizer.interfaces import Target
from optimizer.measuring import Measuring
from optimizer.problem import Problem
from optimizer.trial import Candidate, Trial, latest_points

ATTEMPTS = 3  # where what was planned cannot be deployed as it is written
MORE = 3  # to try where no finalist passes
LOWERINGS = 2  # of one configuration's load, the second where the first failed for certain
MOST_LOST = 1  # measurements that give no figures, on one server: measured again


@dataclass
class Confirmer:
    """Goes on where ``trials`` end; what it measures is in the table at once.

    ``probe`` is called between two servers: it looks at how fast the machine is.
    """

    problem: Problem
    target: Target
    measuring: Measuring
    budget: Budget
    trials: list[Trial]
    probe: Callable[[], None] = lambda: None

    def run(self, baseline: Candidate) -> list[Trial]:
        """The trials with their confirmations. Where no finalist passes, another is tried, or a lower load."""
        finalists: set[Candidate] = set()
        for _ in range(ATTEMPTS):
            entrants = plan(self.trials, self.problem, baseline, self.budget.left_seconds())
            self.measure(entrants)
            left = {one.candidate for one in entrants if self._trial(one).status == "ok"}
            finalists = left - {baseline} or left
            if finalists - {baseline} or all(one.candidate == baseline for one in entrants):
                break
        for _ in range(MORE):
            again, left_seconds = self._next_best(finalists), self.budget.left_seconds()
            if again is None:
                break
            if again.total_seconds > left_seconds:
                again = shortened(again, FEWER_WINDOWS, left_seconds)
            if again.total_seconds > left_seconds:
                break
            self.measure([again])
            finalists.add(again.candidate)
        return self.trials

    def measure(self, entrants: Sequence[Entrant]) -> None:
        """Each on each server in turn, so that a drift of the machine hits all alike."""
        for server in range(1, SERVERS + 1):
            self.probe()
            for one in entrants:
                if done(self._trial(one), one, server) < one.windows and self.budget.left_seconds() > 0:
                    self._measure_on(server, one)

    def _trial(self, one: Entrant) -> Trial:
        return next(trial for trial in self.trials if trial.number == one.trial)

    def _put(self, trial: Trial) -> None:
        """In the place of what it was."""
        place = next(i for i, other in enumerate(self.trials) if other.number == trial.number)
        self.trials[place] = trial

    def _measure_on(self, server: int, one: Entrant) -> None:
        trial = self._trial(one)
        if trial.status == "failed":
            return
        watcher = self.measuring.watcher
        watcher.trial_started(trial.number, trial.candidate, "confirm")
        try:
            tried_again(lambda: self._deploy_and_measure(server, one), lambda: self.budget.left_seconds() > 0)
        except ServerCrashed:
            return  # the time is up; that measurement is lost
        except DeploymentError as error:
            trial = replace(trial, status="failed", reason=str(error), measurements=(), confirmations=())
            self.measuring.table.append_failure(trial)
            self._put(trial)
        best = pareto.best(latest_points(self.trials), self.problem.objectives, self.problem.constraints)
        watcher.trial_finished(self._trial(one), best)

    def _deploy_and_measure(self, server: int, one: Entrant) -> None:
        with self.target.deploy_as_written(one.candidate) as endpoint:
            self.measuring.begin(endpoint)
            self.measuring.load_generator.warm_up(endpoint, one.load)
            lost = 0
            while self.budget.left_seconds() > 0 and lost <= MOST_LOST:
                trial = self._trial(one)
                missing = one.windows - done(trial, one, server)
                if missing <= 0:
                    return
                trial = self.measuring.confirm(trial, endpoint, one.load, server, one.seconds, missing)
                self._put(trial)
                last = trial.confirmations[-1]
                lost += last.is_lost
                if last.measurement.is_overloaded:
                    return  # it will be so again

    def _next_best(self, finalists: set[Candidate]) -> Entrant | None:
        """Where none of ``finalists`` has passed: the best of them at a lower load, as much is known of it by now;
        where that does not pass either, one of the rest for which the search saw more.
        """
        found = [one for one in all_confirmed(self.trials, self.problem) if one.point.candidate in finalists]
        if not found or any(one.judged.verdict is Verdict.PASS for one in found):
            return None
        best = max(found, key=lambda one: one.point.throughput_infer_per_sec)
        if best.servers < SERVERS:
            return None  # the time has run out
        windows = max(1, best.windows // SERVERS)
        tried = [one.point.load for one in found if one.point.candidate == best.point.candidate]
        lowest = replace(best.point, load=min(tried))
        again = entrant(lowest, self.problem, windows, lower(lowest, LOWER_LOAD, self.problem))
        others = [point for point in latest_points(self.trials) if point.candidate not in finalists]
        other = pareto.best(others, self.problem.objectives, self.problem.constraints)
        failed = best.judged.verdict is Verdict.FAIL
        lowered = again.load not in tried and len(tried) <= (LOWERINGS if failed else 1)
        if not lowered and other is not None and other.throughput_infer_per_sec > best.point.throughput_infer_per_sec:
            return entrant(other, self.problem, windows)
        return None if again.load in tried else again
