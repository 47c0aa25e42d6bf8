"""Why a run recommends nothing: the reason for people, and whether another run may find a configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from objectives.intervals import ConfidenceInterval
from objectives.metrics import LATENCY, METRICS, Measurement
from objectives.sequential import LOOKS
from objectives.sla import Constraint, Sla, Verdict
from objectives.verdict import is_disturbed
from optimizer.config.problem import Problem
from optimizer.confirmation.verdicts import ConfirmedLoad
from optimizer.core.trial import Point, Trial, all_points
from optimizer.machine.cpu_usage import describe_disturbance, lost_cpu_to_others
from optimizer.measure.load_search import MIN_RATE
from optimizer.results import formatting

MAJORITY = 0.5  # share of disturbed measurements above which none of them shows that the SLA cannot be met

InconclusiveKind: TypeAlias = Literal[
    "search_disturbed", "closest_disturbed", "test_disturbed", "test_undecided", "unstable"
]


@dataclass(frozen=True, slots=True)
class InconclusiveResult:
    """Why a run that recommends nothing is UNDECIDED: another run may find a configuration that meets the SLA.

    Attributes:
        kind: ``search_disturbed`` if most measurements of the search were disturbed. ``closest_disturbed`` if that
            of the closest point was. ``test_disturbed`` if windows on fresh servers were. ``test_undecided`` if a
            test did not decide, and its intervals reach the bounds. ``unstable`` if a measurement meets the SLA, but
            is not stable.
        disturbed: The number of disturbed measurements, or of disturbed windows of the test.
        total: The number of measurements, or of windows of the test.
        test: The test on fresh servers that is the reason; None for another one.
    """

    kind: InconclusiveKind
    disturbed: int
    total: int
    test: ConfirmedLoad | None = None


def inconclusive_result(
    points: Sequence[Point], confirmed: Sequence[ConfirmedLoad], closest: Point | None, sla: Sla
) -> InconclusiveResult | None:
    """Return why the measurements do not show that the SLA cannot be met; None if they do, or if it is met.

    Args:
        points: Each configuration at each load.
        confirmed: The confirmations, in the order of measuring.
        closest: The closest point to the SLA; None if there is a recommendation, or nothing was measured.
        sla: The SLA.
    """
    if closest is None:
        return None
    measured = [point for point in points if point.measurement.has_values]
    disturbed = [point for point in measured if lost_cpu_to_others(point.measurement)]
    may_meet = [point for point in disturbed if may_meet_undisturbed(point.measurement, sla)]
    if may_meet and len(disturbed) > MAJORITY * len(measured):
        return InconclusiveResult("search_disturbed", len(disturbed), len(measured))
    if any(point is closest for point in may_meet):
        return InconclusiveResult("closest_disturbed", len(disturbed), len(measured))
    latest_tests = {entry.point.trial: entry for entry in confirmed if entry.error}.values()
    for entry in latest_tests:
        if entry.judged.counts_disturbed and may_meet_undisturbed(entry.point.measurement, sla):
            return _inconclusive_test("test_disturbed", entry)
    for entry in latest_tests:
        if intervals_reach_bounds(entry, sla) and not entry.judged.counts_disturbed:
            return _inconclusive_test("test_undecided", entry)
    if sla.is_met(closest.measurement) and is_disturbed(closest.measurement):
        return InconclusiveResult("unstable", len(disturbed), len(measured))
    return None


def _inconclusive_test(kind: InconclusiveKind, tested: ConfirmedLoad) -> InconclusiveResult:
    """Return the result for a test that did not decide, with the number of its windows."""
    return InconclusiveResult(kind, tested.disturbed_windows, tested.windows, tested)


def intervals_reach_bounds(tested: ConfirmedLoad, sla: Sla) -> bool:
    """Return whether the test did not decide, and each interval of a bounded metric reaches the bound.

    Latencies and throughputs have intervals.
    """
    if tested.judged.verdict is not Verdict.UNDECIDED or sla.share_of_bound(tested.point.measurement) == math.inf:
        return False
    return all(_reaches(tested.interval(bound.metric), bound) for bound in sla)


def _reaches(interval: ConfidenceInterval | None, bound: Constraint) -> bool:
    if interval is None:
        return True
    return interval.high >= bound.bound if METRICS[bound.metric].better == "higher" else interval.low <= bound.bound


def may_meet_undisturbed(measurement: Measurement, sla: Sla) -> bool:
    """Return whether ``measurement`` could meet all bounds if other processes or machines had taken no CPU time.

    The server gets all of the CPUs then. So the median is at best that part of itself in which the CPUs were free for
    the server. Bursts of other programs make an average or a high quantile longer by more, so these are at best the
    same.
    """
    return all(_may_meet_bound_undisturbed(measurement, bound) for bound in sla)


def _may_meet_bound_undisturbed(measurement: Measurement, bound: Constraint) -> bool:
    """Return whether ``measurement`` could meet ``bound`` on an undisturbed machine, see ``may_meet_undisturbed``."""
    free_share = 1 - (measurement.other_cpu_share or 0.0)
    metric = METRICS[bound.metric]
    value = metric.value(measurement)
    if bound.violation(measurement) <= 0 or metric.counted_requests is not None:  # late requests may fail
        return True
    if metric.timing is not None:
        median_ms = METRICS[metric.timing.metric("p50")].value(measurement)
        typical_ms = value if median_ms is None else median_ms
        return typical_ms is not None and free_share * typical_ms <= bound.bound
    is_rate = metric.unit.endswith("/s")
    return is_rate and value is not None and value >= free_share * bound.bound


def no_recommendation_reason(
    trials: Sequence[Trial], confirmed: Sequence[ConfirmedLoad], closest: Point | None, problem: Problem
) -> str:
    """Return why no stable point meets the constraints, as a sentence for people.

    ``closest`` is the point that comes closest to meeting them; None if nothing was measured.
    """
    if closest is None:
        reasons = [trial.reason for trial in trials if trial.reason]
        reasons += [point.measurement.reason for point in all_points(trials) if point.measurement.reason]
        return f"every configuration failed: {reasons[-1]}" if reasons else "nothing was measured"
    if problem.sla.is_met(closest.measurement):
        objective = problem.objectives[0]
        if objective.cost(closest.measurement) is None:
            return f"{objective.name} cannot be measured on this machine"
        unstable = "no measurement that meets the SLA was stable" if problem.sla else "no measurement was stable"
        return ": ".join(filter(None, (unstable, closest.measurement.reason)))
    worst = max(problem.sla, key=lambda c: c.violation(closest.measurement))
    if METRICS[worst.metric].timing:
        reason = _latency_reason(trials, confirmed, worst, closest, problem.sla)
        is_lowest = 0 < closest.load.request_rate <= MIN_RATE
        lowest = f"a run tries no rate below {MIN_RATE:g} requests/s" if is_lowest else ""
        return "; ".join(filter(None, (reason, lowest, describe_disturbance(closest.measurement))))
    metric = METRICS[worst.metric]
    value = metric.value(closest.measurement)
    if value is None:
        return f"{worst.metric} cannot be measured on this machine"
    measured = f"{formatting.metric_label(worst.metric)} is {formatting.quantity(metric, value)}"
    return f"{measured}, but the SLA asks for {formatting.bound(worst)}"


def _latency_reason(
    trials: Sequence[Trial], confirmed: Sequence[ConfirmedLoad], worst: Constraint, closest: Point, sla: Sla
) -> str:
    """Return why ``closest`` misses the latency bound ``worst``.

    One inference may be too slow, or all loads may be. Otherwise the bound was missed on fresh servers only, or no
    load meets all bounds. Failed requests are late, as for the bound.
    """
    metric = METRICS[worst.metric]
    quantile = metric.short_name
    values = [(p, v) for p in all_points(trials) if (v := metric.bounded_value(p.measurement)) is not None]
    if not values:
        return f"{worst.metric} could not be measured"
    lowest_ms = min(value for _, value in values)
    if lowest_ms == math.inf:
        return f"so many requests failed at each load that {quantile} has no value"
    if lowest_ms > worst.bound:
        lowest = f"the lowest {quantile} measured is {formatting.quantity(metric, lowest_ms)}"
        quickest_ms = min((value for point, value in values if point.load.concurrency == 1), default=math.inf)
        if quickest_ms == math.inf:
            return lowest
        time = formatting.quantity(metric, quickest_ms)
        alone_takes = (
            f"a single inference takes {time}"
            if metric.timing is LATENCY
            else f"the {quantile} of requests that are sent alone is {time}"
        )
        return f"{alone_takes}, and {lowest}" if lowest_ms < quickest_ms else alone_takes
    met = [value for point, value in values if sla.is_met(point.measurement)]
    if met and confirmed:
        reasons = (_test_reason(entry, worst) for entry in confirmed if entry.error)  # not of comparisons
        why = next((f" ({reason})" for reason in reasons if reason), "")
        value = formatting.quantity(metric, min(met))
        return f"{quantile} was {value} in the search, but missed the bound on fresh servers{why}"
    together = ", and no load meets all bounds together" if len(sla) > 1 else ""
    return f"the closest measurement misses {formatting.bounds(sla.missed(closest.measurement))}{together}"


def _test_reason(tested: ConfirmedLoad, bound: Constraint) -> str:
    """Return why the test did not pass: the value that misses ``bound`` if the test ended before its first look."""
    metric = METRICS[bound.metric]
    value = metric.bounded_value(tested.point.measurement)
    is_late = value is not None and math.isfinite(value) and bound.violation(tested.point.measurement) > 0
    if tested.servers >= LOOKS[0] or tested.crash or tested.has_lost or not is_late:
        return tested.judged.reason
    servers = formatting.count(tested.servers, "server")
    return f"{formatting.bound(bound)}: {formatting.quantity(metric, value)} on {servers}"
