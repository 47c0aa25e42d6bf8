"""``docker``: a script that starts the server in a container, as it was measured."""

from __future__ import annotations

from shlex import quote

from optimizer.deploy.docker.settings import ULIMITS
from optimizer.emitting import server
from optimizer.emitting.header import commented, header, of_serving
from optimizer.emitting.pbtxt import text_of
from optimizer.emitting.serving import CREDENTIALS, Serving
from optimizer.emitting.winner import Winner
from optimizer.errors import BadInputError
from optimizer.untrusted import one_line

SCRIPT = "run.sh"
BIND = "${ADDRESS:-127.0.0.1}"  # Triton asks nobody who they are: opening it is a decision
SERVES_ON = "serves on 127.0.0.1 alone; with ADDRESS set in the environment on that one of this machine's addresses"


def emit_docker(winner: Winner, serving: Serving) -> dict[str, str]:
    """``run.sh`` and, beside it, the configurations that it mounts over those of a folder.

    Raises BadInputError for a model whose name ``--volume`` cannot spell.
    """
    if serving.repository.is_mounted and (colons := [model for model in winner.configs if ":" in model]):
        raise BadInputError(f"{one_line(colons[0])}: docker cannot mount a name with a colon; --format compose can")
    about = commented(
        [
            *header(winner),
            *of_serving(winner, serving, mounts_configs=serving.repository.is_mounted),
            SERVES_ON,
        ]
    )
    words = ["exec docker run", *_flags(winner, serving), quote(serving.image)]
    words += [quote(word) for word in server.command(winner, serving)]
    script = f'#!/bin/sh\n{about}set -eu\ncd "$(dirname "$0")"\n' + " \\\n  ".join(words) + "\n"
    configs = winner.configs if serving.repository.is_mounted else {}
    return {SCRIPT: script, **{f"{model}/config.pbtxt": text_of(winner, model) for model in configs}}


def _flags(winner: Winner, serving: Serving) -> list[str]:
    """Quoted for a shell."""
    limits = server.limits(winner)
    flags = ["--rm", f"--name={quote(serving.name)}"]
    flags += [f'--publish="{BIND}:{port}:{port}"' for port in (server.HTTP, server.GRPC, server.METRICS)]
    if limits.gpus:
        flags.append(f"--gpus={limits.gpus}")
    if limits.cpus is not None:
        flags.append(f"--cpus={limits.cpus}")
    if limits.memory_bytes is not None:
        flags.append(f"--memory={mebibytes(limits.memory_bytes)}")
    flags.append(f"--shm-size={mebibytes(winner.shared_memory_bytes)}")
    flags += [f"--ulimit={limit}" for limit in ULIMITS]
    if serving.repository.is_mounted:
        flags.append(quote(f"--volume={serving.repository.text}:{server.MODELS}:ro"))
        flags += [f'--volume="$PWD"/{quote(_mounted(model))}' for model in winner.configs]
    flags += [f"--env={name}" for name in CREDENTIALS.get(serving.repository.scheme, ())]
    flags += [
        f"--health-cmd={quote(' '.join(health(server.READY)))}",
        "--health-interval=10s",
        f"--health-timeout={server.PROBE_SECONDS}s",
        "--health-retries=3",
        f"--health-start-period={server.start_seconds(winner)}s",
    ]
    return flags


def _mounted(model: str) -> str:
    return f"{model}/config.pbtxt:{server.MODELS}/{model}/config.pbtxt:ro"


def health(path: str) -> list[str]:
    """What tells the health of the server within its container."""
    return ["curl", "--fail", "--silent", f"http://localhost:{server.HTTP}{path}"]


def mebibytes(count: int) -> str:
    """As container engines take a size."""
    return f"{-(-count // (1 << 20))}m"
