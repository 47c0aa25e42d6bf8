"""The resources that a server used during a measurement, which telemetry records: CPUs, GPUs and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from objectives.metrics import Measurement


@dataclass(frozen=True, slots=True)
class CpuInterval:
    """The CPU time between two Unix times.

    Attributes:
        begin_unix_seconds: Unix time at which the interval starts.
        end_unix_seconds: Unix time at which it ends.
        total_seconds: CPU time of the observed CPUs, including idle time.
        other_seconds: CPU time that other processes or machines took. It can be slightly negative, because the
            kernel's counters rise in steps.
    """

    begin_unix_seconds: float
    end_unix_seconds: float
    total_seconds: float
    other_seconds: float

    def part_between(self, begin_unix_seconds: float, end_unix_seconds: float) -> float:
        """Return the part of the interval that lies between two Unix times, 0 to 1."""
        begin = max(self.begin_unix_seconds, begin_unix_seconds)
        end = min(self.end_unix_seconds, end_unix_seconds)
        return max(0.0, end - begin) / (self.end_unix_seconds - self.begin_unix_seconds)


@dataclass(slots=True)
class ResourceUsage:
    """Resources that the server used during a recording, filled when the recording ends. None means unknown.

    The fields have the meaning of those of ``Measurement``. ``cpu_intervals`` are successive parts of the recording;
    ``added_to`` computes the ``other_cpu_share`` of one measurement from them. They are empty if the CPU time is
    unknown.
    """

    gpu_utilization: float | None = None
    gpu_memory_bytes: float | None = None
    gpu_power_watts: float | None = None
    gpu_sm_clock_mhz: float | None = None
    gpu_memory_clock_mhz: float | None = None
    gpu_throttling: str = ""
    server_memory_bytes: float | None = None
    other_cpu_share: float | None = None
    kv_cache_utilization: float | None = None
    engine_tokens_per_sec: float | None = None
    engine_preemptions: float | None = None
    cpu_intervals: Sequence[CpuInterval] = ()

    def fill_in(self, other: ResourceUsage) -> None:
        """Set the values that are unknown to those of ``other``."""
        for field in fields(self):
            if getattr(self, field.name) in (None, "", ()):
                setattr(self, field.name, getattr(other, field.name))

    def added_to(self, measurement: Measurement) -> Measurement:
        """Return ``measurement``, which was taken during the recording, with the resources that are known.

        ``other_cpu_share`` covers the time of the measurement. If that time or its CPU intervals are unknown, it
        covers the whole recording.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "cpu_intervals"}
        known = {name: value for name, value in values.items() if value is not None}
        if (share := self._other_cpu_share_during(measurement)) is not None:
            known["other_cpu_share"] = share
        return replace(measurement, **known)

    def _other_cpu_share_during(self, measurement: Measurement) -> float | None:
        """Return the CPU share of others over the time of ``measurement``; None if one of them is unknown."""
        begin, end = measurement.begin_unix_seconds, measurement.end_unix_seconds
        if begin is None or end is None:
            return None
        parts = [interval.part_between(begin, end) for interval in self.cpu_intervals]
        pairs = list(zip(parts, self.cpu_intervals, strict=True))
        total_seconds = sum(part * interval.total_seconds for part, interval in pairs)
        other_seconds = sum(part * interval.other_seconds for part, interval in pairs)
        if total_seconds <= 0:  # there is no interval, or a counter of the kernel has fallen
            return None
        return round(min(1.0, max(0.0, other_seconds / total_seconds)), 4)
