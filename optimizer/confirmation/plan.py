"""The decisions of a confirmation that are fixed before its first window, and how run.json keeps them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from optimizer.config.problem import Problem
from optimizer.confirmation.disturbances import DisturbanceCorrection, fit_disturbance_correction
from optimizer.confirmation.load_predictions import LoadPredictions
from optimizer.confirmation.windows import begun_error, errors_by_load
from optimizer.core.candidate import Candidate
from optimizer.core.trial import LoadPoint, Point, Trial, latest_points
from optimizer.simulator.fitted_parameters import execution_settings
from optimizer.simulator.performance_model import ModelFitter
from optimizer.simulator.speed_correction import NO_CORRECTION, fit_speed_correction

MAX_FINALISTS = 6  # candidates, if some cannot be deployed as their config.pbtxt is written
MIN_RUNNER_UP_SHARE = 0.8  # share of the worth of the best candidate, by the first objective, of a runner-up
MIN_ERROR = 1e-9  # below it, rounding is all that is left of the error


@dataclass(frozen=True, slots=True)
class ConfirmationPlan:
    """The decisions that are fixed before the first window of a confirmation.

    Attributes:
        error: Error probability of all tests together.
        finalists: Trials of the candidates in the order in which they are tested.
        predictions: The loads that can be tested, by trial, with the predicted latency and throughput. Those of a
            later finalist are added before its first window.
    """

    error: float
    finalists: tuple[int, ...]
    predictions: Mapping[int, LoadPredictions] = field(default_factory=dict)

    def best_points(self, points: Sequence[Point], problem: Problem) -> list[Point]:
        """Return the best of ``points`` for each finalist that can be deployed, in the order of testing."""
        by_finalist = ([point for point in points if point.trial == trial] for trial in self.finalists)
        return [point for measured in by_finalist for point in finalists(measured, problem, 1)]


def correct_search_points(
    trials: Sequence[Trial], problem: Problem, fit: ModelFitter
) -> tuple[list[Point], DisturbanceCorrection]:
    """Return the search's points, corrected to the usual state of the machine, and the correction for disturbances.

    After a disturbed search, the CPU share of other processes is the only covariate: they slow the probe too. If no
    point would meet the SLA then, the speed probe is the covariate, because fresh servers decide about it. The
    correction for disturbances has only the slope of latency then, which the verdicts use.
    """
    points = latest_points(trials)
    disturbances = fit_disturbance_correction(points, trials, problem, fit)
    if disturbances != DisturbanceCorrection():
        corrected = disturbances.correct_points(points)
        if finalists(corrected, problem, 1):
            return corrected, disturbances
    slope_only = DisturbanceCorrection(latency_slope=disturbances.latency_slope)
    return fit_speed_correction(trials, problem).correct_points(points), slope_only


def plan_tests(
    earlier: ConfirmationPlan | None,
    trials: Sequence[Trial],
    points: Sequence[Point],
    problem: Problem,
    disturbances: DisturbanceCorrection,
) -> ConfirmationPlan:
    """Return the plan of an earlier session, or a new one without predictions of its loads.

    The candidates are ranked with the latency that is expected from the disturbances of the search. Those that would
    miss the SLA then follow, ranked without it, because they may serve more at a lower load. If a later search has
    found a better candidate than the plan has, the new plan gets the error that is left.

    Args:
        earlier: The plan of an earlier session; None if there is none.
        trials: The trials of the search, with the confirmations so far.
        points: The search's points, from ``correct_search_points``.
        problem: The search problem.
        disturbances: The correction for disturbances, from there too.
    """
    by_candidate = dict[Candidate, Point]()
    for ranked in (disturbances.slow_points(points), points):
        for point in finalists(ranked, problem, MAX_FINALISTS):
            by_candidate.setdefault(point.candidate, point)
    best = list(by_candidate.values())[:MAX_FINALISTS]
    error = 1 - problem.confidence - begun_error(trials)
    tested = {trial.number for trial in trials if errors_by_load(trial)}
    untested = tuple(point.trial for point in best if point.trial not in tested) if error > MIN_ERROR else ()
    if earlier is not None and (not untested or best[0].trial in earlier.finalists):
        return earlier
    return ConfirmationPlan(error, untested, earlier.predictions if earlier else {})


def compared_points(
    best: Sequence[Point], comparisons: Sequence[Candidate], points: Sequence[Point], problem: Problem
) -> list[Point]:
    """Return those of ``comparisons`` that were measured, and a runner-up, without the best candidate.

    Each is at its best point, or at the one closest to the SLA. The runner-up is the best other candidate that
    differs from all of these in its execution settings, because different batching settings alone seldom make a
    difference. If there is none that is nearly as good by the first objective, it is the second best.
    """
    chosen = dict[Candidate, Point]()
    for candidate in comparisons:
        measured = [point for point in points if point.candidate == candidate]
        point = problem.best_point(measured) or problem.sla.closest_point(measured)
        if point is not None:
            chosen[candidate] = point
    compared = {execution_settings(candidate) for candidate in (best[0].candidate, *chosen)}
    worths = [problem.objectives[0].worth(point.measurement) or 0.0 for point in best]  # 0 without ratios
    different = [
        point
        for point, worth in zip(best, worths, strict=True)
        if worth >= MIN_RUNNER_UP_SHARE * worths[0] and execution_settings(point.candidate) not in compared
    ]
    for runner_up in (different or best[1:])[:1]:
        chosen[runner_up.candidate] = runner_up
    return [point for candidate, point in chosen.items() if candidate != best[0].candidate]


_PLAN = TypeAdapter(ConfirmationPlan)


def plan_document(plan: ConfirmationPlan) -> dict[str, Any]:
    """Return ``plan`` for run.json."""
    document: dict[str, Any] = _PLAN.dump_python(plan, mode="json")
    return document


def read_plan_document(document: object) -> ConfirmationPlan:
    """Return what ``plan_document`` has written. Raises ValueError with one line for anything else."""
    try:
        plan = _PLAN.validate_python(document)
    except ValidationError as error:
        fault = error.errors()[0]
        raise ValueError(".".join(map(str, ("confirmation_plan", *fault["loc"]))) + f": {fault['msg']}") from None
    by_trial = dict[int, LoadPredictions]()
    for trial, predictions in plan.predictions.items():
        key = f"confirmation_plan.predictions.{trial}"
        count = len(predictions.loads)
        values = (*predictions.log_latency_ratios, *predictions.throughput_infer_per_sec)
        if not count or len(values) != 2 * count or not all(map(math.isfinite, values)):
            raise ValueError(f"{key}: not a prediction for each load")
        if predictions.highest_first is not None and not 0 <= predictions.highest_first < count:
            raise ValueError(f"{key}: highest_first is not one of the loads")
        by_trial[trial] = replace(predictions, loads=_with_integer_sizes(predictions.loads))
    if not 0 < plan.error < 1:
        raise ValueError(f"confirmation_plan.error: {plan.error:g} is not between 0 and 1")
    return replace(plan, predictions=by_trial)


def _with_integer_sizes(loads: Sequence[LoadPoint]) -> tuple[LoadPoint, ...]:
    """Return the loads with whole request batch sizes as integers, which JSON does not distinguish."""
    return tuple(
        replace(load, request_batch_size=int(size)) if (size := load.request_batch_size) % 1 == 0 else load
        for load in loads
    )


def finalists(points: Sequence[Point], problem: Problem, max_points: int) -> list[Point]:
    """Return the best point of each of the ``max_points`` best candidates, best first.

    Disturbed measurements count with less weight, see ``SpeedCorrection.best_point``. If no point is stable, the best
    unstable one is returned: fresh servers decide about it.
    """
    remaining, chosen = points, list[Point]()
    while len(chosen) < max_points:
        best = NO_CORRECTION.best_point(remaining, problem)
        if best is None and not chosen:
            best = problem.best_point(remaining, unstable=True)
        if best is None:
            break
        chosen.append(best)
        remaining = [point for point in remaining if point.candidate != best.candidate]
    return chosen
