"""Samples a server's GPUs while something is measured: through NVML, and what that does not tell from the server."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

from optimizer.interfaces import Endpoint, Samples, Telemetry
from optimizer.machine import triton_metrics
from optimizer.machine.cpu_time import process_tree
from optimizer.machine.gpu_attribution import used_by
from optimizer.machine.gpu_figures import GpuFigures, Sample, figures
from optimizer.machine.nvml import Gpu

INTERVAL_SECONDS = 0.1


class GpuTelemetry:
    """What ``others`` records, and what the server's GPUs do. ``gpus``: those that the server sees, as CUDA counts.

    Of a server on this machine NVML tells; what it does not (MIG, no library), and of one elsewhere all, is asked of
    the server's metrics where ``Endpoint.metrics`` says where these are. What neither tells stays unknown.
    """

    def __init__(self, others: Telemetry, gpus: Sequence[Gpu]) -> None:
        self._others = others
        self._gpus = gpus

    @contextlib.contextmanager
    def record(self, endpoint: Endpoint) -> Iterator[Samples]:
        with contextlib.ExitStack() as sampling, self._others.record(endpoint) as samples:
            found = [sampling.enter_context(_sampled(read)) for read in self._sources(endpoint)]
            yield samples
            sampling.close()
            known = GpuFigures()
            for source in found:
                known = known.completed(figures(source))
            samples.gpu_utilization = known.utilization
            samples.gpu_memory_bytes = known.memory_bytes
            samples.gpu_power_watts = known.power_watts
            samples.gpu_sm_clock_mhz = known.sm_clock_mhz
            samples.gpu_memory_clock_mhz = known.memory_clock_mhz
            samples.gpu_throttling = known.throttling

    def _sources(self, endpoint: Endpoint) -> list[Callable[[], Sample]]:
        found: list[Callable[[], Sample]] = []
        uuids: set[str] = set()
        if endpoint.server_pid is not None:
            pids = process_tree(endpoint.server_pid)
            gpus = used_by(pids, self._gpus, endpoint.gpus)
            uuids = {gpu.uuid for gpu in gpus}
            if gpus:
                found.append(lambda: {gpu.uuid: gpu.read(pids) for gpu in gpus})
        if endpoint.metrics and endpoint.gpus != ():
            found.append(lambda: _of(triton_metrics.read(endpoint.metrics), uuids))
        return found


def _of(readings: Sample, uuids: set[str]) -> Sample:
    """Those of the GPUs that are known to be the server's; all where none is."""
    return {uuid: one for uuid, one in readings.items() if not uuids or uuid in uuids}


@contextlib.contextmanager
def _sampled(read: Callable[[], Sample]) -> Iterator[list[Sample]]:
    """What ``read`` gave meanwhile; complete once the context has ended."""
    found: list[Sample] = []
    stop = threading.Event()

    def sample() -> None:
        while True:
            if sample := read():
                found.append(sample)
            if stop.wait(INTERVAL_SECONDS):
                return

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield found
    finally:
        stop.set()
        sampler.join()
