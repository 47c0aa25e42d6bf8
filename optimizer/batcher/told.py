"""A simulated load as perf_analyzer and the server's own statistics would tell of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from objectives.metrics import Measurement
from optimizer import batch_stats
from optimizer.batcher.simulator import Simulated, Trace

LATENCIES = ("avg", "p50", "p90", "p95", "p99")


def told(simulated: Simulated, executions: Trace, way_s: float, request_batch_size: int) -> Measurement:
    """``executions`` are those of a trace of the same load; ``way_s`` is spent outside queue and computation by a
    request."""
    compute_s = simulated.latency_avg_s - simulated.queue_avg_s - way_s
    figures = {
        "throughput_infer_per_sec": simulated.throughput_infer_per_s,
        **{f"latency_{name}_ms": 1e3 * getattr(simulated, f"latency_{name}_s") for name in LATENCIES},
        "network_ms": 1e3 * way_s,
        "queue_ms": 1e3 * simulated.queue_avg_s,
        "compute_infer_ms": 1e3 * max(compute_s, 0.0),
        "mean_batch_size": simulated.mean_batch_size,
    }
    rounded: dict[str, Any] = {name: _rounded(value) for name, value in figures.items()}
    return Measurement(
        **rounded,
        compute_input_ms=0.0,
        compute_output_ms=0.0,
        batch_stats=batch_stats.to_text(_executions_by_size(executions, request_batch_size)),
        requests=simulated.requests,
        stable=True,
    )


def _executions_by_size(executions: Trace, request_batch_size: int) -> list[batch_stats.Entry]:
    ended = np.isfinite(executions.end_s)
    sizes, took_s = executions.requests[ended], (executions.end_s - executions.start_s)[ended]
    entries = []
    for size in np.unique(sizes):
        own = took_s[sizes == size]
        entries.append((int(size) * request_batch_size, len(own), round(1e9 * float(own.sum()))))
    return entries


def _rounded(value: float) -> float:
    """To six digits: what a table shows."""
    return float(f"{value:.6g}") if math.isfinite(value) else value
