"""The metrics that a model of a server predicts, as logarithms, because the errors of a model are relative."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Protocol, TypeAlias

import numpy as np

from objectives import model_stats
from objectives.arrays import FloatArray
from objectives.metrics import METRICS, QUANTILES, TIMINGS
from optimizer.config.problem import Problem
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import Candidate
from optimizer.core.trial import LoadPoint, Point

ConfigurationLoad: TypeAlias = tuple[Candidate, int]  # a candidate and the concurrency of its load

MIN_DISTANCE = 1e-3  # relative distance of two quantiles of a latency


def configuration_loads(points: Sequence[Point], space: SearchSpace | None = None) -> list[ConfigurationLoad]:
    """Return the candidate and the concurrency of each point, the candidate as it is canonical in ``space``."""
    return [
        (space.canonical(point.candidate) if space else point.candidate, point.load.concurrency) for point in points
    ]


def binding_latency(problem: Problem, measured: Sequence[Point]) -> str:
    """Return the latency metric of the bound that most measurements come closest to.

    Without a bound on a latency it is ``latency-p95``.
    """

    def median_share(bound: float, metric: str) -> float:
        values = [value for point in measured if (value := METRICS[metric].value(point.measurement))]
        return statistics.median(values) / bound if values else 0.0

    binding = max(problem.sla.latencies, key=lambda c: median_share(c.bound, c.metric), default=None)
    return binding.metric if binding else "latency-p95"


def predicted_latencies(problem: Problem, measured: Sequence[Point]) -> tuple[str, ...]:
    """Return the latency metrics that the search predicts, the binding one first.

    Where the simulator applies that is the binding latency alone. Its bounds are on quantiles of one distribution, so
    the same one binds everywhere. Other models may be limited by the time to the first response in one configuration
    and by the inter-token latency in another, so all bounded latencies are predicted. For the goodput they are also
    quantiles of each bounded time, which ``ShareWithinBounds`` needs.
    """
    binding = binding_latency(problem, measured)
    bounded = () if problem.is_simulated else (constraint.metric for constraint in problem.sla.latencies)
    quantiles: list[str] = []
    if problem.objectives[0] is METRICS["goodput"]:
        quantiles = [timing.metric(name) for timing in TIMINGS if problem.sla.bounds_ms(timing) for name in QUANTILES]
    return tuple(dict.fromkeys([binding, *bounded, *quantiles]))


@dataclass(frozen=True, eq=False)
class ShareWithinBounds:
    """The share of the requests that are within all latency bounds, from quantiles of their latencies.

    A latency is taken as log-normal between two of its quantiles and beyond the outermost ones. If several times of a
    request are bounded, the requests that miss one bound are taken to be those that miss another one.

    Attributes:
        deadlines: The columns of the quantiles of each bounded time, their normal scores, and the log deadline.
    """

    deadlines: Sequence[tuple[list[int], FloatArray, float]]

    @classmethod
    def from_problem(cls, problem: Problem, latencies: Sequence[str]) -> ShareWithinBounds | None:
        """Return the share for the columns ``latencies`` if the goodput of ``problem`` is ranked, else None."""
        if problem.objectives[0] is not METRICS["goodput"]:
            return None
        deadlines = []
        for timing in TIMINGS:
            if bounds_ms := problem.sla.bounds_ms(timing):
                levels = {QUANTILES[name]: latencies.index(timing.metric(name)) for name in QUANTILES}
                scores = np.array([NormalDist().inv_cdf(level) for level in levels])
                deadlines.append((list(levels.values()), scores, math.log(min(bounds_ms) / 1e3)))
        return cls(deadlines)

    def logarithm(self, log_latencies: FloatArray) -> FloatArray:
        """Return the log of the share [loads] for log latencies [loads, latencies] in seconds."""
        from scipy.special import log_ndtr

        least = np.full(len(log_latencies), np.inf)
        for columns, scores, deadline in self.deadlines:
            quantiles = np.maximum.accumulate(log_latencies[:, columns], axis=1)
            below = np.clip((quantiles < deadline).sum(axis=1) - 1, 0, len(columns) - 2)
            low, high = (np.take_along_axis(quantiles, below[:, None] + i, axis=1)[:, 0] for i in (0, 1))
            slope = (scores[below + 1] - scores[below]) / np.maximum(high - low, MIN_DISTANCE)
            least = np.minimum(least, scores[below] + (deadline - low) * slope)
        return np.asarray(log_ndtr(least))


def latency_bounds_s(problem: Problem, latencies: Sequence[str]) -> FloatArray:
    """Return the bounds [latencies] in seconds; infinity without a bound."""
    return np.array([problem.sla.latency_bound_ms(latency) / 1e3 for latency in latencies])


def is_complete(point: Point, *latencies: str) -> bool:
    """Return whether the throughput and all ``latencies`` were measured."""
    values = [METRICS[latency].value(point.measurement) for latency in latencies]
    return bool(point.measurement.throughput_infer_per_sec) and all(values)


def log_measurements(points: Sequence[Point], latencies: Sequence[str]) -> FloatArray:
    """Return the log of infer/s and of the seconds of each latency [points, 1 + latencies] of complete points."""
    assert all(is_complete(point, *latencies) for point in points), "complete points only"
    rows = [
        [
            point.throughput_infer_per_sec,
            *((METRICS[name].value(point.measurement) or 0.0) / 1e3 for name in latencies),
        ]
        for point in points
    ]
    return np.asarray(np.log(np.array(rows, np.float64).reshape(-1, 1 + len(latencies))))


class Performance(Protocol):
    """The performance of a candidate at a load, as a model of the server predicts it."""

    @property
    def throughput_infer_per_sec(self) -> float:
        """Samples per second."""

    @property
    def mean_batch_size(self) -> float:
        """Samples that an instance computes together."""

    @property
    def utilization(self) -> float:
        """Share of the server's capacity in use, 0 to 1."""

    def latency_s(self, metric: str) -> float:
        """Return the latency of a metric of METRICS in seconds."""


