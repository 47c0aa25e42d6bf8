"""A target with a tritonserver of this machine: one process on loopback, serving one trial after another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from optimizer.deploy import leftovers
from optimizer.deploy.installation import Installation
from optimizer.deploy.server_folder import ServerFolder
from optimizer.deploy.serving import ServingTarget, server_options
from optimizer.deploy.tritonserver import TritonServer, free_port
from optimizer.model_source import ModelSource
from optimizer.stopwatch import Stopwatch


class InstalledTarget(ServingTarget):
    """``log`` collects what the server prints. ``gpus``: it sees those that this process does; else none, and a model
    that leaves its device open is served on the CPU. Its own metrics stay off: of GPUs they have what NVML tells this
    process as well."""

    def __init__(
        self,
        source: ModelSource,
        installation: Installation,
        *,
        log: Path,
        stopwatch: Stopwatch | None = None,
        load_timeout_seconds: float = 120.0,
        choose_port: Callable[[], int] = free_port,
        cpus: frozenset[int] | None = None,
        gpus: bool = True,
    ) -> None:
        leftovers.remove_leftovers()
        folder = ServerFolder(source, installation)
        with contextlib.ExitStack() as undo:
            undo.callback(folder.remove)
            options = server_options(source)
            server = TritonServer(
                folder, installation, log=log, options=options, choose_port=choose_port, cpus=cpus, gpus=gpus
            )
            super().__init__(
                source, server, folder, stopwatch=stopwatch, load_timeout_seconds=load_timeout_seconds, gpus=gpus
            )
            undo.pop_all()
