"""The loop: suggest, deploy, sweep, record, observe; then confirm what is recommended."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol

from objectives import pareto
from objectives.metrics import METRICS, Measurement
from optimizer.budget import Budget
from optimizer.errors import DeploymentError, MeasurementError, ServerFault
from optimizer.interfaces import Endpoint, LoadGenerator, Searcher, Target, Telemetry
from optimizer.problem import Problem
from optimizer.stopwatch import Stopwatch
from optimizer.sweep import SweepRules, is_hopeless, latency_bounds, next_load
from optimizer.trial import Candidate, LoadPoint, Point, Trial, latest_points

FIRST_CONCURRENCY = 4
LOADS, COMPARED_LOADS = 3, 5  # that a deployment is measured at, one that is compared with
CONFIRM_SHARE = 0.15  # of the budget is kept for confirming the recommendation
CONFIRM_SECONDS = 40.0  # and no more than this
CONFIRM_DEPLOYMENTS = 3
HOPELESS_DEPLOYMENTS = 3  # all failed: it is not the configuration


class Watcher(Protocol):
    """Is told what happens, as it happens."""

    def trial_started(self, number: int, candidate: Candidate, role: str) -> None: ...

    def measured(self, number: int, load: LoadPoint, measurement: Measurement) -> None: ...

    def trial_finished(self, trial: Trial, best: Point | None) -> None: ...


class Record(Protocol):
    """Keeps what is measured, each measurement before the next begins; see ``TrialsTable``."""

    def append(self, trial: Trial, load: LoadPoint, measurement: Measurement) -> None: ...

    def append_failure(self, trial: Trial) -> None: ...

    def read(self) -> list[Trial]: ...


@dataclass
class Tuner:
    """Drives one study. Only here do the searcher, the target and the load generator meet."""

    problem: Problem
    searcher: Searcher
    target: Target
    load_generator: LoadGenerator
    telemetry: Telemetry
    table: Record
    budget: Budget
    watcher: Watcher
    stopwatch: Stopwatch = field(default_factory=Stopwatch)

    def run(self, comparisons: Sequence[tuple[str, Candidate]]) -> list[Trial]:
        """Measure ``comparisons`` (role, candidate), then search until searcher or budget end it, then confirm.

        Continues where the table ends. Whatever stops it, all that was measured is in the table, and in
        ``self.trials``. ``self.satisfied`` says whether the searcher ended the search, not the budget.
        """
        self.satisfied = False
        self._compared = {candidate for _, candidate in comparisons}
        self.trials = self.table.read()
        unfinished = self.trials.pop() if self.trials else None
        for trial in self.trials:
            self.searcher.observe(trial)
        if unfinished:
            self._try(unfinished, "resumed")
        for role, candidate in self._candidates(comparisons):
            self._try(Trial(len(self.trials), candidate), role)
        with self.stopwatch.confirming():
            self._confirm()
        return self.trials

    def best(self) -> Point | None:
        return pareto.best(latest_points(self.trials), self.problem.objectives, self.problem.constraints)

    # -- searching ------------------------------------------------------------------------------------------

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
        return bool(self.trials) and self.budget.left_seconds() < self._confirm_seconds() + self._usual_seconds()

    def _confirm_seconds(self) -> float:
        return min(CONFIRM_SECONDS, CONFIRM_SHARE * self.budget.seconds)

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
        complete = bool(trial.measurements) and next_load(trial.measurements, rules) is None
        if trial.status == "ok" and not complete:
            self.watcher.trial_started(trial.number, trial.candidate, role)
            started = time.monotonic()
            try:
                with self.target.deploy(trial.candidate) as endpoint:
                    seconds = round(time.monotonic() - started, 3)
                    trial = self._sweep(replace(trial, deploy_seconds=seconds), endpoint, rules)
            except DeploymentError as error:
                trial = replace(trial, status="failed", reason=str(error))
                self.table.append_failure(trial)
                self._give_up_if_nothing_deploys(error)
        self.trials.append(trial)
        self.searcher.observe(trial)
        self.watcher.trial_finished(trial, self.best())

    def _give_up_if_nothing_deploys(self, error: DeploymentError) -> None:
        if len(self.trials) + 1 >= HOPELESS_DEPLOYMENTS and all(trial.status == "failed" for trial in self.trials):
            raise ServerFault(f"no configuration can be deployed: {error}", log=error.log) from error

    def _rules(self, candidate: Candidate) -> SweepRules:
        """The sweep starts at the load that the searcher expects to be the best, else at that of the best so far.

        What is compared with needs its own best load; what is searched need only show that it is no better.
        """
        best, expected = self.best(), self.searcher.expected_load(candidate)
        searched = candidate not in self._compared and self.problem.objectives == (METRICS["throughput"],)
        return SweepRules(
            self.problem.request_batch_size,
            self.problem.max_concurrency,
            latency_bounds(self.problem.constraints),
            start=expected or (best.load.concurrency if best else FIRST_CONCURRENCY),
            lowest=METRICS["throughput"] not in self.problem.objectives,
            throughput_floor=max((c.bound for c in self.problem.constraints if c.metric == "throughput"), default=0),
            to_beat=best.measurement.throughput_infer_per_sec if best and searched else None,
            loads=self.problem.space.loads(candidate),
            max_loads=LOADS if searched else COMPARED_LOADS,
        )

    def _sweep(self, trial: Trial, endpoint: Endpoint, rules: SweepRules) -> Trial:
        warm = False
        while (load := next_load(trial.measurements, rules)) is not None:
            if trial.measurements and self.budget.left_seconds() < self._confirm_seconds():
                break
            if not warm:
                glance = self.load_generator.warm_up(endpoint, load)
                if glance is not None and is_hopeless(glance, rules):
                    return self._keep(trial, load, replace(glance, reason="given up after a first short window"))
                warm = True
            trial = self._measure(trial, endpoint, load)
            if trial.measurements[-1][1].throughput_infer_per_sec is None:
                break
        return trial

    def _measure(self, trial: Trial, endpoint: Endpoint, load: LoadPoint) -> Trial:
        """One measurement, on disk before this returns. One that fails is recorded with its reason."""
        try:
            with self.telemetry.record(endpoint) as samples:
                measurement = self.load_generator.measure(endpoint, load)
            known = {name: value for name, value in asdict(samples).items() if value is not None}
            measurement = replace(measurement, **known)
        except MeasurementError as error:
            measurement = Measurement(reason=str(error))
        return self._keep(trial, load, measurement)

    def _keep(self, trial: Trial, load: LoadPoint, measurement: Measurement) -> Trial:
        self.table.append(trial, load, measurement)
        self.watcher.measured(trial.number, load, measurement)
        return replace(trial, measurements=(*trial.measurements, (load, measurement)))

    # -- confirming -----------------------------------------------------------------------------------------

    def _confirm(self) -> None:
        """Measure the recommendation again, as it will be deployed, until the best point is a confirmed one."""
        self.confirmed: set[tuple[int, LoadPoint]] = set()
        repeated: set[tuple[int, LoadPoint]] = set()
        for _ in range(CONFIRM_DEPLOYMENTS):
            best = self.best()
            if best is None or (best.trial, best.load) in repeated or self.budget.left_seconds() <= 0:
                return
            trial = self.trials[best.trial]
            self.watcher.trial_started(trial.number, trial.candidate, "confirm")
            try:
                with self.target.deploy_as_written(trial.candidate) as endpoint:
                    self.load_generator.warm_up(endpoint, best.load)
                    for load in self._confirmation_loads(best):
                        trial = self._measure(trial, endpoint, load)
                        repeated.add((trial.number, load))
                        if self._meets(trial.measurements[-1][1]):
                            self.confirmed.add((trial.number, load))
                            break
            except DeploymentError as error:
                trial = replace(trial, status="failed", reason=str(error), measurements=())
                self.table.append_failure(trial)
            self.trials[best.trial] = trial
            self.watcher.trial_finished(trial, self.best())

    def _confirmation_loads(self, best: Point) -> list[LoadPoint]:
        """The load itself, then one a tenth lower (else the next lower): a miss by a little is met there."""
        load, possible = best.load, self.problem.space.loads(best.candidate)
        lower = max(1, round(0.9 * load.concurrency))
        if possible is not None:
            lower = max((other for other in possible if other < load.concurrency), default=load.concurrency)
        loads = [load, replace(load, concurrency=lower)]
        return loads[: 1 if lower == load.concurrency else 2]

    def _meets(self, measurement: Measurement) -> bool:
        return measurement.stable and all(c.violation(measurement) <= 0 for c in self.problem.constraints)
