"""The geometry of the plot: throughput over p95 latency, every measured point, the front and the bounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optimizer.outcome import FRONT_METRICS
from optimizer.report import words
from optimizer.trial import latest_points

if TYPE_CHECKING:
    from objectives.sla import Constraint
    from optimizer.outcome import Outcome
    from optimizer.trial import Point, Trial

LEFT, RIGHT, TOP, BOTTOM = 76.0, 704.0, 16.0, 356.0  # of the plot, in the units of the SVG
TICKS = 8  # at most, about
LOG_FROM_RATIO = 30.0  # latencies further apart than this are drawn on a logarithmic axis
FAR = 3.0  # a bound this many times beyond every point would only squash them


@dataclass(frozen=True, slots=True)
class _Axis:
    """From values to SVG units: ``low`` is drawn at ``start``, ``high`` at ``end``."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        low, high, v = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return round(self.start + (v - low) / (high - low) * (self.end - self.start), 1)

    def ticks(self) -> list[tuple[float, str]]:
        """(position, label) at 1, 2 and 5 times powers of ten."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            values = [m * 10.0**power for power in powers for m in (1, 2, 5)]
        else:
            step = _nice((self.high - self.low) / TICKS)
            values = [step * i for i in range(TICKS + 2)]
        return [(self.at(v), words.exact(v)) for v in values if self.low <= v <= self.high * (1 + 1e-9)]


def _nice(step: float) -> float:
    """The next larger of 1, 2 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= step * (1 - 1e-9))


def plot(trials: Sequence[Trial], outcome: Outcome, constraints: Iterable[Constraint]) -> dict[str, object] | None:
    """All that the template draws, in SVG units; None where there is no point to draw."""
    throughput, latency = FRONT_METRICS
    placed = [
        (point, left, up)
        for point in latest_points(trials)
        if (left := _drawable(latency.value(point.measurement)))
        and (up := _drawable(throughput.value(point.measurement)))
    ]
    if not placed:
        return None
    bounds = {constraint.metric: constraint for constraint in constraints}
    x = _axis([left for _, left, _ in placed], bounds.get(latency.name), LEFT, RIGHT, may_be_log=True)
    y = _axis([up for _, _, up in placed], bounds.get(throughput.name), BOTTOM, TOP)

    def dot(point: Point, left: float, up: float) -> dict[str, object]:
        kind = "front" if point in outcome.front else "stable" if point.measurement.stable else "unstable"
        label = f"trial {point.trial}: {words.performance(point, latency.name)}"
        label += f" · {words.configuration(point.candidate)}"
        return {"x": x.at(left), "y": y.at(up), "kind": kind, "label": label}

    dots = [dot(*each) for each in placed]
    chosen = [dot for dot, (point, _, _) in zip(dots, placed, strict=True) if point == outcome.recommended]
    return {
        "box": {"left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM},
        "x_ticks": x.ticks(),
        "y_ticks": y.ticks(),
        "dots": dots,
        "chosen": chosen[0] if chosen else None,
        "front": sorted((dot["x"], dot["y"]) for dot in dots if dot["kind"] == "front"),
        "x_bound": _line(x, bounds.get(latency.name)),
        "y_bound": _line(y, bounds.get(throughput.name)),
    }


def _drawable(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) and value > 0 else None


def _axis(
    values: Sequence[float], bound: Constraint | None, start: float, end: float, *, may_be_log: bool = False
) -> _Axis:
    """From 0 to a round number above all values, and above the bound where that is not far off."""
    if bound is not None and bound.bound <= FAR * max(values):
        values = [*values, bound.bound]
    low, high = min(values), max(values)
    if may_be_log and high > LOG_FROM_RATIO * low:
        return _Axis(low / 1.2, high * 1.2, start, end, log=True)
    step = _nice(high / TICKS)
    return _Axis(0.0, step * math.ceil(high / step), start, end)


def _line(axis: _Axis, bound: Constraint | None) -> dict[str, object] | None:
    if bound is None or not axis.low <= bound.bound <= axis.high:
        return None
    return {"at": axis.at(bound.bound), "label": words.bound(bound)}
