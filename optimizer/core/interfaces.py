"""The interfaces that searchers, targets, load generators, output checks and telemetry implement.

It also holds the objects that these pass on: ``Connection`` (address, protocol, headers, TLS), ``Endpoint`` (a
deployed model) and ``ResourceUsage``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from objectives.metrics import Forecast, Measurement
from optimizer.core.errors import BadInputError
from optimizer.core.notes import Note
from optimizer.core.stopwatch import Stopwatch
from optimizer.core.trial import Candidate, LoadPoint, Trial

ProtocolName: TypeAlias = Literal["grpc", "http"]

REDACTED = "***"
MAX_HEADER_CHARACTERS = 8192  # limit for all header values together, which tritonserver has over HTTP
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")


@dataclass(frozen=True)
class Tls:
    """PEM files for TLS.

    ``ca`` verifies the server's certificate (None: the certificates that this machine trusts). ``cert`` and ``key``
    are the client's own; set both or neither.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


@dataclass(frozen=True)
class Connection:
    """How to reach a server.

    Attributes:
        address: ``host:port`` of gRPC or HTTP.
        protocol: The protocol that is spoken at the address.
        headers: Headers of every request. Their values are secrets: no message, log or file contains them.
        tls: Certificates; None for an unencrypted connection.

    Raises BadInputError for a header that cannot be sent.
    """

    address: str
    protocol: ProtocolName = "grpc"
    headers: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    tls: Tls | None = None

    def __post_init__(self) -> None:
        for name, value in self.headers.items():
            if not _NAME.fullmatch(name):
                raise BadInputError(f"header {ascii(name)[1:-1]:.60}: not a header name; write NAME:VALUE")
            if not (value.isascii() and value.isprintable()):
                raise BadInputError(f"header {name}: the value has control or non-ASCII characters; remove them")
        if sum(map(len, self.headers.values())) > MAX_HEADER_CHARACTERS:
            raise BadInputError(
                f"headers of more than {MAX_HEADER_CHARACTERS:,} characters: no tritonserver takes them"
            )

    @property
    def host(self) -> str:
        """The host without the brackets of an IPv6 address."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port of the address."""
        return int(self.address.rpartition(":")[2])

    @property
    def sent_headers(self) -> dict[str, str]:
        """The headers with lower-case names: gRPC accepts no others, and HTTP ignores the case."""
        return {name.lower(): value for name, value in self.headers.items()}

    def redact(self, text: str) -> str:
        """Return ``text`` with ``***`` in place of each header value."""
        for value in sorted(filter(None, self.headers.values()), key=len, reverse=True):
            text = text.replace(value, REDACTED)
        return text


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A deployed model: its addresses and its configuration. Addresses are ``host:port``.

    Attributes:
        model: Name of the model that receives the requests.
        candidate: Configuration that is deployed.
        grpc: Address of gRPC, without TLS.
        http: Address of HTTP, without TLS.
        server_pid: Process of the server; None if it does not run on this machine.
        batcher: Model that the candidate configures, if ``model`` is an ensemble or a BLS model that calls it.
        max_batch_size: ``max_batch_size`` of ``model`` itself, if ``batcher`` is set.
        concurrent_models: Models that receive load at the same time on the same server.
        memory_bytes: Returns the server's memory in bytes, for a server in a container; None to read it from the
            processes below ``server_pid``.
        remote: Connection to a server that tritune did not start; ``grpc`` and ``http`` are then unused.
        gpus: CUDA indices of the GPUs in its instance groups. Empty if they run on the CPU, None if they name no GPU.
        fell_back_to_cpu: Whether the server put instances without a kind on the CPU although it was given GPUs.
        metrics: Address of the server's Prometheus metrics; empty if it has none.
        deploy_seconds: Time of the deployment, if it was recorded; None to take the time.
        replicas: The other server processes that serve the same configuration; the load is spread over all of them.
    """

    model: str
    candidate: Candidate
    grpc: str = ""
    http: str = ""
    server_pid: int | None = None
    batcher: str = ""
    max_batch_size: int | None = None
    concurrent_models: tuple[Endpoint, ...] = ()
    memory_bytes: Callable[[], float | None] | None = field(default=None, compare=False)
    remote: Connection | None = None
    gpus: tuple[int, ...] | None = None
    fell_back_to_cpu: bool = False
    metrics: str = ""
    deploy_seconds: float | None = None
    replicas: tuple[Endpoint, ...] = ()

    @property
    def servers(self) -> tuple[Endpoint, ...]:
        """The endpoint of each server process: this one and its replicas."""
        return (self, *self.replicas)

    @property
    def connection(self) -> Connection:
        """The connection for management requests, such as statistics and readiness."""
        return self.remote or Connection(self.grpc)

    def connection_for_load(self, protocol: ProtocolName) -> Connection:
        """Return the connection for inference requests; ``protocol`` does not apply to a remote server."""
        return self.remote or Connection(self.grpc if protocol == "grpc" else self.http, protocol)

    @property
    def largest_request(self) -> int:
        """The largest request in samples; 0 if the model has no batch dimension."""
        return self.candidate.max_batch_size if self.max_batch_size is None else self.max_batch_size


@dataclass(slots=True)
class ResourceUsage:
    """Resources that the server used during a recording, filled when the recording ends. None means unknown.

    The fields have the meaning of those of ``Measurement``.
    """

    gpu_utilization: float | None = None
    gpu_memory_bytes: float | None = None
    gpu_power_watts: float | None = None
    gpu_sm_clock_mhz: float | None = None
    gpu_memory_clock_mhz: float | None = None
    gpu_throttling: str = ""
    server_memory_bytes: float | None = None
    other_cpu_share: float | None = None
    kv_cache_utilization: float | None = None
    engine_tokens_per_sec: float | None = None
    engine_preemptions: float | None = None


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

    def deploy(self, candidate: Candidate) -> AbstractContextManager[Endpoint]:
        """Serve ``candidate`` within the context. The endpoint is ready and serves exactly that configuration.

        Called once for each trial. A target may reuse a running server and reload only the model.

        Raises:
            DeploymentError: This candidate cannot be served; the trial fails and the search continues.
            ServerFault: The server cannot serve any candidate; the run ends.
        """

    def deploy_fresh(self, candidate: Candidate) -> AbstractContextManager[Endpoint]:
        """Serve ``candidate`` as production does: on a new server, from the ``config.pbtxt`` that tritune writes.

        Called for confirmations. Raises the errors of ``deploy``.
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


