"""Inference requests for a served model: their inputs as numpy arrays, and the messages that carry them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from optimizer.errors import BadInputError
from optimizer.requests import data as request_data
from optimizer.requests.data import Tensor, compatible
from optimizer.requests.made import Values
from optimizer.untrusted import one_line

if TYPE_CHECKING:
    from tritonclient.grpc.service_pb2 import ModelInferResponse, ModelMetadataResponse

Array: TypeAlias = npt.NDArray[Any]
Inputs: TypeAlias = dict[str, Array]

MOST_REQUEST_BYTES = 2**31 - 1  # what a protobuf message holds


@dataclass(frozen=True, slots=True)
class RequestSource:
    """What a served model takes; a shape has -1 where neither the model nor the user fixes a dimension."""

    model: str
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, metadata: ModelMetadataResponse, max_batch_size: int, shapes: Sequence[str]) -> RequestSource:
        """``shapes`` are perf_analyzer's ``name:d1,d2``, without the batch dimension. Raises BadInputError."""
        batched = max_batch_size > 0
        tensors = {
            given.name: Tensor(given.name, given.datatype, tuple(given.shape)[batched:], batched)
            for given in metadata.inputs
        }
        for text in shapes:
            name, dims = _shape(text)
            tensor = tensors.get(name)
            if tensor is None:
                raise BadInputError(f"shape {one_line(text, 60)}: the model's inputs are {', '.join(tensors)}")
            if not compatible(dims, tensor.shape):
                raise BadInputError(f"shape {one_line(text, 60)}: the model's is {list(tensor.shape)}")
            tensors[name] = replace(tensor, shape=dims)
        return cls(metadata.name, tuple(tensors.values()))


def generate(
    metadata: ModelMetadataResponse,
    max_batch_size: int,
    *,
    input_data: str,
    shapes: Sequence[str],
    request_batch_size: int,
    count: int,
    seed: int = 0,
) -> list[Inputs]:
    """The inputs of ``count`` requests; see ``stream``."""
    endless = stream(
        metadata,
        max_batch_size,
        input_data=input_data,
        shapes=shapes,
        request_batch_sizes=repeat(request_batch_size),
        seed=seed,
    )
    return list(islice(endless, count))


def stream(
    metadata: ModelMetadataResponse,
    max_batch_size: int,
    *,
    input_data: str,
    shapes: Sequence[str],
    request_batch_sizes: Iterable[int],
    seed: int = 0,
) -> Iterator[Inputs]:
    """The inputs of one request after another, by name, with the batch dimension where the model has one.

    ``input_data`` is ``random``, ``zero`` or the path of perf_analyzer's JSON, whose entries follow each other
    through the batches and start over at the end. Random is, as with perf_analyzer, any value that an integer's
    type has; floats are normally distributed, where perf_analyzer's are any bits, NaN among them. Raises
    BadInputError.
    """
    source = RequestSource.of(metadata, max_batch_size, shapes)
    if input_data in ("random", "zero"):
        values = Values("random" if input_data == "random" else "zero")
        samples = _made(source, values, np.random.default_rng(seed))
    else:
        samples = cycle(request_data.read(Path(input_data), source.tensors))
    for size in request_batch_sizes:
        if max_batch_size == 0 and size != 1:
            raise BadInputError(f"{source.model} takes no batches; set the request batch size to 1")
        yield _batch(source, list(islice(samples, size)))


def to_message(model: str, inputs: Mapping[str, Array]) -> bytes:
    """The serialized ModelInferRequest."""
    from tritonclient.grpc.service_pb2 import ModelInferRequest
    from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

    request = ModelInferRequest(model_name=model)
    for name, array in inputs.items():
        request.inputs.add(name=name, datatype=np_to_triton_dtype(array.dtype), shape=array.shape)
        strings = array.dtype == np.object_
        raw = serialize_byte_tensor(array).item() if strings and array.size else array.tobytes()
        request.raw_input_contents.append(raw)
    return bytes(request.SerializeToString())


def outputs(response: ModelInferResponse) -> Inputs:
    """The answer's arrays by name; strings are bytes, BF16 is widened to FP32.

    Raises ValueError where an output comes without its contents.
    """
    pairs = zip(response.outputs, response.raw_output_contents, strict=True)
    return {tensor.name: _output(tensor.datatype, raw).reshape(tuple(tensor.shape)) for tensor, raw in pairs}


def _output(datatype: str, raw: bytes) -> Array:
    from tritonclient.utils import triton_to_np_dtype

    if datatype == "BF16":
        return (np.frombuffer(raw, dtype="<u2").astype("<u4") << 16).view("<f4")
    return request_data.from_bytes(np.dtype(triton_to_np_dtype(datatype)), raw)


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, dims = text.rpartition(":")
    parts = [part.strip() for part in dims.split(",")]
    if not name or not all(part.isdecimal() and len(part) <= 18 for part in parts):
        raise BadInputError(f"shape {one_line(text, 60)}: write name:d1,d2, such as input_ids:128")
    return name, tuple(map(int, parts))


def _made(source: RequestSource, values: Values, rng: np.random.Generator) -> Iterator[Inputs]:
    """One sample after the other. Raises BadInputError where a shape is open."""
    for tensor in source.tensors:
        if -1 in tensor.shape:
            raise BadInputError(
                f"input {one_line(tensor.name)} has the shape {list(tensor.shape)}: say how many values "
                f"{values.kind} data shall fill, by --shape or in the profile's request, or give a data file"
            )
        _check_bytes(source.model, math.prod(tensor.shape) * tensor.dtype.itemsize)
    while True:
        yield {tensor.name: values.array(tensor, tensor.shape, rng) for tensor in source.tensors}


def _batch(source: RequestSource, samples: Sequence[Inputs]) -> Inputs:
    """The samples joined along a new first dimension; a sample itself where the model takes no batches."""
    joined: Inputs = {}
    for tensor in source.tensors:
        arrays = [sample[tensor.name] for sample in samples if tensor.name in sample]
        if not arrays:  # the data leaves it out: whether it is optional, the server knows
            continue
        shapes = {array.shape for array in arrays}
        if len(shapes) > 1:
            told = " and ".join(str(list(shape)) for shape in sorted(shapes)[:2])
            raise BadInputError(
                f"input {one_line(tensor.name)}: entries of shapes {told} cannot be in one request; "
                "set the request batch size to 1, or give data of one shape"
            )
        _check_bytes(source.model, sum(array.nbytes for array in arrays))
        joined[tensor.name] = np.stack(arrays) if tensor.has_batch else arrays[0]
    return joined


def _check_bytes(model: str, size: int) -> None:
    if size > MOST_REQUEST_BYTES:
        raise BadInputError(f"a request to {model} would have {size / 2**30:.1f} GiB; a gRPC message holds 2 GiB")
