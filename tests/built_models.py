"""The reference models as the tests build them, with their ONNX file, its weights and its outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy.typing as npt
import onnx
import onnxruntime
from onnx import numpy_helper

from optimizer.config.model_source import ModelSource
from optimizer.model.builders import build

Array = npt.NDArray[Any]


def obtain(cache: Path, builder: str = "mlp", *, max_batch_size: int = 64, **settings: object) -> ModelSource:
    """Return the model of ``builder`` for CPUs, built in ``cache``."""
    return build(
        builder, settings, cache=cache, max_batch_size=max_batch_size, kind="KIND_CPU", on_progress=lambda _: None
    )


def model_file(source: ModelSource) -> Path:
    return source.repository / source.name / "1" / "model.onnx"


def weights_of(source: ModelSource) -> dict[str, Array]:
    model = onnx.load(str(model_file(source)))
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def run(source: ModelSource, **inputs: Array) -> list[Array]:
    """Return the outputs of the model for ``inputs``, computed with one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(model_file(source)), options, ["CPUExecutionProvider"])
    return list(session.run(None, inputs))
