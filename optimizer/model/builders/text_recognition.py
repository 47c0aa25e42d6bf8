"""The text recognizer of Triton's tutorials: None-ResNet-None-CTC of Baek et al. 2019.

``input.1`` [1, 32, 100], a gray image of a word -> 29 convolutions in residual blocks -> ``308`` [26, 37]: for each
of 26 positions the logits of 10 digits, 26 letters and the blank. Batch norms are folded into the convolutions.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from pydantic import Field

from optimizer.model.builders.builder import (
    Builder,
    BuilderSettings,
    Draft,
    Interface,
    ModelFacts,
    Samples,
    TensorSpec,
)
from optimizer.model.builders.onnx_graph import Convolutions, Graph, Pair, WeightFile
from optimizer.model.builders.request_data import write_input_data

INPUT, OUTPUT = "input.1", "308"  # as torch.onnx.export named them
IMAGE = (1, 32, 100)
POSITIONS, CLASSES = 26, 37


class TextRecognitionSettings(BuilderSettings):
    """``width``: features of the last layer, 512 as published. ``samples``: entries of request data."""

    width: int = Field(default=512, ge=16, le=8192, multiple_of=16)
    samples: Samples = 61


class _Net:
    def __init__(self, convolutions: Convolutions) -> None:
        self._convolutions = convolutions

    def stage(self, x: str, channels: Pair, blocks: int, name: str) -> str:
        """Add residual blocks of two 3×3 convolutions each; return the last tensor."""
        before, after = channels
        for block in range(blocks):
            own = f"{name}.{block}"
            shortcut = x
            if before != after:
                shortcut = self._convolutions.conv(x, (before, after), 1, f"{own}.shortcut", relu=False)
            y = self._convolutions.conv(x, (before, after), 3, f"{own}.first")
            y = self._convolutions.conv(y, (after, after), 3, f"{own}.second", relu=False, gain=0.5)
            x = self._convolutions.add_relu(y, shortcut, own)
            before = after
        return x


def interface(_: TextRecognitionSettings) -> Interface:
    """Return the model's inputs and outputs."""
    return Interface(
        inputs=(TensorSpec(INPUT, "FP32", IMAGE),), outputs=(TensorSpec(OUTPUT, "FP32", (POSITIONS, CLASSES)),)
    )


def write(settings: TextRecognitionSettings, draft: Draft) -> ModelFacts:
    """Write the model and its request data."""
    draft.say(f"building text_recognition: {settings.width} features")
    values, requests = settings.generators(2)
    graph = draw(settings, draft.version / "weights.bin", values)
    graph.save(draft.version / "model.onnx")
    images = requests.uniform(-1, 1, (settings.samples, *IMAGE)).astype(np.float32)
    write_input_data(draft.input_data, {INPUT: images})
    return {"precision": "fp32", "width": settings.width, "parameters": graph.parameters}


def draw(settings: TextRecognitionSettings, weights_file: Path, rng: np.random.Generator | None) -> Graph:
    """Return the ONNX graph; its weights are written to ``weights_file``."""
    graph = Graph("text_recognition")
    weights = WeightFile(graph, weights_file, np.float32, rng)
    convolutions = Convolutions(graph, weights)
    net = _Net(convolutions)
    eighth, quarter, half, full = (settings.width // n for n in (8, 4, 2, 1))
    x = graph.input(INPUT, np.float32, IMAGE)
    x = convolutions.conv(x, (1, eighth // 2), 3, "conv0.1")
    x = convolutions.conv(x, (eighth // 2, eighth), 3, "conv0.2")
    x = convolutions.max_pool(x, 2, "pool1", stride=(2, 2))
    x = net.stage(x, (eighth, quarter), 1, "stage1")
    x = convolutions.conv(x, (quarter, quarter), 3, "conv1")
    x = convolutions.max_pool(x, 2, "pool2", stride=(2, 2))
    x = net.stage(x, (quarter, half), 2, "stage2")
    x = convolutions.conv(x, (half, half), 3, "conv2")
    x = convolutions.max_pool(x, 2, "pool3", stride=(2, 1), padding=(0, 1))
    x = net.stage(x, (half, full), 5, "stage3")
    x = convolutions.conv(x, (full, full), 3, "conv3")
    x = net.stage(x, (full, full), 3, "stage4")
    x = convolutions.conv(x, (full, full), 2, "conv4.1", stride=(2, 1), padding=(0, 1))
    x = convolutions.conv(x, (full, full), 2, "conv4.2", padding=(0, 0))
    # [batch, features, 1, 26] -> one row of features per position
    rows = graph.op("Transpose", x, to="rows", perm=[0, 3, 1, 2])
    shape = graph.constant("row_shape", np.array([0, POSITIONS, full], np.int64))
    features = graph.op("Reshape", rows, shape, to="features")
    product = graph.op(
        "MatMul", features, weights.normal("classes.weight", [full, CLASSES], full**-0.5), to="product"
    )
    graph.op("Add", product, weights.normal("classes.bias", [CLASSES], 0.1), to=OUTPUT)
    graph.output(OUTPUT, np.float32, [POSITIONS, CLASSES])
    return graph


BUILDER = Builder(
    name="text_recognition",
    version=1,
    source="Triton tutorials, Conceptual Guide part 2",
    settings=TextRecognitionSettings,
    interface=interface,
    write=write,
)
