"""The load search, against servers whose latency curve is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from objectives.metrics import Measurement
from objectives.sla import Constraint
from optimizer.load.sweep import SweepRules, doubled, is_hopeless, next_load
from optimizer.trial import LoadPoint

P95_20MS = (Constraint("latency-p95", 20.0),)


def saturating(service_ms: float, floor_ms: float = 0.5) -> Callable[[int], Measurement]:
    """A server that is saturated from two requests on: latency grows in proportion to the load."""

    def at(concurrency: int) -> Measurement:
        latency = floor_ms + service_ms * concurrency
        return Measurement(1000 * concurrency / latency, latency_p95_ms=latency, stable=True)

    return at


def sweep(server: Callable[[int], Measurement], rules: SweepRules) -> list[tuple[LoadPoint, Measurement]]:
    measured: list[tuple[LoadPoint, Measurement]] = []
    while (load := next_load(measured, rules)) is not None:
        measured.append((load, server(load.concurrency)))
        assert len(measured) <= rules.max_loads
    return measured


@pytest.mark.parametrize("start", [1, 4, 30, 200])
@pytest.mark.parametrize("service_ms", [0.15, 0.4, 1.7, 6.0, 19.0])
def test_finds_nearly_the_highest_load_that_meets_the_bound(service_ms: float, start: int) -> None:
    measured = sweep(saturating(service_ms), SweepRules(1, 256, P95_20MS, start=start))
    best = max((load.concurrency for load, m in measured if (m.latency_p95_ms or 99) <= 20), default=0)
    highest = min(256, math.floor(19.5 / service_ms))
    assert best >= 0.85 * highest - 1


def test_a_hopeless_deployment_is_given_up_after_one_request_at_a_time_is_too_slow() -> None:
    measured = sweep(saturating(50.0), SweepRules(1, 256, P95_20MS, start=4))
    assert measured[-1][0].concurrency == 1
    assert len(measured) <= 3


def test_what_serves_less_even_at_too_high_a_load_is_given_up_at_once() -> None:
    rules = SweepRules(1, 256, P95_20MS, start=40, to_beat=3000)
    assert len(sweep(saturating(2.0), rules)) == 1
    assert len(sweep(saturating(2.0), replace(rules, to_beat=None))) > 1
    assert len(sweep(saturating(0.25), rules)) > 1, "this one serves more"


def test_stops_where_more_load_brings_no_throughput() -> None:
    def flat(concurrency: int) -> Measurement:
        return Measurement(500.0, latency_p95_ms=0.01 * concurrency, stable=True)

    assert len(sweep(flat, SweepRules(1, 256, P95_20MS))) == 2


def test_an_unstable_load_is_repeated_where_no_stable_one_met_the_bound() -> None:
    def unstable_once(stable_from: int) -> list[int]:
        measured: list[tuple[LoadPoint, Measurement]] = []
        rules = SweepRules(1, 256, P95_20MS, start=10)
        while (load := next_load(measured, rules)) is not None:
            stable = len(measured) >= stable_from
            measured.append((load, replace(saturating(1.9)(load.concurrency), stable=stable)))
        return [load.concurrency for load, _ in measured]

    assert unstable_once(0) == [10]
    assert unstable_once(1) == [10, 10]
    assert unstable_once(9) == [10, 10, 10]


def test_where_throughput_is_no_objective_the_lowest_load_that_serves_enough_is_sought() -> None:
    rules = SweepRules(1, 256, P95_20MS, start=40, lowest=True)
    assert [load.concurrency for load, _ in sweep(saturating(2.0), rules)] == [1]

    def growing(concurrency: int) -> Measurement:
        return Measurement(100.0 * concurrency, latency_p95_ms=10.0, stable=True)

    measured = sweep(growing, replace(rules, throughput_floor=550))
    assert [load.concurrency for load, _ in measured] == [1, 6]


def test_without_a_bound_it_climbs_to_saturation() -> None:
    def knee(concurrency: int) -> Measurement:
        return Measurement(100.0 * min(concurrency, 20), latency_p95_ms=5.0, stable=True)

    measured = sweep(knee, SweepRules(1, 256, ()))
    assert max(m.throughput_infer_per_sec or 0 for _, m in measured) == 2000


def test_a_load_is_never_measured_twice_and_stays_in_range() -> None:
    for start in (1, 7, 64, 500):
        measured = sweep(saturating(0.31), SweepRules(8, 64, P95_20MS, start=start))
        concurrencies = [load.concurrency for load, _ in measured]
        assert len(set(concurrencies)) == len(concurrencies)
        assert all(1 <= c <= 64 for c in concurrencies)
        assert all(load.request_batch_size == 8 for load, _ in measured)


def test_a_load_without_a_latency_counts_as_missed() -> None:
    rules = SweepRules(1, 256, P95_20MS, start=16)
    after_failure = next_load([(LoadPoint(1, 16), Measurement())], rules)
    assert after_failure == LoadPoint(1, 4)


def test_replaying_what_was_measured_continues_where_it_stood() -> None:
    rules = SweepRules(1, 256, P95_20MS)
    whole = sweep(saturating(0.4), rules)
    for length in range(len(whole)):
        assert next_load(whole[:length], rules) == whole[length][0]


@pytest.mark.parametrize(
    ("served", "p95_ms", "to_beat", "hopeless"),
    [
        (1000, 40.0, 3000, True),
        (1000, 18.0, 3000, False),  # a higher load may serve more
        (1000, 22.0, 3000, False),  # a short window is not exact
        (2500, 40.0, 3000, False),  # a lower load may meet the bound and still serve enough
        (1000, 40.0, None, False),  # what is compared with is measured in any case
    ],
)
def test_a_glance_condemns_only_what_it_is_sure_of(
    served: float, p95_ms: float, to_beat: float | None, hopeless: bool
) -> None:
    rules = SweepRules(1, 256, P95_20MS, to_beat=to_beat)
    assert is_hopeless(Measurement(served, latency_p95_ms=p95_ms), rules) is hopeless


def test_after_a_glance_that_condemned_it_a_deployment_is_not_resumed() -> None:
    rules = SweepRules(1, 256, P95_20MS, to_beat=3000)
    assert next_load([(LoadPoint(1, 16), Measurement(1000, latency_p95_ms=40.0, reason="given up"))], rules) is None


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
def test_a_glance_does_not_condemn_by_a_latency_that_it_does_not_know(
    bounds: dict[str, float], hopeless: bool
) -> None:
    """A glance tells throughput and p95."""
    constraints = tuple(Constraint(f"latency-{name}", bound) for name, bound in bounds.items())
    rules = SweepRules(1, 256, constraints, to_beat=3000)
    assert is_hopeless(Measurement(1000, latency_p95_ms=40.0), rules) is hopeless
    assert not is_hopeless(Measurement(1000), rules)


def test_a_glance_that_knows_the_p99_goes_by_it() -> None:
    rules = SweepRules(1, 256, (Constraint("latency-p99", 20.0),), to_beat=3000)
    assert is_hopeless(Measurement(1000, latency_p95_ms=10.0, latency_p99_ms=40.0), rules)
    assert not is_hopeless(Measurement(1000, latency_p95_ms=40.0, latency_p99_ms=19.0), rules)


# -- a table of all -----------------------------------------------------------------------------------------------


def test_every_load_is_measured_whatever_is_seen() -> None:
    rules = SweepRules(2, 20, (Constraint("latency-p95", 1.0),), max_loads=3, to_beat=1e9, every=doubled(20))
    measured: tuple[tuple[LoadPoint, Measurement], ...] = ()
    while (load := next_load(measured, rules)) is not None:
        measured = (*measured, (load, Measurement(10.0, latency_p95_ms=500.0)))
    assert [load.concurrency for load, _ in measured] == [1, 2, 4, 8, 16, 20]
    assert doubled(1) == (1,)
    assert doubled(16) == (1, 2, 4, 8, 16)
