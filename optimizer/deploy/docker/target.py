"""The docker target: a tritonserver in a container of an image, NVIDIA's or one like it, on this machine."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from optimizer import interrupts
from optimizer.deploy import leftovers
from optimizer.deploy.docker.container import Container
from optimizer.deploy.docker.engine import connect, remove_left_containers, remove_named
from optimizer.deploy.docker.mounted_repository import AT, MountedRepository
from optimizer.deploy.docker.settings import (
    SHM_SIZE,
    ULIMITS,
    ContainerSettings,
    read_gpus,
    read_mount,
    read_shm_size,
    read_ulimits,
)
from optimizer.deploy.server import Server
from optimizer.deploy.serving import ServingTarget, server_options
from optimizer.interfaces import Endpoint, Samples, Telemetry
from optimizer.model_source import ModelSource
from optimizer.server_health import LOG_BYTES
from optimizer.stopwatch import Stopwatch
from optimizer.untrusted import read_tail

if TYPE_CHECKING:
    from docker import DockerClient

HTTP_PORT, GRPC_PORT = 8000, 8001  # Triton's own


class DockerTarget(ServingTarget):
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
        given = read_settings(gpus, mounts, shm_size, ulimits)
        with contextlib.ExitStack() as undo:
            client = undo.enter_context(contextlib.closing(connect(base_url)))
            remove_left_containers(client)
            leftovers.remove_leftovers()
            folder = MountedRepository(source)
            undo.callback(folder.remove)
            given = replace(given, binds=folder.binds + given.binds)
            options = [*server_options(source), *options]
            server = ContainerServer(client, image, folder.path.name, given, log=log, options=options, cpus=cpus)
            super().__init__(
                source,
                server,
                folder,
                stopwatch=stopwatch,
                load_timeout_seconds=load_timeout_seconds,
                gpus=gpus != "none",
            )
            self._open = undo.pop_all()

    def close(self) -> None:
        """Raises EnvironmentFault where the container cannot be removed: the next run does."""
        with interrupts.deferred(), self._open:
            super().close()


def read_settings(gpus: str, mounts: Sequence[str], shm_size: str, ulimits: Sequence[str]) -> ContainerSettings:
    """As for DockerTarget. Raises BadInputError."""
    return ContainerSettings(
        binds=tuple(read_mount(text, taken=[AT]) for text in mounts),
        ports=(HTTP_PORT, GRPC_PORT),
        gpus=read_gpus(gpus),
        shm_size=read_shm_size(shm_size or SHM_SIZE),
        ulimits=read_ulimits([*ULIMITS, *ulimits]),
    )


class ContainerTelemetry:
    """What ``usual`` records; the server's memory as the engine counts it where ``usual`` cannot see its process."""

    def __init__(self, usual: Telemetry) -> None:
        self._usual = usual

    @contextlib.contextmanager
    def record(self, endpoint: Endpoint) -> Iterator[Samples]:
        with self._usual.record(endpoint) as samples:
            yield samples
        if samples.server_memory_bytes is None and endpoint.memory_bytes is not None:
            samples.server_memory_bytes = endpoint.memory_bytes()


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
        super().__init__(name, image, "--docker-image", log=log, cpus=cpus)
        self._engine = client
        self._image = image
        self._settings = settings
        self._options = options

    def memory_bytes(self) -> float | None:
        return self.running.memory_bytes() if isinstance(self.running, Container) else None

    def stop(self) -> None:
        """One that an interrupt has let us forget goes too."""
        super().stop()
        remove_named(self._engine, self._name)

    def _launch(self) -> Container:
        restriction = self._restriction()
        command = [
            "tritonserver",
            f"--id={self._name}",
            f"--model-repository={AT}",
            "--model-control-mode=explicit",
            *(restriction or ["--allow-http=false"]),
            f"--http-port={HTTP_PORT}",
            f"--grpc-port={GRPC_PORT}",
            "--allow-metrics=false",
            *self._options,
            *self._chosen,
        ]
        settings = replace(self._settings, cpus=self._cpus)
        container = Container(self._engine, self._image, command, settings, log=self.log, name=self._name)
        self.grpc = container.address(GRPC_PORT)
        self.http = container.address(HTTP_PORT) if restriction else ""
        return container

    def _restriction(self) -> list[str]:
        """A web page can send requests to loopback, and a load request can bring code: that takes a header. None for
        a server that is too old to know this, as its log says."""
        option = "--http-restricted-api"
        if self.log.exists() and f"unrecognized option '{option}" in read_tail(self.log, LOG_BYTES):
            return []
        return [f"{option}=model-repository:tritune={secrets.token_hex(16)}"]
