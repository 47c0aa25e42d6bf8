"""Load points, trials and measured points: the frozen data of a study, without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from objectives.metrics import Measurement
from optimizer.core.candidate import Candidate
from optimizer.core.errors import DeploymentError

CROSS_CHECK_GENERATOR = "perf_analyzer"  # load generator of the measurements that check tune's own client
MAX_CONCURRENCY = 2**16  # a simulation of more requests in flight would exceed the memory
TrialRole: TypeAlias = Literal[  # why a trial runs
    "baseline",  # the configuration as given, which gains are relative to
    "dynamic_batching",  # the same configuration with plain `dynamic_batching {}`
    "search",  # the searcher suggests a candidate
    "repeat",  # the searcher suggests a candidate again, because deployments of one candidate differ
    "control",  # the speed of the machine has changed, so the best candidate is measured again
    "abandoned",  # the worker of a shared study that tried the candidate has died
    "resumed",  # an earlier session of the run began it
    "confirm",  # the candidate is measured on a fresh server
    "sweep",  # `tune sweep` measures the candidate
]


@dataclass(frozen=True, slots=True, order=True)
class LoadPoint:
    """A load.

    Attributes:
        request_batch_size: Samples of each request (the mean for mixed sizes).
        concurrency: Requests in flight at any time in a closed loop; 0 in an open loop.
        request_rate: Requests per second that an open loop sends, regardless of the answers; 0 in a closed loop.
    """

    request_batch_size: float
    concurrency: int = 0
    request_rate: float = 0.0

    def scaled(self, share: float) -> LoadPoint:
        """Return ``share`` times the load: at least one request in flight."""
        concurrency = max(1, round(share * self.concurrency)) if self.concurrency else 0
        return replace(self, concurrency=concurrency, request_rate=share * self.request_rate)

    def __str__(self) -> str:
        """Return the load for messages: ``concurrency 24`` or ``3,000 requests/s``."""
        return f"{self.request_rate:,.6g} requests/s" if self.request_rate else f"concurrency {self.concurrency:,}"

    def cells(self) -> dict[str, float | None]:
        """Return the cells of a table by column, with None for the rate of a closed loop, or the concurrency."""
        return {
            "request_batch_size": self.request_batch_size,
            "concurrency": self.concurrency or None,
            "request_rate": self.request_rate or None,
        }


@dataclass(frozen=True, slots=True)
class ConfirmationWindow:
    """A window that was measured on a fresh server.

    Attributes:
        server: Number of the fresh server among those of the run, from 1, in the order of measuring.
        load: Load of the window.
        measurement: The measurement of the window.
        error_probability: Error probability of the test of this load; 0 if the candidate is only compared.
        latency_slope: See ``FreshServer``.
    """

    server: int
    load: LoadPoint
    measurement: Measurement
    error_probability: float = 0.0
    latency_slope: float | None = None

    @property
    def is_tested(self) -> bool:
        """Whether the window belongs to a test."""
        return self.error_probability > 0

    @property
    def is_lost(self) -> bool:
        """Whether the window has no values: the server crashed, or the load generator failed or sent too late."""
        return not self.measurement.has_values


@dataclass(frozen=True, slots=True)
class FreshServer:
    """The fresh server of a row of the trials table.

    Attributes:
        number: Number of the server among those of the run, from 1, in the order of measuring.
        error_probability: Error probability of the test of the load; 0 if the candidate is only compared.
        load_generator: The load generator of a measurement that checks tune's own client; empty for others.
        repeats: Number of the first lost server of an earlier session that this one repeats; 0 if it repeats none.
        latency_slope: Rise of the log of latency over the fall of the log of the CPU share that other programs leave,
            as the search has shown it, or a usual one; None in a separate test, which does not depend on the search.
    """

    number: int
    error_probability: float = 0.0
    load_generator: str = ""
    repeats: int = 0
    latency_slope: float | None = None


@dataclass(frozen=True, slots=True)
class Crash:
    """A server that died or hung.

    Attributes:
        reason: The error message.
        load: Load that it served; None if it was not measured yet.
        error_probability: Error probability of the test of this load; 0 if the server was not part of a test.
    """

    reason: str
    load: LoadPoint | None = None
    error_probability: float = 0.0


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate with its measurements.

    Attributes:
        number: Number of the trial in its study, from 0.
        candidate: Configuration that was deployed.
        measurements: Pairs of load and measurement of the search, in the order of measuring.
        status: ``failed`` if the candidate could not be deployed.
        reason: Why it failed; empty otherwise.
        deploy_seconds: Time of the deployment; None if unknown.
        confirmations: Measurements on fresh servers. Only these count for the verdict.
        cross_checks: Measurements of perf_analyzer on the same servers, which check tune's own load client.
        lacks_gpu_memory: Whether it failed because a GPU has too little memory.
        crashes: Its servers that died or hung.
    """

    number: int
    candidate: Candidate
    measurements: tuple[tuple[LoadPoint, Measurement], ...] = ()
    status: Literal["ok", "failed"] = "ok"
    reason: str = ""
    deploy_seconds: float | None = None
    confirmations: tuple[ConfirmationWindow, ...] = ()
    cross_checks: tuple[ConfirmationWindow, ...] = ()
    lacks_gpu_memory: bool = False
    crashes: tuple[Crash, ...] = ()

    @property
    def has_served(self) -> bool:
        """Whether a measurement of the search has a throughput."""
        return any(measurement.has_values for _, measurement in self.measurements)

    def windows_at(self, load: LoadPoint) -> list[ConfirmationWindow]:
        """Return the confirmations at ``load``."""
        return [window for window in self.confirmations if window.load == load]

    def point(self, load: LoadPoint, measurement: Measurement) -> Point:
        """Return ``measurement`` as the point of the candidate at ``load``."""
        return Point(self.number, self.candidate, load, measurement)

    def with_failure(self, error: DeploymentError) -> Trial:
        """Return the trial as failed with ``error``, without measurements."""
        return Trial(
            self.number,
            self.candidate,
            status="failed",
            reason=str(error),
            deploy_seconds=self.deploy_seconds,
            lacks_gpu_memory=error.lacks_gpu_memory,
        )

    def with_confirmation(self, confirmation: ConfirmationWindow, repeats: int = 0) -> Trial:
        """Return the trial with one more confirmation.

        It replaces lost ones at the end: that of the same server, or those of the server ``repeats`` and later ones.
        """
        kept, first = self.confirmations, repeats or confirmation.server
        while kept and kept[-1].is_lost and kept[-1].server >= first:
            kept = kept[:-1]
        return replace(self, confirmations=(*kept, confirmation))

    def with_row(self, load: LoadPoint, measurement: Measurement, fresh: FreshServer) -> Trial:
        """Return the trial with one more row of the server ``fresh``."""
        confirmation = ConfirmationWindow(
            fresh.number, load, measurement, fresh.error_probability, fresh.latency_slope
        )
        if fresh.load_generator:
            return replace(self, cross_checks=(*self.cross_checks, confirmation))
        return self.with_confirmation(confirmation, fresh.repeats)


