"""Create the target that the options name, and check that its server is there."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, cast

from optimizer.config.model_source import ModelSource
from optimizer.config.search_space import SearchSpace
from optimizer.core.errors import BadInputError
from optimizer.core.interfaces import ServerTarget
from optimizer.core.safe_text import named_file
from optimizer.deploy import docker_engine, local_target, runtime
from optimizer.deploy.embedded_target import embedded_installation
from optimizer.deploy.installed_server import Installation
from optimizer.deploy.managed_target import ManagedTarget
from optimizer.deploy.remote_address import other_machine_address
from optimizer.deploy.several_servers import ServerProcesses
from optimizer.deploy.target_settings import TargetSettings
from optimizer.options import server_options
from optimizer.options.addresses import SSL_FLAGS, expand_headers, server_address
from optimizer.options.run_options import PROGRAM_TARGETS, RunOptions


def check_target(options: RunOptions, on_progress: Callable[[str], None]) -> None:
    """Check the target before a model is looked for. Raises BadInputError or EnvironmentFault as ``make_target``."""
    _module(options).check_options(options, on_progress)
    if options.shared_memory != "none" and (address := other_machine_address(options)):
        raise BadInputError(
            f"--shared-memory {options.shared_memory}: the server at {address} is on another machine or behind a "
            "tunnel, so it shares no memory with the client; leave it out, or run tune on that machine with --url "
            "localhost:PORT"
        )
    if options.perf_analyzer_image is not None:
        docker_engine.image_id(options.perf_analyzer_image)
    expand_headers(options.headers)
    flags = SSL_FLAGS[server_address(options.url).protocol].values()
    for flag, file in zip(flags, (options.tls_ca, options.tls_cert, options.tls_key), strict=True):
        if file is not None:
            named_file(flag, file, "a file in the PEM format")


def make_target(
    source: ModelSource, space: SearchSpace, options: RunOptions, settings: TargetSettings
) -> ServerTarget:
    """Return the target of ``options`` for the models of ``source`` with the settings of ``space``.

    Raises BadInputError if options do not fit the target, EnvironmentFault if the target is not available.
    """
    check_server_options(space, options, settings.on_progress)
    processes = space.max_server_processes
    if processes == 1:
        return _module(options).make_target(source, options, settings)
    targets = list[ManagedTarget]()
    with contextlib.ExitStack() as undo:
        for number in range(1, processes + 1):
            log = settings.log if number == 1 else settings.log.with_stem(f"{settings.log.stem}-{number}")
            server_settings = replace(settings, log=log, ports=settings.ports[number - 1 : number])
            target = _module(options).make_target(source, options, server_settings)
            undo.callback(target.close)
            assert isinstance(target, ManagedTarget), "a space with server processes is refused for a remote server"
            targets.append(target)
        undo.pop_all()
    return ServerProcesses(targets)


class TargetModule(Protocol):
    """The functions of the module ``optimizer/deploy/NAME_target.py``, which implements ``--target NAME``."""

    def check_options(self, options: RunOptions, on_progress: Callable[[str], None]) -> None:
        """Check the options and the server's machine before a model is looked for.

        Raises BadInputError or EnvironmentFault.
        """

    def describe_server(self, options: RunOptions) -> str:
        """Return the server in words, for the message before the first measurement."""

    def server_identity(self, options: RunOptions, on_progress: Callable[[str], None]) -> str:
        """Return what identifies the server in the fingerprint. Raises EnvironmentFault if it does not answer."""

    def make_target(self, source: ModelSource, options: RunOptions, settings: TargetSettings) -> ServerTarget:
        """Return the target. Raises BadInputError or EnvironmentFault."""


def _module(options: RunOptions) -> TargetModule:
    return cast(TargetModule, importlib.import_module(f"{__package__}.{options.target}_target"))


def server_installation(options: RunOptions, on_progress: Callable[[str], None]) -> Installation:
    """Return the tritonserver of this machine: the user's for the local target, otherwise the embedded one."""
    if options.target == "local":
        return local_target.installation_of(options)
    return embedded_installation(runtime.ensure(on_progress))


def check_server_options(space: SearchSpace, options: RunOptions, on_progress: Callable[[str], None]) -> None:
    """Raise BadInputError if the server lacks a server option of the space."""
    space_options = server_options.option_names(space.fields)
    if space_options and options.target in PROGRAM_TARGETS:  # the options of an image are known when it starts
        installation = server_installation(options, on_progress)
        options_of_server = local_target.options_in_help(installation.tritonserver, installation.environment)
        for name in space_options:
            if name not in options_of_server:
                raise BadInputError(
                    f"space: server: {name}: not an option of {installation.tritonserver}; its --help lists all"
                )


def describe_server(options: RunOptions) -> str:
    """Return the server that is measured, in words."""
    if options.cluster is not None:
        return f"{options.target} servers of a cluster"
    return _module(options).describe_server(options)


def server_identity(options: RunOptions, on_progress: Callable[[str], None]) -> str:
    """Return the identity of the server for the fingerprint: its version, hash or image id.

    Raises EnvironmentFault if the server or Docker does not answer.
    """
    return _module(options).server_identity(options, on_progress)
