"""The execution providers of ONNX Runtime for a model instance, read from its configuration as Triton's backend does.

``gpu_execution_accelerator`` names ``tensorrt`` or ``cuda``, with parameters; those of CUDA may also be parameters of
the model. ``cpu_execution_accelerator`` names ``openvino``, whose parameters Triton's own backend ignores. This
module does not import onnxruntime, so that it can be tested without it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

Provider: TypeAlias = tuple[str, dict[str, str]]

CPU, CUDA, TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"
OPENVINO = "OpenVINOExecutionProvider"
OPENVINO_OPTIONS = (
    "num_of_threads",
    "num_streams",
    "precision",
    "load_config",
    "cache_dir",
    "disable_dynamic_shapes",
)
PRECISIONS = {"FP32": None, "FP16": "trt_fp16_enable", "BF16": "trt_bf16_enable", "INT8": "trt_int8_enable"}
RENAMED = {  # options of TensorRT that have another name in Triton
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
TRUE, FALSE = {"1", "true", "on", "yes"}, {"0", "false", "off", "no"}
SWITCHES = {  # options of TensorRT for which ONNX Runtime accepts only True and False
    "trt_int8_use_native_calibration_table",
    "trt_dla_enable",
    "trt_engine_cache_enable",
    "trt_dump_subgraphs",
    "trt_force_sequential_engine_build",
    "trt_context_memory_sharing_enable",
    "trt_layer_norm_fp32_fallback",
    "trt_timing_cache_enable",
    "trt_force_timing_cache",
    "trt_detailed_build_log",
    "trt_build_heuristics_enable",
    "trt_sparsity_enable",
    "trt_cuda_graph_enable",
    "trt_dump_ep_context_model",
}
CUDA_PARAMETERS = {  # options of CUDA among the model's parameters: ONNX Runtime's names of their numeric values
    "cudnn_conv_algo_search": {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"},
    "arena_extend_strategy": {"0": "kNextPowerOfTwo", "1": "kSameAsRequested"},
    "gpu_mem_limit": {},
    "do_copy_in_default_stream": {},
}


def providers(
    config: Mapping[str, Any],
    parameters: Mapping[str, str],
    device: int | None,
    available: Collection[str],
    threads: int = 0,
) -> list[Provider]:
    """Return the providers in order of precedence, each with its options, for GPU ``device`` or the CPU (None).

    ``threads`` are those of one operator; 0 leaves their number to the provider. Raises ValueError for an accelerator
    that is unknown or not available.
    """
    on_cpu = _accelerators(config, "cpu")
    if unknown := on_cpu.keys() - {"openvino"}:
        raise ValueError(f"execution accelerator {min(unknown)!r} is not known on a CPU; write openvino")
    if device is None:
        return [*_openvino(on_cpu, threads, available), (CPU, {})]
    if on_cpu:
        raise ValueError("execution accelerator openvino: it computes on a CPU; write kind: KIND_CPU")
    if CUDA not in available:
        raise ValueError(
            f"KIND_GPU needs onnxruntime-gpu; this environment's ONNX Runtime has {', '.join(available)}"
        )
    accelerators = _accelerators(config, "gpu")
    if unknown := accelerators.keys() - {"tensorrt", "cuda"}:
        raise ValueError(f"execution accelerator {min(unknown)!r} is not known on a GPU; write tensorrt or cuda")
    on = {"device_id": str(device)}
    chain: list[Provider] = [(CUDA, on | _cuda_parameters(parameters) | accelerators.get("cuda", {})), (CPU, {})]
    if "tensorrt" not in accelerators:
        return chain
    if TENSORRT not in available:
        raise ValueError(f"execution accelerator tensorrt: this ONNX Runtime has {', '.join(available)} only")
    return [(TENSORRT, on | _tensorrt(accelerators["tensorrt"])), *chain]


def load_cuda_libraries(onnxruntime: Any, device: int | None) -> None:
    """Load CUDA and cuDNN from NVIDIA's Python packages for a model on GPU ``device``; no effect for the CPU (None).

    The packages are not on the loader's search path. Without them ONNX Runtime uses the libraries that are. Versions
    before 1.21 lack the function.
    """
    if device is not None and (preload := getattr(onnxruntime, "preload_dlls", None)) is not None:
        preload(msvc=False)


def needs_openvino(config: Mapping[str, Any]) -> bool:
    """Return whether the configuration names the accelerator ``openvino``."""
    return "openvino" in _accelerators(config, "cpu")


def _accelerators(config: Mapping[str, Any], device: str) -> dict[str, dict[str, str]]:
    accelerators = config.get("optimization", {}).get("execution_accelerators", {})
    named = accelerators.get(f"{device}_execution_accelerator", [])
    return {accelerator["name"].lower(): accelerator.get("parameters", {}) for accelerator in named}


def _openvino(accelerators: Mapping[str, dict[str, str]], threads: int, available: Collection[str]) -> list[Provider]:
    if "openvino" not in accelerators:
        return []
    parameters = accelerators["openvino"]
    if unknown := parameters.keys() - set(OPENVINO_OPTIONS):
        allowed = ", ".join(OPENVINO_OPTIONS)
        raise ValueError(f"{min(unknown)!r} is not a parameter of the accelerator openvino; it has {allowed}")
    if OPENVINO not in available:
        raise ValueError(f"execution accelerator openvino: this ONNX Runtime has {', '.join(available)} only")
    thread_parameters = {"num_of_threads": str(threads)} if threads else {}
    return [(OPENVINO, {"device_type": "CPU"} | thread_parameters | parameters)]


def _cuda_parameters(parameters: Mapping[str, str]) -> dict[str, str]:
    return {
        key: names.get(parameters[key], parameters[key])
        for key, names in CUDA_PARAMETERS.items()
        if key in parameters
    }


def _tensorrt(parameters: Mapping[str, str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for key, value in parameters.items():
        if key == "precision_mode":
            if value not in PRECISIONS:
                raise ValueError(f"precision_mode {value!r} of tensorrt is not one of {', '.join(PRECISIONS)}")
            if option := PRECISIONS[value]:
                options[option] = "True"
            continue
        option = RENAMED.get(key, key)
        if not option.startswith("trt_"):
            raise ValueError(f"{key!r} is not a parameter of the accelerator tensorrt")
        options[option] = _switch(key, value) if option in SWITCHES else value
    return options


def _switch(key: str, value: str) -> str:
    if value.lower() not in TRUE | FALSE:
        raise ValueError(f"{key} of tensorrt is {value!r}; write true or false")
    return str(value.lower() in TRUE)
