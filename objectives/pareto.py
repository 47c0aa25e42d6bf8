"""The Pareto front of measured points.

A point is any object with a ``measurement``. Unstable points and unknown values are never on the front.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from objectives.metrics import Measured, Metric, PointT


def pareto_front(points: Iterable[PointT], metrics: Sequence[Metric]) -> list[PointT]:
    """Return the stable points that no other point dominates, ordered from the best by the first metric.

    A point dominates another if it is at least as good in every metric and better in one. Equal points are all kept;
    points with an unknown value are left out.
    """
    known = [(costs, point) for point in points if (costs := _known_costs(point, metrics)) is not None]
    known.sort(key=lambda item: item[0])
    kept: list[tuple[tuple[float, ...], PointT]] = []
    for costs, point in known:
        # sorted by cost: only an earlier point can dominate this one, and then a kept point does
        if not any(other != costs and _no_worse(other, costs) for other, _ in kept):
            kept.append((costs, point))
    return [point for _, point in kept]


def dominates(left: Measured, right: Measured, metrics: Sequence[Metric]) -> bool:
    """Return whether ``left`` is at least as good as ``right`` in every metric and better in one.

    It is False if one of them is unstable or has an unknown value.
    """
    ours, theirs = _known_costs(left, metrics), _known_costs(right, metrics)
    return ours is not None and theirs is not None and ours != theirs and _no_worse(ours, theirs)


def _known_costs(point: Measured, metrics: Sequence[Metric]) -> tuple[float, ...] | None:
    costs = [metric.cost(point.measurement) for metric in metrics]
    known = tuple(cost for cost in costs if cost is not None)
    return known if point.measurement.stable and len(known) == len(costs) else None


def _no_worse(left: tuple[float, ...], right: tuple[float, ...]) -> bool:
    return all(a <= b for a, b in zip(left, right, strict=True))
