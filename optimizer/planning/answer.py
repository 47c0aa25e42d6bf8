"""The answer for one hardware: replicas or rate, headroom, what a loss or a burst does, cost and power."""

from __future__ import annotations

from dataclasses import dataclass

from optimizer.planning.belief import Pace
from optimizer.planning.cost import Cost, Power, costs, power
from optimizer.planning.day import HOURS, Day
from optimizer.planning.fleet import Fleet
from optimizer.planning.sizing import EXPECTED, SAFE, Count, Rate, carried, sized
from optimizer.planning.source import Source

HEADROOM = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)  # of the planned rate
BURST = 2.0


@dataclass(frozen=True, slots=True)
class Load:
    """What every replica gives while all get ``rate`` requests a second, as is likely. ``meets`` is so too;
    ``surely``: at the pace of SAFE too.

    ``utilization``: of the most that they can serve, however late. ``busy``: of the time of their instances; with
    dynamic batching they are busy long before they are full, with small batches.
    """

    rate: float
    latency_ms: float
    utilization: float
    busy: float
    meets: bool
    surely: bool


@dataclass(frozen=True)
class Answer:
    """``rate`` is the highest that is planned for, in requests a second; ``replicas`` carry it.

    ``count`` where replicas were asked for, ``carries`` where a rate was; ``replicas`` 0 where no number, and
    ``carries`` 0 where no rate, meets the bounds. ``tightest_ms``: the bound on the judged latency that could
    still be promised (safe, likely). ``one_lost``: with a replica less; ``spare``: replicas of which any one may be
    lost; ``in_burst``: at twice the rate, which takes ``for_burst`` of them (None: no number is sure to do).
    ``by_hour``: replicas in each hour of a day. ``alone_ms``: the latency with hardly any load.
    """

    source: Source
    replicas: int
    rate: float
    count: Count | None = None
    carries: Rate | None = None
    at_rate: Load | None = None
    tightest_ms: tuple[float, float] | None = None
    headroom: tuple[Load, ...] = ()
    one_lost: Load | None = None
    spare: int | None = None
    in_burst: Load | None = None
    for_burst: int | None = None
    by_hour: tuple[int, ...] = ()
    cost: Cost | None = None
    power: Power | None = None
    alone_ms: float = 0.0

    @property
    def found(self) -> bool:
        return self.replicas > 0 and self.rate > 0


def replicas_for(source: Source, fleet: Fleet, mean_rate: float, day: Day, hour_cost: float | None) -> Answer:
    """For ``mean_rate`` requests a second over a day, whose peak is planned for."""
    peak = mean_rate * day.peak_factor
    count = sized(fleet, peak)
    if count is None:
        return Answer(source, 0, peak, alone_ms=_alone_ms(fleet))
    by_hour: tuple[int, ...] = ()
    if day.peak_factor > 1:
        by_hour = tuple(_for_hour(fleet, mean_rate * day.busiest(hour), count.safe) for hour in range(HOURS))
    return _described(source, fleet, count.safe, peak, mean_rate, hour_cost, count=count, by_hour=by_hour)


def rate_of(source: Source, fleet: Fleet, replicas: int, day: Day, hour_cost: float | None) -> Answer:
    """The highest rate of so many replicas."""
    rates = carried(fleet, replicas)
    if not rates.safe:
        return Answer(source, replicas, 0.0, carries=rates, alone_ms=_alone_ms(fleet))
    mean_rate = rates.safe / day.peak_factor
    return _described(source, fleet, replicas, rates.safe, mean_rate, hour_cost, carries=rates)


def bound_of(
    source: Source, fleet: Fleet, replicas: int, mean_rate: float, day: Day, hour_cost: float | None
) -> Answer:
    """The tightest bound that so many replicas keep at a rate."""
    peak = mean_rate * day.peak_factor
    return _described(source, fleet, replicas, peak, mean_rate, hour_cost, carries=carried(fleet, replicas))


def _described(
    source: Source,
    fleet: Fleet,
    replicas: int,
    rate: float,
    mean_rate: float,
    hour_cost: float | None,
    *,
    count: Count | None = None,
    carries: Rate | None = None,
    by_hour: tuple[int, ...] = (),
) -> Answer:
    expected, safe = (fleet.replica.belief.pace(p) for p in (EXPECTED, SAFE))
    at_rate = _load(fleet, rate, replicas, expected, safe)
    inferences = mean_rate * fleet.replica.request_batch_size
    return Answer(
        source,
        replicas,
        rate,
        count,
        carries,
        at_rate,
        tightest_ms=(_latency_ms(fleet, rate, replicas, safe), at_rate.latency_ms),
        headroom=tuple(_load(fleet, share * rate, replicas, expected, safe) for share in HEADROOM),
        one_lost=_load(fleet, rate, replicas - 1, expected, safe) if replicas > 1 else None,
        spare=None if count is None else count.safe + 1,
        in_burst=_load(fleet, BURST * rate, replicas, expected, safe),
        for_burst=fleet.smallest(BURST * rate, safe),
        by_hour=by_hour,
        cost=None if hour_cost is None else costs(hour_cost * source.devices, replicas, inferences, by_hour),
        power=power(source.watts, replicas, inferences),
    )


def _load(fleet: Fleet, rate: float, replicas: int, expected: Pace, safe: Pace) -> Load:
    found = fleet.at(rate, replicas, expected)
    latency_ms = fleet.replica.latency_ms(found, fleet.replica.bounds[0].metric)
    utilization = rate / (replicas * fleet.replica.capacity(expected.slowness))
    likely = fleet.accepts(found, expected)
    surely = likely and fleet.meets(rate, replicas, safe)
    return Load(rate, latency_ms, utilization, found.utilization, likely, surely)


def _latency_ms(fleet: Fleet, rate: float, replicas: int, pace: Pace) -> float:
    found = fleet.at(rate, replicas, pace)
    if found.overloaded and fleet.traffic.is_steady:
        return float("inf")
    return fleet.replica.latency_ms(found, fleet.replica.bounds[0].metric, pace.lateness)


def _alone_ms(fleet: Fleet) -> float:
    """About the latency with nothing else to serve."""
    rate = 0.05 * fleet.replica.capacity(1.0)
    return _latency_ms(fleet, rate, 1, fleet.replica.belief.pace(EXPECTED))


def _for_hour(fleet: Fleet, rate: float, most: int) -> int:
    if rate <= 0:
        return 1
    found = fleet.smallest(rate, fleet.replica.belief.pace(SAFE))
    return most if found is None else min(found, most)
