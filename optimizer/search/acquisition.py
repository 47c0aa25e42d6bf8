"""What another measurement is worth: the expected improvement under a latency bound."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from optimizer.search.figures import Array

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(15)


@dataclass(frozen=True, eq=False)
class Belief:
    """Log throughput and log tail (see ``correction``) of cells, [cells, 2] each; ``log_loads`` [cells]: of the
    samples in flight."""

    mean: Array
    deviation: Array
    log_loads: Array


def odds(belief: Belief, bound_s: float) -> Array:
    """That the latency is within the bound."""
    latency = belief.mean[:, 1] - belief.mean[:, 0] + belief.log_loads
    return _normal_cdf((math.log(bound_s) - latency) / np.hypot(*belief.deviation.T))


def expected_improvement(belief: Belief, bound_s: float, best: float) -> Array:
    """E[max(0, log throughput - best); latency within the bound], by Gauss-Hermite quadrature over the
    throughput: more throughput at a load is also less latency, so the two cannot be multiplied."""
    (throughput, tail), (spread, tail_spread) = belief.mean.T, belief.deviation.T
    gains = np.zeros(len(throughput))
    for node, weight in zip(NODES, WEIGHTS / WEIGHTS.sum(), strict=True):
        reached = throughput + node * spread
        slack = math.log(bound_s) - (tail - reached + belief.log_loads)
        gains += weight * np.maximum(0.0, reached - best) * _normal_cdf(slack / np.maximum(tail_spread, 1e-9))
    return gains


def _normal_cdf(z: Array) -> Array:
    from scipy.special import ndtr

    return np.asarray(ndtr(z))
