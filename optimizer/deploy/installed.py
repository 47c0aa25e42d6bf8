"""A target with a tritonserver of this machine: one process on loopback, serving one trial after another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict, Unpack

from optimizer.deploy import leftovers
from optimizer.deploy.installation import Installation
from optimizer.deploy.server_folder import ServerFolder
from optimizer.deploy.serving import LOAD_SECONDS, ServingTarget, server_options
from optimizer.deploy.tritonserver import TritonServer, free_port
from optimizer.model_source import ModelSource
from optimizer.stopwatch import Stopwatch


class Settings(TypedDict, total=False):
    """``load_timeout_seconds`` is the longest that a load may take. ``gpus`` (the default): it sees those that this
    process does; else none, and a model that leaves its device open is served on the CPU."""

    stopwatch: Stopwatch | None
    load_timeout_seconds: float
    choose_port: Callable[[], int]
    cpus: frozenset[int] | None
    gpus: bool


class InstalledTarget(ServingTarget):
    """``log`` collects what the server prints. Its own metrics stay off: of GPUs they have what NVML tells this
    process as well."""

    def __init__(
        self, source: ModelSource, installation: Installation, *, log: Path, **settings: Unpack[Settings]
    ) -> None:
        leftovers.remove_leftovers()
        folder = ServerFolder(source, installation)
        with contextlib.ExitStack() as undo:
            undo.callback(folder.remove)
            options = server_options(source)
            gpus = settings.get("gpus", True)
            server = TritonServer(
                folder,
                installation,
                log=log,
                options=options,
                choose_port=settings.get("choose_port", free_port),
                cpus=settings.get("cpus"),
                gpus=gpus,
            )
            super().__init__(
                source,
                server,
                folder,
                stopwatch=settings.get("stopwatch"),
                load_timeout_seconds=settings.get("load_timeout_seconds", LOAD_SECONDS),
                gpus=gpus,
            )
            undo.pop_all()
