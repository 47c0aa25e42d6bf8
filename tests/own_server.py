"""A tritonserver as a user has it: unpacked somewhere, started through a script that sets what it needs."""

from __future__ import annotations

import shutil
from pathlib import Path
from shlex import quote

from optimizer import runtime
from optimizer.deploy.installation import environment
from optimizer.runtime import Runtime

SET = ("LD_LIBRARY_PATH", "PATH")


def write_installation(folder: Path, installed: Runtime) -> Path:
    """``folder/bin/tritonserver``, and beside it ``backends`` with Triton's Python backend alone. ``installed`` may
    be any wheel of its kind that was unpacked."""
    settings, numpy = environment(installed), runtime.ensure(print).stub_packages
    python = folder / "backends" / "python"
    shutil.copytree(installed.python_backend, python)
    if installed.stub.exists():  # the oldest wheels have one of an older Python in its place
        shutil.copy(installed.stub, python)
    program = folder / "bin" / "tritonserver"
    program.parent.mkdir()
    lines = [f"export {name}={quote(settings[name])}" for name in SET]
    if numpy is not None:  # the stub ignores PYTHONPATH, but looks into the current folder first
        lines.append(f"cd {quote(str(numpy))} || exit 1")
    script = "\n".join(["#!/bin/sh", *lines, f'exec {quote(str(installed.tritonserver))} "$@"', ""])
    program.write_text(script)
    program.chmod(0o755)
    return program
