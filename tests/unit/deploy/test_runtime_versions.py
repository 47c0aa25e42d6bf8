from __future__ import annotations

from optimizer.deploy import runtime
from optimizer.model.repository import PYTHON_BACKEND_VERSIONS


def test_models_in_python_are_accepted_where_the_stub_has_its_numpy() -> None:
    assert set(PYTHON_BACKEND_VERSIONS) == set(runtime.NUMPY_WHEELS)
