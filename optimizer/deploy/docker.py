"""The docker target: a tritonserver in a container of an image, NVIDIA's or one like it, on this machine."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from optimizer.deploy import leftovers
from optimizer.deploy.container import Container
from optimizer.deploy.container_settings import (
    SHM_SIZE,
    ULIMITS,
    ContainerSettings,
    read_gpus,
    read_mount,
    read_shm_size,
    read_ulimits,
)
from optimizer.deploy.docker_engine import connect, remove_left_containers
from optimizer.deploy.mounted_repository import AT, MountedRepository
from optimizer.deploy.server import Server
from optimizer.deploy.started import StartedTarget, server_options
from optimizer.interfaces import Endpoint, Samples, Telemetry
from optimizer.model_source import ModelSource
from optimizer.server_health import LOG_BYTES
from optimizer.stopwatch import Stopwatch
from optimizer.untrusted import read_tail

if TYPE_CHECKING:
    from docker import DockerClient

HTTP_PORT, GRPC_PORT = 8000, 8001  # Triton's own


class DockerTarget(StartedTarget):
    """``gpus`` are ``none``, ``all`` or ids; ``mounts``, ``shm_size`` and ``ulimits`` as ``docker run`` takes them,
    the latter two beside what NVIDIA advises; ``options`` are further ones of tritonserver's command line.
    ``base_url`` is the engine's address where it is not the usual one.

    Raises BadInputError for what is not understood of these, EnvironmentFault where there is no Docker.
    """

    def __init__(
        self,
        source: ModelSource,
        *,
        image: str,
        log: Path,
        stopwatch: Stopwatch | None = None,
        gpus: str = "none",
        mounts: Sequence[str] = (),
        shm_size: str = "",
        ulimits: Sequence[str] = (),
        options: Sequence[str] = (),
        base_url: str | None = None,
        cpus: frozenset[int] | None = None,
        load_timeout_seconds: float = 120.0,
    ) -> None:
        given = ContainerSettings(
            binds=tuple(read_mount(text, taken=[AT]) for text in mounts),
            ports=(HTTP_PORT, GRPC_PORT),
            gpus=read_gpus(gpus),
            shm_size=read_shm_size(shm_size or SHM_SIZE),
            ulimits=read_ulimits([*ULIMITS, *ulimits]),
        )
        with contextlib.ExitStack() as undo:
            client = undo.enter_context(contextlib.closing(connect(base_url)))
            remove_left_containers(client)
            leftovers.remove_leftovers()
            folder = MountedRepository(source)
            undo.callback(folder.remove)
            given = replace(given, binds=folder.binds + given.binds)
            options = [*server_options(source), *options]
            server = ContainerServer(client, image, folder.path.name, given, log=log, options=options, cpus=cpus)
            super().__init__(source, server, folder, stopwatch=stopwatch, load_timeout_seconds=load_timeout_seconds)
            self._open = undo.pop_all()

    def close(self) -> None:
        """Raises EnvironmentFault where the container cannot be removed: the next run does."""
        with self._open:
            super().close()

    def memory_bytes(self) -> float | None:
        """Of the running container, as its engine counts it; None where it does not."""
        running = self._server.running
        return running.memory_bytes() if isinstance(running, Container) else None


class ContainerTelemetry:
    """What ``usual`` records; the server's memory as the engine counts it where ``usual`` cannot see its process."""

    def __init__(self, usual: Telemetry, target: DockerTarget) -> None:
        self._usual = usual
        self._target = target

    @contextlib.contextmanager
    def record(self, endpoint: Endpoint) -> Iterator[Samples]:
        with self._usual.record(endpoint) as samples:
            yield samples
        if samples.server_memory_bytes is None:
            samples.server_memory_bytes = self._target.memory_bytes()


class ContainerServer(Server):
    """tritonserver in a fresh container of ``image`` with each start; its ports are published on loopback alone."""

    def __init__(
        self,
        client: DockerClient,
        image: str,
        name: str,
        settings: ContainerSettings,
        *,
        log: Path,
        options: Sequence[str] = (),
        cpus: frozenset[int] | None = None,
    ) -> None:
        super().__init__(name, log=log, cpus=cpus)
        self._client = client
        self._image = image
        self._settings = settings
        self._options = options

    def _launch(self) -> Container:
        command = [
            "tritonserver",
            f"--id={self._name}",
            f"--model-repository={AT}",
            "--model-control-mode=explicit",
            f"--http-port={HTTP_PORT}",
            f"--grpc-port={GRPC_PORT}",
            *self._restriction(),
            "--allow-metrics=false",
            *self._options,
        ]
        settings = replace(self._settings, cpus=self._cpus)
        container = Container(self._client, self._image, command, settings, log=self.log)
        self.http, self.grpc = container.address(HTTP_PORT), container.address(GRPC_PORT)
        return container

    def _restriction(self) -> list[str]:
        """A web page can send requests to loopback, and a load request can bring code: that takes a header, on a
        server that is new enough (2.39) to know this."""
        option = "--http-restricted-api"
        if self.log.exists() and f"unrecognized option '{option}" in read_tail(self.log, LOG_BYTES):
            return []
        return [f"{option}=model-repository:tritune={secrets.token_hex(16)}"]
