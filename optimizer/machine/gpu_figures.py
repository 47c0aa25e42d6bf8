"""What readings of GPUs, taken while something was measured, come to. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

LEAST_COUNTED_SECONDS = 0.5  # of an energy counter, which moves in steps of up to a tenth of a second
# why a GPU lowers its clocks by itself, by the bits of nvmlClocksEventReason…
THROTTLE_REASONS = {
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x20: "temperature",
    0x40: "temperature limit of the hardware",
    0x80: "power brake",
}


@dataclass(frozen=True, slots=True)
class Reading:
    """One GPU at one moment; None is unknown. ``at_seconds`` is of a monotonic clock, ``utilization`` 0 to 1,
    ``energy_joules`` a counter that began long ago, ``throttling`` NVML's bits."""

    at_seconds: float
    utilization: float | None = None
    memory_bytes: float | None = None
    power_watts: float | None = None
    energy_joules: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    throttling: int | None = None


Sample = Mapping[str, Reading]  # of every GPU, by its UUID


@dataclass(frozen=True, slots=True)
class GpuFigures:
    """Of several GPUs: memory and power are sums, the others means; of memory the most that was in use.

    ``throttling``: why clocks were lowered, in words; empty where they were not, or nothing tells.
    """

    utilization: float | None = None
    memory_bytes: float | None = None
    power_watts: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    throttling: str = ""

    def completed(self, other: GpuFigures) -> GpuFigures:
        """With what ``other`` knows where this knows nothing."""
        both = {one.name: getattr(self, one.name) for one in fields(self)}
        return GpuFigures(
            **{name: getattr(other, name) if value in (None, "") else value for name, value in both.items()}
        )


def figures(samples: Sequence[Sample]) -> GpuFigures:
    """``samples``: readings of the same GPUs, in the order in which they were taken.

    A figure that is unknown of one of them is unknown of all. All but the memory is of the time in which the GPUs
    were at work: before and after, the load generator starts and ends.
    """
    busy = _by_gpu(at_work(samples))

    def mean(value: Callable[[Reading], float | None]) -> float | None:
        known = _all_known([_over_time(map(value, readings)) for readings in busy])
        return statistics.fmean(known) if known else None

    in_use = [_sum(one.memory_bytes for one in sample.values()) for sample in samples]
    return GpuFigures(
        utilization=mean(lambda one: one.utilization),
        memory_bytes=max((value for value in in_use if value is not None), default=None),
        power_watts=_sum(map(_power_watts, busy)),
        sm_clock_mhz=mean(lambda one: one.sm_clock_mhz),
        memory_clock_mhz=mean(lambda one: one.memory_clock_mhz),
        throttling=throttling(one.throttling or 0 for readings in busy for one in readings),
    )


def at_work(samples: Sequence[Sample]) -> Sequence[Sample]:
    """From the first to the last sample in which a GPU computed; all where none did, or nothing tells."""
    busy = [i for i, sample in enumerate(samples) if any(one.utilization for one in sample.values())]
    return samples[busy[0] : busy[-1] + 1] if busy else samples


def throttling(reasons: Iterable[int]) -> str:
    """NVML's bits in words: ``power limit, temperature``; what somebody set and idling are none."""
    seen = 0
    for bits in reasons:
        seen |= bits
    return ", ".join(words for bit, words in THROTTLE_REASONS.items() if seen & bit)


def throttle_note(measured: Sequence[str]) -> str:
    """``measured``: the ``throttling`` of each measurement. Empty where no clock was lowered."""
    lowered = [text for text in measured if text]
    if not lowered:
        return ""
    why = [reason for reason in THROTTLE_REASONS.values() if any(reason in text.split(", ") for text in lowered)]
    return f"the GPU lowered its clocks in {len(lowered)} of {len(measured)} measurements: {', '.join(why)}"


def _power_watts(readings: Sequence[Reading]) -> float | None:
    """The mean, of one GPU: by its energy counter where it has one, else of what it said at each reading."""
    counted = [(one.at_seconds, one.energy_joules) for one in readings if one.energy_joules is not None]
    if len(counted) > 1:
        (began, before), (ended, after) = counted[0], counted[-1]
        if ended - began >= LEAST_COUNTED_SECONDS and after > before:
            return (after - before) / (ended - began)
    return _over_time(one.power_watts for one in readings)


def _by_gpu(samples: Sequence[Sample]) -> list[list[Reading]]:
    return [[sample[gpu] for sample in samples if gpu in sample] for gpu in (samples[0] if samples else {})]


def _over_time(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _sum(values: Iterable[float | None]) -> float | None:
    known = _all_known(list(values))
    return sum(known) if known else None


def _all_known(values: Sequence[float | None]) -> list[float]:
    """Empty where one is unknown."""
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else []
