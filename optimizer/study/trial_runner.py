"""Run the trials of a search: deploy each candidate and search for the highest load that meets the SLA."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from objectives.metrics import Measurement
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import BadInputError, DeploymentError, ModelRefused, ServerCrashed
from optimizer.core.interfaces import Target
from optimizer.core.trial import LoadPoint, Trial, TrialRole
from optimizer.measure.load_search import LoadSearchRules, is_hopeless, next_load, with_first_rate
from optimizer.measure.measurer import CandidateMeasurer, Measurer
from optimizer.measure.server_errors import is_refused_by_queue
from optimizer.study.scheduler import Scheduler


class EndedTrial(NamedTuple):
    """A trial at its end.

    ``log`` is that of its failure. ``was_deployed`` is False if nothing was left to do, as for a trial that failed,
    whose load search is complete, or that has measurements when the time is over.
    """

    trial: Trial
    log: Path | None = None
    was_deployed: bool = True


@dataclass
class _TrialSteps:
    """The MeasurementSteps of one trial of a search: the reference outputs, the output check and the load search.

    ``served_nothing`` is whether the newest load gave no values, and a lower one would give none either.
    """

    measurer: Measurer
    rules: LoadSearchRules
    seconds_left: Callable[[], float]
    is_baseline: bool
    served_nothing: bool = False

    def prepare(self, endpoint: Endpoint) -> None:
        """Check a deployment before its first load. That of the baseline gives the reference outputs if needed.

        While no rate of another trial is known, a warm-up with one request at a time shows where to begin.
        """
        if self.is_baseline and self.measurer.output_check.needs_reference:
            with self.measurer.stopwatch.count("server"):
                self.measurer.output_check.record_reference(endpoint)
        self.measurer.check_deployment(endpoint)
        if self.rules.open_loop and not self.rules.first_load:
            one_at_a_time = LoadPoint(self.rules.request_batch_size, concurrency=1)
            self.rules = with_first_rate(self.rules, self.measurer.warm_up(endpoint, one_at_a_time))

    def next_load(self, trial: Trial) -> LoadPoint | None:
        """Return the next load of the load search; None if it is complete or its time is over."""
        if self.served_nothing or (trial.measurements and self.seconds_left() < 0):
            return None
        return next_load(trial.measurements, self.rules)

    def is_hopeless(self, window: Measurement) -> bool:
        """Return whether the warm-up shows clearly less throughput than the best trial, outside the bounds."""
        return is_hopeless(window, self.rules)

    def measure(self, trial: Trial, endpoint: Endpoint, load: LoadPoint) -> Trial:
        """Return ``trial`` with the measurement of ``load``. Raises ServerCrashed."""
        trial = self.measurer.measure(trial, endpoint, load)
        newest = trial.measurements[-1][1]
        # a rate may be too high for the load generator, and a concurrency for the model's queue
        may_serve_less = self.rules.open_loop or (load.concurrency > 1 and is_refused_by_queue(newest.reason))
        self.served_nothing = not newest.has_values and not may_serve_less
        return trial

    def is_worth_retrying(self) -> bool:
        """Return whether to deploy again after a crash; always for the baseline, with which all is compared."""
        return self.is_baseline or self.seconds_left() > 0


@dataclass
class TrialRunner:
    """Run trials of one search, one at a time.

    ``baseline`` gives the reference outputs; a recorded table may have none. ``seconds_left`` returns the time until
    the search has to end.
    """

    target: Target
    measurer: Measurer
    baseline: Candidate | None
    seconds_left: Callable[[], float]
    _retook_reference: bool = field(default=False, init=False)

    def run(self, trial: Trial, role: TrialRole, rules: LoadSearchRules) -> EndedTrial:
        """Run ``trial`` and return it at its end.

        Raises BadInputError if the server refuses the baseline, which is the model as the user configured it.
        """
        is_over = self.seconds_left() < 0
        if trial.status != "ok" or (trial.measurements and (is_over or next_load(trial.measurements, rules) is None)):
            return EndedTrial(trial, was_deployed=False)
        self.measurer.observer.trial_started(trial.number, trial.candidate, role)
        self._retake_reference(trial.candidate)
        steps = _TrialSteps(self.measurer, rules, self.seconds_left, is_baseline=trial.candidate == self.baseline)
        measuring = CandidateMeasurer(self.target, self.measurer, steps, always_deploy=not trial.measurements)
        trial, error = measuring.run(trial)
        if error is None or (isinstance(error, ServerCrashed) and trial.has_served):  # no time for another attempt
            return EndedTrial(trial)
        return self._fail(trial, error)

    def _fail(self, trial: Trial, error: DeploymentError) -> EndedTrial:
        """Store the failure of ``trial``, whatever it has measured, and return the trial at its end.

        Raises BadInputError if the server refuses the baseline.
        """
        failed = trial.with_failure(error)
        self.measurer.table.append_failure(failed)
        if trial.candidate == self.baseline and isinstance(error, ModelRefused):
            advice = "" if error.has_advice else "; correct its config.pbtxt or its files"
            raise BadInputError(f"the server refuses the model as it is configured: {error}{advice}", log=error.log)
        return EndedTrial(failed, error.log)

    def _retake_reference(self, candidate: Candidate) -> None:
        """Deploy the baseline once for its reference outputs, if a resume or a dead server lost them."""
        needed = self.measurer.output_check.needs_reference and not self._retook_reference
        if needed and self.baseline is not None and candidate != self.baseline:
            self._retook_reference = True
            take_reference(self.target, self.measurer, self.baseline)


def run_trials(scheduler: Scheduler, target: Target, measurer: Measurer) -> list[Trial]:
    """Run the trials that ``scheduler`` chooses, one at a time, until the search is over. Return all trials.

    The search continues where the trials table ends. All measurements are in the table, whatever stops it.
    """
    measurer.with_forecast = scheduler.with_forecast  # a copy of the measurer would have notes of its own
    runner = TrialRunner(target, measurer, scheduler.baseline, scheduler.budget.search_seconds_left)
    earlier = measurer.table.read()
    unfinished = earlier.pop() if earlier else None
    scheduler.resume(earlier)
    scheduled = scheduler.resume_unfinished(unfinished) if unfinished else scheduler.next_or_wait()
    while scheduled is not None:
        role, trial = scheduled
        ended = runner.run(trial, role, scheduler.rules(trial.candidate))
        scheduler.record_finished(ended.trial, ended.log)
        if ended.was_deployed:  # an earlier session has shown a trial that needs nothing more
            measurer.observer.trial_finished(ended.trial, scheduler.best_so_far())
        scheduled = scheduler.next_or_wait()
    return scheduler.trials


def take_reference(target: Target, measurer: Measurer, baseline: Candidate) -> None:
    """Deploy the baseline for its reference outputs if they are missing. A failed deployment gives none."""
    check = measurer.output_check
    if check.needs_reference:
        with contextlib.suppress(DeploymentError), target.deploy(baseline) as endpoint:
            check.record_reference(endpoint)
