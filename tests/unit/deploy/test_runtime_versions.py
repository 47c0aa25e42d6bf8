"""The pinned packages next to the server, why they cannot be installed, and which perf_analyzer measures where."""

from __future__ import annotations

import contextlib
import hashlib
import platform
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from optimizer.cli import doctor
from optimizer.core.errors import EnvironmentFault
from optimizer.core.locks import file_lock
from optimizer.deploy import perf_analyzer_release, runtime
from optimizer.deploy.embedded_target import server_environment
from optimizer.deploy.perf_analyzer_release import (
    NEWER_VERSION,
    OLDER_VERSION,
    glibc_problem,
    measuring_version,
    newer_perf_analyzer,
    newer_problem,
    start_problem,
)
from optimizer.deploy.runtime import PINNED_PERF_ANALYZER, Runtime
from optimizer.deploy.wheels import LOCK, Wheel, install_missing
from optimizer.model.repository import PYTHON_BACKEND_VERSIONS
from tests.programs import unpack_empty_runtime, write_program

LIBPYTHON = f"libpython{runtime.running_python()}.so.1.0"


@pytest.fixture
def unpacked_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """Return an unpacked runtime without libpython."""
    monkeypatch.setenv("TRITUNE_CACHE", str(tmp_path))
    return unpack_empty_runtime(tmp_path)


@pytest.fixture
def newer_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the newer perf_analyzer on a system whose C library is new enough."""
    monkeypatch.setenv("TRITUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.41"))
    start_problem.cache_clear()
    wheel = perf_analyzer_release.NEWER_WHEEL
    return tmp_path / f"perf_analyzer-{NEWER_VERSION}-{wheel.sha256[:12]}" / wheel.members[0]


def test_models_in_python_are_accepted_where_the_stub_has_its_numpy() -> None:
    assert set(PYTHON_BACKEND_VERSIONS) == set(runtime.NUMPY_WHEELS)


def test_openvino_needs_a_python_with_a_wheel() -> None:
    with pytest.raises(EnvironmentFault, match=r"openvino needs Python 3\.11, 3\.12, 3\.13, this is 3\.10: leave"):
        runtime.ensure_openvino(print, "3.10")
    assert doctor.check_onnxruntime("3.10").detail.endswith(": none for Python 3.10")


@pytest.fixture
def _without_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pip find no other packages than the wheels in ``tmp_path``."""
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("_without_index")
@pytest.mark.skipif(runtime.running_python() not in runtime.NUMPY_WHEELS, reason="the stub needs no other numpy")
def test_numpy_that_cannot_be_downloaded_is_named(unpacked_runtime: Runtime) -> None:
    assert unpacked_runtime.stub_packages is not None
    (unpacked_runtime.stub_packages / "numpy/__init__.py").unlink()
    with pytest.raises(EnvironmentFault, match=r"^pip could not fetch numpy for the server's Python backend: "):
        runtime.ensure(lambda _: None)


@pytest.mark.usefixtures("_without_index")
def test_the_newer_release_is_not_added_to_a_server_that_another_process_unpacked(
    unpacked_runtime: Runtime, newer_program: Path
) -> None:
    missing = unpacked_runtime.stub_packages or unpacked_runtime.root
    unpacked = missing.rename(missing.with_name("unpacked"))
    messages = list[str]()
    with contextlib.ExitStack() as other_process:
        other_process.enter_context(file_lock(newer_program.parents[3] / LOCK, lambda _: None))

        def unpack(line: str) -> None:
            messages.append(line)
            unpacked.rename(missing)
            other_process.close()

        assert runtime.ensure(lambda line: messages.append(line) if messages else unpack(line)) == unpacked_runtime
    assert not any("perf_analyzer" in line for line in messages)
    assert newer_problem() == "it is not unpacked"


