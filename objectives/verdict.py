"""Whether the constraints are met, from the repeated measurements of one configuration at one load."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from scipy import special

from objectives.confidence import Judgement, Verdict, Window, judge, judge_values
from objectives.correlation import long_run_variance
from objectives.metrics import METRICS, Measurement
from objectives.quantiles import (
    LAST_COLUMN,
    LEVELS,
    columns,
    misses_from_columns,
    pooled_quantile_ms,
    quantile_levels,
    tail_share,
)
from objectives.sla import CONFIDENCE, Constraint


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict on all constraints together: PASS where each passes, FAIL where one fails. ``reason`` says why."""

    verdict: Verdict
    reason: str
    effective_requests: float = 0.0
    confidence: float = CONFIDENCE


@dataclass(frozen=True, slots=True)
class Interval:
    """Bounds of a figure; each holds with the confidence. Infinite or nan where the measurements cannot tell."""

    low: float
    high: float

    @property
    def is_unknown(self) -> bool:
        return math.isnan(self.low) or math.isnan(self.high) or math.isinf(self.low)


def judge_all(
    windows: Sequence[Measurement],
    constraints: Sequence[Constraint],
    confidence: float = CONFIDENCE,
) -> Judged:
    """``windows``: one measurement each, in the order of time, those of one server after those of another.

    With one that is lost or unstable there is no PASS, and a FAIL only where the others fail by themselves.
    """
    lost = next((window for window in windows if window.throughput_infer_per_sec is None), None)
    if lost is not None or not windows:
        why = f"a measurement was lost: {lost.reason or 'it has no figures'}" if lost else "nothing was measured"
        return Judged(Verdict.UNDECIDED, why, confidence=confidence)
    stable = [window for window in windows if window.stable]
    if len(stable) == len(windows):
        return _judge_stable(windows, constraints, confidence)
    without = _judge_stable(stable, constraints, confidence) if stable else None
    if without is not None and without.verdict is Verdict.FAIL:
        return without
    reason = next((window.reason for window in windows if not window.stable and window.reason), "windows disagree")
    told = f"{len(windows) - len(stable)} of {len(windows)} measurements were unstable: {reason}"
    effective = without.effective_requests if without else 0.0
    return Judged(Verdict.UNDECIDED, told, effective, confidence)


def _judge_stable(windows: Sequence[Measurement], constraints: Sequence[Constraint], confidence: float) -> Judged:
    found = [(bound, judge_one(windows, bound, confidence)) for bound in constraints]
    for verdict in (Verdict.FAIL, Verdict.UNDECIDED):
        for bound, one in found:
            if one.verdict is verdict:
                return Judged(verdict, f"{bound}: {one.reason}", one.effective_requests, confidence)
    told = "; ".join(f"{bound}: {one.reason}" for bound, one in found)
    counted = [one.effective_requests for _, one in found if one.effective_requests]
    return Judged(Verdict.PASS, told, min(counted, default=0.0), confidence)


def judge_one(windows: Sequence[Measurement], bound: Constraint, confidence: float = CONFIDENCE) -> Judgement:
    """The verdict on one constraint.

    Of a latency's quantile the requests over the bound are counted. Of p99, beyond which nothing is known, and of
    the average the windows' own values are compared; for p99 no more may be estimated to miss than are allowed, as a
    few windows with many misses do not show in the others' p99. Of anything else each window must meet the bound.
    """
    requests = [window.requests or 0 for window in windows]
    level = LEVELS.get(bound.metric)
    if level is not None and level < LAST_COLUMN:
        return judge(_counted(windows, bound.bound, level), level, confidence)
    values = [METRICS[bound.metric].value(window) for window in windows]
    if bound.metric.startswith("latency-"):
        found = judge_values(values, requests, bound.bound, confidence)
        share = tail_share(windows, bound.bound) if level is not None else 0.0
        if found.verdict is Verdict.PASS and share > 1 - LAST_COLUMN:
            told = f"some windows are far beyond it, about {share:.2%} of all requests: {found.reason}"
            return replace(found, verdict=Verdict.UNDECIDED, reason=told)
        return found
    return _judge_figures(values, bound, confidence)


