"""The second best configuration of a run, and why it is not the one that is recommended."""

from __future__ import annotations

import math
from dataclasses import dataclass

from objectives.confidence import Verdict
from objectives.verdict import Interval
from optimizer.confirm.plan import Confirmed, finalists
from optimizer.store.finished import FinishedRun
from optimizer.trial import Point, latest_points

UNKNOWN = Interval(-math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """``less`` is how much less it served, relative to the recommendation (negative: it served more), ``interval``
    where that lies with the run's confidence, unknown where either was not measured on fresh servers.

    ``missed``: the bound it misses or leaves open and by what, empty where it passed.
    """

    point: Point
    confirmed: Confirmed | None
    less: float
    interval: Interval
    missed: str


def runner_up(run: FinishedRun) -> RunnerUp | None:
    """Of what was confirmed beside the recommendation, baselines aside, else of what the search measured."""
    outcome = run.outcome
    if outcome is None or outcome.recommended is None:
        return None
    best, ours = outcome.recommended, outcome.confirmed
    again = [one for one in outcome.again if one.point.candidate not in (best.candidate, run.baseline)]
    theirs = max(again, key=lambda one: one.point.throughput_infer_per_sec, default=None)
    if theirs is None:
        others = [point for point in latest_points(run.trials) if point.candidate != best.candidate]
        point = next(iter(finalists(others, run.problem, 1)), None)
        return None if point is None else RunnerUp(point, None, _less(best, point), UNKNOWN, "")
    missed = "" if theirs.judged.verdict is Verdict.PASS else theirs.judged.reason
    interval = _difference(ours, theirs) if ours else UNKNOWN
    less = _less(best, theirs.point) if math.isinf(interval.low) else (interval.low + interval.high) / 2
    return RunnerUp(theirs.point, theirs, less, interval, missed)


def _less(ours: Point, theirs: Point) -> float:
    return 1 - theirs.throughput_infer_per_sec / ours.throughput_infer_per_sec


def _difference(ours: Confirmed, theirs: Confirmed) -> Interval:
    """Of ``less``: the errors of two means that were measured apart add up as squares."""
    if ours.throughput.is_unknown or theirs.throughput.is_unknown:
        return UNKNOWN
    throughput = ours.point.throughput_infer_per_sec
    halves = [(one.throughput.high - one.throughput.low) / 2 for one in (ours, theirs)]
    middles = [(one.throughput.high + one.throughput.low) / 2 for one in (ours, theirs)]
    middle, half = (middles[0] - middles[1]) / throughput, math.hypot(*halves) / throughput
    return Interval(middle - half, middle + half)
