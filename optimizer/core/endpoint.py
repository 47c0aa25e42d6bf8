"""A deployed model, as a target hands it to load generators, output checks and telemetry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from optimizer.core.connection import Connection, ProtocolName
from optimizer.core.trial import Candidate


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
