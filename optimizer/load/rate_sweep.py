"""The load search in an open loop: the highest rate of requests that meets the SLA.

Unlike requests in flight, a rate beyond the capacity has no answer: the queue grows for as long as it is measured.
Below it latency is flat and then rises steeply. So rates are bracketed by factors and halved in between; what an
overloaded server still answered says where its capacity is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from objectives.metrics import Measurement
from objectives.sla import worst_violation
from optimizer.load.sweep import SweepRules, share_of_bound
from optimizer.trial import LoadPoint

RESOLUTION = 0.05  # a bracket this narrow (relative) is closed
LEAP, STEP = 4.0, 1.5  # up, at most and at least: an overload is soon recognised, and tells the capacity
OF_CAPACITY = 0.9  # a queue of random arrivals needs room
LOWEST_RATE = 1.0


def next_rate(measured: Sequence[tuple[LoadPoint, Measurement]], rules: SweepRules) -> LoadPoint | None:
    """The load to measure next, or None when the search is over. ``rules.start`` is the first rate (requests/s)."""
    seen = {load.request_rate: measurement for load, measurement in measured}
    if rules.lowest:  # latency is asked for, at what must be served at least
        return None if seen else _at(rules.throughput_floor / rules.request_batch_size or float(rules.start), rules)
    if not seen:
        return _at(float(rules.start), rules)
    if len(seen) >= rules.max_loads:
        return None
    met = [rate for rate, m in seen.items() if m.stable and worst_violation(rules.constraints, m) <= 0]
    low = max(met, default=0.0)
    high = min((rate for rate in seen if rate > low and rate not in met), default=math.inf)
    if math.isinf(high):
        wanted = low * min(max(1 / share_of_bound(seen[low], rules.constraints), STEP), LEAP)
    elif low == 0:
        wanted = _below(high, seen[high], rules)
    elif high <= (1 + RESOLUTION) * low:
        return None
    else:
        wanted = math.sqrt(low * high)
        capacity = _answered(seen[high], rules)
        if (1 + RESOLUTION) * low < OF_CAPACITY * capacity < high:
            wanted = OF_CAPACITY * capacity
    if wanted < LOWEST_RATE or _is_beaten(low, high, rules):
        return None
    load = _at(wanted, rules)
    return None if load.request_rate in seen else load


def _below(high: float, measurement: Measurement, rules: SweepRules) -> float:
    answered = _answered(measurement, rules)
    return OF_CAPACITY * answered if 0 < answered < OF_CAPACITY * high else high / STEP


def _answered(measurement: Measurement, rules: SweepRules) -> float:
    """Requests per second."""
    return (measurement.throughput_infer_per_sec or 0.0) / rules.request_batch_size


def _is_beaten(low: float, high: float, rules: SweepRules) -> bool:
    """Whether no rate below ``high``, which is missed, would serve what is to be beaten."""
    return rules.to_beat is not None and low < high <= rules.to_beat / rules.request_batch_size


def _at(rate: float, rules: SweepRules) -> LoadPoint:
    """To three digits: more would only tell that it was computed."""
    digits = 2 - math.floor(math.log10(max(rate, LOWEST_RATE)))
    return LoadPoint(rules.request_batch_size, request_rate=max(round(rate, digits), LOWEST_RATE))
