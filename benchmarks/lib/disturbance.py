"""Other programs that take one core for a part of the time, as on a shared machine."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from optimizer.core.process import SupervisedProcess

BURST_SECONDS = (1.0, 8.0)  # time for which other programs take a core at once
BURST_FACTOR = 1.5  # the slowness of a measurement window that they fill
PROGRAM = """\
import random, sys, time
shortest, longest, busy_share = map(float, sys.argv[1:])
chooser = random.Random(0)
while True:
    end = time.monotonic() + chooser.uniform(shortest, longest)
    while time.monotonic() < end:
        pass
    time.sleep(chooser.uniform(shortest, longest) * (1 / busy_share - 1))
"""


@dataclass(frozen=True)
class Disturbance:
    """A core is taken for ``shortest_seconds`` to ``longest_seconds`` at once, and ``busy_share`` of the time."""

    shortest_seconds: float
    longest_seconds: float
    busy_share: float


REGULAR = Disturbance(0.1, 0.1, 1 / 3)
IRREGULAR = Disturbance(*BURST_SECONDS, 1 / 2)


@contextlib.contextmanager
def disturbed(log: Path, disturbance: Disturbance | None) -> Iterator[None]:
    """Run the process within the context; nothing runs with None. ``log`` gets its output."""
    if disturbance is None:
        yield
        return
    seconds = (disturbance.shortest_seconds, disturbance.longest_seconds)
    words = [str(value) for value in (*seconds, disturbance.busy_share)]
    with SupervisedProcess([sys.executable, "-c", PROGRAM, *words], log=log):
        yield
