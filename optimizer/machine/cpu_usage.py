"""The CPU time that this run and others used, and whether others disturbed a measurement."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from objectives.metrics import Measurement
from optimizer.machine.cpus import read_kernel_file

_TICKS = os.sysconf("SC_CLK_TCK")  # per second
_BUSY = (0, 1, 2, 7)  # columns of a line in /proc/stat: user, nice, system, steal
MAX_READINGS = 3  # attempts to read a tree of processes, until none of them ends meanwhile
_TOTAL = range(8)  # and idle, iowait, irq, softirq; guest time is part of user


@dataclass(frozen=True, slots=True)
class CpuUsage:
    """CPU times since boot.

    Interrupts count for no process: most of them are network traffic of the load itself, and kernels charge them to
    different processes.

    Attributes:
        total_seconds: CPU time of the observed CPUs, including idle time.
        busy_seconds: CPU time of the observed CPUs that processes or other virtual machines (steal) used.
        run_seconds: CPU time of this run's processes on any CPU.
    """

    total_seconds: float
    busy_seconds: float
    run_seconds: float

    @classmethod
    def now(cls, cpus: Iterable[int] | None = None, *pids: int) -> CpuUsage:
        """Return the usage of ``cpus`` (by default those of this process) until now.

        The run's processes are this process, ``pids`` and their descendants. The time of an ended process is
        that of its parent.
        """
        run_seconds = _tree_seconds(os.getpid(), *pids)
        names = {f"cpu{cpu}" for cpu in (os.sched_getaffinity(0) if cpus is None else cpus)}
        rows = [line.split() for line in read_kernel_file("/proc/stat").splitlines() if line.startswith("cpu")]
        ticks = [[int(number) for number in row[1:]] for row in rows if row[0] in names]
        return cls(
            total_seconds=sum(row[column] for row in ticks for column in _TOTAL) / _TICKS,
            busy_seconds=sum(row[column] for row in ticks for column in _BUSY) / _TICKS,
            run_seconds=run_seconds,
        )

    def others_since(self, before: CpuUsage) -> float:
        """Return the share of the CPU time since ``before`` that others took, 0 to 1; nan if it is unknown."""
        total_seconds = self.total_seconds - before.total_seconds
        return min(1.0, max(0.0, self.other_seconds_since(before) / total_seconds)) if total_seconds > 0 else math.nan

    def other_seconds_since(self, before: CpuUsage) -> float:
        """Return the CPU time that others took since ``before``."""
        return self.busy_seconds - before.busy_seconds - (self.run_seconds - before.run_seconds)


def _tree_seconds(*pids: int) -> float:
    """Return the CPU time of the processes and all their descendants.

    If one of them ends and its parent waits for it between two readings, its time would be in both or in neither.
    Then all are read again.
    """
    ticks = 0
    for _ in range(MAX_READINGS):
        tree = process_tree(*pids)
        ticks = sum(map(_process_ticks, tree))
        if all(Path(f"/proc/{pid}").exists() for pid in tree):
            break
    return ticks / _TICKS


def process_tree(*pids: int) -> set[int]:
    """Return the processes and all their descendants."""
    has_children_file = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists()  # a kernel option
    return tree_by_children(pids) if has_children_file else tree_by_parents(pids)


def tree_by_children(pids: Iterable[int]) -> set[int]:
    """Return the process tree from /proc/PID/task/TID/children. Takes 13 µs for each thread of the tree."""
    tree: set[int] = set()
    new = set(pids)
    while new:
        tree |= new
        new = {child for pid in new for child in _children(pid)} - tree
    return tree


def tree_by_parents(pids: Iterable[int]) -> set[int]:
    """Return the process tree from the parent IDs. Takes 30 µs for each process of the machine."""
    import psutil

    parents = {process.pid: process.info["ppid"] for process in psutil.process_iter(["ppid"])}
    tree: set[int] = set()
    new = set(pids)
    while new:
        tree |= new
        new = {pid for pid, parent in parents.items() if parent in new} - tree
    return tree


def _children(pid: int) -> set[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208  Path.iterdir takes three times as long
    except OSError:  # it has ended
        return set()
    texts = (read_kernel_file(f"/proc/{pid}/task/{thread}/children") for thread in threads)
    return {int(child) for text in texts for child in text.split()}


def _process_ticks(pid: int) -> int:
    """Return the CPU ticks of a process, including its ended threads and the children that it waited for."""
    after_name = read_kernel_file(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return sum(int(word) for word in after_name[11:15])  # utime, stime, cutime, cstime


DISTURBANCE_LIMIT = 0.10  # share of the CPU time that others may take without disturbing a measurement


def lost_cpu_to_others(measurement: Measurement, limit: float = DISTURBANCE_LIMIT) -> bool:
    """Return whether other processes or machines took more than ``limit`` of the CPU time; False if unknown."""
    return measurement.other_cpu_share is not None and measurement.other_cpu_share > limit


def describe_disturbance(measurement: Measurement, limit: float = DISTURBANCE_LIMIT) -> str:
    """Return a sentence about what disturbed the measurement; empty if nothing did or it is unknown."""
    if not lost_cpu_to_others(measurement, limit):
        return ""
    share = measurement.other_cpu_share or 0.0
    return f"other processes or machines took {100 * share:.0f} % of the CPUs while this was measured"
