"""Where the CPUs' time goes: to this run, to others, to nobody."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")  # a second
_BUSY = (0, 1, 2, 7)  # of a line in /proc/stat: user, nice, system, steal
_TOTAL = range(8)  # and idle, iowait, irq, softirq; what a guest took is in user already


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds since boot: of some CPUs, of them taken by processes or by other machines on the same host, and
    those of this run's processes, wherever they ran.

    Interrupts are nobody's: most are the load's own network, and kernels differ in whom they charge for them.
    """

    total: float
    taken: float
    own: float

    @classmethod
    def now(cls, cpus: Iterable[int] | None = None, server_pid: int | None = None) -> Usage:
        """``cpus``: those of this process by default. This process and ``server_pid`` are the run's, and all below
        them: what has ended there was charged to its parent."""
        names = {f"cpu{cpu}" for cpu in (os.sched_getaffinity(0) if cpus is None else cpus)}
        words = [line.split() for line in _read("/proc/stat").splitlines() if line.startswith("cpu")]
        times = [[int(word) for word in line[1:]] for line in words if line[0] in names]
        own = process_tree(os.getpid(), *([] if server_pid is None else [server_pid]))
        return cls(
            total=sum(line[i] for line in times for i in _TOTAL) / _TICKS,
            taken=sum(line[i] for line in times for i in _BUSY) / _TICKS,
            own=sum(_process_ticks(pid) for pid in own) / _TICKS,
        )

    def others_since(self, before: Usage) -> float:
        """The share of the CPUs' time that went to others, 0 to 1; NaN where the kernel does not tell."""
        total = self.total - before.total
        if total <= 0:
            return math.nan
        return min(1.0, max(0.0, (self.taken - before.taken - (self.own - before.own)) / total))


def process_tree(*pids: int) -> set[int]:
    """The processes and all below them."""
    known = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists()  # a kernel can be built without
    return tree_by_children(pids) if known else tree_by_parents(pids)


def tree_by_children(pids: Iterable[int]) -> set[int]:
    """Costs 50 µs a thread of these processes, whatever else runs on the machine."""
    found: set[int] = set()
    new = set(pids)
    while new:
        found |= new
        new = {child for pid in new for child in _children(pid)} - found
    return found


def tree_by_parents(pids: Iterable[int]) -> set[int]:
    """Costs 30 µs a process of the machine."""
    import psutil

    found = set(pids)
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            found |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
    return found


def _children(pid: int) -> set[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208  Path.iterdir takes three times as long
    except OSError:  # it has ended
        return set()
    return {int(child) for thread in threads for child in _read(f"/proc/{pid}/task/{thread}/children").split()}


def _process_ticks(pid: int) -> int:
    """Of a process, the threads that have ended and the children that it has waited for included."""
    after_name = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return sum(int(word) for word in after_name[11:15])  # utime, stime, cutime, cstime


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
