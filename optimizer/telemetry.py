"""Resources of the server while it is measured: GPUs through NVML, memory of its processes through psutil."""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections.abc import Callable, Iterator

from optimizer.interfaces import Endpoint, Samples

INTERVAL_SECONDS = 0.1


class ProcessTelemetry:
    """Memory of the server's process tree: proportional set size, so that shared pages count once."""

    @contextlib.contextmanager
    def record(self, endpoint: Endpoint) -> Iterator[Samples]:
        samples = Samples()
        yield samples
        samples.server_memory_bytes = tree_memory_bytes(endpoint.server_pid)


class GpuTelemetry:
    """What ProcessTelemetry records, and means over the GPUs' utilisation, memory in use and power."""

    @contextlib.contextmanager
    def record(self, endpoint: Endpoint) -> Iterator[Samples]:
        import pynvml

        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        readings: dict[str, list[float]] = {"utilization": [], "memory": [], "power": []}
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
                stop.wait(INTERVAL_SECONDS)

        sampler = threading.Thread(target=sample, daemon=True)
        with ProcessTelemetry().record(endpoint) as samples:
            sampler.start()
            try:
                yield samples
            finally:
                stop.set()
                sampler.join()
            samples.gpu_utilization = _mean(readings["utilization"])
            samples.gpu_memory_bytes = max(readings["memory"], default=None)
            samples.gpu_power_watts = _mean(readings["power"])


def tree_memory_bytes(pid: int | None) -> float | None:
    """Proportional set size of a process and all below it; None where it cannot be read."""
    import psutil

    if pid is None:
        return None
    total = 0
    try:
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            total += process.memory_full_info().pss
    except (psutil.Error, AttributeError):
        return None
    return float(total)


def _keep(readings: list[float], read: Callable[[], float | None]) -> None:
    """A reading that NVML refuses (MIG, an old driver) is unknown, not zero."""
    import pynvml

    with contextlib.suppress(pynvml.NVMLError):
        value = read()
        if value is not None:
            readings.append(value)


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None
