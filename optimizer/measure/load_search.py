"""The load search: choose the concurrency, or in the open loop the request rate, to measure next on a deployment.

A load search finds the highest load whose latency meets the SLA. If throughput is no objective, it finds the lowest
load that reaches the throughput floor instead. In the closed loop it chooses concurrencies (``next_concurrency``),
in the open loop request rates (``next_rate``); ``next_load`` calls one of the two. The next load is a pure function
of the measurements, so an interrupted search resumes from the stored ones.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from objectives.metrics import Measurement, Metric
from objectives.sla import Sla
from optimizer.core.measurement_windows import MAX_WINDOW_MS
from optimizer.core.trial import LoadPoint
from optimizer.simulator.speed_correction import SpeedCorrection, is_comparable

SATURATED_GAIN = 0.02  # if more load adds less throughput than this share, it only adds latency
HOPELESS = 0.6  # share of the throughput to beat, in a short window that misses the bound
HOPELESS_LATENCY = 1.25  # factor on the bound
GOAL_STEP = 2.0  # factor between loads while a goal still grows


@dataclass(frozen=True, slots=True)
class LoadSearchRules:
    """Limits and goal of a load search.

    Args:
        request_batch_size: Samples per request.
        max_concurrency: The highest concurrency to try.
        sla: The bounds on latencies and on the error rate.
        start: The first load to try: a concurrency, or in the open loop a rate in requests/s.
        open_loop: Whether loads are request rates.
        max_loads: The number of different loads to measure at most.
        to_beat: A throughput in infer/s, at the reference speed of ``speed``. The search gives up a deployment that
            misses the bounds before it reaches this throughput; None finds the best load in any case.
        finds_lowest_load: Find the lowest load that serves ``throughput_floor`` (infer/s), not the highest load.
        loads: The concurrencies that can be measured, ascending; None for any.
        only_concurrencies: Measure exactly these concurrencies, whatever the results, for an exhaustive table.
        goal: Find the load with the highest value of this metric within the bounds, such as the goodput, which may
            fall again at higher loads. None finds the highest load.
        speed: Correction of measurements for the speed of the machine, so that a slow minute neither lowers the loads
            nor ends the search of a deployment.
    """

    request_batch_size: float
    max_concurrency: int
    sla: Sla
    start: float = 4
    open_loop: bool = False
    max_loads: int = 5
    to_beat: float | None = None
    finds_lowest_load: bool = False
    throughput_floor: float = 0.0
    loads: tuple[int, ...] | None = None
    only_concurrencies: tuple[int, ...] = ()
    goal: Metric | None = None
    speed: SpeedCorrection = field(default_factory=SpeedCorrection)


def next_load(measured: Sequence[tuple[LoadPoint, Measurement]], rules: LoadSearchRules) -> LoadPoint | None:
    """Return the load to measure next, or None if the search is over."""
    return (next_rate if rules.open_loop else next_concurrency)(measured, rules)


def is_hopeless(warm_up: Measurement, rules: LoadSearchRules) -> bool:
    """Return whether the warm-up shows that the deployment is not worth a measurement.

    It is worth one if a bounded latency is unknown, since a low throughput alone may be due to the load.
    """
    warm_up = rules.speed.correct(warm_up)
    throughput = warm_up.throughput_infer_per_sec
    if rules.to_beat is None or throughput is None or throughput >= HOPELESS * rules.to_beat:
        return False
    if warm_up.latency_p99_ms is None:  # at least the p95, which a warm-up has
        warm_up = replace(warm_up, latency_p99_ms=warm_up.latency_p95_ms)
    return HOPELESS_LATENCY < rules.sla.share_of_bound(warm_up) < math.inf


def _next_to_best(met: Mapping[int | float, float], seen: Collection[int | float], resolution: float) -> float | None:
    """Return a load next to the one with the highest value; None if its neighbors are as close as ``resolution``.

    ``met`` has the values of the loads in ``seen`` that meet the bounds.
    """
    best = max(met, key=lambda load: met[load])
    lower = max((load for load in seen if load < best), default=None)
    higher = min((load for load in seen if load > best), default=None)
    has_gained = lower is None or met[best] > (1 + SATURATED_GAIN) * met.get(lower, 0.0)
    if higher is None and has_gained:
        return GOAL_STEP * best
    if lower is None and best >= GOAL_STEP:
        return best / GOAL_STEP
    gaps = [(best, higher or best), (lower or best, best)]
    gaps = [gap for gap in gaps if gap[1] - gap[0] > resolution * gap[0]]
    widest = max(gaps, key=lambda gap: gap[1] / gap[0], default=None)
    return None if widest is None else math.sqrt(widest[0] * widest[1])


# The closed loop

GROWTH_LIMIT = 8.0  # largest factor between two loads: a proportional step seldom overshoots, but a large one may
SMALLEST_STEP = 1.2
CLOSE = 0.95  # a latency above this share of its bound is close enough
BEATEN = 0.9  # share of the throughput to beat: up to a tenth of it may be noise
REPEATS = 2  # repetitions of an unstable measurement if no stable one exists, also of the open loop's only rate
RESOLUTION = 0.07  # stop if the bracket is narrower than this (relative)


def doubling_loads(highest: int) -> tuple[int, ...]:
    """Return 1, 2, 4, … and ``highest``."""
    return (*(2**power for power in range(highest.bit_length()) if 2**power < highest), highest)


def next_concurrency(measured: Sequence[tuple[LoadPoint, Measurement]], rules: LoadSearchRules) -> LoadPoint | None:
    """Return the concurrency to measure next, or None if the search is over.

    In a closed loop latency grows with concurrency (by Little's law in proportion once the server is saturated), so
    proportional steps bracket the bound and interpolation narrows the bracket.
    """
    if rules.only_concurrencies:
        known = {load.concurrency for load, _ in measured}
        return next((_concurrency_load(load, rules) for load in rules.only_concurrencies if load not in known), None)
    if not measured:
        start = 1 if rules.finds_lowest_load else min(round(rules.start), rules.max_concurrency)
        first = _nearest(start, 0, None, rules)
        return None if first is None else _concurrency_load(first, rules)
    seen = {load.concurrency: rules.speed.correct(measurement) for load, measurement in measured}
    concurrency = None if len(seen) >= rules.max_loads else _search(seen, rules)
    if concurrency is None or concurrency in seen:
        repeats = len(measured) - len(seen)
        concurrency = _worth_repeating(seen, rules) if repeats < REPEATS else None
    return None if concurrency is None else _concurrency_load(concurrency, rules)


def _search(seen: dict[int, Measurement], rules: LoadSearchRules) -> int | None:
    if rules.finds_lowest_load:
        return _lowest(seen, rules)
    met = [c for c, m in seen.items() if rules.sla.is_met(m)]
    missed = [c for c in seen if c not in met]
    low, high = max(met, default=0), min((c for c in missed if c > max(met, default=0)), default=None)
    if met and rules.goal:
        wanted = _next_to_best({c: rules.goal.value(seen[c]) or 0.0 for c in met}, seen, RESOLUTION)
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


def _concurrency_load(concurrency: int, rules: LoadSearchRules) -> LoadPoint:
    return LoadPoint(rules.request_batch_size, concurrency)


# The open loop

RATE_RESOLUTION = 0.05  # stop if the bracket is narrower than this (relative)
# factors of a step up; it may be large, because an overload is detected soon and shows the capacity
MAX_STEP, MIN_STEP = 4.0, 1.5
OVERLOADED = 0.97  # share of the sent requests: a server that answers fewer is overloaded
CAPACITY_SHARE = 0.9  # share of the capacity: random arrivals need headroom
FEWEST_REQUESTS = 3  # in the longest window of a measurement, at the lowest rate
RATE_MARGIN_FACTOR = 1.1  # on the throughput floor; a test of four fresh servers with random arrivals needs it
LOWEST_RATE = FEWEST_REQUESTS * 1000 / MAX_WINDOW_MS


def next_rate(measured: Sequence[tuple[LoadPoint, Measurement]], rules: LoadSearchRules) -> LoadPoint | None:
    """Return the request rate to measure next, or None if the search is over. It is at least LOWEST_RATE."""
    seen = {load.request_rate: measurement for load, measurement in measured}
    if rules.finds_lowest_load:
        return _lowest_rate(seen, len(measured) - len(seen), rules)
    if not seen:
        return _rate_load(float(rules.start), rules)
    if len(seen) >= rules.max_loads:
        return None
    met = [rate for rate, m in seen.items() if is_comparable(m) and rules.sla.is_met(m)]
    low = max(met, default=0.0)
    high = min((rate for rate in seen if rate > low and rate not in met), default=math.inf)
    if met and rules.goal:
        goals = {rate: rules.goal.value(seen[rate]) or 0.0 for rate in met}
        wanted = _next_to_best(goals, seen, RATE_RESOLUTION) or 0.0
    elif math.isinf(high):
        wanted = low * min(max(1 / rules.sla.share_of_bound(seen[low]), MIN_STEP), MAX_STEP)
    elif low == 0:
        wanted = _rate_below(high, seen[high], rules)
    elif high <= (1 + RATE_RESOLUTION) * low:
        return None
    else:
        wanted = _rate_between(low, high, seen, rules)
    if not wanted or _no_rate_beats(low, high, rules):
        return None
    load = _rate_load(wanted, rules)
    return None if load.request_rate in seen else load


def _lowest_rate(seen: Mapping[float, Measurement], repeats: int, rules: LoadSearchRules) -> LoadPoint | None:
    """Return the lowest rate that serves the throughput floor on fresh servers as well: RATE_MARGIN_FACTOR above it.

    Random arrivals may still be too few in a measurement of few requests. Then a higher rate is next. A measurement
    that failed or is not stable is repeated, because the configuration is measured at no other rate.
    """
    floor = rules.throughput_floor / rules.request_batch_size
    if not seen:
        return _rate_load(RATE_MARGIN_FACTOR * floor or float(rules.start), rules)
    top = max(seen)
    newest, answered = seen[top], _answered_rate(seen[top], rules)
    if newest.overloaded:
        return None
    if not is_comparable(newest):
        return LoadPoint(rules.request_batch_size, request_rate=top) if repeats < REPEATS else None
    if not rules.sla.is_met(newest) or not 0 < answered < floor or len(seen) >= rules.max_loads:
        return None
    return _rate_load(top * max(floor / answered, RATE_MARGIN_FACTOR), rules)


def _rate_below(high: float, measurement: Measurement, rules: LoadSearchRules) -> float:
    answered = _answered_rate(measurement, rules)
    return CAPACITY_SHARE * answered if 0 < answered < CAPACITY_SHARE * high else high / MIN_STEP


def _rate_between(low: float, high: float, seen: Mapping[float, Measurement], rules: LoadSearchRules) -> float:
    """Return a rate between one that meets the bounds and one that misses them.

    If the higher one exceeds the capacity, the answered requests show it. Otherwise the latency is interpolated as a
    power of the rate. It grows faster than that near the capacity, so the result rarely misses the bounds. It is at
    least the geometric mean, also if the higher rate exceeds the capacity by so little that it does not show.
    """
    closest, farthest = (1 + RATE_RESOLUTION) * low, high / (1 + RATE_RESOLUTION)
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


def _no_rate_beats(low: float, high: float, rules: LoadSearchRules) -> bool:
    """Return whether no rate below ``high``, which misses the bounds, would serve the throughput to beat."""
    return rules.to_beat is not None and low < high <= rules.to_beat / rules.request_batch_size


def _rate_load(rate: float, rules: LoadSearchRules) -> LoadPoint:
    """Return the load with its rate rounded to three digits."""
    rate = max(rate, LOWEST_RATE)
    return LoadPoint(rules.request_batch_size, request_rate=round(rate, 2 - math.floor(math.log10(rate))))
