"""CPUs: lists of them, what this process may use, and which the server and the load generator get of that."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path, PurePosixPath

MOST_CPUS = 8192  # the kernel's NR_CPUS
LEAST_CPUS, LEAST_CORES = 4, 3  # with fewer cores the load generator would take half of them from the server
CLIENT_SHARE, CLIENT_MOST = 1 / 4, 4  # of the CPUs
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?")


def parse(text: str, among: frozenset[int] | None = None) -> frozenset[int]:
    """``0-3,8``, ``0-6:2``: CPUs as taskset and cpuset take them; at least one. Raises ValueError in one line,
    also where one is not ``among`` those that can be used."""
    found: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError("write CPU numbers and ranges, such as 0-3 or 0-3,8")
        first = int(match[1])
        last, step = int(match[2] or first), int(match[3] or 1)
        if last < first or step < 1:
            raise ValueError(f"{part.strip()} holds no CPU; write a range upwards, such as 0-3")
        if last >= MOST_CPUS:
            raise ValueError(f"Linux has no CPU {last}; the last can be {MOST_CPUS - 1}")
        found.update(range(first, last + 1, step))
    if among is not None and found - among:
        raise ValueError(f"CPU {show(found - among)} is not among those that can be used here, {show(among)}")
    return frozenset(found)


def show(cpus: Iterable[int]) -> str:
    """The shortest text that ``parse`` reads as ``cpus``: ``0-3,8``."""
    ordered = sorted(set(cpus))
    runs = groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0])  # equal along consecutive numbers
    ends = [(run[0][1], run[-1][1]) for run in (list(pairs) for _, pairs in runs)]
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ends)


def available() -> frozenset[int]:
    """Those that this process may run on."""
    return frozenset(os.sched_getaffinity(0))


def quota(root: Path = Path("/")) -> float | None:
    """How many CPUs' time this process's control groups allow it and what runs with it; None is no limit."""
    limits = [_limit(group) for group in _control_groups(root)]
    return min((limit for limit in limits if limit is not None), default=None)


# -- the machine ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Topology:
    """The CPUs that can be used, by physical core and by NUMA node, each in the order of its first CPU."""

    cores: tuple[frozenset[int], ...]
    nodes: tuple[frozenset[int], ...]

    @property
    def cpus(self) -> frozenset[int]:
        return frozenset().union(*self.cores)


def topology(cpus: frozenset[int], root: Path = Path("/")) -> Topology:
    """As the kernel tells it. A CPU of which it tells nothing is a core; those of no known node are one node."""
    system = root / "sys/devices/system"
    cores = {_listed(system / f"cpu/cpu{cpu}/topology/thread_siblings_list") & cpus | {cpu} for cpu in cpus}
    nodes = {_listed(path) & cpus for path in system.glob("node/node[0-9]*/cpulist")}
    rest = cpus.difference(*nodes)
    return Topology(tuple(sorted(cores, key=min)), tuple(sorted((nodes | {rest}) - {frozenset()}, key=min)))


# -- who runs where ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placement:
    """The CPUs of the server and those of the load generator; ``note`` tells the user."""

    server: frozenset[int]
    client: frozenset[int]
    note: str


def place(
    machine: Topology,
    quota: float | None = None,
    *,
    server: frozenset[int] | None = None,
    client: frozenset[int] | None = None,
) -> Placement:
    """As asked for. Who is not asked for gets what is left of the machine, else all; both none: ``split``."""
    if server is None and client is None:
        return split(machine, quota)
    server = server or machine.cpus - (client or frozenset()) or machine.cpus
    client = client or machine.cpus - server or machine.cpus
    if common := server & client:
        return Placement(server, client, f"server and load generator share {_cpus(common)}")
    return _apart(server, client)


def split(machine: Topology, quota: float | None = None) -> Placement:
    """Server and load generator on physical cores of their own, where there are enough; else both on all.

    The load generator's cores lie on one NUMA node where possible: the smallest that has room, so that the
    server keeps the others whole.
    """
    cpus = machine.cpus
    if quota is not None and quota < len(cpus):
        # whoever uses it up stops both, wherever they run
        return Placement(cpus, cpus, f"a quota of {quota:g} CPUs: server and load generator share it")
    if len(cpus) < LEAST_CPUS or len(machine.cores) < LEAST_CORES:
        cores = "" if len(machine.cores) == len(cpus) else f" on {_count(len(machine.cores), 'core')}"
        them = "them" if len(cpus) > 1 else "it"
        return Placement(cpus, cpus, f"{_count(len(cpus), 'CPU')}{cores}: server and load generator share {them}")
    wanted = min(CLIENT_MOST, int(len(cpus) * CLIENT_SHARE))
    roomy = [node for node in reversed(machine.nodes) if len(node) >= wanted]
    node = min(roomy, key=len, default=cpus)
    client: frozenset[int] = frozenset()
    for core in reversed(machine.cores):
        if core <= node and (not client or len(client | core) <= wanted):
            client |= core
    return _apart(cpus - client, client)


def _apart(server: frozenset[int], client: frozenset[int]) -> Placement:
    return Placement(server, client, f"the server runs on {_cpus(server)}, the load generator on {_cpus(client)}")


def _cpus(cpus: frozenset[int]) -> str:
    return f"CPU{'s' if len(cpus) > 1 else ''} {show(cpus)}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"


# -- what the kernel tells --------------------------------------------------------------------------------------


def _listed(path: Path) -> frozenset[int]:
    try:
        return parse(_read(path))
    except ValueError:
        return frozenset()


def _control_groups(root: Path) -> Iterator[Path]:
    """The folders of this process's group for CPU time, and of all groups above it, in version 1 and 2."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            group = PurePosixPath(path)
            for above in (group, *group.parents):
                yield root / "sys/fs/cgroup" / ("cpu" if controllers else "") / above.relative_to("/")


def _limit(group: Path) -> float | None:
    text = _read(group / "cpu.max") or _read(group / "cpu.cfs_quota_us") + " " + _read(group / "cpu.cfs_period_us")
    try:
        microseconds, period = (float(word) for word in text.split())
    except ValueError:  # "max 100000", or nothing at all
        return None
    return microseconds / period if microseconds > 0 and period > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
