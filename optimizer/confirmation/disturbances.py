"""Disturbances by other programs during the search, and the slowdown that is expected from them in the tests."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from objectives.metrics import QUANTILES, TIMINGS, Measurement
from objectives.verdict import MOST_EXCLUDED
from optimizer.config.search_space import Problem
from optimizer.core.trial import Point, Trial
from optimizer.machine.conditions import lost_cpu_time
from optimizer.simulator.speed_correction import scaled_sketches

USUAL_DISTURBANCE = 0.10  # CPU share of other processes beyond the usual one that disturbs no measurement
SLOWDOWN = 0.6  # rise of the log of latency over the fall of the log of the CPU share that is left: log 1.5 / log 2
MOST_TAKEN = 0.9  # CPU share of other processes; larger ones count as this
TAIL = 0.1  # rise of the log of latency at which the share of slower requests falls by a factor of e


def was_search_disturbed(trials: Sequence[Trial]) -> bool:
    """Return whether other processes or machines disturbed more than MOST_EXCLUDED of the search's measurements."""
    measured = _measurements(trials)
    return sum(map(lost_cpu_time, measured)) > MOST_EXCLUDED * len(measured)


def disturbance_limit(trials: Sequence[Trial]) -> float:
    """Return the CPU share of other processes above which a window on a fresh server does not count.

    It is fixed before the first of these windows, from the usual share during the search: a machine that is always
    shared is measured as it is.
    """
    return USUAL_DISTURBANCE + _usual_share(trials)


def expected_slowdown(trials: Sequence[Trial], problem: Problem) -> float:
    """Return the expected rise of the log of a latency percentile over that in the usual state of the machine.

    The measurements of the search are samples of the states. Most slow requests are those of the slowest states. If
    the share of the requests that are slower than t falls in each state as t to the power of -1 / TAIL, the
    percentile over all states is higher by TAIL * log(mean(exp(slowdown / TAIL))). It is not higher for a server on
    GPUs, nor after a search that was seldom disturbed, because then the disturbed windows of a test do not count.
    """
    if problem.cpu_count is None or not was_search_disturbed(trials):
        return 0.0
    usual_share = _usual_share(trials)
    slowdowns = [_slowdown(measurement, usual_share) for measurement in _measurements(trials)]
    return TAIL * math.log(statistics.fmean(math.exp(own / TAIL) for own in slowdowns))


def slowed_points(points: Sequence[Point], trials: Sequence[Trial], problem: Problem) -> list[Point]:
    """Return ``points`` with the latency percentiles that are expected over all states of the machine.

    A measurement in a slow state is not made faster.
    """
    expected, usual_share = expected_slowdown(trials, problem), _usual_share(trials)
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
    left, usually_left = (1 - min(share, MOST_TAKEN) for share in (measurement.other_cpu_share, usual_share))
    return SLOWDOWN * math.log(usually_left / left)


def _slower(measurement: Measurement, log_factor: float) -> Measurement:
    """Return the measurement with percentiles whose log is higher by ``log_factor``, unless that is negative."""
    factor = math.exp(max(0.0, log_factor))
    fields = [timing.field_of(quantile) for timing in TIMINGS for quantile in QUANTILES]
    values: dict[str, Any] = {
        name: value * factor for name in fields if (value := getattr(measurement, name)) is not None
    }
    values |= scaled_sketches(measurement, factor)
    return replace(measurement, **values)


def _measurements(trials: Sequence[Trial]) -> list[Measurement]:
    return [measurement for trial in trials for _, measurement in trial.measurements]
