"""Which candidate is tested next on a fresh server, and at which load."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from objectives.load_sequence import CandidateState, choose_candidate
from objectives.sequential import LOOKS
from optimizer.config.search_space import Problem
from optimizer.confirmation.candidate_tests import CandidateTests, error_shares
from optimizer.confirmation.load_predictions import LoadPredictions
from optimizer.confirmation.plan import ConfirmationPlan
from optimizer.confirmation.server_plan import COMPARED_SERVERS, ServerPlan, estimate_start_seconds, plan_server
from optimizer.confirmation.windows import errors_by_load, pooled_point, server_windows, without_lost_end
from optimizer.core.trial import Point, Trial, latest_points
from optimizer.simulator.speed_correction import fit_speed_correction


@dataclass(frozen=True, slots=True)
class NextTest:
    """The candidate of ``point``, whose next verdict needs ``missing_servers`` that are measured by ``server``.

    The load of ``server`` is the best one of the search if the loads of the candidate were not predicted yet.
    """

    point: Point
    server: ServerPlan
    missing_servers: int

    @property
    def seconds(self) -> float:
        """The estimated time until the next verdict."""
        return self.missing_servers * self.server.server_seconds


def next_test(
    plan: ConfirmationPlan,
    trials: Sequence[Trial],
    best: Sequence[Point],
    problem: Problem,
    *,
    start_seconds: float,
    left_seconds: Callable[[], float] = lambda: math.inf,
    is_cross_checked: bool = False,
) -> NextTest | None:
    """Return which finalist is tested next; None if no further server can change a verdict.

    The first one that can be deployed is tested, and one other, a rival: the one that is expected to serve the most
    by its fresh servers. ``choose_candidate`` says which of the two is next.

    Args:
        plan: The plan of the confirmation.
        trials: All trials of the run.
        best: The best point of each finalist, in the order of testing.
        problem: The search problem.
        start_seconds: The estimated time of the start of a fresh server.
        left_seconds: Returns the time that is left for tests.
        is_cross_checked: Whether perf_analyzer measures each tested server as well.
    """
    by_number = {trial.number: trial for trial in trials}
    deployable = [point for point in best if by_number[point.trial].status != "failed"]
    compared = _compared_predictions(plan, trials, problem)
    tests, states = list[NextTest | None](), list[CandidateState]()
    for point in (*deployable[:1], *_rival(deployable[1:], by_number, compared)):
        shares = error_shares(plan, trials, point.trial)
        predictions = compared.get(point.trial) or plan.predictions_of(point)
        if shares is None:
            continue
        if predictions is None:
            server = plan_server(
                point, point.load, problem.request_times, sla=problem.sla, start_seconds=start_seconds
            )
            tests.append(NextTest(point, server, LOOKS[0]))
            states.append(CandidateState(passed=0.0, expected=0.0))
            continue
        own = CandidateTests(
            problem,
            plan,
            trials,
            point,
            predictions,
            shares,
            start_seconds,
            left_seconds,
            is_cross_checked=is_cross_checked,
        )
        load = own.next_load()
        states.append(own.state(load))
        tests.append(None if load is None else NextTest(point, own.server_plan(load), own.missing_servers(load)))
        if load is None and not errors_by_load(own.trial):
            break  # there is no time for it, nor for the other
    chosen = choose_candidate(states)
    return None if chosen is None else tests[chosen]


def next_verdict(plan: ConfirmationPlan, trials: Sequence[Trial], problem: Problem) -> NextTest | None:
    """Return the test that a later session continues with; None if no further server can change a verdict."""
    trials = [without_lost_end(trial) for trial in trials]
    points = fit_speed_correction(trials, problem).correct_points(latest_points(trials))
    start_seconds = estimate_start_seconds(trials)
    return next_test(plan, trials, plan.best_points(points, problem), problem, start_seconds=start_seconds)


def corrected_predictions(plan: ConfirmationPlan, trial: Trial, problem: Problem) -> LoadPredictions | None:
    """Return the loads of a candidate that was compared and not tested, corrected by its last comparison.

    They are None if they were not predicted, or if fewer than COMPARED_SERVERS fresh servers were measured.
    """
    if not trial.confirmations or errors_by_load(trial):
        return None
    load = list(dict.fromkeys(again.load for again in trial.confirmations))[-1]
    measured = pooled_point(trial, load)
    predictions = plan.predictions_of(measured)
    if predictions is None or len(server_windows(trial, load)) < COMPARED_SERVERS:
        return None
    return predictions.for_rival(measured, problem)


def _rival(
    others: Sequence[Point], by_number: Mapping[int, Trial], compared: Mapping[int, LoadPredictions]
) -> Sequence[Point]:
    """Return the one of ``others`` that is tested, or may be; empty if there are none."""
    tested = [point for point in others if errors_by_load(by_number[point.trial])]
    expected = {number: predictions.rival_throughput_infer_per_sec for number, predictions in compared.items()}
    rival = max(tested or others, key=lambda point: expected.get(point.trial, 0.0), default=None)
    return [] if rival is None else [rival]


def _compared_predictions(
    plan: ConfirmationPlan, trials: Sequence[Trial], problem: Problem
) -> dict[int, LoadPredictions]:
    """Return the corrected loads of each finalist that was compared on enough fresh servers and not tested."""
    finalists = (trial for trial in trials if trial.number in plan.finalists)
    corrected = {trial.number: corrected_predictions(plan, trial, problem) for trial in finalists}
    return {number: predictions for number, predictions in corrected.items() if predictions is not None}
