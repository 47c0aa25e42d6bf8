"""The Triton client over HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from gevent.hub import Hub
from gevent.ssl import create_default_context
from geventhttpclient.response import HTTPParseError
from google.protobuf import json_format
from tritonclient.grpc.service_pb2 import (
    ModelInferRequest,
    ModelInferResponse,
    ModelMetadataResponse,
    ModelStatisticsResponse,
)
from tritonclient.http import InferenceServerClient, InferInput
from tritonclient.utils import (
    InferenceServerException,
    serialize_byte_tensor,
    triton_to_np_dtype,
)

from optimizer.config.model_config_proto import ModelConfig
from optimizer.core import interrupts
from optimizer.core.endpoint import Connection
from optimizer.measure.server_client import (
    CALL_SECONDS,
    STATES_WITH_INSTANCES,
    CallError,
    CallFailure,
    send_all,
    tls_context,
)

if TYPE_CHECKING:
    from tritonclient.grpc.service_pb2 import ModelStatistics


Hub.NOT_ERROR = (*Hub.NOT_ERROR, KeyboardInterrupt)  # otherwise gevent prints a traceback on Ctrl-C
_FAILURES: dict[str, CallFailure] = {
    "401": "denied",
    "403": "denied",
    "407": "denied",
    "408": "overdue",
    "502": "unreachable",
    "504": "unreachable",
}
_NOT_DECODED = "an exception occurred in the client while decoding"  # tritonclient, if the body is not Triton's JSON


class HttpClient:
    """A ServerClient over HTTP. Each call opens a connection, since tritonclient has one time limit for all."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._headers = connection.sent_headers
        self._context = None if connection.tls is None else tls_context(connection.tls, create_default_context)

    def check(self, timeout_seconds: float = CALL_SECONDS) -> None:
        with self._open(timeout_seconds) as client:
            if not client.is_server_live(self._headers):
                client.get_server_metadata(self._headers)  # raises the reason, unless only health checks are denied
                raise CallError(
                    self._connection,
                    "denied",
                    "the server denies health checks; give the key of that API with --header",
                )

    def identity(self, timeout_seconds: float = CALL_SECONDS) -> tuple[str, str]:
        with self._open(timeout_seconds) as client:
            metadata = client.get_server_metadata(self._headers)
            return str(metadata["name"]), str(metadata["version"])

    def is_ready(self, model: str) -> bool:
        with self._open() as client:
            return bool(client.is_model_ready(model, headers=self._headers))

    def config(self, model: str) -> ModelConfig:
        with self._open() as client:
            return _parsed(client.get_model_config(model, headers=self._headers), ModelConfig())

    def metadata(self, model: str) -> ModelMetadataResponse:
        with self._open() as client:
            return _parsed(client.get_model_metadata(model, headers=self._headers), ModelMetadataResponse())

    def statistics(self, model: str, timeout_seconds: float = CALL_SECONDS) -> list[ModelStatistics]:
        with self._open(timeout_seconds) as client:
            statistics = client.get_inference_statistics(model, headers=self._headers)
            return list(_parsed(statistics, ModelStatisticsResponse()).model_stats)

    def index(self) -> dict[str, bool]:
        with self._open() as client:
            index = client.get_model_repository_index(self._headers)  # with an entry for each version
            loaded = {entry["name"] for entry in index if entry.get("state") == "READY"}
            return {entry["name"]: entry["name"] in loaded for entry in index}

    def holds(self, model: str, timeout_seconds: float = CALL_SECONDS) -> bool:
        with self._open(timeout_seconds) as client:
            index = client.get_model_repository_index(self._headers)
            return any(entry["name"] == model and entry.get("state") in STATES_WITH_INSTANCES for entry in index)

    def load(
        self, model: str, override: str | None, timeout_seconds: float, files: Mapping[str, bytes] | None = None
    ) -> None:
        parameters = {f"file:{path}": content for path, content in (files or {}).items()}
        with self._open(timeout_seconds) as client:
            client.load_model(model, self._headers, config=override, files=parameters or None)

    def unload(self, model: str, timeout_seconds: float = CALL_SECONDS) -> None:
        with self._open(timeout_seconds) as client:
            client.unload_model(model, self._headers)

    def infer(self, messages: Iterable[bytes], *, in_flight: int, timeout_seconds: float) -> list[bytes]:
        with self._open(timeout_seconds, in_flight) as client:

            def send(message: bytes) -> Any:
                request = ModelInferRequest.FromString(message)
                return client.async_infer(request.model_name, _inputs(request), headers=self._headers)

            return send_all(messages, send, lambda call: _response(call.get_result()), in_flight)

    def stream(self, messages: Iterable[bytes], *, in_flight: int, timeout_seconds: float) -> list[list[bytes]]:
        raise CallError(self._connection, "refused", "Triton sends several responses to a request over gRPC only")

    def register_shared_memory(self, name: str, size: int) -> None:
        with self._open() as client:
            client.register_system_shared_memory(name, f"/{name}", size, headers=self._headers)

    def unregister_shared_memory(self, name: str) -> None:
        with self._open() as client:
            client.unregister_system_shared_memory(name, headers=self._headers)

    def shared_memory(self) -> list[str]:
        with self._open() as client:
            return [region["name"] for region in client.get_system_shared_memory_status(headers=self._headers)]

    def close(self) -> None:
        """Do nothing: no connection stays open."""

    @contextlib.contextmanager
    def _open(self, timeout_seconds: float = CALL_SECONDS, connections: int = 1) -> Iterator[Any]:
        """Yield a client of tritonclient with this many ``connections``. Raise CallError for its errors."""
        tls_arguments: dict[str, Any] = {}
        if self._context is not None:  # the factory gets geventhttpclient's own choice of a CA file
            tls_arguments = {"ssl": True, "ssl_context_factory": lambda cafile: self._context}
        try:
            with interrupts.deferred():  # the destructor of a client that is only partly constructed fails
                client = InferenceServerClient(
                    self._connection.address,
                    concurrency=connections,
                    connection_timeout=min(timeout_seconds, CALL_SECONDS),
                    network_timeout=timeout_seconds,
                    **tls_arguments,
                )
            with client:
                yield client
        except InferenceServerException as error:
            status, message = str(error.status()), error.message()
            if message and message.startswith(_NOT_DECODED):
                message = f"HTTP status {status} without an answer of a tritonserver; check the address and proxies"
            raise CallError(self._connection, _FAILURES.get(status, "refused"), message) from error
        except TimeoutError as error:
            raise CallError(self._connection, "overdue", f"no answer within {timeout_seconds:g} s") from error
        except (OSError, HTTPParseError) as error:
            raise CallError(self._connection, "unreachable", str(error)) from error
        except (ValueError, KeyError, TypeError, AttributeError, json_format.ParseError) as error:
            message = f"the answer is not that of a tritonserver: {error}"
            raise CallError(self._connection, "refused", message) from error


