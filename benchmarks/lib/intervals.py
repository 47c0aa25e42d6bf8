"""Confidence intervals of the benchmarks that measure on a real machine. All are two-sided at 95 %."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from objectives.arrays import FloatArray

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its confidence interval; both ends are nan if a single value was measured."""

    estimate: float
    low: float
    high: float

    def text(self, form: str) -> str:
        """Return it as text with numbers in this format, such as ``1.02 (0.99 to 1.05)``."""
        if math.isnan(self.low):
            return f"{self.estimate:{form}} (one value)"
        return f"{self.estimate:{form}} ({self.low:{form}} to {self.high:{form}})"


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean of independent values with Student's t interval."""
    mean = float(np.mean(values))
    half = _half_width(_variance(values), len(values), len(values) - 1)
    return Interval(mean, mean - half, mean + half)


def ratio_interval(values: Sequence[float], others: Sequence[float]) -> Interval:
    """Return the ratio of two quantities that were measured in pairs: Student's t interval of the log ratios."""
    logs = mean_interval([math.log(a / b) for a, b in zip(values, others, strict=True)])
    return Interval(*(math.exp(value) for value in (logs.estimate, logs.low, logs.high)))


def ratio_within_bound(values: Sequence[float], others: Sequence[float]) -> str:
    """Return the ratio of two throughputs within a bound as text; 0 stands for a round without a load within it."""
    if min(*values, *others) == 0:
        return "a round without a load within the bound"
    return ratio_interval(values, others).text(".2f")


def pooled_share(runs: Sequence[Sequence[float]]) -> Interval:
    """Return the mean share of several runs, each measured on several servers.

    The runs are independent, servers of one run are not. So the interval is Student's t over the runs' means, on the
    scale of the arc sine of the root, on which the variance hardly depends on the share.
    """
    means = [float(_angles(run).mean()) for run in runs]
    share = float(np.mean([np.mean(run) for run in runs]))
    return _share_interval(share, float(np.mean(means)), _variance(means), len(means), len(means) - 1)


def run_shares(runs: Sequence[Sequence[float]]) -> list[Interval]:
    """Return the share of each run with its interval, from the shares on the servers of each.

    One run has few servers, so their variance is pooled over all runs, on the scale of ``pooled_share``.
    """
    angles = [_angles(run) for run in runs]
    freedom = sum(len(run) - 1 for run in runs)
    squares = sum(float(np.square(own - own.mean()).sum()) for own in angles)
    variance = squares / freedom if freedom else math.nan
    return [
        _share_interval(float(np.mean(run)), float(own.mean()), variance, len(run), freedom)
        for run, own in zip(runs, angles, strict=True)
    ]


def _angles(shares: Sequence[float]) -> FloatArray:
    return np.arcsin(np.sqrt(np.asarray(shares, dtype=np.float64)))


def _variance(values: Sequence[float]) -> float:
    return float(np.var(values, ddof=1)) if len(values) > 1 else math.nan


def _share_interval(share: float, angle: float, variance: float, count: int, freedom: int) -> Interval:
    half = _half_width(variance, count, freedom)
    low, high = (math.sin(min(max(end, 0.0), math.pi / 2)) ** 2 for end in (angle - half, angle + half))
    return Interval(share, math.nan, math.nan) if math.isnan(half) else Interval(share, low, high)


def _half_width(variance: float, count: int, freedom: int) -> float:
    if freedom < 1:
        return math.nan
    return float(special.stdtrit(freedom, (1 + CONFIDENCE) / 2)) * math.sqrt(variance / count)
