"""Summaries of GPU readings that were taken during a measurement. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from optimizer.core.interfaces import ResourceUsage
from optimizer.core.notes import ClocksLowered

MIN_ENERGY_SECONDS = 0.5  # shortest time for an energy counter, which has steps of up to 0.1 s
# reasons for which a GPU lowers its clocks by itself: bits of nvmlClocksEventReason…
THROTTLE_REASONS = {
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x20: "temperature",
    0x40: "temperature limit of the hardware",
    0x80: "power brake",
}


@dataclass(frozen=True, slots=True)
class GpuReading:
    """The state of one GPU at one moment. None means unknown.

    ``at_seconds`` is monotonic time, ``utilization`` is 0 to 1, ``energy_joules`` is a counter with an arbitrary
    start, and ``throttling`` has NVML's bits.
    """

    at_seconds: float
    utilization: float | None = None
    memory_bytes: float | None = None
    power_watts: float | None = None
    energy_joules: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    throttling: int | None = None


GpuSample = Mapping[str, GpuReading]  # one reading of every GPU, by UUID


def summarize(samples: Sequence[GpuSample]) -> ResourceUsage:
    """Return the GPU metrics of ``samples``, which are ordered by time and have the same GPUs.

    Memory (its maximum over time) and power are sums over the GPUs; the others are means. A figure that is unknown
    for one GPU is unknown for all. All figures but the memory are those of the busy time: before and after it, the
    load generator starts and ends.
    """
    busy = _by_gpu(busy_samples(samples))

    def mean(value: Callable[[GpuReading], float | None]) -> float | None:
        known = _all_known([_over_time(map(value, readings)) for readings in busy])
        return statistics.fmean(known) if known else None

    in_use = [_sum(reading.memory_bytes for reading in sample.values()) for sample in samples]
    return ResourceUsage(
        gpu_utilization=mean(lambda reading: reading.utilization),
        gpu_memory_bytes=max((value for value in in_use if value is not None), default=None),
        gpu_power_watts=_sum(map(_power_watts, busy)),
        gpu_sm_clock_mhz=mean(lambda reading: reading.sm_clock_mhz),
        gpu_memory_clock_mhz=mean(lambda reading: reading.memory_clock_mhz),
        gpu_throttling=describe_throttling(reading.throttling or 0 for readings in busy for reading in readings),
    )


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
    return ", ".join(words for bit, words in THROTTLE_REASONS.items() if combined & bit)


def throttle_note(measured: Sequence[str]) -> ClocksLowered | None:
    """Return a note on lowered clocks; None if no clock was lowered.

    ``measured`` is the ``gpu_throttling`` of each measurement.
    """
    lowered = [text for text in measured if text]
    if not lowered:
        return None
    known = {reason for text in lowered for reason in text.split(", ")}
    reasons = tuple(reason for reason in THROTTLE_REASONS.values() if reason in known)
    return ClocksLowered(len(lowered), len(measured), reasons)


def _power_watts(readings: Sequence[GpuReading]) -> float | None:
    """Return the mean power of one GPU: from its energy counter if it has one, otherwise the mean of its readings."""
    energies = [
        (reading.at_seconds, reading.energy_joules) for reading in readings if reading.energy_joules is not None
    ]
    if len(energies) > 1:
        (began, before), (ended, after) = energies[0], energies[-1]
        if ended - began >= MIN_ENERGY_SECONDS and after > before:
            return (after - before) / (ended - began)
    return _over_time(reading.power_watts for reading in readings)


def _by_gpu(samples: Sequence[GpuSample]) -> list[list[GpuReading]]:
    return [[sample[gpu] for sample in samples if gpu in sample] for gpu in (samples[0] if samples else {})]


def _over_time(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _sum(values: Iterable[float | None]) -> float | None:
    known = _all_known(list(values))
    return sum(known) if known else None


def _all_known(values: Sequence[float | None]) -> list[float]:
    """Return the values; an empty list if one is unknown."""
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else []
