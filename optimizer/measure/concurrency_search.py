"""The load search of the closed loop: choose the concurrency that is measured next on a deployment."""

from __future__ import annotations

import math
from collections.abc import Sequence

from objectives.metrics import Measurement
from optimizer.core.trial import LoadPoint
from optimizer.measure.load_search import SATURATED_GAIN, LoadSearchRules, towards_best
from optimizer.simulator.speed_correction import is_comparable

GROWTH_LIMIT = 8.0  # largest factor between two loads: a proportional step seldom overshoots, but a large one may
SMALLEST_STEP = 1.2
CLOSE = 0.95  # a latency above this share of its bound is close enough
BEATEN = 0.9  # share of the throughput to beat: up to a tenth of it may be noise
REPEATS = 2  # repetitions of an unstable measurement if no stable one exists
RESOLUTION = 0.07  # stop if the bracket is narrower than this (relative)


def doubling_loads(highest: int) -> tuple[int, ...]:
    """Return 1, 2, 4, … and ``highest``."""
    return (*(2**power for power in range(highest.bit_length()) if 2**power < highest), highest)


def next_concurrency(measured: Sequence[tuple[LoadPoint, Measurement]], rules: LoadSearchRules) -> LoadPoint | None:
    """Return the concurrency to measure next, or None if the search is over.

    In a closed loop latency grows with concurrency (by Little's law in proportion once the server is saturated), so
    proportional steps bracket the bound and interpolation narrows the bracket.
    """
    if rules.every:
        known = {load.concurrency for load, _ in measured}
        return next((_load(load, rules) for load in rules.every if load not in known), None)
    if not measured:
        start = _nearest(1 if rules.lowest else min(round(rules.start), rules.max_concurrency), 0, None, rules)
        return None if start is None else _load(start, rules)
    seen = {load.concurrency: rules.speed.correct(measurement) for load, measurement in measured}
    concurrency = None if len(seen) >= rules.max_loads else _search(seen, rules)
    if concurrency is None or concurrency in seen:
        repeats = len(measured) - len(seen)
        concurrency = _worth_repeating(seen, rules) if repeats < REPEATS else None
    return None if concurrency is None else _load(concurrency, rules)


def _search(seen: dict[int, Measurement], rules: LoadSearchRules) -> int | None:
    if rules.lowest:
        return _lowest(seen, rules)
    met = [c for c, m in seen.items() if rules.sla.is_met(m)]
    missed = [c for c in seen if c not in met]
    low, high = max(met, default=0), min((c for c in missed if c > max(met, default=0)), default=None)
    if met and rules.goal:
        wanted = towards_best({c: rules.goal.value(seen[c]) or 0.0 for c in met}, seen, RESOLUTION)
        wanted = None if wanted is None else min(round(wanted), rules.max_concurrency)
        return None if wanted in seen else _nearest(wanted, 0, None, rules)
    if high is None:
        wanted = _step_up(low, seen, rules)
    elif low == 0:
        wanted = None if _is_beaten(seen, rules) else _step_down(high, seen[high], rules)
    else:
        wanted = _between(low, high, seen, rules)
    return _nearest(wanted, low, high, rules)


def _nearest(wanted: int | None, above: int, below: int | None, rules: LoadSearchRules) -> int | None:
    """Return the measurable load between ``above`` and ``below`` that is proportionally nearest to ``wanted``."""
    if wanted is None or rules.loads is None:
        return wanted
    highest = rules.max_concurrency if below is None else below - 1
    inside = [load for load in rules.loads if above < load <= highest]
    return min(inside, key=lambda load: max(load / wanted, wanted / load), default=None)


def _lowest(seen: dict[int, Measurement], rules: LoadSearchRules) -> int | None:
    top = max(seen)
    served = seen[top].throughput_infer_per_sec
    enough = served is None or served >= rules.throughput_floor
    if enough or top >= rules.max_concurrency or not rules.sla.is_met(seen[top]):
        return None
    wanted = math.ceil(top * max(rules.throughput_floor / (served or 1), SMALLEST_STEP))
    return _nearest(min(wanted, rules.max_concurrency), top, None, rules)


def _worth_repeating(seen: dict[int, Measurement], rules: LoadSearchRules) -> int | None:
    """Return the highest load whose unstable measurement met the bounds if no comparable measurement did."""
    met = {c: m for c, m in seen.items() if rules.sla.is_met(m)}
    if any(map(is_comparable, met.values())):
        return None
    alone = seen.get(1)
    if not met and alone is not None and not is_comparable(alone) and alone.throughput_infer_per_sec is not None:
        return 1  # a stable measurement shows how far the bound is out of reach
    return max(met, default=None)


def _step_up(low: int, seen: dict[int, Measurement], rules: LoadSearchRules) -> int | None:
    share = rules.sla.share_of_bound(seen[low])
    if low >= rules.max_concurrency or share > CLOSE or _saturated(seen):
        return None
    factor = min(max(0.97 / share, SMALLEST_STEP), GROWTH_LIMIT)
    return min(max(low + 1, round(low * factor)), rules.max_concurrency)


def _step_down(high: int, measurement: Measurement, rules: LoadSearchRules) -> int | None:
    if high == 1:
        return None  # one request at a time is too slow already
    share = rules.sla.share_of_bound(measurement)
    if math.isinf(share):
        return max(1, high // 4)
    if share <= 1:  # too many requests fail
        return high // 2
    return max(1, min(high - 1, math.floor(0.95 * high / share)))


def _between(low: int, high: int, seen: dict[int, Measurement], rules: LoadSearchRules) -> int | None:
    if high - low <= max(1, RESOLUTION * low):
        return None
    below = rules.sla.share_of_bound(seen[low])
    if below > CLOSE:
        return None
    above = rules.sla.share_of_bound(seen[high])
    if math.isinf(above) or above <= 1:
        return (low + high) // 2
    guess = low + (high - low) * (0.98 - below) / max(above - below, 1e-9)
    return min(max(low + 1, round(guess)), high - 1)


def _is_beaten(seen: dict[int, Measurement], rules: LoadSearchRules) -> bool:
    """Return whether even the loads that miss the bounds serve clearly less than the throughput to beat.

    In a closed loop a lower load does not serve more.
    """
    served = [m.throughput_infer_per_sec for m in seen.values() if m.throughput_infer_per_sec is not None]
    return rules.to_beat is not None and bool(served) and max(served) < BEATEN * rules.to_beat


def _saturated(seen: dict[int, Measurement]) -> bool:
    """Return whether the highest load serves hardly more than the one below it."""
    if len(seen) < 2:
        return False
    low, high = sorted(seen)[-2:]
    at_low, at_high = seen[low].throughput_infer_per_sec, seen[high].throughput_infer_per_sec
    return bool(at_low and at_high and high >= 1.2 * low and at_high < (1 + SATURATED_GAIN) * at_low)


def _load(concurrency: int, rules: LoadSearchRules) -> LoadPoint:
    return LoadPoint(rules.request_batch_size, concurrency)
