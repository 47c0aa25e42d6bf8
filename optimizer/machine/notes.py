"""What the machine was like when a run was made: notes for whoever wonders later about its figures."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from optimizer.machine import cpus

Note: TypeAlias = float | int | str | bool | list[float] | None
MOST_CPUS_READ = 16  # reading a CPU's frequency can interrupt it


def machine_notes(root: Path = Path("/")) -> dict[str, Note]:
    """Load averages (1, 5, 15 min), frequencies (MHz, means over CPUs), thermal throttling (events since boot), CPU
    quota (CPUs), whether this is a virtual machine. None is unknown, for the quota: none is set. Takes 1 ms."""
    usable = sorted(cpus.available())
    system = root / "sys/devices/system/cpu"
    folders = [system / f"cpu{cpu}" for cpu in usable[:: -(-len(usable) // MOST_CPUS_READ)]]
    frequency = [folder / "cpufreq" for folder in folders]
    processor = _read(root / "proc/cpuinfo", limit=8192)
    return {
        "load_average": [float(word) for word in _read(root / "proc/loadavg").split()[:3]] or None,
        "cpus": cpus.show(usable),
        "cpu_quota": cpus.quota(root),
        "cpu_governor": " ".join(sorted({_read(folder / "scaling_governor") for folder in frequency} - {""})) or None,
        "cpu_mhz": _mean_mhz(folder / "scaling_cur_freq" for folder in frequency) or _nominal_mhz(processor),
        "cpu_max_mhz": _mean_mhz(folder / "cpuinfo_max_freq" for folder in frequency),
        "core_throttle_count": _sum(folder / "thermal_throttle/core_throttle_count" for folder in folders),
        "package_throttle_count": _sum(folder / "thermal_throttle/package_throttle_count" for folder in folders[:1]),
        "virtual_machine": ("hypervisor" in processor.split()) if "flags" in processor else None,
    }


def _mean_mhz(paths: Iterable[Path]) -> float | None:
    kilohertz = _numbers(paths)
    return round(statistics.fmean(kilohertz) / 1000) if kilohertz else None


def _nominal_mhz(processor: str) -> float | None:
    """What /proc/cpuinfo says of the first CPU; in a virtual machine that is what it was sold as."""
    told = [line.partition(":")[2] for line in processor.splitlines() if line.startswith("cpu MHz")]
    return round(float(told[0])) if told else None


def _sum(paths: Iterable[Path]) -> int | None:
    counts = _numbers(paths)
    return round(sum(counts)) if counts else None


def _numbers(paths: Iterable[Path]) -> list[float]:
    return [float(text) for text in map(_read, paths) if text.isdecimal()]


def _read(path: Path, limit: int = 4096) -> str:
    """The first ``limit`` bytes: the kernel writes no more of a file than is read."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return ""
    try:
        return os.read(descriptor, limit).decode(errors="replace").strip()
    except OSError:
        return ""
    finally:
        os.close(descriptor)
