"""Deploys a candidate and measures it load by load, and deploys it again after a server crash."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from objectives.metrics import Measurement
from optimizer.core.errors import BadInputError, DeploymentError, LoadRefused, ServerCrashed
from optimizer.core.interfaces import Endpoint, Target
from optimizer.core.timing import Stopwatch
from optimizer.core.trial import Candidate, LoadPoint, Trial
from optimizer.measure.load_search import LoadSearchRules, is_hopeless, next_load, next_rate
from optimizer.measure.measurer import Measurer

MAX_CRASHES = 3  # crashes of a configuration before it counts as infeasible
HOPELESS = "given up after a first short window"  # reason in the trials table


@dataclass
class CrashRetry:
    """Count the crashes of one candidate and decide whether it gets another attempt.

    A crash is a dead server or, on a cluster, a lost worker. ``max_crashes`` None sets no limit.
    """

    max_crashes: int | None = MAX_CRASHES
    crashes: int = 0

    def count_crash(self) -> bool:
        """Count one crash. Return whether another attempt is allowed."""
        self.crashes += 1
        return self.max_crashes is None or self.crashes < self.max_crashes


@dataclass(frozen=True)
class CandidateMeasurer:
    """Deploy candidates on ``target`` and measure them with ``measurer``."""

    target: Target
    measurer: Measurer

    def run(
        self,
        trial: Trial,
        next_load: Callable[[Trial], LoadPoint | None],
        *,
        measure: Callable[[Trial, Endpoint, LoadPoint], Trial] | None = None,
        prepare: Callable[[Endpoint], None] | None = None,
        is_hopeless: Callable[[Measurement], bool] = lambda _: False,
        is_worth_retrying: Callable[[], bool] = lambda: True,
        retry: CrashRetry | None = None,
        always_deploy: bool = False,
        fresh: bool = False,
    ) -> tuple[Trial, DeploymentError | None]:
        """Deploy the candidate of ``trial`` and measure it as long as ``next_load`` names a load.

        Args:
            trial: The trial with the measurements so far.
            next_load: Returns the load to measure next, None at the end. It is also called before each deployment.
            measure: Returns the trial with one more measurement; by default ``measurer.measure``.
            prepare: Called on each deployment before its first load; by default ``measurer.check_deployment``.
            is_hopeless: Whether the short warm-up window already rules the candidate out.
            is_worth_retrying: Whether to deploy again after a crash.
            retry: The limit on crashes.
            always_deploy: Deploy even if there is no load to measure. A recorded deployment that failed has none.
            fresh: Deploy on a fresh server from the written config.pbtxt, as production does.

        Returns:
            The trial with its new measurements, and the error that ended it, if any. The error is a ServerCrashed if
            another attempt was allowed but not worth it.
        """
        retry = retry or CrashRetry()
        measure = measure or self.measurer.measure
        prepare = prepare or self.measurer.check_deployment

        def attempt() -> None:
            nonlocal trial  # measurements before a crash count
            started, is_warm = time.monotonic(), False
            deploy = self.target.deploy_fresh if fresh else self.target.deploy
            with deploy(trial.candidate) as endpoint:
                if not fresh:
                    seconds = endpoint.deploy_seconds
                    seconds = round(time.monotonic() - started, 3) if seconds is None else seconds
                    trial = replace(trial, deploy_seconds=seconds)
                prepare(endpoint)
                while (load := next_load(trial)) is not None:
                    if not is_warm:
                        window = self.measurer.warm_up(endpoint, load, confirming=fresh)
                        if window is not None and is_hopeless(window):
                            trial = self.measurer.record(trial, load, replace(window, reason=HOPELESS))
                            return
                        is_warm = True
                    trial = measure(trial, endpoint, load)

        while always_deploy or next_load(trial) is not None:
            try:
                attempt()
            except ServerCrashed as error:
                if not retry.count_crash():
                    reason = f"crashed {retry.crashes} times: {error}"
                    return trial, DeploymentError(reason, log=error.log)
                if not is_worth_retrying():
                    return trial, error
            except DeploymentError as error:
                return trial, error
            else:
                break
        return trial, None


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
        rule = next_rate if rules.open_loop else next_load
        if trial.status != "ok" or (trial.measurements and rule(trial.measurements, rules) is None):
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
            return rule(current.measurements, rules)

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
