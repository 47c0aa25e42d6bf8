"""A Python-based Triton backend that serves ONNX models with ONNX Runtime.

Triton runs this file inside its Python stub for every model whose ``backend`` is ``onnxruntime`` (or whose
``platform`` is ``onnxruntime_onnx``), one process an instance. It understands the parameters of Triton's
native ONNX Runtime backend, so that a repository written for that one loads unmodified.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import triton_python_backend_utils as pb_utils

GRAPH_LEVELS = {
    -1: ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    0: ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    1: ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
}
TRITON_TYPES = {
    "tensor(bool)": "TYPE_BOOL",
    "tensor(int8)": "TYPE_INT8",
    "tensor(int16)": "TYPE_INT16",
    "tensor(int32)": "TYPE_INT32",
    "tensor(int64)": "TYPE_INT64",
    "tensor(uint8)": "TYPE_UINT8",
    "tensor(uint16)": "TYPE_UINT16",
    "tensor(uint32)": "TYPE_UINT32",
    "tensor(uint64)": "TYPE_UINT64",
    "tensor(float16)": "TYPE_FP16",
    "tensor(float)": "TYPE_FP32",
    "tensor(double)": "TYPE_FP64",
    "tensor(string)": "TYPE_STRING",
}


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Fill in inputs and outputs from the graph; never turn dynamic batching on by itself."""
        config = auto_complete_model_config.as_dict()
        if config["input"] and config["output"]:
            return auto_complete_model_config
        session = ort.InferenceSession(str(_model_file(config, Path.cwd())), providers=["CPUExecutionProvider"])
        batched = config["max_batch_size"] > 0
        for tensors, add in (
            (session.get_inputs(), auto_complete_model_config.add_input),
            (session.get_outputs(), auto_complete_model_config.add_output),
        ):
            for tensor in tensors:
                dims = [d if isinstance(d, int) else -1 for d in tensor.shape]
                add(
                    {
                        "name": tensor.name,
                        "data_type": TRITON_TYPES[tensor.type],
                        "dims": dims[1:] if batched else dims,
                    }
                )
        return auto_complete_model_config

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
        version_folder = Path(args["model_repository"]) / args["model_version"]
        on_gpu = args["model_instance_kind"] == "GPU"
        self.session = ort.InferenceSession(
            str(_model_file(config, version_folder)),
            _session_options(config, parameters),
            providers=_providers(config, on_gpu, int(args["model_instance_device_id"])),
        )
        self.batched = config["max_batch_size"] > 0
        self.inputs = [i.name for i in self.session.get_inputs()]
        # ORT cannot bind strings, and an output that nobody asks for need not be computed
        self.bindable = all(i.type != "tensor(string)" for i in self.session.get_inputs())
        configured = [o["name"] for o in config["output"]]
        self.outputs = configured or [o.name for o in self.session.get_outputs()]

    def execute(self, requests: list[Any]) -> list[Any]:
        """One ORT run for all requests; their tensors are concatenated once, and sliced without a copy."""
        try:
            feeds, sizes = self._feeds(requests)
            results = self._run(feeds)
        except Exception as error:
            failure = pb_utils.TritonError(f"onnxruntime: {error}")
            return [pb_utils.InferenceResponse(error=failure) for _ in requests]
        responses = []
        start = 0
        for request, size in zip(requests, sizes, strict=True):
            wanted = set(request.requested_output_names())
            responses.append(
                pb_utils.InferenceResponse(
                    [
                        pb_utils.Tensor(name, result[start : start + size] if self.batched else result)
                        for name, result in zip(self.outputs, results, strict=True)
                        if name in wanted
                    ]
                )
            )
            start += size
        return responses

    def _feeds(self, requests: list[Any]) -> tuple[dict[str, np.ndarray], list[int]]:
        parts: dict[str, list[np.ndarray]] = {}
        for name in self.inputs:
            tensors = [pb_utils.get_input_tensor_by_name(request, name) for request in requests]
            if any(tensor is None for tensor in tensors):
                raise ValueError(f"input '{name}' is missing")
            # a view of the shared memory that Triton filled, not a copy
            parts[name] = [tensor.as_numpy() for tensor in tensors]
        sizes = [len(array) if self.batched else 1 for array in parts[self.inputs[0]]]
        return {
            name: arrays[0] if len(arrays) == 1 else np.concatenate(arrays) for name, arrays in parts.items()
        }, sizes

    def _run(self, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        if not self.bindable:
            texts = {k: v.astype(str) if v.dtype == np.object_ else v for k, v in feeds.items()}
            return list(self.session.run(self.outputs, texts))
        binding = self.session.io_binding()
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        for name in self.outputs:
            binding.bind_output(name)
        self.session.run_with_iobinding(binding)
        return list(binding.copy_outputs_to_cpu())


def _model_file(config: dict[str, Any], version_folder: Path) -> Path:
    name = config.get("default_model_filename") or "model.onnx"
    if not version_folder.joinpath(name).exists():  # auto-complete runs before a version is chosen
        versions = sorted(
            (p for p in version_folder.glob(f"[0-9]*/{name}")), key=lambda p: int(p.parent.name), reverse=True
        )
        if versions:
            return versions[0]
    path = version_folder / name
    return path / "model.onnx" if path.is_dir() else path


def _session_options(config: dict[str, Any], parameters: dict[str, str]) -> ort.SessionOptions:
    options = ort.SessionOptions()
    level = int(config.get("optimization", {}).get("graph", {}).get("level", 0))
    options.graph_optimization_level = GRAPH_LEVELS.get(level, GRAPH_LEVELS[0])
    options.intra_op_num_threads = int(parameters.get("intra_op_thread_count", 0))
    options.inter_op_num_threads = int(parameters.get("inter_op_thread_count", 0))
    if int(parameters.get("execution_mode", 0)):
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    options.enable_cpu_mem_arena = _is_true(parameters.get("enable_mem_arena", "1"))
    options.enable_mem_pattern = _is_true(parameters.get("enable_mem_pattern", "1"))
    for key, value in parameters.items():
        if key.startswith("session."):
            options.add_session_config_entry(key, value)
    return options


def _providers(config: dict[str, Any], on_gpu: bool, device: int) -> list[Any]:
    """CPU, or CUDA (with TensorRT first where the configuration asks for it) on the instance's GPU."""
    if not on_gpu:
        return ["CPUExecutionProvider"]
    available = ort.get_available_providers()
    if "CUDAExecutionProvider" not in available:
        raise pb_utils.TritonModelException(
            "KIND_GPU needs onnxruntime-gpu; this environment's ONNX Runtime has " + ", ".join(available)
        )
    accelerators = config.get("optimization", {}).get("execution_accelerators", {})
    wanted = {a["name"].lower() for a in accelerators.get("gpu_execution_accelerator", [])}
    providers: list[Any] = [("CUDAExecutionProvider", {"device_id": str(device)}), "CPUExecutionProvider"]
    if "tensorrt" in wanted:
        providers.insert(0, ("TensorrtExecutionProvider", {"device_id": str(device)}))
    return providers


def _is_true(text: str) -> bool:
    return text.strip().lower() in {"1", "true", "on", "yes"}
