"""What a Triton configuration says of an ONNX model, derived from its graph: tensors, types, dims, batches."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer.errors import BadInputError
from optimizer.profile.yaml_lines import show
from optimizer.sources.onnx_file import shown
from optimizer.untrusted import one_line

if TYPE_CHECKING:
    from onnx import ModelProto, ValueInfoProto

PLATFORM = "onnxruntime_onnx"
DATA_TYPES = {"FLOAT": "TYPE_FP32", "DOUBLE": "TYPE_FP64", "FLOAT16": "TYPE_FP16", "BFLOAT16": "TYPE_BF16"}
MOST_WORDS = 300  # characters of a list in an error
GENERATED = re.compile(r"unk__\d+|.+_dim_\d+")  # names that tf2onnx and PyTorch's exporter make up for open dims


def derive(model: ModelProto, file: Path, name: str, largest_batch: int) -> ModelConfig:
    """The configuration that the graph alone implies: ``max_batch_size`` is ``largest_batch``, or 0 where the model
    has no batch dimension. Raises BadInputError where it takes no more than the graph."""
    size = largest_batch if has_batch_dimension(model) else 0
    config = ModelConfig(name=name, platform=PLATFORM, max_batch_size=size)
    complete(config, model, file.with_name("config.pbtxt"), file)
    for kind, tensors in (("input", config.input), ("output", config.output)):
        if not tensors:
            raise BadInputError(f"{shown(file)}: its graph has no {kind}")
    return config


def has_batch_dimension(model: ModelProto) -> bool:
    """Whether the first dimension of each input and output is open, and is one and the same as far as they say."""
    shapes = [tensor.type.tensor_type.shape.dim for tensor in (*_inputs(model), *model.graph.output)]
    if any(not shape or shape[0].dim_value > 0 for shape in shapes):
        return False
    symbols = {shape[0].dim_param for shape in shapes}
    return len({symbol for symbol in symbols if symbol and not GENERATED.fullmatch(symbol)}) <= 1


def complete(config: ModelConfig, model: ModelProto, path: Path, file: Path) -> None:
    """Fill inputs and outputs in where ``config`` has none, as Triton's own backend does; check them where it has.

    Unlike there, a dynamic batcher is never added. ``config`` stands in ``path``, ``model`` in ``file``.
    """
    batched = config.max_batch_size > 0
    for kind, tensors, given in (
        ("input", _inputs(model), config.input),
        ("output", list(model.graph.output), config.output),
    ):
        known = {tensor.name for tensor in tensors}
        for wrong in (tensor.name for tensor in given if tensor.name not in known):
            has = one_line(", ".join(sorted(known)), MOST_WORDS)
            raise BadInputError(f"{shown(path)}: {kind} {show(wrong)} is not in {shown(file)}, which has {has}")
        for tensor in tensors if not given else ():
            which = f"{kind} {show(tensor.name)} of {shown(file)}"
            shape = _shape(tensor, which)
            if batched and (not shape or shape[0] != -1):
                raise BadInputError(
                    f"{shown(path)}: max_batch_size is {config.max_batch_size}, but {which} has no "
                    f"batch dimension (its shape is {show(tuple(shape))}); write max_batch_size: 0"
                )
            added = given.add(name=tensor.name, data_type=_data_type(tensor, which))
            dims = shape[1:] if batched else shape
            added.dims.extend(dims or [1])
            if not dims:
                added.reshape.SetInParent()  # a scalar for each sample


def _inputs(model: ModelProto) -> list[ValueInfoProto]:
    """Those that a request brings: older graphs list their weights among the inputs."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return [tensor for tensor in model.graph.input if tensor.name not in weights]


def _shape(tensor: ValueInfoProto, which: str) -> list[int]:
    kind = tensor.type.WhichOneof("value")
    if kind not in (None, "tensor_type"):
        told = str(kind).removesuffix("_type").replace("_", " ")
        raise BadInputError(
            f"{which} is a {told}, not a tensor, which Triton cannot pass; export the model without it "
            "(scikit-learn's: zipmap=False), or name only the others in config.pbtxt"
        )
    if not tensor.type.tensor_type.HasField("shape"):
        raise BadInputError(f"{which} has no shape in the graph; write it into config.pbtxt")
    return [dim.dim_value if dim.dim_value > 0 else -1 for dim in tensor.type.tensor_type.shape.dim]


def _data_type(tensor: ValueInfoProto, which: str) -> Any:
    from onnx import helper

    try:
        name = helper.tensor_dtype_to_string(tensor.type.tensor_type.elem_type).removeprefix("TensorProto.")
        return ModelConfig().input.add(data_type=DATA_TYPES.get(name, f"TYPE_{name}")).data_type
    except (KeyError, ValueError):
        raise BadInputError(f"{which} has a type that Triton does not know; write it into config.pbtxt") from None
