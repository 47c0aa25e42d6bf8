"""The load search of the open loop: choose the request rate that is measured next on a deployment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from objectives.metrics import Measurement
from optimizer.core.trial import LoadPoint
from optimizer.measure.load_search import LoadSearchRules, towards_best
from optimizer.simulator.speed_correction import is_comparable

RESOLUTION = 0.05  # stop if the bracket is narrower than this (relative)
# factors of a step up; it may be large, because an overload is detected soon and shows the capacity
MAX_STEP, MIN_STEP = 4.0, 1.5
OVERLOADED = 0.97  # share of the sent requests: a server that answers fewer is overloaded
CAPACITY_SHARE = 0.9  # share of the capacity: random arrivals need headroom
LOWEST_RATE = 1.0


def next_rate(measured: Sequence[tuple[LoadPoint, Measurement]], rules: LoadSearchRules) -> LoadPoint | None:
    """Return the request rate to measure next, or None if the search is over."""
    seen = {load.request_rate: measurement for load, measurement in measured}
    if rules.lowest:
        floor = rules.throughput_floor / rules.request_batch_size
        return None if seen else _load(floor or float(rules.start), rules)
    if not seen:
        return _load(float(rules.start), rules)
    if len(seen) >= rules.max_loads:
        return None
    met = [rate for rate, m in seen.items() if is_comparable(m) and rules.sla.is_met(m)]
    low = max(met, default=0.0)
    high = min((rate for rate in seen if rate > low and rate not in met), default=math.inf)
    if met and rules.goal:
        goals = {rate: rules.goal.value(seen[rate]) or 0.0 for rate in met}
        wanted = towards_best(goals, seen, RESOLUTION) or 0.0
    elif math.isinf(high):
        wanted = low * min(max(1 / rules.sla.share_of_bound(seen[low]), MIN_STEP), MAX_STEP)
    elif low == 0:
        wanted = _below(high, seen[high], rules)
    elif high <= (1 + RESOLUTION) * low:
        return None
    else:
        wanted = _between(low, high, seen, rules)
    if wanted < LOWEST_RATE or _is_beaten(low, high, rules):
        return None
    load = _load(wanted, rules)
    return None if load.request_rate in seen else load


def _below(high: float, measurement: Measurement, rules: LoadSearchRules) -> float:
    answered = _answered_rate(measurement, rules)
    return CAPACITY_SHARE * answered if 0 < answered < CAPACITY_SHARE * high else high / MIN_STEP


def _between(low: float, high: float, seen: Mapping[float, Measurement], rules: LoadSearchRules) -> float:
    """Return a rate between one that meets the bounds and one that misses them.

    If the higher one exceeds the capacity, the answered requests show it. Otherwise the latency is interpolated as a
    power of the rate. It grows faster than that near the capacity, so the result rarely misses the bounds. It is at
    least the geometric mean, also if the higher rate exceeds the capacity by so little that it does not show.
    """
    closest, farthest = (1 + RESOLUTION) * low, high / (1 + RESOLUTION)
    capacity = _answered_rate(seen[high], rules)
    if capacity < OVERLOADED * high:
        return CAPACITY_SHARE * capacity if closest < CAPACITY_SHARE * capacity else math.sqrt(low * high)
    below, above = rules.sla.share_of_bound(seen[low]), rules.sla.share_of_bound(seen[high])
    if not 0 < below < 1 < above < math.inf:
        return math.sqrt(low * high)
    share = max(math.log(1 / below) / math.log(above / below), 0.5)
    guess = low * math.exp(share * math.log(high / low))
    return min(max(guess, closest), max(farthest, math.sqrt(low * high)))


def _answered_rate(measurement: Measurement, rules: LoadSearchRules) -> float:
    """Return the answered requests per second."""
    return (measurement.throughput_infer_per_sec or 0.0) / rules.request_batch_size


def _is_beaten(low: float, high: float, rules: LoadSearchRules) -> bool:
    """Return whether no rate below ``high``, which misses the bounds, would serve the throughput to beat."""
    return rules.to_beat is not None and low < high <= rules.to_beat / rules.request_batch_size


def _load(rate: float, rules: LoadSearchRules) -> LoadPoint:
    """Return the load with its rate rounded to three digits."""
    digits = 2 - math.floor(math.log10(max(rate, LOWEST_RATE)))
    return LoadPoint(rules.request_batch_size, request_rate=max(round(rate, digits), LOWEST_RATE))
