"""Inference requests as numpy arrays and as gRPC messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from optimizer.core.errors import BadInputError
from optimizer.core.request_sizes import parse_input_shape
from optimizer.core.safe_text import one_line
from optimizer.model.input_data import (
    Array,
    InputSample,
    InputTensor,
    compatible,
    from_bytes,
    parse_entries,
    to_bytes,
)

if TYPE_CHECKING:
    from tritonclient.grpc.service_pb2 import ModelInferResponse, ModelMetadataResponse


MAX_REQUEST_BYTES = 2**31 - 1  # the limit of a protobuf message


def input_tensors(
    metadata: ModelMetadataResponse, max_batch_size: int, shapes: Sequence[str]
) -> tuple[InputTensor, ...]:
    """Return the inputs of the model in ``metadata``; -1 is a dimension that neither the model nor the user fixes.

    ``shapes`` are perf_analyzer's ``name:d1,d2``, without the batch dimension. Raises BadInputError for shapes that
    do not fit the model.
    """
    batched = max_batch_size > 0
    tensors = {
        tensor.name: InputTensor(tensor.name, tensor.datatype, tuple(tensor.shape)[batched:], batched)
        for tensor in metadata.inputs
    }
    for text in shapes:
        try:
            shape = parse_input_shape(text)
        except ValueError as error:
            raise BadInputError(f"shape {one_line(text, 60)}: {error}") from None
        tensor = tensors.get(shape.names)
        if tensor is None:
            raise BadInputError(f"shape {one_line(text, 60)}: the model's inputs are {', '.join(tensors)}")
        if shape.fixed is None or not compatible(shape.fixed, tensor.dims):
            raise BadInputError(f"shape {one_line(text, 60)}: does not fit the model's dims {list(tensor.dims)}")
        tensors[tensor.name] = replace(tensor, dims=shape.fixed)
    return tuple(tensors.values())


def read_request_inputs(
    metadata: ModelMetadataResponse,
    max_batch_size: int,
    *,
    input_data: Path,
    shapes: Sequence[str],
    request_batch_sizes: Iterable[int],
) -> Iterator[InputSample]:
    """Yield the inputs of each request by name, with the batch dimension if the model has one.

    ``input_data`` is perf_analyzer's JSON, whose entries fill the batches in order and start over at the end.
    ``request_batch_sizes`` are in samples. Raises BadInputError.
    """
    model, tensors = metadata.name, input_tensors(metadata, max_batch_size, shapes)
    samples = cycle(parse_entries(input_data, tensors))
    for size in request_batch_sizes:
        if max_batch_size == 0 and size != 1:
            raise BadInputError(f"{model} takes no batches; set the request batch size to 1")
        yield _join(model, tensors, list(islice(samples, size)))


def to_message(model: str, inputs: Mapping[str, Array], priority: int = 0) -> bytes:
    """Return the serialized ModelInferRequest; a ``priority`` of 0 is the default level of the model."""
    from tritonclient.grpc.service_pb2 import ModelInferRequest
    from tritonclient.utils import np_to_triton_dtype

    request = ModelInferRequest(model_name=model)
    if priority:
        request.parameters["priority"].uint64_param = priority
    for name, array in inputs.items():
        request.inputs.add(name=name, datatype=np_to_triton_dtype(array.dtype), shape=array.shape)
        request.raw_input_contents.append(to_bytes(array))
    return bytes(request.SerializeToString())


def decode_outputs(response: ModelInferResponse) -> dict[str, Array]:
    """Return the outputs by name; strings are bytes, BF16 is widened to FP32.

    Raises ValueError if an output comes without its contents.
    """
    pairs = zip(response.outputs, response.raw_output_contents, strict=True)
    return {tensor.name: _decode(tensor.datatype, raw).reshape(tuple(tensor.shape)) for tensor, raw in pairs}


def _decode(datatype: str, raw: bytes) -> Array:
    from tritonclient.utils import triton_to_np_dtype

    if datatype == "BF16":
        return (np.frombuffer(raw, dtype="<u2").astype("<u4") << 16).view("<f4")
    return from_bytes(np.dtype(triton_to_np_dtype(datatype)), raw)


def _join(model: str, tensors: Sequence[InputTensor], samples: Sequence[InputSample]) -> InputSample:
    """Return the samples joined along a new first dimension, or the sample itself if the model takes no batches."""
    joined: InputSample = {}
    for tensor in tensors:
        arrays = [sample[tensor.name] for sample in samples if tensor.name in sample]
        if not arrays:  # not in the data: the server knows whether it is optional
            continue
        shapes = {array.shape for array in arrays}
        if len(shapes) > 1:
            examples = " and ".join(str(list(shape)) for shape in sorted(shapes)[:2])
            raise BadInputError(
                f"input {one_line(tensor.name)}: entries of shapes {examples} cannot be in one request; "
                "set the request batch size to 1, or give data of one shape"
            )
        _check_bytes(model, sum(array.nbytes for array in arrays))
        joined[tensor.name] = np.stack(arrays) if tensor.has_batch else arrays[0]
    return joined


def _check_bytes(model: str, size: int) -> None:
    if size > MAX_REQUEST_BYTES:
        raise BadInputError(f"a request to {model} would have {size / 2**30:.1f} GiB; a gRPC message holds 2 GiB")
