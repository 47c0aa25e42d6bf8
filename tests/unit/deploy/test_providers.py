"""Execution providers of ONNX Runtime for configurations of Triton's onnxruntime backend."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest

from optimizer.deploy.backends.onnxruntime.providers import (
    CPU,
    CUDA,
    OPENVINO,
    TENSORRT,
    load_cuda_libraries,
    needs_openvino,
    providers,
)

ALL_PROVIDERS = [TENSORRT, CUDA, CPU]


def accelerated(*accelerators: dict[str, Any]) -> dict[str, Any]:
    return {"optimization": {"execution_accelerators": {"gpu_execution_accelerator": list(accelerators)}}}


def on_cpu(name: str, **parameters: str) -> dict[str, Any]:
    accelerator = {"name": name, "parameters": parameters}
    return {"optimization": {"execution_accelerators": {"cpu_execution_accelerator": [accelerator]}}}


def test_without_a_gpu_only_the_provider_of_the_cpu_is_used() -> None:
    assert providers(accelerated({"name": "tensorrt"}), {}, None, [CPU]) == [(CPU, {})]


def test_openvino_gets_the_threads_of_the_model_unless_it_has_its_own() -> None:
    for threads, parameters, options in (
        (0, {}, {}),
        (2, {}, {"num_of_threads": "2"}),
        (2, {"num_of_threads": "1", "num_streams": "3"}, {"num_of_threads": "1", "num_streams": "3"}),
    ):
        chain = providers(on_cpu("openvino", **parameters), {}, None, [OPENVINO, CPU], threads)
        assert chain == [(OPENVINO, {"device_type": "CPU", **options}), (CPU, {})]
    assert needs_openvino(on_cpu("OpenVINO"))
    assert not needs_openvino(accelerated({"name": "tensorrt"}))


@pytest.mark.parametrize(
    ("config", "device", "available", "problem"),
    [
        (on_cpu("tensorrt"), None, [CPU], "'tensorrt' is not known on a CPU; write openvino"),
        (on_cpu("openvino"), None, [CPU], "openvino: this ONNX Runtime has CPUExecutionProvider only"),
        (on_cpu("openvino", threads="1"), None, [OPENVINO, CPU], "'threads' is not a parameter .* num_of_threads"),
        (on_cpu("openvino"), 0, ALL_PROVIDERS, "it computes on a CPU; write kind: KIND_CPU"),
    ],
)
def test_an_accelerator_that_a_cpu_does_not_have_is_reported(
    config: dict[str, Any], device: int | None, available: list[str], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        providers(config, {}, device, available)


def test_cuda_is_first_and_the_cpu_takes_the_rest() -> None:
    assert providers({}, {}, 1, ALL_PROVIDERS) == [(CUDA, {"device_id": "1"}), (CPU, {})]


def test_options_of_cuda_come_from_the_parameters_and_from_the_accelerator() -> None:
    parameters = {"cudnn_conv_algo_search": "1", "arena_extend_strategy": "1", "gpu_mem_limit": "99", "other": "x"}
    accelerator = {"name": "cuda", "parameters": {"gpu_mem_limit": "77", "enable_cuda_graph": "1"}}
    (_, options), _ = providers(accelerated(accelerator), parameters, 0, ALL_PROVIDERS)
    assert options == {
        "device_id": "0",
        "cudnn_conv_algo_search": "HEURISTIC",
        "arena_extend_strategy": "kSameAsRequested",
        "gpu_mem_limit": "77",
        "enable_cuda_graph": "1",
    }


def test_options_of_tensorrt_are_those_of_the_accelerator() -> None:
    accelerator = {
        "name": "tensorrt",
        "parameters": {
            "precision_mode": "FP16",
            "max_workspace_size_bytes": "1073741824",
            "trt_engine_cache_enable": "1",
            "trt_min_subgraph_size": "1",
        },
    }
    chain = providers(accelerated(accelerator), {}, 2, ALL_PROVIDERS)
    assert [name for name, _ in chain] == ALL_PROVIDERS
    assert chain[0][1] == {
        "device_id": "2",
        "trt_fp16_enable": "True",
        "trt_max_workspace_size": "1073741824",
        "trt_engine_cache_enable": "True",
        "trt_min_subgraph_size": "1",
    }
    default_chain = providers(
        accelerated({"name": "tensorrt", "parameters": {"precision_mode": "FP32"}}), {}, 2, ALL_PROVIDERS
    )
    assert default_chain[0] == (TENSORRT, {"device_id": "2"})


@pytest.mark.parametrize(
    ("accelerator", "available", "problem"),
    [
        ({"name": "cuda"}, [CPU], r"KIND_GPU needs onnxruntime-gpu; .* has CPUExecutionProvider"),
        ({"name": "tensorrt"}, [CUDA, CPU], "tensorrt: this ONNX Runtime has CUDAExecutionProvider"),
        ({"name": "gpu_io"}, ALL_PROVIDERS, "'gpu_io' is not known"),
        ({"name": "tensorrt", "parameters": {"precision_mode": "FP8"}}, ALL_PROVIDERS, "precision_mode 'FP8'"),
        ({"name": "tensorrt", "parameters": {"workspace": "1"}}, ALL_PROVIDERS, "'workspace' is not a parameter"),
        (
            {"name": "tensorrt", "parameters": {"trt_dla_enable": "2"}},
            ALL_PROVIDERS,
            "trt_dla_enable of tensorrt is '2'",
        ),
    ],
)
def test_an_unavailable_provider_is_reported(accelerator: dict[str, Any], available: list[str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        providers(accelerated(accelerator), {}, 0, available)


def test_the_libraries_of_cuda_are_loaded_for_a_gpu() -> None:
    calls: list[dict[str, bool]] = []
    newer_module = SimpleNamespace(preload_dlls=lambda **options: calls.append(options))
    for module, device in ((newer_module, None), (SimpleNamespace(), 0), (newer_module, 1)):
        load_cuda_libraries(module, device)
    assert calls == [{"msvc": False}]


def test_onnxruntime_has_the_function_that_loads_the_libraries_of_cuda() -> None:
    """The build of the tests is that for CPUs, which loads nothing."""
    load_cuda_libraries(onnxruntime, 0)
    assert callable(onnxruntime.preload_dlls)
