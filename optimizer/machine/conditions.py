"""The conditions of this machine: its state for ``run.json``, and a probe of its speed.

The probe tells how comparable measurements of different times are.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import numpy as np

from objectives.arrays import FloatArray
from objectives.metrics import Measurement
from optimizer.core.notes import SpeedVaried
from optimizer.machine.cpus import cpu_quota, read_kernel_file
from optimizer.options.values import format_cpus, usable_cpus

ConditionValue: TypeAlias = float | int | str | bool | list[float] | None
MAX_CPUS_READ = 16  # reading the frequency of a CPU can interrupt it


def machine_conditions(root: Path = Path("/")) -> dict[str, ConditionValue]:
    """Return the conditions of this machine, for ``run.json``. Takes about 1 ms.

    They are the load averages (1, 5, 15 min), frequencies (MHz, means over CPUs), thermal throttling (events since
    boot), the CPU quota (CPUs), and whether this is a virtual machine. None means unknown, or no quota. ``root`` is
    the folder that holds ``proc`` and ``sys``.
    """
    usable = sorted(usable_cpus())
    system = root / "sys/devices/system/cpu"
    folders = [system / f"cpu{cpu}" for cpu in usable[:: -(-len(usable) // MAX_CPUS_READ)]]
    frequency = [folder / "cpufreq" for folder in folders]
    governors = {read_kernel_file(folder / "scaling_governor") for folder in frequency}
    processor = read_kernel_file(root / "proc/cpuinfo", limit=8192)
    return {
        "load_average": [float(word) for word in read_kernel_file(root / "proc/loadavg").split()[:3]] or None,
        "cpus": format_cpus(usable),
        "cpu_quota": cpu_quota(root),
        "cpu_governor": " ".join(sorted(governors - {""})) or None,
        "cpu_mhz": _mean_mhz(folder / "scaling_cur_freq" for folder in frequency) or _nominal_mhz(processor),
        "cpu_max_mhz": _mean_mhz(folder / "cpuinfo_max_freq" for folder in frequency),
        "core_throttle_count": _sum_of_files(folder / "thermal_throttle/core_throttle_count" for folder in folders),
        "package_throttle_count": _sum_of_files(
            folder / "thermal_throttle/package_throttle_count" for folder in folders[:1]
        ),
        "virtual_machine": ("hypervisor" in processor.split()) if "flags" in processor else None,
    }


def _mean_mhz(paths: Iterable[Path]) -> float | None:
    kilohertz = _read_numbers(paths)
    return round(statistics.fmean(kilohertz) / 1000) if kilohertz else None


def _nominal_mhz(processor: str) -> float | None:
    """Return the frequency of the first CPU in /proc/cpuinfo; in a virtual machine that is the nominal frequency."""
    values = [line.partition(":")[2] for line in processor.splitlines() if line.startswith("cpu MHz")]
    return round(float(values[0])) if values else None


def _sum_of_files(paths: Iterable[Path]) -> int | None:
    counts = _read_numbers(paths)
    return round(sum(counts)) if counts else None


def _read_numbers(paths: Iterable[Path]) -> list[float]:
    return [float(text) for text in map(read_kernel_file, paths) if text.isdecimal()]


# -- a probe of the speed ------------------------------------------------------------------------------------------

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
