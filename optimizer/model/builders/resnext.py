"""ResNeXt101-32x4d (Xie et al. 2017) for ImageNet, as served by NVIDIA's DeepLearningExamples.

``input__0`` [3, 224, 224] -> 7×7 convolution, pooling, four stages of 3, 4, 23 and 3 bottlenecks (1×1, 3×3 in 32
groups, 1×1) -> mean over the image -> ``output__0`` [1000], logits. Batch norms are folded into the convolutions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from optimizer.model.builders.builder import Builder, BuilderSettings, Draft, Interface, ModelFacts, TensorSpec
from optimizer.model.builders.onnx_graph import Convolutions, Graph, WeightFile
from optimizer.model.builders.request_data import write_input_data

INPUT, OUTPUT = "input__0", "output__0"
GROUPS = 32
STEM = 64
WIDTHS = (128, 256, 512, 1024)  # channels of the 3×3 convolutions; a bottleneck's output is twice as wide
EXPANSION = 2
CLASSES = 1000
BLOCKS = {"101": (3, 4, 23, 3), "50": (3, 4, 6, 3)}


class ResnextSettings(BuilderSettings):
    """``depth``: 101 as published, 50 for a laptop. ``image``: side of the square image in pixels.

    Each of the ``samples`` of request data is 0.8 MB of JSON, which the load generator reads at every start.
    """

    depth: Literal["101", "50"] = "101"
    image: int = Field(default=224, ge=32, le=2048)
    precision: Literal["fp32", "fp16"] = "fp32"
    samples: int = Field(default=4, ge=1, le=1000)

    @property
    def dims(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        return 3, self.image, self.image

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of images, weights and logits."""
        return np.dtype(np.float16 if self.precision == "fp16" else np.float32)


def interface(settings: ResnextSettings) -> Interface:
    """Return the model's inputs and outputs."""
    floats = settings.precision.upper()
    return Interface(
        inputs=(TensorSpec(INPUT, floats, settings.dims),), outputs=(TensorSpec(OUTPUT, floats, (CLASSES,)),)
    )


def write(settings: ResnextSettings, draft: Draft) -> ModelFacts:
    """Write the model and its request data."""
    draft.say(f"building resnext{settings.depth}-32x4d: images of {settings.image} x {settings.image}")
    values, requests = settings.generators(2)
    graph = draw(settings, draft.version / "weights.bin", values)
    graph.save(draft.version / "model.onnx")
    images = requests.standard_normal((settings.samples, *settings.dims), np.float32).astype(settings.dtype)
    write_input_data(draft.input_data, {INPUT: images})
    return {"precision": settings.precision, "depth": settings.depth, "parameters": graph.parameters}


def draw(settings: ResnextSettings, weights_file: Path, rng: np.random.Generator | None) -> Graph:
    """Return the ONNX graph; its weights are written to ``weights_file``."""
    graph = Graph("resnext")
    weights = WeightFile(graph, weights_file, settings.dtype, rng)
    convolutions = Convolutions(graph, weights)
    x = graph.input(INPUT, settings.dtype, settings.dims)
    x = convolutions.conv(x, (3, STEM), 7, "stem", stride=(2, 2))
    x = convolutions.max_pool(x, 3, "stem.pool", stride=(2, 2), padding=(1, 1))
    channels = STEM
    for stage, (blocks, width) in enumerate(zip(BLOCKS[settings.depth], WIDTHS, strict=True)):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            x = _bottleneck(convolutions, x, channels, width, stride, f"stage.{stage}.{block}")
            channels = EXPANSION * width
    mean = graph.op("GlobalAveragePool", x, to="mean")
    flat = graph.op("Flatten", mean, to="features", axis=1)
    weight = weights.normal("classes.weight", [channels, CLASSES], channels**-0.5)
    graph.op("Gemm", flat, weight, weights.normal("classes.bias", [CLASSES], 0.1), to=OUTPUT)
    graph.output(OUTPUT, settings.dtype, [CLASSES])
    return graph


def _bottleneck(convolutions: Convolutions, x: str, channels: int, width: int, stride: int, name: str) -> str:
    """Add a bottleneck whose 3×3 convolution has the stride; a small gain keeps residual branches from adding up."""
    out = EXPANSION * width
    shortcut = x
    if channels != out or stride > 1:
        shortcut = convolutions.conv(x, (channels, out), 1, f"{name}.shortcut", stride=(stride, stride), relu=False)
    y = convolutions.conv(x, (channels, width), 1, f"{name}.reduce")
    y = convolutions.conv(y, (width, width), 3, f"{name}.grouped", stride=(stride, stride), groups=GROUPS)
    y = convolutions.conv(y, (width, out), 1, f"{name}.expand", relu=False, gain=0.25)
    return convolutions.add_relu(y, shortcut, name)


BUILDER = Builder(
    name="resnext",
    version=1,
    source="NVIDIA DeepLearningExamples, ConvNets/resnext101-32x4d",
    settings=ResnextSettings,
    interface=interface,
    write=write,
)
