"""A Python-based Triton backend that serves ONNX models with ONNX Runtime.

Triton runs this file inside its Python stub for every model whose ``backend`` is ``onnxruntime`` (or whose
``platform`` is ``onnxruntime_onnx``), one process an instance. It understands the parameters of Triton's
native ONNX Runtime backend, so that a repository written for that one loads unmodified.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from providers import OPENVINO, load_cuda_libraries, needs_openvino, providers

sys.path.insert(0, str(Path(__file__).parent))

# The stub was built for numpy 1 and misreads the arrays of numpy 2 (every item has size 0). With numpy 2, tensors
# are therefore passed by DLPack, which has no strings and does not work with numpy 1.
NUMPY_1 = np.__version__.startswith("1.")
OPENVINO_FOLDER = Path(__file__).parent / "openvino"  # the build of ONNX Runtime with OpenVINO, if it is installed
GRAPH_LEVELS = {-1: "ORT_ENABLE_BASIC", 0: "ORT_ENABLE_ALL", 1: "ORT_ENABLE_EXTENDED", 2: "ORT_DISABLE_ALL"}


class TritonPythonModel:
    """One instance of a model, in a process of its own, with the interface of Triton's Python backend."""

    def initialize(self, args: dict[str, str]) -> None:
        """Create the ONNX Runtime session. Raises TritonModelException if the configuration does not work."""
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
        version_folder = Path(args["model_repository"]) / args["model_version"]
        device = int(args["model_instance_device_id"]) if args["model_instance_kind"] == "GPU" else None
        ort = _load_onnxruntime(config)
        load_cuda_libraries(ort, device)
        options = _session_options(ort, config, parameters)
        try:
            chain = providers(config, parameters, device, ort.get_available_providers(), options.intra_op_num_threads)
        except ValueError as error:
            raise pb_utils.TritonModelException(f"onnxruntime: {error}") from error
        self.session = ort.InferenceSession(str(_model_file(config, version_folder)), options, providers=chain)
        if chain[0][0] not in self.session.get_providers():  # ONNX Runtime drops a provider that it cannot start
            of_gpu = "some of its libraries (CUDA, cuDNN, TensorRT) are missing"
            reason = f"it refuses {chain[0][1]}" if chain[0][0] == OPENVINO else of_gpu
            raise pb_utils.TritonModelException(f"onnxruntime: {chain[0][0]} did not start: {reason}")
        self.batched = config["max_batch_size"] > 0
        self.inputs = [i.name for i in self.session.get_inputs()]
        self.outputs = [o["name"] for o in config["output"]]  # other outputs of the graph are not computed
        outputs = [o for o in self.session.get_outputs() if o.name in self.outputs]
        tensors = [*self.session.get_inputs(), *outputs]
        self.texts = {t.name for t in tensors if t.type == "tensor(string)"}
        if any(t.type == "tensor(bfloat16)" for t in tensors):
            raise pb_utils.TritonModelException(
                "TYPE_BF16 tensors need Triton's own onnxruntime backend: tune on a server that has it "
                "(--target docker or local), or export the model with inputs and outputs in FP32"
            )
        if self.texts and not NUMPY_1:
            raise pb_utils.TritonModelException(
                "TYPE_STRING tensors need numpy 1 in the server: run tune under Python 3.11 or 3.12"
            )

    def execute(self, requests: list[Any]) -> list[Any]:
        """Run the model once for all requests: inputs are concatenated once, outputs are sliced without a copy."""
        try:
            feeds, sizes = self._feeds(requests)
            results = self._run(feeds)
        except Exception as error:
            text = f"onnxruntime: {error}"  # responses that share a TritonError lose its text
            return [pb_utils.InferenceResponse(error=pb_utils.TritonError(text)) for _ in requests]
        responses = []
        start = 0
        for request, size in zip(requests, sizes, strict=True):
            requested = set(request.requested_output_names())
            responses.append(
                pb_utils.InferenceResponse(
                    [
                        self._tensor(name, result[start : start + size] if self.batched else result)
                        for name, result in zip(self.outputs, results, strict=True)
                        if name in requested
                    ]
                )
            )
            start += size
        return responses

    def _feeds(self, requests: list[Any]) -> tuple[dict[str, np.ndarray], list[int]]:
        """Return each input, concatenated over the requests, and the number of samples of each request."""
        parts: dict[str, list[np.ndarray]] = {}
        for name in self.inputs:
            tensors = [pb_utils.get_input_tensor_by_name(request, name) for request in requests]
            if any(tensor is None for tensor in tensors):
                raise ValueError(f"input '{name}' is missing")
            parts[name] = [self._array(name, tensor) for tensor in tensors]
        sizes = [len(array) if self.batched else 1 for array in parts[self.inputs[0]]]
        feeds = {name: arrays[0] if len(arrays) == 1 else np.concatenate(arrays) for name, arrays in parts.items()}
        return feeds, sizes

    def _run(self, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        if self.texts:  # ONNX Runtime cannot bind strings
            return list(self.session.run(self.outputs, feeds))
        binding = self.session.io_binding()
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        for name in self.outputs:
            binding.bind_output(name)
        self.session.run_with_iobinding(binding)
        return list(binding.copy_outputs_to_cpu())

    def _array(self, name: str, tensor: Any) -> np.ndarray:
        if not NUMPY_1:
            return np.asarray(np.from_dlpack(tensor))
        array: np.ndarray = tensor.as_numpy()
        if name not in self.texts:
            return array
        return np.array([item.decode() for item in array.flat], np.object_).reshape(array.shape)

    def _tensor(self, name: str, array: np.ndarray) -> Any:
        if not NUMPY_1:
            return pb_utils.Tensor.from_dlpack(name, np.ascontiguousarray(array))
        return pb_utils.Tensor(name, array.astype(np.object_) if name in self.texts else array)


def _load_onnxruntime(config: dict[str, Any]) -> ModuleType:
    """Return the ONNX Runtime of this environment, or the build with OpenVINO if the configuration names that."""
    if needs_openvino(config):
        if not OPENVINO_FOLDER.is_dir():
            raise pb_utils.TritonModelException("onnxruntime: openvino is not installed; tune setup --openvino")
        sys.path.insert(0, str(OPENVINO_FOLDER))
    try:
        return importlib.import_module("onnxruntime")
    except (ImportError, OSError) as error:
        raise pb_utils.TritonModelException(f"onnxruntime: it does not load: {error}") from error


def _model_file(config: dict[str, Any], version_folder: Path) -> Path:
    name = config.get("default_model_filename") or "model.onnx"
    if name != Path(name).name:
        raise pb_utils.TritonModelException(f"default_model_filename {name!r} is not the name of a file")
    path = version_folder / name
    return path / "model.onnx" if path.is_dir() else path


def _session_options(ort: ModuleType, config: dict[str, Any], parameters: dict[str, str]) -> Any:
    options = ort.SessionOptions()
    level = int(config.get("optimization", {}).get("graph", {}).get("level", 0))
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, GRAPH_LEVELS.get(level, GRAPH_LEVELS[0]))
    options.intra_op_num_threads = _whole(parameters, "intra_op_thread_count") or _default_threads()
    options.inter_op_num_threads = _whole(parameters, "inter_op_thread_count") or _default_threads()
    if _whole(parameters, "execution_mode"):
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    options.enable_cpu_mem_arena = _is_true(parameters.get("enable_mem_arena", "1"))
    options.enable_mem_pattern = _is_true(parameters.get("enable_mem_pattern", "1"))
    for key, value in parameters.items():
        if key.startswith("session."):
            options.add_session_config_entry(key, value)
    return options


def _default_threads() -> int:
    """Return 0 (ONNX Runtime's default, a thread per core), or the number of CPUs if this process may use only some.

    By default the threads are pinned to all cores, including those that this process may not use.
    """
    cpus = len(os.sched_getaffinity(0))
    return cpus if cpus < (os.cpu_count() or cpus) else 0


def _whole(parameters: dict[str, str], key: str) -> int:
    text = parameters.get(key, "0")
    if not text.strip().isdecimal():
        raise pb_utils.TritonModelException(f"parameter {key} is {text!r}; write a whole number of 0 or more")
    return int(text)


def _is_true(text: str) -> bool:
    return text.strip().lower() in {"1", "true", "on", "yes"}
