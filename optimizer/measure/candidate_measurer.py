"""Deploy a candidate, measure it load by load, and deploy it again after a crash of the server."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from objectives.metrics import Measurement
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import DeploymentError, ServerCrashed
from optimizer.core.interfaces import Target
from optimizer.core.trial import Crash, FreshServer, LoadPoint, Trial
from optimizer.measure.measurer import Measurer

MAX_CRASHES = 3  # crashes of a configuration before it counts as infeasible
GIVEN_UP = "given up after a first short window"  # reason in the trials table


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
    """Deploys a candidate on ``target`` and measures it with ``measurer``.

    Attributes:
        target: Deploys the candidate.
        measurer: Measures it and stores the rows.
        measure: Returns the trial with one more measurement.
        prepare: Called on each deployment before its first load; by default ``measurer.check_deployment``.
        is_hopeless: Whether the short warm-up window already rules the candidate out.
        is_worth_retrying: Whether to deploy again after a crash.
        max_crashes: Crashes before the candidate counts as infeasible; None sets no limit.
        always_deploy: Deploy even if there is no load to measure. A recorded deployment that failed has none.
        fresh: The fresh server on which the candidate is deployed from the written config.pbtxt, as production does;
            None to deploy it on the server of the search.
    """

    target: Target
    measurer: Measurer
    measure: Callable[[Trial, Endpoint, LoadPoint], Trial]
    prepare: Callable[[Endpoint], None] | None = None
    is_hopeless: Callable[[Measurement], bool] = lambda _: False
    is_worth_retrying: Callable[[], bool] = lambda: True
    max_crashes: int | None = MAX_CRASHES
    always_deploy: bool = False
    fresh: FreshServer | None = None

    def run(
        self, trial: Trial, next_load: Callable[[Trial], LoadPoint | None]
    ) -> tuple[Trial, DeploymentError | None]:
        """Deploy the candidate of ``trial`` and measure it as long as ``next_load`` names a load.

        ``next_load`` is also called before each deployment.

        Returns:
            The trial with its new measurements, and the error that ended it, if any. The error is a ServerCrashed if
            another attempt was allowed but not worth it.
        """
        retry = CrashRetry(self.max_crashes)
        prepare = self.prepare or self.measurer.check_deployment
        load: LoadPoint | None = None

        def attempt() -> None:
            nonlocal trial, load  # measurements before a crash count
            started, is_warm, load = time.monotonic(), False, None
            deploy = self.target.deploy_fresh if self.fresh else self.target.deploy
            with deploy(trial.candidate) as endpoint:
                if not self.fresh:
                    seconds = endpoint.deploy_seconds
                    seconds = round(time.monotonic() - started, 3) if seconds is None else seconds
                    trial = replace(trial, deploy_seconds=seconds)
                prepare(endpoint)
                while (load := next_load(trial)) is not None:
                    if not is_warm:
                        window = self.measurer.warm_up(endpoint, load, is_fresh=self.fresh is not None)
                        if window is not None and self.is_hopeless(window):
                            trial = self.measurer.record(trial, load, replace(window, reason=GIVEN_UP))
                            return
                        is_warm = True
                    trial = self.measure(trial, endpoint, load)

        while self.always_deploy or next_load(trial) is not None:
            try:
                attempt()
            except ServerCrashed as error:
                crash = Crash(str(error), load, self.fresh.error_probability if self.fresh else 0.0)
                trial = replace(trial, crashes=(*trial.crashes, crash))
                if not retry.count_crash():
                    reason = f"crashed {retry.crashes} times: {error}"
                    return trial, DeploymentError(reason, log=error.log, lacks_gpu_memory=error.lacks_gpu_memory)
                if not self.is_worth_retrying():
                    return trial, error
            except DeploymentError as error:
                return trial, error
            else:
                break
        return trial, None
