"""What a server's messages mean."""

from __future__ import annotations

import pytest

from optimizer import server_health

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
def test_the_end_of_a_server_of_a_model_and_of_neither(message: str, lacks_memory: bool, model_died: bool) -> None:
    assert server_health.lacks_memory(message) is lacks_memory
    assert server_health.model_died(message) is model_died


def test_a_cause_is_one_line_without_frames() -> None:
    assert server_health.cause(NO_ARRAY).endswith("Unable to allocate 8.00 GiB for an array")
