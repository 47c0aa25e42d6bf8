"""Tests of the content of a cache folder and of its removal. The user's cache is not used."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer.core.errors import EnvironmentFault
from optimizer.core.locks import file_lock
from optimizer.deploy.cache import REMOVABLE, check_unused, find_removable, read_cache, remove_cached
from optimizer.deploy.runtime import Runtime
from optimizer.deploy.wheels import DRAFT, LOCK
from optimizer.model.onnx_file import read_bare_onnx
from optimizer.model.requests import RequestBatching, RequestOptions, prepare_requests
from tests.repositories import doubler, serialized

CONFIG = 'name: "m" max_batch_size: 8 input { name: "x" data_type: TYPE_INT64 dims: -1 }'
PROGRAM_WITH_A_SERVER = """\
import sys
from optimizer.deploy.server_process import new_folder

print(new_folder(), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder for temporary files, in which no other test has a server."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Return a cache folder with a file of each kind; each file is larger by a byte than that of the kind before."""
    folder = tmp_path / "cache"
    runtime = Runtime(folder / "runtime-2.51.0-abc")
    places = [
        runtime.root,
        runtime.stub_packages or folder / "numpy-1",
        folder / "openvino-1.24.1-abc",
        folder / "models" / "mlp-1-cpu-8",
        folder / "bare" / "1",
        folder / "requests",
        folder / "compiled" / "1",
        folder / "remote",
        folder / "my files",
    ]
    for size, place in enumerate(places, 1):
        place.mkdir(parents=True)
        (place / "file").write_bytes(bytes(size))
    return folder


def sizes(folder: Path) -> dict[str, int]:
    return {files.kind.name: files.size_bytes for files in read_cache(folder)}


def test_each_kind_is_shown_with_its_size(cache: Path) -> None:
    kinds = ["server", "numpy", "openvino", "models", "onnx", "requests", "simulator", "remote", "other"]
    assert sizes(cache) == {kind: size for size, kind in enumerate(kinds, 1)}
    for name in ("perf_analyzer-2.36.0-abc", f"{DRAFT}runtime-2.51.0-abc"):
        (cache / name).mkdir()
        (cache / name / "file").write_bytes(bytes(10))
    assert sizes(cache)["server"] == 21


def test_an_empty_cache_has_the_kinds_that_can_be_removed(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert {kind: size for kind, size in sizes(folder).items() if kind != "other"} == dict.fromkeys(REMOVABLE, 0)
        assert find_removable(folder, REMOVABLE) == []


def test_what_tune_stores_is_of_a_known_kind(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    config = text_format.Parse(CONFIG, ModelConfig())
    prepare_requests(RequestOptions("random", ("x:4..7",)), config, RequestBatching(), cache)
    (tmp_path / "model.onnx").write_bytes(serialized(doubler()))
    read_bare_onnx(tmp_path / "model.onnx", gpu=False, largest_batch=8, cache=cache)
    sizes_by_kind = sizes(cache)
    assert sizes_by_kind["requests"] > 0
    assert sizes_by_kind["onnx"] > 0
    assert "other" not in sizes_by_kind


def test_the_chosen_kinds_are_removed_and_nothing_else(cache: Path) -> None:
    removable = find_removable(cache, ("models", "requests", "remote", "other"))
    assert [files.kind.name for files in removable] == ["models", "requests"]
    remove_cached(cache, removable)
    assert {path.name for path in cache.iterdir()} == {
        *("runtime-2.51.0-abc", "openvino-1.24.1-abc", "bare", "compiled", "remote", "my files"),
        *(path.name for path in cache.glob("numpy-*")),
    }
    remove_cached(cache, find_removable(cache, REMOVABLE))
    assert {path.name for path in cache.iterdir()} == {"remote", "my files"}


def test_a_link_is_removed_but_not_what_it_leads_to(cache: Path, tmp_path: Path) -> None:
    (cache / "models").rename(tmp_path / "large disk")
    (cache / "models").symlink_to(tmp_path / "large disk")
    remove_cached(cache, find_removable(cache, ("models",)))
    assert not (cache / "models").is_symlink()
    assert (tmp_path / "large disk" / "mlp-1-cpu-8" / "file").exists()


@pytest.mark.parametrize("lock", [LOCK, "models/.mlp-1.lock", "requests/.lock", "remote/triton_8001.lock"])
def test_a_cache_in_use_is_not_removed(lock: str, cache: Path) -> None:
    removable = find_removable(cache, REMOVABLE)
    before = sorted(cache.rglob("*"))
    with file_lock(cache / lock, pytest.fail), pytest.raises(EnvironmentFault) as caught:
        remove_cached(cache, removable)
    assert " uses the cache; wait until it ends, or stop it" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(cache.rglob("*")) == before


def test_a_cache_is_in_use_while_another_process_has_a_server(cache: Path, temporary_folder: Path) -> None:
    command = [sys.executable, "-c", PROGRAM_WITH_A_SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert Path(process.stdout.readline().strip()).parent == temporary_folder
            with pytest.raises(EnvironmentFault, match=f"^process {process.pid} uses the cache; wait until it ends"):
                check_unused(cache)
        finally:
            process.kill()
    check_unused(cache)
