"""The conditions of this machine for ``run.json``: load, frequencies, throttling, quota of CPUs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

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