def _parsed(document: Any, message: Any) -> Any:
    return json_format.ParseDict(document, message, ignore_unknown_fields=True)


def _inputs(request: ModelInferRequest) -> list[InferInput]:
    """Return the inputs of a gRPC message as tritonclient's HTTP client takes them."""
    from optimizer.model.input_data import from_bytes

    inputs = []
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        array = from_bytes(np.dtype(triton_to_np_dtype(tensor.datatype)), raw).reshape(tuple(tensor.shape))
        inputs.append(InferInput(tensor.name, list(tensor.shape), tensor.datatype).set_data_from_numpy(array))
    return inputs


def _response(result: Any) -> bytes:
    """Return the serialized ModelInferResponse."""
    document = result.get_response()
    response = ModelInferResponse(model_name=document["model_name"])
    for output in document["outputs"]:
        name, datatype = output["name"], output["datatype"]
        response.outputs.add(name=name, datatype=datatype, shape=output["shape"])
        array = result.as_numpy(name)
        if datatype == "BYTES":
            array = serialize_byte_tensor(array)
            response.raw_output_contents.append(array.item() if array.size else b"")
            continue
        if array.dtype == np.float32 and datatype == "BF16":  # older releases of tritonclient widen BF16
            array = (np.ascontiguousarray(array, "<f4").view("<u4") >> 16).astype("<u2")
        response.raw_output_contents.append(array.tobytes())
    return bytes(response.SerializeToString())
