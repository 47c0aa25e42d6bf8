"""Formats ``docker`` and ``compose``: the measured server in a container of one machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Any

from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import is_file, is_folder, one_line
from optimizer.deploy.docker_container import ULIMITS, Bind, ContainerSettings, Ulimit, read_ulimits
from optimizer.deploy.target_settings import GRPC_PORT, HTTP_PORT, METRICS_PORT, PORT_STEP
from optimizer.emit import production
from optimizer.emit.pbtxt import repository_files
from optimizer.emit.production import (
    CREDENTIALS,
    ModelRepository,
    ProductionServer,
    commented,
    deployment_header,
    numbered_names,
    to_yaml,
)
from optimizer.emit.recommended import Recommendation

SCRIPT = "run.sh"
BIND = "${ADDRESS:-127.0.0.1}"  # Triton does not authenticate clients, so other addresses need a decision
SERVES_ON = "listens on 127.0.0.1 only; set ADDRESS in the environment to listen on another address of this machine"


def emit_docker(server: ProductionServer) -> dict[str, str]:
    """Return ``run.sh`` and the config.pbtxt and model.json files that it mounts over those of a model folder.

    Raises BadInputError for a model name with a colon, which ``docker --volume`` cannot mount, for several server
    processes, and if the model repository lacks a file that another one is mounted over.
    """
    if (processes := server.recommendation.server_processes) > 1:
        raise BadInputError(
            f"--format docker: starts one server, but the run recommends {processes} server processes; use --format "
            "compose"
        )
    if server.repository.is_mounted and (
        colons := [model for model in server.recommendation.configs if ":" in model]
    ):
        raise BadInputError(f"{one_line(colons[0])}: docker cannot mount a name with a colon; use --format compose")
    _check_mount_points(server.recommendation, server.repository)
    about = commented(deployment_header(server, SERVES_ON))
    command = ["exec docker run", *_flags(server), quote(server.image)]
    command += [quote(word) for word in server.command()]
    script = f'#!/bin/sh\n{about}set -eu\ncd "$(dirname "$0")"\n' + " \\\n  ".join(command) + "\n"
    return {SCRIPT: script, **(repository_files(server.recommendation) if server.repository.is_mounted else {})}


def _check_mount_points(recommendation: Recommendation, repository: ModelRepository) -> None:
    """Raise BadInputError if the repository is on this machine and lacks a file that another one is mounted over.

    A container engine cannot create it in a read-only folder, so the container would not start.
    """
    if repository.scheme != "path":
        return
    folder = Path(repository.text)
    for file in repository_files(recommendation):
        if is_folder(folder / file.partition("/")[0]) and not is_file(folder / file):
            raise BadInputError(
                f"--model-repository {one_line(repository.text)}: has no {one_line(file)}, and that of the run is "
                "mounted over it; create it there (it may be empty)"
            )


def _flags(server: ProductionServer) -> Iterator[str]:
    """Yield the options of ``docker run``, quoted for a shell."""
    yield from ("--rm", f"--name={quote(server.name)}", f"--stop-timeout={production.STOP_SECONDS}")
    yield from (f'--publish="{BIND}:{port}:{port}"' for port in (HTTP_PORT, GRPC_PORT, METRICS_PORT))
    if server.gpus:
        yield f"--gpus={server.gpus}"
    if server.cpus is not None:
        yield f"--cpus={production.cpu_amount(server.cpus)}"
    if server.memory_bytes is not None:
        yield f"--memory={mebibytes(server.memory_bytes)}"
    yield f"--shm-size={mebibytes(server.shared_memory_bytes)}"
    measured = ContainerSettings(
        binds=server.recommendation.mounts,
        ulimits=_ulimits(server.recommendation),
        environment=_environment(server),
    )
    yield from map(quote, measured.flags())
    if server.repository.is_mounted:
        yield quote(f"--volume={server.repository.text}:{production.MODELS}:ro")
        for file in repository_files(server.recommendation):
            yield f'--volume="$PWD"/{quote(f"{file}:{production.MODELS}/{file}:ro")}'
    yield f"--health-cmd={quote(' '.join(health(production.READY)))}"
    yield from ("--health-interval=10s", f"--health-timeout={production.PROBE_SECONDS}s", "--health-retries=3")
    yield f"--health-start-period={server.start_seconds()}s"


def _ulimits(recommendation: Recommendation) -> tuple[Ulimit, ...]:
    """Return the limits of the measured container, or those that a server usually needs."""
    return read_ulimits([*ULIMITS, *recommendation.ulimits])


def _environment(server: ProductionServer) -> dict[str, str | None]:
    """Return the variables of the measured container, and those with the credentials for a bucket.

    The value None stands for that of the environment in which the container is started.
    """
    return {**dict.fromkeys(CREDENTIALS.get(server.repository.scheme, ())), **server.recommendation.environment}


def health(path: str) -> list[str]:
    """Return the command that checks ``path`` of the server's HTTP API inside its container."""
    return ["curl", "--fail", "--silent", f"http://localhost:{HTTP_PORT}{path}"]


