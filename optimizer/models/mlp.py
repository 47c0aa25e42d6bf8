"""A small multi-layer perceptron: a model that is built and answers in a moment, for tests and for trying."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from optimizer.models.builder import Builder, Draft, Facts, Interface, Say, Settings, Tensor
from optimizer.models.input_data import write_input_data
from optimizer.models.onnx_graph import Graph, Layers


class MlpSettings(Settings):
    """FP32 ``input`` [input_width] -> ``layers`` hidden layers, ReLU -> FP32 ``output`` [output_width]."""

    input_width: int = Field(default=64, ge=1)
    hidden_width: int = Field(default=256, ge=1)
    layers: int = Field(default=2, ge=0)
    output_width: int = Field(default=8, ge=1)
    samples: int = Field(default=256, ge=1)
    seed: int = Field(default=0, ge=0)


def interface(settings: MlpSettings) -> Interface:
    return Interface(
        inputs=(Tensor("input", "FP32", (settings.input_width,)),),
        outputs=(Tensor("output", "FP32", (settings.output_width,)),),
    )


def write(settings: MlpSettings, draft: Draft, say: Say) -> Facts:
    say(f"building mlp: {settings.layers} hidden layers of {settings.hidden_width}")
    weights, requests = (np.random.default_rng(s) for s in np.random.SeedSequence(settings.seed).spawn(2))
    graph = Graph("mlp")
    x = graph.input("input", np.float32, [settings.input_width])
    widths = [settings.hidden_width] * settings.layers + [settings.output_width]
    layers = Layers(graph, np.float32, weights)
    layers.mlp(x, settings.input_width, widths, name="layer", relu_at_end=False, to="output")
    graph.output("output", np.float32, [settings.output_width])
    graph.save(draft.version / "model.onnx")

    samples = requests.standard_normal((settings.samples, settings.input_width), dtype=np.float32)
    write_input_data(draft.input_data, {"input": samples})
    return {"precision": "fp32", "parameters": graph.parameters, "seed": settings.seed}


BUILDER = Builder(
    name="mlp", version=1, source="tritune's own", settings=MlpSettings, interface=interface, write=write
)
