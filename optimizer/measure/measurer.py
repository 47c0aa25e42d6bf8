"""Deploy candidates, measure them under load, and store each measurement before the next one begins."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from objectives.metrics import Measurement
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import DeploymentError, MeasurementError, ServerCrashed
from optimizer.core.files import check_disk_space
from optimizer.core.interfaces import LoadGenerator, OutputCheck, ProgressObserver, Target, Telemetry, TrialStore
from optimizer.core.notes import Note, ServedOnCpu, present
from optimizer.core.stopwatch import Stopwatch
from optimizer.core.trial import CROSS_CHECK_GENERATOR, Crash, FreshServer, LoadPoint, Trial
from optimizer.machine.cpu_usage import DISTURBANCE_LIMIT, describe_disturbance, lost_cpu_to_others
from optimizer.machine.speed_probe import probe_speed
from optimizer.measure.output_check import NoOutputCheck
from optimizer.measure.score import Scorer

MAX_CRASHES = 3  # crashes of a configuration before it counts as infeasible
MAX_REPEATED_SECONDS = 10.0  # a longer measurement of a request rate is not repeated if it is unstable
GIVEN_UP = "given up after a first short window"  # reason in the trials table


@dataclass
class Measurer:
    """Measures deployed candidates: call ``check_deployment`` once per deployment, then ``measure`` or ``confirm``.

    Attributes:
        load_generator: Measures the search.
        telemetry: Records the resources that the server uses during a measurement.
        table: Gets each measurement, before the next one begins.
        observer: Each measurement is reported to it.
        output_check: Compares the outputs of each deployment with those of the baseline.
        scorer: Scores the outputs of each deployment; None if they are not scored.
        stopwatch: Counts the time of calls to the server, of speed probes, of writing rows of the table and of the
            display.
        confirmation: The load generator for fresh servers; None for ``load_generator``.
        cross_checking: perf_analyzer if another load generator confirms, which it checks; None otherwise.
        disturbance_limit: A window on a fresh server in which other processes took more than this share of the CPUs
            does not count for a verdict.
        speed_probe: Runs a probe of this machine's speed next to the idle server and returns its seconds, see
            ``SpeedProbe``; None if the server runs on another machine.
        with_forecast: Adds the forecast to a measurement of the search; None if there are no forecasts.
        node: The host name of a node of a cluster; empty outside of a cluster.
    """

    load_generator: LoadGenerator
    telemetry: Telemetry
    table: TrialStore
    observer: ProgressObserver
    output_check: OutputCheck = field(default_factory=NoOutputCheck)
    scorer: Scorer | None = None
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    confirmation: LoadGenerator | None = None
    cross_checking: LoadGenerator | None = None
    disturbance_limit: float = DISTURBANCE_LIMIT
    speed_probe: Callable[[], float] | None = None
    with_forecast: Callable[[Candidate, LoadPoint, Measurement], Measurement] | None = None
    node: str = ""

    def __post_init__(self) -> None:
        self._score: float | None = None
        self._output_deviation: float | None = None
        self._probe_seconds: float | None = None
        self._fell_back_to_cpu = False

    @property
    def notes(self) -> tuple[Note, ...]:
        """Notes for the user on the deployments so far."""
        on_cpu = ServedOnCpu("server_sees_no_gpu") if self._fell_back_to_cpu else None
        return present([on_cpu, self.output_check.note])

    def check_deployment(self, endpoint: Endpoint) -> None:
        """Compare the outputs with the baseline's, compute the score of the deployment and probe the speed.

        Raises DeploymentError if the outputs are wrong.
        """
        self._score = None
        self.note_device(endpoint)
        with self.stopwatch.count("server"):
            shares = [self.output_check.check(server) for server in endpoint.servers]
            self._output_deviation = max((share for share in shares if share is not None), default=None)
            if self.scorer is not None:
                self._score = self.scorer.measure(endpoint)
        self._probe_seconds = self._probe(self.speed_probe) if self.speed_probe else None

    def note_device(self, endpoint: Endpoint) -> None:
        """Remember for the notes whether the server has put the deployment on the CPU although there is a GPU."""
        self._fell_back_to_cpu |= endpoint.fell_back_to_cpu

    def _probe(self, speed_probe: Callable[[], float]) -> float:
        with self.stopwatch.count_own("probes"):
            return probe_speed(speed_probe)

    def warm_up(self, endpoint: Endpoint, load: LoadPoint, *, is_fresh: bool = False) -> Measurement | None:
        """Warm the server up with the load generator that measures it; ``is_fresh`` is whether it is a fresh server.

        Raises ServerCrashed.
        """
        measurement = self._generator(is_fresh).warm_up(endpoint, load)
        return measurement and self._with_deployment(measurement)

    def _generator(self, is_fresh: bool) -> LoadGenerator:
        return self.confirmation or self.load_generator if is_fresh else self.load_generator

    def measure(self, trial: Trial, endpoint: Endpoint, load: LoadPoint) -> Trial:
        """Return ``trial`` with one more measurement; a failed one has a reason and no values.

        Raises ServerCrashed.
        """
        return self.record(trial, load, self._measure_load(trial, endpoint, load))

    def record(self, trial: Trial, load: LoadPoint, measurement: Measurement) -> Trial:
        """Store ``measurement`` with its forecast, and return ``trial`` with it."""
        measurement = self._with_deployment(measurement)
        if self.with_forecast is not None:
            measurement = self.with_forecast(trial.candidate, load, measurement)
        self._store(trial, load, measurement)
        return replace(trial, measurements=(*trial.measurements, (load, measurement)))

    def _store(
        self, trial: Trial, load: LoadPoint, measurement: Measurement, fresh: FreshServer | None = None
    ) -> None:
        """Write the row and report it."""
        with self.stopwatch.count_own("rows"):
            self.table.append(trial, load, measurement, fresh)
        with self.stopwatch.count_own("display"):
            self.observer.measured(trial.number, load, measurement)

    def confirm(
        self,
        trial: Trial,
        endpoint: Endpoint,
        load: LoadPoint,
        fresh: FreshServer,
        seconds: float,
        count: int = 1,
    ) -> Trial:
        """Return ``trial`` with 1 to ``count`` more windows of about ``seconds`` each on the server ``fresh``.

        A window that other processes disturbed is marked as not stable. Raises ServerCrashed.
        """
        generator = self._generator(is_fresh=True)
        try:
            measurements = self._measure_with_telemetry(
                endpoint, lambda: generator.measure_windows(endpoint, load, seconds, count)
            )
        except ServerCrashed as crash:
            self.table.append(trial, load, Measurement(reason=str(crash), server_crashed=True), fresh)
            raise
        if self.speed_probe and self._probe_seconds:
            self._probe_seconds = math.sqrt(self._probe_seconds * self._probe(self.speed_probe))
        for measurement in measurements:
            measurement = self._with_deployment(measurement)
            if reason := describe_disturbance(measurement, self.disturbance_limit):
                measurement = replace(measurement, stable=False, disturbed=True, reason=reason)
            self._store(trial, load, measurement, fresh)
            trial = trial.with_row(load, measurement, fresh)
        return trial

    def cross_check(
        self, trial: Trial, endpoint: Endpoint, load: LoadPoint, fresh: FreshServer, seconds: float
    ) -> Trial:
        """Return ``trial`` with a measurement of ``cross_checking`` on the server that ``confirm`` has just measured.

        It takes about ``seconds``; the other arguments are those of ``confirm``. If it fails, even because the server
        died, it has a reason and no values: the windows that were measured before count all the same.
        """
        generator = self.cross_checking
        if generator is None or trial.confirmations[-1].is_lost:
            return trial
        try:
            (measurement,) = self._measure_with_telemetry(
                endpoint, lambda: [generator.measure(endpoint, load, seconds)]
            )
        except ServerCrashed as crash:
            measurement = Measurement(reason=str(crash), server_crashed=True)
            trial = replace(trial, crashes=(*trial.crashes, Crash(str(crash), load, fresh.error_probability)))
        measurement = self._with_deployment(measurement)
        if measurement.has_values:
            reason = describe_disturbance(measurement, self.disturbance_limit)
            measurement = replace(measurement, stable=not reason, disturbed=bool(reason), reason=reason)
        checked = replace(fresh, load_generator=CROSS_CHECK_GENERATOR)
        self._store(trial, load, measurement, checked)
        return trial.with_row(load, measurement, checked)

    def _with_deployment(self, measurement: Measurement) -> Measurement:
        """Return ``measurement`` with the deviation and the score of the outputs, and the machine's speed."""
        probe_ms = None if self._probe_seconds is None else round(1000 * self._probe_seconds, 3)
        deviation = None if self._output_deviation is None else float(f"{self._output_deviation:.3g}")
        return replace(
            measurement, score=self._score, output_deviation=deviation, speed_probe_ms=probe_ms, node=self.node
        )

    def _measure_load(self, trial: Trial, endpoint: Endpoint, load: LoadPoint) -> Measurement:
        """Return the measurement, or that of a second attempt if the first is unstable although nothing disturbed it.

        A disturbed measurement is kept, because another one would be disturbed too. So is a long one at a low request
        rate, because windows with few random arrivals rarely agree. A crash of the server is stored as a measurement
        with a reason before it is raised.
        """
        try:
            first = self._attempt(endpoint, load)
            is_long = bool(load.request_rate) and (first.measure_seconds or 0.0) > MAX_REPEATED_SECONDS
            is_final = first.stable or first.overloaded or not first.has_values or is_long
            return first if is_final or lost_cpu_to_others(first) else self._attempt(endpoint, load)
        except ServerCrashed as error:
            self.table.append(trial, load, Measurement(reason=str(error), server_crashed=True))
            raise

    def _attempt(self, endpoint: Endpoint, load: LoadPoint) -> Measurement:
        (measurement,) = self._measure_with_telemetry(endpoint, lambda: [self.load_generator.measure(endpoint, load)])
        return measurement

    def _measure_with_telemetry(
        self, endpoint: Endpoint, measure: Callable[[], list[Measurement]]
    ) -> list[Measurement]:
        """Return what ``measure`` returns, with the use of resources; one without values if it failed.

        Raises EnvironmentFault if a full disk may be the cause, because then the candidate is not at fault.
        """
        try:
            with self.telemetry.record(endpoint) as usage:
                measurements = measure()
        except ServerCrashed:
            raise
        except MeasurementError as error:
            if error.log is not None:
                check_disk_space(error.log.parent)
            return [Measurement(reason=str(error))]
        return [usage.added_to(measurement) for measurement in measurements]


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


