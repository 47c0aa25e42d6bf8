"""Verdicts on a latency bound with a stated confidence: PASS, FAIL or UNDECIDED.

"p95 <= 20 ms" says that at most 5 % of the requests take longer than 20 ms: a share, and its test is counting. A run
is a row of windows, each with its number of requests and of misses. Two things make plain counting wrong:

- Requests in a queue miss in bursts: n of them tell as much as n / (autocorrelation time) independent ones. That time
  is estimated from how much the windows differ, and the bounds know that it is an estimate.
- Who looks again and again sees a PASS at some time. So there is a plan: a PASS is given only when the windows
  reach the horizon, or 2, 4, 8 ... times it; a FAIL at 1/8, 1/4, 1/2 of it too, where it would be one even if nothing
  missed from then on. All looks share the error.

The confidence is that of the whole procedure, for PASS and FAIL each: where the mean miss rate over the horizon is
above the allowed one, the chance of a PASS is at most 1 - confidence. What comes after the horizon nobody can know:
it is how far a PASS has looked. Where the miss rate is seen to drift within it there is no verdict.
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

CONFIDENCE = 0.99
HORIZON_WINDOWS = 32
EARLY_LOOKS = 3  # before the horizon: at an eighth, a quarter and a half of it
FEWEST_WINDOWS = 4  # to say how much windows differ
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


@dataclass(frozen=True, slots=True)
class Look:
    """At the first ``windows`` a verdict is sought, wrong with at most the probability ``error``.

    They are the share ``covered`` of the horizon (1 from there on).
    """

    windows: int
    error: float
    covered: float


def judge(
    windows: Sequence[Window], quantile: float, confidence: float = CONFIDENCE, horizon_windows: int | None = None
) -> Judgement:
    """Whether the quantile meets the bound that the misses were counted against.

    ``horizon_windows``: the plan, made before the run and never changed in it. It allows asking after every
    window. Without one the windows are the whole run, and it is asked once.
    """
    allowed, look = 1 - quantile, look_at(len(windows), horizon_windows, 1 - confidence)
    known = all(w.misses is not None and 0 <= w.misses <= w.requests and w.requests > 0 for w in windows)
    if look is None or not known:
        return _unknown(len(windows), known, confidence)
    n, requests, misses = look.windows, _floats([w.requests for w in windows]), _floats([w.misses for w in windows])
    tails = [w.tail for w in windows[:n] if w.tail is not None]
    effective = effective_requests(requests[:n], misses[:n], _floats(tails) if len(tails) == n else None)
    low, high = miss_rate_bounds(misses[:n].sum() / requests[:n].sum(), effective, n, look.error, allowed)
    drifts = bool(drift_probability(requests, misses) < 1 - confidence)
    stable = all(w.stable for w in windows)
    verdict, reason = _verdict(float(low), float(high), allowed, look, drifts, stable)
    told = f"{reason}misses {low:.2%} to {high:.2%} (allowed: {allowed:.4g}), {effective:,.0f} effective requests"
    return Judgement(verdict, told, float(low), float(high), float(effective), confidence)


def judge_values(
    values_ms: Sequence[float | None],
    requests: Sequence[int],
    bound_ms: float,
    confidence: float = CONFIDENCE,
    horizon_windows: int | None = None,
) -> Judgement:
    """The same for the average: from one value per window, by Student's t over the windows.

    Also for a percentile of which nothing but each window's own value is known (batched quantiles: Seila 1982).
    """
    look = look_at(len(values_ms), horizon_windows, 1 - confidence)
    known = len(values_ms) == len(requests) and all(v is not None and math.isfinite(v) for v in values_ms)
    if look is None or not known:
        return _unknown(len(values_ms), known, confidence)
    n, values, weights = look.windows, _floats(values_ms), _floats(requests)
    drifts = bool(drift_probability(weights, weights * values, is_share=False) < 1 - confidence)
    mean = float(np.average(values[:n], weights=weights[:n]))
    variance = float(long_run_variance((values[:n] - mean) * np.sqrt(weights[:n])) / weights[:n].sum())
    half = -float(special.stdtrit(n - 1.0, look.error)) * math.sqrt(variance)
    verdict, reason = _verdict(mean - half, mean + half, bound_ms, look, drifts, True)
    told = f"{reason}{mean - half:.4g} to {mean + half:.4g} ms (allowed: {bound_ms:.4g})"
    return Judgement(verdict, told, mean - half, mean + half, confidence=confidence)


def look_at(windows: int, horizon_windows: int | None, error: float) -> Look | None:
    """The last look that so many windows allow, and its part of the error; None before the first.

    The early looks share an eighth of the error, the horizon has five, twice the horizon one, four times half of
    one ...: together the error (alpha spending, Lan and DeMets 1983, by a union bound).
    """
    if horizon_windows is None:
        return Look(windows, error, 1.0) if windows >= FEWEST_WINDOWS else None
    stage = math.floor(math.log2(max(windows, 1) / horizon_windows))
    size = math.ceil(horizon_windows * 2.0**stage)
    if stage < -EARLY_LOOKS or size < FEWEST_WINDOWS:
        return None
    part = 1 / EARLY_LOOKS if stage < 0 else 5 if stage == 0 else 2 / 2**stage
    return Look(size, part / 8 * error, min(1.0, size / horizon_windows))


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
    expected_miss_rate: float | None = None,
    confidence: float = CONFIDENCE,
    autocorrelation_requests: float = 1.0,
) -> int:
    """How many requests a horizon takes to give a verdict in four of five runs at the expected miss rate.

    By default that is three fifths of the allowed one. The sample size of a test on one share (Fleiss 1981,
    2.2); one that is closer than a tenth to the allowed rate is planned as if it were a tenth away.
    """
    allowed = 1 - quantile
    expected = 0.6 * allowed if expected_miss_rate is None else min(max(expected_miss_rate, 0.0), 1.0)
    away = max(abs(expected - allowed), 0.1 * allowed)
    spread = special.ndtri(POWER) * math.sqrt(expected * (1 - expected))
    needed = 1 / allowed
    for _ in range(20):  # the fewer there are, the less sure is their correlation
        t = -special.stdtrit(degrees_of_freedom(HORIZON_WINDOWS, allowed * needed), (1 - confidence) * 5 / 8)
        needed = PLAN_MARGIN * float((t * math.sqrt(allowed * quantile) + spread) / away) ** 2
    return math.ceil(max(needed, SHORTEST_WINDOW * HORIZON_WINDOWS) * autocorrelation_requests)


def _verdict(low: float, high: float, limit: float, look: Look, drifts: bool, stable: bool) -> tuple[Verdict, str]:
    if drifts:
        return Verdict.UNDECIDED, "drifts: "
    if low * look.covered > limit:
        return Verdict.FAIL, ""
    if look.covered < 1:
        return Verdict.UNDECIDED, "before the horizon: "
    if high > limit:
        return Verdict.UNDECIDED, "too close: "
    return (Verdict.PASS, "") if stable else (Verdict.UNDECIDED, "unstable: ")


def _unknown(windows: int, known: bool, confidence: float) -> Judgement:
    reason = f"only {windows} windows" if known else "a window lacks its latencies"
    return Judgement(Verdict.UNDECIDED, reason, confidence=confidence)


def _floats(values: object) -> Floats:
    return np.asarray(values, dtype=np.float64)
