"""Detection of a quiet machine: the CPU use of other processes, and the current speed."""

from __future__ import annotations

import time

import numpy as np

from optimizer.machine.cpu_usage import CpuUsage
from optimizer.machine.speed_probe import SpeedProbe

__all__ = ["OTHERS_LIMIT", "CpuUsage", "SlowdownMeter", "wait_for_quiet"]

OTHERS_LIMIT = 0.05  # share of the CPUs' time for other processes and other virtual machines
PROBES = 20  # number of probes before the shortest time is known
QUICKEST = 0.2  # quantile of all probes that counts as the shortest time
PATIENCE_SECONDS = 20.0
PAUSE_SECONDS = 0.2


def wait_for_quiet() -> None:
    """Return when other processes take little of the CPUs' time."""
    while True:
        before = CpuUsage.now()
        time.sleep(0.3)
        if CpuUsage.now().others_since(before) <= 2 * OTHERS_LIMIT:
            return
        time.sleep(2)


class SlowdownMeter:
    """Compares the time of a fixed piece of work with its shortest time so far."""

    def __init__(self) -> None:
        self._probe = SpeedProbe()
        self._seconds: list[float] = []
        for _ in range(PROBES):
            self.slowdown()
            time.sleep(PAUSE_SECONDS / 4)

    def slowdown(self) -> float:
        """Return the current time of the work relative to the shortest one."""
        self._seconds.append(self._probe.seconds())
        return self._seconds[-1] / float(np.quantile(self._seconds, QUICKEST))

    def wait(self, limit: float) -> float:
        """Wait until the slowdown is at most ``limit``, but no longer than PATIENCE_SECONDS, and return it."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (slowdown := self.slowdown()) > limit and time.monotonic() < deadline:
            time.sleep(PAUSE_SECONDS)
        return slowdown
