"""A model of a server whose batching is unknown: a closed queueing network with a few parameters.

It serves models that Triton's dynamic batcher does not describe, such as those with continuous batching. The
throughput X of n requests in flight has the asymptotic bounds X <= min(n / R, X_max) (Denning and Buzen 1978;
Lazowska et al. 1984, "Quantitative System Performance", chapter 5), where R is the time of one request alone. They
are smoothed by two further facts. Requests that run together slow each other down, and at most some number of
requests (the slots) runs at once; the others wait. The mean latency follows from Little's law.

A batch of j requests on an instance takes R (f + (1 - f) j), where f is the share of the time that does not depend
on the batch. Instances that are busy together slow each other down by contention. So more slots raise X_max up to a
saturation that f and the contention determine, and that only measurements can tell.

A latency of a request is the mean latency times a factor for its quantile. The time to the first response has the
wait and a share of the running time. The inter-token latency is a share of the running time and has no wait.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from objectives.arrays import FloatArray
from objectives.metrics import ITL, METRICS, QUANTILES, TTFT, Metric
from objectives.quantiles import quantile_at
from optimizer.config.problem import Problem
from optimizer.core.trial import Point
from optimizer.simulator.normal_prior import fit_vector, point_weights, sample_vectors
from optimizer.simulator.predicted_metrics import (
    ConfigurationLoad,
    ModelErrors,
    as_tail_ratios,
    configuration_loads,
    log_measurements,
)

# Expected errors of the model, twice those of a simulation without the server's statistics.
ERRORS = ModelErrors(throughput=0.3, tail=0.2)
# Medians and standard deviations of the prior. The time of a request alone is relative to the shortest measured one.
# The log-odds of the fixed share cover decoding, which hardly depends on the batch, and compute-bound batches, which
# take time in proportion. Without a maximum batch size the slots are unknown. With one, they grow with its power
# ``elasticity``, which is 1 where it limits the running requests and 0 where the model ignores it.
MEDIANS = np.array([0.0, 1.0, math.log(0.3), math.log(4.0), 0.9])
DEVIATIONS = np.array([1.0, 2.0, 1.5, 1.5, 0.3])
# log of the ratio of a quantile to the mean
TAILS: Mapping[str, float] = {"avg": 0.0, "p50": -0.05, "p90": 0.3, "p95": 0.4, "p99": 0.6}
TAIL_DEVIATION = 0.4
# log-odds of the share of the running time before the first response, and log of the share between two responses
FIRST_SHARE, FIRST_DEVIATION = -2.2, 1.5
NEXT_SHARE, NEXT_DEVIATION = -3.4, 1.5
SHARPNESS = 8.0  # exponent of the smooth minimum of requests and slots


@dataclass(frozen=True, slots=True)
class NetworkPerformance:
    """The performance of a candidate at a load; ``latencies_s`` has the metrics that the model was fitted to."""

    throughput_infer_per_sec: float
    mean_batch_size: float
    utilization: float
    latencies_s: Mapping[str, float]

    def latency_s(self, metric: str) -> float:
        """Return the latency of a fitted metric."""
        return self.latencies_s[metric]


@dataclass(frozen=True, eq=False)
class ClosedNetwork:
    """The closed network with the parameters ``standardized``, in standard deviations of the prior from its medians.

    Attributes:
        latencies: The metrics that the model is fitted to.
        request_s: Scale of the time of a request alone.
        standardized: The parameters.
        covariance_root: A square root of the posterior covariance of ``standardized``.
    """

    name: ClassVar[str] = "closed queueing network"
    errors: ClassVar[ModelErrors] = ERRORS

    latencies: tuple[str, ...]
    request_batch_size: int
    request_s: float
    standardized: FloatArray
    covariance_root: FloatArray
    seed: int = 0

    def simulate(self, loads: Sequence[ConfigurationLoad], threads: int = 1) -> list[NetworkPerformance]:
        """Return the performance of each (candidate, concurrency)."""
        if not loads:
            return []
        logs, together, used = self._predict(_Settings.from_loads(loads, self.request_batch_size), self.standardized)
        rows = zip(np.exp(logs).tolist(), together.tolist(), used.tolist(), strict=True)
        return [
            NetworkPerformance(
                self.request_batch_size * throughput,
                self.request_batch_size * batch,
                busy,
                dict(zip(self.latencies, latencies_s, strict=True)),
            )
            for (throughput, *latencies_s), batch, busy in rows
        ]

    def fitted(self, points: Sequence[Point]) -> ClosedNetwork:
        """Return the network that is closest to ``points`` and the prior, by a robust loss."""
        loads = configuration_loads(points)
        settings, batch = _Settings.from_loads(loads, self.request_batch_size), self.request_batch_size
        measured = as_tail_ratios(log_measurements(points, self.latencies), loads, batch)
        weights = point_weights(loads)

        def residuals(vector: FloatArray) -> FloatArray:
            logs = self._predict(settings, vector)[0]
            logs[:, 0] += math.log(batch)
            return np.concatenate([((as_tail_ratios(logs, loads, batch) - measured) * weights).ravel(), vector])

        standardized, covariance_root = fit_vector(residuals, len(self.standardized))
        return replace(self, standardized=standardized, covariance_root=covariance_root)

    def samples(self, count: int) -> list[ClosedNetwork]:
        """Return ``count`` samples of the posterior (Laplace's approximation)."""
        return [
            replace(self, standardized=vector)
            for vector in sample_vectors(self.standardized, self.covariance_root, count, self.seed)
        ]

    def _predict(self, settings: _Settings, vector: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return log requests/s and log latencies [loads, 1 + latencies], requests together, and the used share."""
        alone, odds, contention, own_slots, elasticity = MEDIANS + DEVIATIONS * vector[: len(MEDIANS)]
        further = vector[len(MEDIANS) :]
        request_s, fixed = self.request_s * math.exp(alone), _share(odds)
        limit = np.where(np.isnan(settings.limits), math.exp(own_slots), settings.limits)
        power = np.where(np.isnan(settings.limits), 1.0, min(max(elasticity, 0.0), 1.0))
        slots = settings.instances * np.exp(power * np.log(limit) + (1 - power) * own_slots)
        running = _smooth_minimum(settings.requests, slots)
        busy = np.minimum(running, settings.instances)
        together = running / busy
        slowdown = (fixed + (1 - fixed) * together) * (1 + math.exp(contention) * (np.maximum(busy, 1.0) - 1))
        running_s = request_s * slowdown
        wait_s = running_s * (settings.requests / running - 1)
        columns = [np.log(running / running_s)]
        for metric, parameter in zip(self.latencies, further[1:], strict=True):
            definition = METRICS[metric]
            tail = _tail(definition) + TAIL_DEVIATION * parameter
            if definition.timing is TTFT:
                first = _share(FIRST_SHARE + FIRST_DEVIATION * further[0])
                columns.append(np.log(wait_s + first * running_s) + tail)
            elif definition.timing is ITL:
                columns.append(np.log(running_s) + NEXT_SHARE + NEXT_DEVIATION * parameter)
            else:
                columns.append(np.log(wait_s + running_s) + tail)
        return np.stack(columns, axis=1), together, running / slots


@dataclass(frozen=True, eq=False)
class _Settings:
    """The requests in flight, the instances and the maximum requests of a batch [loads]; NaN without batching.

    The instances are those of all server processes.
    """

    requests: FloatArray
    instances: FloatArray
    limits: FloatArray

    @classmethod
    def from_loads(cls, loads: Sequence[ConfigurationLoad], request_batch_size: int) -> _Settings:
        """Return the settings of each configuration and load."""
        return cls(
            np.array([concurrency for _, concurrency in loads], np.float64),
            np.array([candidate.total_instances for candidate, _ in loads], np.float64),
            np.array(
                [
                    max(1.0, candidate.max_batch_size / request_batch_size)
                    if candidate.dynamic_batching or candidate.is_stateful
                    else math.nan
                    for candidate, _ in loads
                ]
            ),
        )


def fit(points: Sequence[Point], problem: Problem, latencies: Sequence[str], seed: int = 0) -> ClosedNetwork:
    """Return the network that is closest to ``points``, which are complete for the metrics ``latencies``.

    Raises:
        ValueError: ``points`` is empty.
    """
    if not points:
        raise ValueError("no measured points to fit the model to")
    batch = problem.space.request_batch_size
    request_s = min(
        batch * point.load.concurrency / (point.measurement.throughput_infer_per_sec or math.inf) for point in points
    )
    size = len(MEDIANS) + 1 + len(latencies)
    unfitted = ClosedNetwork(tuple(latencies), batch, request_s, np.zeros(size), np.eye(size), seed)
    return unfitted.fitted(points)


def _tail(metric: Metric) -> float:
    """Return the log of the ratio of the metric to the mean, from TAILS for percentiles that are not in it."""
    if metric.quantile is None or metric.statistic in TAILS:
        return TAILS[metric.statistic]
    return math.log(quantile_at({level: math.exp(TAILS[name]) for name, level in QUANTILES.items()}, metric.quantile))


def _share(log_odds: float) -> float:
    return 1 / (1 + math.exp(-log_odds))


def _smooth_minimum(a: FloatArray, b: FloatArray) -> FloatArray:
    return np.asarray((a**-SHARPNESS + b**-SHARPNESS) ** (-1 / SHARPNESS))
