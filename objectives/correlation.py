"""How much correlated requests tell: autocorrelation time, effective requests, drift.

Requests in a queue miss a bound in bursts: n of them tell as much as n / (autocorrelation time) independent ones.
That time is read from how much windows of a run differ. Windows lie along the last axis of every array.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import special

Floats: TypeAlias = NDArray[np.float64]

FEWEST_MISSES = 16  # to say how correlated they are


def long_run_variance(noise: Floats) -> Floats:
    """Variance of the sum of a stationary row, per term: its variance and twice its autocovariances.

    These are summed up to the first that is not positive (after the initial positive sequence of Geyer 1992).
    """
    count = noise.shape[-1]
    variance = np.square(noise).sum(-1) / (count - 1)
    positive = np.ones(variance.shape, dtype=bool)
    for lag in range(1, count // 2 + 1):
        covariance = (noise[..., lag:] * noise[..., :-lag]).sum(-1) / (count - 1)
        positive = positive & (covariance > 0)
        if not positive.any():
            break
        variance = variance + np.where(positive, 2 * covariance, 0.0)
    return _floats(variance)


def autocorrelation_time(requests: Floats, misses: Floats) -> Floats:
    """In requests: how many of them tell as much as one independent request; never below 1.

    The variance between windows over the binomial one (overdispersion: McCullagh and Nelder 1989, 4.5).
    """
    share = misses.sum(-1, keepdims=True) / requests.sum(-1, keepdims=True)
    variance = long_run_variance((misses - requests * share) / np.sqrt(requests))
    binomial = (share * (1 - share))[..., 0]
    return _floats(np.maximum(variance / np.maximum(binomial, 1e-12), 1.0))


def effective_requests(requests: Floats, misses: Floats, tail: Floats | None) -> Floats:
    """The number of independent requests that tell as much.

    Where too few miss to show how correlated they are, and ``tail`` is unknown, each window counts as one.
    """
    times = autocorrelation_time(requests, misses)
    if tail is not None:
        times = np.maximum(times, autocorrelation_time(requests, tail))
    else:
        times = np.where(misses.sum(-1) < FEWEST_MISSES, np.maximum(times, requests.mean(-1)), times)
    return _floats(requests.sum(-1) / times)


def degrees_of_freedom(windows: int, misses: Floats | float) -> Floats:
    """How well the autocorrelation time is known, as that of a variance (Satterthwaite 1946).

    ``misses`` are effective ones. Misses come in bursts, and where each window has but few of them the counts have
    heavy tails: excess kurtosis 3 windows / misses for bursts of exponential size.
    """
    return _floats(1 / (1 / (windows - 1) + 1.5 / np.maximum(misses, 1e-9)))


def drift_probability(requests: Floats, misses: Floats, is_share: bool = True) -> Floats:
    """How likely windows of one and the same miss rate seem to drift as much as these.

    The largest excess of misses up to some window (CUSUM: Brown, Durbin and Evans 1975; Kolmogorov's distribution)
    over the noise, which is read from neighbouring windows as drift hardly touches that (von Neumann 1941).
    """
    total = requests.sum(-1, keepdims=True)
    share = misses.sum(-1, keepdims=True) / total
    steps = np.square(np.diff(misses / requests)) / (1 / requests[..., 1:] + 1 / requests[..., :-1])
    least = (share * (1 - share))[..., 0] if is_share else 0.0
    noise = np.sqrt(np.maximum(np.maximum(steps.mean(-1), least), 1e-12) * total[..., 0])
    excess = np.abs(np.cumsum(misses - requests * share, axis=-1)).max(-1)
    return _floats(special.kolmogorov(excess / noise))


def _floats(values: object) -> Floats:
    return np.asarray(values, dtype=np.float64)
