"""The pinned packages next to the server, and why they cannot be installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from optimizer.core.errors import EnvironmentFault
from optimizer.deploy import runtime
from optimizer.model.repository import PYTHON_BACKEND_VERSIONS


def test_models_in_python_are_accepted_where_the_stub_has_its_numpy() -> None:
    assert set(PYTHON_BACKEND_VERSIONS) == set(runtime.NUMPY_WHEELS)


def test_openvino_needs_a_python_with_a_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "running_python", lambda: "3.10")
    with pytest.raises(EnvironmentFault, match=r"openvino needs Python 3\.11, 3\.12, 3\.13, this is 3\.10: leave"):
        runtime.ensure_openvino(print)


def test_openvino_that_cannot_be_downloaded_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITUNE_CACHE", str(tmp_path))
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EnvironmentFault) as caught:
        runtime.ensure_openvino(lambda _: None)
    assert str(caught.value).startswith("pip could not fetch openvino: ")
    assert "onnxruntime-openvino==1.24.1" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
