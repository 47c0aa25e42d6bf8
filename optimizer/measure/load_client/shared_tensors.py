"""The tensors of the load client's requests in system shared memory.

All inputs are in one region, which the server reads. The outputs are in another one, with a place for each request in
flight. The client appends the place to the serialized request, since two messages after each other are their union.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optimizer.core.endpoint import Connection
from optimizer.core.errors import MeasurementError
from optimizer.measure import server_calls, shared_memory
from optimizer.measure.server_client import CallError, ServerClient

if TYPE_CHECKING:
    from tritonclient.grpc.service_pb2 import ModelMetadataResponse

ALIGNMENT = 64  # bytes between the starts of two tensors: a cache line
OPEN_LOOP_PLACES, OPEN_LOOP_BYTES = 1024, 256 << 20  # limits of the places of an open loop


@dataclass
class SentRequests:
    """The requests that a client process sends in turn, and the places of their outputs.

    Attributes:
        messages: Serialized requests.
        places: Ends of a request, one for each place, that put its outputs into shared memory; empty without it.
        regions: Patterns of the names of the regions; empty without shared memory.
        all_answered: Whether every request has been answered. Otherwise the server may still write into the regions.
    """

    messages: Sequence[bytes]
    places: Sequence[bytes] = ()
    regions: tuple[str, ...] = ()
    all_answered: bool = False


@contextlib.contextmanager
def in_shared_memory(
    servers: Sequence[Connection], messages: Sequence[bytes], outputs: Mapping[str, int], concurrency: int
) -> Iterator[SentRequests]:
    """Yield ``messages`` with their tensors in regions that ``servers`` map, which are removed at the end.

    ``outputs`` are the bytes of each output. ``concurrency`` is the number of requests in flight, 0 in an open loop.
    Requests of an open loop that find no free place get their outputs in the response. Regions with unanswered
    requests stay registered until the server ends, because a server that writes to an unregistered region crashes.

    Raises MeasurementError if there is not enough memory, or if the server refuses it.
    """
    name = shared_memory.new_name()
    inputs_name, outputs_name = f"{name}_inputs", f"{name}_outputs"
    requests, contents = _move_inputs(messages, inputs_name)
    place_bytes = sum(map(_aligned, outputs.values()))
    count = concurrency or max(1, min(OPEN_LOOP_PLACES, OPEN_LOOP_BYTES // place_bytes))
    places = [_place(outputs, outputs_name, number * place_bytes) for number in range(count)]
    sent = SentRequests(requests, places, (f"{name}_*",))
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(closing(server_calls.open_client(server))) for server in servers]
        for region, size, begin in ((inputs_name, len(contents), contents), (outputs_name, count * place_bytes, b"")):
            stack.enter_context(shared_memory.region(region, size, begin))
            for client in clients:
                stack.enter_context(_registered(client, region, size, sent))
        yield sent


@contextlib.contextmanager
def _registered(client: ServerClient, name: str, size: int, sent: SentRequests) -> Iterator[None]:
    try:
        client.register_shared_memory(name, size)
    except CallError as error:
        raise MeasurementError(f"the server cannot use shared memory: {error}") from error
    try:
        yield
    finally:
        if sent.all_answered:
            with contextlib.suppress(CallError):  # the server may have died
                client.unregister_shared_memory(name)


def output_bytes(
    metadata: ModelMetadataResponse, samples: int, variable_bytes: int, *, has_batch: bool
) -> dict[str, int]:
    """Return the largest size of each output of a request with up to ``samples`` samples.

    ``variable_bytes`` is the size for each sample of an output of strings or with variable dims. ``has_batch``: the
    first dim of the shapes is that of the batch.
    """
    import numpy as np
    from tritonclient.utils import triton_to_np_dtype

    sizes = {}
    for tensor in metadata.outputs:
        dims = tuple(tensor.shape)[has_batch:]
        is_fixed = tensor.datatype != "BYTES" and min(dims, default=1) >= 0
        width = 2 if tensor.datatype == "BF16" else np.dtype(triton_to_np_dtype(tensor.datatype)).itemsize
        sizes[tensor.name] = samples * (width * math.prod(dims) if is_fixed else variable_bytes)
    return sizes


def _move_inputs(messages: Sequence[bytes], region: str) -> tuple[list[bytes], bytes]:
    """Return ``messages`` with inputs that refer to ``region``, and the contents of the region.

    An input without elements stays in its message: Triton takes no empty part of a region.
    """
    from tritonclient.grpc.service_pb2 import ModelInferRequest

    contents, moved = bytearray(), list[bytes]()
    for message in messages:
        request = ModelInferRequest.FromString(message)
        raws = list(request.raw_input_contents)
        del request.raw_input_contents[:]
        for tensor, raw in zip(request.inputs, raws, strict=True):
            if not raw:
                request.raw_input_contents.append(raw)
                continue
            _refer(tensor.parameters, region, len(raw), len(contents))
            contents += raw
            contents += bytes(_aligned(len(contents)) - len(contents))
        moved.append(bytes(request.SerializeToString()))
    return moved, bytes(contents) or bytes(ALIGNMENT)


def _place(outputs: Mapping[str, int], region: str, offset: int) -> bytes:
    """Return a serialized request with nothing but the outputs, which are in ``region`` from ``offset`` on."""
    from tritonclient.grpc.service_pb2 import ModelInferRequest

    request = ModelInferRequest()
    for name, size in outputs.items():
        _refer(request.outputs.add(name=name).parameters, region, size, offset)
        offset += _aligned(size)
    return bytes(request.SerializeToString())


def _refer(parameters: object, region: str, size: int, offset: int) -> None:
    """Set the parameters of a tensor, a map of protobuf, that say where in ``region`` it is."""
    parameters["shared_memory_region"].string_param = region  # type: ignore[index]
    parameters["shared_memory_byte_size"].int64_param = size  # type: ignore[index]
    parameters["shared_memory_offset"].int64_param = offset  # type: ignore[index]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
