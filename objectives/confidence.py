"""Verdicts on a latency bound with a stated confidence: PASS, FAIL or UNDECIDED.

"p95 <= 20 ms" says that at most 5 % of the requests take longer than 20 ms: a share, and its test is counting. A run
is a row of windows, each with its number of requests and of misses. Two things make plain counting wrong:

- Requests in a queue miss in bursts: n of them tell as much as n / (autocorrelation time) independent ones. That time
  is estimated from how much the windows differ, and the bounds know that it is an estimate.
- Who looks again and again sees a PASS at some time. So it is asked once, when all windows are there: their number is
  planned before.

The confidence is that of PASS and of FAIL each: where the mean miss rate over the windows is above the allowed one,
the chance of a PASS is at most 1 - confidence. Of several configurations each has that chance. What comes after the
last window nobody can know. Where the miss rate is seen to drift within them there is no verdict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from scipy import special

from objectives.correlation import (
    Floats,
    degrees_of_freedom,
    drift_probability,
    effective_requests,
    long_run_variance,
)
from objectives.sla import CONFIDENCE

FEWEST_WINDOWS = 4  # to say how much windows differ
OF_ERROR = 0.6  # of the error allowed is planned for: windows that are shorter than thought hide some correlation
SHORTEST_WINDOW = 10  # autocorrelation times; windows much shorter than this resemble their neighbours
POWER = 0.8  # of a plan: the chance of a verdict if the miss rate is the expected one
PLAN_MARGIN = 1.35  # as the correlation is rather over- than underestimated


class Verdict(Enum):
    PASS = "PASS"
    FAIL = "FAIL"
    UNDECIDED = "UNDECIDED"


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of a run. Windows are in the order of time; those of a repeated run follow those of the first.

    ``misses``: requests over the bound or failed (a fraction where they are estimated), None where unknown.
    ``tail``: requests over the quantile of the run itself; it shows the correlation even where nothing misses.
    """

    requests: int
    misses: float | None
    tail: float | None = None
    stable: bool = True


@dataclass(frozen=True, slots=True)
class Judgement:
    """``low`` and ``high`` bound the miss rate (of ``judge``) or the value in ms (of ``judge_values``).

    Each of them holds with the confidence, or more.
    """

    verdict: Verdict
    reason: str
    low: float = -math.inf
    high: float = math.inf
    effective_requests: float = 0.0
    confidence: float = CONFIDENCE


def judge(windows: Sequence[Window], quantile: float, confidence: float = CONFIDENCE) -> Judgement:
    """Whether the quantile meets the bound that the misses were counted against."""
    allowed = 1 - quantile
    known = all(w.misses is not None and 0 <= w.misses <= w.requests and w.requests > 0 for w in windows)
    if len(windows) < FEWEST_WINDOWS or not known:
        return _unknown(len(windows), known, confidence)
    requests, misses = _floats([w.requests for w in windows]), _floats([w.misses for w in windows])
    tails = [w.tail for w in windows if w.tail is not None]
    effective = effective_requests(requests, misses, _floats(tails) if len(tails) == len(windows) else None)
    share = misses.sum() / requests.sum()
    low, high = map(float, miss_rate_bounds(share, effective, len(windows), OF_ERROR * (1 - confidence), allowed))
    drifts = bool(drift_probability(requests, misses) < 1 - confidence)
    verdict, reason = _verdict(low, high, allowed, drifts, all(w.stable for w in windows))
    told = f"{reason}misses {low:.2%} to {high:.2%} (allowed: {allowed:.4g}), {effective:,.0f} effective requests"
    return Judgement(verdict, told, low, high, float(effective), confidence)


