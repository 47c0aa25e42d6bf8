"""Whether the machine is quiet: what other processes use of it, and how fast it is at the moment.

A virtual machine shares caches and memory with neighbours that it does not see: the same work takes twice as long
in one second as in the next although no other process runs. So both are looked at.
"""

from __future__ import annotations

import contextlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import psutil

OTHERS_LIMIT = 0.05  # of the cores' time: other processes, and what the hypervisor gave to other machines
PROBES = 20  # before the quickest is known
QUICKEST = 0.2  # quantile of all probes that counts as the machine at its quickest
PATIENCE_SECONDS = 20.0
PAUSE_SECONDS = 0.2


@dataclass(frozen=True)
class Usage:
    """CPU seconds since boot: of all cores, of them busy or stolen, and of this process and its descendants."""

    total: float
    busy: float
    own: float

    @classmethod
    def now(cls) -> Usage:
        times = psutil.cpu_times()
        busy = times.user + times.nice + times.system + times.irq + times.softirq + times.steal
        me = psutil.Process()
        own = 0.0
        for process in [me, *me.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                used = process.cpu_times()
                own += used.user + used.system + used.children_user + used.children_system
        return cls(busy + times.idle + times.iowait, busy, own)

    def others_since(self, before: Usage) -> float:
        """The share of the cores' time that went elsewhere."""
        return (self.busy - before.busy - (self.own - before.own)) / max(self.total - before.total, 1e-9)


def wait_for_quiet() -> None:
    while True:
        before = Usage.now()
        time.sleep(0.3)
        if Usage.now().others_since(before) <= 2 * OTHERS_LIMIT:
            return
        time.sleep(2)


class Quiet:
    """Compares the time of a fixed piece of work (computing and copying on every core, 40 ms) with its quickest."""

    def __init__(self) -> None:
        cores = len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(cores)
        self._work = [(np.full(2_000_000, 2.0), np.empty(2_000_000)) for _ in range(cores)]
        self._seconds: list[float] = []
        for _ in range(PROBES):
            self.slowdown()
            time.sleep(PAUSE_SECONDS / 4)

    def slowdown(self) -> float:
        """The time that the work takes now, as a multiple of the quickest."""
        time.sleep(0.02)  # what was measured before comes to rest
        started = time.perf_counter()
        list(self._pool.map(_work, self._work))
        self._seconds.append(time.perf_counter() - started)
        return self._seconds[-1] / float(np.quantile(self._seconds, QUICKEST))

    def wait(self, limit: float) -> float:
        """Wait for a moment no slower than ``limit``, but no longer than PATIENCE_SECONDS; how slow it is."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (slowdown := self.slowdown()) > limit and time.monotonic() < deadline:
            time.sleep(PAUSE_SECONDS)
        return slowdown


def _work(arrays: tuple[np.ndarray, np.ndarray]) -> None:
    source, target = arrays
    small = source[:20_000]
    for _ in range(400):
        np.sqrt(small, out=target[:20_000])
    for _ in range(8):
        np.copyto(target, source)
