"""The config.pbtxt that a built model starts from: the baseline that tuning is measured against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tritonclient.grpc import model_config_pb2 as pb

from optimizer.models.builder import Builder, Interface, Kind, Settings, Tensor


def configs(builder: Builder, settings: Settings, max_batch_size: int, kind: Kind) -> Sequence[pb.ModelConfig]:
    """Of each model in the builder's repository."""
    if builder.configs is not None:
        return builder.configs(max_batch_size, kind)
    return [onnx_config(builder.name, builder.interface(settings), max_batch_size, kind)]


def onnx_config(name: str, interface: Interface, max_batch_size: int, kind: Kind) -> pb.ModelConfig:
    """An ONNX model with one instance (one a GPU for KIND_GPU) and no dynamic batching."""
    config = pb.ModelConfig(name=name, platform="onnxruntime_onnx", max_batch_size=max_batch_size)
    return with_instance(with_tensors(config, interface), kind)


def with_tensors(config: pb.ModelConfig, interface: Interface) -> pb.ModelConfig:
    """``config``, its inputs and outputs added."""
    for tensors, fields in ((interface.inputs, config.input), (interface.outputs, config.output)):
        _add(fields, tensors)
    return config


def with_instance(config: pb.ModelConfig, kind: Kind) -> pb.ModelConfig:
    """``config``, one instance of this kind added."""
    config.instance_group.add(count=1, kind=pb.ModelInstanceGroup.Kind.Value(kind))
    return config


def _add(fields: pb.ModelConfig, tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        fields.add(name=tensor.name, data_type=pb.DataType.Value(f"TYPE_{tensor.dtype}"), dims=tensor.dims)
