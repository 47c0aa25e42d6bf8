"""Run one trial of the search: deploy its candidate and search for the highest load that meets the SLA."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import BadInputError, DeploymentError, LoadRefused, ServerCrashed
from optimizer.core.interfaces import Target
from optimizer.core.stopwatch import Stopwatch
from optimizer.core.trial import Candidate, LoadPoint, Trial
from optimizer.measure.candidate_measurer import CandidateMeasurer
from optimizer.measure.concurrency_search import next_concurrency
from optimizer.measure.load_search import LoadSearchRules, is_hopeless
from optimizer.measure.measurer import Measurer
from optimizer.measure.rate_search import next_rate


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
    stopwatch: Stopwatch

    def __post_init__(self) -> None:
        self._retook_reference = False
        self.log: Path | None = None  # log of the last trial that failed

    def run(self, trial: Trial, role: str, rules: LoadSearchRules) -> Trial:
        """Return ``trial`` at its end. A trial that failed or whose load search is complete is not deployed again.

        Raises BadInputError if the server refuses the baseline, which is the model as the user configured it.
        """
        next_load = next_rate if rules.open_loop else next_concurrency
        if trial.status != "ok" or (trial.measurements and next_load(trial.measurements, rules) is None):
            return trial
        self.measurer.observer.trial_started(trial.number, trial.candidate, role)
        self._retake_reference(trial.candidate)
        is_baseline = trial.candidate == self.baseline
        served_nothing = False

        def prepare(endpoint: Endpoint) -> None:
            if is_baseline and self.measurer.output_check.needs_reference:
                with self.stopwatch.count("server"):
                    self.measurer.output_check.record_reference(endpoint)
            self.measurer.check_deployment(endpoint)

        def choose_load(current: Trial) -> LoadPoint | None:
            if served_nothing or (current.measurements and self.seconds_left() < 0):
                return None
            return next_load(current.measurements, rules)

        def measure(current: Trial, endpoint: Endpoint, load: LoadPoint) -> Trial:
            nonlocal served_nothing
            current = self.measurer.measure(current, endpoint, load)
            served = current.measurements[-1][1].throughput_infer_per_sec
            served_nothing = served is None and not rules.open_loop  # a rate may be too high for the load generator
            return current

        trial, error = CandidateMeasurer(self.target, self.measurer).run(
            trial,
            choose_load,
            measure=measure,
            prepare=prepare,
            is_hopeless=lambda window: is_hopeless(window, rules),
            always_deploy=not trial.measurements,
            is_worth_retrying=lambda: is_baseline or self.seconds_left() > 0,  # all is compared with the baseline
        )
        if error is None:
            return trial
        trial = self._fail(trial, error)
        if is_baseline and isinstance(error, LoadRefused):
            raise BadInputError(
                f"the server refuses the model as it is configured: {error}; correct its config.pbtxt or its files",
                log=error.log,
            )
        return trial

    def _fail(self, trial: Trial, error: DeploymentError) -> Trial:
        """Return ``trial`` as infeasible, whatever its measurements were; its rows stay in the table."""
        served = any(measurement.throughput_infer_per_sec is not None for _, measurement in trial.measurements)
        if isinstance(error, ServerCrashed) and served:
            return trial  # the time was up before another attempt
        trial = replace(trial, status="failed", reason=str(error), measurements=())
        self.log = error.log
        self.measurer.table.append_failure(trial)
        return trial

    def _retake_reference(self, candidate: Candidate) -> None:
        """Deploy the baseline once for its reference outputs, if a resume or a dead server lost them."""
        needed = self.measurer.output_check.needs_reference and not self._retook_reference
        if needed and self.baseline is not None and candidate != self.baseline:
            self._retook_reference = True
            take_reference(self.target, self.measurer, self.baseline)


def take_reference(target: Target, measurer: Measurer, baseline: Candidate) -> None:
    """Deploy the baseline for its reference outputs if they are missing. A failed deployment gives none."""
    check = measurer.output_check
    if check.needs_reference:
        with contextlib.suppress(DeploymentError), target.deploy(baseline) as endpoint:
            check.record_reference(endpoint)
