"""The loop: suggest, deploy, sweep, record, observe."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from objectives import pareto
from objectives.metrics import METRICS
from optimizer.budget import Budget
from optimizer.crashes import tried_again
from optimizer.errors import DeploymentError, ServerCrashed, ServerFault
from optimizer.interfaces import Endpoint, Searcher, Target
from optimizer.load.rate_sweep import next_rate
from optimizer.load.sweep import SweepRules, doubled, is_hopeless, latency_bounds, next_load
from optimizer.measuring import Measuring
from optimizer.problem import Problem
from optimizer.stopwatch import Stopwatch
from optimizer.trial import Candidate, LoadPoint, Point, Trial, latest_points

FIRST_CONCURRENCY, FIRST_RATE = 4, 100
LOADS, COMPARED_LOADS = 3, 5  # that a deployment is measured at, one that is compared with
RATES, COMPARED_RATES = 5, 9  # the same in an open loop, where a load that is too high tells less
HOPELESS_DEPLOYMENTS = 3  # all failed: it is not the configuration


@dataclass
class Tuner:
    """Drives one study. Only here do the searcher, the target and the load generator meet."""

    problem: Problem
    searcher: Searcher
    target: Target
    measuring: Measuring
    budget: Budget
    stopwatch: Stopwatch = field(default_factory=Stopwatch)

    def run(self, comparisons: Sequence[tuple[str, Candidate]]) -> list[Trial]:
        """Measure ``comparisons`` (role, candidate), then search until searcher or budget end it.

        Continues where the table ends. Whatever stops it, all that was measured is in the table, and in
        ``self.trials``. ``self.satisfied`` says whether the searcher ended the search, not the budget.
        """
        self.satisfied = False
        self._baseline, self._asked_again = comparisons[0][1], False
        self._compared = {candidate for _, candidate in comparisons}
        self.trials = self.measuring.table.read()
        unfinished = self.trials.pop() if self.trials else None
        for trial in self.trials:
            self.searcher.observe(trial)
        if unfinished:
            self._try(unfinished, "resumed")
        for role, candidate in self._candidates(comparisons):
            self._try(Trial(len(self.trials), candidate), role)
        return self.trials

    def best(self) -> Point | None:
        return pareto.best(latest_points(self.trials), self.problem.objectives, self.problem.constraints)

    def _candidates(self, comparisons: Sequence[tuple[str, Candidate]]) -> Iterator[tuple[str, Candidate]]:
        for role, candidate in comparisons:
            if not self._search_is_over() and all(trial.candidate != candidate for trial in self.trials):
                yield role, candidate
        while not self._search_is_over():
            suggestion = self._suggestion()
            if suggestion is None:
                self.satisfied = True
                return
            yield "search", suggestion

    def _suggestion(self) -> Candidate | None:
        with self.stopwatch.searching():
            return self.searcher.suggest()

    def _search_is_over(self) -> bool:
        if self.budget.max_trials is not None and len(self.trials) >= self.budget.max_trials:
            return True
        return bool(self.trials) and self.budget.search_seconds_left() < self._usual_seconds()

    def _usual_seconds(self) -> float:
        """What a deployment and its first measurement usually took; the least that a new trial needs."""
        took = sorted(
            (trial.deploy_seconds or 0) + (trial.measurements[0][1].measure_seconds or 0)
            for trial in self.trials
            if trial.measurements
        )
        return took[len(took) // 2] if took else 0.0

    def _try(self, trial: Trial, role: str) -> None:
        """Sweep ``trial`` from where it stands; a trial whose sweep is complete is not deployed again."""
        rules = self._rules(trial.candidate)
        complete = bool(trial.measurements) and self._next_load(trial, rules) is None
        if trial.status == "ok" and not complete:
            self.measuring.watcher.trial_started(trial.number, trial.candidate, role)
            self._ask_baseline_again(trial.candidate)
            self._current = trial
            try:
                tried_again(lambda: self._deploy_and_sweep(rules), lambda: self._is_worth_retrying(trial.candidate))
            except DeploymentError as error:
                self._fail(error)
            trial = self._current
        self.trials.append(trial)
        self.searcher.observe(trial)
        self.measuring.watcher.trial_finished(trial, self.best())

    def _fail(self, error: DeploymentError) -> None:
        """The current trial is infeasible, whatever it served before; its rows stay in the table."""
        if isinstance(error, ServerCrashed) and _figures(self._current):
            return  # only the time was up, before it could be tried again
        self._current = replace(self._current, status="failed", reason=str(error), measurements=())
        self.measuring.table.append_failure(self._current)
        self._give_up_if_nothing_deploys(error)

    def _deploy_and_sweep(self, rules: SweepRules) -> None:
        """What is measured is in ``self._current`` at once, whatever happens next."""
        trial, started = self._current, time.monotonic()
        with self.target.deploy(trial.candidate) as endpoint:
            self._current = replace(trial, deploy_seconds=round(time.monotonic() - started, 3))
            if self.measuring.guard.needs_reference and trial.candidate == self._baseline:
                with self.stopwatch.server():
                    self.measuring.guard.reference(endpoint)
            self.measuring.begin(endpoint)
            self._sweep(endpoint, rules)

    def _is_worth_retrying(self, candidate: Candidate) -> bool:
        """The baseline always: all else is compared with it."""
        return candidate == self._baseline or self.budget.search_seconds_left() > 0

    def _ask_baseline_again(self, candidate: Candidate) -> None:
        """For the answers to compare with, where they were lost: a resumed run, a server that died."""
        guard = self.measuring.guard
        if guard.needs_reference and candidate != self._baseline and not self._asked_again:
            self._asked_again = True
            with contextlib.suppress(DeploymentError), self.target.deploy(self._baseline) as endpoint:
                guard.reference(endpoint)

    def _give_up_if_nothing_deploys(self, error: DeploymentError) -> None:
        if len(self.trials) + 1 >= HOPELESS_DEPLOYMENTS and all(trial.status == "failed" for trial in self.trials):
            raise ServerFault(f"no configuration can be deployed: {error}", log=error.log) from error

    def _rules(self, candidate: Candidate) -> SweepRules:
        """The sweep starts at the load that the searcher expects to be the best, else at that of the best so far.

        What is compared with needs its own best load; what is searched need only show that it is no better.
        """
        best, expected = self.best(), self.searcher.expected_load(candidate)
        every = self.searcher.is_exhaustive and not self.problem.open_loop
        by_throughput = self.problem.objectives == (METRICS["throughput"],)
        searched = by_throughput and candidate not in self._compared and not every
        possible = self.problem.space.loads(candidate)
        if self.problem.open_loop:
            start = best.load.request_rate if best else FIRST_RATE
            max_loads = RATES if searched else COMPARED_RATES
        else:
            start = expected or (best.load.concurrency if best else FIRST_CONCURRENCY)
            max_loads = LOADS if searched else COMPARED_LOADS
        return SweepRules(
            self.problem.request_batch_size,
            self.problem.max_concurrency,
            latency_bounds(self.problem.constraints),
            start=start,
            lowest=METRICS["throughput"] not in self.problem.objectives,
            throughput_floor=max((c.bound for c in self.problem.constraints if c.metric == "throughput"), default=0),
            to_beat=best.measurement.throughput_infer_per_sec if best and searched else None,
            loads=possible,
            max_loads=max_loads,
            every=(possible or doubled(self.problem.max_concurrency)) if every else (),
        )

    def _next_load(self, trial: Trial, rules: SweepRules) -> LoadPoint | None:
        rule = next_rate if self.problem.open_loop else next_load
        return rule(trial.measurements, rules)

    def _sweep(self, endpoint: Endpoint, rules: SweepRules) -> None:
        warm = False
        while (load := self._next_load(self._current, rules)) is not None:
            if self._current.measurements and self.budget.search_seconds_left() < 0:
                return
            if not warm:
                glance = self.measuring.load_generator.warm_up(endpoint, load)
                if glance is not None and is_hopeless(glance, rules):
                    glance = replace(glance, reason="given up after a first short window")
                    self._current = self.measuring.keep(self._current, load, glance)
                    return
                warm = True
            self._current = self.measuring.measure(self._current, endpoint, load)
            nothing = self._current.measurements[-1][1].throughput_infer_per_sec is None
            if nothing and not self.problem.open_loop:  # else the rate was too high for the load generator
                return


def _figures(trial: Trial) -> bool:
    return any(measurement.throughput_infer_per_sec is not None for _, measurement in trial.measurements)
