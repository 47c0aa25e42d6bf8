"""Requests to a model that is being served, and its answers: one after another, or many in flight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from optimizer.client.calls import CallError, Client, open_client
from optimizer.errors import DeploymentError, ServerCrashed
from optimizer.interfaces import Endpoint
from optimizer.server_health import cause, model_died

if TYPE_CHECKING:
    from tritonclient.grpc.service_pb2 import ModelMetadataResponse


def infer(endpoint: Endpoint, messages: Iterable[bytes], *, in_flight: int, timeout_seconds: float) -> list[bytes]:
    """The answers (ModelInferResponse) to ``messages`` (ModelInferRequest), both serialized, in their order.

    ``in_flight`` requests are sent at a time. Raises DeploymentError with the server's words where it fails one,
    or leaves one without an answer for ``timeout_seconds``.
    """
    with _client(endpoint) as client:
        return client.infer(messages, in_flight=in_flight, timeout_seconds=timeout_seconds)


def addressed(message: bytes, model: str) -> bytes:
    """A serialized ModelInferRequest, to ``model``: what was asked of one variant is asked of another."""
    from tritonclient.grpc.service_pb2 import ModelInferRequest

    request = ModelInferRequest.FromString(message)
    if request.model_name == model:
        return message
    request.model_name = model
    return bytes(request.SerializeToString())


def model_metadata(endpoint: Endpoint) -> ModelMetadataResponse:
    """The model's inputs and outputs: names, types and shapes. Raises DeploymentError."""
    with _client(endpoint) as client:
        return client.metadata(endpoint.model)


@contextmanager
def _client(endpoint: Endpoint) -> Iterator[Client]:
    with closing(open_client(endpoint.connection)) as client:
        try:
            yield client
        except CallError as error:
            told = cause(str(error))
            if error.failure == "overdue":
                raise ServerCrashed("the server left a request without an answer") from error
            if error.failure == "unreachable" or model_died(str(error)):
                raise ServerCrashed(f"the server died over a request: {told}") from error
            raise DeploymentError(f"the server failed a request: {told}") from error
