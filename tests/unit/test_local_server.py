"""The tritonserver of the user's own: which one, whether it can run here, what it knows."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer import server_health
from optimizer.deploy import local
from optimizer.deploy.installation import Installation
from optimizer.deploy.local import LocalTarget
from optimizer.deploy.server import is_too_old
from optimizer.errors import BadInputError, EnvironmentFault
from optimizer.model_source import ModelSource

HELP = """\
Usage: tritonserver [options]
  --help
\tPrint usage

Model Repository:
  --model-repository <string>
\tPath to --this-is-no-option. It may be specified
  --model-control-mode <string>
  --rate-limit <string>
"""


def program(folder: Path, says: str = HELP, code: int = 1) -> Path:
    """A script that prints ``says`` and ends so, as tritonserver does when asked for help."""
    path = folder / "tritonserver"
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{says}END\nexit {code}\n")
    path.chmod(0o755)
    return path


def test_what_is_known_is_what_its_help_lists(tmp_path: Path) -> None:
    found = local.find(str(program(tmp_path)), arguments=("--rate-limit=off",))
    assert found.options == frozenset({"help", "model-repository", "model-control-mode", "rate-limit"})
    assert found.knows("--rate-limit=off")
    assert not found.knows("--http-restricted-api=x")
    assert found.backends == Path("/opt/tritonserver/backends")
    with pytest.raises(
        BadInputError, match=r"--server-arg --other=1: no option of .*/tritonserver; `tritonserver --help`"
    ):
        local.find(str(program(tmp_path)), arguments=("--other=1",))


def test_the_one_on_path_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(
        EnvironmentFault, match="--target local: no tritonserver on PATH; name it with --tritonserver"
    ):
        local.find()
    with pytest.raises(BadInputError, match="--tritonserver tritonserver: no such program on PATH"):
        local.find("tritonserver")
    path = program(tmp_path)
    assert local.find().tritonserver == local.find("tritonserver").tritonserver == path


def test_backends_beside_it_are_its_own(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "backends").mkdir()
    (tmp_path / "others").mkdir()
    path = str(program(tmp_path / "bin"))
    assert local.find(path).backends == tmp_path / "backends"
    assert local.find(path, str(tmp_path / "others")).backends == tmp_path / "others"
    with pytest.raises(BadInputError, match="--backend-directory /nowhere: no such folder"):
        local.find(path, "/nowhere")


def test_what_is_no_tritonserver_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=f"--tritonserver {tmp_path}/no: no such file"):
        local.find(f"{tmp_path}/no")
    path = program(tmp_path)
    path.chmod(0o644)
    with pytest.raises(BadInputError, match=r"not executable; chmod \+x it"):
        local.find(str(path))
    said = "error while loading shared libraries: libdcgm.so.3: cannot open shared object file\n"
    with pytest.raises(
        EnvironmentFault, match=r"--help ended \(exit code 127\): .*libdcgm.so.3.*; name a tritonserver"
    ):
        local.find(str(program(tmp_path, said, 127)))


def test_one_for_another_machine_is_told(tmp_path: Path) -> None:
    path = tmp_path / "tritonserver"
    path.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HH", 2, 183) + bytes(44))
    path.chmod(0o755)
    with pytest.raises(EnvironmentFault, match=r"made for ARM \(aarch64\), and this is x86-64; name one for it"):
        local.find(str(path))


def test_a_backend_that_it_lacks_is_told_with_the_folder(tmp_path: Path) -> None:
    (tmp_path / "backends" / "python").mkdir(parents=True)
    (tmp_path / "models" / "m").mkdir(parents=True)
    own = Installation(tmp_path / "tritonserver", {}, tmp_path / "backends")
    config = ModelConfig(name="m", platform="tensorrt_plan")
    source = ModelSource(tmp_path / "models", "m", config)
    with pytest.raises(
        EnvironmentFault, match=f"m: backend 'tensorrt' is not in {tmp_path}/backends, which has python"
    ):
        LocalTarget(source, own, log=tmp_path / "log")
    (tmp_path / "models" / "m" / "1").mkdir()
    (tmp_path / "models" / "m" / "1" / "libtriton_tensorrt.so").touch()  # a model may bring its own
    LocalTarget(source, own, log=tmp_path / "log").close()


@pytest.mark.parametrize(
    ("version", "old"), [("2.29.0", True), ("1.15.0", True), ("2.30.0", False), ("2.51.0", False), ("", False)]
)
def test_versions(version: str, old: bool) -> None:
    assert is_too_old(version) is old


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"/t/tritonserver: unrecognized option '--foo=1'\n{HELP}\tDefault is 0.\n\n", "unrecognized option"),
        (f"{HELP}\tResults in error.\n\nInvalid option value. Got abc\n\n", "Invalid option value. Got abc"),
        ("I1 first] fine\nE1 a.cc:7] no such thing\nI2 a] bye\n", "no such thing"),
    ],
)
def test_last_words_of_a_server_that_does_not_start(tmp_path: Path, text: str, told: str) -> None:
    log = tmp_path / "log"
    log.write_text(text)
    assert told in server_health.last_words(log)
