"""Fronts and recommendations over measured points."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from objectives.metrics import METRICS, Measurement
from objectives.pareto import best, closest, front
from objectives.sla import Constraint

THROUGHPUT, P95, MEMORY = METRICS["throughput"], METRICS["latency-p95"], METRICS["memory"]
BOTH = (THROUGHPUT, P95)
SLA = (Constraint("latency-p95", 20.0),)


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


def test_the_front_is_what_no_other_point_beats() -> None:
    fast, quick, between, beaten = spot(100, 30), spot(50, 5), spot(80, 10), spot(80, 12)
    assert front([beaten, quick, fast, between], BOTH) == [fast, between, quick]


def test_equal_points_are_all_kept() -> None:
    one, two = spot(100, 10, name="one"), spot(100, 10, name="two")
    assert front([one, two], BOTH) == [one, two]


def test_unstable_and_unknown_points_are_not_on_the_front() -> None:
    unknown = [spot(None, 1), spot(900, None), spot(math.nan, 1), spot(900, math.nan), spot(900, 1, stable=False)]
    assert front([*unknown, spot(1, 100)], BOTH) == [spot(1, 100)]
    assert front([], BOTH) == []


def test_the_best_is_the_fastest_that_meets_the_constraints() -> None:
    points = [spot(100, 21), spot(90, 20), spot(80, 5)]
    assert best(points, (THROUGHPUT,), SLA) == points[1]
    assert best(points, (THROUGHPUT,), ()) == points[0]
    assert best(points, (P95,), SLA) == points[2]


def test_absence_is_never_success() -> None:
    points = [spot(100, None), spot(90, 10, stable=False), spot(None, 10), spot(math.nan, 10)]
    assert best(points, (THROUGHPUT,), SLA) is None
    assert best([], (THROUGHPUT,), SLA) is None


def test_ties_go_to_the_next_objective_then_to_the_lower_latency() -> None:
    slow, light, unknown = spot(90, 9, memory=7), spot(90, 10, memory=5), spot(90, 1)
    assert best([slow, light, unknown], (THROUGHPUT, MEMORY), SLA) == light
    assert best([slow, light, unknown], (THROUGHPUT,), SLA) == unknown


def test_the_closest_violates_least() -> None:
    points = [spot(100, 40), spot(50, 25), spot(60, 25), spot(None, None), spot(1, 21, stable=False)]
    assert closest(points, SLA) == points[1]
    assert closest(points, SLA, (THROUGHPUT,)) == points[2]
    assert closest(points[4:], SLA) == points[4]
    assert closest([], SLA) is None
    assert closest(points[3:4], SLA) == points[3]


figures = st.one_of(st.none(), st.integers(0, 6).map(float))
spots = st.lists(st.builds(lambda t, p, s: spot(t, p, stable=s), figures, figures, st.booleans()), max_size=12)


def costs(point: Spot) -> tuple[float, float]:
    measurement = point.measurement
    assert measurement.throughput_infer_per_sec is not None
    assert measurement.latency_p95_ms is not None
    return -measurement.throughput_infer_per_sec, measurement.latency_p95_ms


@given(spots)
def test_the_front_is_the_definition_of_it(points: list[Spot]) -> None:
    known = [
        p
        for p in points
        if p.measurement.stable
        and p.measurement.throughput_infer_per_sec is not None
        and p.measurement.latency_p95_ms is not None
    ]

    def beaten(point: Spot) -> bool:
        ours = costs(point)
        return any(theirs != ours and theirs[0] <= ours[0] and theirs[1] <= ours[1] for theirs in map(costs, known))

    expected = [point for point in known if not beaten(point)]
    assert sorted(map(costs, front(points, BOTH))) == sorted(map(costs, expected))


@given(spots)
def test_the_best_is_on_the_front_of_its_metrics(points: list[Spot]) -> None:
    found = best(points, BOTH, SLA)
    if found is not None and found.measurement.latency_p95_ms is not None:
        assert costs(found) in map(costs, front(points, BOTH))
