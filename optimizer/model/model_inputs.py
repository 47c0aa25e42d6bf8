"""The inputs that a model declares, as far as they are known without a server, and how they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from optimizer.config import model_config
from optimizer.config.model_config_proto import DataType, ModelConfig
from optimizer.core.safe_text import one_line
from optimizer.model.builders import describe
from optimizer.model.builders.builder import TensorSpec
from optimizer.model.profile import Profile
from optimizer.model.profile_schema import BuiltModel, OnnxModel


def inputs_of_config(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Return the inputs that a configuration declares, with printable names."""
    return tuple(
        TensorSpec(one_line(tensor.name), DataType.Name(tensor.data_type).removeprefix("TYPE_"), tuple(tensor.dims))
        for tensor in config.input
    )


def inputs_and_source(profile: Profile) -> tuple[tuple[TensorSpec, ...], str]:
    """Return the model's inputs, as far as known without reading the model file, and where the model comes from.

    Raises BadInputError if its config.pbtxt cannot be read.
    """
    model = profile.model
    if isinstance(model, BuiltModel):
        interface, source = describe(model.builder, model.settings)
        return interface.inputs, source
    if isinstance(model, OnnxModel):
        return (), one_line(str(model.onnx))
    folder = model.repository / model.name
    return inputs_of_config(model_config.read(folder / "config.pbtxt")), one_line(str(folder))


def show_inputs(inputs: Sequence[TensorSpec]) -> str:
    """Return the inputs as ``a, b INT32 [16] · c FP32 [-1]``."""
    groups = groupby(inputs, key=lambda tensor: f"{tensor.dtype} {list(tensor.dims)}")
    return " · ".join(f"{', '.join(tensor.name for tensor in same)} {kind}" for kind, same in groups)
