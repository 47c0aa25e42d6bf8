"""Tests of the Pareto front and of the best and the closest point."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from objectives.metrics import METRICS, Measurement
from objectives.pareto import dominates, pareto_front
from objectives.sla import Sla

THROUGHPUT, P95, MEMORY = METRICS["throughput"], METRICS["latency-p95"], METRICS["memory"]
BOTH = (THROUGHPUT, P95)
SLA = Sla.from_bounds({"p95": 20.0})


@dataclass(frozen=True)
class Spot:
    measurement: Measurement
    name: str = ""


def spot(
    throughput: float | None, p95: float | None, *, stable: bool = True, memory: float | None = None, name: str = ""
) -> Spot:
    measurement = Measurement(
        throughput_infer_per_sec=throughput, latency_p95_ms=p95, stable=stable, gpu_memory_bytes=memory
    )
    return Spot(measurement, name)


def test_the_front_has_the_points_that_no_other_point_dominates() -> None:
    fast, quick, between, beaten = spot(100, 30), spot(50, 5), spot(80, 10), spot(80, 12)
    assert pareto_front([beaten, quick, fast, between], BOTH) == [fast, between, quick]


def test_a_point_dominates_if_it_is_better_in_one_metric_and_worse_in_none() -> None:
    assert dominates(spot(80, 10), spot(80, 12), BOTH)
    assert not dominates(spot(80, 10), spot(80, 10), BOTH)
    assert not dominates(spot(80, 10), spot(50, 5), BOTH)
    assert not dominates(spot(80, 10), spot(10, None), BOTH)
    assert not dominates(spot(80, 10, stable=False), spot(10, 20), BOTH)


def test_equal_points_are_all_kept() -> None:
    first, second = spot(100, 10, name="one"), spot(100, 10, name="two")
    assert pareto_front([first, second], BOTH) == [first, second]


def test_unstable_and_unknown_points_are_not_on_the_front() -> None:
    unknown = [spot(None, 1), spot(900, None), spot(math.nan, 1), spot(900, math.nan), spot(900, 1, stable=False)]
    assert pareto_front([*unknown, spot(1, 100)], BOTH) == [spot(1, 100)]
    assert pareto_front([], BOTH) == []


def test_the_best_is_the_fastest_that_meets_the_constraints() -> None:
    points = [spot(100, 21), spot(90, 20), spot(80, 5)]
    assert SLA.best_point(points, (THROUGHPUT,)) == points[1]
    assert Sla().best_point(points, (THROUGHPUT,)) == points[0]
    assert SLA.best_point(points, (P95,)) == points[2]


def test_a_point_with_an_unknown_value_is_never_the_best() -> None:
    points = [spot(100, None), spot(90, 10, stable=False), spot(None, 10), spot(math.nan, 10)]
    assert SLA.best_point(points, (THROUGHPUT,)) is None
    assert SLA.best_point([], (THROUGHPUT,)) is None
    assert SLA.best_point(points, (THROUGHPUT,), unstable=True) == points[1]


def test_ties_go_to_the_next_objective_then_to_the_lower_latency() -> None:
    slow, light, unknown = spot(90, 9, memory=7), spot(90, 10, memory=5), spot(90, 1)
    assert SLA.best_point([slow, light, unknown], (THROUGHPUT, MEMORY)) == light
    assert SLA.best_point([slow, light, unknown], (THROUGHPUT,)) == unknown


def test_the_closest_violates_least() -> None:
    points = [spot(100, 40), spot(50, 25), spot(60, 25), spot(None, None), spot(1, 21, stable=False)]
    assert SLA.closest_point(points) == points[1]
    assert SLA.closest_point(points, (THROUGHPUT,)) == points[2]
    assert SLA.closest_point(points[4:]) == points[4]
    assert SLA.closest_point([]) is None
    assert SLA.closest_point(points[3:4]) == points[3]


values = st.one_of(st.none(), st.integers(0, 6).map(float))
spots = st.lists(st.builds(lambda t, p, s: spot(t, p, stable=s), values, values, st.booleans()), max_size=12)


def costs(point: Spot) -> tuple[float, float]:
    measurement = point.measurement
    assert measurement.throughput_infer_per_sec is not None
    assert measurement.latency_p95_ms is not None
    return -measurement.throughput_infer_per_sec, measurement.latency_p95_ms


@given(spots)
def test_the_front_agrees_with_its_definition(points: list[Spot]) -> None:
    complete_points = [
        p
        for p in points
        if p.measurement.stable
        and p.measurement.throughput_infer_per_sec is not None
        and p.measurement.latency_p95_ms is not None
    ]

    def beaten(point: Spot) -> bool:
        cost = costs(point)
        return any(
            other_cost != cost and other_cost[0] <= cost[0] and other_cost[1] <= cost[1]
            for other_cost in map(costs, complete_points)
        )

    expected = [point for point in complete_points if not beaten(point)]
    assert sorted(map(costs, pareto_front(points, BOTH))) == sorted(map(costs, expected))


@given(spots)
def test_the_best_is_on_the_front_of_its_metrics(points: list[Spot]) -> None:
    best = SLA.best_point(points, BOTH)
    if best is not None and best.measurement.latency_p95_ms is not None:
        assert costs(best) in map(costs, pareto_front(points, BOTH))
