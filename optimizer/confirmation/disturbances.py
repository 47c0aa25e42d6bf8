"""Disturbances by other programs: their effect on the search's measurements, and the slowdown expected in the tests.

The CPU share that other processes left is the covariate of an analysis of covariance (Fisher 1932), whose slopes are
estimated from the run itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from objectives.metrics import QUANTILES, TIMINGS, Measurement
from optimizer.config.problem import Problem
from optimizer.confirmation.load_predictions import has_all_latencies, prediction_errors
from optimizer.confirmation.machine_states import (
    LATENCY_SLOPE,
    SLOPE_FACTORS,
    THROUGHPUT_SLOPE,
    log_share_lost,
    search_measurements,
    slowdown_over_states,
    usual_share,
    was_search_disturbed,
)
from optimizer.core.trial import Point, Trial
from optimizer.simulator.performance_model import ModelFitter
from optimizer.simulator.speed_correction import at_other_speed, scaled_sketches

# Prior of the standard deviation of the log of a corrected measurement over the model's prediction, which counts as
# much as PRIOR_POINTS points
POINT_NOISE, PRIOR_POINTS = 0.15, 4


@dataclass(frozen=True, slots=True)
class DisturbanceCorrection:
    """Corrects measurements to the usual CPU share of other processes; without arguments it corrects nothing.

    Attributes:
        usual_share: The median CPU share of other processes during the search, 0 to 1.
        latency_slope: Rise of the log of a latency percentile over the fall of the log of the CPU share that is left;
            None if the search does not show it.
        throughput_slope: The same for the fall of the log of throughput, and the rise of that of average times.
        expected_slowdown: The expected rise of the log of a latency percentile over that in the usual state.
    """

    usual_share: float = 0.0
    latency_slope: float | None = None
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
        if fall == 0.0 or not self.throughput_slope or self.latency_slope is None:
            return measurement
        corrected = at_other_speed(measurement, math.exp(self.throughput_slope * fall))
        return _slower(corrected, (self.throughput_slope - self.latency_slope) * fall)


def fit_disturbance_correction(
    points: Sequence[Point],
    trials: Sequence[Trial],
    problem: Problem,
    fit: ModelFitter,
) -> DisturbanceCorrection:
    """Return the correction for ``points``, the search's points of ``trials``.

    A server on GPUs is not corrected. Nor is a search that was seldom disturbed, because then the disturbed windows
    of a test do not count. Request rates are not corrected: their latency is not proportional to the speed.

    Others may also take more because a configuration, or a load, leaves more CPU time idle. A correction for that
    would favor configurations that use few CPUs. So the factor on the slopes is a posterior mean over SLOPE_FACTORS.
    For each factor, ``fit`` returns a model of the points that are corrected with it. The marginal likelihood of the
    factor is that of the errors of this model, under an inverse gamma prior of their variance (Gelman et al. 2013,
    "Bayesian Data Analysis", section 3.2).

    The measurements of the search are samples of the states of the machine, see ``slowdown_over_states``.
    """
    if problem.cpu_count is None or not was_search_disturbed(trials):
        return DisturbanceCorrection()
    usual = usual_share(trials)
    falls = log_share_lost(search_measurements(trials), usual)
    if problem.open_loop:  # a request rate is served in each state
        return DisturbanceCorrection(expected_slowdown=slowdown_over_states(falls, LATENCY_SLOPE, 0.0))
    factor = _fit_factor(points, usual, problem, fit)
    expected = slowdown_over_states(falls, factor * LATENCY_SLOPE, factor * THROUGHPUT_SLOPE)
    return replace(_correction(usual, factor), expected_slowdown=expected)


def _fit_factor(points: Sequence[Point], usual_share: float, problem: Problem, fit: ModelFitter) -> float:
    """Return the posterior mean of the factor on both slopes; 1 if no model predicts all points."""
    points = [point for point in points if has_all_latencies(point, problem)]
    log_likelihoods = list[float]()
    for factor in SLOPE_FACTORS:
        corrected = _correction(usual_share, factor).correct_points(points)
        log_likelihood = _log_likelihood(corrected, problem, fit)
        if log_likelihood is None:
            return 1.0
        log_likelihoods.append(log_likelihood)
    posterior = np.exp(np.array(log_likelihoods) - max(log_likelihoods))
    return float(np.average(SLOPE_FACTORS, weights=posterior))


def _correction(usual_share: float, factor: float) -> DisturbanceCorrection:
    return DisturbanceCorrection(usual_share, factor * LATENCY_SLOPE, factor * THROUGHPUT_SLOPE)


def _log_likelihood(points: Sequence[Point], problem: Problem, fit: ModelFitter) -> float | None:
    """Return the log marginal likelihood of the errors of a model of ``points``; None without a model.

    A constant is left out.
    """
    model = fit(points) if points else None
    errors = None if model is None else prediction_errors(model, points, problem)
    if errors is None:
        return None
    squares = PRIOR_POINTS * POINT_NOISE**2 + (errors**2).sum(axis=0)
    return -(PRIOR_POINTS + len(points)) / 2 * float(np.log(squares).sum())


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
