"""Requests to a server: inference, metadata of a model, and whether the server responds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, TypeVar

from optimizer.core.endpoint import Connection, Endpoint
from optimizer.core.errors import DeploymentError, RequestOverdue, ServerCrashed
from optimizer.measure.server_client import CALL_SECONDS, CallError, ServerClient
from optimizer.measure.server_errors import is_refused_by_queue, lacks_gpu_memory, model_died, without_traceback

if TYPE_CHECKING:
    from tritonclient.grpc.service_pb2 import ModelMetadataResponse

PROBE_SECONDS = 5.0  # even under the heaviest load a server answers within a fraction of this
SINGLE_ATTEMPTS = 3
_Responses = TypeVar("_Responses")


def open_client(connection: Connection) -> ServerClient:
    """Return a client for the connection's protocol, without sending anything.

    Raises BadInputError if the TLS files cannot be used.
    """
    if connection.protocol == "grpc":
        from optimizer.measure.grpc_client import GrpcClient  # takes 0.4 s

        return GrpcClient(connection)
    from optimizer.measure.http_client import HttpClient

    return HttpClient(connection)


def infer(endpoint: Endpoint, messages: Iterable[bytes], *, in_flight: int, timeout_seconds: float) -> list[bytes]:
    """Send ``messages``, at most ``in_flight`` at a time, and return the responses in the same order.

    Both are serialized: ModelInferRequest and ModelInferResponse.

    Raises:
        DeploymentError: The server failed a request; the message is the server's.
        ServerCrashed: The server or its model died.
        RequestOverdue: A request was not answered within ``timeout_seconds``.
    """
    with _client(endpoint) as client:
        return client.infer(messages, in_flight=in_flight, timeout_seconds=timeout_seconds)


def stream(
    endpoint: Endpoint, messages: Iterable[bytes], *, in_flight: int, timeout_seconds: float
) -> list[list[bytes]]:
    """Send ``messages`` to a decoupled model as ``infer`` does, and return all responses with outputs to each.

    Raises the same errors.
    """
    with _client(endpoint) as client:
        return client.stream(messages, in_flight=in_flight, timeout_seconds=timeout_seconds)


def send_as_queue_permits(send: Callable[[int], _Responses], in_flight: int) -> _Responses:
    """Return ``send(in_flight)``, with half of ``in_flight`` each time that the queue of the model refuses a request.

    Triton's batcher may sleep until even a single request expires, so one at a time is tried SINGLE_ATTEMPTS times.
    Raises the error of the last attempt, or any other error of ``send``.
    """
    singles = 0
    while True:
        singles += in_flight == 1
        try:
            return send(in_flight)
        except DeploymentError as error:
            if singles == SINGLE_ATTEMPTS or not is_refused_by_queue(str(error)):
                raise
            in_flight = max(1, in_flight // 2)


def with_model_name(message: bytes, model: str) -> bytes:
    """Return the serialized ModelInferRequest ``message`` with ``model`` as its model name."""
    from tritonclient.grpc.service_pb2 import ModelInferRequest

    request = ModelInferRequest.FromString(message)
    if request.model_name == model:
        return message
    request.model_name = model
    return bytes(request.SerializeToString())


def model_metadata(endpoint: Endpoint) -> ModelMetadataResponse:
    """Return the names, types and shapes of the model's inputs and outputs. Raises DeploymentError."""
    with _client(endpoint) as client:
        return client.metadata(endpoint.model)


@contextmanager
def _client(endpoint: Endpoint) -> Iterator[ServerClient]:
    """Yield a client of ``endpoint``. Raise ServerCrashed or DeploymentError for a CallError of the context."""
    with closing(open_client(endpoint.connection)) as client:
        try:
            yield client
        except CallError as error:
            message = without_traceback(str(error))
            if error.failure == "overdue":
                address = endpoint.connection.address
                raise RequestOverdue(f"the server at {address} did not answer a request in time") from error
            if error.failure == "unreachable" or model_died(str(error)):
                raise ServerCrashed(f"the server died during a request: {message}") from error
            raise DeploymentError(
                f"the server failed a request: {message}", lacks_gpu_memory=lacks_gpu_memory(message)
            ) from error


def reports_live(client: ServerClient) -> bool:
    """Return whether the server reports within PROBE_SECONDS that it is live."""
    try:
        client.check(PROBE_SECONDS)
    except CallError:
        return False
    return True


def responds(client: ServerClient, timeout_seconds: float = CALL_SECONDS) -> bool:
    """Return whether the server responds, even if it denies or refuses the health check."""
    try:
        client.check(timeout_seconds)
    except CallError as error:
        return error.failure in ("denied", "refused")
    return True


def all_servers_respond(endpoint: Endpoint) -> bool:
    """Return whether each server of ``endpoint`` responds within PROBE_SECONDS."""
    return not unresponsive_server(endpoint)


def unresponsive_server(endpoint: Endpoint, seconds: float = PROBE_SECONDS) -> str:
    """Return the name of the first server that does not respond within ``seconds``; an empty string if all do."""
    servers = endpoint.servers
    for number, server in enumerate(servers, 1):
        with closing(open_client(server.connection)) as client:
            if not responds(client, seconds):
                return f"server process {number} of {len(servers)}" if endpoint.replicas else "the server"
    return ""
