"""A server over gRPC."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from optimizer.client import tls
from optimizer.client.calls import CALL_SECONDS, CallError, Failure
from optimizer.client.connection import Connection

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelConfig
    from tritonclient.grpc.service_pb2 import ModelMetadataResponse, ModelStatistics

_UNBOUNDED = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
_INFER = "/inference.GRPCInferenceService/ModelInfer"
_FAILURES: dict[str, Failure] = {
    "UNAVAILABLE": "unreachable",
    "DEADLINE_EXCEEDED": "overdue",
    "UNAUTHENTICATED": "denied",
    "PERMISSION_DENIED": "denied",
}


class GrpcClient:
    """See Client."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._headers = connection.sent_headers
        self._credentials = _credentials(connection)
        self._client = InferenceServerClient(connection.address, creds=self._credentials)

    def check(self, timeout_seconds: float = CALL_SECONDS) -> None:
        with self._telling():
            if not self._client.is_server_live(self._headers, timeout_seconds):
                raise CallError(self._connection, "unreachable", "the server says that it does not live")

    def version(self) -> str:
        with self._telling():
            return str(self._client.get_server_metadata(self._headers, client_timeout=CALL_SECONDS).version)

    def is_ready(self, model: str) -> bool:
        with self._telling():
            return bool(self._client.is_model_ready(model, headers=self._headers, client_timeout=CALL_SECONDS))

    def config(self, model: str) -> ModelConfig:
        with self._telling():
            answer = self._client.get_model_config(model, headers=self._headers, client_timeout=CALL_SECONDS)
            return answer.config

    def metadata(self, model: str) -> ModelMetadataResponse:
        with self._telling():
            return self._client.get_model_metadata(model, headers=self._headers, client_timeout=CALL_SECONDS)

    def statistics(self, model: str, timeout_seconds: float = CALL_SECONDS) -> ModelStatistics | None:
        with self._telling():
            found = self._client.get_inference_statistics(
                model, headers=self._headers, client_timeout=timeout_seconds
            )
            return next(iter(found.model_stats), None)

    def index(self) -> dict[str, bool]:
        with self._telling():
            found = self._client.get_model_repository_index(self._headers, client_timeout=CALL_SECONDS)
            return {one.name: one.state == "READY" for one in found.models}

    def load(self, model: str, override: str | None, timeout_seconds: float) -> None:
        with self._telling():
            self._client.load_model(model, self._headers, config=override, client_timeout=timeout_seconds)

    def unload(self, model: str) -> None:
        with self._telling():
            self._client.unload_model(model, self._headers, client_timeout=CALL_SECONDS)

    def infer(self, messages: Iterable[bytes], *, in_flight: int, timeout_seconds: float) -> list[bytes]:
        with self._telling(), self._channel() as channel:
            call = channel.unary_unary(_INFER)
            send = partial(call.future, timeout=timeout_seconds, metadata=tuple(self._headers.items()))
            pending: deque[Any] = deque()
            answers: list[bytes] = []
            for message in messages:
                if len(pending) == in_flight:
                    answers.append(pending.popleft().result())
                pending.append(send(message))
            answers += [future.result() for future in pending]
            return answers

    def close(self) -> None:
        self._client.close()

    def _channel(self) -> Any:
        address = self._connection.address
        if self._credentials is None:
            return grpc.insecure_channel(address, options=_UNBOUNDED)
        return grpc.secure_channel(address, self._credentials, options=_UNBOUNDED)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except InferenceServerException as error:
            raise self._error(str(error.status()), error.message()) from error
        except grpc.RpcError as error:
            raise self._error(str(error.code()), error.details()) from error

    def _error(self, status: str, message: str | None) -> CallError:
        return CallError(self._connection, _FAILURES.get(status.rpartition(".")[2], "refused"), message)


def _credentials(connection: Connection) -> Any:
    """None: nothing is encrypted."""
    if connection.tls is None:
        return None
    tls.context(connection.tls)  # tells what is wrong with the files
    files = (tls.trusted(connection.tls), connection.tls.key, connection.tls.cert)
    return grpc.ssl_channel_credentials(*(None if file is None else file.read_bytes() for file in files))
