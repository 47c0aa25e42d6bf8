"""A small multi-layer perceptron that is built in a moment, for tests and first tries."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from optimizer.model.builders.builder import Builder, BuilderSettings, Draft, Interface, ModelFacts, TensorSpec
from optimizer.model.builders.onnx_graph import Graph, Layers
from optimizer.model.builders.request_data import write_input_data


class MlpSettings(BuilderSettings):
    """FP32 ``input`` [input_width] -> ``layers`` hidden layers, ReLU -> FP32 ``output`` [output_width]."""

    input_width: int = Field(default=64, ge=1)
    hidden_width: int = Field(default=256, ge=1)
    layers: int = Field(default=2, ge=0)
    output_width: int = Field(default=8, ge=1)
    samples: int = Field(default=256, ge=1)


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
    widths = [settings.hidden_width] * settings.layers + [settings.output_width]
    layers = Layers(graph, np.float32, weights)
    layers.mlp(x, settings.input_width, widths, name="layer", relu_at_end=False, to="output")
    graph.output("output", np.float32, [settings.output_width])
    graph.save(draft.version / "model.onnx")

    samples = requests.standard_normal((settings.samples, settings.input_width), dtype=np.float32)
    write_input_data(draft.input_data, {"input": samples})
    return {"precision": "fp32", "parameters": graph.parameters}


BUILDER = Builder(
    name="mlp", version=1, source="tritune's own", settings=MlpSettings, interface=interface, write=write
)
