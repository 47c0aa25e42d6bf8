"""Ranking of measured points: constraints first, then objectives; the front of what trades off.

A point is anything with a ``measurement``. Unstable points and unknown values never win. Where a load was
measured more than once, the caller passes the one measurement that counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from objectives.metrics import METRICS, Measurement, Metric
from objectives.sla import Constraint, worst_violation


class Measured(Protocol):
    """What has been measured."""

    @property
    def measurement(self) -> Measurement: ...


PointT = TypeVar("PointT", bound=Measured)


def front(points: Iterable[PointT], metrics: Sequence[Metric]) -> list[PointT]:
    """The stable points that no other one beats: none is as good in every metric and better in one.

    Ordered from the best by the first metric. Equal points are all kept, those with an unknown value are not.
    """
    known = [(costs, point) for point in points if (costs := _known_costs(point, metrics)) is not None]
    known.sort(key=lambda item: item[0])
    kept: list[tuple[tuple[float, ...], PointT]] = []
    for costs, point in known:
        # in this order only an earlier point can beat it, and if any does, one that is kept does
        if not any(other != costs and _no_worse(other, costs) for other, _ in kept):
            kept.append((costs, point))
    return [point for _, point in kept]


def best(
    points: Iterable[PointT],
    objectives: Sequence[Metric],
    constraints: Sequence[Constraint],
    *,
    unstable: bool = False,
) -> PointT | None:
    """The stable point that meets every constraint and is best by the first objective; None without one.

    Ties are broken by the next objectives, then by the lower p95 latency. A point whose first objective is
    unknown does not count, one that is not stable does where ``unstable`` is true.
    """
    rules = tuple(constraints)
    usable = [p for p in points if p.measurement.stable or unstable]
    return _least([p for p in usable if worst_violation(rules, p.measurement) <= 0], objectives)


def closest(
    points: Iterable[PointT], constraints: Sequence[Constraint], objectives: Sequence[Metric] = ()
) -> PointT | None:
    """The stable point with the smallest violation, where none is stable an unstable one; None without points.

    Ties are broken by the objectives, then by the lower p95 latency.
    """
    rules = tuple(constraints)
    measured = [p for p in points if p.measurement.throughput_infer_per_sec is not None or p.measurement.stable]
    usable = [p for p in measured if p.measurement.stable] or measured
    least = min((worst_violation(rules, p.measurement) for p in usable), default=0.0)
    return _least([p for p in usable if worst_violation(rules, p.measurement) == least], objectives, any_value=True)


def _least(points: Sequence[PointT], objectives: Sequence[Metric], *, any_value: bool = False) -> PointT | None:
    order = (*objectives, METRICS["latency-p95"])

    def costs(point: PointT) -> tuple[float, ...]:
        values = (metric.cost(point.measurement) for metric in order)
        return tuple(math.inf if value is None else value for value in values)

    ranked = [p for p in points if any_value or not objectives or costs(p)[0] < math.inf]
    return min(ranked, key=costs, default=None)


def _known_costs(point: Measured, metrics: Sequence[Metric]) -> tuple[float, ...] | None:
    costs = [metric.cost(point.measurement) for metric in metrics]
    if not point.measurement.stable or any(cost is None or math.isnan(cost) for cost in costs):
        return None
    return tuple(cost for cost in costs if cost is not None)


def _no_worse(left: tuple[float, ...], right: tuple[float, ...]) -> bool:
    return all(a <= b for a, b in zip(left, right, strict=True))
