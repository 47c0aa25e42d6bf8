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
    candidates = [(costs, point) for point in points if (costs := _known_costs(point, metrics)) is not None]
    candidates.sort(key=lambda item: item[0])
    front: list[tuple[tuple[float, ...], PointT]] = []
    for costs, point in candidates:
        # sorted by cost: only an earlier point can dominate this one, and then a point of the front does
        if not any(front_costs != costs and _is_no_worse(front_costs, costs) for front_costs, _ in front):
            front.append((costs, point))
    return [point for _, point in front]


def dominates(left: Measured, right: Measured, metrics: Sequence[Metric]) -> bool:
    """Return whether ``left`` is at least as good as ``right`` in every metric and better in one.

    It is False if one of them is unstable or has an unknown value.
    """
    ours, theirs = _known_costs(left, metrics), _known_costs(right, metrics)
    return ours is not None and theirs is not None and ours != theirs and _is_no_worse(ours, theirs)


def _known_costs(point: Measured, metrics: Sequence[Metric]) -> tuple[float, ...] | None:
    """Return the cost of each metric; None if the point is unstable or a value is unknown."""
    costs = [metric.cost(point.measurement) for metric in metrics]
    known = tuple(cost for cost in costs if cost is not None)
    return known if point.measurement.stable and len(known) == len(costs) else None


def _is_no_worse(left: tuple[float, ...], right: tuple[float, ...]) -> bool:
    return all(a <= b for a, b in zip(left, right, strict=True))
