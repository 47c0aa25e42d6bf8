"""The interfaces of searchers, targets, load generators, output checks, telemetry, stores, observers and clocks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from objectives.metrics import Forecast, Measurement
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.notes import Note
from optimizer.core.resource_usage import ResourceUsage
from optimizer.core.trial import FreshServer, LoadPoint, Point, Trial, TrialRole


class Searcher(Protocol):
    """Decides which candidate is tried next. It sees trials, never servers.

    The scheduler calls ``suggest`` and ``expected_load`` for the next trial, measures it, and calls ``observe``. On a
    resume it first calls ``observe`` for each stored trial, in their order. Calls never overlap.
    """

    @property
    def is_exhaustive(self) -> bool:
        """Whether every candidate is measured at every load, as for a complete table."""

    def suggest(self) -> Candidate | None:
        """Return the next candidate, which is valid and canonical.

        ``SearchSpace.canonical`` defines canonical candidates. An observed candidate may be suggested again, because
        deployments of one candidate differ, but none that is not observed yet. Several candidates may be suggested
        before the first one is observed, if trials run in parallel. None ends the search. If suggested candidates are
        not observed yet, None asks the scheduler to call again after the next ``observe``.
        """

    def expected_load(self, candidate: Candidate) -> int | None:
        """Return the concurrency at which the load search of ``candidate`` starts; None for its default.

        Called once for each trial, before its deployment. None as well if this trial was not suggested.
        """

    def forecast(self, candidate: Candidate, load: LoadPoint, speed_probe_ms: float | None) -> Forecast | None:
        """Return the forecast of a measurement of ``candidate`` at ``load``; None if the method makes none.

        It is made from trials that were observed before the last suggestion, so never from the same deployment.
        ``speed_probe_ms`` is the speed probe of the deployment, None if unknown. Called for each measurement of the
        search.
        """

    def observe(self, trial: Trial) -> None:
        """Learn from a finished trial. Called once for each trial, including failed and stored trials."""


class Target(Protocol):
    """Deploys candidates on a server: embedded, local, in Docker, remote, recorded or simulated."""

    def deploy(self, candidate: Candidate, *, fresh: bool = False) -> AbstractContextManager[Endpoint]:
        """Serve ``candidate`` within the context. The endpoint is ready and serves exactly that configuration.

        Called once for each trial: a target may reuse a running server and reload only the model. Called with
        ``fresh`` for confirmations: the candidate is served as in production, on a new server, from the
        ``config.pbtxt`` that tritune writes.

        Raises:
            DeploymentError: This candidate cannot be served; the trial fails and the search continues.
            ServerFault: The server cannot serve any candidate; the run ends.
        """

    def close(self) -> None:
        """End all processes and free all ports and shared memory. May be called twice."""


class ServerTarget(Target, Protocol):
    """A target with a real server."""

    @property
    def server_version(self) -> str:
        """The version that the server reports; empty before the first deployment."""

    def start(self) -> None:
        """Start the server ahead of the first deployment, to save time. Called at most once."""

    def forget_vanished(self) -> None:
        """Remove links to files that no longer exist, which keep the server from listing its model repository."""


class LoadGenerator(Protocol):
    """Sends requests to an endpoint and measures throughput and latency."""

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        """Return the measurement of ``load``.

        Called for each load of a trial. ``seconds`` is the approximate measuring time; None lets the load generator
        measure until throughput and latency are stable.

        The measurement has the throughput, the average and the quantiles of the latency, ``requests``,
        ``measure_seconds`` and ``stable``, and a ``reason`` if it is not stable. Verdicts are narrower with
        ``latency_sketch``, which ``goodput_infer_per_sec`` and percentiles such as p99.9 need.

        Raises:
            MeasurementError: There are no values; the point is recorded as failed.
            ServerCrashed: There are no values because the server died or hangs.
        """

    def measure_windows(self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int) -> list[Measurement]:
        """Return 1 to ``count`` measurements of about ``seconds`` each, taken from one uninterrupted load.

        Called for confirmations, whose verdict needs several windows. Raises the errors of ``measure``.
        """

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> Measurement | None:
        """Send requests until the server is warm. Called once for each deployment, before its first measurement.

        Returns a rough measurement if the load generator took one, otherwise None. Raises ServerCrashed.
        """


class OutputCheck(Protocol):
    """Checks that a deployment returns the same outputs as the unbatched baseline."""

    @property
    def needs_reference(self) -> bool:
        """Whether ``record_reference`` has yet to be called on the baseline."""

    @property
    def note(self) -> Note | None:
        """A note for the user if the check is limited or off; None otherwise."""

    def record_reference(self, endpoint: Endpoint) -> None:
        """Store the outputs of the unbatched baseline. Called once for each run, on the deployed baseline."""

    def check(self, endpoint: Endpoint) -> float | None:
        """Compare the outputs with the reference. Called once for each deployment.

        Return the largest difference as a share of the allowed one; None if nothing was compared.
        Raises DeploymentError if they differ by more than the tolerance.
        """


class Telemetry(Protocol):
    """Samples the resources of a server while it is under load."""

    def record(self, endpoint: Endpoint) -> AbstractContextManager[ResourceUsage]:
        """Sample within the context, and fill the returned object when the context ends.

        Called for each measurement. It raises no error: values that cannot be read stay None.
        """


class ProgressObserver(Protocol):
    """Receives the events of a run as they happen, for example to print them."""

    def trial_started(self, number: int, candidate: Candidate, role: TrialRole) -> None: ...

    def measured(self, number: int, load: LoadPoint, measurement: Measurement) -> None: ...

    def trial_finished(self, trial: Trial, best: Point | None) -> None: ...


class TrialStore(Protocol):
    """Stores measurements, each before the next one begins; see ``optimizer.store.trials_table``."""

    def append(
        self, trial: Trial, load: LoadPoint, measurement: Measurement, fresh: FreshServer | None = None
    ) -> None: ...

    def append_failure(self, trial: Trial) -> None: ...

    def read(self) -> list[Trial]: ...


class Clock(Protocol):
    """A clock for work at regular times. The module ``time`` is the clock of this machine."""

    def monotonic(self) -> float:
        """Return the time since an arbitrary moment in seconds."""

    def sleep(self, seconds: float, /) -> None:
        """Return after ``seconds``."""
