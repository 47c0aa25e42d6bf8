"""The docker target: a tritonserver in a container, with the model repository mounted into it."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from optimizer.config.model_source import ModelSource
from optimizer.core import interrupts
from optimizer.core.safe_text import read_tail
from optimizer.deploy import docker_engine
from optimizer.deploy.docker_container import (
    NO_GPUS,
    SHM_SIZE,
    ULIMITS,
    Bind,
    Container,
    ContainerSettings,
    read_environment,
    read_gpus,
    read_mount,
    read_shm_size,
    read_ulimits,
)
from optimizer.deploy.docker_engine import connect, remove_named, remove_orphaned_containers
from optimizer.deploy.managed_target import ManagedTarget, RepositoryCopy, auto_complete_options, exports_metrics
from optimizer.deploy.server_log import LOG_BYTES
from optimizer.deploy.server_process import (
    Server,
    remove_leftovers,
    remove_shared_memory,
    shared_memory_prefix,
    too_old_for_http,
)
from optimizer.deploy.target_settings import GRPC_PORT, HTTP_PORT, METRICS_PORT, TargetSettings
from optimizer.options.run_options import RunOptions

if TYPE_CHECKING:
    from docker import DockerClient


REPOSITORY = "/models"  # path of the repository in the container


class MountedCopy(RepositoryCopy):
    """A copy of the model repository for a container: its shared files are mounted below ``/models`` by ``binds``.

    They cannot be links, because a container does not see the paths of this machine. Links in the folders of models
    work, because their targets are mounted where they point to. Files and folders next to the models may belong to
    other programs, such as a virtual environment whose links lead to programs that the container has too. So the
    targets of their links are not mounted, and they may vanish while the models are served.
    """

    def __init__(self, source: ModelSource) -> None:
        self._shared: list[Bind] = []
        super().__init__(source)
        with self._removed_on_error():
            self._mount_link_targets()
            self.repository.chmod(0o755)  # the container may run as any user

    @property
    def binds(self) -> tuple[Bind, ...]:
        return (Bind(self.repository, REPOSITORY), *self._shared)

    def _share(self, entry: Path, at: Path) -> None:
        if entry.exists():  # otherwise it is a link without a target
            self._mount(entry.resolve(), at)

    def _mount(self, source: Path, at: Path) -> None:
        """Create the mount point ``at`` in the copy, and mount ``source`` there."""
        at.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            at.mkdir()
        else:
            at.touch()
        place = f"{REPOSITORY}/{at.relative_to(self.repository).as_posix()}"
        self._shared.append(Bind(source, place, may_vanish=at.parent == self.repository))

    def _mount_link_targets(self) -> None:
        """Mount the targets of the links in the folders of models."""
        for bind in [bind for bind in self._shared if not bind.may_vanish]:
            for link in filter(Path.exists, _links(bind.source)):
                self._mount_link_target(link, Path(bind.at, link.relative_to(bind.source)))

    def _mount_link_target(self, link: Path, at: Path) -> None:
        """Mount the target of ``link``, which the container sees at ``at``, where the link leads to there."""
        leads_to = Path(os.path.normpath(at.parent / link.readlink()))
        if around := [bind for bind in self._shared if leads_to.is_relative_to(bind.at)]:
            target = around[0].source / leads_to.relative_to(around[0].at)
            if around[0].may_vanish and target.is_symlink():  # the links of other folders are not mounted
                self._mount_link_target(target, leads_to)
        elif not leads_to.is_relative_to(REPOSITORY):
            self._shared.append(Bind(link.resolve(), str(leads_to)))
        elif not (inside := self.repository / leads_to.relative_to(REPOSITORY)).exists():
            self._mount(link.resolve(), inside)


def _links(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        yield from (path for name in (*folders, *files) if (path := Path(parent, name)).is_symlink())


class DockerTarget(ManagedTarget):
    """Serves candidates in a container of the image and with the settings of ``options``.

    Its shared memory and resource limits add to or replace NVIDIA's recommended values. ``base_url`` is the address
    of the engine, by default that of the ``docker`` command.

    Raises BadInputError for a value that is not valid, EnvironmentFault if Docker is not available.
    """

    def __init__(
        self, source: ModelSource, options: RunOptions, settings: TargetSettings, *, base_url: str | None = None
    ) -> None:
        container = read_settings(options)
        with contextlib.ExitStack() as undo:
            client = undo.enter_context(contextlib.closing(connect(base_url)))
            remove_orphaned_containers(client)
            remove_leftovers()
            folder = MountedCopy(source)
            undo.callback(folder.remove)
            with_metrics = exports_metrics(source)
            ports = (*container.ports, METRICS_PORT) if with_metrics else container.ports
            container = replace(container, binds=folder.binds + container.binds, ports=ports)
            flags = [*auto_complete_options(source.models.values()), *options.server_args]
            if container.host_ipc:  # the memory of Python models is on this machine then
                flags.append(f"--backend-config=python,shm-region-prefix-name={shared_memory_prefix(folder.path)}")
            settings = replace(settings, arguments=tuple(flags), sees_gpus=bool(container.gpus))
            server = ContainerServer(
                client,
                str(options.docker_image),
                folder.path.name,
                container,
                settings,
                needs_http=options.protocol == "http",
            )
            super().__init__(source, server, folder, settings)
            self._open = undo.pop_all()

    def close(self) -> None:
        """Remove the container and the copy of the repository.

        Raises EnvironmentFault if the container cannot be removed; the next run removes it.
        """
        with interrupts.deferred(), self._open:
            super().close()


def read_settings(options: RunOptions) -> ContainerSettings:
    """Return the settings of the container. Raises BadInputError."""
    host_ipc = options.shared_memory != "none"
    return ContainerSettings(
        binds=tuple(read_mount(text, reserved=[REPOSITORY]) for text in options.docker_mounts),
        ports=(HTTP_PORT, GRPC_PORT),
        gpus=read_gpus(options.docker_gpus or NO_GPUS),
        shm_size="" if host_ipc else read_shm_size(options.docker_shm_size or SHM_SIZE),
        host_ipc=host_ipc,
        ulimits=read_ulimits([*ULIMITS, *options.docker_ulimits]),
        environment=read_environment(options.docker_env),
    )


def check_options(options: RunOptions, on_progress: Callable[[str], None]) -> None:
    """Raise BadInputError for wrong settings of the container, EnvironmentFault if Docker or the image is missing."""
    read_settings(options)
    server_identity(options, on_progress)


def describe_server(options: RunOptions) -> str:
    """Return the server in words."""
    return "a server in Docker"


def server_identity(options: RunOptions, on_progress: Callable[[str], None]) -> str:
    """Return the id of the image."""
    assert options.docker_image is not None
    return docker_engine.image_id(options.docker_image)


def make_target(source: ModelSource, options: RunOptions, settings: TargetSettings) -> DockerTarget:
    """Return the target on a server in a container of ``--docker-image``."""
    return DockerTarget(source, options, settings)


class ContainerServer(Server):
    """A tritonserver in a container of ``image``, a new one with each start, with its ports published on loopback."""

    def __init__(
        self,
        client: DockerClient,
        image: str,
        name: str,
        container: ContainerSettings,
        settings: TargetSettings,
        *,
        needs_http: bool = False,
    ) -> None:
        super().__init__(name, image, "--docker-image", settings)
        self._needs_http = needs_http
        self._engine = client
        self._image = image
        self._container = container
        self._arguments = settings.arguments

    def package_advice(self, module: str) -> str:
        """Return how to build an image with a package."""
        return (
            f"build an image with the package of {module} (FROM {self._image}, RUN pip install PACKAGE) and give it "
            "as --docker-image"
        )

    def memory_bytes(self) -> float | None:
        return self.running.memory_bytes() if isinstance(self.running, Container) else None

    def stop(self) -> None:
        """Stop the server; also remove containers that an interrupted start has left."""
        super().stop()
        remove_named(self._engine, self._name)
        if self._container.host_ipc:
            remove_shared_memory(self._name)

    def _launch(self) -> Container:
        restriction = self._restriction()
        command = [
            "tritonserver",
            f"--id={self._name}",
            f"--model-repository={REPOSITORY}",
            "--model-control-mode=explicit",
            *(restriction or ["--allow-http=false"]),
            f"--http-port={HTTP_PORT}",
            f"--grpc-port={GRPC_PORT}",
            *self._metrics_options(),
            *self._arguments,
            *self._server_options,
        ]
        settings = replace(self._container, cpus=self._cpus)
        container = Container(self._engine, self._image, command, settings, log=self.log.path, name=self._name)
        self.grpc = container.address(GRPC_PORT)
        self.http = container.address(HTTP_PORT) if restriction else ""
        self.metrics = container.address(METRICS_PORT) if METRICS_PORT in settings.ports else ""
        return container

    def _metrics_options(self) -> list[str]:
        if METRICS_PORT not in self._container.ports:
            return ["--allow-metrics=false"]
        return [f"--metrics-port={METRICS_PORT}", "--allow-gpu-metrics=false", "--allow-cpu-metrics=false"]

    def _restriction(self) -> list[str]:
        """Return the option that protects the load of models over HTTP by a secret header.

        A web page can send requests to loopback, and a load request can carry code. The result is empty if the log
        says that the server is too old for this option.
        """
        option = "--http-restricted-api"
        if self.log.path.exists() and f"unrecognized option '{option}" in read_tail(self.log.path, LOG_BYTES):
            if self._needs_http:
                raise too_old_for_http(self._image)
            return []
        return [f"{option}=model-repository:tritune={secrets.token_hex(16)}"]
