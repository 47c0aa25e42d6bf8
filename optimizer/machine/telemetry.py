"""What happens while a measurement runs: on GPUs through NVML, in the server's memory, on the CPUs through others."""

from __future__ import annotations

import contextlib
import math
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TypeVar

from objectives.metrics import Measurement
from optimizer.interfaces import Endpoint, Samples
from optimizer.machine.cpu_time import Usage, process_tree

T = TypeVar("T")
INTERVAL_SECONDS = 0.1
DISTURBED = 0.10  # of the CPUs' time taken by others: it is no longer the server alone that was measured
# why a GPU lowers its clocks by itself, by the bits of nvmlClocksThrottleReason…
THROTTLE_REASONS = {
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x20: "temperature",
    0x40: "temperature limit of the hardware",
    0x80: "power brake",
}


def disturbance(measurement: Measurement) -> str:
    """What disturbed the measurement, in words; empty where nothing did, or nothing is known of it."""
    share = measurement.other_cpu_share
    if share is None or share <= DISTURBED:
        return ""
    return f"other processes or machines took {100 * share:.0f} % of the CPUs while this was measured"


class ProcessTelemetry:
    """Memory of the server's process tree, and the share that others took of ``cpus``: those that the server and
    the load generator may use; None is those of this process. Both are unknown where the server's process is.
    """

    def __init__(self, cpus: frozenset[int] | None = None) -> None:
        self._cpus = cpus

    @contextlib.contextmanager
    def record(self, endpoint: Endpoint) -> Iterator[Samples]:
        samples = Samples()
        if endpoint.server_pid is None:
            yield samples
            return
        before = Usage.now(self._cpus, endpoint.server_pid)
        yield samples
        share = Usage.now(self._cpus, endpoint.server_pid).others_since(before)
        samples.other_cpu_share = None if math.isnan(share) else round(share, 4)
        samples.server_memory_bytes = tree_memory_bytes(endpoint.server_pid)


class GpuTelemetry:
    """What ProcessTelemetry records, and means over the GPUs' utilisation, memory in use and power."""

    def __init__(self, cpus: frozenset[int] | None = None) -> None:
        self._processes = ProcessTelemetry(cpus)
        self._throttling: Counter[int] = Counter()

    @contextlib.contextmanager
    def record(self, endpoint: Endpoint) -> Iterator[Samples]:
        import pynvml

        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        readings: dict[str, list[float]] = {"utilization": [], "memory": [], "power": []}
        throttling: list[int] = []
        stop = threading.Event()

        def sample() -> None:
            while not stop.is_set():
                # utilisation is 0-1 and averaged over GPUs, memory and power are summed
                _keep(
                    readings["utilization"],
                    lambda: _mean([pynvml.nvmlDeviceGetUtilizationRates(h).gpu / 100 for h in handles]),
                )
                _keep(
                    readings["memory"],
                    lambda: float(sum(pynvml.nvmlDeviceGetMemoryInfo(h).used for h in handles)),
                )
                _keep(readings["power"], lambda: sum(pynvml.nvmlDeviceGetPowerUsage(h) for h in handles) / 1000)
                for handle in handles:
                    _keep(throttling, partial(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle))
                stop.wait(INTERVAL_SECONDS)

        sampler = threading.Thread(target=sample, daemon=True)
        with self._processes.record(endpoint) as samples:
            sampler.start()
            try:
                yield samples
            finally:
                stop.set()
                sampler.join()
                self._throttling.update(throttling)
            samples.gpu_utilization = _mean(readings["utilization"])
            samples.gpu_memory_bytes = max(readings["memory"], default=None)
            samples.gpu_power_watts = _mean(readings["power"])

    def note(self) -> str:
        """Whether the GPUs lowered their clocks in what was recorded so far; empty where they did not."""
        return throttle_note(self._throttling)


def throttle_note(samples: Mapping[int, int]) -> str:
    """``samples``: NVML's throttle reasons (bits) -> how often they were read."""
    throttled = {bits: count for bits, count in samples.items() if any(bits & bit for bit in THROTTLE_REASONS)}
    if not throttled:
        return ""
    share = 100 * sum(throttled.values()) / sum(samples.values())
    why = [reason for bit, reason in THROTTLE_REASONS.items() if any(bits & bit for bits in throttled)]
    return f"the GPU lowered its clocks in {max(share, 1):.0f} % of the time measured: {', '.join(why)}"


def tree_memory_bytes(pid: int | None) -> float | None:
    """Proportional set size of a process and all below it, in which shared pages count once; None where it cannot
    be read."""
    import psutil

    if pid is None:
        return None
    try:
        return float(sum(psutil.Process(each).memory_full_info().pss for each in process_tree(pid)))
    except (psutil.Error, AttributeError):
        return None


def _keep(readings: list[T], read: Callable[[], T | None]) -> None:
    """A reading that NVML refuses (MIG, an old driver) is unknown, not zero."""
    import pynvml

    with contextlib.suppress(pynvml.NVMLError):
        value = read()
        if value is not None:
            readings.append(value)


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None
