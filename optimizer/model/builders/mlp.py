"""A small multi-layer perceptron that is built in a moment, for tests and first tries."""

from __future__ import annotations

from itertools import pairwise
from typing import Self

import numpy as np
from pydantic import Field, model_validator

from optimizer.model.builders.builder import (
    Builder,
    BuilderSettings,
    Draft,
    Interface,
    ModelFacts,
    Samples,
    TensorSpec,
)
from optimizer.model.builders.onnx_graph import Graph, Layers
from optimizer.model.builders.request_data import write_input_data

MAX_WIDTH, MAX_LAYERS = 65_536, 1000
MAX_PARAMETERS = 1 << 27  # 512 MiB of weights, which are in memory several times while the model is built
MAX_VALUES = 1 << 24  # in the requests: about 300 MB of JSON


class MlpSettings(BuilderSettings):
    """FP32 ``input`` [input_width] -> ``layers`` hidden layers, ReLU -> FP32 ``output`` [output_width]."""

    input_width: int = Field(default=64, ge=1, le=MAX_WIDTH)
    hidden_width: int = Field(default=256, ge=1, le=MAX_WIDTH)
    layers: int = Field(default=2, ge=0, le=MAX_LAYERS)
    output_width: int = Field(default=8, ge=1, le=MAX_WIDTH)
    samples: Samples = 256

    @property
    def widths(self) -> list[int]:
        """The width of each layer behind the input."""
        return [self.hidden_width] * self.layers + [self.output_width]

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        parameters = sum((before + 1) * width for before, width in pairwise([self.input_width, *self.widths]))
        if parameters > MAX_PARAMETERS:
            raise ValueError(f"{parameters:,} parameters are more than {MAX_PARAMETERS:,}; write smaller sizes")
        values = self.samples * self.input_width
        if values > MAX_VALUES:
            raise ValueError(f"{values:,} values of requests are more than {MAX_VALUES:,}; write fewer samples")
        return self


def interface(settings: MlpSettings) -> Interface:
    """Return the model's inputs and outputs."""
    return Interface(
        inputs=(TensorSpec("input", "FP32", (settings.input_width,)),),
        outputs=(TensorSpec("output", "FP32", (settings.output_width,)),),
    )


def write(settings: MlpSettings, draft: Draft) -> ModelFacts:
    """Write the model and its request data."""
    draft.say(f"building mlp: {settings.layers} hidden layers of {settings.hidden_width}")
    weights, requests = settings.generators(2)
    graph = Graph("mlp")
    x = graph.input("input", np.float32, [settings.input_width])
    layers = Layers(graph, np.float32, weights)
    layers.mlp(x, settings.input_width, settings.widths, name="layer", relu_at_end=False, to="output")
    graph.output("output", np.float32, [settings.output_width])
    graph.save(draft.version / "model.onnx")

    samples = requests.standard_normal((settings.samples, settings.input_width), dtype=np.float32)
    write_input_data(draft.input_data, {"input": samples})
    return {"precision": "fp32", "parameters": graph.parameters}


BUILDER = Builder(
    name="mlp", version=1, source="tritune's own", settings=MlpSettings, interface=interface, write=write
)
