"""Requests to a model that is being served, and its answers: one after another, or many in flight."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from optimizer.errors import DeploymentError, ServerCrashed
from optimizer.interfaces import Endpoint
from optimizer.server_health import model_died
from optimizer.untrusted import one_line

if TYPE_CHECKING:
    from tritonclient.grpc.service_pb2 import ModelMetadataResponse

_OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
_SERVICE = "/inference.GRPCInferenceService"
_LONGEST_MESSAGE = 300


def infer(endpoint: Endpoint, messages: Iterable[bytes], *, in_flight: int, timeout_seconds: float) -> list[bytes]:
    """The answers (ModelInferResponse) to ``messages`` (ModelInferRequest), both serialized, in their order.

    ``in_flight`` requests are sent at a time. Raises DeploymentError with the server's words where it fails one,
    or leaves one without an answer for ``timeout_seconds``.
    """
    with _channel(endpoint) as channel:
        call = channel.unary_unary(f"{_SERVICE}/ModelInfer")
        pending: deque[Any] = deque()
        answers: list[bytes] = []
        for message in messages:
            if len(pending) == in_flight:
                answers.append(pending.popleft().result())
            pending.append(call.future(message, timeout=timeout_seconds))
        answers += [future.result() for future in pending]
        return answers


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
    from tritonclient.grpc.service_pb2 import ModelMetadataRequest, ModelMetadataResponse

    with _channel(endpoint) as channel:
        call = channel.unary_unary(
            f"{_SERVICE}/ModelMetadata",
            request_serializer=ModelMetadataRequest.SerializeToString,
            response_deserializer=ModelMetadataResponse.FromString,
        )
        return call(ModelMetadataRequest(name=endpoint.model), timeout=10)


@contextmanager
def _channel(endpoint: Endpoint) -> Iterator[Any]:
    import grpc

    with grpc.insecure_channel(endpoint.grpc, options=_OPTIONS) as channel:
        try:
            yield channel
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise ServerCrashed("the server left a request without an answer") from error
            if error.code() is grpc.StatusCode.UNAVAILABLE or model_died(error.details() or ""):
                raise ServerCrashed(f"the server died over a request: {_cause(error.details())}") from error
            raise DeploymentError(f"the server failed a request: {_cause(error.details())}") from error


def _cause(details: str | None) -> str:
    """The server's words without the Python frames that a backend adds."""
    told = re.split(r"\s+At:\s", details or "it did not say why")[0]
    return one_line(" ".join(told.split()), _LONGEST_MESSAGE)
