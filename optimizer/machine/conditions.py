"""Conditions on the machine during a run: memory of the server, CPU time of other processes, clocks and speed."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np

from objectives.arrays import FloatArray
from objectives.metrics import Measurement
from optimizer.core.endpoint import Endpoint
from optimizer.core.interfaces import CpuInterval, ResourceUsage
from optimizer.core.notes import SpeedVaried
from optimizer.machine.cpus import cpu_quota, read_kernel_file
from optimizer.machine.sampling import sampled
from optimizer.options.values import format_cpus, usable_cpus

_TICKS = os.sysconf("SC_CLK_TCK")  # per second
_BUSY = (0, 1, 2, 7)  # columns of a line in /proc/stat: user, nice, system, steal
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
        names = {f"cpu{cpu}" for cpu in (os.sched_getaffinity(0) if cpus is None else cpus)}
        rows = [line.split() for line in read_kernel_file("/proc/stat").splitlines() if line.startswith("cpu")]
        ticks = [[int(number) for number in row[1:]] for row in rows if row[0] in names]
        return cls(
            total_seconds=sum(row[column] for row in ticks for column in _TOTAL) / _TICKS,
            busy_seconds=sum(row[column] for row in ticks for column in _BUSY) / _TICKS,
            run_seconds=sum(map(_process_ticks, process_tree(os.getpid(), *pids))) / _TICKS,
        )

    def others_since(self, before: CpuUsage) -> float:
        """Return the share of the CPU time since ``before`` that others took, 0 to 1; nan if it is unknown."""
        total_seconds = self.total_seconds - before.total_seconds
        return min(1.0, max(0.0, self.other_seconds_since(before) / total_seconds)) if total_seconds > 0 else math.nan

    def other_seconds_since(self, before: CpuUsage) -> float:
        """Return the CPU time that others took since ``before``."""
        return self.busy_seconds - before.busy_seconds - (self.run_seconds - before.run_seconds)


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

    tree = set(pids)
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            tree |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
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


CPU_INTERVAL_SECONDS = 0.25  # a sample takes about 1 ms


def cpu_intervals(samples: Sequence[tuple[float, CpuUsage]]) -> list[CpuInterval]:
    """Return the intervals between ``samples``, which are pairs of a Unix time and the usage until then."""
    return [
        CpuInterval(begin, end, after.total_seconds - before.total_seconds, after.other_seconds_since(before))
        for (begin, before), (end, after) in pairwise(samples)
        if begin < end
    ]


class ProcessTelemetry:
    """Records the memory of the process trees of the servers and the share of CPU time that others took.

    Both values are unknown if the process of a server is.

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
        if not pids:
            yield usage
            return
        forwarders = port_forwarders(endpoint)

        def read() -> tuple[float, CpuUsage]:
            return time.time(), CpuUsage.now(self._cpus, *pids, *forwarders)

        with sampled(read, CPU_INTERVAL_SECONDS) as samples:
            yield usage
        samples.append(read())
        if not self._load_in_container:
            share = samples[-1][1].others_since(samples[0][1])
            usage.other_cpu_share = None if math.isnan(share) else round(share, 4)
            usage.cpu_intervals = cpu_intervals(samples)
        usage.server_memory_bytes = total_of([tree_memory_bytes(pid) for pid in pids])


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


def tree_memory_bytes(pid: int | None) -> float | None:
    """Return the memory of a process and its descendants; None if it cannot be read.

    It is the proportional set size, in which shared pages count once.
    """
    import psutil

    if pid is None:
        return None
    try:
        return float(sum(psutil.Process(member).memory_full_info().pss for member in process_tree(pid)))
    except (psutil.Error, AttributeError):
        return None


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


@dataclass
class SpeedMeter:
    """Measures the speed of the machine while a server is idle, before its first load.

    ``seconds`` runs one probe and returns its time.
    """

    seconds: Callable[[], float] = field(default_factory=lambda: SpeedProbe().seconds)

    def probe(self) -> float:
        """Return the seconds of the faster of two probes, so that a short disturbance does not count."""
        return min(self.seconds() for _ in range(2))


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
