"""The pinned packages next to the server, and why they cannot be installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from optimizer.cli import doctor
from optimizer.core.errors import EnvironmentFault
from optimizer.deploy import runtime
from optimizer.deploy.embedded_target import server_environment
from optimizer.deploy.runtime import Runtime
from optimizer.model.repository import PYTHON_BACKEND_VERSIONS

LIBPYTHON = f"libpython{runtime.running_python()}.so.1.0"


@pytest.fixture
def unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """The folders of an unpacked runtime, on a machine without libpython."""
    monkeypatch.setenv("TRITUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(runtime, "_library_folders", list)
    root = tmp_path / f"runtime-{runtime.TRITON_VERSION}-{runtime.WHEELS[0].sha256[:12]}"
    root.mkdir()
    one = Runtime(root)
    if one.stub_packages is not None:
        one.stub_packages.mkdir()
    return one


def test_models_in_python_are_accepted_where_the_stub_has_its_numpy() -> None:
    assert set(PYTHON_BACKEND_VERSIONS) == set(runtime.NUMPY_WHEELS)


def test_openvino_needs_a_python_with_a_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "running_python", lambda: "3.10")
    with pytest.raises(EnvironmentFault, match=r"openvino needs Python 3\.11, 3\.12, 3\.13, this is 3\.10: leave"):
        runtime.ensure_openvino(print)
    assert doctor.check_onnxruntime().detail.endswith(": none for Python 3.10")


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


@pytest.mark.skipif(runtime.running_python() == runtime.PYTHON_STUBS[-1], reason="the wheel has this libpython")
def test_without_any_libpython_the_server_has_no_environment(unpacked: Runtime) -> None:
    with pytest.raises(EnvironmentFault, match=LIBPYTHON):
        server_environment(unpacked)


@pytest.mark.parametrize(("builtin", "is_included"), [((), True), (("math",), False)])
def test_the_libpython_of_the_wheel_needs_modules_in_files(
    builtin: tuple[str, ...], is_included: bool, unpacked: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "running_python", lambda: runtime.PYTHON_STUBS[-1])
    monkeypatch.setattr(sys, "builtin_module_names", builtin)
    assert runtime.libpython_folder() == (unpacked.libraries if is_included else None)


def test_a_packed_libpython_is_used_with_its_own_standard_library(unpacked: Runtime) -> None:
    library = unpacked.stub_python / "lib" / LIBPYTHON
    library.parent.mkdir(parents=True)
    library.touch()
    environment = server_environment(unpacked)
    assert environment["PYTHONHOME"] == str(unpacked.stub_python)
    assert str(library.parent) in environment["LD_LIBRARY_PATH"].split(":")


def test_a_libpython_of_the_machine_is_preferred(
    unpacked: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (unpacked.stub_python / "lib", tmp_path / "own"):
        folder.mkdir(parents=True)
        (folder / LIBPYTHON).touch()
    monkeypatch.setattr(runtime, "_library_folders", lambda: [str(tmp_path / "own")])
    monkeypatch.delenv("PYTHONHOME", raising=False)
    assert "PYTHONHOME" not in server_environment(unpacked)


def test_the_server_finds_cuda_where_only_the_loader_path_names_it(
    unpacked: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "libpython_folder", lambda: tmp_path / "own")
    folders = {"other": "libz.so.1", "driver": "libcuda.so.1", "toolkit": "libcublas.so.13"}
    for name, library in folders.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / library).touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", ":".join(str(tmp_path / name) for name in (*folders, "missing")))
    expected = f"{unpacked.libraries}:{tmp_path / 'own'}:{tmp_path / 'driver'}:{tmp_path / 'toolkit'}"
    assert server_environment(unpacked)["LD_LIBRARY_PATH"] == expected
