"""A deployed model as its clients see it, and how they reach it: address, headers, TLS files, shared memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from optimizer.core.candidate import Candidate
from optimizer.core.errors import BadInputError

ProtocolName: TypeAlias = Literal["grpc", "http"]

REDACTED = "***"
MAX_HEADER_CHARACTERS = 8192  # limit for all header values together, which tritonserver has over HTTP
HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")  # a token of RFC 9110


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
            if not HEADER_NAME.fullmatch(name):
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


SharedMemoryName: TypeAlias = Literal["none", "system", "cuda"]
DEFAULT_OUTPUT_BYTES = 102_400  # perf_analyzer's default


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The kind of shared memory, and the space for each sample of an output whose size the model does not fix."""

    kind: Literal["system", "cuda"]
    output_bytes: int = DEFAULT_OUTPUT_BYTES


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A deployed model: its addresses and its configuration. Addresses are ``host:port``.

    Attributes:
        model: Name of the model that receives the requests.
        candidate: Configuration that is deployed.
        grpc: Address of gRPC, without TLS.
        http: Address of HTTP, without TLS.
        server_pid: Process of the server; None if it does not run on this machine, or its process is unknown.
        batcher: Model that the candidate configures, if ``model`` is an ensemble or a BLS model that calls it.
        max_batch_size: ``max_batch_size`` of ``model`` itself, if ``batcher`` is set.
        steps: Each model that serves a part of a request, with its number of instances on one server. The first one
            is ``model``, with 0 if it is an ensemble. Empty for a model alone, and if the server's statistics do not
            show the time of its requests in each model.
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
    steps: tuple[tuple[str, int], ...] = ()
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
    def tuned_model(self) -> str:
        """The model that the candidate configures, whose batches are counted."""
        return self.batcher or self.model

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
