"""How fast the machine is at the moment, by the time that a fixed piece of work takes.

A virtual machine shares caches and memory with neighbours that it does not see: the same work can take twice as long
in one second as in the next although no other process runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

VARIED = 1.25  # slowest over quickest; measurements between which it lies cannot be compared
MOST_THREADS = 8  # each copies 16 MB to and fro: what the caches do not hold
REST_SECONDS = 0.02  # what was measured before comes to rest
Array = npt.NDArray[np.float64]


class SpeedProbe:
    """Computing and copying on every CPU of this process at once: about 40 ms where the machine is quick."""

    def __init__(self) -> None:
        threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(threads)
        self._work = [(np.full(1_000_000, 2.0), np.zeros(1_000_000)) for _ in range(threads)]

    def seconds(self) -> float:
        time.sleep(REST_SECONDS)
        started = time.perf_counter()
        list(self._pool.map(_work, self._work))
        return time.perf_counter() - started


@dataclass
class SpeedLog:
    """The machine's speed at the moments that were asked for, such as before and after each confirmation."""

    seconds: Callable[[], float] = field(default_factory=lambda: SpeedProbe().seconds)
    probes: list[float] = field(default_factory=list)

    def probe(self) -> None:
        """Takes 0.1 s. The quicker of two: a process that wakes for a moment is not the machine."""
        self.probes.append(min(self.seconds() for _ in range(2)))

    def variation(self) -> float:
        """The slowest probe as a multiple of the quickest; 1.0 before there are two."""
        return max(self.probes) / min(self.probes) if self.probes else 1.0

    def note(self) -> str:
        """What to tell the user; empty where the speed stayed the same."""
        variation = self.variation()
        if variation < VARIED:
            return ""
        return f"the machine's speed varied by a factor {variation:.1f} during the confirmation"


def _work(arrays: tuple[Array, Array]) -> None:
    source, target = arrays
    small = source[:20_000]
    for _ in range(400):
        np.sqrt(small, out=target[:20_000])
    for _ in range(16):
        np.copyto(target, source)
