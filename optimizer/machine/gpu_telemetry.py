"""Telemetry of the server's GPUs, from NVML and from Triton's Prometheus metrics (for remote servers).

Triton reports 0 for values it could not read, and updates them every ``--metrics-interval-ms`` (2 s).
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from optimizer.core.endpoint import Endpoint
from optimizer.core.interfaces import Telemetry
from optimizer.core.notes import ClocksLowered
from optimizer.core.resource_usage import ResourceUsage
from optimizer.machine.cpu_usage import process_tree
from optimizer.machine.metrics_page import MetricsPage, read_metrics_page
from optimizer.machine.nvml import Gpu, GpuReading, gpus_used_by
from optimizer.machine.process_telemetry import sampled, server_pids, total_of

TRITON_GPU_METRICS = {
    "nv_gpu_utilization": "utilization",
    "nv_gpu_memory_used_bytes": "memory_bytes",
    "nv_gpu_power_usage": "power_watts",
    "nv_energy_consumption": "energy_joules",
}


def read_gpu_metrics(address: str) -> dict[str, GpuReading]:
    """Return the GPU readings of a server by UUID; empty if they cannot be read.

    ``address`` is ``host:port`` of the server's metrics.
    """
    return gpu_readings(read_metrics_page(address), time.monotonic())


def gpu_readings(page: MetricsPage, at_seconds: float) -> dict[str, GpuReading]:
    """Return the readings on a metrics page by UUID. A power of 0 W or 0 bytes of memory mean unknown."""
    fields_of_gpu = defaultdict[str, dict[str, Any]](dict)
    for series, field in TRITON_GPU_METRICS.items():
        for labels, value in page.get(series, ()):
            if "gpu_uuid" in labels and (value > 0 or field == "utilization"):
                fields_of_gpu[labels["gpu_uuid"]][field] = value
    return {
        uuid: GpuReading(at_seconds, **fields)
        for uuid, fields in fields_of_gpu.items()
        if fields.keys() - {"utilization"}
    }


GpuSample = Mapping[str, GpuReading]  # one reading of every GPU, by UUID


class GpuSource(NamedTuple):
    """A source of GPU readings: ``read`` takes one sample, and ``summarize`` computes the usage from all of them."""

    read: Callable[[], GpuSample]
    summarize: Callable[[Sequence[GpuSample]], ResourceUsage]


class GpuTelemetry:
    """Adds GPU metrics to the resources that another telemetry records.

    Readings are from NVML for a server on this machine. The server's Prometheus metrics add what NVML does not report
    (MIG, no library), and everything for a remote server. Other values stay unknown.

    Args:
        telemetry: Telemetry of the other resources.
        gpus: GPUs that the server sees, in CUDA's order.
    """

    def __init__(self, telemetry: Telemetry, gpus: Sequence[Gpu]) -> None:
        self._telemetry = telemetry
        self._gpus = gpus

    @contextlib.contextmanager
    def record(self, endpoint: Endpoint) -> Iterator[ResourceUsage]:
        """Sample within the context; the values are filled in when it ends."""
        with contextlib.ExitStack() as sampling, self._telemetry.record(endpoint) as usage:
            sources = self._sources(endpoint)
            recordings = [sampling.enter_context(sampled(source.read)) for source in sources]
            yield usage
            sampling.close()
            for source, samples in zip(sources, recordings, strict=True):
                usage.fill_in(source.summarize(samples))

    def _sources(self, endpoint: Endpoint) -> list[GpuSource]:
        """Return the sources of the server's GPUs. Values of the first one take precedence."""
        sources = list[GpuSource]()
        uuids: set[str] = set()
        if self._gpus and (servers := server_pids(endpoint)):
            pids = process_tree(*servers)
            gpus = gpus_used_by(pids, self._gpus, endpoint.gpus)
            uuids = {gpu.uuid for gpu in gpus}
            if gpus:
                sources.append(GpuSource(lambda: {gpu.uuid: gpu.read(pids) for gpu in gpus}, summarize))
        if endpoint.metrics and endpoint.gpus != ():
            count = None if endpoint.gpus is None else len(endpoint.gpus)
            sources.append(
                GpuSource(lambda: _select(read_gpu_metrics(endpoint.metrics), uuids, count), summarize_updates)
            )
        return sources


def _select(readings: GpuSample, uuids: set[str], count: int | None) -> GpuSample:
    """Return the readings of the GPUs ``uuids``; if these are unknown, all of them.

    ``count`` is the number of GPUs that the instance groups name, None if one names none. The result is empty if it
    is lower than the number of readings and the ``uuids`` are unknown: Triton does not report the order of its GPUs.
    """
    if not uuids:
        return {} if count is not None and count < len(readings) else readings
    return {uuid: reading for uuid, reading in readings.items() if uuid in uuids}


# -- summaries of readings -------------------------------------------------------------------------------------

