"""The acquisition function of the search: expected improvement under latency bounds, and the time of a trial."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from objectives.arrays import FloatArray
from optimizer.core.candidate import Candidate
from optimizer.core.trial import Trial
from optimizer.simulator.predicted_metrics import ShareWithinBounds

MIN_THROUGHPUT = 1e-9  # replaces a throughput of 0, which has no logarithm
BISECTIONS = 50  # they halve the distance of the components' quantiles to below the precision of a double
# Gauss-Hermite quadrature over the error of log throughput, and over the error that all tail ratios share. The second
# one has fewer nodes, because it is nested in the first one and varies only the goodput.
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(15)
TAIL_NODES, TAIL_WEIGHTS = np.polynomial.hermite_e.hermegauss(5)


@dataclass(frozen=True, eq=False)
class Posterior:
    """The posterior of log throughput and of the log tail ratio of each latency.

    ``mean`` and ``std`` are [loads, 1 + latencies]; ``log_loads`` [loads] are the logarithms of the samples in
    flight. All errors are independent. A latency is the tail ratio times the load divided by the throughput. So a
    slower server has less throughput, and all of its latencies are longer, also those to which Little's law does not
    apply.

    ``share_within_bounds`` is the share of requests that counts; None if all do.
    """

    mean: FloatArray
    std: FloatArray
    log_loads: FloatArray
    share_within_bounds: ShareWithinBounds | None = None

    @property
    def log_latencies(self) -> FloatArray:
        """The expected log latencies [loads, latencies] in seconds."""
        return self.mean[:, 1:] - self.mean[:, :1] + self.log_loads[:, None]

    @property
    def log_values(self) -> FloatArray:
        """The expected log of the maximized metric [loads]: of the throughput, or of the goodput."""
        return self.log_values_with(np.zeros(len(self.mean)), 0.0)

    def log_values_with(self, error: FloatArray, tail_error: float) -> FloatArray:
        """Return the log of the maximized metric [loads], given an error [loads] of log throughput.

        ``tail_error`` is the one that all tail ratios share, in their standard deviations.
        """
        throughput = self.mean[:, 0] + error
        if self.share_within_bounds is None:
            return throughput
        log_latencies = self.log_latencies - error[:, None] + tail_error * self.std[:, 1:]
        return throughput + self.share_within_bounds.logarithm(log_latencies)


def probability_within_bounds(posterior: Posterior, bounds_s: FloatArray) -> FloatArray:
    """Return the probability [loads] that all latencies are within their bounds [latencies]."""
    slack = np.log(bounds_s) - posterior.log_latencies
    if len(bounds_s) == 1:
        return _normal_cdf(slack[:, 0] / np.hypot(*posterior.std.T))
    return _expectation(posterior, lambda error: _conditional_probability(posterior, slack, error))


def expected_improvement(posterior: Posterior, bounds_s: FloatArray, best: float) -> FloatArray:
    """Return E[max(0, log value - best); all latencies within their bounds], [loads].

    The value is the throughput, or the goodput.

    This is constrained expected improvement (Schonlau, Welch and Jones 1998, "Global versus local search in
    constrained optimization of computer models"; Gardner et al. 2014) for outcomes that depend on each other: more
    throughput at a load also means less latency, so improvement and probability are not independent factors. For the
    goodput this is an approximation: both depend on the error that all tail ratios share, which is integrated in each
    of them separately. So the improvement is underestimated close to a bound.
    """
    slack = np.log(bounds_s) - posterior.log_latencies
    tails = zip(TAIL_NODES, TAIL_WEIGHTS / TAIL_WEIGHTS.sum(), strict=True)
    tail_errors = list(tails) if posterior.share_within_bounds else [(0.0, 1.0)]

    def improvement(error: FloatArray) -> FloatArray:
        gain = np.zeros(len(error))
        for tail, weight in tail_errors:
            gain += weight * np.maximum(0.0, posterior.log_values_with(error, tail) - best)
        return gain * _conditional_probability(posterior, slack, error)

    return _expectation(posterior, improvement)


def _expectation(posterior: Posterior, value: Callable[[FloatArray], FloatArray]) -> FloatArray:
    """Return the expectation [loads] of a function of the error of log throughput (Gauss-Hermite quadrature)."""
    total = np.zeros(len(posterior.mean))
    for node, weight in zip(NODES, WEIGHTS / WEIGHTS.sum(), strict=True):
        total += weight * value(node * posterior.std[:, 0])
    return total


def _conditional_probability(posterior: Posterior, slack: FloatArray, error: FloatArray) -> FloatArray:
    """Return the probability [loads] that all latencies are within their bounds, given the error of log throughput.

    Given the throughput, the latencies are independent. ``slack`` [loads, latencies] is that without an error.
    """
    std = np.maximum(posterior.std[:, 1:], 1e-9)
    return np.asarray(_normal_cdf((slack + error[:, None]) / std).prod(axis=1))


def expected_incumbent(posterior: Posterior, bounds_s: FloatArray) -> float:
    """Return the log of the expected throughput or goodput with which a confirmation of the loads ends.

    It tries the loads in descending order of this objective value. Each meets the bounds with its own probability.
    """
    value, none_passed = 0.0, 1.0
    probabilities, log_values = probability_within_bounds(posterior, bounds_s), posterior.log_values
    for index in np.argsort(-log_values):
        value += none_passed * float(probabilities[index]) * math.exp(log_values[index])
        none_passed *= 1 - float(probabilities[index])
    return math.log(max(value, MIN_THROUGHPUT))


def mixture_quantiles(
    probabilities: FloatArray, means: FloatArray, stds: FloatArray, levels: Sequence[float]
) -> FloatArray:
    """Return the quantiles [levels, loads] of mixtures of normal distributions.

    ``probabilities`` [components] are those of the components, whose ``means`` and ``stds`` are
    [components, loads]. A quantile lies between the smallest and the largest one of the components; it is found
    there by bisection.
    """
    from scipy.special import ndtri

    level_column = np.array(levels)[:, None]
    component_quantiles = means[:, None, :] + stds[:, None, :] * ndtri(level_column)  # [components, levels, loads]
    low, high = component_quantiles.min(axis=0), component_quantiles.max(axis=0)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        below = _normal_cdf((middle - means[:, None, :]) / stds[:, None, :])
        is_lower = np.tensordot(probabilities, below, axes=1) < level_column
        low, high = np.where(is_lower, middle, low), np.where(is_lower, high, middle)
    return np.asarray((low + high) / 2)


def _normal_cdf(z: FloatArray) -> FloatArray:
    from scipy.special import ndtr

    return np.asarray(ndtr(z))


class TrialCosts:
    """The times of finished trials, and the expected time of the next trial of a candidate.

    A deployment loads the model once for each instance, so its time is that of the deployments with the closest
    number of instances, in all server processes together. The measurements of a trial take the median time of those
    so far. The acquisition function is the expected improvement per second (Snoek, Larochelle and Adams 2012,
    "Practical Bayesian optimization of machine learning algorithms", section 3.2).
    """

    def __init__(self, trials: Sequence[Trial]) -> None:
        self._deploy_seconds: dict[int, list[float]] = {}
        measure_seconds = []
        for trial in trials:
            if trial.deploy_seconds is not None:
                self._deploy_seconds.setdefault(trial.candidate.total_instances, []).append(trial.deploy_seconds)
            if seconds := sum(measurement.measure_seconds or 0.0 for _, measurement in trial.measurements):
                measure_seconds.append(seconds)
        self._measure_seconds = statistics.median(measure_seconds) if measure_seconds else 0.0
        self._mean_seconds = (
            statistics.fmean(map(self.seconds, (trial.candidate for trial in trials))) if trials else 0.0
        )

    def seconds(self, candidate: Candidate) -> float:
        """Return the expected time of a trial of ``candidate``; 0 if no times are known."""
        deploy_seconds = self._deploy_seconds
        if not deploy_seconds:
            return self._measure_seconds
        closest = min(deploy_seconds, key=lambda count: (abs(count - candidate.total_instances), count))
        return statistics.median(deploy_seconds[closest]) + self._measure_seconds

    def relative(self, candidate: Candidate) -> float:
        """Return the expected time relative to the mean of the trials so far; 1 if no times are known."""
        return self.seconds(candidate) / self._mean_seconds if self._mean_seconds else 1.0
