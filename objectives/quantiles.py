"""Quantiles and counts of misses from one another: what a load generator's few columns say of a bound."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import special

from objectives.correlation import Floats
from objectives.metrics import Measurement

LAST_COLUMN = 0.99  # nothing is known of the latencies beyond it
LEVELS = {"latency-p50": 0.5, "latency-p90": 0.9, "latency-p95": 0.95, "latency-p99": LAST_COLUMN}  # by metric


def misses_from_columns(requests: int, columns_ms: Mapping[float, float], bound_ms: float) -> float | None:
    """Misses estimated from a window's quantiles, such as {0.5: 3.1, 0.9: 7.0, 0.95: 8.2, 0.99: 12.0}.

    Between two of them the tail is taken as exponential; so the share is exact where the bound is one of them.
    Beyond the last it is that of the last: never a PASS on p99 from a p99. None without a column.
    """
    return requests * float(_miss_shares(columns_ms, bound_ms)) if columns_ms else None


def quantile_levels(effective: float, quantile: float, confidence: float) -> tuple[float, float]:
    """The levels of the sample's quantiles that bound the true one from below and above (order statistics).

    From 161 independent requests on, p99 of the sample is an upper bound of p95. Where none is, the level is inf.
    """
    above = np.arange(math.ceil(effective))  # so many requests above the bound
    chance = special.betainc(effective - above, above + 1.0, quantile)  # of so many or fewer above the quantile
    fewest, most = above[chance >= confidence], above[chance <= 1 - confidence]
    low = 1 - fewest[0] / effective if fewest.size else 0.0
    return float(low), float(1 - most[-1] / effective) if most.size else math.inf


def columns(measurement: Measurement) -> dict[float, float]:
    """The known latency quantiles, in ms, by level."""
    found = {
        0.5: measurement.latency_p50_ms,
        0.9: measurement.latency_p90_ms,
        0.95: measurement.latency_p95_ms,
        LAST_COLUMN: measurement.latency_p99_ms,
    }
    return {level: ms for level, ms in found.items() if ms is not None and math.isfinite(ms)}


def pooled_quantile_ms(windows: Sequence[Measurement], level: float) -> float:
    """The quantile of all requests of ``windows`` together; inf beyond LAST_COLUMN, nan where nothing is known.

    Interpolated between the windows' columns, exponentially as in ``misses_from_columns``.
    """
    if level > LAST_COLUMN:
        return math.inf
    known = [(window.requests or 1, found) for window in windows if (found := columns(window))]
    if not known:
        return math.nan
    edges = sorted({ms for _, found in known for ms in found.values()})
    shares = sum(n * _miss_shares(found, np.array(edges)) for n, found in known) / sum(n for n, _ in known)
    return float(np.interp(-math.log(1 - level), -np.log(shares), edges))  # ascending, as edges are


def tail_share(windows: Sequence[Measurement], bound_ms: float) -> float:
    """Of all requests, about how many are over a bound that may lie beyond LAST_COLUMN: the tail is taken to go on as
    it falls between a window's last two columns. 1 where a window tells nothing."""
    requests, missed = 0, 0.0
    for window in windows:
        known = columns(window)
        if len(known) < 2:
            return 1.0
        share = float(_miss_shares(known, bound_ms))
        (before, before_ms), (last, last_ms) = sorted(known.items())[-2:]
        if bound_ms > last_ms:
            falls = math.log((1 - before) / (1 - last)) / max(last_ms - before_ms, 1e-9)
            share = (1 - last) * math.exp(-falls * (bound_ms - last_ms))
        requests += window.requests or 1
        missed += share * (window.requests or 1)
    return missed / requests if requests else 1.0


def _miss_shares(columns_ms: Mapping[float, float], bounds_ms: Floats | float) -> Floats:
    """Of each bound; positive, as nothing is known beyond the last column."""
    levels, values = [0.0, *sorted(columns_ms)], [0.0, *sorted(columns_ms.values())]
    return np.asarray(np.exp(np.interp(bounds_ms, values, np.log1p(-np.array(levels)))), dtype=np.float64)