MIN_ENERGY_SECONDS = 0.5  # shortest time for an energy counter, which has steps of up to 0.1 s in NVML
# reasons for which a GPU lowers its clocks by itself: bits of nvmlClocksEventReason…
THROTTLE_REASONS = {
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x20: "temperature",
    0x40: "temperature limit of the hardware",
    0x80: "power brake",
}


def summarize(samples: Sequence[GpuSample]) -> ResourceUsage:
    """Return the GPU metrics of ``samples``, which are ordered by time and have the same GPUs.

    Memory (its maximum over time) and power are sums over the GPUs; the others are means. A value that is unknown for
    one GPU is unknown for all. All values except the memory cover the busy time only, because the GPU idles while the
    load generator starts and ends.
    """
    busy = _by_gpu(busy_samples(samples))

    def mean(value: Callable[[GpuReading], float | None]) -> float | None:
        total = total_of([_over_time(map(value, readings)) for readings in busy])
        return None if total is None else total / len(busy)

    in_use = [total_of([reading.memory_bytes for reading in sample.values()]) for sample in samples]
    return ResourceUsage(
        gpu_utilization=mean(lambda reading: reading.utilization),
        gpu_memory_bytes=max((value for value in in_use if value is not None), default=None),
        gpu_power_watts=total_of(list(map(_power_watts, busy))),
        gpu_sm_clock_mhz=mean(lambda reading: reading.sm_clock_mhz),
        gpu_memory_clock_mhz=mean(lambda reading: reading.memory_clock_mhz),
        gpu_throttling=describe_throttling(reading.throttling or 0 for readings in busy for reading in readings),
    )


def summarize_updates(samples: Sequence[GpuSample]) -> ResourceUsage:
    """Return the GPU metrics of ``samples`` from Triton's metrics page, from the first update of its values on.

    Earlier values are those of the previous load. Only the memory has a value without an update: the model was loaded
    before.
    """
    first = next((i for i, sample in enumerate(samples) if _values(sample) != _values(samples[0])), len(samples))
    usage = summarize(samples[first:])
    usage.fill_in(ResourceUsage(gpu_memory_bytes=summarize(samples).gpu_memory_bytes))
    return usage


def _values(sample: GpuSample) -> dict[str, GpuReading]:
    return {uuid: replace(reading, at_seconds=0.0) for uuid, reading in sample.items()}


def counter_rate(readings: Sequence[tuple[float, float]], min_seconds: float = 0.0) -> float | None:
    """Return the rate of a counter between its first and last change in ``readings`` (seconds, value).

    A counter changes in steps, and before and after the load it does not count for it. The rate is unknown with fewer
    than two changes, or if less than ``min_seconds`` are between them.
    """
    changed = [readings[i] for i in range(1, len(readings)) if readings[i][1] > readings[i - 1][1]]
    if len(changed) < 2 or changed[-1][0] - changed[0][0] < min_seconds:
        return None
    (began, before), (ended, after) = changed[0], changed[-1]
    return (after - before) / (ended - began)


def busy_samples(samples: Sequence[GpuSample]) -> Sequence[GpuSample]:
    """Return the samples from the first to the last with a utilization above 0; all samples if there is none."""
    busy = [i for i, sample in enumerate(samples) if any(reading.utilization for reading in sample.values())]
    return samples[busy[0] : busy[-1] + 1] if busy else samples


def describe_throttling(reasons: Iterable[int]) -> str:
    """Return the names of NVML's throttling bits, such as ``power limit, temperature``.

    Idle clocks and clocks that a user set do not count as throttling.
    """
    combined = 0
    for bits in reasons:
        combined |= bits
    return ", ".join(reason for bit, reason in THROTTLE_REASONS.items() if combined & bit)


def throttle_note(measured: Sequence[str]) -> ClocksLowered | None:
    """Return a note on lowered clocks; None if no clock was lowered.

    ``measured`` is the ``gpu_throttling`` of each measurement.
    """
    lowered = [text for text in measured if text]
    if not lowered:
        return None
    found_reasons = {reason for text in lowered for reason in text.split(", ")}
    reasons = tuple(reason for reason in THROTTLE_REASONS.values() if reason in found_reasons)
    return ClocksLowered(len(lowered), len(measured), reasons)


def _power_watts(readings: Sequence[GpuReading]) -> float | None:
    """Return the mean power of one GPU: from its energy counter if it has one, otherwise the mean of its readings."""
    energies = [
        (reading.at_seconds, reading.energy_joules) for reading in readings if reading.energy_joules is not None
    ]
    rate = counter_rate(energies, MIN_ENERGY_SECONDS)
    return _over_time(reading.power_watts for reading in readings) if rate is None else rate


def _by_gpu(samples: Sequence[GpuSample]) -> list[list[GpuReading]]:
    return [[sample[gpu] for sample in samples if gpu in sample] for gpu in (samples[0] if samples else {})]


def _over_time(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
