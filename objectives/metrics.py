"""Measurement, and the table of metrics that objectives and constraints are named by.

A new metric is one entry in ``METRICS``: objectives, constraints, console and reports take it from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

OVERLOADED = "overloaded"  # what the reason of a measurement begins with whose rate was more than could be served


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one load on one deployed configuration gave.

    ``None`` means unknown; it is never read as zero and never as success. Throughput counts inferences
    (samples: requests x request batch size), latencies are per request and in milliseconds.
    ``batch_stats``: executions by batch size, ``size:executions:compute_ns`` separated by spaces.
    ``other_cpu_share``: of the CPUs' time while it was measured, 0 to 1, what went to other processes or machines.
    GPU figures are of the server's GPUs: utilisation (0 to 1) and clocks are means, memory and power are sums.
    ``gpu_throttling``: why they lowered their clocks meanwhile; empty where they did not, or nothing is known of it.
    ``score``: of the answers to labelled samples, by the user's metric, whatever the load.
    ``stable`` is false where the windows of the run disagreed or it failed; ``reason`` then says why.
    """

    throughput_infer_per_sec: float | None = None
    latency_avg_ms: float | None = None
    latency_p50_ms: float | None = None
    latency_p90_ms: float | None = None
    latency_p95_ms: float | None = None
    latency_p99_ms: float | None = None
    client_send_ms: float | None = None
    network_ms: float | None = None
    queue_ms: float | None = None
    compute_input_ms: float | None = None
    compute_infer_ms: float | None = None
    compute_output_ms: float | None = None
    client_recv_ms: float | None = None
    mean_batch_size: float | None = None
    batch_stats: str = ""
    requests: int | None = None
    stable: bool = False
    gpu_utilization: float | None = None
    gpu_memory_bytes: float | None = None
    gpu_power_watts: float | None = None
    gpu_sm_clock_mhz: float | None = None
    gpu_memory_clock_mhz: float | None = None
    gpu_throttling: str = ""
    server_memory_bytes: float | None = None
    other_cpu_share: float | None = None
    measure_seconds: float | None = None
    score: float | None = None
    reason: str = ""

    @property
    def is_overloaded(self) -> bool:
        """Whether its rate was more than the server could serve."""
        return self.reason.startswith(OVERLOADED)


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of merit: how it is called on the command line, its unit, which way is better."""

    name: str
    unit: str
    better: Literal["higher", "lower"]
    value: Callable[[Measurement], float | None]

    def cost(self, measurement: Measurement) -> float | None:
        """The value oriented so that lower is better, or None where it is unknown."""
        value = self.value(measurement)
        if value is None or math.isnan(value):
            return None
        return -value if self.better == "higher" else value


def _memory_bytes(m: Measurement) -> float | None:
    return m.gpu_memory_bytes if m.gpu_memory_bytes is not None else m.server_memory_bytes


def _joules_per_1000_inferences(m: Measurement) -> float | None:
    if m.gpu_power_watts is None or not m.throughput_infer_per_sec:
        return None
    return 1000 * m.gpu_power_watts / m.throughput_infer_per_sec


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("throughput", "infer/s", "higher", lambda m: m.throughput_infer_per_sec),
        Metric("latency-avg", "ms", "lower", lambda m: m.latency_avg_ms),
        Metric("latency-p50", "ms", "lower", lambda m: m.latency_p50_ms),
        Metric("latency-p90", "ms", "lower", lambda m: m.latency_p90_ms),
        Metric("latency-p95", "ms", "lower", lambda m: m.latency_p95_ms),
        Metric("latency-p99", "ms", "lower", lambda m: m.latency_p99_ms),
        # the GPU's memory where there is one, else the resident memory of the server's processes
        Metric("memory", "bytes", "lower", _memory_bytes),
        # what memory means of a model that is served on a GPU: unknown where the GPU does not tell
        Metric("gpu-memory", "bytes", "lower", lambda m: m.gpu_memory_bytes),
        Metric("energy", "J/1000 infer", "lower", _joules_per_1000_inferences),
        Metric("score", "", "higher", lambda m: m.score),
    )
}