@dataclass(frozen=True)
class TargetSettings:
    """The settings of a target in addition to the model and the options.

    Attributes:
        log: The file that gets the server's output.
        cpus: The CPUs of the server; None for all.
        gpus: Whether a server on this machine sees GPUs.
        metrics: The address of the metrics of a server on another machine; empty if it has none.
        stopwatch: It counts the time that the server takes.
        say: It gets one line for each slow preparation.
    """

    log: Path
    cpus: frozenset[int] | None
    gpus: bool
    metrics: str
    stopwatch: Stopwatch
    say: Callable[[str], None]


class LoadGenerator(Protocol):
    """Sends requests to an endpoint and measures throughput and latency."""

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        """Return the measurement of ``load``.

        Called for each load of a trial. ``seconds`` is the approximate measuring time; None lets the load generator
        measure until the figures are stable.

        The measurement has the throughput, the average and the quantiles of the latency, ``requests``,
        ``measure_seconds`` and ``stable``, and a ``reason`` if it is not stable. Verdicts are narrower with
        ``latency_sketch``, which ``goodput_infer_per_sec`` and percentiles such as p99.9 need.

        Raises:
            MeasurementError: There are no figures at all; the point is recorded as failed.
            ServerCrashed: There are no figures because the server died or hangs.
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
