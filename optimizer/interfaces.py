"""The four seams of the program. Each has one contract suite in ``tests/contract``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from objectives.metrics import Measurement
from optimizer.client.connection import Connection, ProtocolName
from optimizer.trial import Candidate, LoadPoint, Trial


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A model being served: where, and as which configuration. Addresses are ``host:port``.

    ``batcher`` is the model whose batches the candidate's settings make, where it is another one that ``model``
    calls; ``max_batch_size`` is then that of ``model`` itself. ``beside`` are models that get load at the same time.
    ``memory_bytes`` tells of the server's memory where somebody else than this machine's kernel keeps that.
    ``remote`` is the one way to a server that runs already; without it both addresses are plain.
    ``gpus`` are those that its instance groups name, as CUDA counts; empty where they name the CPU, None where they
    leave it open. ``metrics`` is where the server's Prometheus metrics are; empty where it has none.
    """

    model: str
    candidate: Candidate
    grpc: str = ""
    http: str = ""
    server_pid: int | None = None
    batcher: str = ""
    max_batch_size: int | None = None
    beside: tuple[Endpoint, ...] = ()
    memory_bytes: Callable[[], float | None] | None = field(default=None, compare=False)
    remote: Connection | None = None

    @property
    def connection(self) -> Connection:
        """What the server is asked over."""
        return self.remote or Connection(self.grpc)

    def connection_for_load(self, protocol: ProtocolName) -> Connection:
        """With ``protocol``, where there is a choice."""
        return self.remote or Connection(self.grpc if protocol == "grpc" else self.http, protocol)

    gpus: tuple[int, ...] | None = None
    metrics: str = ""

    @property
    def largest_request(self) -> int:
        """Samples; 0 where the model has no batch dimension."""
        return self.candidate.max_batch_size if self.max_batch_size is None else self.max_batch_size


@dataclass(slots=True)
class Samples:
    """Means over a recording; filled when it ends. None is unknown."""

    gpu_utilization: float | None = None
    gpu_memory_bytes: float | None = None
    gpu_power_watts: float | None = None
    gpu_sm_clock_mhz: float | None = None
    gpu_memory_clock_mhz: float | None = None
    gpu_throttling: str = ""
    server_memory_bytes: float | None = None
    other_cpu_share: float | None = None


class Searcher(Protocol):
    """Decides what is tried next. Sees trials, never servers."""

    @property
    def is_exhaustive(self) -> bool:
        """Whether every candidate is to be measured at every load, for a table of all."""
        ...

    def suggest(self) -> Candidate | None:
        """The next candidate, valid and canonical and not suggested before. None to end the search, or, while some
        that were suggested are not observed yet, until one of them is."""
        ...

    def expected_load(self, candidate: Candidate) -> int | None:
        """The concurrency at which ``candidate`` is expected to be at its best; None where nothing is expected."""
        ...

    def observe(self, trial: Trial) -> None:
        """Called once a trial is finished, failed ones too, and for each stored trial on resume."""
        ...


class Target(Protocol):
    """Where candidates are deployed."""

    def deploy(self, candidate: Candidate) -> AbstractContextManager[Endpoint]:
        """Serve ``candidate``; inside the context the endpoint answers with exactly that configuration.

        Raises DeploymentError where this candidate cannot be served, ServerFault where nothing can.
        """
        ...

    def deploy_as_written(self, candidate: Candidate) -> AbstractContextManager[Endpoint]:
        """As ``deploy``, the way production will: afresh, from the config.pbtxt that is handed out."""
        ...

    def close(self) -> None:
        """Leave nothing behind: no process, port or shared memory. May be called twice."""
        ...


class ServerTarget(Target, Protocol):
    """One with a real server."""

    @property
    def server_version(self) -> str:
        """As the server tells it; empty before the first deployment."""
        ...

    def start(self) -> None:
        """Called ahead of the first deployment, which may then take less."""
        ...


class LoadGenerator(Protocol):
    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        """Apply ``load`` and measure, for about ``seconds`` where they are given, else for as long as it takes.

        Raises MeasurementError where there is no figure at all, ServerCrashed where that is the server's fault.
        """
        ...

    def windows(self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int) -> list[Measurement]:
        """One to ``count`` measurements of about ``seconds`` each: as many as are taken of one stretch of the load.

        Raises as ``measure``.
        """
        ...

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> Measurement | None:
        """Called once a deployment, before its first measurement. What it saw in passing, where it saw anything.

        Raises ServerCrashed.
        """
        ...


class Guard(Protocol):
    """Whether a deployment's answers are those of the unbatched baseline."""

    @property
    def needs_reference(self) -> bool: ...

    @property
    def note(self) -> str:
        """What the user should know of the comparison; empty where it is as asked."""
        ...

    def reference(self, endpoint: Endpoint) -> None:
        """Take the answers of the unbatched baseline, once a run."""
        ...

    def check(self, endpoint: Endpoint) -> None:
        """Raises DeploymentError where the answers differ."""
        ...


class Telemetry(Protocol):
    def record(self, endpoint: Endpoint) -> AbstractContextManager[Samples]:
        """Sample the server's resources while the context is open."""
        ...
