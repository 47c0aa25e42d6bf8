"""The config.pbtxt that a built model starts from: the baseline that tuning is measured against."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from tritonclient.grpc import model_config_pb2 as pb

from optimizer.models.builder import Tensor


def baseline_config(
    name: str,
    inputs: Iterable[Tensor],
    outputs: Iterable[Tensor],
    max_batch_size: int,
    kind: Literal["KIND_CPU", "KIND_GPU"],
) -> pb.ModelConfig:
    """An ONNX model with one instance (one a GPU for KIND_GPU) and no dynamic batching."""
    config = pb.ModelConfig(name=name, platform="onnxruntime_onnx", max_batch_size=max_batch_size)
    for tensor in inputs:
        config.input.add(name=tensor.name, data_type=_data_type(tensor), dims=tensor.dims)
    for tensor in outputs:
        config.output.add(name=tensor.name, data_type=_data_type(tensor), dims=tensor.dims)
    config.instance_group.add(count=1, kind=pb.ModelInstanceGroup.Kind.Value(kind))
    return config


def _data_type(tensor: Tensor) -> int:
    return int(pb.DataType.Value(f"TYPE_{tensor.dtype}"))
