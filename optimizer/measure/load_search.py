"""The load search: choose the concurrency, or in the open loop the request rate, to measure next on a deployment.

A load search finds the highest load whose latency meets the SLA. If throughput is no objective, it finds the lowest
load that reaches the throughput floor instead. In the closed loop it chooses concurrencies (``ConcurrencySearch``),
in the open loop request rates (``RateSearch``). The next load is a pure function of the measurements, so an
interrupted search resumes from the stored ones.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from objectives import model_stats
from objectives.metrics import Measurement, Metric
from objectives.sla import Sla
from optimizer.core.measurement_windows import MAX_WINDOW_MS, RATE_WINDOW_MS, REQUESTS_PER_WINDOW, WINDOW_STRETCH
from optimizer.core.trial import LoadPoint
from optimizer.simulator.speed_correction import SpeedCorrection, is_comparable

SATURATED_GAIN = 0.02  # if more load adds less throughput than this share, it only adds latency
# a deployment is given up if its warm-up has less than this share of the throughput to beat, and more than this
# multiple of a bound on the latency
GIVE_UP_SHARE, GIVE_UP_LATENCY = 0.6, 1.25
GOAL_STEP = 2.0  # factor between loads while a goal still grows
REPEATS = 2  # repetitions of an unstable measurement if no stable one exists, also of the only rate of an open loop


@dataclass(frozen=True, slots=True)
class LoadSearchRules:
    """Limits and goal of a load search.

    Args:
        request_batch_size: Samples per request.
        max_concurrency: The highest concurrency to try.
        sla: The bounds on latencies and on the error rate.
        first_load: The first load to try: a concurrency, or in the open loop a rate in requests/s (0: unknown).
        open_loop: Whether loads are request rates.
        max_loads: The number of different loads to measure at most.
        to_beat: A throughput in infer/s, at the reference speed of ``speed``. The search gives up a deployment that
            misses the bounds before it reaches this throughput; None finds the best load in any case.
        finds_lowest_load: Find the lowest load that serves ``throughput_floor`` (infer/s), not the highest load.
        allowed_concurrencies: The concurrencies that can be measured, ascending; None for any.
        only_concurrencies: Measure exactly these concurrencies, whatever the results, for an exhaustive table.
        goal: Find the load with the highest value of this metric within the bounds, such as the goodput, which may
            fall again at higher loads. None finds the highest load.
        max_seconds: The duration of the measurements after which the highest request rate is not narrowed down.
        speed: Correction of measurements for the speed of the machine, so that a slow minute neither lowers the loads
            nor ends the search of a deployment.
        other_shares: The rate of each other model under load, by name, as a multiple of that of the tuned model.
    """

    request_batch_size: float
    max_concurrency: int
    sla: Sla
    first_load: float = 4
    open_loop: bool = False
    max_loads: int = 5
    to_beat: float | None = None
    finds_lowest_load: bool = False
    throughput_floor: float = 0.0
    allowed_concurrencies: tuple[int, ...] | None = None
    only_concurrencies: tuple[int, ...] = ()
    goal: Metric | None = None
    max_seconds: float = math.inf
    speed: SpeedCorrection = field(default_factory=SpeedCorrection)
    other_shares: Mapping[str, float] = field(default_factory=dict)


def next_load(measured: Sequence[tuple[LoadPoint, Measurement]], rules: LoadSearchRules) -> LoadPoint | None:
    """Return the load to measure next, or None if the search is over."""
    return (RateSearch if rules.open_loop else ConcurrencySearch)(measured, rules).next_load()


def is_hopeless(warm_up: Measurement, rules: LoadSearchRules) -> bool:
    """Return whether the warm-up shows that the deployment is not worth a measurement.

    It is worth one if a bounded latency is unknown, since a low throughput alone may be due to the load.
    """
    warm_up = rules.speed.correct(warm_up)
    throughput = warm_up.throughput_infer_per_sec
    if rules.to_beat is None or throughput is None or throughput >= GIVE_UP_SHARE * rules.to_beat:
        return False
    if warm_up.latency_p99_ms is None:  # at least the p95, which a warm-up has
        warm_up = replace(warm_up, latency_p99_ms=warm_up.latency_p95_ms)
    return GIVE_UP_LATENCY < rules.sla.share_of_bound(warm_up) < math.inf


def _next_to_best(
    met: Mapping[int | float, float], loads: Collection[int | float], resolution: float
) -> float | None:
    """Return a load next to the one with the highest value; None if its neighbors are as close as ``resolution``.

    ``met`` has the values of those ``loads`` that meet the bounds.
    """
    best = max(met, key=lambda load: met[load])
    lower = max((load for load in loads if load < best), default=None)
    higher = min((load for load in loads if load > best), default=None)
    has_gained = lower is None or met[best] > (1 + SATURATED_GAIN) * met.get(lower, 0.0)
    if higher is None and has_gained:
        return GOAL_STEP * best
    if lower is None and best >= GOAL_STEP:
        return best / GOAL_STEP
    gaps = [(best, higher or best), (lower or best, best)]
    gaps = [gap for gap in gaps if gap[1] - gap[0] > resolution * gap[0]]
    widest = max(gaps, key=lambda gap: gap[1] / gap[0], default=None)
    return None if widest is None else math.sqrt(widest[0] * widest[1])


# -- the closed loop ----------------------------------------------------------------------------------------------

GROWTH_LIMIT = 8.0  # largest factor between two loads: a proportional step seldom overshoots, but a large one may
MIN_GROWTH = 1.2  # smallest factor of a step up, and between two loads that show saturation
CLOSE_TO_BOUND_SHARE = 0.95  # a latency above this share of its bound is close enough
# the share of the bound at which a step up, a step down or an interpolation aims
STEP_UP_TARGET, STEP_DOWN_TARGET, INTERPOLATION_TARGET = 0.97, 0.95, 0.98
BEATEN_SHARE = 0.9  # share of the throughput to beat: up to a tenth of it may be noise
RESOLUTION = 0.07  # stop if the bracket is narrower than this (relative)


def doubling_loads(highest: int) -> tuple[int, ...]:
    """Return 1, 2, 4, … and ``highest``."""
    return (*(2**power for power in range(highest.bit_length()) if 2**power < highest), highest)


@dataclass(frozen=True)
class ConcurrencySearch:
    """Searches the highest concurrency within the bounds, or the lowest one that serves the throughput floor.

    In a closed loop latency grows with concurrency (by Little's law in proportion once the server is saturated), so
    proportional steps bracket the bound and interpolation narrows the bracket.
    """

    measured: Sequence[tuple[LoadPoint, Measurement]]
    rules: LoadSearchRules

    @cached_property
    def latest(self) -> dict[int, Measurement]:
        """The latest measurement of each concurrency, corrected for the speed of the machine."""
        return {load.concurrency: self.rules.speed.correct(measurement) for load, measurement in self.measured}

    def next_load(self) -> LoadPoint | None:
        """Return the load to measure next, or None if the search is over."""
        concurrency = self._next_concurrency()
        return None if concurrency is None else LoadPoint(self.rules.request_batch_size, concurrency)

    def _next_concurrency(self) -> int | None:
        """Return the concurrency to measure next, which may be a repetition; None if the search is over."""
        rules, latest = self.rules, self.latest
        if rules.only_concurrencies:
            return next((concurrency for concurrency in rules.only_concurrencies if concurrency not in latest), None)
        if not latest:
            first = 1 if rules.finds_lowest_load else min(round(rules.first_load), rules.max_concurrency)
            return self._nearest(first, 0, None)
        concurrency = None if len(latest) >= rules.max_loads else self._search()
        if concurrency is None or concurrency in latest:
            repeats = len(self.measured) - len(latest)
            return self._worth_repeating() if repeats < REPEATS else None
        return concurrency

    def _search(self) -> int | None:
        """Return the concurrency that narrows the bracket of the best one; None if it is narrow enough."""
        rules, latest = self.rules, self.latest
        if rules.finds_lowest_load:
            return self._raise_to_floor()
        met = [c for c, m in latest.items() if rules.sla.is_met(m)]
        low = max(met, default=0)
        high = min((c for c in latest if c not in met and c > low), default=None)
        if met and rules.goal:
            best = _next_to_best({c: rules.goal.value(latest[c]) or 0.0 for c in met}, latest, RESOLUTION)
            concurrency = None if best is None else min(round(best), rules.max_concurrency)
            return None if concurrency in latest else self._nearest(concurrency, 0, None)
        if high is None:
            concurrency = self._step_up(low)
        elif low == 0:
            concurrency = None if self._is_beaten() else self._step_down(high)
        else:
            concurrency = self._between(low, high)
        return self._nearest(concurrency, low, high)

    def _nearest(self, target: int | None, above: int, below: int | None) -> int | None:
        """Return the allowed concurrency between ``above`` and ``below`` with the smallest factor to ``target``."""
        allowed_concurrencies = self.rules.allowed_concurrencies
        if target is None or allowed_concurrencies is None:
            return target
        highest = self.rules.max_concurrency if below is None else below - 1
        in_range = [concurrency for concurrency in allowed_concurrencies if above < concurrency <= highest]
        return min(in_range, key=lambda concurrency: max(concurrency / target, target / concurrency), default=None)

    def _raise_to_floor(self) -> int | None:
        """Return a higher concurrency if the highest one so far meets the bounds, but not the throughput floor."""
        rules, latest = self.rules, self.latest
        top = max(latest)
        throughput = latest[top].throughput_infer_per_sec
        reaches_floor = throughput is None or throughput >= rules.throughput_floor
        if reaches_floor or top >= rules.max_concurrency or not rules.sla.is_met(latest[top]):
            return None
        concurrency = math.ceil(top * max(rules.throughput_floor / (throughput or 1), MIN_GROWTH))
        return self._nearest(min(concurrency, rules.max_concurrency), top, None)

    def _worth_repeating(self) -> int | None:
        """Return the highest concurrency whose unstable measurement met the bounds if no comparable one did."""
        met = {c: m for c, m in self.latest.items() if self.rules.sla.is_met(m)}
        if any(map(is_comparable, met.values())):
            return None
        lowest = self.latest.get(1)
        if not met and lowest and not is_comparable(lowest) and lowest.has_values:
            return 1  # a stable measurement shows how far the bound is out of reach
        return max(met, default=None)

    def _step_up(self, low: int) -> int | None:
        """Return a concurrency above ``low``, the highest measured one, which meets the bounds; None to end there.

        Its latency is expected at STEP_UP_TARGET of the bound, if latency grows in proportion to concurrency.
        """
        share = self.rules.sla.share_of_bound(self.latest[low])
        if low >= self.rules.max_concurrency or share > CLOSE_TO_BOUND_SHARE or self._is_saturated():
            return None
        factor = min(max(STEP_UP_TARGET / share, MIN_GROWTH), GROWTH_LIMIT)
        return min(max(low + 1, round(low * factor)), self.rules.max_concurrency)

    def _step_down(self, high: int) -> int | None:
        """Return a concurrency below ``high``, the lowest measured one, which misses the bounds; None below 1.

        Its latency is expected at STEP_DOWN_TARGET of the bound.
        """
        if high == 1:
            return None  # one request at a time is too slow already
        share = self.rules.sla.share_of_bound(self.latest[high])
        if math.isinf(share):
            return max(1, high // 4)
        if share <= 1:  # too many requests fail
            return high // 2
        return max(1, min(high - 1, math.floor(STEP_DOWN_TARGET * high / share)))

    def _between(self, low: int, high: int) -> int | None:
        """Return a concurrency between ``low``, which meets the bounds, and ``high``, which misses them.

        The latency is interpolated linearly. None ends the search, because both are close or ``low`` is close to a
        bound.
        """
        if high - low <= max(1, RESOLUTION * low):
            return None
        below = self.rules.sla.share_of_bound(self.latest[low])
        if below > CLOSE_TO_BOUND_SHARE:
            return None
        above = self.rules.sla.share_of_bound(self.latest[high])
        if math.isinf(above) or above <= 1:
            return (low + high) // 2
        guess = low + (high - low) * (INTERPOLATION_TARGET - below) / max(above - below, 1e-9)
        return min(max(low + 1, round(guess)), high - 1)

    def _is_beaten(self) -> bool:
        """Return whether even the loads that miss the bounds serve clearly less than the throughput to beat.

        In a closed loop a lower load does not serve more.
        """
        to_beat = self.rules.to_beat
        throughputs = [
            measurement.throughput_infer_per_sec
            for measurement in self.latest.values()
            if measurement.throughput_infer_per_sec is not None
        ]
        return to_beat is not None and bool(throughputs) and max(throughputs) < BEATEN_SHARE * to_beat

    def _is_saturated(self) -> bool:
        """Return whether the highest load serves hardly more than the one below it."""
        if len(self.latest) < 2:
            return False
        low, high = sorted(self.latest)[-2:]
        at_low, at_high = self.latest[low].throughput_infer_per_sec, self.latest[high].throughput_infer_per_sec
        return bool(at_low and at_high and high >= MIN_GROWTH * low and at_high < (1 + SATURATED_GAIN) * at_low)


# -- the open loop ------------------------------------------------------------------------------------------------

RATE_RESOLUTION = 0.05  # stop if the bracket is narrower than this (relative)
# factors of a step up; it may be large, because an overload is detected soon and shows the capacity
MAX_STEP, MIN_STEP = 4.0, 1.5
# the first rate in requests/s, and its largest factor on the rate of one request at a time
FIRST_RATE, FIRST_FACTOR = 100.0, 3.0
ANSWERED_SHARE = 0.97  # share of the sent requests: a server that answers fewer is overloaded
CAPACITY_SHARE = 0.9  # share of the capacity: random arrivals need headroom
RATE_MARGIN_FACTOR = 1.1  # on the throughput floor; a test of four fresh servers with random arrivals needs it
MIN_REQUESTS = 3  # requests in the longest window of a measurement, at the lowest rate
MIN_RATE = MIN_REQUESTS * 1000 / MAX_WINDOW_MS


def first_rate(best: float) -> float:
    """Return the first rate of a configuration, in requests per second, if ``best`` is the best one of the others.

    It is higher where a measurement at ``best`` takes long. An overload is detected soon, and shows the capacity.
    """
    shortest = 1000 * REQUESTS_PER_WINDOW / (WINDOW_STRETCH * RATE_WINDOW_MS)  # where a measurement takes least time
    return max(best, min(MAX_STEP * best, shortest))


def with_first_rate(rules: LoadSearchRules, alone: Measurement | None) -> LoadSearchRules:
    """Return ``rules`` whose first rate is at most FIRST_FACTOR times that of ``alone``, with one request in flight.

    An overload shows the capacity soon. But a slow server would need minutes to answer the requests of a higher rate.
    Of several models, each with one request in flight, the one that can serve its part of the lowest rate counts.
    """
    if alone is None or not alone.throughput_infer_per_sec:
        return rules
    whole = 1 + sum(rules.other_shares.values())
    throughputs = [
        whole / rules.other_shares.get(name, 1.0) * (own.throughput_infer_per_sec or 0.0)
        for name, own in model_stats.from_text(alone.by_model).items()
    ]
    rate = FIRST_FACTOR * min(throughputs, default=alone.throughput_infer_per_sec) / rules.request_batch_size
    return replace(rules, first_load=min(FIRST_RATE, rate))


@dataclass(frozen=True)
class RateSearch:
    """Searches the highest request rate within the bounds, or the lowest one that serves the throughput floor."""

    measured: Sequence[tuple[LoadPoint, Measurement]]
    rules: LoadSearchRules

    @cached_property
    def latest(self) -> dict[float, Measurement]:
        """The latest measurement of each rate."""
        return {load.request_rate: measurement for load, measurement in self.measured}

    def next_load(self) -> LoadPoint | None:
        """Return the load to measure next, or None if the search is over. Its rate is at least MIN_RATE."""
        rules, latest = self.rules, self.latest
        if rules.finds_lowest_load:
            return self._raise_to_floor()
        if not latest:
            return self._load(float(rules.first_load or FIRST_RATE))
        if len(latest) >= rules.max_loads:
            return None
        met = [rate for rate, m in latest.items() if is_comparable(m) and rules.sla.is_met(m)]
        low = max(met, default=0.0)
        high = min((rate for rate in latest if rate > low and rate not in met), default=math.inf)
        if met and rules.goal:
            goals = {rate: rules.goal.value(latest[rate]) or 0.0 for rate in met}
            next_rate = _next_to_best(goals, latest, RATE_RESOLUTION) or 0.0
        elif math.isinf(high):
            next_rate = low * min(max(1 / rules.sla.share_of_bound(latest[low]), MIN_STEP), MAX_STEP)
        elif low == 0:
            if self._seconds >= rules.max_seconds and any(rules.sla.is_met(m) for m in latest.values()):
                return None  # that one is not stable, as is usual with few requests
            next_rate = max(self._below(high), min(self._rate_to_beat, self._answered_rate(high)))
        elif (
            high <= (1 + RATE_RESOLUTION) * low
            or rules.sla.share_of_bound(latest[low]) > CLOSE_TO_BOUND_SHARE
            or self._seconds >= rules.max_seconds
        ):
            return None
        else:
            next_rate = self._between(low, high)
        if not next_rate or self._is_beaten(low, high):
            return None
        load = self._load(next_rate)
        return None if load.request_rate in latest else load

    def _raise_to_floor(self) -> LoadPoint | None:
        """Return the lowest rate that serves the throughput floor on fresh servers: RATE_MARGIN_FACTOR above it.

        Random arrivals may still be too few in a measurement of few requests. Then a higher rate is next. A
        measurement that failed or is not stable is repeated, because the configuration is measured at no other rate.
        """
        rules, latest = self.rules, self.latest
        floor = rules.throughput_floor / rules.request_batch_size
        if not latest:
            return self._load(RATE_MARGIN_FACTOR * floor or float(rules.first_load or FIRST_RATE))
        top = max(latest)
        newest, answered = latest[top], self._answered_rate(top)
        if newest.overloaded:
            return None
        if not is_comparable(newest):
            repeats = len(self.measured) - len(latest)
            return LoadPoint(rules.request_batch_size, request_rate=top) if repeats < REPEATS else None
        if not rules.sla.is_met(newest) or not 0 < answered < floor or len(latest) >= rules.max_loads:
            return None
        return self._load(top * max(floor / answered, RATE_MARGIN_FACTOR))

    def _below(self, high: float) -> float:
        """Return a rate below ``high``, the lowest measured one, which misses the bounds.

        It is just below the capacity if ``high`` is above it.
        """
        answered = self._answered_rate(high)
        return CAPACITY_SHARE * answered if 0 < answered < CAPACITY_SHARE * high else high / MIN_STEP

    def _between(self, low: float, high: float) -> float:
        """Return a rate between one that meets the bounds and one that misses them.

        If the higher one exceeds the capacity, the answered requests show it. Otherwise the latency is interpolated
        as a power of the rate. It grows faster than that near the capacity, so the result rarely misses the bounds.
        It is at least the geometric mean, also if the higher rate exceeds the capacity by so little that it does not
        show.
        """
        closest, farthest = (1 + RATE_RESOLUTION) * low, high / (1 + RATE_RESOLUTION)
        capacity = self._answered_rate(high)
        if capacity < ANSWERED_SHARE * high:
            return CAPACITY_SHARE * capacity if closest < CAPACITY_SHARE * capacity else math.sqrt(low * high)
        below, above = (self.rules.sla.share_of_bound(self.latest[rate]) for rate in (low, high))
        if not 0 < below < 1 < above < math.inf:
            return math.sqrt(low * high)
        share = max(math.log(1 / below) / math.log(above / below), 0.5)
        guess = low * math.exp(share * math.log(high / low))
        return min(max(guess, closest), max(farthest, math.sqrt(low * high)))

    def _answered_rate(self, rate: float) -> float:
        """Return the requests per second that the server answered at ``rate``."""
        return (self.latest[rate].throughput_infer_per_sec or 0.0) / self.rules.request_batch_size

    def _is_beaten(self, low: float, high: float) -> bool:
        """Return whether no rate below ``high``, which misses the bounds, would serve the throughput to beat."""
        return low < high <= self._rate_to_beat

    @property
    def _rate_to_beat(self) -> float:
        return (self.rules.to_beat or 0.0) / self.rules.request_batch_size

    @property
    def _seconds(self) -> float:
        """The duration of all measurements."""
        return sum(measurement.measure_seconds or 0.0 for _, measurement in self.measured)

    def _load(self, rate: float) -> LoadPoint:
        """Return the load with its rate rounded to three digits."""
        rate = max(rate, MIN_RATE)
        return LoadPoint(self.rules.request_batch_size, request_rate=round(rate, 2 - math.floor(math.log10(rate))))
