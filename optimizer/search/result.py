"""What a trial is worth to a search method, and how it is written down in a study."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import optuna

from objectives import pareto
from objectives.metrics import Measurement
from objectives.sla import worst_violation
from optimizer.problem import Problem
from optimizer.trial import Candidate, LoadPoint, Point, Trial

# user attributes of an Optuna trial
CANDIDATE, TRIAL, LOAD, POINTS, REASON = "candidate", "trial", "load", "points", "reason"
_FIGURES = Measurement.__slots__
WORST_VIOLATION = 1e6  # stands for inf, which not every database can store


@dataclass(frozen=True)
class Result:
    """``values`` in the order of the objectives; ``constraints`` by name, <= 0 met; the load they hold at."""

    values: tuple[float, ...]
    constraints: Mapping[str, float]
    load: LoadPoint


def result_of(trial: Trial, problem: Problem) -> Result | str:
    """The objectives at the best feasible point, else at the one that violates least; else why neither."""
    if trial.status == "failed":
        return trial.reason or "failed"
    latest = dict(trial.measurements)  # of a load measured again the later measurement counts
    known = [
        Point(trial.number, trial.candidate, load, measurement)
        for load, measurement in latest.items()
        if _values(measurement, problem) is not None and _counts(measurement, problem)
    ]
    point = pareto.best(known, problem.objectives, problem.constraints) or pareto.closest(
        known, problem.constraints, problem.objectives
    )
    values = _values(point.measurement, problem) if point is not None else None
    if point is None or values is None:
        reasons = [measurement.reason for measurement in latest.values() if measurement.reason]
        return reasons[-1] if reasons else "no stable measurement of every objective"
    violations = {str(c): min(c.violation(point.measurement), WORST_VIOLATION) for c in problem.constraints}
    return Result(values, violations, point.load)


def attributes(trial: Trial, result: Result | str) -> dict[str, Any]:
    """A finished trial as user attributes: all that was measured, in JSON."""
    measured = [
        asdict(load) | {name: value for name, value in asdict(measurement).items() if value is not None}
        for load, measurement in trial.measurements
    ]
    told = {LOAD: asdict(result.load)} if isinstance(result, Result) else {REASON: result}
    # TRIAL last: it marks a trial as recorded
    return {CANDIDATE: describe(trial.candidate), POINTS: measured, **told, TRIAL: trial.number}


def finished_trials(study: optuna.Study) -> list[Trial]:
    """The trials that were recorded in ``study``, by whatever worker: what was measured, or that nothing was.

    Workers that share a study number each its own trials: then these are numbered by their place in it.
    """
    found = [trial_of(trial.user_attrs) for trial in study.get_trials(deepcopy=False) if TRIAL in trial.user_attrs]
    if len({trial.number for trial in found}) < len(found):
        return [replace(trial, number=place) for place, trial in enumerate(found)]
    return sorted(found, key=lambda trial: trial.number)


def trial_of(attributes: Mapping[str, Any]) -> Trial:
    """The trial that ``attributes`` describe."""
    measurements = []
    for point in attributes[POINTS]:
        load = LoadPoint(**{name: point[name] for name in LoadPoint.__slots__})
        measurements.append((load, Measurement(**{name: point[name] for name in _FIGURES if name in point})))
    status: Literal["ok", "failed"] = "ok" if measurements else "failed"
    reason = "" if measurements else str(attributes.get(REASON, ""))
    return Trial(attributes[TRIAL], described(attributes[CANDIDATE]), tuple(measurements), status, reason)


def describe(candidate: Candidate) -> dict[str, Any]:
    """A candidate as JSON; ``described`` reads it."""
    return asdict(candidate) | {
        "preferred_batch_sizes": list(candidate.preferred_batch_sizes),
        "fields": dict(candidate.fields),
    }


def described(value: Mapping[str, Any]) -> Candidate:
    """The candidate that ``describe`` wrote."""
    sizes, fields = value["preferred_batch_sizes"], value["fields"]
    return Candidate(**{**value, "preferred_batch_sizes": tuple(sizes), "fields": tuple(sorted(fields.items()))})


def _counts(measurement: Measurement, problem: Problem) -> bool:
    """An unstable measurement, or a glance, says only that the bounds are missed."""
    return measurement.stable or worst_violation(problem.constraints, measurement) > 0


def _values(measurement: Measurement, problem: Problem) -> tuple[float, ...] | None:
    values = [metric.value(measurement) for metric in problem.objectives]
    known = tuple(value for value in values if value is not None and math.isfinite(value))
    return known if len(known) == len(values) else None