def mebibytes(count: int) -> str:
    """Return ``count`` bytes in MiB, rounded up, as container engines take a size."""
    return f"{-(-count // (1 << 20))}m"


COMPOSE_FILE = "compose.yaml"


def emit_compose(server: ProductionServer) -> dict[str, str]:
    """Return ``compose.yaml``, with a service for each server process, and the files that it mounts.

    Compose copies the content of a config into the container, which fails below a read-only folder. It mounts a
    config with a file. Raises BadInputError.
    """
    _check_mount_points(server.recommendation, server.repository)
    recommendation, processes = server.recommendation, server.recommendation.server_processes
    files: dict[str, str] = {}
    config_names: dict[str, str] = {}
    if server.repository.is_mounted:
        files = repository_files(recommendation)
        config_names = {path: f"config-{name}" for path, name in numbered_names(recommendation).items()}
    service_names = [server.name] if processes == 1 else [f"{server.name}-{i + 1}" for i in range(processes)]
    services = {
        name: _service(server, config_names, PORT_STEP * process) for process, name in enumerate(service_names)
    }
    document: dict[str, Any] = {"name": server.name, "services": services}
    if config_names:
        document["configs"] = {name: {"file": _literal(f"./{path}")} for path, name in config_names.items()}
    return {COMPOSE_FILE: to_yaml(document, header=deployment_header(server, SERVES_ON)), **files}


def _service(server: ProductionServer, configs: dict[str, str], port_offset: int) -> dict[str, Any]:
    """Return the service of a server.

    ``configs`` has the name of each mounted file by its path. ``port_offset`` is added to the ports on the machine.
    """
    repository = server.repository
    ports = (HTTP_PORT, GRPC_PORT, METRICS_PORT)
    service: dict[str, Any] = {
        "image": server.image,
        "command": [_literal(word) for word in server.command()],
        "restart": "unless-stopped",
        "stop_grace_period": f"{production.STOP_SECONDS}s",
        "ports": [f"{BIND}:{port + port_offset}:{port}" for port in ports],
        "healthcheck": {
            "test": ["CMD", *health(production.READY)],
            "interval": "10s",
            "timeout": f"{production.PROBE_SECONDS}s",
            "retries": 3,
            "start_period": f"{server.start_seconds()}s",
        },
        "shm_size": mebibytes(server.shared_memory_bytes),
        "ulimits": {
            limit.name: {"soft": limit.soft, "hard": limit.hard} for limit in _ulimits(server.recommendation)
        },
    }
    mounts = list(server.recommendation.mounts)
    if repository.is_mounted:
        mounts.insert(0, Bind(Path(repository.text), production.MODELS, read_only=True))
        service["configs"] = [
            {"source": name, "target": _literal(f"{production.MODELS}/{path}")} for path, name in configs.items()
        ]
    if mounts:
        service["volumes"] = [_volume(mount) for mount in mounts]
    if variables := _environment(server):
        service["environment"] = [
            name if value is None else _literal(f"{name}={value}") for name, value in variables.items()
        ]
    if resources := _resources(server):
        service["deploy"] = {"resources": resources}
    return service


def _volume(mount: Bind) -> dict[str, Any]:
    """Return the volume of a folder of the machine."""
    volume = {"type": "bind", "source": _literal(str(mount.source)), "target": _literal(mount.at)}
    return {**volume, "read_only": True} if mount.read_only else volume


def _resources(server: ProductionServer) -> dict[str, Any]:
    maximum: dict[str, Any] = {}
    if server.cpus is not None:
        maximum["cpus"] = production.cpu_amount(server.cpus)
    if server.memory_bytes is not None:
        maximum["memory"] = mebibytes(server.memory_bytes)
    resources: dict[str, Any] = {"limits": maximum} if maximum else {}
    if server.gpus:
        gpu = {"driver": "nvidia", "count": server.gpus, "capabilities": ["gpu"]}
        resources["reservations"] = {"devices": [gpu]}
    return resources


def _literal(text: str) -> str:
    """Escape ``$``, which Compose would expand."""
    return text.replace("$", "$$")
