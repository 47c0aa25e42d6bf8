"""Test the search for the highest request rate on queues with a known solution."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectives import model_stats
from objectives.confidence import SequentialTest
from objectives.metrics import METRICS, Measurement
from objectives.server_spread import server_spreads
from objectives.sla import Sla, Verdict
from objectives.verdict import judge_sla
from optimizer.core.measurement_windows import (
    MAX_WINDOW_MS,
    RATE_WINDOW_MS,
    REQUESTS_PER_WINDOW,
    WINDOW_STRETCH,
)
from optimizer.core.trial import LoadPoint
from optimizer.measure.load_search import (
    FIRST_FACTOR,
    FIRST_RATE,
    MAX_STEP,
    MIN_RATE,
    MIN_REQUESTS,
    RATE_MARGIN_FACTOR,
    RATE_RESOLUTION,
    REPEATS,
    LoadSearchRules,
    RateSearch,
    first_rate,
    with_first_rate,
)
from tests.conftest import not_none

BOUND_MS = 20.0


def measure_queue(rate: float, capacity: float, service_ms: float = 2.0) -> Measurement:
    """Simulate an M/M/1 queue, whose latency is exponential; above its capacity the latency keeps growing."""
    if rate >= capacity:
        return Measurement(capacity, latency_p95_ms=5000.0, stable=False, overloaded=True, reason="overloaded")
    return Measurement(rate, latency_p95_ms=3 * service_ms / (1 - rate / capacity), stable=True)


def highest_rate(capacity: float, service_ms: float = 2.0) -> float:
    return capacity * (1 - 3 * service_ms / BOUND_MS)


def search(server: Callable[[float], Measurement], rules: LoadSearchRules) -> list[tuple[LoadPoint, Measurement]]:
    measured: list[tuple[LoadPoint, Measurement]] = []
    while (load := RateSearch(measured, rules).next_load()) is not None:
        assert load.concurrency == 0
        assert load not in dict(measured), "no rate twice"
        measured.append((load, server(load.request_rate)))
    return measured


def sweep(capacity: float, **more: float) -> list[tuple[LoadPoint, Measurement]]:
    rules = LoadSearchRules(1, 256, Sla.from_bounds({"p95": BOUND_MS}), **({"max_loads": 12} | more))  # type: ignore[arg-type]
    return search(lambda rate: measure_queue(rate, capacity), rules)


def best_rate(measured: list[tuple[LoadPoint, Measurement]]) -> float:
    met = [load.request_rate for load, m in measured if m.stable and (m.latency_p95_ms or 99) <= BOUND_MS]
    return max(met, default=0.0)


@given(st.floats(20, 50_000), st.floats(10, 50_000))
def test_it_ends_close_to_the_highest_rate_that_meets_the_bound(capacity: float, start: float) -> None:
    result = best_rate(sweep(capacity, first_load=start, max_loads=60))
    assert (1 - 2 * RATE_RESOLUTION) * highest_rate(capacity) - 1 <= result <= highest_rate(capacity) * (1 + 1e-9)


@pytest.mark.parametrize("start", [50, 700, 5000])
def test_few_loads_suffice(start: int) -> None:
    measured = sweep(1000, first_load=start)
    assert len(measured) <= 10
    assert best_rate(measured) >= 0.9 * highest_rate(1000)


def test_it_measures_no_more_loads_than_allowed() -> None:
    assert len(sweep(1e6, first_load=1, max_loads=4)) == 4


def test_an_overload_shows_the_capacity() -> None:
    first, second, *_ = (load.request_rate for load, _ in sweep(1000, first_load=8000))
    assert (first, second) == (8000, 900)


@pytest.mark.parametrize(
    ("at_low", "at_high", "expected"),
    [
        ((5.0, 100.0), (40.0, 200.0), 159.0),  # proportional to the cube of the rate
        ((19.0, 100.0), (60.0, 200.0), 141.0),  # near the capacity latency grows faster, so not below the middle
        ((5.0, 100.0), (10.0, 200.0), 141.0),  # the higher one was not stable
        ((5.0, 100.0), (4000.0, 150.0), 135.0),  # below the capacity, which the answered requests show
        ((5.0, 140.0), (4000.0, 150.0), 167.0),  # the capacity is hardly above the lower rate
    ],
)
def test_between_two_rates_the_latency_is_interpolated_as_a_power_of_the_rate(
    at_low: tuple[float, float], at_high: tuple[float, float], expected: float
) -> None:
    """The pairs are the p95 in ms and the answered requests per second."""
    low, high = at_low[1], 200.0
    measured = [
        (LoadPoint(1, request_rate=low), Measurement(at_low[1], latency_p95_ms=at_low[0], stable=True)),
        (LoadPoint(1, request_rate=high), Measurement(at_high[1], latency_p95_ms=at_high[0], stable=False)),
    ]
    rules = LoadSearchRules(1, 256, Sla.from_bounds({"p95": BOUND_MS}), max_loads=12)
    assert RateSearch(measured, rules).next_load() == LoadPoint(1, request_rate=expected)


def test_a_deployment_that_cannot_beat_the_best_is_given_up() -> None:
    assert len(sweep(1000, first_load=900, to_beat=900.0)) == 1
    assert len(sweep(1000, first_load=900, to_beat=500.0)) > 1


def test_after_an_overload_the_rate_to_beat_is_next_if_the_capacity_permits_it() -> None:
    """A lower one would be of no use."""
    for capacity, expected in ((1000.0, 950.0), (800.0, 800.0), (1200.0, 1080.0)):
        second = sweep(capacity, first_load=3000, to_beat=950.0)[1:]
        assert second[0][0].request_rate == expected
        assert len(second) == 1 or capacity == 1200, "it misses the bound there, so it cannot beat the best"


def test_a_slow_load_search_ends_at_the_first_rate_within_the_bound() -> None:
    rules = LoadSearchRules(1, 256, Sla.from_bounds({"p95": BOUND_MS}), max_loads=12, max_seconds=30.0)
    slow = [
        (LoadPoint(1, request_rate=rate), replace(measure_queue(rate, 10.0, 0.2), measure_seconds=20.0))
        for rate in (9.9, 5.0)
    ]
    assert RateSearch(slow[:1], rules).next_load() is not None, "no rate within the bound is known"
    assert RateSearch(slow, rules).next_load() is None
    assert RateSearch(slow, replace(rules, max_seconds=50.0)).next_load() is not None


def test_a_slow_load_search_ends_at_an_unstable_rate_within_the_bound() -> None:
    """Few requests rarely agree, and a lower rate would have as few in more time."""
    rules = LoadSearchRules(1, 256, Sla.from_bounds({"p95": BOUND_MS}), max_loads=12, max_seconds=15.0)
    unstable = Measurement(5.0, latency_p95_ms=10.0, stable=False, reason="unstable", measure_seconds=20.0)
    measured = [(LoadPoint(1, request_rate=5.0), unstable)]
    assert RateSearch(measured, rules).next_load() is None
    assert RateSearch(measured, replace(rules, max_seconds=30.0)).next_load() is not None
    missed = [(LoadPoint(1, request_rate=5.0), replace(unstable, latency_p95_ms=30.0))]
    assert RateSearch(missed, rules).next_load() is not None


def test_a_rate_whose_latency_is_close_to_the_bound_ends_the_search() -> None:
    rules = LoadSearchRules(1, 256, Sla.from_bounds({"p95": BOUND_MS}), max_loads=12)
    overload = LoadPoint(1, request_rate=200.0), measure_queue(200.0, 150.0)
    for share, ends in ((0.9, False), (0.98, True)):
        met = LoadPoint(1, request_rate=100.0), Measurement(100.0, latency_p95_ms=share * BOUND_MS, stable=True)
        assert (RateSearch([met, overload], rules).next_load() is None) is ends


def test_another_configuration_begins_where_a_measurement_takes_least_time() -> None:
    """An overload shows its capacity soon."""
    shortest = REQUESTS_PER_WINDOW / (WINDOW_STRETCH * RATE_WINDOW_MS / 1000)
    assert first_rate(200.0) == 200
    assert first_rate(shortest / 2) == pytest.approx(shortest)
    assert first_rate(shortest / 20) == MAX_STEP * shortest / 20
    assert first_rate(0.0) == 0


@pytest.mark.parametrize(("seconds", "first"), [(0.5, FIRST_FACTOR / 0.5), (0.001, FIRST_RATE)])
def test_the_first_rate_of_a_slow_model_follows_from_one_request_at_a_time(seconds: float, first: float) -> None:
    """It would need minutes for the requests of a fixed rate."""
    unknown = LoadSearchRules(4, 256, Sla.from_bounds({"p95": BOUND_MS}), first_load=0, open_loop=True)
    rules = with_first_rate(unknown, Measurement(4 / seconds))
    assert RateSearch((), rules).next_load() == LoadPoint(4, request_rate=first)
    for nothing in (None, Measurement(0.0)):
        assert RateSearch((), with_first_rate(unknown, nothing)).next_load() == LoadPoint(4, request_rate=FIRST_RATE)


def test_the_first_rate_of_several_models_is_that_of_the_slowest_for_its_part() -> None:
    """The second model would get 10 of 30 requests/s, and could answer 2."""
    unknown = LoadSearchRules(
        4, 256, Sla.from_bounds({"p95": BOUND_MS}), first_load=0, open_loop=True, other_shares={"slow": 0.5}
    )
    by_model = model_stats.to_text({"m": Measurement(4 * 1000.0), "slow": Measurement(4 * 2.0)})
    rules = with_first_rate(unknown, Measurement(4 * 1002.0, by_model=by_model))
    assert rules.first_load == pytest.approx(FIRST_FACTOR * 2.0 / (0.5 / 1.5))


FLOOR = LoadSearchRules(4, 64, Sla(), first_load=100, open_loop=True, finds_lowest_load=True, throughput_floor=2000.0)


def test_with_a_latency_objective_a_rate_above_the_throughput_floor_is_measured() -> None:
    load = RateSearch((), FLOOR).next_load()
    assert load == LoadPoint(4, request_rate=RATE_MARGIN_FACTOR * 500.0)
    assert RateSearch(((load, Measurement(2100.0, stable=True)),), FLOOR).next_load() is None
    five_digits = RateSearch((), replace(FLOOR, request_batch_size=1, throughput_floor=12345.0)).next_load()
    assert five_digits == LoadPoint(1, request_rate=13600.0)
    assert RateSearch((), replace(FLOOR, throughput_floor=0.0)).next_load() == LoadPoint(4, request_rate=100.0)


def test_a_higher_rate_follows_if_too_few_requests_arrived_for_the_throughput_floor() -> None:
    load = not_none(RateSearch((), FLOOR).next_load())
    few = (load, Measurement(1600.0, stable=True))
    assert RateSearch([few], FLOOR).next_load() == LoadPoint(4, request_rate=688.0)  # 550 * 2000 / 1600
    overloaded = (load, Measurement(1600.0, stable=False, overloaded=True, reason="overloaded"))
    assert RateSearch([overloaded], FLOOR).next_load() is None
    assert RateSearch([few], replace(FLOOR, max_loads=1)).next_load() is None


@pytest.mark.parametrize(
    "lost",
    [
        Measurement(2100.0, latency_p95_ms=5.0, stable=False, reason="unstable: p95 between 5 and 50 ms"),
        Measurement(reason="the load generator was late"),
    ],
)
def test_an_unstable_measurement_of_the_only_rate_is_repeated(lost: Measurement) -> None:
    load = not_none(RateSearch((), FLOOR).next_load())
    assert RateSearch([(load, lost)], FLOOR).next_load() == load
    assert RateSearch([(load, lost), (load, Measurement(2100.0, stable=True))], FLOOR).next_load() is None
    assert RateSearch([(load, lost)] * (1 + REPEATS), FLOOR).next_load() is None
    disturbed = replace(lost, throughput_infer_per_sec=2100.0, other_cpu_share=0.5)
    assert RateSearch([(load, disturbed)], FLOOR).next_load() is None, "another one would be disturbed too"


@pytest.mark.parametrize(("floor", "servers"), [(12345.0, 4), (50.0, 13)])
def test_the_rate_of_the_throughput_floor_passes_if_all_requests_are_served(floor: float, servers: int) -> None:
    """The windows differ by the number of requests that arrive in them."""
    load = not_none(RateSearch((), replace(FLOOR, request_batch_size=1, throughput_floor=floor)).next_load())
    random, seconds = np.random.default_rng(0), max(0.5, 40 / load.request_rate)
    rates = random.poisson(seconds * load.request_rate, (servers, 8)) / seconds
    windows = [
        [Measurement(float(rate), requests=9, stable=True) for rate in rates_of_server] for rates_of_server in rates
    ]
    sla = Sla.from_bounds({"throughput": floor})
    judged = judge_sla(windows, sla, server_spreads([windows]), SequentialTest(0.005))
    assert judged.verdict is Verdict.PASS, judged.reason


@pytest.mark.parametrize("capacity", [0.3, 0.5, 2.0])
def test_a_model_that_takes_seconds_is_measured_at_low_rates(capacity: float) -> None:
    """A request takes 1 / ``capacity`` seconds; the bound is ten times that."""
    rules = LoadSearchRules(1, 256, Sla.from_bounds({"p95": 1e4 / capacity}), first_load=100, open_loop=True)
    measured = search(lambda rate: measure_queue(rate, capacity, 1e3 / capacity), rules)
    met = [
        load.request_rate for load, measurement in measured if measurement.stable and rules.sla.is_met(measurement)
    ]
    assert 0.5 * capacity < max(met) < capacity


def test_the_lowest_rate_has_requests_in_each_window() -> None:
    assert MIN_RATE * MAX_WINDOW_MS / 1000 == MIN_REQUESTS
    rules = LoadSearchRules(1, 256, Sla.from_bounds({"p95": 20.0}), first_load=1.3 * MIN_RATE, open_loop=True)
    first_load = not_none(RateSearch((), rules).next_load())
    late_measurement = (first_load, Measurement(first_load.request_rate, latency_p95_ms=90.0, stable=True))
    lowest = LoadPoint(1, request_rate=MIN_RATE)
    assert RateSearch([late_measurement], rules).next_load() == lowest
    assert RateSearch([late_measurement, (lowest, late_measurement[1])], rules).next_load() is None


def test_it_ends_if_no_rate_meets_the_bound() -> None:
    slow = LoadSearchRules(1, 256, Sla.from_bounds({"p95": 1.0}), first_load=100, max_loads=50)
    measured = search(lambda rate: measure_queue(rate, 1000), slow)
    assert min(load.request_rate for load, _ in measured) < 2


def test_the_rate_with_the_most_goodput_is_found() -> None:
    """Requests are late with the probability of an M/M/1 queue, and the goodput is highest below the capacity."""
    rules = LoadSearchRules(
        1, 256, Sla.from_bounds({"p50": 50.0}), first_load=100, max_loads=14, goal=METRICS["goodput"], open_loop=True
    )

    def goodput(rate: float) -> float:
        return rate * (1 - math.exp(-0.02 * (1000 - rate))) if rate < 1000 else 0.0

    def measure(rate: float) -> Measurement:
        return replace(measure_queue(rate, 1000), goodput_infer_per_sec=goodput(rate), latency_p50_ms=1.0)

    best_goodput = max(measurement.goodput_infer_per_sec or 0.0 for _, measurement in search(measure, rules))
    assert best_goodput >= 0.95 * max(goodput(rate) for rate in range(1, 1000))
