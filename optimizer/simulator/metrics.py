"""Throughput and latency as logarithms, measured and simulated, because errors of a simulation are relative."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from objectives import batch_stats
from objectives.metrics import METRICS, Measurement
from optimizer.config.search_space import Problem
from optimizer.core.trial import Candidate, LoadPoint, Point
from optimizer.simulator.scenario import Array, SimulationResult, SimulationTrace

ConfigurationLoad = tuple[Candidate, int]  # a candidate at a concurrency; arrays call it a cell

LATENCY_NAMES = ("avg", "p50", "p90", "p95", "p99")
LATENCY_FIELDS = {f"latency-{name}": f"latency_{name}_s" for name in LATENCY_NAMES}


def binding_latency(problem: Problem, measured: Sequence[Point]) -> str:
    """Return the latency metric of the bound that most measurements come closest to.

    Without a bound on a latency it is ``latency-p95``.
    """

    def median_share(bound: float, metric: str) -> float:
        values = [value for point in measured if (value := METRICS[metric].value(point.measurement))]
        return statistics.median(values) / bound if values else 0.0

    binding = max(problem.sla.latencies, key=lambda c: median_share(c.bound, c.metric), default=None)
    return binding.metric if binding else "latency-p95"


def is_complete(point: Point, latency: str) -> bool:
    """Return whether both the throughput and ``latency`` were measured."""
    return bool(point.measurement.throughput_infer_per_sec and METRICS[latency].value(point.measurement))


def log_measured(point: Point, latency: str) -> tuple[float, float]:
    """Return (log of infer/s, log of seconds) of a complete measured point."""
    throughput = point.measurement.throughput_infer_per_sec
    milliseconds = METRICS[latency].value(point.measurement)
    assert throughput, "complete points only"
    assert milliseconds, "complete points only"
    return math.log(throughput), math.log(milliseconds / 1e3)


def log_simulated(result: SimulationResult, latency: str) -> tuple[float, float]:
    """Return (log of infer/s, log of seconds) of a simulation."""
    return math.log(result.throughput_infer_per_s), math.log(getattr(result, LATENCY_FIELDS[latency]))


def with_tails(metrics: Array, cells: Sequence[ConfigurationLoad], request_batch_size: float) -> Array:
    """Return ``metrics`` [cells, 2] with the log latency replaced by the log tail ratio.

    The tail ratio is the latency divided by the mean latency, which in a closed loop is the samples in flight
    divided by the throughput (Little's law).
    """
    return np.stack([metrics[:, 0], metrics[:, 1] + metrics[:, 0] - log_loads(cells, request_batch_size)], axis=1)


def log_loads(cells: Sequence[ConfigurationLoad], request_batch_size: float) -> Array:
    """Return the logarithms [cells] of the samples in flight."""
    return np.log([load * request_batch_size for _, load in cells])


def as_closed_loop(points: Sequence[Point], problem: Problem) -> list[Point]:
    """Return ``points`` with each request rate replaced by the equivalent concurrency.

    That is the mean number of requests in flight (Little's law), in requests of the space's batch size and at most
    the problem's maximum concurrency, because an overloaded server queues any number. Points without a mean
    latency are omitted.
    """
    batch = problem.space.request_batch_size
    converted = []
    for point in points:
        measured = point.measurement
        if measured.throughput_infer_per_sec and measured.latency_avg_ms:
            mean = measured.throughput_infer_per_sec / batch * measured.latency_avg_ms / 1e3
            concurrency = max(1, min(round(mean), problem.max_concurrency))
            converted.append(replace(point, load=LoadPoint(batch, concurrency)))
    return converted


def simulated_measurement(result: SimulationResult, executions: SimulationTrace, network_s: float) -> Measurement:
    """Return what a load generator and the server's statistics would report of a simulation.

    ``executions`` is a trace of the same scenario; each request spends ``network_s`` outside queue and computation.
    """
    compute_s = result.latency_avg_s - result.queue_avg_s - network_s
    metrics = {
        "throughput_infer_per_sec": result.throughput_infer_per_s,
        **{f"latency_{name}_ms": 1e3 * getattr(result, f"latency_{name}_s") for name in LATENCY_NAMES},
        "network_ms": 1e3 * network_s,
        "queue_ms": 1e3 * result.queue_avg_s,
        "compute_infer_ms": 1e3 * max(compute_s, 0.0),
        "mean_batch_size": result.mean_batch_size,
    }
    rounded: dict[str, Any] = {name: six_digits(value) for name, value in metrics.items()}
    return Measurement(
        **rounded,
        compute_input_ms=0.0,
        compute_output_ms=0.0,
        batch_stats=batch_stats.to_text(_executions_by_size(executions)),
        requests=result.requests,
        stable=True,
    )


def _executions_by_size(executions: SimulationTrace) -> list[batch_stats.BatchStatistic]:
    ended = np.isfinite(executions.end_s)
    sizes, durations_s = executions.samples[ended], (executions.end_s - executions.start_s)[ended]
    entries = []
    for size in np.unique(sizes):
        own = durations_s[sizes == size]
        total_ns = round(1e9 * float(own.sum()))
        entries.append(batch_stats.BatchStatistic(int(size), len(own), total_ns))
    return entries


def six_digits(value: float) -> float:
    """Return ``value`` rounded to the precision of a trials table."""
    return float(f"{value:.6g}") if math.isfinite(value) else value
