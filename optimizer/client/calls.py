"""What is asked of a server, over gRPC or HTTP alike."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from optimizer.client.connection import Connection
from optimizer.server_health import shortened

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelConfig
    from tritonclient.grpc.service_pb2 import ModelMetadataResponse, ModelStatistics

CALL_SECONDS = 10.0
_LONGEST = 2000
_RESTRICTED = re.compile(r"restricted, expecting header '([^']{1,200})'")

Failure: TypeAlias = Literal["unreachable", "overdue", "denied", "refused"]


class CallError(Exception):
    """A call that failed, in the server's words where it has any: no server was reached (``unreachable``), there was
    no answer in time (``overdue``), headers or certificate do not suffice (``denied``), or it will not (``refused``).

    A model that is not ready may count as ``unreachable`` too: gRPC knows one status for both.
    """

    def __init__(self, connection: Connection, failure: Failure, message: str | None) -> None:
        told = message or "it did not say why"
        if header := _RESTRICTED.search(told):
            failure, told = "denied", f"it expects the header {header[1]}, with the value that it was started with"
        super().__init__(shortened(connection.hide(told), _LONGEST))
        self.failure = failure


class Client(Protocol):
    """Each call raises CallError, and takes CALL_SECONDS at most where it has no time of its own."""

    def check(self, timeout_seconds: float = CALL_SECONDS) -> None:
        """Whether the server lives: raises where it does not say so."""
        ...

    def version(self) -> str:
        """Of the server, as it tells it."""
        ...

    def is_ready(self, model: str) -> bool: ...

    def config(self, model: str) -> ModelConfig: ...

    def metadata(self, model: str) -> ModelMetadataResponse: ...

    def statistics(self, model: str, timeout_seconds: float = CALL_SECONDS) -> ModelStatistics | None: ...

    def index(self) -> dict[str, bool]:
        """The models of the repository, and whether they are loaded."""
        ...

    def load(self, model: str, override: str | None, timeout_seconds: float) -> None:
        """With the configuration ``override`` (JSON), else as the repository or the last override has it."""
        ...

    def unload(self, model: str) -> None:
        """Begins it; the model goes a moment later."""
        ...

    def infer(self, messages: Iterable[bytes], *, in_flight: int, timeout_seconds: float) -> list[bytes]:
        """The answers (ModelInferResponse) to ``messages`` (ModelInferRequest), both serialized, in their order;
        ``in_flight`` of them are sent at a time."""
        ...

    def close(self) -> None: ...


def open_client(connection: Connection) -> Client:
    """Nothing is sent yet. Raises BadInputError where the files for TLS cannot be used."""
    if connection.protocol == "grpc":
        from optimizer.client.grpc_client import GrpcClient  # 0.4 s

        return GrpcClient(connection)
    from optimizer.client.http_client import HttpClient

    return HttpClient(connection)


def answers(client: Client, timeout_seconds: float = CALL_SECONDS) -> bool:
    """Whether anybody is there, who may deny to say how it is."""
    try:
        client.check(timeout_seconds)
    except CallError as error:
        return error.failure in ("denied", "refused")
    return True
