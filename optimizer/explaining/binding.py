"""Which bound keeps a run from more throughput, by what was measured beyond it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from objectives.metrics import METRICS
from objectives.sla import Constraint
from optimizer.trial import Point


@dataclass(frozen=True, slots=True)
class Binding:
    """``constraint`` is what binds, None where nothing measured served more beyond a bound; ``used`` is how much of
    each bound the subject takes, by its text (1 is all of it; of a lower bound, how near it is).

    ``beyond``: the point that served the most and misses this constraint alone; ``gain``: by how much, relative.
    """

    constraint: Constraint | None
    beyond: Point | None
    gain: float | None
    used: dict[str, float]


def binding(subject: Point, measured: Sequence[Point], constraints: Sequence[Constraint], *, met: bool) -> Binding:
    """``measured``: all points, ``subject``'s candidate among them. Where the bounds are not ``met``, the one that
    is missed by most binds."""
    used = {str(one): _used(one, subject) for one in constraints}
    known = {text: share for text, share in used.items() if share is not None}
    if not met:
        missed = max(constraints, key=lambda one: one.violation(subject.measurement), default=None)
        return Binding(missed, None, None, known)
    best: tuple[float, Constraint, Point] | None = None
    for point in measured:
        missing = [one for one in constraints if one.violation(point.measurement) > 0]
        more = point.throughput_infer_per_sec / subject.throughput_infer_per_sec - 1
        if len(missing) == 1 and point.measurement.stable and more > (best[0] if best else 0.0):
            best = (more, missing[0], point)
    if best is None:
        return Binding(None, None, None, known)
    return Binding(best[1], best[2], best[0], known)


def _used(one: Constraint, subject: Point) -> float | None:
    metric = METRICS[one.metric]
    value = metric.value(subject.measurement)
    if not value or not one.bound:
        return None
    return one.bound / value if metric.better == "higher" else value / one.bound
