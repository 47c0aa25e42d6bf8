"""ResNeXt101-32x4d (Xie et al. 2017) for ImageNet, as NVIDIA's DeepLearningExamples serve it.

``input__0`` [3, 224, 224] -> 7×7 convolution, pooling, four stages of 3, 4, 23 and 3 bottlenecks (1×1, 3×3 in 32
groups, 1×1) -> mean over the image -> ``output__0`` [1000], logits. Each convolution's batch norm is folded into it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from optimizer.models.builder import Builder, Draft, Say, Settings, Tensor, Written
from optimizer.models.convolutions import Convolutions
from optimizer.models.onnx_graph import Graph, WeightFile

GROUPS = 32
STEM = 64
WIDTHS = (128, 256, 512, 1024)  # of the 3×3 convolutions; a bottleneck's output is twice as wide
EXPANSION = 2
CLASSES = 1000
BLOCKS = {"101": (3, 4, 23, 3), "50": (3, 4, 6, 3)}


class ResnextSettings(Settings):
    """``depth`` 101 as published; 50 is the half for a laptop. ``image`` is the side of the square, in pixels."""

    depth: Literal["101", "50"] = "101"
    image: int = Field(default=224, ge=32)
    precision: Literal["fp32", "fp16"] = "fp32"
    seed: int = Field(default=0, ge=0)


def write(settings: ResnextSettings, draft: Draft, say: Say) -> Written:
    say(f"building resnext{settings.depth}-32x4d: images of {settings.image} x {settings.image}")
    graph = draw(settings, draft.version / "weights.bin", np.random.default_rng(settings.seed))
    graph.save(draft.version / "model.onnx")
    triton, dims = settings.precision.upper(), (3, settings.image, settings.image)
    return Written(
        inputs=(Tensor("input__0", triton, dims),),
        outputs=(Tensor("output__0", triton, (CLASSES,)),),
        facts={
            "precision": settings.precision,
            "depth": settings.depth,
            "parameters": graph.parameters,
            "seed": settings.seed,
        },
    )


def draw(settings: ResnextSettings, weights_file: Path, rng: np.random.Generator | None) -> Graph:
    """The graph, its weights in ``weights_file``."""
    dtype = np.dtype(np.float16 if settings.precision == "fp16" else np.float32)
    graph = Graph("resnext")
    weights = WeightFile(graph, weights_file, dtype, rng)
    convolutions = Convolutions(graph, weights)
    dims = (3, settings.image, settings.image)
    x = graph.input("input__0", dtype, dims)
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
    graph.op("Gemm", flat, weight, weights.normal("classes.bias", [CLASSES], 0.1), to="output__0")
    graph.output("output__0", dtype, [CLASSES])
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


BUILDER = Builder(name="resnext", version=1, settings=ResnextSettings, write=write)
