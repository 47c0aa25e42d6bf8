"""The CPU topology, the limits of the control groups, and the division of CPUs between load generator and servers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath

from optimizer.core.notes import Note, SeparateCpus, SharedCpus, SharedMachine, SharedQuota
from optimizer.options.values import format_cpus, parse_cpus

# with fewer cores, the load generator would take half of them from the server
MIN_CPUS_TO_SPLIT, MIN_CORES_TO_SPLIT = 4, 3
CLIENT_SHARE, MAX_CLIENT_CPUS = 1 / 4, 4  # share and largest number of the load generator's CPUs


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the CPU quota of this process's control groups, in CPUs; None if there is none."""
    limits = [_cpu_limit(group) for group in _control_groups(root, "cpu")]
    return min((limit for limit in limits if limit is not None), default=None)


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """Return the memory limit of this process's control groups; None if there is none.

    Version 1 has a number near 2^63 for no limit, so the result can be above the memory of the machine.
    """
    groups = _control_groups(root, "memory")
    texts = (read_kernel_file(group / name) for group in groups for name in ("memory.max", "memory.limit_in_bytes"))
    return min((int(text) for text in texts if text.isdecimal()), default=None)


# -- topology ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CpuTopology:
    """The usable CPUs by physical core and by NUMA node, each ordered by its first CPU."""

    cores: tuple[frozenset[int], ...]
    nodes: tuple[frozenset[int], ...]

    @property
    def cpus(self) -> frozenset[int]:
        """All usable CPUs."""
        return frozenset().union(*self.cores)


def read_topology(cpus: frozenset[int], root: Path = Path("/")) -> CpuTopology:
    """Return the topology of ``cpus`` from sysfs below ``root``.

    A CPU without information is a core of its own. All CPUs without a known node form one node.
    """
    system = root / "sys/devices/system"
    cores = {_read_cpu_list(system / f"cpu/cpu{cpu}/topology/thread_siblings_list") & cpus | {cpu} for cpu in cpus}
    nodes = {_read_cpu_list(path) & cpus for path in system.glob("node/node[0-9]*/cpulist")}
    without_node = cpus.difference(*nodes)
    nodes = (nodes | {without_node}) - {frozenset()}
    return CpuTopology(tuple(sorted(cores, key=min)), tuple(sorted(nodes, key=min)))


# -- server and client ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CpuPlacement:
    """The CPUs of the server and those of the load generator. ``note`` describes them to the user."""

    server: frozenset[int]
    client: frozenset[int]
    note: Note


def place_server_and_client(
    machine: CpuTopology,
    quota: float | None = None,
    *,
    server: frozenset[int] | None = None,
    client: frozenset[int] | None = None,
) -> CpuPlacement:
    """Return the CPUs of server and load generator.

    ``server`` and ``client`` are the CPUs that the user set. If only one is set, the other gets the remaining CPUs,
    or all CPUs if none remain. If none is set, ``split_server_and_client`` decides.
    """
    if server is None and client is None:
        return split_server_and_client(machine, quota)
    server = server or machine.cpus - (client or frozenset()) or machine.cpus
    client = client or machine.cpus - server or machine.cpus
    if common := server & client:
        return CpuPlacement(server, client, SharedCpus(format_cpus(common)))
    return _separate_cpus(server, client)


def split_server_and_client(machine: CpuTopology, quota: float | None = None) -> CpuPlacement:
    """Give server and load generator separate physical cores if there are enough; otherwise both use all CPUs.

    The load generator's cores are on one NUMA node if possible. The smallest node with enough CPUs is used, so that
    the server keeps the other nodes whole.
    """
    cpus = machine.cpus
    if quota is not None and quota < len(cpus):
        # the quota counts for both together: separate CPUs would not isolate them
        return CpuPlacement(cpus, cpus, SharedQuota(quota))
    if len(cpus) < MIN_CPUS_TO_SPLIT or len(machine.cores) < MIN_CORES_TO_SPLIT:
        return CpuPlacement(cpus, cpus, SharedMachine(len(cpus), len(machine.cores)))
    client_count = min(MAX_CLIENT_CPUS, int(len(cpus) * CLIENT_SHARE))
    large_enough = [node for node in reversed(machine.nodes) if len(node) >= client_count]
    node = min(large_enough, key=len, default=cpus)
    client: frozenset[int] = frozenset()
    for core in reversed(machine.cores):
        if core <= node and (not client or len(client | core) <= client_count):
            client |= core
    return _separate_cpus(cpus - client, client)


def _separate_cpus(server: frozenset[int], client: frozenset[int]) -> CpuPlacement:
    return CpuPlacement(server, client, SeparateCpus(format_cpus(server), format_cpus(client)))


def divide_among_servers(machine: CpuTopology, parts: int) -> list[frozenset[int]]:
    """Return the CPUs of each of ``parts`` servers: physical cores that are neighbors.

    They are on one NUMA node unless there are fewer servers than nodes; so the servers of a smaller node may get
    fewer. With fewer cores than servers these get single CPUs. With fewer CPUs than servers all of them share all
    CPUs.
    """
    if len(machine.cpus) < parts:
        return [machine.cpus] * parts
    units = machine.cores if len(machine.cores) >= parts else tuple(frozenset({cpu}) for cpu in sorted(machine.cpus))
    units_by_node = [[unit for unit in units if min(unit) in node] for node in machine.nodes]
    nodes = [node_units for node_units in units_by_node if node_units]
    if parts < len(nodes):
        nodes = [[unit for node_units in nodes for unit in node_units]]
    servers = [1] * len(nodes)  # servers of each node: the next one gets the node with the most units for each server
    while sum(servers) < parts:
        units_per_server = [len(node_units) / count for node_units, count in zip(nodes, servers, strict=True)]
        servers[units_per_server.index(max(units_per_server))] += 1
    return [part for node_units, count in zip(nodes, servers, strict=True) for part in _split(node_units, count)]


def _split(units: Sequence[frozenset[int]], parts: int) -> list[frozenset[int]]:
    """Return the CPUs of ``parts`` runs of neighboring units, whose lengths differ by one unit at most."""
    starts = [len(units) * number // parts for number in range(parts + 1)]
    return [frozenset[int]().union(*units[start:end]) for start, end in pairwise(starts)]


# -- control groups, sysfs --------------------------------------------------------------------------------------


def _read_cpu_list(path: Path) -> frozenset[int]:
    try:
        return parse_cpus(read_kernel_file(path))
    except ValueError:
        return frozenset()


def _control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and of all its ancestors, for cgroup versions 1 and 2."""
    for line in read_kernel_file(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            group = PurePosixPath(path)
            for folder in (group, *group.parents):
                yield root / "sys/fs/cgroup" / (controller if controllers else "") / folder.relative_to("/")


def _cpu_limit(group: Path) -> float | None:
    version_1 = (read_kernel_file(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    text = read_kernel_file(group / "cpu.max") or " ".join(version_1)
    try:
        microseconds, period = (float(word) for word in text.split())
    except ValueError:  # "max 100000", or no such file
        return None
    return microseconds / period if microseconds > 0 and period > 0 else None


def read_kernel_file(path: Path | str, limit: int = -1) -> str:
    """Return the text of a file of the kernel without spaces around it; empty if it cannot be read.

    The kernel generates only the first ``limit`` bytes. Unbuffered reading takes a quarter of the time of
    Path.read_text, and a process tree needs hundreds of files.
    """
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123  many paths are text
            return (file.read(limit) or b"").decode(errors="replace").strip()
    except OSError:
        return ""
