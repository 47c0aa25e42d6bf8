"""Test the load search on servers with a known latency curve."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectives.metrics import METRICS, Measurement
from objectives.sla import Sla
from optimizer.core.trial import LoadPoint
from optimizer.measure.load_search import (
    CLOSE_TO_BOUND_SHARE,
    REPEATS,
    ConcurrencySearch,
    LoadSearchRules,
    RateSearch,
    doubling_loads,
    is_hopeless,
)
from optimizer.simulator.speed_correction import SpeedCorrection

P95_20MS = Sla.from_bounds({"p95": 20.0})


def saturating_server(service_ms: float, floor_ms: float = 0.5) -> Callable[[int], Measurement]:
    """Simulate a server that two requests saturate: latency grows in proportion to the load."""

    def measure(concurrency: int) -> Measurement:
        latency = floor_ms + service_ms * concurrency
        return Measurement(1000 * concurrency / latency, latency_p95_ms=latency, stable=True)

    return measure


def sweep(
    server: Callable[[int], Measurement], rules: LoadSearchRules, repeats: int = 0
) -> list[tuple[LoadPoint, Measurement]]:
    """Return the measurements of a search, which are at most ``repeats`` more than the loads that are allowed."""
    measured: list[tuple[LoadPoint, Measurement]] = []
    while (load := ConcurrencySearch(measured, rules).next_load()) is not None:
        measured.append((load, server(load.concurrency)))
        assert len(measured) <= rules.max_loads + repeats
    return measured


def measured_loads(server: Callable[[int], Measurement], rules: LoadSearchRules, repeats: int = 0) -> list[int]:
    """Return the concurrencies that a search measures."""
    return [load.concurrency for load, _ in sweep(server, rules, repeats)]


@pytest.mark.parametrize("start", [1, 4, 30, 200])
@pytest.mark.parametrize("service_ms", [0.15, 0.4, 1.7, 6.0, 19.0])
def test_finds_nearly_the_highest_load_that_meets_the_bound(service_ms: float, start: int) -> None:
    measured = sweep(saturating_server(service_ms), LoadSearchRules(1, 256, P95_20MS, first_load=start))
    best = max((load.concurrency for load, m in measured if (m.latency_p95_ms or 99) <= 20), default=0)
    highest = min(256, math.floor(19.5 / service_ms))
    assert best >= 0.85 * highest - 1


def test_a_hopeless_deployment_is_given_up_after_one_request_at_a_time_is_too_slow() -> None:
    measured = sweep(saturating_server(50.0), LoadSearchRules(1, 256, P95_20MS, first_load=4))
    assert measured[-1][0].concurrency == 1
    assert len(measured) <= 3


def test_a_deployment_that_serves_less_even_at_too_high_a_load_is_given_up() -> None:
    rules = LoadSearchRules(1, 256, P95_20MS, first_load=40, to_beat=3000)
    assert len(sweep(saturating_server(2.0), rules)) == 1
    assert len(sweep(saturating_server(2.0), replace(rules, to_beat=None))) > 1
    assert len(sweep(saturating_server(0.25), rules)) > 1, "this one serves more"


def test_it_stops_when_more_load_adds_no_throughput() -> None:
    def measure_constant_throughput(concurrency: int) -> Measurement:
        return Measurement(500.0, latency_p95_ms=0.01 * concurrency, stable=True)

    assert len(sweep(measure_constant_throughput, LoadSearchRules(1, 256, P95_20MS))) == 2


def test_an_unstable_load_is_repeated_if_no_stable_one_met_the_bound() -> None:
    def measured_concurrencies(first_stable: int) -> list[int]:
        attempts = itertools.count()

        def measure(concurrency: int) -> Measurement:
            return replace(saturating_server(1.9)(concurrency), stable=next(attempts) >= first_stable)

        return measured_loads(measure, LoadSearchRules(1, 256, P95_20MS, first_load=10))

    assert measured_concurrencies(0) == [10]
    assert measured_concurrencies(1) == [10, 10]
    assert measured_concurrencies(9) == [10, 10, 10]


def test_a_lost_measurement_at_the_lowest_load_is_not_repeated() -> None:
    lost = [(LoadPoint(1, 1), Measurement(reason="the load generator timed out"))]
    assert ConcurrencySearch(lost, LoadSearchRules(1, 256, P95_20MS)).next_load() is None


@pytest.mark.parametrize(("high", "following"), [(102, None), (107, None), (108, 104)])
def test_the_search_ends_if_the_loads_around_the_bound_differ_by_less_than_the_resolution(
    high: int, following: int | None
) -> None:
    measured = [
        (LoadPoint(1, load), Measurement(1000.0, latency_p95_ms=p95_ms, stable=True))
        for load, p95_ms in ((100, 10.0), (high, 29.6))
    ]
    load = ConcurrencySearch(measured, LoadSearchRules(1, 256, P95_20MS)).next_load()
    assert load == (None if following is None else LoadPoint(1, following))


def test_without_a_throughput_objective_the_lowest_sufficient_load_is_searched() -> None:
    rules = LoadSearchRules(1, 256, P95_20MS, first_load=40, finds_lowest_load=True)
    assert measured_loads(saturating_server(2.0), rules) == [1]

    def measure_growing_throughput(concurrency: int) -> Measurement:
        return Measurement(100.0 * concurrency, latency_p95_ms=10.0, stable=True)

    assert measured_loads(measure_growing_throughput, replace(rules, throughput_floor=550)) == [1, 6]


def test_without_a_bound_it_climbs_to_saturation() -> None:
    def measure_with_knee(concurrency: int) -> Measurement:
        return Measurement(100.0 * min(concurrency, 20), latency_p95_ms=5.0, stable=True)

    measured = sweep(measure_with_knee, LoadSearchRules(1, 256, Sla()))
    assert max(m.throughput_infer_per_sec or 0 for _, m in measured) == 2000


def test_a_load_is_never_measured_twice_and_stays_in_range() -> None:
    for start in (1, 7, 64, 500):
        measured = sweep(saturating_server(0.31), LoadSearchRules(8, 64, P95_20MS, first_load=start))
        concurrencies = [load.concurrency for load, _ in measured]
        assert len(set(concurrencies)) == len(concurrencies)
        assert all(1 <= c <= 64 for c in concurrencies)
        assert all(load.request_batch_size == 8 for load, _ in measured)


def test_a_load_without_a_latency_counts_as_missed() -> None:
    rules = LoadSearchRules(1, 256, P95_20MS, first_load=16)
    after_failure = ConcurrencySearch([(LoadPoint(1, 16), Measurement())], rules).next_load()
    assert after_failure == LoadPoint(1, 4)


def test_a_search_resumes_from_its_measurements() -> None:
    rules = LoadSearchRules(1, 256, P95_20MS)
    whole = sweep(saturating_server(0.4), rules)
    assert len(whole) > 1
    for length in range(len(whole)):
        assert ConcurrencySearch(whole[:length], rules).next_load() == whole[length][0]


@pytest.mark.parametrize(
    ("served", "p95_ms", "to_beat", "hopeless"),
    [
        (1000, 40.0, 3000, True),
        (1000, 18.0, 3000, False),  # a higher load may serve more
        (1000, 22.0, 3000, False),  # a short window is not exact
        (2500, 40.0, 3000, False),  # a lower load may meet the bound and still serve enough
        (1000, 40.0, None, False),  # without a throughput to beat it is always measured
    ],
)
def test_a_warm_up_rejects_only_hopeless_deployments(
    served: float, p95_ms: float, to_beat: float | None, hopeless: bool
) -> None:
    rules = LoadSearchRules(1, 256, P95_20MS, to_beat=to_beat)
    assert is_hopeless(Measurement(served, latency_p95_ms=p95_ms), rules) is hopeless


def test_a_deployment_that_its_warm_up_rejected_is_not_resumed() -> None:
    rules = LoadSearchRules(1, 256, P95_20MS, to_beat=3000)
    rejected = (LoadPoint(1, 16), Measurement(1000, latency_p95_ms=40.0, reason="given up"))
    assert ConcurrencySearch([rejected], rules).next_load() is None


@pytest.mark.parametrize(
    ("bounds", "hopeless"),
    [
        ({"p99": 20}, True),  # the p99 is no lower than the p95
        ({"p95": 20, "p99": 30}, True),
        ({"p99": 35}, False),  # 40 ms is a miss, but not by enough
        ({"p99": 200}, False),
        ({"avg": 20}, False),
        ({"p50": 20}, False),
        ({"p90": 20}, False),
        ({"p99": 20, "p50": 10}, False),
        ({}, False),
    ],
)
def test_a_warm_up_does_not_reject_by_an_unknown_latency(bounds: dict[str, float], hopeless: bool) -> None:
    """A warm-up has throughput and p95."""
    rules = LoadSearchRules(1, 256, Sla.from_bounds(bounds), to_beat=3000)
    assert is_hopeless(Measurement(1000, latency_p95_ms=40.0), rules) is hopeless
    assert not is_hopeless(Measurement(1000), rules)


def test_a_warm_up_with_a_p99_uses_it() -> None:
    rules = LoadSearchRules(1, 256, Sla.from_bounds({"p99": 20.0}), to_beat=3000)
    assert is_hopeless(Measurement(1000, latency_p95_ms=10.0, latency_p99_ms=40.0), rules)
    assert not is_hopeless(Measurement(1000, latency_p95_ms=40.0, latency_p99_ms=19.0), rules)


# -- exhaustive table --------------------------------------------------------------------------------------------


def test_every_load_is_measured_whatever_the_results() -> None:
    sla, loads = Sla.from_bounds({"p95": 1.0}), doubling_loads(20)
    rules = LoadSearchRules(2, 20, sla, max_loads=3, to_beat=1e9, only_concurrencies=loads)
    measured: tuple[tuple[LoadPoint, Measurement], ...] = ()
    while (load := ConcurrencySearch(measured, rules).next_load()) is not None:
        measured = (*measured, (load, Measurement(10.0, latency_p95_ms=500.0)))
    assert [load.concurrency for load, _ in measured] == [1, 2, 4, 8, 16, 20]
    assert doubling_loads(1) == (1,)
    assert doubling_loads(16) == (1, 2, 4, 8, 16)


def slowed_server(factor: float, server: Callable[[int], Measurement]) -> Callable[[int], Measurement]:
    """Return ``server`` on a machine on which everything takes ``factor`` times as long."""

    def measure(concurrency: int) -> Measurement:
        measurement = server(concurrency)
        throughput, p95_ms = measurement.throughput_infer_per_sec or 0, measurement.latency_p95_ms or 0
        return replace(
            measurement,
            throughput_infer_per_sec=throughput / factor,
            latency_p95_ms=p95_ms * factor,
            speed_probe_ms=80 * factor,
        )

    return measure


def test_a_slow_machine_changes_no_load_if_the_speed_is_known() -> None:
    rules = LoadSearchRules(1, 256, P95_20MS, first_load=8, to_beat=900, speed=SpeedCorrection(80.0, 1.0))
    server, slowed = saturating_server(1.0), slowed_server(1.5, saturating_server(1.0))
    usual = measured_loads(server, rules)
    assert len(usual) > 1
    assert measured_loads(slowed, rules) == usual
    assert measured_loads(slowed, replace(rules, speed=SpeedCorrection())) != usual


def test_a_slow_minute_does_not_make_a_deployment_hopeless() -> None:
    rules = LoadSearchRules(1, 256, P95_20MS, first_load=8, to_beat=1000)
    window = Measurement(560.0, latency_p95_ms=30.0, speed_probe_ms=136.0)
    assert is_hopeless(window, rules)
    assert not is_hopeless(window, replace(rules, speed=SpeedCorrection(80.0, 1.0)))


def test_an_unstable_load_is_not_repeated_on_a_disturbed_machine() -> None:
    def measure_disturbed(concurrency: int) -> Measurement:
        return replace(saturating_server(1.9)(concurrency), stable=False, other_cpu_share=0.46)

    assert measured_loads(measure_disturbed, LoadSearchRules(1, 256, P95_20MS, first_load=10)) == [10]


# -- goals other than the highest load -------------------------------------------------------------------------------


def peaking_server(best: int) -> Callable[[int], Measurement]:
    """Simulate a server whose goodput rises up to ``best`` in flight and falls beyond it, as requests get late."""

    def measure(concurrency: int) -> Measurement:
        goodput = 1000 * min(concurrency / best, (best / concurrency) ** 2)
        return Measurement(
            1000.0 * concurrency, goodput_infer_per_sec=goodput, latency_p50_ms=0.1 * concurrency, stable=True
        )

    return measure


@pytest.mark.parametrize("start", [1, 4, 60])
@pytest.mark.parametrize("best", [3, 11, 40, 150])
def test_the_load_with_the_most_goodput_is_found(best: int, start: int) -> None:
    sla = Sla.from_bounds({"p50": 20.0})
    rules = LoadSearchRules(1, 256, sla, first_load=start, max_loads=14, goal=METRICS["goodput"])
    measured = sweep(peaking_server(best), rules)
    goodputs = [measurement.goodput_infer_per_sec or 0.0 for _, measurement in measured]
    assert max(goodputs) >= 0.85 * 1000


def test_a_load_that_misses_the_bounds_limits_the_search_for_goodput() -> None:
    sla = Sla.from_bounds({"p50": 2.0})  # at most 20 in flight
    rules = LoadSearchRules(1, 256, sla, first_load=64, max_loads=12, goal=METRICS["goodput"])
    measured = sweep(peaking_server(40), rules)
    met = [load.concurrency for load, measurement in measured if sla.is_met(measurement)]
    assert 17 <= max(met) <= 20


def test_too_many_failed_requests_lower_the_load() -> None:
    sla = Sla.from_bounds({"p95": 20.0, "error-rate": 1.0})

    def measure_with_rejections(concurrency: int) -> Measurement:
        rejected = max(0, 10 * (concurrency - 24))
        return Measurement(
            100.0 * concurrency,
            latency_p95_ms=5.0,
            requests=1000,
            rejected_requests=rejected,
            timed_out_requests=0,
            failed_requests=0,
            stable=True,
        )

    measured = sweep(measure_with_rejections, LoadSearchRules(1, 256, sla, first_load=60, max_loads=8))
    met = [load.concurrency for load, measurement in measured if sla.is_met(measurement)]
    assert 20 <= max(met) <= 25


@pytest.mark.parametrize("capacity", [900.0, 4000.0, 17000.0])
@pytest.mark.parametrize("idle_ms", [0.8, 3.0])
def test_a_rate_whose_bursts_exceed_the_capacity_shows_the_way_by_its_latency(
    capacity: float, idle_ms: float
) -> None:
    def measure_bursts(rate: float) -> Measurement:
        """Return a measurement of bursts at three times the mean rate, which is below the capacity."""
        share = min(3 * rate / capacity, 0.95)
        queue_ms = 100 * max(3 * rate / capacity - 1, 0)
        p95_ms = idle_ms * (1 + 0.5 * share / (1 - share)) + queue_ms
        return Measurement(min(rate, capacity), latency_p95_ms=p95_ms, stable=True)

    rules = LoadSearchRules(1, 1, P95_20MS, first_load=capacity / 30, open_loop=True, max_loads=8)
    measured: list[tuple[LoadPoint, Measurement]] = []
    while (load := RateSearch(measured, rules).next_load()) is not None:
        measured.append((load, measure_bursts(load.request_rate or 0.0)))
    best = max(load.request_rate or 0.0 for load, m in measured if P95_20MS.is_met(m))
    assert not P95_20MS.is_met(measure_bursts(1.07 * best))


# -- given loads --------------------------------------------------------------------------------------------------

LOADS = st.sets(st.integers(1, 300), min_size=1, max_size=12).map(lambda loads: tuple(sorted(loads)))


def constant_until_busy(service_ms: float, floor_ms: float) -> Callable[[int], Measurement]:
    """Simulate a server whose latency is constant until it is busy, then proportional to the load."""

    def measure(concurrency: int) -> Measurement:
        latency = max(floor_ms, service_ms * concurrency)
        return Measurement(1000 * concurrency / latency, latency_p95_ms=latency, stable=True)

    return measure


@given(
    loads=LOADS,
    latencies=st.lists(st.one_of(st.none(), st.floats(0.1, 90)), min_size=12, max_size=12),
    start=st.integers(1, 400),
    lowest=st.booleans(),
    stable=st.booleans(),
    to_beat=st.one_of(st.none(), st.floats(1, 1e5)),
)
def test_only_the_given_loads_are_measured(
    loads: tuple[int, ...],
    latencies: list[float | None],
    start: int,
    lowest: bool,
    stable: bool,
    to_beat: float | None,
) -> None:
    def server(concurrency: int) -> Measurement:
        latency = latencies[loads.index(concurrency)]
        if latency is None:
            return Measurement(reason="failed")
        return Measurement(1000 * concurrency / latency, latency_p95_ms=latency, stable=stable)

    rules = LoadSearchRules(
        1,
        256,
        P95_20MS,
        first_load=start,
        finds_lowest_load=lowest,
        to_beat=to_beat,
        throughput_floor=500,
        allowed_concurrencies=loads,
    )
    measured = measured_loads(server, rules, repeats=0 if stable else REPEATS)
    assert set(measured) <= set(loads)
    assert all(concurrency <= 256 for concurrency in measured)
    assert bool(measured) == (loads[0] <= 256)
    if stable:
        assert len(set(measured)) == len(measured)


# a latency that close to the bound ends the search, although that of an idle server would stay the same at more load
IDLE_MS = st.floats(0.1, CLOSE_TO_BOUND_SHARE * 20) | st.floats(20, 25, exclude_min=True)


@given(loads=LOADS, service_ms=st.floats(0.05, 30), floor_ms=IDLE_MS, start=st.integers(1, 256))
def test_finds_nearly_the_best_of_the_given_loads(
    loads: tuple[int, ...], service_ms: float, floor_ms: float, start: int
) -> None:
    server = constant_until_busy(service_ms, floor_ms)
    measured = measured_loads(
        server, LoadSearchRules(1, 300, P95_20MS, first_load=start, max_loads=12, allowed_concurrencies=loads)
    )

    def best(concurrencies: object) -> float:
        result = [server(c) for c in concurrencies]  # type: ignore[attr-defined]
        return max((m.throughput_infer_per_sec or 0 for m in result if (m.latency_p95_ms or 99) <= 20), default=0)

    assert best(measured) >= 0.9 * best(loads)


@pytest.mark.parametrize(
    ("start", "loads", "measured"),
    [
        (3, (1, 4, 18, 64), [4, 18]),  # then it is saturated
        (3, (1, 4, 50, 64), [4, 50]),  # 32 would be next: the load above it may be nearer
        (40, (1, 4, 16, 64), [64, 16]),
        (5, (8, 16, 32, 64), [8, 32]),
        (40, (100, 200), [100]),  # the lowest is too much
        (40, (), []),
    ],
)
def test_the_nearest_load_on_the_wanted_side_is_taken(
    start: int, loads: tuple[int, ...], measured: list[int]
) -> None:
    assert (
        measured_loads(
            constant_until_busy(0.5, 1.0),
            LoadSearchRules(1, 256, P95_20MS, first_load=start, allowed_concurrencies=loads),
        )
        == measured
    )