@dataclass(frozen=True, slots=True)
class Point:
    """The measurement of one candidate at one load. Pareto fronts and recommendations consist of points."""

    trial: int
    candidate: Candidate
    load: LoadPoint
    measurement: Measurement

    @property
    def throughput_infer_per_sec(self) -> float:
        """The throughput; 0 if it is unknown."""
        return self.measurement.throughput_infer_per_sec or 0.0


def all_points(trials: Sequence[Trial]) -> Iterator[Point]:
    """Yield every measured point of every trial."""
    for trial in trials:
        for load, measurement in trial.measurements:
            yield trial.point(load, measurement)


def trial_of(point: Point, trials: Iterable[Trial]) -> Trial:
    """Return the trial that measured ``point``, which is one of ``trials``."""
    return next(trial for trial in trials if trial.number == point.trial)


def latest_points(trials: Sequence[Trial]) -> list[Point]:
    """Return the measured points, with the latest measurement of each load of each trial.

    An unstable measurement does not replace an earlier stable one.
    """
    latest: dict[tuple[int, LoadPoint], Point] = {}
    for point in all_points(trials):
        before = latest.get((point.trial, point.load))
        if before is None or point.measurement.stable or not before.measurement.stable:
            latest[point.trial, point.load] = point
    return list(latest.values())