def throughput_interval(windows: Sequence[Measurement], confidence: float = CONFIDENCE) -> Interval:
    """Of the mean throughput (infer/s), by Student's t over the windows, their correlation included."""
    values = np.array([w.throughput_infer_per_sec for w in windows if w.throughput_infer_per_sec is not None])
    if len(values) < 2:
        return Interval(-math.inf, math.inf)
    mean = float(values.mean())
    error = math.sqrt(float(long_run_variance(values - mean)) / len(values))
    half = -float(special.stdtrit(len(values) - 1.0, 1 - confidence)) * error
    return Interval(mean - half, mean + half)


def latency_interval_ms(
    windows: Sequence[Measurement], metric: str, effective_requests: float, confidence: float = CONFIDENCE
) -> Interval:
    """Of a latency's quantile, by order statistics on the columns of the windows.

    Of p99, beyond which nothing is known, and of the average, by Student's t over the windows' own.
    """
    level = LEVELS.get(metric, LAST_COLUMN)
    if level >= LAST_COLUMN:
        values = [METRICS[metric].value(window) for window in windows]
        found = judge_values(values, [window.requests or 0 for window in windows], math.inf, confidence)
        return Interval(found.low, found.high)
    if effective_requests < 1:
        return Interval(-math.inf, math.inf)
    low, high = quantile_levels(effective_requests, level, confidence)
    return Interval(pooled_quantile_ms(windows, low), pooled_quantile_ms(windows, high))


def pooled(windows: Sequence[Measurement]) -> Measurement:
    """One measurement for all: the quantiles of all requests, requests summed, any other figure the median."""
    values: dict[str, object] = {}
    for field in fields(Measurement):
        known = [value for w in windows if isinstance(value := getattr(w, field.name), (int, float))]
        if known and field.name not in ("stable", "requests"):
            values[field.name] = round(statistics.median(known), 4)
    for name, level in (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", LAST_COLUMN)):
        if all(level in columns(window) for window in windows):
            values[f"latency_{name}_ms"] = round(pooled_quantile_ms(windows, level), 4)
    requests = sum(window.requests or 0 for window in windows)
    stable = all(map(_is_usable, windows))
    reason = next((window.reason for window in windows if window.reason), "")
    return replace(Measurement(**values), requests=requests or None, stable=stable, reason=reason)  # type: ignore[arg-type]


def _counted(windows: Sequence[Measurement], bound_ms: float, level: float) -> list[Window]:
    """Requests and misses of each window; its tail counts those over the quantile of the whole run."""
    own_ms = pooled_quantile_ms(windows, level)
    counted = []
    for window in windows:
        requests, known = window.requests or 0, columns(window)
        misses = misses_from_columns(requests, known, bound_ms)
        counted.append(Window(requests, misses, misses_from_columns(requests, known, own_ms), window.stable))
    return counted


def _judge_figures(values: Sequence[float | None], bound: Constraint, confidence: float) -> Judgement:
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known or len(known) < len(values):
        return Judgement(Verdict.UNDECIDED, "it is unknown", confidence=confidence)
    higher = METRICS[bound.metric].better == "higher"
    met = [value >= bound.bound if higher else value <= bound.bound for value in known]
    verdict = Verdict.PASS if all(met) else Verdict.UNDECIDED if any(met) else Verdict.FAIL
    told = f"{min(known):.4g} to {max(known):.4g} in {len(known)} measurements"
    return Judgement(verdict, told, min(known), max(known), confidence=confidence)


def _is_usable(window: Measurement) -> bool:
    return window.stable and window.throughput_infer_per_sec is not None
