"""Settings of containers, the model repository inside a container, and messages for errors of the engine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from optimizer.config.model_source import ModelSource
from optimizer.core.errors import BadInputError, EnvironmentFault
from optimizer.deploy.docker_container import (
    Bind,
    ContainerSettings,
    Ulimit,
    read_environment,
    read_gpus,
    read_mount,
    read_shm_size,
    read_ulimits,
)
from optimizer.deploy.docker_engine import connect, explain_error
from optimizer.deploy.docker_target import MountedCopy, read_settings
from optimizer.options.run_options import RunOptions
from tests.nvml_fixtures import A100, StandIn, nvml, nvml_library
from tests.repositories import doubler, serialized, stored, write_model

__all__ = ["nvml", "nvml_library"]

CONFIG = 'platform: "onnxruntime_onnx"\nmax_batch_size: 8\n'


# -- from text --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ids"), [("none", ()), ("all", ("all",)), ("0,2", ("0", "2")), ("GPU-8f-1a", ("GPU-8f-1a",))]
)
def test_gpus_are_none_all_or_ids(text: str, ids: tuple[str, ...]) -> None:
    assert read_gpus(text) == ids


@pytest.mark.parametrize("text", ["", ",", "0,0", "all,0", "0;1", "none,1", "--x", "0, ,1"])
def test_invalid_gpus_are_refused(text: str) -> None:
    with pytest.raises(BadInputError, match=r"^--docker-gpus .*: write "):
        read_gpus(text)


VISIBLE = """
import json
from optimizer.deploy.visible_gpus import visible_gpus
from optimizer.options.run_options import RunOptions
print(json.dumps([gpu.index for gpu in visible_gpus(RunOptions("m", target="docker", docker_gpus="3,1")).local]))
"""


def test_the_order_of_the_gpus_has_no_effect_in_a_container(nvml: StandIn) -> None:
    nvml.set_answers(A100, A100, A100, A100)
    assert nvml.run(VISIBLE) == [1, 3]


def test_a_mount_is_a_host_folder_and_a_container_folder(tmp_path: Path) -> None:
    assert read_mount(f"{tmp_path}:/data") == Bind(tmp_path, "/data", read_only=False)
    assert read_mount(f"{tmp_path}:/data/x:ro") == Bind(tmp_path, "/data/x", read_only=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "write FOLDER"),
        ("{0}", "write FOLDER"),
        ("{0}:/data:rx", "write FOLDER"),
        ("{0}:/da\nta", "write FOLDER"),
        ("{0}:data", "an absolute path"),
        ("{0}:/", "an absolute path"),
        ("{0}:/a/../models", "an absolute path"),
        ("{0}:/models/mine", "the model repository is there"),
        ("{0}/nowhere:/data", "there is no"),
    ],
)
def test_invalid_mounts_are_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=message) as caught:
        read_mount(text.format(tmp_path), reserved=["/models"])
    assert "\n" not in str(caught.value)


def test_the_last_limit_of_a_name_counts() -> None:
    assert read_ulimits(["memlock=-1", "stack=5", "memlock=64:128"]) == (
        Ulimit("memlock", 64, 128),
        Ulimit("stack", 5, 5),
    )


@pytest.mark.parametrize("text", ["", "memlock", "memlock=", "memlock=x", "memlock=-2", "MEM=1", "nofile=1:2:3"])
def test_invalid_limits_are_refused(text: str) -> None:
    with pytest.raises(BadInputError, match=r"^--docker-ulimit .*: write NAME=LIMIT"):
        read_ulimits([text])


def test_a_variable_has_a_value_or_that_of_tune(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    texts = ["LD_PRELOAD=/plugins/a.so:/plugins/b.so", "HF_TOKEN", "EMPTY=", "MODE=a=b", "EMPTY=x"]
    variables = read_environment(texts)
    assert variables == {
        "LD_PRELOAD": "/plugins/a.so:/plugins/b.so",
        "HF_TOKEN": None,
        "EMPTY": "x",
        "MODE": "a=b",
    }
    settings = ContainerSettings(environment=variables)
    shown = settings.flags()
    assert "--env=HF_TOKEN" in shown
    assert "--env=MODE=a=b" in shown
    assert not any("secret" in flag for flag in shown), "commands.log does not have the value"
    pytest.importorskip("docker")
    assert settings.arguments()["environment"] == {**variables, "HF_TOKEN": "secret"}


def test_the_container_has_the_variables_of_the_user_and_the_order_of_the_gpus() -> None:
    options = RunOptions("m", docker_image="i", docker_gpus="all", docker_env=("A=1",))
    assert {"--env=CUDA_DEVICE_ORDER=PCI_BUS_ID", "--env=A=1"} <= set(read_settings(options).flags())
    chosen = replace(options, docker_env=("CUDA_DEVICE_ORDER=FASTEST_FIRST",))
    assert [flag for flag in read_settings(chosen).flags() if "ORDER" in flag] == [
        "--env=CUDA_DEVICE_ORDER=FASTEST_FIRST"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'': write NAME=VALUE"),
        ("=x", "'': write NAME=VALUE"),
        ("1A=x", "'1A': write NAME=VALUE"),
        ("A B=x", "'A B': write NAME=VALUE"),
        ("A=secret\n", "'A': write NAME=VALUE in printable characters"),
        ("TRITUNE_TEST_UNSET", "'TRITUNE_TEST_UNSET': TRITUNE_TEST_UNSET is not set in the environment; export it"),
        ("CUDA_VISIBLE_DEVICES=1", "'CUDA_VISIBLE_DEVICES': give the GPUs of the container with --docker-gpus"),
        ("NVIDIA_VISIBLE_DEVICES", "'NVIDIA_VISIBLE_DEVICES': give the GPUs of the container with --docker-gpus"),
    ],
)
def test_invalid_variables_are_refused_without_their_value(text: str, message: str) -> None:
    with pytest.raises(BadInputError, match=rf"^--docker-env {message}") as caught:
        read_environment([text])
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "0", "1gb", "-1", "1.5g", "x"])
def test_invalid_sizes_of_shared_memory_are_refused(text: str) -> None:
    assert read_shm_size("512m") == "512m"
    with pytest.raises(BadInputError, match=r"^--docker-shm-size .*: write bytes"):
        read_shm_size(text)


def test_the_settings_for_the_engine_are_shown_as_a_command(tmp_path: Path) -> None:
    settings = ContainerSettings(
        binds=(Bind(tmp_path, "/models"),),
        ports=(8001,),
        gpus=("0", "1"),
        shm_size="1g",
        ulimits=(Ulimit("stack", 5, 6),),
        cpus=frozenset({0, 1, 2, 5}),
    )
    assert settings.flags() == [
        f"--volume={tmp_path}:/models:ro",
        "--publish=127.0.0.1::8001",
        '--gpus="device=0,1"',
        "--env=CUDA_DEVICE_ORDER=PCI_BUS_ID",
        "--ulimit=stack=5:6",
        "--shm-size=1g",
        "--cpuset-cpus=0-2,5",
    ]
    pytest.importorskip("docker")
    arguments = settings.arguments()
    assert arguments["ports"] == {"8001/tcp": ("127.0.0.1", None)}
    assert arguments["device_requests"][0]["DeviceIDs"] == ["0", "1"]
    assert arguments["environment"] == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert arguments["mounts"][0]["ReadOnly"] is True
    assert "user" not in arguments


def test_shared_memory_is_that_of_this_machine() -> None:
    settings = read_settings(RunOptions("m", target="docker", docker_image="i", shared_memory="system"))
    assert "--ipc=host" in settings.flags()
    assert not any(flag.startswith("--shm-size") for flag in settings.flags()), "the two exclude each other"
    pytest.importorskip("docker")
    assert settings.arguments()["ipc_mode"] == "host"
    assert "--ipc=host" not in read_settings(RunOptions("m", target="docker", docker_image="i")).flags()


# -- the repository ---------------------------------------------------------------------------------------------


@pytest.fixture
def linked_model(tmp_path: Path) -> ModelSource:
    """Return a model whose weights and labels are an absolute and a relative link."""
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "large.onnx").write_bytes(serialized(doubler()))
    (weights / "labels.txt").write_text("a\n")
    folder = write_model(tmp_path / "models", "doubler", CONFIG, doubler())
    version = folder / "1"
    (version / "model.onnx").rename(version / "first.onnx")
    (version / "model.onnx").symlink_to(weights / "large.onnx")
    (version / "again.onnx").symlink_to("first.onnx")
    (version / "gone.onnx").symlink_to(weights / "gone.onnx")
    (folder / "labels.txt").symlink_to("../../weights/labels.txt")
    return stored(tmp_path / "models")("doubler")


@pytest.fixture
def mounted_copy(linked_model: ModelSource) -> Iterator[MountedCopy]:
    repository = MountedCopy(linked_model)
    yield repository
    repository.remove()


def file_in_container(path: str, binds: tuple[Bind, ...]) -> Path:
    """Return the file of this machine that a container sees at ``path``, with links followed inside."""
    for _ in range(10):
        bind = max((bind for bind in binds if Path(path).is_relative_to(bind.at)), key=lambda bind: len(bind.at))
        file = bind.source / Path(path).relative_to(bind.at)
        if not file.is_symlink():
            return file
        path = os.path.normpath(Path(path).parent / file.readlink())
    raise AssertionError(path)


@pytest.mark.parametrize("file", ["1/model.onnx", "1/first.onnx", "1/again.onnx"])
def test_link_targets_of_the_repository_are_mounted(file: str, mounted_copy: MountedCopy) -> None:
    assert file_in_container(f"/models/doubler/{file}", mounted_copy.binds).read_bytes() == serialized(doubler())


def test_files_next_to_the_versions_are_mounted(mounted_copy: MountedCopy) -> None:
    assert file_in_container("/models/doubler/labels.txt", mounted_copy.binds).read_text() == "a\n"


def test_what_is_next_to_the_models_is_mounted_but_no_other_model(tmp_path: Path) -> None:
    models = tmp_path / "models"
    for name in ("a", "b"):
        write_model(models, name, CONFIG, doubler())
    for folder in ("common", "c/1", ".git"):
        models.joinpath(folder).mkdir(parents=True)
    (models / "common" / "words.txt").write_text("a\n")
    (models / "README.md").write_text("b\n")
    with contextlib.ExitStack() as undo:
        repository = MountedCopy(stored(models)("a"))
        undo.callback(repository.remove)
        assert file_in_container("/models/common/words.txt", repository.binds).read_text() == "a\n"
        mounted = {bind.at.removeprefix("/models/") for bind in repository.binds[1:]}
        assert mounted == {"a/1", "common", "README.md"}


def test_what_is_next_to_the_models_may_be_of_other_programs_and_vanish(tmp_path: Path) -> None:
    """Targets of links in a virtual environment would replace programs of the container."""
    models = tmp_path / "models"
    folder = write_model(models, "a", CONFIG, doubler())
    for name in ("venv", "weights"):
        models.joinpath(name).mkdir()
    (models / "venv" / "python").symlink_to(sys.executable)
    (models / "gone").symlink_to("nowhere")
    (models / "draft.txt").write_text("")
    blob = tmp_path / "blob"
    (folder / "1" / "model.onnx").rename(blob)
    (models / "weights" / "a.onnx").symlink_to(blob)
    (folder / "1" / "model.onnx").symlink_to("../../weights/a.onnx")
    with contextlib.ExitStack() as undo:
        repository = MountedCopy(stored(models)("a"))
        undo.callback(repository.remove)
        assert file_in_container("/models/a/1/model.onnx", repository.binds).read_bytes() == serialized(doubler())
        settings = ContainerSettings(binds=repository.binds[1:])
        expected = ["/models/a/1", "/models/draft.txt", "/models/venv", "/models/weights", str(blob)]
        assert sorted(bind.at for bind in settings.binds) == sorted(expected)
        (models / "draft.txt").unlink()
        mounted = [flag.split(":")[1] for flag in settings.flags()]
        assert sorted(mounted) == sorted(set(expected) - {"/models/draft.txt"})


def test_link_targets_in_models_that_are_not_served_are_mounted(tmp_path: Path) -> None:
    """The version folder of ``b`` is a link into a cache whose files are links, as in the Hugging Face cache."""
    write_model(tmp_path / "models", "a", CONFIG, doubler())
    cache = tmp_path / "cache"
    (cache / "blobs").mkdir(parents=True)
    (cache / "blobs" / "0a1b").write_bytes(serialized(doubler()))
    snapshot = cache / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "model.onnx").symlink_to("../../blobs/0a1b")
    folder = write_model(tmp_path / "models", "b", CONFIG, doubler())
    (folder / "1" / "model.onnx").unlink()
    (folder / "1" / "model.onnx").symlink_to("../../a/1/model.onnx")
    (folder / "2").symlink_to(snapshot)
    (folder / "gone.txt").symlink_to("nowhere.txt")
    repository = MountedCopy(stored(tmp_path / "models")("b"))
    with contextlib.ExitStack() as undo:
        undo.callback(repository.remove)
        for version in ("1", "2"):
            file = file_in_container(f"/models/b/{version}/model.onnx", repository.binds)
            assert file.read_bytes() == serialized(doubler())
        assert all(bind.source.exists() for bind in repository.binds)
        for bind in repository.binds[1:]:
            place = repository.repository / Path(bind.at).relative_to("/models")
            assert place.is_dir() == bind.source.is_dir()


def test_the_configuration_is_a_private_one_and_nothing_can_be_written(
    mounted_copy: MountedCopy, linked_model: ModelSource
) -> None:
    config = file_in_container("/models/doubler/config.pbtxt", mounted_copy.binds)
    assert config.is_relative_to(mounted_copy.path)
    assert all(bind.read_only for bind in mounted_copy.binds)
    for bind in mounted_copy.binds[1:]:
        if Path(bind.at).is_relative_to("/models"):  # a mount point must exist and be of the same kind
            place = mounted_copy.repository / Path(bind.at).relative_to("/models")
            assert place.is_dir() == bind.source.is_dir()
            assert place.exists()
    assert len({bind.at for bind in mounted_copy.binds}) == len(mounted_copy.binds)


# -- errors of the engine ---------------------------------------------------------------------------------------


@pytest.fixture
def _sdk() -> None:
    pytest.importorskip("docker")


@pytest.mark.usefixtures("_sdk")
@pytest.mark.parametrize(
    ("refusal", "advice"),
    [
        ("No such image: nvcr.io/nvidia/tritonserver:25.01-py3", "docker pull img:1"),
        ("img:1: image not known", "docker pull img:1"),
        ('could not select device driver "" with capabilities: [[gpu]]', "NVIDIA Container Toolkit"),
        (
            "failed to create shim task: OCI runtime create failed: runc create failed: unable to start container "
            "process: error running prestart hook #0: exit status 1, stderr: nvidia-container-cli: device error: 9: "
            "unknown device: unknown",
            "gives the container no GPU",
        ),
        ('exec: "tritonserver": executable file not found in $PATH: unknown', "the image img:1 has no such command"),
        (
            "driver failed programming connectivity: Bind for 127.0.0.1:1: port is already allocated",
            "a port",
        ),
        ("write /var/lib/docker/tmp/x: no space left on device", "docker system df"),
        ("UnixHTTPConnectionPool(host='localhost', port=None): Read timed out. (read timeout=60)", "does not answer"),
        ("('Connection aborted.', PermissionError(13, 'Permission denied'))", "usermod -aG docker"),
        ("('Connection aborted.', RemoteDisconnected('closed'))", "does not run"),
        ("something\nelse", "^Docker refuses: something else; its log may have details"),
        (
            "Error while fetching server API version: 404 Client Error for http://h:1/version: Not Found",
            r"^no Docker answers at unix:///var/run/docker\.sock \(.*404.*\); set DOCKER_HOST",
        ),
        (
            "Invalid bind address format: port is required: x",
            "^DOCKER_HOST .*: not an address; write one such",
        ),
    ],
)
def test_a_refusal_is_one_line_with_advice(refusal: str, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    message = explain_error(refusal, "img:1")
    assert "\n" not in message
    assert re.search(advice, message)


@pytest.mark.usefixtures("_sdk")
def test_the_engine_of_the_docker_context_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"currentContext": "rootless"}))
    metadata = tmp_path / "contexts" / "meta" / hashlib.sha256(b"rootless").hexdigest() / "meta.json"
    metadata.parent.mkdir(parents=True)
    endpoints = {"docker": {"Host": f"unix://{tmp_path}/none.sock", "SkipTLSVerify": False}}
    metadata.write_text(json.dumps({"Name": "rootless", "Metadata": {}, "Endpoints": endpoints}))
    with pytest.raises(EnvironmentFault, match=rf"^Docker does not run at unix://{tmp_path}/none.sock; start it"):
        connect()


@pytest.mark.usefixtures("_sdk")
def test_a_missing_engine_is_reported(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=rf"^Docker does not run at unix://{tmp_path}/nothing.sock; start it"):
        connect(f"unix://{tmp_path}/nothing.sock")


@pytest.mark.usefixtures("_sdk")
def test_an_engine_that_has_ended_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "left.sock"
    with socket.socket(socket.AF_UNIX) as ended_engine:
        ended_engine.bind(str(path))
    with pytest.raises(EnvironmentFault, match=rf"^Docker does not run at unix://{path}; start it"):
        connect(f"unix://{path}")


def test_a_missing_docker_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "docker", None)
    with pytest.raises(EnvironmentFault, match="needs the docker SDK for Python; pip install 'tritune\\[docker\\]'"):
        connect()
