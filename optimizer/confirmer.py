"""Measures the finalists and the baseline again on fresh servers, in turn, until a recommendation holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from objectives.confidence import Verdict
from optimizer.budget import Budget
from optimizer.confirmation import LOWER_LOAD, SERVERS, Entrant, all_confirmed, done, entrant, lower, plan
from optimizer.crashes import tried_again
from optimizer.errors import DeploymentError
from optimizer.interfaces import Target
from optimizer.measuring import Measuring
from optimizer.problem import Problem
from optimizer.trial import Candidate, Trial

ATTEMPTS = 3  # where what was planned cannot be deployed as it is written
LOWERED = 2  # times at most


@dataclass
class Confirmer:
    """Goes on where ``trials`` end, whose numbers are their places; what it measures is in the table at once.

    ``probe`` is called between two servers: it looks at how fast the machine is.
    """

    problem: Problem
    target: Target
    measuring: Measuring
    budget: Budget
    trials: list[Trial]
    probe: Callable[[], None] = lambda: None

    def run(self, baseline: Candidate) -> list[Trial]:
        """The trials with their confirmations. Where no finalist passes, the best one is tried at a lower load."""
        finalists: set[Candidate] = set()
        for _ in range(ATTEMPTS):
            entrants = plan(self.trials, self.problem, baseline, self.budget.left_seconds())
            self.measure(entrants)
            finalists = {one.candidate for one in entrants if self.trials[one.trial].status == "ok"}
            if finalists:
                break
        for _ in range(LOWERED):
            again = self._at_a_lower_load(finalists - {baseline} or finalists)
            if again is None or again.total_seconds > self.budget.left_seconds():
                break
            self.measure([again])
        return self.trials

    def measure(self, entrants: Sequence[Entrant]) -> None:
        """Each on each server in turn, so that a drift of the machine hits all alike."""
        for server in range(1, SERVERS + 1):
            for one in entrants:
                if done(self.trials[one.trial], one, server) < one.windows and self.budget.left_seconds() > 0:
                    self.probe()
                    self._measure_on(server, one)

    def _measure_on(self, server: int, one: Entrant) -> None:
        trial = self.trials[one.trial]
        if trial.status == "failed":
            return
        watcher = self.measuring.watcher
        watcher.trial_started(trial.number, trial.candidate, "confirm")
        try:
            tried_again(lambda: self._deploy_and_measure(server, one), lambda: self.budget.left_seconds() > 0)
        except DeploymentError as error:
            trial = replace(trial, status="failed", reason=str(error), measurements=(), confirmations=())
            self.measuring.table.append_failure(trial)
            self.trials[one.trial] = trial
        watcher.trial_finished(self.trials[one.trial], None)

    def _deploy_and_measure(self, server: int, one: Entrant) -> None:
        with self.target.deploy_as_written(one.candidate) as endpoint:
            self.measuring.begin(endpoint)
            self.measuring.load_generator.warm_up(endpoint, one.load)
            while done(trial := self.trials[one.trial], one, server) < one.windows and self.budget.left_seconds() > 0:
                self.trials[one.trial] = self.measuring.confirm(trial, endpoint, one.load, server, one.seconds)

    def _at_a_lower_load(self, candidates: set[Candidate]) -> Entrant | None:
        """The best of ``candidates`` at a lower load, where none of them has passed yet."""
        found = [one for one in all_confirmed(self.trials, self.problem) if one.point.candidate in candidates]
        if not found or any(one.judged.verdict is Verdict.PASS for one in found):
            return None
        best = max(found, key=lambda one: one.point.measurement.throughput_infer_per_sec or 0.0)
        if best.servers < SERVERS:
            return None  # the time has run out
        tried = [one.point.load for one in found if one.point.candidate == best.point.candidate]
        point = replace(best.point, load=min(tried))
        windows = best.windows // SERVERS
        again = entrant(point, self.problem, windows, lower(point, LOWER_LOAD, self.problem))
        return None if again.load in tried else again
