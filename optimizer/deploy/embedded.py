"""The embedded target: the pinned tritonserver, with the backends that tune brings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Unpack

from optimizer import runtime
from optimizer.deploy import installation
from optimizer.deploy.installed import InstalledTarget, Settings
from optimizer.model_source import ModelSource


class EmbeddedTarget(InstalledTarget):
    def __init__(
        self, source: ModelSource, *, log: Path, say: Callable[[str], None], **settings: Unpack[Settings]
    ) -> None:
        super().__init__(source, installation.embedded(runtime.ensure(say)), log=log, **settings)
