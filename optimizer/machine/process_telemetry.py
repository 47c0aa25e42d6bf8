"""Telemetry of the server's processes: their memory, and the CPU time that others took meanwhile.

The telemetry of GPUs and of engines uses ``sampled`` too.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from optimizer.core.endpoint import Endpoint
from optimizer.core.resource_usage import CpuInterval, ResourceUsage
from optimizer.machine.cpu_usage import CpuUsage, process_tree
from optimizer.machine.cpus import read_kernel_file

T = TypeVar("T")

INTERVAL_SECONDS = 0.1  # time between two readings
CPU_INTERVAL_SECONDS = 0.25


@contextlib.contextmanager
def sampled(read: Callable[[], T | None], interval_seconds: float = INTERVAL_SECONDS) -> Iterator[list[T]]:
    """Call ``read`` repeatedly in a thread; the yielded list is complete when the context ends.

    Empty samples and None are left out.
    """
    samples: list[T] = []
    stop = threading.Event()

    def sample() -> None:
        while True:
            if sample := read():
                samples.append(sample)
            if stop.wait(interval_seconds):
                return

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield samples
    finally:
        stop.set()
        sampler.join()


def cpu_intervals(samples: Sequence[tuple[float, CpuUsage]]) -> list[CpuInterval]:
    """Return the intervals between ``samples``, which are pairs of a Unix time and the usage until then."""
    return [
        CpuInterval(begin, end, after.total_seconds - before.total_seconds, after.other_seconds_since(before))
        for (begin, before), (end, after) in pairwise(samples)
        if begin < end
    ]


class ProcessTelemetry:
    """Records the memory of the servers' process trees, and the CPU share of others.

    The share is recorded as a whole and in intervals of CPU_INTERVAL_SECONDS. If the process of a server is unknown,
    so is the share, and the memory is that which the container engine of the endpoint reports.

    Args:
        cpus: CPUs of server and load generator; None for those of this process.
        load_in_container: Whether the load generator runs in a container, whose processes are no descendants of this
            one. The share is then unknown, because it would include the load.
    """

    def __init__(self, cpus: frozenset[int] | None = None, *, load_in_container: bool = False) -> None:
        self._cpus = cpus
        self._load_in_container = load_in_container

    @contextlib.contextmanager
    def record(self, endpoint: Endpoint) -> Iterator[ResourceUsage]:
        """Record within the context; the values are filled in when it ends."""
        usage, pids = ResourceUsage(), server_pids(endpoint)
        if self._load_in_container or not pids:
            yield usage
        else:
            with self._cpu_times_recorded(usage, {*pids, *port_forwarders(endpoint)}):
                yield usage
        usage.server_memory_bytes = total_of([tree_memory_bytes(pid) for pid in pids])
        if usage.server_memory_bytes is None:
            usage.server_memory_bytes = total_of(
                [server.memory_bytes() if server.memory_bytes else None for server in endpoint.servers]
            )

    @contextlib.contextmanager
    def _cpu_times_recorded(self, usage: ResourceUsage, pids: set[int]) -> Iterator[None]:
        """Fill ``usage`` at the end with the CPU time of others than this process, ``pids`` and their descendants."""

        def read() -> tuple[float, CpuUsage]:
            return time.time(), CpuUsage.now(self._cpus, *pids)

        with sampled(read, CPU_INTERVAL_SECONDS) as samples:
            yield
        samples.append(read())
        share = samples[-1][1].others_since(samples[0][1])
        usage.other_cpu_share = None if math.isnan(share) else round(share, 4)
        usage.cpu_intervals = cpu_intervals(samples)


def server_pids(endpoint: Endpoint) -> list[int]:
    """Return the server's processes on this machine: one, or that of each server that shares the load.

    The list is empty if one is unknown: values of some of the servers would pass as those of all.
    """
    pids = [server.server_pid for server in endpoint.servers if server.server_pid is not None]
    return pids if len(pids) == len(endpoint.servers) else []


# Forwarders of rootless Podman, which have a process for each container. Podman before 4.0 starts its own as "exe".
_ROOTLESS_FORWARDERS = frozenset({"rootlessport", "exe", "pasta", "pasta.avx2", "passt.avx2"})


def port_forwarders(endpoint: Endpoint) -> set[int]:
    """Return the processes of a container engine that forward ports of ``endpoint``, and no others, to a container.

    These are ``docker-proxy``, which Docker starts for each port of loopback, and the forwarders of rootless Podman.
    The ``rootlesskit`` of rootless Docker is not one of them, because it forwards the ports of all containers.
    """
    addresses = [address for server in endpoint.servers for address in (server.grpc, server.http, server.metrics)]
    ports = {address.rpartition(":")[2] for address in addresses if address}
    forwarders, rootless = set(), set()
    for process in Path("/proc").glob("[0-9]*"):
        name = read_kernel_file(process / "comm")
        if name == "docker-proxy":
            arguments = read_kernel_file(process / "cmdline").split("\0")
            if any(name == "-host-port" and value in ports for name, value in pairwise(arguments)):
                forwarders.add(int(process.name))
        elif name in _ROOTLESS_FORWARDERS:
            rootless.add(int(process.name))
    return forwarders | {pid for pid, listening in _listening_ports(rootless).items() if listening <= ports}


def _listening_ports(pids: set[int]) -> dict[int, set[str]]:
    """Return the TCP ports at which each of these processes listens; processes that do not listen are left out."""
    listening = defaultdict[int, set[str]](set)
    if pids:
        import psutil

        with contextlib.suppress(psutil.Error):
            for socket in psutil.net_connections("tcp"):
                if socket.pid in pids and socket.status == psutil.CONN_LISTEN and socket.laddr:
                    listening[socket.pid].add(str(socket.laddr.port))
    return listening


def total_of(values: Sequence[float | None]) -> float | None:
    """Return the sum of ``values``; None if one is unknown, or if there are none."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def tree_memory_bytes(pid: int) -> float | None:
    """Return the memory of a process and its descendants; None if it cannot be read.

    It is the proportional set size, in which shared pages count once.
    """
    import psutil

    try:
        return float(sum(psutil.Process(member).memory_full_info().pss for member in process_tree(pid)))
    except (psutil.Error, AttributeError):
        return None
