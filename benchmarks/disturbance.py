"""A process that takes one core for a part of the time, to measure on a shared machine."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from optimizer.core.process import SupervisedProcess

BUSY_SECONDS, IDLE_SECONDS = 0.1, 0.2  # a third of the time
PROGRAM = """\
import sys, time
busy, idle = map(float, sys.argv[1:])
while True:
    end = time.monotonic() + busy
    while time.monotonic() < end:
        pass
    time.sleep(idle)
"""


@contextlib.contextmanager
def disturbed(log: Path, *, on: bool = True) -> Iterator[None]:
    """Run the process within the context; nothing runs with ``on=False``. ``log`` gets its output."""
    if not on:
        yield
        return
    with SupervisedProcess([sys.executable, "-c", PROGRAM, str(BUSY_SECONDS), str(IDLE_SECONDS)], log=log):
        yield
