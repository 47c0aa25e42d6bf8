"""A probe of the speed of this machine, which tells how comparable measurements of different times are."""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from objectives.arrays import FloatArray
from objectives.metrics import Measurement
from optimizer.core.notes import SpeedVaried

SPEED_VARIATION_LIMIT = 1.25  # slowest over fastest probe; beyond it, measurements are not comparable
MAX_THREADS = 8  # each copies 16 MB arrays, which do not fit the caches
REST_SECONDS = 0.02  # pause before a probe, in which the previous load ends; none after another probe


class SpeedProbe:
    """Times computing and copying on all CPUs of this process at once, about 20 ms on a fast machine."""

    def __init__(self) -> None:
        threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(threads)
        self._work = [(np.full(1_000_000, 2.0), np.zeros(1_000_000)) for _ in range(threads)]
        self._ended = -math.inf

    def seconds(self) -> float:
        """Run the probe once and return its wall time."""
        if time.perf_counter() - self._ended > REST_SECONDS:
            time.sleep(REST_SECONDS)
        started = time.perf_counter()
        list(self._pool.map(_work, self._work))
        self._ended = time.perf_counter()
        return self._ended - started


def probe_speed(seconds: Callable[[], float]) -> float:
    """Return the seconds of the faster of two probes, so that a short disturbance does not count.

    ``seconds`` runs one probe and returns its time, see ``SpeedProbe``. The server is idle meanwhile.
    """
    return min(seconds() for _ in range(2))


def speed_note(measured: Iterable[Measurement]) -> SpeedVaried | None:
    """Return a note on the speed of the machine during all measurements; None if it varied by less than the limit.

    Each node of a cluster is compared with itself, and the note is on the one that varied most.
    """
    probes_ms = defaultdict[str, list[float]](list)
    for measurement in measured:
        if measurement.speed_probe_ms:
            probes_ms[measurement.node].append(measurement.speed_probe_ms)
    factor = max((max(probes) / min(probes) for probes in probes_ms.values()), default=1.0)
    return None if factor < SPEED_VARIATION_LIMIT else SpeedVaried(factor)


def _work(arrays: tuple[FloatArray, FloatArray]) -> None:
    source, target = arrays
    small = source[:20_000]
    for _ in range(200):
        np.sqrt(small, out=target[:20_000])
    for _ in range(8):
        np.copyto(target, source)
