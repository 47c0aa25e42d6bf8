"""Which backend serves a model, as Triton finds it out."""

from __future__ import annotations

from tritonclient.grpc.model_config_pb2 import ModelConfig

MODEL_FILES = {"onnxruntime": ("model.onnx",), "python": ("model.py",), "pytorch": ("model.pt", "model.pt2")}
PLATFORMS = {"onnxruntime_onnx": "onnxruntime", "pytorch_libtorch": "pytorch"}
NATIVE_FILES = {"tensorrt": ("model.plan",), "tensorflow": ("model.savedmodel", "model.graphdef")}
NATIVE_PLATFORMS = {
    "tensorrt_plan": "tensorrt",
    "tensorflow_savedmodel": "tensorflow",
    "tensorflow_graphdef": "tensorflow",
    "ensemble": "",
}


def backend_of(config: ModelConfig) -> str:
    """The backend that serves it; the older ``platform: "onnxruntime_onnx"`` names one too. An ensemble has none."""
    platform = str(config.platform)
    return str(config.backend) or {**PLATFORMS, **NATIVE_PLATFORMS}.get(platform, platform)
