"""Disturbances by other programs: their effect on the search's measurements, and the slowdown expected in the tests.

The effect is estimated from the run itself, by an analysis of covariance (Fisher 1932) with the CPU share that other
processes left as the covariate.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from objectives.arrays import FloatArray
from objectives.metrics import QUANTILES, TIMINGS, Measurement
from objectives.server_spread import deviations
from objectives.verdict import MOST_EXCLUDED
from optimizer.config.search_space import Problem
from optimizer.confirmation.load_predictions import has_all_latencies, prediction_errors
from optimizer.core.trial import Point, Trial
from optimizer.machine.conditions import lost_cpu_time
from optimizer.simulator.performance_model import PerformanceModel
from optimizer.simulator.speed_correction import at_other_speed, scaled_sketches

USUAL_DISTURBANCE = 0.10  # CPU share of other processes beyond the usual one that disturbs no measurement
MOST_TAKEN = 0.9  # CPU share of other processes; larger ones count as this
# Prior of the slopes: by how much the log of latency rises, and the log of throughput falls, with the fall of the log
# of the CPU share that is left. benchmarks/disturbed_runs.md has the slopes of real runs.
LATENCY_SLOPE, THROUGHPUT_SLOPE, SLOPE_DEVIATION = 1.5, 1.2, 0.5
POINT_NOISE = 0.15  # standard deviation of the log of a measurement over the model's prediction, within a deployment
TAIL = 0.1  # rise of the log of latency at which the share of slower requests falls by a factor of e


def was_search_disturbed(trials: Sequence[Trial]) -> bool:
    """Return whether other processes or machines disturbed more than MOST_EXCLUDED of the search's measurements."""
    measured = _measurements(trials)
    return sum(map(lost_cpu_time, measured)) > MOST_EXCLUDED * len(measured)


def disturbance_limit(trials: Sequence[Trial]) -> float:
    """Return the CPU share of other processes above which a window on a fresh server does not count.

    It is fixed before the first of these windows, from the usual share during the search: a machine that is always
    shared is measured as it is.
    """
    return USUAL_DISTURBANCE + _usual_share(trials)


@dataclass(frozen=True, slots=True)
class DisturbanceCorrection:
    """Corrects measurements to the usual CPU share of other processes; without arguments it corrects nothing.

    Attributes:
        usual_share: The median CPU share of other processes during the search, 0 to 1.
        latency_slope: Rise of the log of a latency percentile over the fall of the log of the CPU share that is left.
        throughput_slope: The same for the fall of the log of throughput, and the rise of that of average times.
        expected_slowdown: The expected rise of the log of a latency percentile over that in the usual state.
    """

    usual_share: float = 0.0
    latency_slope: float = 0.0
    throughput_slope: float = 0.0
    expected_slowdown: float = 0.0

    def correct_points(self, points: Sequence[Point]) -> list[Point]:
        """Return the points as in the usual state of the machine."""
        return [replace(point, measurement=self._correct(point.measurement)) for point in points]

    def slow_points(self, points: Sequence[Point]) -> list[Point]:
        """Return corrected points with the latency percentiles that are expected over all states of the machine."""
        return [replace(point, measurement=_slower(point.measurement, self.expected_slowdown)) for point in points]

    def _correct(self, measurement: Measurement) -> Measurement:
        fall = float(log_share_lost([measurement], self.usual_share)[0])
        if fall == 0.0 or not self.throughput_slope:
            return measurement
        corrected = at_other_speed(measurement, math.exp(self.throughput_slope * fall))
        return _slower(corrected, (self.throughput_slope - self.latency_slope) * fall)