def judge_values(
    values_ms: Sequence[float | None], requests: Sequence[int], bound_ms: float, confidence: float = CONFIDENCE
) -> Judgement:
    """The same for the average: from one value per window, by Student's t over the windows.

    Also for a percentile of which nothing but each window's own value is known (batched quantiles: Seila 1982).
    """
    count = len(values_ms)
    known = count == len(requests) and all(v is not None and math.isfinite(v) for v in values_ms)
    if count < FEWEST_WINDOWS or not known:
        return _unknown(count, known, confidence)
    values, weights = _floats(values_ms), _floats(requests)
    drifts = bool(drift_probability(weights, weights * values, is_share=False) < 1 - confidence)
    mean = float(np.average(values, weights=weights))
    variance = float(long_run_variance((values - mean) * np.sqrt(weights)) / weights.sum())
    half = -float(special.stdtrit(count - 1.0, OF_ERROR * (1 - confidence))) * math.sqrt(variance)
    verdict, reason = _verdict(mean - half, mean + half, bound_ms, drifts, True)
    told = f"{reason}{mean - half:.4g} to {mean + half:.4g} ms (allowed: {bound_ms:.4g})"
    return Judgement(verdict, told, mean - half, mean + half, confidence=confidence)


def miss_rate_bounds(
    share: Floats | float, effective: Floats | float, windows: int, error: float, allowed: float
) -> tuple[Floats, Floats]:
    """A lower and an upper bound on the miss rate; each fails with the probability ``error``.

    Clopper and Pearson (1934) for so many effective requests. As their number is an estimate, the error is
    lowered by as much as Student's t is wider than the normal distribution.
    """
    freedom = degrees_of_freedom(windows, np.maximum(share, allowed) * effective)
    error_t = special.ndtr(special.stdtrit(freedom, error))
    hits = np.asarray(share) * effective
    others = np.maximum(effective - hits, 1e-9)
    low = np.where(hits > 0, special.betaincinv(np.maximum(hits, 1e-9), others + 1, error_t), 0.0)
    high = np.where(others > 1e-9, special.betaincinv(hits + 1, others, 1 - error_t), 1.0)
    return _floats(low), _floats(high)


def requests_needed(
    quantile: float,
    windows: int,
    expected_miss_rate: float | None = None,
    confidence: float = CONFIDENCE,
    autocorrelation_requests: float = 1.0,
) -> int:
    """How many requests so many windows take to give a verdict in four of five runs at the expected miss rate.

    By default that is three fifths of the allowed one. The sample size of a test on one share (Fleiss 1981,
    2.2); one that is closer than a tenth to the allowed rate is planned as if it were a tenth away.
    """
    allowed = 1 - quantile
    expected = 0.6 * allowed if expected_miss_rate is None else min(max(expected_miss_rate, 0.0), 1.0)
    away = max(abs(expected - allowed), 0.1 * allowed)
    spread = special.ndtri(POWER) * math.sqrt(expected * (1 - expected))
    needed = 1 / allowed
    for _ in range(20):  # the fewer there are, the less sure is their correlation
        t = -special.stdtrit(degrees_of_freedom(windows, allowed * needed), OF_ERROR * (1 - confidence))
        needed = PLAN_MARGIN * float((t * math.sqrt(allowed * quantile) + spread) / away) ** 2
    return math.ceil(max(needed, SHORTEST_WINDOW * windows) * autocorrelation_requests)


def _verdict(low: float, high: float, limit: float, drifts: bool, stable: bool) -> tuple[Verdict, str]:
    if drifts:
        return Verdict.UNDECIDED, "drifts: "
    if low > limit:
        return Verdict.FAIL, ""
    if high > limit:
        return Verdict.UNDECIDED, "too close: "
    return (Verdict.PASS, "") if stable else (Verdict.UNDECIDED, "unstable: ")


def _unknown(windows: int, known: bool, confidence: float) -> Judgement:
    reason = f"only {windows} windows" if known else "a window lacks its latencies"
    return Judgement(Verdict.UNDECIDED, reason, confidence=confidence)


def _floats(values: object) -> Floats:
    return np.asarray(values, dtype=np.float64)
