"""The forecast of a candidate's latencies at request rates, from its search and its fresh servers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from objectives import model_stats
from objectives.arrays import FloatArray
from objectives.metrics import LATENCY, METRICS
from objectives.pooled_windows import pooled_quantile_ms
from objectives.queue_forecast import PlannedTest, QueueForecast, RateMeasurement
from objectives.queue_memory import MIN_TAIL_LEVEL, exponential_tail_ms
from objectives.server_spread import ServerSpread
from optimizer.config.problem import Problem
from optimizer.confirmation.windows import confirmed_loads, pooled_point
from optimizer.core.trial import LoadPoint, Point, Trial, all_points


class ModelQueue(NamedTuple):
    """The forecast of a bounded latency, ``metric``, of a model that gets ``share`` of the request rate."""

    metric: str
    share: float
    forecast: QueueForecast


@dataclass(frozen=True, slots=True)
class RateForecast:
    """The forecasts of each bounded latency of a candidate, for each of the models that get load."""

    queues: Sequence[ModelQueue]

    def log_latency_ratios(self, loads: Sequence[LoadPoint], problem: Problem) -> FloatArray:
        """Return the log of the latency over its bound at each of ``loads``, the largest of all bounds and models."""
        logs = [
            queue.log_latency_ms(share * _rates(loads)) - math.log(problem.sla.latency_bound_ms(metric))
            for metric, share, queue in self.queues
        ]
        largest: FloatArray = np.array(logs).max(axis=0)
        return largest

    def chances(
        self, loads: Sequence[LoadPoint], problem: Problem, test: PlannedTest, spreads: Mapping[str, ServerSpread]
    ) -> list[float]:
        """Return the probability that ``test`` passes at each of ``loads``, the lowest one of all bounds and models.

        As in the verdict, each model has to pass with its own requests.
        """
        chances = [
            queue.chances(share * _rates(loads), problem.sla.latency_bound_ms(metric), test, spreads[metric])
            for metric, share, queue in self.queues
        ]
        return [float(chance) for chance in np.array(chances).min(axis=0)]


def forecast_trial(trial: Trial, problem: Problem) -> RateForecast | None:
    """Return ``forecast_rates`` of all measurements of ``trial``."""
    confirmed = (pooled_point(trial, load) for _, load in confirmed_loads([trial]))
    return forecast_rates([*all_points([trial]), *confirmed], problem)


def forecast_rates(points: Sequence[Point], problem: Problem) -> RateForecast | None:
    """Return the forecast from the ``points`` of one candidate; None if its latencies do not follow from a queue.

    That is so without a request rate, for models that stream or keep state, and for a mean latency. It is also None
    if no latency is bounded.
    """
    if problem.request_times is None or not (problem.open_loop and problem.is_simulated and problem.sla.latencies):
        return None
    queues = list[ModelQueue]()
    for share, own_points in _by_model(points):
        for metric in problem.sla.bounded_latencies:
            level = METRICS[metric].quantile
            if level is None or METRICS[metric].timing is not LATENCY:
                return None
            measured = [one for point in own_points if (one := _rate_measurement(point, level))]
            if not any(one.latency_ms for one in measured):
                return None
            forecast = QueueForecast(measured, 1 - level, points[0].candidate.server_processes, problem.load_period)
            queues.append(ModelQueue(metric, share, forecast))
    return RateForecast(queues)


def _by_model(points: Sequence[Point]) -> Iterator[tuple[float, list[Point]]]:
    """Yield the share of the rate of each model, and the points of its requests; a single model has all of them.

    An overloaded server may answer the models in another proportion than that of their requests.
    """
    measured = [
        (point, by_model) for point in points if (by_model := model_stats.from_text(point.measurement.by_model))
    ]
    if not measured:
        yield 1.0, list(points)
        return
    steady = [by_model for point, by_model in measured if not point.measurement.overloaded]
    rates = {
        name: sum(by_model[name].throughput_infer_per_sec or 0.0 for by_model in steady or [measured[0][1]])
        for name in measured[0][1]
    }
    for name, rate in rates.items():
        share = rate / (sum(rates.values()) or 1.0)
        yield (
            share,
            [
                replace(
                    point,
                    load=point.load.scaled(share),
                    measurement=replace(by_model[name], overloaded=point.measurement.overloaded),
                )
                for point, by_model in measured
            ],
        )


def _rate_measurement(point: Point, level: float) -> RateMeasurement | None:
    """Return what ``point`` says about the quantile at ``level``; None if it has no latency."""
    measurement, tail_level = point.measurement, max(level, MIN_TAIL_LEVEL)
    latency_ms, median_ms, tail_end_ms = (
        pooled_quantile_ms([measurement], quantile) for quantile in (level, 0.5, tail_level)
    )
    if not 0 < latency_ms < math.inf or point.throughput_infer_per_sec <= 0:
        return None
    return RateMeasurement(
        point.load.request_rate,
        point.throughput_infer_per_sec / point.load.request_batch_size,
        measurement.requests or 1,
        None if measurement.overloaded else latency_ms,
        exponential_tail_ms(median_ms, tail_end_ms, tail_level) / latency_ms,
    )


def _rates(loads: Sequence[LoadPoint]) -> FloatArray:
    return np.array([load.request_rate for load in loads])
