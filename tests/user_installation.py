"""A user's tritonserver installation, started by a script that sets its environment."""

from __future__ import annotations

import shutil
from pathlib import Path
from shlex import quote

from optimizer.deploy import runtime
from optimizer.deploy.embedded_target import server_environment
from optimizer.deploy.runtime import Runtime
from tests.programs import write_program

SET = ("LD_LIBRARY_PATH", "PATH")


def write_installation(folder: Path, installed: Runtime) -> Path:
    """Create ``folder/bin/tritonserver``, and ``folder/backends`` with only Triton's Python backend.

    ``installed`` may be any unpacked wheel of nvidia-pytriton.
    """
    settings, numpy = server_environment(installed), runtime.ensure(print).stub_packages
    python = folder / "backends" / "python"
    shutil.copytree(installed.python_backend, python)
    if installed.stub.exists():  # the oldest wheels have a stub for an older Python instead
        shutil.copy(installed.stub, python)
    lines = [f"export {name}={quote(settings[name])}" for name in SET]
    if numpy is not None:  # the stub ignores PYTHONPATH, but searches the current folder first
        lines.append(f"cd {quote(str(numpy))} || exit 1")
    script = "\n".join(["#!/bin/sh", *lines, f'exec {quote(str(installed.tritonserver))} "$@"', ""])
    return write_program(folder / "bin" / "tritonserver", script)
