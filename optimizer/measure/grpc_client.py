"""The Triton client over gRPC."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
from tritonclient.grpc import InferenceServerClient
from tritonclient.grpc.service_pb2 import ModelStreamInferResponse
from tritonclient.utils import InferenceServerException

from optimizer.core import interrupts
from optimizer.core.endpoint import Connection
from optimizer.measure.load_client.http2 import INFER_METHOD, STREAM_METHOD
from optimizer.measure.server_client import (
    CALL_SECONDS,
    STATES_WITH_INSTANCES,
    CallError,
    CallFailure,
    ca_file,
    send_all,
    tls_context,
)
from optimizer.measure.server_errors import is_refused_by_queue

if TYPE_CHECKING:
    from tritonclient.grpc.service_pb2 import ModelMetadataResponse, ModelStatistics

    from optimizer.config.model_config_proto import ModelConfig


# A client connects while its server starts. By default gRPC tries again only after a second. The shortest time that
# it permits is 100 ms. Messages have no limit. gRPC would use the proxies of the environment even for loopback, but
# the load generators connect directly.
_CHANNEL_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 100),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
]
_FAILURES: dict[str, CallFailure] = {
    "UNAVAILABLE": "unreachable",
    "DEADLINE_EXCEEDED": "overdue",
    "UNAUTHENTICATED": "denied",
    "PERMISSION_DENIED": "denied",
}


class GrpcClient:
    """A ServerClient over gRPC."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._headers = connection.sent_headers
        self._credentials = _credentials(connection)
        with interrupts.deferred():  # the destructor of a client that is only partly constructed fails
            self._client = InferenceServerClient(
                connection.address, creds=self._credentials, channel_args=_CHANNEL_OPTIONS
            )

    def check(self, timeout_seconds: float = CALL_SECONDS) -> None:
        with self._translated_errors():
            if not self._client.is_server_live(self._headers, timeout_seconds):
                raise CallError(self._connection, "unreachable", "the server reports that it is not live")

    def identity(self, timeout_seconds: float = CALL_SECONDS) -> tuple[str, str]:
        metadata = self._call("get_server_metadata", client_timeout=timeout_seconds)
        return str(metadata.name), str(metadata.version)

    def is_ready(self, model: str) -> bool:
        return bool(self._call("is_model_ready", model))

    def config(self, model: str) -> ModelConfig:
        return self._call("get_model_config", model).config

    def metadata(self, model: str) -> ModelMetadataResponse:
        return self._call("get_model_metadata", model)

    def statistics(self, model: str, timeout_seconds: float = CALL_SECONDS) -> list[ModelStatistics]:
        return list(self._call("get_inference_statistics", model, client_timeout=timeout_seconds).model_stats)

    def index(self) -> dict[str, bool]:
        index = self._call("get_model_repository_index").models  # with an entry for each version
        loaded = {entry.name for entry in index if entry.state == "READY"}
        return {entry.name: entry.name in loaded for entry in index}

    def holds(self, model: str, timeout_seconds: float = CALL_SECONDS) -> bool:
        index = self._call("get_model_repository_index", client_timeout=timeout_seconds).models
        return any(entry.name == model and entry.state in STATES_WITH_INSTANCES for entry in index)

    def load(
        self, model: str, override: str | None, timeout_seconds: float, files: Mapping[str, bytes] | None = None
    ) -> None:
        parameters = {f"file:{path}": content for path, content in (files or {}).items()}
        self._call("load_model", model, config=override, files=parameters or None, client_timeout=timeout_seconds)

    def unload(self, model: str, timeout_seconds: float = CALL_SECONDS) -> None:
        self._call("unload_model", model, client_timeout=timeout_seconds)

    def infer(self, messages: Iterable[bytes], *, in_flight: int, timeout_seconds: float) -> list[bytes]:
        with self._translated_errors(), self._channel() as channel:
            call = channel.unary_unary(INFER_METHOD)
            send = partial(call.future, timeout=timeout_seconds, metadata=tuple(self._headers.items()))
            return send_all(messages, send, lambda call: bytes(call.result()), in_flight)

    def stream(self, messages: Iterable[bytes], *, in_flight: int, timeout_seconds: float) -> list[list[bytes]]:
        with self._translated_errors(), self._channel() as channel:
            call = channel.stream_stream(STREAM_METHOD, response_deserializer=ModelStreamInferResponse.FromString)
            send = partial(call, timeout=timeout_seconds, metadata=tuple(self._headers.items()))
            return send_all(messages, lambda message: send(iter([message])), self._receive_all, in_flight)

    def register_shared_memory(self, name: str, size: int) -> None:
        self._call("register_system_shared_memory", name, f"/{name}", byte_size=size)

    def unregister_shared_memory(self, name: str) -> None:
        self._call("unregister_system_shared_memory", name)

    def shared_memory(self) -> list[str]:
        return list(self._call("get_system_shared_memory_status").regions)

    def _receive_all(self, responses: Iterable[ModelStreamInferResponse]) -> list[bytes]:
        """Return the responses of a request that have outputs; others only say that it has ended."""
        received, error = [], ""
        for response in responses:
            error = error or response.error_message
            if response.infer_response.outputs:
                received.append(bytes(response.infer_response.SerializeToString()))
        if error:
            raise CallError(self._connection, "refused", error)
        return received

    def close(self) -> None:
        self._client.close()

    def _channel(self) -> Any:
        address = self._connection.address
        if self._credentials is None:
            return grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        return grpc.secure_channel(address, self._credentials, options=_CHANNEL_OPTIONS)

    def _call(self, method: str, *arguments: str, client_timeout: float = CALL_SECONDS, **named: Any) -> Any:
        """Return the result of a method of tritonclient's client."""
        with self._translated_errors():
            call = getattr(self._client, method)
            return call(*arguments, headers=self._headers, client_timeout=client_timeout, **named)

    @contextlib.contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Raise CallError for an error of tritonclient or gRPC in the context."""
        try:
            yield
        except InferenceServerException as error:
            raise self._error(str(error.status()), error.message()) from error
        except grpc.RpcError as error:
            raise self._error(str(error.code()), error.details()) from error

    def _error(self, status: str, message: str | None) -> CallError:
        failure = _FAILURES.get(status.rpartition(".")[2], "refused")
        if is_refused_by_queue(message or ""):
            failure = "refused"  # although its status is UNAVAILABLE, as that of a dead server
        return CallError(self._connection, failure, message)


def _credentials(connection: Connection) -> Any:
    """Return gRPC channel credentials; None for an unencrypted connection."""
    if connection.tls is None:
        return None
    tls_context(connection.tls)  # raises a better error than gRPC if a file is invalid
    files = (ca_file(connection.tls), connection.tls.key, connection.tls.cert)
    return grpc.ssl_channel_credentials(*(None if file is None else file.read_bytes() for file in files))
