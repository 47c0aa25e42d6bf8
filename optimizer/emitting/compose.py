"""``compose``: one service of the Compose specification, its configurations in the same file."""

from __future__ import annotations

from typing import Any

from optimizer.deploy.docker.settings import ULIMITS, read_ulimits
from optimizer.emitting import server
from optimizer.emitting.docker import BIND, SERVES_ON, health, mebibytes
from optimizer.emitting.header import header, of_serving
from optimizer.emitting.pbtxt import text_of
from optimizer.emitting.serving import CREDENTIALS, Serving, name_of
from optimizer.emitting.winner import Winner
from optimizer.emitting.yaml_text import to_yaml

FILE = "compose.yaml"


def emit_compose(winner: Winner, serving: Serving) -> dict[str, str]:
    lines = [
        *header(winner),
        *of_serving(winner, serving, mounts_configs=serving.repository.is_mounted),
        SERVES_ON,
    ]
    names = _config_names(winner) if serving.repository.is_mounted else {}
    document: dict[str, Any] = {"name": serving.name, "services": {serving.name: _service(winner, serving, names)}}
    if names:
        document["configs"] = {name: {"content": _literal(text_of(winner, model))} for model, name in names.items()}
    return {FILE: to_yaml(document, header=lines)}


def _service(winner: Winner, serving: Serving, configs: dict[str, str]) -> dict[str, Any]:
    repository = serving.repository
    service: dict[str, Any] = {
        "image": serving.image,
        "command": [_literal(word) for word in server.command(winner, serving)],
        "restart": "unless-stopped",
        "ports": [f"{BIND}:{port}:{port}" for port in (server.HTTP, server.GRPC, server.METRICS)],
        "healthcheck": {
            "test": ["CMD", *health(server.READY)],
            "interval": "10s",
            "timeout": f"{server.PROBE_SECONDS}s",
            "retries": 3,
            "start_period": f"{server.start_seconds(winner)}s",
        },
        "shm_size": mebibytes(winner.shared_memory_bytes),
        "ulimits": {one.name: {"soft": one.soft, "hard": one.hard} for one in read_ulimits(ULIMITS)},
    }
    if repository.is_mounted:
        mount = {"type": "bind", "source": _literal(repository.text), "target": server.MODELS, "read_only": True}
        service["volumes"] = [mount]
        service["configs"] = [
            {"source": name, "target": _literal(f"{server.MODELS}/{model}/config.pbtxt")}
            for model, name in configs.items()
        ]
    if names := CREDENTIALS.get(repository.scheme):
        service["environment"] = list(names)
    if resources := _resources(winner):
        service["deploy"] = {"resources": resources}
    return service


def _resources(winner: Winner) -> dict[str, Any]:
    limits = server.limits(winner)
    most: dict[str, Any] = {}
    if limits.cpus is not None:
        most["cpus"] = limits.cpus
    if limits.memory_bytes is not None:
        most["memory"] = mebibytes(limits.memory_bytes)
    resources: dict[str, Any] = {"limits": most} if most else {}
    if limits.gpus:
        gpu = {"driver": "nvidia", "count": limits.gpus, "capabilities": ["gpu"]}
        resources["reservations"] = {"devices": [gpu]}
    return resources


def _config_names(winner: Winner) -> dict[str, str]:
    """Of each model's configuration within the file; the number keeps two that are spelled alike apart."""
    return {model: f"config-{number}-{name_of(model)}" for number, model in enumerate(winner.configs, 1)}


def _literal(text: str) -> str:
    """Compose puts variables in place of ``$NAME``."""
    return text.replace("$", "$$")
