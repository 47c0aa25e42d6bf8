"""Expected improvement under a latency bound, the probability of meeting it, and quantiles of mixtures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optimizer.simulator.scenario import Array

LEAST = 1e-9  # replaces a throughput of 0, which has no logarithm
BISECTIONS = 50  # they halve the distance of the components' quantiles to below the precision of a double
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(15)


@dataclass(frozen=True, eq=False)
class Posterior:
    """The posterior of log throughput and log tail ratio.

    ``mean`` and ``deviation`` are [cells, 2]; ``log_loads`` [cells] are the logarithms of the samples in flight.
    """

    mean: Array
    deviation: Array
    log_loads: Array


def probability_within_bound(posterior: Posterior, bound_s: float) -> Array:
    """Return the probability [cells] that the latency is within the bound."""
    latency = posterior.mean[:, 1] - posterior.mean[:, 0] + posterior.log_loads
    return _normal_cdf((math.log(bound_s) - latency) / np.hypot(*posterior.deviation.T))


def expected_improvement(posterior: Posterior, bound_s: float, best: float) -> Array:
    """Return E[max(0, log throughput - best); latency within the bound], [cells].

    This is constrained expected improvement (Schonlau, Welch and Jones 1998, "Global versus local search in
    constrained optimization of computer models"; Gardner et al. 2014) for outcomes that depend on each other.
    The expectation is a Gauss-Hermite quadrature over the throughput: more throughput at a load also means less
    latency, so improvement and probability are not independent factors.
    """
    (throughput, tail), (spread, tail_spread) = posterior.mean.T, posterior.deviation.T
    gains = np.zeros(len(throughput))
    for node, weight in zip(NODES, WEIGHTS / WEIGHTS.sum(), strict=True):
        reached = throughput + node * spread
        slack = math.log(bound_s) - (tail - reached + posterior.log_loads)
        gains += weight * np.maximum(0.0, reached - best) * _normal_cdf(slack / np.maximum(tail_spread, 1e-9))
    return gains


def confirmed_throughput(posterior: Posterior, bound_s: float) -> float:
    """Return the log of the expected throughput with which a confirmation of the cells ends.

    It tries the cells in descending order of throughput. Each meets the bound with its own probability.
    """
    value, none_passed = 0.0, 1.0
    probabilities = probability_within_bound(posterior, bound_s)
    for place in np.argsort(-posterior.mean[:, 0]):
        value += none_passed * float(probabilities[place]) * math.exp(posterior.mean[place, 0])
        none_passed *= 1 - float(probabilities[place])
    return math.log(max(value, LEAST))


def mixture_quantiles(probabilities: Array, means: Array, deviations: Array, levels: Sequence[float]) -> Array:
    """Return the quantiles [levels, cells] of mixtures of normal distributions.

    ``probabilities`` [components] are those of the components, whose ``means`` and ``deviations`` are
    [components, cells]. A quantile lies between the smallest and the largest one of the components; it is found
    there by bisection.
    """
    from scipy.special import ndtri

    wanted = np.array(levels)[:, None]
    of_components = means[:, None, :] + deviations[:, None, :] * ndtri(wanted)  # [components, levels, cells]
    low, high = of_components.min(axis=0), of_components.max(axis=0)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        below = _normal_cdf((middle - means[:, None, :]) / deviations[:, None, :])
        is_lower = np.tensordot(probabilities, below, axes=1) < wanted
        low, high = np.where(is_lower, middle, low), np.where(is_lower, high, middle)
    return np.asarray((low + high) / 2)


def _normal_cdf(z: Array) -> Array:
    from scipy.special import ndtr

    return np.asarray(ndtr(z))
