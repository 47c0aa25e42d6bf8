"""A process that other runs see as a run that measures on this machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

PROGRAM = """\
import os, sys
from pathlib import Path
from optimizer.core.measuring_runs import mark_measuring
os.setuid(int(sys.argv[3]))
with mark_measuring(Path(sys.argv[1]), sys.argv[2]):
    print(flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def measuring(folder: str, study: str = "", user: int | None = None) -> Iterator[int]:
    """Yield the id of a process that measures for the run in ``folder``; kill it at the end."""
    command = [sys.executable, "-c", PROGRAM, folder, study, str(os.getuid() if user is None else user)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        yield process.pid
        process.kill()
