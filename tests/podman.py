"""A container engine for tests: Podman's service with Docker's API, on a temporary socket."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest

from optimizer.core.files import cache_folder
from optimizer.core.locks import file_lock
from optimizer.core.process import SupervisedProcess
from optimizer.core.process_owner import this_process
from optimizer.deploy.docker_engine import OWNER
from tests.command_fixtures import eventually
from tests.programs import write_program
from tests.repositories import skip_without_python_models
from tests.server_image import ensure_image

if TYPE_CHECKING:
    from docker import DockerClient

LIMITED_RUNC = Path(__file__).with_name("limited_runc.py")
CONFIGURATION = """\
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "limited"
[engine.runtimes]
limited = ["{runtime}"]
"""
START_SECONDS = 120.0


@dataclass(frozen=True)
class Engine:
    """The address of the engine, and the image of a server in it."""

    base_url: str
    image: str


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    docker = pytest.importorskip("docker", reason="needs the docker SDK for Python: pip install 'tritune[docker]'")
    skip_without_python_models()
    if os.getuid() != 0 or shutil.which("podman") is None or shutil.which("runc") is None:
        pytest.skip("needs root, Podman and runc: apt-get install podman runc")
    with TemporaryDirectory(prefix="podman-") as name, contextlib.ExitStack() as undo:
        folder = Path(name)
        limited = write_program(folder / "limited_runc", f"#!{sys.executable} -IS\n{LIMITED_RUNC.read_text()}")
        configuration = folder / "containers.conf"
        configuration.write_text(CONFIGURATION.format(runtime=limited))
        store = cache_folder() / "podman"  # keeps the image
        command: list[str | Path] = ["podman", "--root", store / "root", "--runroot", store / "run"]
        command += ["--storage-driver", "overlay", "system", "service", "--time", "0", f"unix://{folder}/podman.sock"]
        # Podman's network starts iptables, which may be outside the PATH of the tests.
        path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
        environment = {**os.environ, "CONTAINERS_CONF": str(configuration), "PATH": path}
        service = undo.enter_context(SupervisedProcess(command, log=folder / "podman.log", env=environment))
        assert eventually(lambda: (folder / "podman.sock").exists() or service.exit_code() is not None, START_SECONDS)
        if service.exit_code() is not None:
            pytest.skip(f"Podman does not run here: {(folder / 'podman.log').read_text()}")
        base_url = f"unix://{folder}/podman.sock"
        client = undo.enter_context(contextlib.closing(docker.DockerClient(base_url=base_url)))
        with file_lock(store / "image.lock", print):
            image = ensure_image(client, folder)
        yield Engine(base_url, image)


def containers_of(client: DockerClient, owner: str | None = None) -> list[str]:
    """Return the names of the containers that the process ``owner`` has started, by default this one.

    Other processes of pytest may have containers at the same time.
    """
    label = f"{OWNER}={owner or this_process()}"
    return [container.name for container in client.containers.list(all=True, filters={"label": label})]
