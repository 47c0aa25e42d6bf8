"""A server over HTTP."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from gevent.hub import Hub
from gevent.ssl import create_default_context
from geventhttpclient.response import HTTPParseError
from google.protobuf import json_format
from tritonclient.grpc.model_config_pb2 import ModelConfig
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

from optimizer.client import tls
from optimizer.client.calls import CALL_SECONDS, CallError, Failure
from optimizer.client.connection import Connection

if TYPE_CHECKING:
    from tritonclient.grpc.service_pb2 import ModelStatistics

Hub.NOT_ERROR = (*Hub.NOT_ERROR, KeyboardInterrupt)  # else gevent prints a trace of each Ctrl-C
_FAILURES: dict[str, Failure] = {
    "401": "denied",
    "403": "denied",
    "407": "denied",
    "408": "overdue",
    "502": "unreachable",
    "504": "unreachable",
}


class HttpClient:
    """See Client. Each call has a connection of its own, since tritonclient's times hold for a whole client."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._headers = connection.sent_headers
        self._context = None if connection.tls is None else tls.context(connection.tls, create_default_context)

    def check(self, timeout_seconds: float = CALL_SECONDS) -> None:
        with self._calling(timeout_seconds) as client:
            if not client.is_server_live(self._headers):
                client.get_server_metadata(self._headers)  # which tells why, unless it is health alone that is denied
                raise CallError(self._connection, "denied", "it does not tell whether it lives; is that restricted?")

    def version(self) -> str:
        with self._calling() as client:
            return str(client.get_server_metadata(self._headers)["version"])

    def is_ready(self, model: str) -> bool:
        with self._calling() as client:
            return bool(client.is_model_ready(model, headers=self._headers))

    def config(self, model: str) -> ModelConfig:
        with self._calling() as client:
            return _parsed(client.get_model_config(model, headers=self._headers), ModelConfig())

    def metadata(self, model: str) -> ModelMetadataResponse:
        with self._calling() as client:
            return _parsed(client.get_model_metadata(model, headers=self._headers), ModelMetadataResponse())

    def statistics(self, model: str, timeout_seconds: float = CALL_SECONDS) -> ModelStatistics | None:
        with self._calling(timeout_seconds) as client:
            told = client.get_inference_statistics(model, headers=self._headers)
            return next(iter(_parsed(told, ModelStatisticsResponse()).model_stats), None)

    def index(self) -> dict[str, bool]:
        with self._calling() as client:
            found = client.get_model_repository_index(self._headers)
            return {one["name"]: one.get("state") == "READY" for one in found}

    def load(self, model: str, override: str | None, timeout_seconds: float) -> None:
        with self._calling(timeout_seconds) as client:
            client.load_model(model, self._headers, config=override)

    def unload(self, model: str) -> None:
        with self._calling() as client:
            client.unload_model(model, self._headers)

    def infer(self, messages: Iterable[bytes], *, in_flight: int, timeout_seconds: float) -> list[bytes]:
        with self._calling(timeout_seconds, in_flight) as client:
            pending: deque[Any] = deque()
            answers: list[bytes] = []
            for message in messages:
                request = ModelInferRequest.FromString(message)
                if len(pending) == in_flight:
                    answers.append(_answer(pending.popleft().get_result()))
                pending.append(client.async_infer(request.model_name, _inputs(request), headers=self._headers))
            answers += [_answer(one.get_result()) for one in pending]
            return answers

    def close(self) -> None:
        """Nothing stays open."""

    @contextlib.contextmanager
    def _calling(self, timeout_seconds: float = CALL_SECONDS, connections: int = 1) -> Iterator[Any]:
        secured = {} if self._context is None else {"ssl": True, "ssl_context_factory": self._secured}
        try:
            with InferenceServerClient(
                self._connection.address,
                concurrency=connections,
                connection_timeout=min(timeout_seconds, CALL_SECONDS),
                network_timeout=timeout_seconds,
                **secured,
            ) as client:
                yield client
        except InferenceServerException as error:
            failure = _FAILURES.get(str(error.status()), "refused")
            raise CallError(self._connection, failure, error.message()) from error
        except TimeoutError as error:
            raise CallError(self._connection, "overdue", f"no answer within {timeout_seconds:g} s") from error
        except (OSError, HTTPParseError) as error:
            raise CallError(self._connection, "unreachable", str(error)) from error
        except (ValueError, KeyError, TypeError, AttributeError, json_format.ParseError) as error:
            told = f"it answers what no tritonserver does: {error}"
            raise CallError(self._connection, "refused", told) from error

    def _secured(self, cafile: str | None) -> Any:
        """The context that is ready; ``cafile`` is what geventhttpclient would trust."""
        return self._context


def _parsed(told: Any, message: Any) -> Any:
    return json_format.ParseDict(told, message, ignore_unknown_fields=True)


def _inputs(request: ModelInferRequest) -> list[InferInput]:
    from optimizer.requests.data import from_bytes

    found = []
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        array = from_bytes(np.dtype(triton_to_np_dtype(tensor.datatype)), raw).reshape(tuple(tensor.shape))
        one = InferInput(tensor.name, list(tensor.shape), tensor.datatype)
        found.append(one.set_data_from_numpy(array))
    return found


def _answer(result: Any) -> bytes:
    """The serialized ModelInferResponse."""
    told = result.get_response()
    answer = ModelInferResponse(model_name=told["model_name"])
    for output in told["outputs"]:
        name, datatype = output["name"], output["datatype"]
        answer.outputs.add(name=name, datatype=datatype, shape=output["shape"])
        array = result.as_numpy(name)
        if datatype == "BYTES":
            array = serialize_byte_tensor(array)
            answer.raw_output_contents.append(array.item() if array.size else b"")
            continue
        if array.dtype == np.float32 and datatype == "BF16":  # as older releases of tritonclient widen it
            array = (np.ascontiguousarray(array, "<f4").view("<u4") >> 16).astype("<u2")
        answer.raw_output_contents.append(array.tobytes())
    return bytes(answer.SerializeToString())
