"""Test the interpretation of a server's messages."""

from __future__ import annotations

import pytest

from optimizer.measure import server_messages

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
    assert server_messages.lacks_memory(message) is lacks_memory
    assert server_messages.model_died(message) is model_died


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
    assert server_messages.lacks_gpu_memory(message) is lacks


def test_a_message_is_one_line_without_a_traceback() -> None:
    assert server_messages.without_traceback(NO_ARRAY).endswith("Unable to allocate 8.00 GiB for an array")
