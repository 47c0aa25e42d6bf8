"""A server in this process that answers inference requests over gRPC, for tests of the output check."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import numpy as np
import numpy.typing as npt
from tritonclient.grpc.service_pb2 import (
    ModelInferRequest,
    ModelInferResponse,
    ModelMetadataRequest,
    ModelMetadataResponse,
)
from tritonclient.utils import np_to_triton_dtype, triton_to_np_dtype

from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from tests.generated_requests import model_with, write_requests

TRITON_SERVICE = "inference.GRPCInferenceService"
Array: TypeAlias = npt.NDArray[Any]
Model: TypeAlias = Callable[[dict[str, Array]], Mapping[str, Array]]


@contextlib.contextmanager
def serving_grpc(
    *handlers: grpc.GenericRpcHandler,
    options: Sequence[tuple[str, int]] = (),
    credentials: grpc.ServerCredentials | None = None,
) -> Iterator[str]:
    """Yield the address of a gRPC server in this process; with ``credentials`` it uses TLS."""
    server = grpc.server(ThreadPoolExecutor(4), handlers=handlers, options=options)
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@dataclass
class FakeInferenceServer:
    """Serve ``model``, which a test may replace; if it raises, the request fails.

    ``spoil`` changes the bytes of an output. ``request_shapes`` collects the shape of each request's first
    input. ``inputs`` holds (name, Triton data type, shape with the batch dimension). With ``refusal`` a request that
    arrives during another one fails with this message, as Triton's queue refuses it. With ``hides_metadata`` the
    metadata of the model are not answered in time.
    """

    model: Model
    inputs: Sequence[tuple[str, str, Sequence[int]]] = (("x", "FP32", (-1, 2)),)
    max_batch_size: int = 8
    request_shapes: list[tuple[int, ...]] = field(default_factory=list)
    spoil: Callable[[bytes], bytes] = bytes
    refusal: str = ""
    hides_metadata: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _calls: list[grpc.ServicerContext] = field(default_factory=list)

    def write_requests(self, folder: Path, data: str = "random") -> Path:
        """Return the file of requests that ``--input-data DATA`` gives the model, written below ``folder``."""
        return write_requests(model_with(self.inputs, self.max_batch_size), folder, data=data)

    @contextlib.contextmanager
    def serving(self) -> Iterator[Endpoint]:
        methods = {
            "ModelMetadata": grpc.unary_unary_rpc_method_handler(
                self._metadata, ModelMetadataRequest.FromString, ModelMetadataResponse.SerializeToString
            ),
            "ModelInfer": grpc.unary_unary_rpc_method_handler(
                self._infer, ModelInferRequest.FromString, ModelInferResponse.SerializeToString
            ),
        }
        with serving_grpc(grpc.method_handlers_generic_handler(TRITON_SERVICE, methods)) as address:
            yield Endpoint("m", Candidate(self.max_batch_size, self.max_batch_size > 1), grpc=address)

    def _metadata(self, request: ModelMetadataRequest, context: grpc.ServicerContext) -> ModelMetadataResponse:
        if self.hides_metadata:
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        response = ModelMetadataResponse(name=request.name)
        for name, datatype, shape in self.inputs:
            response.inputs.add(name=name, datatype=datatype, shape=shape)
        return response

    def _infer(self, request: ModelInferRequest, context: grpc.ServicerContext) -> ModelInferResponse:
        feeds = {
            tensor.name: np.frombuffer(raw, triton_to_np_dtype(tensor.datatype)).reshape(tuple(tensor.shape))
            for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)
        }
        self.request_shapes.append(next(iter(feeds.values())).shape)
        with self._in_queue(context):
            try:
                answers = self.model(feeds)
            except RuntimeError as error:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        response = ModelInferResponse(model_name=request.model_name)
        for name, array in answers.items():
            response.outputs.add(name=name, datatype=np_to_triton_dtype(array.dtype), shape=array.shape)
            response.raw_output_contents.append(self.spoil(array.tobytes()))
        return response

    @contextlib.contextmanager
    def _in_queue(self, context: grpc.ServicerContext) -> Iterator[None]:
        with self._lock:
            if self.refusal and any(call.is_active() for call in self._calls):  # the client may have cancelled it
                context.abort(grpc.StatusCode.UNAVAILABLE, f"[request id: <id_unknown>] {self.refusal}")
            self._calls.append(context)
        try:
            yield
        finally:
            self._calls.remove(context)
