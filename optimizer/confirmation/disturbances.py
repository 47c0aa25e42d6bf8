"""Disturbances by other programs during the search, and the slowdown that they let expect during the confirmation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from objectives import latency_sketch
from objectives.metrics import QUANTILES, TIMINGS, Measurement
from objectives.verdict import MOST_EXCLUDED
from optimizer.core.trial import Point, Trial
from optimizer.machine.conditions import lost_cpu_time

USUAL_DISTURBANCE = 0.10  # CPU share of other processes beyond the usual one that disturbs no measurement
SLOWDOWN = 0.6  # rise of the log of latency over the fall of the log of the CPU share that is left: log 1.5 / log 2
MOST_TAKEN = 0.9  # CPU share of other processes; larger ones count as this
TAIL = 0.1  # by how much the log of latency is higher where e times fewer requests are slower


def was_search_disturbed(trials: Sequence[Trial]) -> bool:
    """Return whether other processes or machines disturbed more than MOST_EXCLUDED of the search's measurements."""
    measured = _measurements(trials)
    return len(list(filter(lost_cpu_time, measured))) > MOST_EXCLUDED * len(measured)


def disturbance_limit(trials: Sequence[Trial]) -> float:
    """Return the CPU share of other processes above which a window on a fresh server does not count.

    It is fixed before the first of these windows, from the usual share during the search: a machine that is always
    shared is measured as it is.
    """
    return USUAL_DISTURBANCE + _usual_share(trials)


def expected_slowdown(trials: Sequence[Trial]) -> float:
    """Return by how much the log of a latency percentile will be higher than in the usual state of the machine.

    It is 0 after a search that was seldom disturbed, because then the disturbed windows of a test do not count.
    Otherwise the measurements of the search are samples of the states. Most slow requests are those of the slowest
    states. If the share of the requests that are slower than t falls in each state as t to the power of -1 / TAIL,
    the percentile of all requests is higher by TAIL * log(mean(exp(slowdown / TAIL))).
    """
    if not was_search_disturbed(trials):
        return 0.0
    usual_share = _usual_share(trials)
    slowdowns = [_slowdown(measurement, usual_share) for measurement in _measurements(trials)]
    return TAIL * math.log(statistics.fmean(math.exp(own / TAIL) for own in slowdowns))


def expect_slowdown(points: Sequence[Point], trials: Sequence[Trial]) -> list[Point]:
    """Return ``points`` with the latency percentiles that ``trials`` let expect in all states of the machine.

    A measurement in a slow state is not made faster.
    """
    expected, usual_share = expected_slowdown(trials), _usual_share(trials)
    if expected == 0.0:
        return list(points)
    return [
        replace(point, measurement=_slower(point.measurement, expected - _slowdown(point.measurement, usual_share)))
        for point in points
    ]


def _usual_share(trials: Sequence[Trial]) -> float:
    """Return the median of the known CPU shares of other processes, 0 to 1."""
    shares = [measurement.other_cpu_share for measurement in _measurements(trials)]
    known = [share for share in shares if share is not None]
    return statistics.median(known) if known else 0.0


def _slowdown(measurement: Measurement, usual_share: float) -> float:
    """Return by how much other processes raise the log of latency, relative to the usual state; 0 if unknown."""
    if measurement.other_cpu_share is None:
        return 0.0
    taken = [min(share, MOST_TAKEN) for share in (measurement.other_cpu_share, usual_share)]
    return SLOWDOWN * math.log((1 - taken[1]) / (1 - taken[0]))


def _slower(measurement: Measurement, log_factor: float) -> Measurement:
    factor = math.exp(max(0.0, log_factor))
    fields = [timing.field_of(quantile) for timing in TIMINGS for quantile in QUANTILES]
    values: dict[str, Any] = {name: value * factor for name in fields if (value := getattr(measurement, name))}
    sketches = {timing.sketch_field: timing.sketch(measurement) for timing in TIMINGS}
    values |= {name: latency_sketch.scale(sketch, factor) for name, sketch in sketches.items() if sketch}
    return replace(measurement, **values)


def _measurements(trials: Sequence[Trial]) -> list[Measurement]:
    return [measurement for trial in trials for _, measurement in trial.measurements]
