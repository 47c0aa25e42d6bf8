"""ResNeXt101-32x4d (Xie et al. 2017) for ImageNet, as NVIDIA's DeepLearningExamples serve it.

``input__0`` [3, 224, 224] -> 7×7 convolution, pooling, four stages of 3, 4, 23 and 3 bottlenecks (1×1, 3×3 in 32
groups, 1×1) -> mean over the image -> ``output__0`` [1000], logits. Each convolution's batch norm is folded into it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from optimizer.models.builder import Builder, Draft, Facts, Interface, Say, Settings, Tensor
from optimizer.models.convolutions import Convolutions
from optimizer.models.input_data import write_input_data
from optimizer.models.onnx_graph import Graph, WeightFile

INPUT, OUTPUT = "input__0", "output__0"
GROUPS = 32
STEM = 64
WIDTHS = (128, 256, 512, 1024)  # of the 3×3 convolutions; a bottleneck's output is twice as wide
EXPANSION = 2
CLASSES = 1000
BLOCKS = {"101": (3, 4, 23, 3), "50": (3, 4, 6, 3)}


class ResnextSettings(Settings):
    """``depth`` 101 as published; 50 is the half for a laptop. ``image`` is the side of the square, in pixels.

    Of the ``samples`` of request data each is 0.8 MB of JSON, which the load generator reads at each launch.
    """

    depth: Literal["101", "50"] = "101"
    image: int = Field(default=224, ge=32)
    precision: Literal["fp32", "fp16"] = "fp32"
    samples: int = Field(default=4, ge=1)
    seed: int = Field(default=0, ge=0)

    @property
    def dims(self) -> tuple[int, int, int]:
        return 3, self.image, self.image

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.float16 if self.precision == "fp16" else np.float32)


def interface(settings: ResnextSettings) -> Interface:
    floats = settings.precision.upper()
    return Interface(inputs=(Tensor(INPUT, floats, settings.dims),), outputs=(Tensor(OUTPUT, floats, (CLASSES,)),))


def write(settings: ResnextSettings, draft: Draft, say: Say) -> Facts:
    say(f"building resnext{settings.depth}-32x4d: images of {settings.image} x {settings.image}")
    values, requests = (np.random.default_rng(s) for s in np.random.SeedSequence(settings.seed).spawn(2))
    graph = draw(settings, draft.version / "weights.bin", values)
    graph.save(draft.version / "model.onnx")
    images = requests.standard_normal((settings.samples, *settings.dims), np.float32).astype(settings.dtype)
    write_input_data(draft.input_data, {INPUT: images})
    return {
        "precision": settings.precision,
        "depth": settings.depth,
        "parameters": graph.parameters,
        "seed": settings.seed,
    }


def draw(settings: ResnextSettings, weights_file: Path, rng: np.random.Generator | None) -> Graph:
    """The graph, its weights in ``weights_file``."""
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
    """The stride is the 3×3 convolution's. The residual branch is weak, so that many of them do not add up."""
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
