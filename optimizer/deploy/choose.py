"""Which target a run gets."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from optimizer import runtime, server_options
from optimizer.arguments.target import address
from optimizer.client.connection import Connection, Tls
from optimizer.deploy import installation, local
from optimizer.deploy.docker import engine as docker_engine
from optimizer.deploy.docker import target as docker
from optimizer.deploy.embedded import EmbeddedTarget
from optimizer.deploy.installation import Installation
from optimizer.deploy.listener import is_loopback
from optimizer.deploy.remote import kept_state
from optimizer.deploy.remote.server import RemoteServer
from optimizer.errors import BadInputError
from optimizer.headers import expanded
from optimizer.interfaces import ServerTarget
from optimizer.model_source import ModelSource
from optimizer.options import RunOptions
from optimizer.profile.safe_paths import is_file
from optimizer.space import Space
from optimizer.stopwatch import Stopwatch
from optimizer.trial import SERVER_CPUS
from optimizer.untrusted import one_line

ON_THIS_MACHINE = ("embedded", "local")  # as a program: see ``installed``
CAN_RESTART = (*ON_THIS_MACHINE, "docker")  # so that options of the whole server can be among what is tried


def check(options: RunOptions, say: Callable[[str], None]) -> None:
    """What can be told of the target before a model is looked for. Raises as ``target_of``."""
    if options.target == "local":
        installed(options, say)
    if options.target == "docker":
        assert options.docker_image is not None
        docker.read_settings(**_container(options))
        docker_engine.image_id(options.docker_image)
    if options.perf_analyzer_image is not None:
        docker_engine.image_id(options.perf_analyzer_image)
    expanded(options.headers)
    for flag, file in (
        ("--tls-ca", options.tls_ca),
        ("--tls-cert", options.tls_cert),
        ("--tls-key", options.tls_key),
    ):
        if file is not None and not is_file(Path(file)):
            raise BadInputError(f"{flag} {one_line(file)}: no such file; name one in PEM")


def target_of(
    source: ModelSource,
    space: Space,
    options: RunOptions,
    *,
    log: Path,
    cpus: frozenset[int] | None,
    gpus: bool,
    metrics: str,
    stopwatch: Stopwatch,
    say: Callable[[str], None],
) -> ServerTarget:
    """For models of ``source`` with settings of ``space``. ``gpus``: a server on this machine sees some;
    ``metrics`` is where a remote one tells of its own.

    Raises BadInputError where what is asked does not go with the target, EnvironmentFault where it cannot be had.
    """
    check_space(space, options, say)
    if options.target == "remote":
        return _remote(source, options, metrics, stopwatch, say)
    if options.target == "docker":
        return _docker(source, options, log, cpus, stopwatch)
    if options.target == "local":
        own = installed(options, say)
        if options.protocol == "http" and not own.knows("--http-restricted-api"):
            raise BadInputError(
                f"--protocol http: {own.tritonserver} is too old to keep web pages from loading models over HTTP; "
                "leave it out, or name a newer server"
            )
        return local.LocalTarget(source, own, log=log, stopwatch=stopwatch, cpus=cpus, gpus=gpus)
    return EmbeddedTarget(source, log=log, say=say, stopwatch=stopwatch, cpus=cpus, gpus=gpus)


def installed(options: RunOptions, say: Callable[[str], None]) -> Installation:
    """The server on this machine that serves: the user's own, or the embedded one."""
    if options.target == "local":
        return local.find(options.tritonserver, options.backend_directory, options.server_args)
    return installation.embedded(runtime.ensure(say))


def check_space(space: Space, options: RunOptions, say: Callable[[str], None]) -> None:
    """That the target can vary what the space says of the server. Raises BadInputError."""
    tried = server_options.names(space.fields)
    if options.target not in CAN_RESTART and (tried or SERVER_CPUS in space.fields):
        about = f"server: {tried[0]}" if tried else SERVER_CPUS
        raise BadInputError(
            f"space: {about}: --target {options.target} cannot start its server anew with other options; leave it "
            f"out, or tune on --target {' or '.join(CAN_RESTART)}"
        )
    if tried and options.target != "docker":  # an image's server is asked by starting it
        own = installed(options, say)
        known = local.known_options(own.tritonserver, own.environment)
        for name in tried:
            if name not in known:
                raise BadInputError(
                    f"space: server: {name}: no option of {own.tritonserver}; its --help lists those that it has"
                )


def _docker(
    source: ModelSource, options: RunOptions, log: Path, cpus: frozenset[int] | None, stopwatch: Stopwatch
) -> ServerTarget:
    assert options.docker_image is not None
    return docker.DockerTarget(
        source,
        image=options.docker_image,
        log=log,
        stopwatch=stopwatch,
        options=options.server_args,
        cpus=cpus,
        **_container(options),
    )


def _container(options: RunOptions) -> dict[str, Any]:
    """What the container is given, by the parameters of DockerTarget."""
    return {
        "gpus": options.docker_gpus or "none",
        "mounts": options.docker_mounts,
        "shm_size": options.docker_shm_size or "",
        "ulimits": options.docker_ulimits,
    }


def server_of(options: RunOptions, say: Callable[[str], None]) -> str:
    """Which server measures, for the fingerprint. Raises EnvironmentFault where it cannot be told."""
    if options.target == "embedded":
        return runtime.TRITON_VERSION
    if options.target == "local":
        program = installed(options, say).tritonserver
        return f"{program.name} {hashlib.sha256(program.read_bytes()).hexdigest()[:12]}"
    if options.target == "docker":
        assert options.docker_image is not None
        return docker_engine.image_id(options.docker_image)
    with contextlib.closing(RemoteServer(connection_of(options))) as server:
        return server.version()


def elsewhere(options: RunOptions) -> str:
    """The address of a server whose machine is not this one."""
    where = address(options.url).where
    return "" if options.target != "remote" or is_loopback(where.rpartition(":")[0].strip("[]")) else where


def connection_of(options: RunOptions) -> Connection:
    """To the remote server."""
    at = address(options.url)
    tls = Tls(
        *(
            None if file is None else Path(file).absolute()
            for file in (options.tls_ca, options.tls_cert, options.tls_key)
        )
    )
    return Connection(at.where, at.protocol, expanded(options.headers), tls if at.tls else None)


def _remote(
    source: ModelSource, options: RunOptions, metrics: str, stopwatch: Stopwatch, say: Callable[[str], None]
) -> ServerTarget:
    from optimizer.deploy.remote.target import RemoteTarget

    keep = runtime.cache_folder() / kept_state.FOLDER
    return RemoteTarget(connection_of(options), source, keep=keep, metrics=metrics, say=say, stopwatch=stopwatch)
