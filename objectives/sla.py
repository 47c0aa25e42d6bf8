"""The SLA: its constraints, the verdicts on it, and which measured points meet it best.

A point is any object with a ``measurement``. Unstable points and unknown values never win. If a load was measured
more than once, the caller passes the measurement that counts.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from objectives.metrics import LATENCY, METRICS, Measured, Measurement, Metric, PointT, Timing

DEFAULT_CONFIDENCE = 0.99  # default of --confidence


class Verdict(Enum):
    """PASS: the bound is met at the confidence. FAIL: it is missed at the confidence. UNDECIDED: neither holds."""

    PASS = "PASS"
    FAIL = "FAIL"
    UNDECIDED = "UNDECIDED"


@dataclass(frozen=True, slots=True)
class Constraint:
    """A bound on one metric: an upper bound if lower values are better, otherwise a lower bound.

    ``metric`` is a key of ``METRICS``; ``bound`` is in the metric's unit.
    """

    metric: str
    bound: float

    def violation(self, measurement: Measurement) -> float:
        """Return the distance to the bound, relative to it: 0 or less if it is met, inf if the metric is unknown."""
        metric = METRICS[self.metric]
        value = metric.bounded_value(measurement)
        if value is None or math.isnan(value):
            return math.inf
        scale = abs(self.bound) or 1.0
        return (self.bound - value) / scale if metric.better == "higher" else (value - self.bound) / scale

    def with_lower_latency(self, log_fall: float) -> Constraint:
        """Return a bound on a latency whose log is lower by ``log_fall``, rounded to four digits; others unchanged.

        The bound is not higher than before, and not 0, which has no log.
        """
        if log_fall == 0.0 or METRICS[self.metric].timing is None:
            return self
        rounded = float(f"{math.exp(-log_fall) * self.bound:.4g}")
        return replace(self, bound=min(self.bound, max(rounded, sys.float_info.min)))

    def __str__(self) -> str:
        metric = METRICS[self.metric]
        relation = ">=" if metric.better == "higher" else "<="
        return f"{metric.short_name} {relation} {self.bound:.12g} {metric.unit}".rstrip()


@dataclass(frozen=True, slots=True)
class Sla:
    """The service level agreement: constraints that a measurement has to meet together.

    Every measurement meets an empty SLA.
    """

    constraints: tuple[Constraint, ...] = ()

    @classmethod
    def from_bounds(cls, bounds: Mapping[str, float]) -> Sla:
        """Return the SLA with bounds by metric, in the metric's unit: ``{"p95": 20.0, "throughput": 4000.0}``.

        ``p95`` is short for ``latency-p95``. Raises ValueError if a metric is unknown.
        """
        return cls(tuple(Constraint(metric_name(name), bound) for name, bound in bounds.items()))

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Sla:
        """Return the SLA whose constraints were written with ``str``, such as ``p95 <= 20 ms``.

        Raises ValueError if a text has no known metric or no number.
        """
        return cls(tuple(map(_parse_constraint, texts)))

    def __iter__(self) -> Iterator[Constraint]:
        return iter(self.constraints)

    def __len__(self) -> int:
        return len(self.constraints)

    def __str__(self) -> str:
        return " and ".join(map(str, self))

    def violation(self, measurement: Measurement) -> float:
        """Return the largest violation of the constraints; -inf if there are none."""
        return max((constraint.violation(measurement) for constraint in self), default=-math.inf)

    def is_met(self, measurement: Measurement) -> bool:
        """Return whether the measurement meets every constraint. Its stability is not considered."""
        return self.violation(measurement) <= 0

    def missed(self, measurement: Measurement) -> Sla:
        """Return the constraints that the measurement does not meet."""
        return Sla(tuple(constraint for constraint in self if constraint.violation(measurement) > 0))

    def with_lower_latencies(self, log_fall: float) -> Sla:
        """Return the SLA with each bound as ``Constraint.with_lower_latency`` returns it."""
        return Sla(tuple(constraint.with_lower_latency(log_fall) for constraint in self))

    def without(self, *metrics: str) -> Sla:
        """Return the constraints on all other metrics."""
        return Sla(tuple(constraint for constraint in self if constraint.metric not in metrics))

    @property
    def latencies(self) -> Sla:
        """The upper bounds on times of a request (see ``metrics.TIMINGS``), which a lower load can meet."""
        return Sla(tuple(constraint for constraint in self if METRICS[constraint.metric].timing))

    @property
    def latency_levels(self) -> tuple[float, ...]:
        """The levels of the bounds on quantiles of the latency, each once."""
        metrics = (METRICS[constraint.metric] for constraint in self)
        levels = (metric.quantile for metric in metrics if metric.timing is LATENCY and metric.quantile)
        return tuple(dict.fromkeys(levels))

    @property
    def of_requests(self) -> Sla:
        """The bounds on times of a request and on the share of failed requests, which a lower load can meet."""
        return Sla(tuple(constraint for constraint in self if METRICS[constraint.metric].is_of_requests))

    @property
    def permitted_failures(self) -> tuple[float, ...]:
        """The shares of the requests, 0 to 1, that may fail by each bound on the error rate; empty without one."""
        return tuple(constraint.bound / 100 for constraint in self if METRICS[constraint.metric].counted_requests)

    @property
    def judged_latency(self) -> str:
        """The metric of the first latency bound; ``latency-p95`` if there is none."""
        return next((constraint.metric for constraint in self.latencies), "latency-p95")

    @property
    def bounded_latencies(self) -> tuple[str, ...]:
        """The metrics of all latency bounds, each once; ``latency-p95`` if there is none."""
        return tuple(dict.fromkeys(constraint.metric for constraint in self.latencies)) or (self.judged_latency,)

    @property
    def throughput_floor(self) -> float:
        """The lowest permitted throughput in infer/s; 0 without such a constraint."""
        return max(self.bounds_on("throughput"), default=0.0)

    def bounds_on(self, metric: str) -> tuple[float, ...]:
        """Return all bounds on ``metric``, in its unit."""
        return tuple(constraint.bound for constraint in self if constraint.metric == metric)

    def latency_bound_ms(self, metric: str) -> float:
        """Return the tightest bound on the latency ``metric``; inf if there is none."""
        return min(self.bounds_on(metric), default=math.inf)

    def bounds_ms(self, timing: Timing) -> tuple[float, ...]:
        """Return all bounds on ``timing``, in any of its statistics."""
        return tuple(constraint.bound for constraint in self if METRICS[constraint.metric].timing is timing)

    def share_of_bound(self, measurement: Measurement) -> float:
        """Return the largest ratio of a latency to its bound, at least 0.01; inf if a bounded latency is unknown."""
        shares = [0.01]
        for constraint in self.latencies:
            value = METRICS[constraint.metric].bounded_value(measurement)
            shares.append(math.inf if value is None else value / constraint.bound)
        return max(shares)

    def best_point(
        self, points: Iterable[PointT], objectives: Sequence[Metric], *, unstable: bool = False
    ) -> PointT | None:
        """Return the best stable point by the first objective that meets every constraint; None if there is none.

        Ties are broken by the next objectives, then by the lower p95 latency. Points whose first objective is unknown
        are left out. With ``unstable``, unstable points count too.
        """
        usable = [point for point in points if point.measurement.stable or unstable]
        usable = [point for point in usable if self.is_met(point.measurement)]
        if objectives:
            usable = [point for point in usable if costs(point, objectives)[0] < math.inf]
        return min(usable, key=lambda point: costs(point, objectives), default=None)

    def closest_point(self, points: Iterable[PointT], objectives: Sequence[Metric] = ()) -> PointT | None:
        """Return the point with the smallest violation; None if nothing was measured.

        Unstable points count only if no point is stable. Ties are broken by the objectives, then by the lower p95
        latency.
        """
        measured = [p for p in points if p.measurement.has_values or p.measurement.stable]
        usable = [point for point in measured if point.measurement.stable] or measured
        least = min((self.violation(point.measurement) for point in usable), default=0.0)
        nearest = [point for point in usable if self.violation(point.measurement) == least]
        return min(nearest, key=lambda point: costs(point, objectives), default=None)


def metric_name(name: str) -> str:
    """Return the name in METRICS of a metric or its short name: ``latency-p95`` for ``p95``.

    Raises ValueError if a metric is unknown.
    """
    for metric in (name.strip(), f"latency-{name.strip()}"):
        with contextlib.suppress(KeyError):
            return METRICS[metric].name
    raise ValueError(f"{name!r} is not a metric")


def _parse_constraint(text: str) -> Constraint:
    name, _, bound = text.replace(">=", "<=").partition("<=")
    if not bound.split():
        raise ValueError(f"{text!r} is not a bound on a metric")
    return Constraint(metric_name(name), float(bound.split()[0]))


def costs(point: Measured, objectives: Sequence[Metric]) -> tuple[float, ...]:
    """Return the costs that a point is ranked by: the objectives, then the p95 latency; inf if one is unknown."""
    known = (metric.cost(point.measurement) for metric in (*objectives, METRICS["latency-p95"]))
    return tuple(math.inf if cost is None else cost for cost in known)
