"""CPUs of a node that one process has for itself: no other worker of this user, of whichever run, gets them.

Ray counts CPUs and does not say which. A lock file stands for each; the kernel drops them with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from optimizer.machine.cpus import Topology

WAIT_SECONDS = 10.0  # for a worker that is about to end
_AGAIN_SECONDS = 0.1


class HeldCpus:
    """``cpus`` as long as this lives."""

    def __init__(self, cpus: frozenset[int], locks: list[TextIO]) -> None:
        self.cpus = cpus
        self._locks = locks

    def release(self) -> None:
        for lock in self._locks:
            lock.close()


def lock_folder() -> Path:
    """Of this user on this machine."""
    return Path(tempfile.gettempdir()) / f"tritune_cpus_{os.getuid()}"


def hold(count: int, machine: Topology, folder: Path, wait_seconds: float = WAIT_SECONDS) -> HeldCpus | None:
    """``count`` CPUs that nobody holds, whole cores on one NUMA node where possible. None where there are too few.
    Raises OSError where ``folder`` cannot be written."""
    folder.mkdir(mode=0o700, exist_ok=True)
    deadline = time.monotonic() + wait_seconds
    while True:
        if found := _hold(count, machine, folder):
            return found
        if len(machine.cpus) < count or time.monotonic() > deadline:
            return None
        time.sleep(_AGAIN_SECONDS)


def pin(cpus: frozenset[int]) -> None:
    """Run this process, all its threads and what it will start on ``cpus``."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), cpus)


def _hold(count: int, machine: Topology, folder: Path) -> HeldCpus | None:
    with (folder / "choosing").open("a") as choosing, contextlib.ExitStack() as undo:
        fcntl.flock(choosing, fcntl.LOCK_EX)
        free: dict[int, TextIO] = {}
        for cpu in machine.cpus:
            lock = undo.enter_context((folder / str(cpu)).open("a"))
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                free[cpu] = lock
        chosen = _chosen(count, machine, frozenset(free))
        if chosen is None:
            return None
        undo.pop_all()
        for cpu in machine.cpus - chosen:
            if cpu in free:
                free[cpu].close()
        return HeldCpus(chosen, [free[cpu] for cpu in chosen])


def _chosen(count: int, machine: Topology, free: frozenset[int]) -> frozenset[int] | None:
    """Whole cores first, on the NUMA node that has the fewest to spare, else on any."""
    if len(free) < count:
        return None
    roomy = [node & free for node in machine.nodes if len(node & free) >= count]
    among = min(roomy, key=len, default=free)
    ordered = [cpu for core in _whole_first(machine, among) for cpu in sorted(core)]
    return frozenset(ordered[:count])


def _whole_first(machine: Topology, among: frozenset[int]) -> Iterator[frozenset[int]]:
    cores = [core & among for core in machine.cores if core & among]
    return iter(sorted(cores, key=lambda core: not any(core == whole for whole in machine.cores)))