@dataclass(frozen=True, slots=True)
class ModelErrors:
    """Prior standard deviations of a model's relative errors: of the throughput, and of each tail ratio."""

    throughput: float
    tail: float


def log_predictions(results: Sequence[Performance], latencies: Sequence[str]) -> FloatArray:
    """Return the log of infer/s and of the seconds of each latency [results, 1 + latencies]."""
    rows = [[result.throughput_infer_per_sec, *map(result.latency_s, latencies)] for result in results]
    return np.asarray(np.log(np.array(rows, np.float64).reshape(-1, 1 + len(latencies))))


def as_tail_ratios(metrics: FloatArray, loads: Sequence[ConfigurationLoad], request_batch_size: float) -> FloatArray:
    """Return ``metrics`` [loads, 1 + latencies] with each log latency replaced by the log tail ratio.

    The tail ratio is the latency divided by the mean latency, which in a closed loop is the samples in flight
    divided by the throughput (Little's law).
    """
    mean = log_loads(loads, request_batch_size) - metrics[:, 0]
    return np.concatenate([metrics[:, :1], metrics[:, 1:] - mean[:, None]], axis=1)


def log_loads(loads: Sequence[ConfigurationLoad], request_batch_size: float) -> FloatArray:
    """Return the logarithms [loads] of the samples in flight."""
    return np.log([concurrency * request_batch_size for _, concurrency in loads])


def as_closed_loop(points: Sequence[Point], problem: Problem) -> list[Point]:
    """Return ``points`` as ``with_concurrency`` does if the loop of ``problem`` is open, otherwise unchanged."""
    return with_concurrency(points, problem) if problem.open_loop else list(points)


def with_concurrency(points: Sequence[Point], problem: Problem) -> list[Point]:
    """Return ``points`` with each load replaced by the equivalent concurrency.

    That is the mean number of requests in flight (Little's law), in requests of the space's batch size and at most
    the problem's maximum concurrency, because an overloaded server queues any number. Points without a mean
    latency are omitted.

    If several models are simulated, their requests are added: the latency of a point is that of the slowest model.
    With less than one request in flight, the throughput becomes that of one in flight with the same latencies.
    """
    batch = problem.space.request_batch_size
    converted = []
    for point in points:
        own = model_stats.from_text(point.measurement.by_model) if problem.concurrent else {}
        rates, latencies_ms = zip(
            *((m.throughput_infer_per_sec, m.latency_avg_ms) for m in (own.values() or [point.measurement])),
            strict=True,
        )
        if all(rates) and all(latencies_ms):
            mean = float(np.dot(rates, latencies_ms)) / batch / 1e3
            concurrency = max(1, min(round(mean), problem.max_concurrency))
            point = replace(point, load=LoadPoint(batch, concurrency))
            if own and mean < 1:
                single = replace(point.measurement, throughput_infer_per_sec=sum(rates) / mean)
                point = replace(point, measurement=single)
            converted.append(point)
    return converted


def six_digits(value: float) -> float:
    """Return ``value`` rounded to the precision of a trials table."""
    return float(f"{value:.6g}") if math.isfinite(value) else value