@dataclass
class _Progress:
    """The trial with its measurements, which count if the server crashes, and the load under which it is now."""

    trial: Trial
    load: LoadPoint | None = None


class MeasurementSteps(Protocol):
    """The checks and the loads of one candidate, as ``CandidateMeasurer`` needs them."""

    def prepare(self, endpoint: Endpoint) -> None:
        """Check a deployment before its first load. Raises DeploymentError if it may not be measured."""

    def next_load(self, trial: Trial) -> LoadPoint | None:
        """Return the load to measure next, given the measurements of ``trial``; None if there is none left.

        It is also called before each deployment.
        """

    def is_hopeless(self, window: Measurement) -> bool:
        """Return whether the short warm-up ``window`` of a deployment already rules the candidate out."""

    def measure(self, trial: Trial, endpoint: Endpoint, load: LoadPoint) -> Trial:
        """Return ``trial`` with the measurement of ``load``. Raises ServerCrashed."""

    def is_worth_retrying(self) -> bool:
        """Return whether to deploy the candidate again. Called once after each crash."""


@dataclass(frozen=True)
class CandidateMeasurer:
    """Deploys a candidate and measures it, again after a crash.

    Attributes:
        target: Deploys the candidate.
        measurer: Warms the server up, and stores a warm-up that rules the candidate out.
        steps: Checks the deployments, chooses the loads and measures them.
        max_crashes: Crashes before the candidate counts as infeasible; None sets no limit.
        always_deploy: Deploy even if there is no load to measure. A recorded deployment that failed has none.
        fresh: The fresh server on which the candidate is deployed from the written config.pbtxt, as production does;
            None to deploy it on the server of the search.
    """

    target: Target
    measurer: Measurer
    steps: MeasurementSteps
    max_crashes: int | None = MAX_CRASHES
    always_deploy: bool = False
    fresh: FreshServer | None = None

    def run(self, trial: Trial) -> tuple[Trial, DeploymentError | None]:
        """Deploy the candidate of ``trial`` and measure it as long as there is a load.

        Returns:
            The trial with its new measurements, and the error that ended it, if any. The error is a ServerCrashed if
            another attempt was allowed but not worth it.
        """
        retry, progress = CrashRetry(self.max_crashes), _Progress(trial)
        while self.always_deploy or self.steps.next_load(progress.trial) is not None:
            try:
                self._deploy_and_measure(progress)
            except ServerCrashed as error:
                crash = Crash(str(error), progress.load, self.fresh.error_probability if self.fresh else 0.0)
                trial = progress.trial = replace(progress.trial, crashes=(*progress.trial.crashes, crash))
                if not retry.count_crash():
                    reason = f"crashed {retry.crashes} times: {error}"
                    return trial, DeploymentError(reason, log=error.log, lacks_gpu_memory=error.lacks_gpu_memory)
                if not self.steps.is_worth_retrying():
                    return trial, error
            except DeploymentError as error:
                return progress.trial, error
            else:
                break
        return progress.trial, None

    def _deploy_and_measure(self, progress: _Progress) -> None:
        """Deploy the candidate once and measure it; each measurement is in ``progress`` at once."""
        started, is_warm, progress.load = time.monotonic(), False, None
        with self.target.deploy(progress.trial.candidate, fresh=self.fresh is not None) as endpoint:
            if not self.fresh:
                seconds = endpoint.deploy_seconds
                seconds = round(time.monotonic() - started, 3) if seconds is None else seconds
                progress.trial = replace(progress.trial, deploy_seconds=seconds)
            self.steps.prepare(endpoint)
            while (load := self.steps.next_load(progress.trial)) is not None:
                progress.load = load
                if not is_warm:
                    window = self.measurer.warm_up(endpoint, load, is_fresh=self.fresh is not None)
                    if window is not None and self.steps.is_hopeless(window):
                        progress.trial = self.measurer.record(progress.trial, load, replace(window, reason=GIVEN_UP))
                        return
                    is_warm = True
                progress.trial = self.steps.measure(progress.trial, endpoint, load)
            progress.load = None
