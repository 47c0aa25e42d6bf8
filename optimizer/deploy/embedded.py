"""The embedded target: the pinned tritonserver, with the backends that tune brings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from optimizer import runtime
from optimizer.deploy import installation
from optimizer.deploy.installed import InstalledTarget
from optimizer.deploy.tritonserver import free_port
from optimizer.model_source import ModelSource
from optimizer.stopwatch import Stopwatch


class EmbeddedTarget(InstalledTarget):
    def __init__(
        self,
        source: ModelSource,
        *,
        log: Path,
        say: Callable[[str], None],
        stopwatch: Stopwatch | None = None,
        load_timeout_seconds: float = 120.0,
        choose_port: Callable[[], int] = free_port,
        cpus: frozenset[int] | None = None,
        gpus: bool = True,
    ) -> None:
        super().__init__(
            source,
            installation.embedded(runtime.ensure(say)),
            log=log,
            stopwatch=stopwatch,
            load_timeout_seconds=load_timeout_seconds,
            choose_port=choose_port,
            cpus=cpus,
            gpus=gpus,
        )
