"""A tritonserver on this machine: the program, what it is started with, what its version knows."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from optimizer import runtime
from optimizer.errors import EnvironmentFault
from optimizer.runtime import Runtime

WITHOUT_TELEMETRY = {"ORT_DISABLE_TELEMETRY": "1"}  # a thread and requests to its maker beside what is measured


@dataclass(frozen=True)
class Installation:
    """``backends`` is its backend directory; None: what ``brought`` has is put together in the server's folder, with
    tune's own backends. ``options`` are those that it knows, by name; None: all that tune gives. ``arguments`` are
    the user's own."""

    tritonserver: Path
    environment: Mapping[str, str]
    backends: Path | None = None
    options: frozenset[str] | None = None
    arguments: tuple[str, ...] = ()
    brought: Runtime | None = None

    def knows(self, word: str) -> bool:
        """Whether ``--name`` or ``--name=value`` is an option of this version."""
        return self.options is None or word.removeprefix("--").partition("=")[0] in self.options


def embedded(installed: Runtime) -> Installation:
    """The pinned one. Raises EnvironmentFault where Python has no shared library."""
    return Installation(installed.tritonserver, environment(installed), brought=installed)


def environment(installed: Runtime) -> dict[str, str]:
    """What the server and its stubs are started with. Raises EnvironmentFault where Python has no shared library."""
    libpython = runtime.libpython_folder()
    if libpython is None:
        raise EnvironmentFault(runtime.libpython_mend())
    packages = [path for path in sys.path if path.endswith("site-packages")]
    return {
        **WITHOUT_TELEMETRY,
        **os.environ,  # models in Python may need it, and they run with the user's rights as it is
        "LD_LIBRARY_PATH": f"{installed.libraries}{os.pathsep}{libpython}",
        # the stub embeds this Python; it finds this environment's packages by these two
        "PYTHONPATH": os.pathsep.join(packages),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }
