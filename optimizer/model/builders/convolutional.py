"""Two convolutional reference models. Batch norms are folded into the convolutions.

ResNeXt101-32x4d (Xie et al. 2017) for ImageNet, as served by NVIDIA's DeepLearningExamples: ``input__0``
[3, 224, 224] -> 7×7 convolution, pooling, four stages of 3, 4, 23 and 3 bottlenecks (1×1, 3×3 in 32 groups, 1×1) ->
mean over the image -> ``output__0`` [1000], logits.

The text recognizer of Triton's tutorials, None-ResNet-None-CTC of Baek et al. 2019: ``input.1`` [1, 32, 100], a gray
image of a word -> 29 convolutions in residual blocks -> ``308`` [26, 37]: for each of 26 positions the logits of 10
digits, 26 letters and the blank.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from pydantic import Field

from optimizer.model.builders.builder import Builder, BuilderSettings, Draft, Interface, ModelFacts, Samples
from optimizer.model.builders.onnx_graph import LargeGraph
from optimizer.model.builders.request_data import write_input_data
from optimizer.model.input_data import TensorSpec

Pair: TypeAlias = tuple[int, int]


class ConvolutionalGraph(LargeGraph):
    """A graph with convolutions.

    A batch norm's scale and shift both count as parameters, as in training, although folding leaves only a bias.
    """

    def conv(
        self,
        x: str,
        channels: Pair,
        kernel: int,
        name: str,
        *,
        stride: Pair = (1, 1),
        padding: Pair | None = None,
        groups: int = 1,
        relu: bool = True,
        gain: float = 1.0,
    ) -> str:
        """Add a convolution of ``x`` [batch, channels[0], height, width] with folded batch norm, and ReLU.

        Weights have He's scale times ``gain``. Without ``padding`` the size is kept.
        """
        before, after = channels
        fan_in = before // groups * kernel**2
        weight = self.normal(
            f"{name}.weight", [after, before // groups, kernel, kernel], gain * math.sqrt((2 if relu else 1) / fan_in)
        )
        bias = self.normal(f"{name}.bias", [after], 0.1 * gain)
        self.parameters += after
        pads = (kernel // 2, kernel // 2) if padding is None else padding
        out = self.op(
            "Conv",
            x,
            weight,
            bias,
            to=f"{name}.conv" if relu else name,
            kernel_shape=[kernel, kernel],
            strides=list(stride),
            pads=[*pads, *pads],
            group=groups,
        )
        return self.op("Relu", out, to=name) if relu else out

    def max_pool(self, x: str, kernel: int, name: str, *, stride: Pair, padding: Pair = (0, 0)) -> str:
        """Add a max pooling of ``x``."""
        return self.op(
            "MaxPool", x, to=name, kernel_shape=[kernel, kernel], strides=list(stride), pads=[*padding, *padding]
        )

    def add_relu(self, x: str, shortcut: str, name: str) -> str:
        """Add the end of a residual block: ReLU of the sum."""
        return self.op("Relu", self.op("Add", x, shortcut, to=f"{name}.sum"), to=name)


RESNEXT_INPUT, RESNEXT_OUTPUT = "input__0", "output__0"
GROUPS = 32
STEM = 64
WIDTHS = (128, 256, 512, 1024)  # channels of the 3×3 convolutions; a bottleneck's output is twice as wide
EXPANSION = 2
IMAGE_CLASSES = 1000
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


def resnext_interface(settings: ResnextSettings) -> Interface:
    """Return the inputs and outputs of ResNeXt."""
    floats = settings.precision.upper()
    return Interface(
        inputs=(TensorSpec(RESNEXT_INPUT, floats, settings.dims),),
        outputs=(TensorSpec(RESNEXT_OUTPUT, floats, (IMAGE_CLASSES,)),),
    )


def write_resnext(settings: ResnextSettings, draft: Draft) -> ModelFacts:
    """Write ResNeXt and its request data."""
    draft.on_progress(f"building resnext{settings.depth}-32x4d: images of {settings.image} x {settings.image}")
    values, requests = settings.generators(2)
    graph = draw_resnext(settings, draft.version / "weights.bin", values)
    graph.save(draft.version / "model.onnx")
    images = requests.standard_normal((settings.samples, *settings.dims), np.float32).astype(settings.dtype)
    write_input_data(draft.input_data, {RESNEXT_INPUT: images})
    return {"precision": settings.precision, "depth": settings.depth, "parameters": graph.parameters}


def draw_resnext(settings: ResnextSettings, weights_file: Path, rng: np.random.Generator | None) -> LargeGraph:
    """Return the ONNX graph of ResNeXt; its weights are written to ``weights_file``."""
    graph = ConvolutionalGraph("resnext", weights_file, settings.dtype, rng)
    x = graph.input(RESNEXT_INPUT, settings.dtype, settings.dims)
    x = graph.conv(x, (3, STEM), 7, "stem", stride=(2, 2))
    x = graph.max_pool(x, 3, "stem.pool", stride=(2, 2), padding=(1, 1))
    channels = STEM
    for stage, (blocks, width) in enumerate(zip(BLOCKS[settings.depth], WIDTHS, strict=True)):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            x = _bottleneck(graph, x, channels, width, stride, f"stage.{stage}.{block}")
            channels = EXPANSION * width
    mean = graph.op("GlobalAveragePool", x, to="mean")
    flat = graph.op("Flatten", mean, to="features", axis=1)
    weight = graph.normal("classes.weight", [channels, IMAGE_CLASSES], channels**-0.5)
    graph.op("Gemm", flat, weight, graph.normal("classes.bias", [IMAGE_CLASSES], 0.1), to=RESNEXT_OUTPUT)
    graph.output(RESNEXT_OUTPUT, settings.dtype, [IMAGE_CLASSES])
    return graph


def _bottleneck(graph: ConvolutionalGraph, x: str, channels: int, width: int, stride: int, name: str) -> str:
    """Add a bottleneck whose 3×3 convolution has the stride; a small gain keeps residual branches from adding up."""
    out = EXPANSION * width
    shortcut = x
    if channels != out or stride > 1:
        shortcut = graph.conv(x, (channels, out), 1, f"{name}.shortcut", stride=(stride, stride), relu=False)
    y = graph.conv(x, (channels, width), 1, f"{name}.reduce")
    y = graph.conv(y, (width, width), 3, f"{name}.grouped", stride=(stride, stride), groups=GROUPS)
    y = graph.conv(y, (width, out), 1, f"{name}.expand", relu=False, gain=0.25)
    return graph.add_relu(y, shortcut, name)


RESNEXT_BUILDER = Builder(
    name="resnext",
    version=1,
    source="NVIDIA DeepLearningExamples, ConvNets/resnext101-32x4d",
    settings=ResnextSettings,
    interface=resnext_interface,
    write=write_resnext,
)

TEXT_INPUT, TEXT_OUTPUT = "input.1", "308"  # as torch.onnx.export named them
TEXT_IMAGE = (1, 32, 100)
POSITIONS, CHARACTER_CLASSES = 26, 37
TEXT_INTERFACE = Interface(
    inputs=(TensorSpec(TEXT_INPUT, "FP32", TEXT_IMAGE),),
    outputs=(TensorSpec(TEXT_OUTPUT, "FP32", (POSITIONS, CHARACTER_CLASSES)),),
)


class TextRecognitionSettings(BuilderSettings):
    """``width``: features of the last layer, 512 as published. ``samples``: entries of request data."""

    width: int = Field(default=512, ge=16, le=8192, multiple_of=16)
    samples: Samples = 61


def write_text_recognition(settings: TextRecognitionSettings, draft: Draft) -> ModelFacts:
    """Write the text recognizer and its request data."""
    draft.on_progress(f"building text_recognition: {settings.width} features")
    values, requests = settings.generators(2)
    graph = draw_text_recognition(settings, draft.version / "weights.bin", values)
    graph.save(draft.version / "model.onnx")
    images = requests.uniform(-1, 1, (settings.samples, *TEXT_IMAGE)).astype(np.float32)
    write_input_data(draft.input_data, {TEXT_INPUT: images})
    return {"precision": "fp32", "width": settings.width, "parameters": graph.parameters}


def draw_text_recognition(
    settings: TextRecognitionSettings, weights_file: Path, rng: np.random.Generator | None
) -> LargeGraph:
    """Return the ONNX graph of the text recognizer; its weights are written to ``weights_file``."""
    graph = ConvolutionalGraph("text_recognition", weights_file, np.float32, rng)
    eighth, quarter, half, full = (settings.width // n for n in (8, 4, 2, 1))
    x = graph.input(TEXT_INPUT, np.float32, TEXT_IMAGE)
    x = graph.conv(x, (1, eighth // 2), 3, "conv0.1")
    x = graph.conv(x, (eighth // 2, eighth), 3, "conv0.2")
    x = graph.max_pool(x, 2, "pool1", stride=(2, 2))
    x = _residual_blocks(graph, x, (eighth, quarter), 1, "stage1")
    x = graph.conv(x, (quarter, quarter), 3, "conv1")
    x = graph.max_pool(x, 2, "pool2", stride=(2, 2))
    x = _residual_blocks(graph, x, (quarter, half), 2, "stage2")
    x = graph.conv(x, (half, half), 3, "conv2")
    x = graph.max_pool(x, 2, "pool3", stride=(2, 1), padding=(0, 1))
    x = _residual_blocks(graph, x, (half, full), 5, "stage3")
    x = graph.conv(x, (full, full), 3, "conv3")
    x = _residual_blocks(graph, x, (full, full), 3, "stage4")
    x = graph.conv(x, (full, full), 2, "conv4.1", stride=(2, 1), padding=(0, 1))
    x = graph.conv(x, (full, full), 2, "conv4.2", padding=(0, 0))
    # [batch, features, 1, 26] -> one row of features per position
    rows = graph.op("Transpose", x, to="rows", perm=[0, 3, 1, 2])
    shape = graph.constant("row_shape", np.array([0, POSITIONS, full], np.int64))
    features = graph.op("Reshape", rows, shape, to="features")
    weight = graph.normal("classes.weight", [full, CHARACTER_CLASSES], full**-0.5)
    product = graph.op("MatMul", features, weight, to="product")
    graph.op("Add", product, graph.normal("classes.bias", [CHARACTER_CLASSES], 0.1), to=TEXT_OUTPUT)
    graph.output(TEXT_OUTPUT, np.float32, [POSITIONS, CHARACTER_CLASSES])
    return graph


def _residual_blocks(graph: ConvolutionalGraph, x: str, channels: Pair, blocks: int, name: str) -> str:
    """Add residual blocks of two 3×3 convolutions each; return the last tensor."""
    before, after = channels
    for block in range(blocks):
        block_name = f"{name}.{block}"
        shortcut = x
        if before != after:
            shortcut = graph.conv(x, (before, after), 1, f"{block_name}.shortcut", relu=False)
        y = graph.conv(x, (before, after), 3, f"{block_name}.first")
        y = graph.conv(y, (after, after), 3, f"{block_name}.second", relu=False, gain=0.5)
        x = graph.add_relu(y, shortcut, block_name)
        before = after
    return x


TEXT_RECOGNITION_BUILDER = Builder(
    name="text_recognition",
    version=1,
    source="Triton tutorials, Conceptual Guide part 2",
    settings=TextRecognitionSettings,
    interface=lambda _: TEXT_INTERFACE,
    write=write_text_recognition,
)