def fit_disturbance_correction(
    points: Sequence[Point],
    trials: Sequence[Trial],
    problem: Problem,
    fit: Callable[[Sequence[Point]], PerformanceModel | None],
) -> DisturbanceCorrection:
    """Return the correction for ``points``, the search's points of ``trials``.

    A server on GPUs is not corrected. Nor is a search that was seldom disturbed, because then the disturbed windows
    of a test do not count. Request rates are not corrected: their latency is not proportional to the speed.

    The slopes are posterior means of a regression of the errors of the performance model that ``fit`` returns, within
    each deployment.

    The measurements of the search are samples of the states of the machine. Most slow requests are those of the
    slowest states. The share of requests that are slower than t is taken to fall as t ** (-1 / TAIL) in each state.
    Then the percentile over all requests is higher by TAIL * log(mean(exp(slowdown / TAIL))). Each state has the
    weight of its requests in this mean.
    """
    if problem.cpu_count is None or not was_search_disturbed(trials):
        return DisturbanceCorrection()
    usual_share = _usual_share(trials)
    prior = DisturbanceCorrection(usual_share, LATENCY_SLOPE, THROUGHPUT_SLOPE)
    latency_slope, throughput_slope = _slopes(points, usual_share, problem, fit(prior.correct_points(points)))
    falls = log_share_lost(_measurements(trials), usual_share)
    served = np.exp(-throughput_slope * falls)
    expected = TAIL * math.log(np.average(np.exp(latency_slope * falls / TAIL), weights=served))
    if problem.open_loop:
        return DisturbanceCorrection(expected_slowdown=expected)
    return DisturbanceCorrection(usual_share, latency_slope, throughput_slope, expected)


def _slopes(
    points: Sequence[Point], usual_share: float, problem: Problem, model: PerformanceModel | None
) -> tuple[float, float]:
    """Return the slopes of latency and throughput; those of the prior without a model that predicts all points."""
    points = [point for point in points if has_all_latencies(point, problem)]
    errors = prediction_errors(model, points, problem) if model is not None and points else None
    if errors is None:
        return LATENCY_SLOPE, THROUGHPUT_SLOPE
    trials = np.array([point.trial for point in points])
    deployments = [trials == number for number in np.unique(trials)]
    lost = log_share_lost([point.measurement for point in points], usual_share)
    falls = deviations([lost[own] for own in deployments])
    precision = 1 / SLOPE_DEVIATION**2 + float(falls @ falls) / POINT_NOISE**2

    def slope(expected: float, rises: FloatArray) -> float:
        within = deviations([rises[own] for own in deployments])
        weighted = expected / SLOPE_DEVIATION**2 + float(falls @ within) / POINT_NOISE**2
        return max(0.0, weighted / precision)

    throughput_slope = slope(THROUGHPUT_SLOPE, -errors[:, 1])
    return slope(LATENCY_SLOPE, errors[:, 0]) if problem.sla.latencies else throughput_slope, throughput_slope


def _usual_share(trials: Sequence[Trial]) -> float:
    """Return the median of the known CPU shares of other processes, 0 to 1."""
    shares = [measurement.other_cpu_share for measurement in _measurements(trials)]
    known = [share for share in shares if share is not None]
    return statistics.median(known) if known else 0.0


def log_share_lost(measurements: Sequence[Measurement], usual_share: float) -> FloatArray:
    """Return the fall of the log of the CPU share that other processes left, from the usual one; 0 if unknown."""
    shares = [usual_share if own.other_cpu_share is None else own.other_cpu_share for own in measurements]
    left = np.log1p(-np.minimum(shares, MOST_TAKEN))
    return np.asarray(math.log1p(-min(usual_share, MOST_TAKEN)) - left)


def _slower(measurement: Measurement, log_factor: float) -> Measurement:
    """Return the measurement with percentiles whose log is higher by ``log_factor``."""
    if log_factor == 0.0:
        return measurement
    factor = math.exp(log_factor)
    fields = [timing.field_of(quantile) for timing in TIMINGS for quantile in QUANTILES]
    values: dict[str, Any] = {
        name: value * factor for name in fields if (value := getattr(measurement, name)) is not None
    }
    values |= scaled_sketches(measurement, factor)
    return replace(measurement, **values)


def _measurements(trials: Sequence[Trial]) -> list[Measurement]:
    return [measurement for trial in trials for _, measurement in trial.measurements]
