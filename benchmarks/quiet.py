"""Whether the machine is quiet: what other processes use of it, and how fast it is at the moment."""

from __future__ import annotations

import time

import numpy as np

from optimizer.machine.cpu_time import Usage
from optimizer.machine.speed import SpeedProbe

__all__ = ["OTHERS_LIMIT", "Quiet", "Usage", "wait_for_quiet"]

OTHERS_LIMIT = 0.05  # of the CPUs' time: other processes, and what the hypervisor gave to other machines
PROBES = 20  # before the quickest is known
QUICKEST = 0.2  # quantile of all probes that counts as the machine at its quickest
PATIENCE_SECONDS = 20.0
PAUSE_SECONDS = 0.2


def wait_for_quiet() -> None:
    while True:
        before = Usage.now()
        time.sleep(0.3)
        if Usage.now().others_since(before) <= 2 * OTHERS_LIMIT:
            return
        time.sleep(2)


class Quiet:
    """Compares the time of a fixed piece of work with its quickest."""

    def __init__(self) -> None:
        self._probe = SpeedProbe()
        self._seconds: list[float] = []
        for _ in range(PROBES):
            self.slowdown()
            time.sleep(PAUSE_SECONDS / 4)

    def slowdown(self) -> float:
        """The time that the work takes now, as a multiple of the quickest."""
        self._seconds.append(self._probe.seconds())
        return self._seconds[-1] / float(np.quantile(self._seconds, QUICKEST))

    def wait(self, limit: float) -> float:
        """Wait for a moment no slower than ``limit``, but no longer than PATIENCE_SECONDS; how slow it is."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (slowdown := self.slowdown()) > limit and time.monotonic() < deadline:
            time.sleep(PAUSE_SECONDS)
        return slowdown
