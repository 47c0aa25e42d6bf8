"""The load search on one deployment: the highest concurrency whose latency meets the SLA.

Where throughput is no objective, it is the lowest one that serves what is asked for.

A pure rule from what was measured to what is measured next, so that replaying stored measurements resumes an
interrupted sweep where it stood.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from objectives.metrics import METRICS, Measurement
from objectives.sla import Constraint, worst_violation
from optimizer.trial import LoadPoint

GROWTH_LIMIT = 8.0  # a step up in proportion seldom overshoots; further than this is a leap in the dark
SATURATED_GAIN = 0.02  # more load that adds less throughput than this adds only latency
SMALLEST_STEP = 1.2
CLOSE = 0.95  # a latency above this share of its bound is close enough to it
BEATEN = 0.9  # the best so far may owe a tenth of its throughput to a quiet moment
HOPELESS = 0.6  # of the throughput to beat, in a short window that misses the bound
HOPELESS_LATENCY = 1.25  # times the bound
REPEATS = 2  # of a load whose windows disagreed, where nothing else is left to go by
RESOLUTION = 0.07  # a bracket this narrow (relative) is closed


@dataclass(frozen=True, slots=True)
class SweepRules:
    """``constraints`` are the latency bounds; ``start`` is the first concurrency (in an open loop: rate) to try.

    ``to_beat`` is a throughput (infer/s): a deployment that misses the bounds before it reaches so much is
    given up. None asks for its best load in any case. ``lowest``: the lowest load that serves
    ``throughput_floor`` (infer/s) instead of the highest. ``loads``: the concurrencies that can be measured at
    all, ascending; None is any. ``every``: those that are measured in any case, and no others, for a table of all.
    """

    request_batch_size: float
    max_concurrency: int
    constraints: tuple[Constraint, ...]
    start: float = 4
    open_loop: bool = False
    max_loads: int = 5
    to_beat: float | None = None
    lowest: bool = False
    throughput_floor: float = 0.0
    loads: tuple[int, ...] | None = None
    every: tuple[int, ...] = ()


def doubled(most: int) -> tuple[int, ...]:
    """1, 2, 4, … and ``most``."""
    return (*(2**power for power in range(most.bit_length()) if 2**power < most), most)


def latency_bounds(constraints: Sequence[Constraint]) -> tuple[Constraint, ...]:
    """The constraints that a lower load can meet."""
    return tuple(c for c in constraints if c.metric.startswith("latency-"))


def next_load(measured: Sequence[tuple[LoadPoint, Measurement]], rules: SweepRules) -> LoadPoint | None:
    """The load to measure next, or None when the search is over.

    In a closed loop latency grows with concurrency (Little's law: at saturation in proportion), so the bound
    is bracketed by proportional steps and closed in on by interpolation.
    """
    if rules.every:
        known = {load.concurrency for load, _ in measured}
        return next((_at(one, rules) for one in rules.every if one not in known), None)
    if not measured:
        first = _nearest(1 if rules.lowest else min(round(rules.start), rules.max_concurrency), 0, None, rules)
        return None if first is None else _at(first, rules)
    seen = {load.concurrency: measurement for load, measurement in measured}
    concurrency = None if len(seen) >= rules.max_loads else _search(seen, rules)
    if concurrency is None or concurrency in seen:
        repeats = len(measured) - len(seen)
        concurrency = _worth_repeating(seen, rules) if repeats < REPEATS else None
    return None if concurrency is None else _at(concurrency, rules)


def is_hopeless(glance: Measurement, rules: SweepRules) -> bool:
    """Whether a first short window already says that the deployment is not worth a measurement.

    Not where it leaves a bounded latency unknown: little throughput alone may be the load's fault.
    """
    served = glance.throughput_infer_per_sec
    if rules.to_beat is None or served is None or served >= HOPELESS * rules.to_beat:
        return False
    if glance.latency_p99_ms is None:  # no lower than the p95, which a glance knows
        glance = replace(glance, latency_p99_ms=glance.latency_p95_ms)
    return HOPELESS_LATENCY < share_of_bound(glance, rules.constraints) < math.inf


def _search(seen: dict[int, Measurement], rules: SweepRules) -> int | None:
    if rules.lowest:
        return _lowest(seen, rules)
    met = [c for c, m in seen.items() if worst_violation(rules.constraints, m) <= 0]
    missed = [c for c in seen if c not in met]
    low, high = max(met, default=0), min((c for c in missed if c > max(met, default=0)), default=None)
    if high is None:
        wanted = _step_up(low, seen, rules)
    elif low == 0:
        wanted = None if _is_beaten(seen, rules) else _step_down(high, seen[high], rules)
    else:
        wanted = _between(low, high, seen, rules)
    return _nearest(wanted, low, high, rules)


def _nearest(wanted: int | None, above: int, below: int | None, rules: SweepRules) -> int | None:
    """Of the loads that can be measured, the one nearest in proportion to ``wanted`` between two others."""
    if wanted is None or rules.loads is None:
        return wanted
    highest = rules.max_concurrency if below is None else below - 1
    inside = [load for load in rules.loads if above < load <= highest]
    return min(inside, key=lambda load: max(load / wanted, wanted / load), default=None)


def _lowest(seen: dict[int, Measurement], rules: SweepRules) -> int | None:
    top = max(seen)
    served = seen[top].throughput_infer_per_sec
    enough = served is None or served >= rules.throughput_floor
    if enough or top >= rules.max_concurrency or worst_violation(rules.constraints, seen[top]) > 0:
        return None
    wanted = math.ceil(top * max(rules.throughput_floor / (served or 1), SMALLEST_STEP))
    return _nearest(min(wanted, rules.max_concurrency), top, None, rules)


def _worth_repeating(seen: dict[int, Measurement], rules: SweepRules) -> int | None:
    """The highest load that met the bounds in an unstable measurement, where no stable one did."""
    met = {c: m for c, m in seen.items() if worst_violation(rules.constraints, m) <= 0}
    if any(m.stable for m in met.values()):
        return None
    alone = seen.get(1)
    if not met and alone is not None and not alone.stable and alone.throughput_infer_per_sec is not None:
        return 1  # says how far the bound is out of reach, if it can be trusted
    return max(met, default=None)


def _step_up(low: int, seen: dict[int, Measurement], rules: SweepRules) -> int | None:
    share = share_of_bound(seen[low], rules.constraints)
    if low >= rules.max_concurrency or share > CLOSE or _saturated(seen):
        return None
    factor = min(max(0.97 / share, SMALLEST_STEP), GROWTH_LIMIT)
    return min(max(low + 1, round(low * factor)), rules.max_concurrency)


def _step_down(high: int, measurement: Measurement, rules: SweepRules) -> int | None:
    if high == 1:
        return None  # one request at a time is too slow already
    share = share_of_bound(measurement, rules.constraints)
    if math.isinf(share):
        return max(1, high // 4)
    return max(1, min(high - 1, math.floor(0.95 * high / share)))


def _between(low: int, high: int, seen: dict[int, Measurement], rules: SweepRules) -> int | None:
    if high - low <= max(1, RESOLUTION * low):
        return None
    below = share_of_bound(seen[low], rules.constraints)
    if below > CLOSE:
        return None
    above = share_of_bound(seen[high], rules.constraints)
    if math.isinf(above):
        return (low + high) // 2
    guess = low + (high - low) * (0.98 - below) / max(above - below, 1e-9)
    return min(max(low + 1, round(guess)), high - 1)


def _is_beaten(seen: dict[int, Measurement], rules: SweepRules) -> bool:
    """Whether even the loads that are too high serve clearly less than what is to be beaten.

    In a closed loop throughput does not grow when the load is taken back.
    """
    served = [m.throughput_infer_per_sec for m in seen.values() if m.throughput_infer_per_sec is not None]
    return rules.to_beat is not None and bool(served) and max(served) < BEATEN * rules.to_beat


def _saturated(seen: dict[int, Measurement]) -> bool:
    """Whether the last step up added load but no throughput."""
    if len(seen) < 2:
        return False
    before, last = sorted(seen)[-2:]
    was, now = seen[before].throughput_infer_per_sec, seen[last].throughput_infer_per_sec
    return bool(was and now and last >= 1.2 * before and now < (1 + SATURATED_GAIN) * was)


def share_of_bound(measurement: Measurement, constraints: Sequence[Constraint]) -> float:
    """The latency as a share of its bound, the worst where there are several; inf where unknown."""
    shares = [0.01]
    for constraint in constraints:
        value = METRICS[constraint.metric].value(measurement)
        shares.append(math.inf if value is None else value / constraint.bound)
    return max(shares)


def _at(concurrency: int, rules: SweepRules) -> LoadPoint:
    return LoadPoint(rules.request_batch_size, concurrency)
