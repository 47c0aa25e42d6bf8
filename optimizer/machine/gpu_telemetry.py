"""Telemetry of the server's GPUs, from NVML and from Triton's Prometheus metrics (for remote servers).

Triton reports 0 for values it could not read, and updates them every ``--metrics-interval-ms`` (2 s).
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from http.client import HTTPException
from typing import Any, TypeVar

from optimizer.core.endpoint import Endpoint
from optimizer.core.interfaces import ResourceUsage, Telemetry
from optimizer.machine.conditions import process_tree, server_pids
from optimizer.machine.gpu_readings import GpuReading, GpuSample, summarize
from optimizer.machine.nvml import Gpu, gpus_used_by

CALL_SECONDS = 2.0
MAX_BYTES = 4 << 20
TRITON_GPU_METRICS = {
    "nv_gpu_utilization": "utilization",
    "nv_gpu_memory_used_bytes": "memory_bytes",
    "nv_gpu_power_usage": "power_watts",
    "nv_energy_consumption": "energy_joules",
}
_LINE = re.compile(r'(nv_[a-z_]+)\{gpu_uuid="([^"]+)"\} ([0-9.eE+-]+)')


def read_gpu_metrics(address: str) -> dict[str, GpuReading]:
    """Return the GPU readings of a server by UUID; empty if they cannot be read.

    ``address`` is ``host:port`` of the server's metrics.
    """
    return parse_gpu_metrics(read_metrics_page(address), time.monotonic())


def read_metrics_page(address: str) -> str:
    """Return the Prometheus metrics of a server at ``host:port``; an empty text if they cannot be read."""
    try:
        return fetch_metrics_page(f"http://{address}/metrics")
    except (OSError, ValueError, HTTPException):
        return ""


def fetch_metrics_page(url: str) -> str:
    """Return the text of a metrics page. Proxies are not used.

    Raises OSError (HTTPError for a status that is no success), ValueError or HTTPException if it cannot be read.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=CALL_SECONDS) as response:
        return str(response.read(MAX_BYTES).decode(errors="replace"))


def parse_gpu_metrics(text: str, at_seconds: float) -> dict[str, GpuReading]:
    """Return the readings by UUID from Prometheus text. A power of 0 W or 0 bytes of memory mean unknown."""
    values: dict[str, dict[str, Any]] = {}
    for line in text.splitlines():
        if not (match := _LINE.fullmatch(line)) or match[1] not in TRITON_GPU_METRICS:
            continue
        with contextlib.suppress(ValueError):
            value = float(match[3])
            if value > 0 or match[1] == "nv_gpu_utilization":
                values.setdefault(match[2], {})[TRITON_GPU_METRICS[match[1]]] = value
    return {uuid: GpuReading(at_seconds, **own) for uuid, own in values.items() if own.keys() - {"utilization"}}


T = TypeVar("T")

INTERVAL_SECONDS = 0.1


class GpuTelemetry:
    """Adds GPU metrics to the resources that another telemetry records.

    Readings are from NVML for a server on this machine. The server's Prometheus metrics add what NVML does not report
    (MIG, no library), and everything for a remote server. Other figures stay unknown.

    Args:
        others: Telemetry of the other resources.
        gpus: GPUs that the server sees, in CUDA's order.
    """

    def __init__(self, others: Telemetry, gpus: Sequence[Gpu]) -> None:
        self._others = others
        self._gpus = gpus

    @contextlib.contextmanager
    def record(self, endpoint: Endpoint) -> Iterator[ResourceUsage]:
        """Sample within the context; the values are filled in when it ends."""
        with contextlib.ExitStack() as sampling, self._others.record(endpoint) as samples:
            recordings = [sampling.enter_context(sampled(read)) for read in self._sources(endpoint)]
            yield samples
            sampling.close()
            for name, value in [
                figure for recording in recordings for figure in asdict(summarize(recording)).items()
            ]:
                if getattr(samples, name) in (None, ""):
                    setattr(samples, name, value)

    def _sources(self, endpoint: Endpoint) -> list[Callable[[], GpuSample]]:
        sources: list[Callable[[], GpuSample]] = []
        uuids: set[str] = set()
        if servers := server_pids(endpoint):
            pids = process_tree(*servers)
            gpus = gpus_used_by(pids, self._gpus, endpoint.gpus)
            uuids = {gpu.uuid for gpu in gpus}
            if gpus:
                sources.append(lambda: {gpu.uuid: gpu.read(pids) for gpu in gpus})
        if endpoint.metrics and endpoint.gpus != ():
            sources.append(lambda: _select(read_gpu_metrics(endpoint.metrics), uuids))
        return sources


def _select(readings: GpuSample, uuids: set[str]) -> GpuSample:
    """Return the readings of the GPUs ``uuids``; all if that is empty."""
    return {uuid: reading for uuid, reading in readings.items() if not uuids or uuid in uuids}


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
