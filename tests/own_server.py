"""A tritonserver as a user has it: unpacked somewhere, started through a script that sets what it needs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from shlex import quote

from optimizer import runtime
from optimizer.deploy.installation import environment
from optimizer.runtime import Runtime

SET = ("LD_LIBRARY_PATH", "PYTHONPATH", "PATH")


def write_installation(folder: Path, installed: Runtime) -> Path:
    """``folder/bin/tritonserver``, and beside it ``backends`` with Triton's Python backend alone. ``installed`` may
    be any wheel of its kind that was unpacked."""
    settings = environment(installed)
    own = runtime.ensure(print).stub_packages
    if own is not None:
        settings["PYTHONPATH"] = f"{own}{os.pathsep}{settings['PYTHONPATH']}"
    python = folder / "backends" / "python"
    shutil.copytree(installed.python_backend, python)
    if installed.stub.exists():  # the oldest wheels have one of an older Python in its place
        shutil.copy(installed.stub, python)
    program = folder / "bin" / "tritonserver"
    program.parent.mkdir()
    exports = "".join(f"export {name}={quote(settings[name])}\n" for name in SET)
    program.write_text(f'#!/bin/sh\n{exports}exec {quote(str(installed.tritonserver))} "$@"\n')
    program.chmod(0o755)
    return program