@pytest.mark.usefixtures("_without_index")
def test_a_folder_of_the_cache_without_its_program_is_unpacked_again(
    tmp_path: Path, unpacked_runtime: Runtime
) -> None:
    """A cleaner of old files may have removed it. A wheel on the disk stands in for the one on PyPI."""
    member = "perf_analyzer/bin/perf_analyzer"
    file = tmp_path / "perf_analyzer-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(member, "#!/bin/sh\n")
        archive.writestr(
            "perf_analyzer-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: perf-analyzer\nVersion: 1.0\n"
        )
        archive.writestr("perf_analyzer-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("perf_analyzer-1.0.dist-info/RECORD", "")
    wheel = Wheel("perf-analyzer==1.0", hashlib.sha256(file.read_bytes()).hexdigest(), (member,))
    folder = tmp_path / "perf_analyzer-1.0"
    program = folder / member
    program.parent.mkdir(parents=True)
    (folder / "left").touch()

    def install() -> bool:
        return install_missing(
            (wheel,), folder, lambda _: None, print, needed=(program,), content="it", message="fetching it"
        )

    assert install()
    assert program.is_file()
    assert not (folder / "left").exists()
    assert not install()
    assert runtime.installed() == unpacked_runtime
    unpacked_runtime.pinned_perf_analyzer.unlink()
    assert runtime.installed() is None


def test_a_python_without_pip_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "venv", symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv/bin/python"))
    monkeypatch.setenv("TRITUNE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(EnvironmentFault, match="venv/bin/python has no pip; install it"):
        perf_analyzer_release.ensure_older(lambda _: None)


def test_a_killed_pip_is_not_taken_for_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output is empty in both cases. The kernel kills it if the memory is exhausted."""
    (tmp_path / "pip.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TRITUNE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(EnvironmentFault) as caught:
        perf_analyzer_release.ensure_older(lambda _: None)
    assert str(caught.value) == "pip could not fetch perf_analyzer 2.36.0: it ended with SIGKILL; try again"


@pytest.mark.usefixtures("_without_index")
def test_openvino_that_cannot_be_downloaded_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITUNE_CACHE", str(tmp_path))
    with pytest.raises(EnvironmentFault) as caught:
        runtime.ensure_openvino(lambda _: None)
    assert str(caught.value).startswith("pip could not fetch openvino: ")
    assert "onnxruntime-openvino==1.24.1" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


@pytest.mark.skipif(runtime.running_python() == runtime.PYTHON_STUBS[-1], reason="the wheel has this libpython")
def test_without_any_libpython_the_server_has_no_environment(unpacked_runtime: Runtime) -> None:
    with pytest.raises(EnvironmentFault, match=LIBPYTHON):
        server_environment(unpacked_runtime, [])


@pytest.mark.parametrize(("builtin", "is_included"), [((), True), (("math",), False)])
def test_the_libpython_of_the_wheel_needs_modules_in_files(
    builtin: tuple[str, ...], is_included: bool, unpacked_runtime: Runtime
) -> None:
    folder = runtime.libpython_folder(unpacked_runtime, [], runtime.PYTHON_STUBS[-1], builtin)
    assert folder == (unpacked_runtime.libraries if is_included else None)


def test_a_packed_libpython_is_used_with_its_own_standard_library(unpacked_runtime: Runtime) -> None:
    library = unpacked_runtime.stub_python / "lib" / LIBPYTHON
    library.parent.mkdir(parents=True)
    library.touch()
    environment = server_environment(unpacked_runtime, [])
    assert environment["PYTHONHOME"] == str(unpacked_runtime.stub_python)
    assert str(library.parent) in environment["LD_LIBRARY_PATH"].split(":")


@pytest.fixture
def own_libpython(tmp_path: Path) -> Path:
    """Return a folder of the machine that has libpython."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / LIBPYTHON).touch()
    return folder


def test_a_libpython_of_the_machine_is_preferred(
    unpacked_runtime: Runtime, own_libpython: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = unpacked_runtime.stub_python / "lib"
    packed.mkdir(parents=True)
    (packed / LIBPYTHON).touch()
    monkeypatch.delenv("PYTHONHOME", raising=False)
    environment = server_environment(unpacked_runtime, [own_libpython])
    assert "PYTHONHOME" not in environment
    assert str(own_libpython) in environment["LD_LIBRARY_PATH"].split(":")


def test_the_server_finds_cuda_where_only_the_loader_path_names_it(
    unpacked_runtime: Runtime, own_libpython: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {"other": "libz.so.1", "driver": "libcuda.so.1", "toolkit": "libcublas.so.13"}
    for name, library in folders.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / library).touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", ":".join(str(tmp_path / name) for name in (*folders, "missing")))
    expected = f"{unpacked_runtime.libraries}:{own_libpython}:{tmp_path / 'driver'}:{tmp_path / 'toolkit'}"
    assert server_environment(unpacked_runtime, [own_libpython])["LD_LIBRARY_PATH"] == expected


def test_a_python_model_finds_the_packages_of_the_user(
    unpacked_runtime: Runtime, own_libpython: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/opt/helpers::lib")
    assert server_environment(unpacked_runtime, [own_libpython])["PYTHONPATH"].split(":")[-2:] == [
        "/opt/helpers",
        str(tmp_path / "lib"),
    ]


@pytest.mark.parametrize("version", ["2.38", "2.41", "3.0"])
def test_the_newer_release_needs_a_newer_c_library(version: str) -> None:
    assert glibc_problem(("glibc", version)) == ""


@pytest.mark.parametrize(
    ("libc", "name"),
    [(("glibc", "2.36"), "glibc 2.36"), (("glibc", "2.9"), "glibc 2.9"), (("", ""), "another C library")],
)
def test_the_reason_names_the_c_library(libc: tuple[str, str], name: str) -> None:
    assert glibc_problem(libc) == f"it needs glibc 2.38, this is {name}"


def test_the_reason_names_what_a_program_lacks_to_start(tmp_path: Path) -> None:
    assert start_problem(write_program(tmp_path / "good", "#!/bin/sh\nexit 0\n")) == ""
    lacking = "error while loading shared libraries: libssl.so.3: cannot open shared object file"
    bad = write_program(tmp_path / "bad", f'#!/bin/sh\necho "$0: {lacking}" >&2; exit 127\n')
    assert start_problem(bad) == f"it does not start: {lacking}"
    assert start_problem(write_program(tmp_path / "mute", "#!/bin/sh\nexit 3\n")) == "it does not start: exit code 3"
    assert "No such file" in start_problem(tmp_path / "none")


def test_the_newer_release_measures_where_it_is_unpacked(tmp_path: Path, newer_program: Path) -> None:
    runtime = Runtime(tmp_path / "runtime")
    assert newer_problem() == "it is not unpacked"
    assert (runtime.perf_analyzer, runtime.perf_analyzer_version) == (
        runtime.pinned_perf_analyzer,
        PINNED_PERF_ANALYZER,
    )
    write_program(newer_program, "#!/bin/sh\nexit 0\n")
    assert newer_problem() == ""
    assert newer_perf_analyzer() == newer_program
    assert (runtime.perf_analyzer, runtime.perf_analyzer_version) == (newer_program, NEWER_VERSION)


def test_the_pinned_release_measures_where_the_newer_one_does_not_start(tmp_path: Path, newer_program: Path) -> None:
    write_program(newer_program, "#!/bin/sh\nexit 127\n")
    assert Runtime(tmp_path / "runtime").perf_analyzer_version == PINNED_PERF_ANALYZER


@pytest.mark.parametrize(
    ("server", "version"),
    [("2.33.0", OLDER_VERSION), ("2.34.0", NEWER_VERSION), ("2.51.0", NEWER_VERSION), ("", NEWER_VERSION)],
)
def test_an_older_server_is_measured_by_an_older_release(server: str, version: str) -> None:
    assert measuring_version(NEWER_VERSION, server) == version
