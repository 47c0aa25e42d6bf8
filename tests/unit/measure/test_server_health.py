"""Test the interpretation of a server's messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from optimizer.measure import server_health

NO_SHARED_MEMORY = (
    "load failed for model 'faulty': version 1 is at UNAVAILABLE state: Internal: Unable to initialize shared memory "
    "key 'triton_python_backend_shm_region_1' to requested size (1048576 bytes). Error: Cannot allocate memory;"
)
NO_STUB = "Stub process 'faulty_0_0' is not healthy."
NO_ARRAY = "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8.00 GiB for an array\n\nAt:\n  model.py(3)"


@pytest.mark.parametrize(
    ("message", "lacks_memory", "model_died"),
    [
        (NO_SHARED_MEMORY, True, False),
        ("std::bad_alloc", True, False),
        (NO_STUB, False, True),
        (NO_ARRAY, False, False),
    ],
)
def test_lack_of_memory_and_dead_models_are_recognised(message: str, lacks_memory: bool, model_died: bool) -> None:
    assert server_health.lacks_memory(message) is lacks_memory
    assert server_health.model_died(message) is model_died


@pytest.mark.parametrize(
    ("message", "lacks"),
    [
        ("pytorch: CUDA out of memory. Tried to allocate 8.39 GiB. GPU 0 has a total capacity of 79.11 GiB", True),
        ("pytorch: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", True),
        ("CUDA failure 2: out of memory ; GPU=0 ; hostname=a", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 939524096", True),
        ("pytorch: CUDA error: device-side assert triggered", False),
        (NO_ARRAY, False),
    ],
)
def test_lack_of_gpu_memory_is_recognised(message: str, lacks: bool) -> None:
    assert server_health.lacks_gpu_memory(message) is lacks


def test_the_last_output_is_that_of_a_models_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines = ["| model | 1 |", "+---+", 'I1122 21:49:17.258071 444 model_lifecycle.cc:472] "loading: m:1"']
    log.write_text("\n".join(lines))
    assert server_health.last_output(log) == ""
    log.write_text("\n".join([*lines, "bash: line 1: stub: No such file", *lines, ""]))
    assert server_health.last_output(log) == "bash: line 1: stub: No such file"


def test_a_message_is_one_line_without_a_traceback() -> None:
    assert server_health.without_traceback(NO_ARRAY).endswith("Unable to allocate 8.00 GiB for an array")
