"""The forecast of a candidate's latencies at request rates, from its search and its fresh servers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from objectives.arrays import FloatArray
from objectives.metrics import LATENCY, METRICS
from objectives.pooled_windows import pooled_quantile_ms
from objectives.queue_forecast import PlannedTest, QueueForecast, RateMeasurement
from objectives.queue_memory import MIN_TAIL_LEVEL, exponential_tail_ms
from objectives.server_spread import ServerSpread
from optimizer.config.problem import Problem
from optimizer.confirmation.windows import confirmed_loads, pooled_point
from optimizer.core.trial import LoadPoint, Point, Trial, all_points


@dataclass(frozen=True, slots=True)
class RateForecast:
    """The forecast of each bounded latency of a candidate, by metric."""

    queues: Mapping[str, QueueForecast]

    def log_latency_ratios(self, loads: Sequence[LoadPoint], problem: Problem) -> FloatArray:
        """Return the log of the latency over its bound at each of ``loads``, the largest one of several bounds."""
        logs = [
            queue.log_latency_ms(_rates(loads)) - math.log(problem.sla.latency_bound_ms(metric))
            for metric, queue in self.queues.items()
        ]
        largest: FloatArray = np.array(logs).max(axis=0)
        return largest

    def chances(
        self, loads: Sequence[LoadPoint], problem: Problem, test: PlannedTest, spreads: Mapping[str, ServerSpread]
    ) -> list[float]:
        """Return the probability that ``test`` passes at each of ``loads``, the lowest one of several bounds."""
        chances = [
            queue.chances(_rates(loads), problem.sla.latency_bound_ms(metric), test, spreads[metric])
            for metric, queue in self.queues.items()
        ]
        return [float(chance) for chance in np.array(chances).min(axis=0)]


def forecast_trial(trial: Trial, problem: Problem) -> RateForecast | None:
    """Return ``forecast_rates`` of all measurements of ``trial``."""
    confirmed = (pooled_point(trial, load) for _, load in confirmed_loads([trial]))
    return forecast_rates([*all_points([trial]), *confirmed], problem)


def forecast_rates(points: Sequence[Point], problem: Problem) -> RateForecast | None:
    """Return the forecast from the ``points`` of one candidate; None if its latencies do not follow from a queue.

    That is so without a steady request rate, for models that stream or keep state, and for a mean latency. It is also
    None if no latency is bounded.
    """
    times = problem.request_times
    is_steady = problem.open_loop and times is not None and times.is_steady
    if not is_steady or not problem.is_simulated or not problem.sla.latencies:
        return None
    queues = dict[str, QueueForecast]()
    for metric in problem.sla.bounded_latencies:
        level = METRICS[metric].quantile
        if level is None or METRICS[metric].timing is not LATENCY:
            return None
        measured = [one for point in points if (one := _rate_measurement(point, level))]
        if not any(one.latency_ms for one in measured):
            return None
        queues[metric] = QueueForecast(measured, 1 - level, points[0].candidate.server_processes)
    return RateForecast(queues)


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
