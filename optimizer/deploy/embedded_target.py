"""The embedded target: the pinned tritonserver, which is installed on first use."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from optimizer.config.model_source import ModelSource
from optimizer.core.errors import EnvironmentFault
from optimizer.deploy import runtime
from optimizer.deploy.installed_server import (
    INSTALL_STUB_SHELL,
    NO_STUB_SHELL,
    STUB_SHELL,
    WITHOUT_TELEMETRY,
    Installation,
    InstalledTarget,
    user_python_path,
)
from optimizer.deploy.runtime import Runtime
from optimizer.deploy.server_process import temporary_parent
from optimizer.deploy.target_settings import TargetSettings
from optimizer.machine.nvml import cuda_folders
from optimizer.options.run_options import RunOptions

MIN_ADDRESS_SPACE = 4 << 30  # bytes: tritonserver reserves more than it uses
UNLIMITED_ADDRESS_SPACE = "ulimit -v unlimited"


def embedded_installation(installed: Runtime) -> Installation:
    """Return the pinned tritonserver. Raises EnvironmentFault if Python has no shared library, or bash is missing."""
    return Installation(installed.tritonserver, server_environment(installed), runtime=installed)


def server_environment(installed: Runtime, library_folders: Sequence[str | Path] | None = None) -> dict[str, str]:
    """Return the environment of the server and its Python stubs.

    Python's shared library is searched in ``library_folders``, see ``libpython_folder``.
    Raises EnvironmentFault if Python has no shared library, bash is missing, the address space is too small, or a
    folder of the server's programs is mounted with ``noexec``.
    """
    libpython = runtime.libpython_folder(installed, library_folders)
    if libpython is None:
        raise EnvironmentFault(runtime.libpython_advice())
    search_path = stub_search_path()
    if shutil.which(STUB_SHELL, path=search_path) is None:
        raise EnvironmentFault(f"{NO_STUB_SHELL}; {INSTALL_STUB_SHELL}")
    if problem := address_space_problem():
        raise EnvironmentFault(f"{problem}; {UNLIMITED_ADDRESS_SPACE}")
    for fault in (noexec_fault(temporary_parent(), "TMPDIR"), noexec_fault(installed.root, "TRITUNE_CACHE")):
        if fault is not None:
            raise EnvironmentFault("; ".join(fault))
    packages = [path for path in sys.path if path.endswith("site-packages")]
    # a libpython needs the standard library of its own build: distributions build different modules into theirs
    own_python = {"PYTHONHOME": str(installed.stub_python)} if libpython.parent == installed.stub_python else {}
    return {
        **WITHOUT_TELEMETRY,
        **os.environ,  # Python models may need variables of the user
        **own_python,
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, (installed.libraries, libpython, *cuda_folders()))),
        # the stub embeds this Python and finds the packages of this environment by PYTHONPATH and PATH
        "PYTHONPATH": os.pathsep.join([*packages, *user_python_path()]),
        "PATH": search_path,
    }


def address_space_problem() -> str:
    """Return why the limit on the address space, which the server inherits, is too low; empty if it is not."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY or soft >= MIN_ADDRESS_SPACE:
        return ""
    needed = MIN_ADDRESS_SPACE >> 30
    return f"the address space is limited to {soft / 2**30:.1f} GiB, and the server needs {needed} GiB"


def noexec_fault(folder: Path, variable: str) -> tuple[str, str] | None:
    """Return why no program of the server can run in ``folder``, which ``variable`` names, and the fix; else None."""
    if not os.statvfs(folder).f_flag & os.ST_NOEXEC:
        return None
    return f"{folder} is mounted with noexec, and the server runs programs in it", f"set {variable} to another folder"


def stub_search_path() -> str:
    """Return the PATH of the server and its stubs, which has the system's programs even if PATH is empty."""
    folders = (str(Path(sys.executable).parent), os.environ.get("PATH", ""), os.defpath)
    return os.pathsep.join(filter(None, folders))


class EmbeddedTarget(InstalledTarget):
    """Serves candidates on the pinned tritonserver, which is installed on first use."""

    def __init__(self, source: ModelSource, settings: TargetSettings) -> None:
        super().__init__(source, embedded_installation(runtime.ensure(settings.on_progress)), settings)


def check_options(options: RunOptions, on_progress: Callable[[str], None]) -> None:
    """Accept all options: the pinned server is installed when the model is known."""


def describe_server(options: RunOptions) -> str:
    """Return the server in words."""
    return "the embedded server"


def server_identity(options: RunOptions, on_progress: Callable[[str], None]) -> str:
    """Return the version of the pinned server."""
    return runtime.TRITON_VERSION


def make_target(source: ModelSource, options: RunOptions, settings: TargetSettings) -> EmbeddedTarget:
    """Return the target on the pinned server."""
    return EmbeddedTarget(source, settings)
