"""The share of a node that a trial gets: how much, and which CPUs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from optimizer.core.errors import EnvironmentFault
from optimizer.machine.cpus import CpuTopology


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node of the cluster with its id in Ray and the CPUs and GPUs that Ray counts on it, used or not."""

    id: str
    host: str
    cpus: int
    gpus: int


@dataclass(frozen=True, slots=True)
class TrialShare:
    """How many CPUs and GPUs each trial gets."""

    cpus: int
    gpus: int

    def count_on(self, node: ClusterNode) -> int:
        """Return how many trials fit on ``node``."""
        count = node.cpus // self.cpus
        return min(count, node.gpus // self.gpus) if self.gpus else count

    def __str__(self) -> str:
        cpus = f"{self.cpus} CPU{'s' if self.cpus > 1 else ''}"
        return f"1 GPU and {cpus}" if self.gpus else cpus


def read_nodes(ray_nodes: Sequence[Mapping[str, Any]]) -> list[ClusterNode]:
    """Return the nodes in ``ray.nodes()`` that are alive and have CPUs."""
    nodes = []
    for entry in ray_nodes:
        resources = entry.get("Resources") or {}
        host = str(entry.get("NodeManagerHostname") or entry.get("NodeManagerAddress"))
        node = ClusterNode(str(entry["NodeID"]), host, int(resources.get("CPU", 0)), int(resources.get("GPU", 0)))
        if entry["Alive"] and node.cpus:
            nodes.append(node)
    return nodes


def share_of(nodes: Sequence[ClusterNode], cpus: int | None) -> TrialShare:
    """Return the share of one trial.

    With ``cpus`` it is these CPUs without a GPU. Otherwise it is one GPU and its part of the CPUs if there are GPUs,
    else all CPUs of the smallest node. Raises EnvironmentFault if no node has that.
    """
    if not nodes:
        raise EnvironmentFault("--cluster: no node of the cluster has CPUs; see `ray status`")
    if cpus is not None:
        largest = max(node.cpus for node in nodes)
        if largest < cpus:
            raise EnvironmentFault(
                f"--cluster-cpus {cpus}: the largest node of the cluster has {largest}; ask for less"
            )
        return TrialShare(cpus, 0)
    with_gpus = [node for node in nodes if node.gpus]
    if with_gpus:
        return TrialShare(max(1, min(node.cpus // node.gpus for node in with_gpus)), 1)
    return TrialShare(min(node.cpus for node in nodes), 0)


WAIT_SECONDS = 10.0  # for the CPUs of a worker that is about to end
_POLL_SECONDS = 0.1


HeldCpus = Mapping[int, TextIO]  # reserved CPUs with their lock files, which the kernel releases with the process


def lock_folder() -> Path:
    """Return the folder of the locks, one for each user and machine."""
    return Path(tempfile.gettempdir()) / f"tritune_cpus_{os.getuid()}"


def hold_cpus(count: int, machine: CpuTopology, folder: Path, wait_seconds: float = WAIT_SECONDS) -> HeldCpus | None:
    """Reserve ``count`` free CPUs, whole cores on one NUMA node if possible. Return None if there are too few.

    They stay reserved until their files are closed. Raises OSError if ``folder`` cannot be written.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    deadline = time.monotonic() + wait_seconds
    while True:
        if held := _try_to_hold(count, machine, folder):
            return held
        if len(machine.cpus) < count or time.monotonic() > deadline:
            return None
        time.sleep(_POLL_SECONDS)


def pin(cpus: frozenset[int]) -> None:
    """Run this process, all its threads and its future children on ``cpus``."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(thread.name), cpus)


def _try_to_hold(count: int, machine: CpuTopology, folder: Path) -> HeldCpus | None:
    """Return the locks of ``count`` CPUs; None if too few are free. One process at a time chooses."""
    with (folder / "choosing").open("a") as choosing, contextlib.ExitStack() as undo:
        fcntl.flock(choosing, fcntl.LOCK_EX)
        free: dict[int, TextIO] = {}
        for cpu in machine.cpus:
            lock = undo.enter_context((folder / str(cpu)).open("a"))
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                free[cpu] = lock
        chosen = _choose_cpus(count, machine, frozenset(free))
        if chosen is None:
            return None
        undo.pop_all()
        for cpu in machine.cpus - chosen:
            if cpu in free:
                free[cpu].close()
        return {cpu: free[cpu] for cpu in chosen}


def _choose_cpus(count: int, machine: CpuTopology, free: frozenset[int]) -> frozenset[int] | None:
    """Return ``count`` of the ``free`` CPUs: whole cores first, on one NUMA node if possible.

    The node that then has the fewest free CPUs is preferred.
    """
    if len(free) < count:
        return None
    sufficient_nodes = [node & free for node in machine.nodes if len(node & free) >= count]
    preferred = min(sufficient_nodes, key=len, default=free)
    cores = sorted((core & preferred for core in machine.cores), key=lambda core: core not in machine.cores)
    return frozenset([cpu for core in cores for cpu in sorted(core)][:count])
