"""Throughput and latency as logarithms, measured and simulated: the errors of a simulation are relative."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from objectives.metrics import METRICS
from optimizer.batcher.simulator import Simulated
from optimizer.problem import Problem
from optimizer.trial import Candidate, Point

Array = npt.NDArray[np.float64]
Cell = tuple[Candidate, int]  # and its concurrency

LATENCY_FIELDS = {
    "latency-avg": "latency_avg_s",
    "latency-p50": "latency_p50_s",
    "latency-p90": "latency_p90_s",
    "latency-p95": "latency_p95_s",
    "latency-p99": "latency_p99_s",
}


def judged_latency(problem: Problem, measured: Sequence[Point]) -> str:
    """The latency that decides: of several bounds the one that most of what was measured comes nearest to."""
    bounds = [c for c in problem.constraints if c.metric in LATENCY_FIELDS]

    def share(bound: float, metric: str) -> float:
        values = [value for point in measured if (value := METRICS[metric].value(point.measurement))]
        return statistics.median(values) / bound if values else 0.0

    nearest = max(bounds, key=lambda c: share(c.bound, c.metric), default=None)
    return nearest.metric if nearest else "latency-p95"


def is_known(point: Point, latency: str) -> bool:
    """Whether both figures were measured."""
    return bool(point.measurement.throughput_infer_per_sec and METRICS[latency].value(point.measurement))


def log_figures(point: Point, latency: str) -> tuple[float, float]:
    """(log of inferences/s, log of seconds) as measured."""
    throughput = point.measurement.throughput_infer_per_sec
    milliseconds = METRICS[latency].value(point.measurement)
    assert throughput, "measured points only"
    assert milliseconds, "measured points only"
    return math.log(throughput), math.log(milliseconds / 1e3)


def log_simulated(simulated: Simulated, latency: str) -> tuple[float, float]:
    """As ``log_figures``."""
    return math.log(simulated.throughput_infer_per_s), math.log(getattr(simulated, LATENCY_FIELDS[latency]))


def with_tails(figures: Array, cells: Sequence[Cell], request_batch_size: float) -> Array:
    """``figures`` [cells, 2] with the log of the latency replaced by that of the tail: latency over mean latency,
    which in a closed loop is load / throughput (Little's law)."""
    return np.stack([figures[:, 0], figures[:, 1] + figures[:, 0] - log_loads(cells, request_batch_size)], axis=1)


def log_loads(cells: Sequence[Cell], request_batch_size: float) -> Array:
    """Of the samples in flight."""
    return np.log([load * request_batch_size for _, load in cells])
