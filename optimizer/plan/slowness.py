"""How much slower a further server may be than the simulation, by the deployments that were measured.

``SlownessEstimate`` gives the quantiles that a plan allows for, from the differences between deployments and the
errors of the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import optimize, special

from objectives.arrays import FloatArray

TOO_LOW, EXPECTED, SAFE = 0.025, 0.5, 0.99  # quantiles of the slowness
# The longest plausible times of unmeasured batch sizes are bounds. A slow server with slow unmeasured sizes is less
# likely than either, so a plan allows for UNMEASURED_POSITION of the way to the bounds together with a less extreme
# quantile.
UNMEASURED_POSITION, UNMEASURED_QUANTILE = 0.75, 0.8
# Deployments of one configuration on one machine differ by 3 to 10 % (relative standard deviation). The prior of
# this deviation is log-normal with median PRIOR_DEVIATION and factor PRIOR_DEVIATION_FACTOR. Student's t, without a
# prior, would need margins of 40 % for the few deployments of a run.
PRIOR_DEVIATION, PRIOR_DEVIATION_FACTOR = 0.055, 1.5
DEVIATIONS = PRIOR_DEVIATION * PRIOR_DEVIATION_FACTOR ** np.linspace(-3, 3, 31)
PRIOR_WEIGHT = 6.0  # the prior of a forecast error counts as this many measured loads


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How much slower a server is than the simulation.

    Batches take ``slowness`` times as long. Latencies are those of the slowed simulation times ``latency_factor``. A
    batch of an unmeasured size takes the expected time if ``unmeasured`` is 0. It takes the longest plausible time if
    it is 1, and the shortest one if it is -1.
    """

    slowness: float = 1.0
    latency_factor: float = 1.0
    unmeasured: float = 0.0


@dataclass(frozen=True, slots=True)
class ForecastErrors:
    """Relative errors (standard deviations) of the simulated throughput and of the simulated latency."""

    throughput: float
    latency: float


# prior: the errors on servers of benchmarks/planning_errors.py that its table does not contain
PRIOR_ERRORS = ForecastErrors(throughput=0.0125, latency=0.03)


def forecast_errors(throughput: Sequence[float], latency: Sequence[float]) -> ForecastErrors:
    """Return the errors of a run from log(measured / simulated) at each of its loads, and the prior of the errors."""

    def deviation(prior: float, logs: Sequence[float]) -> float:
        squares = PRIOR_WEIGHT * prior**2 + sum(log**2 for log in logs)
        return math.sqrt(squares / (PRIOR_WEIGHT + len(logs)))

    return ForecastErrors(deviation(PRIOR_ERRORS.throughput, throughput), deviation(PRIOR_ERRORS.latency, latency))


@dataclass(frozen=True, eq=False)
class SlownessEstimate:
    """Posterior distribution of the logarithm of the slowness of a deployment.

    It is a mixture of normal distributions around ``mean``, with standard deviations ``errors`` and ``weights``. It
    was estimated from ``deployments`` whose squared distances from the mean sum up to ``squares``.
    """

    mean: float
    errors: FloatArray
    weights: FloatArray
    deployments: int
    squares: float
    forecast: ForecastErrors

    def quantile(self, probability: float) -> Slowdown:
        """Return the slowdown that replicas do not exceed with this probability.

        Near saturation the slowness alone decides what can be served. Below it, the uncertainty of a latency is that
        of the slowness and of the simulated latency together; ``latency_factor`` is the ratio of the two quantiles.
        """
        slowness = self._quantile(probability, self.errors)
        both = self._quantile(probability, np.hypot(self.errors, self.forecast.latency))
        return Slowdown(math.exp(self.mean + slowness), math.exp(both - slowness))

    def scenarios(self, probability: float) -> tuple[Slowdown, ...]:
        """Return the slowdowns that a plan with this probability allows for, with the times of unmeasured sizes.

        Above EXPECTED the plan has to be enough in each of them, below it in one.
        """
        if probability == EXPECTED:
            return (self.quantile(probability),)
        if probability > EXPECTED:
            quantile, position = min(probability, UNMEASURED_QUANTILE), UNMEASURED_POSITION
        else:
            quantile, position = max(probability, 1 - UNMEASURED_QUANTILE), -UNMEASURED_POSITION
        return self.quantile(probability), replace(self.quantile(quantile), unmeasured=position)

    def with_more(self, deployments: int) -> SlownessEstimate:
        """Return the expected estimate after further ``deployments``, which differ as much as those before."""
        squares = self.squares
        if self.deployments > 1:
            squares *= (self.deployments + deployments - 1) / (self.deployments - 1)
        return _posterior(self.mean, self.deployments + deployments, squares, self.forecast)

    def _quantile(self, probability: float, errors: FloatArray) -> float:
        if probability == 0.5:
            return 0.0
        widest = 10 * float(errors[-1])

        def excess(value: float) -> float:
            return float(self.weights @ special.ndtr(value / errors)) - probability

        return float(optimize.brentq(excess, -widest, widest))


def estimate_slowness(log_slowness: Sequence[float], forecast: ForecastErrors = PRIOR_ERRORS) -> SlownessEstimate:
    """Return the distribution of the slowness from the log slowness of one or more measured deployments.

    The spread of deployments is estimated from these values and the prior of the deviation. ``forecast`` has the
    errors of the simulator on the run.
    """
    observed = np.asarray(log_slowness, np.float64)
    squares = float(((observed - observed.mean()) ** 2).sum())
    return _posterior(float(observed.mean()), len(observed), squares, forecast)


def _posterior(mean: float, count: int, squares: float, forecast: ForecastErrors) -> SlownessEstimate:
    prior = -0.5 * (np.log(DEVIATIONS / PRIOR_DEVIATION) / math.log(PRIOR_DEVIATION_FACTOR)) ** 2
    density = prior - (count - 1) * np.log(DEVIATIONS) - squares / (2 * DEVIATIONS**2)
    weights = np.exp(density - density.max())
    errors = np.sqrt(DEVIATIONS**2 / count + forecast.throughput**2)
    return SlownessEstimate(mean, errors, weights / weights.sum(), count, squares, forecast)
