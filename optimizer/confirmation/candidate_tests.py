"""The tests of each candidate, judged from its confirmations, and which candidate is tested next, at which load."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from objectives.load_sequence import (
    ERROR_SHARES,
    MARGIN,
    OTHER_ERROR_SHARES,
    OTHER_MARGIN,
    CandidateState,
    LoadSequence,
    choose_candidate,
)
from objectives.pooled_windows import pool_measurements
from objectives.queue_forecast import PlannedTest
from objectives.sequential import LOOKS
from objectives.verdict import SlaVerdict
from optimizer.config.problem import Problem
from optimizer.confirmation.load_predictions import LoadPredictions
from optimizer.confirmation.machine_states import usual_latency_rise
from optimizer.confirmation.plan import ConfirmationPlan
from optimizer.confirmation.rate_forecast import forecast_trial
from optimizer.confirmation.server_plan import COMPARED_SERVERS, ServerPlan, estimate_start_seconds, plan_server
from optimizer.confirmation.verdicts import judge_load
from optimizer.confirmation.windows import (
    confirmed_spreads,
    errors_by_load,
    pooled_point,
    server_windows,
    without_last_lost_windows,
)
from optimizer.core.errors import BadInputError
from optimizer.core.trial import LoadPoint, Point, Trial, latest_points, trial_of
from optimizer.options.run_options import SIMULATED_OBJECTIVES
from optimizer.simulator.speed_correction import fit_speed_correction

LIKELY_LOOKS = LOOKS[:2]  # a load is chosen that is likely to pass at one of these
SHARES = (ERROR_SHARES, OTHER_ERROR_SHARES)  # shares of the error, for the first and the second tested candidate


def error_shares(plan: ConfirmationPlan, trials: Sequence[Trial], number: int) -> tuple[float, ...] | None:
    """Return the shares of the error for the tests of finalist ``number``; None if other finalists use them all.

    They are those of its earlier tests, otherwise the first ones that are free. The tests of a candidate that can no
    longer be deployed do not count.
    """
    first_errors = {
        trial.number: next(iter(errors.values()))
        for trial in trials
        if trial.number in plan.finalists and (errors := errors_by_load(trial))
    }
    for shares in SHARES:
        users = [user for user, error in first_errors.items() if math.isclose(error, plan.error * shares[0])]
        if number in users or (number not in first_errors and not users):
            return shares
    if number in first_errors:  # its confirmations do not follow the plan, and CandidateTests raises the error
        return SHARES[0]
    return None


@dataclass(frozen=True, slots=True)
class ConfirmationState:
    """The state of a confirmation, from which the next test is chosen.

    Attributes:
        problem: The search problem.
        plan: The plan of the confirmation.
        trials: All trials of the run, with the confirmations so far.
        start_seconds: The estimated time of the start of a fresh server.
        is_cross_checked: Whether perf_analyzer measures each tested server as well.
        seconds_left: Returns the time that is left for tests.
    """

    problem: Problem
    plan: ConfirmationPlan
    trials: Sequence[Trial]
    start_seconds: float
    is_cross_checked: bool
    seconds_left: Callable[[], float] = lambda: math.inf

    def plan_test_server(self, point: Point, load: LoadPoint, error: float = 0.0) -> ServerPlan:
        """Return how the next server is measured that tests the candidate of ``point`` at ``load``."""
        problem = self.problem
        return plan_server(
            point,
            load,
            problem.request_times,
            error,
            problem.sla,
            self.start_seconds,
            is_cross_checked=self.is_cross_checked,
        )


@dataclass
class CandidateTests:
    """The tests of one candidate at its predicted loads, which are ascending and named by their index.

    Attributes:
        confirmation: The state of the confirmation.
        point: The candidate at its best load.
        predictions: Its loads.
        shares: The shares of the error for its tests.
        sequence: The tests, which continue where the confirmations of the trial end.
    """

    confirmation: ConfirmationState
    point: Point
    predictions: LoadPredictions
    shares: tuple[float, ...]
    sequence: LoadSequence = field(init=False)

    def __post_init__(self) -> None:
        """Raise BadInputError if the trial's confirmations do not belong to the plan."""
        self.sequence = LoadSequence(
            self.predictions.log_latency_ratios,
            self.predictions.throughput_infer_per_sec,
            self.confirmation.plan.error,
            self.shares,
            MARGIN if self.shares == ERROR_SHARES else OTHER_MARGIN,
            self.predictions.highest_first,
            self.chances,
        )
        try:
            self.sequence.resume(
                [(self.predictions.loads.index(load), error) for load, error in errors_by_load(self.trial).items()]
            )
        except ValueError:
            raise BadInputError(
                f"the confirmations of trial {self.point.trial} do not follow the plan in run.json; "
                "`tune verify --fresh` makes a separate test"
            ) from None

    @property
    def trial(self) -> Trial:
        """The tested trial, with its confirmations so far."""
        return trial_of(self.point, self.confirmation.trials)

    def next_load(self) -> int | None:
        """Return the index of the load that needs another server; None if none can pass in the time that is left."""
        return self.sequence.next_load(self)

    def state(self, index: int | None) -> CandidateState:
        """Return how far the tests are; ``index`` is that of ``next_load``."""
        passed = 0.0 if self.sequence.passed is None else self.worth(self.sequence.passed)
        if index is None:
            return CandidateState(passed, None)
        return CandidateState(passed, self.worth(index), is_begun=self.servers(index) > 0)

    def worth(self, index: int) -> float:
        """Return what this load is expected to be worth by the first objective, see ``Metric.worth``.

        An objective of served requests or tokens is in proportion to the expected throughput. Any other one is that
        of the fresh servers at this load or, without them, of the search. All loads are worth 1 if ratios of it have
        no meaning.
        """
        objective = self.confirmation.problem.objectives[0]
        searched = objective.worth(self.point.measurement) or 1.0
        if objective.name in SIMULATED_OBJECTIVES:
            return self.throughput(index) * (searched / (self.point.throughput_infer_per_sec or searched))
        windows = [
            window for server in server_windows(self.trial, self.predictions.loads[index]) for window in server
        ]
        return (objective.worth(pool_measurements(windows)) if windows else None) or searched

    def server_plan(self, index: int) -> ServerPlan:
        """Return how the next server at this load is measured, with fewer windows if the time is short."""
        return self._server_plan(self.predictions.loads[index], self.missing_servers(index))

    def servers(self, index: int) -> int:
        """Return the number of servers that were measured to test this load."""
        load = self.predictions.loads[index]
        return len(server_windows(self.trial, load)) if load in errors_by_load(self.trial) else 0

    def missing_servers(self, index: int) -> int:
        """Return how many more servers the next look at this load needs."""
        servers = self.servers(index)
        return next((look - servers for look in LOOKS if look > servers), 1)

    def possible_servers(self) -> int:
        """Return how many more servers the time allows."""
        seconds = self._server_plan(self.point.load, LOOKS[0]).server_seconds
        return max(0, int(min(self.confirmation.seconds_left() / seconds, LOOKS[-1])))

    def chances(self, indices: Sequence[int], error: float) -> Sequence[float] | None:
        """Return the probability that a test with ``error`` passes at each load; None if it is unknown.

        It is that at the last of LIKELY_LOOKS that the time allows. It is known at a steady request rate, unless
        these looks have too few requests for a PASS at all loads, as for a high percentile at a low rate.
        """
        confirmation, problem = self.confirmation, self.confirmation.problem
        forecast = forecast_trial(self.trial, problem)
        if forecast is None or not indices:
            return None
        loads, possible = [self.predictions.loads[index] for index in indices], self.possible_servers()
        servers = max((look for look in LIKELY_LOOKS if look <= possible), default=LIKELY_LOOKS[0])
        server_plan = self._server_plan(loads[0], servers)
        test = PlannedTest(servers, server_plan.windows * server_plan.window_seconds, error)
        rise, tested = 0.0, list(errors_by_load(self.trial))
        if tested:  # as in the last verdict
            rise = usual_latency_rise(confirmation.trials, self.trial, tested[-1], problem)
        judged = replace(problem, sla=problem.sla.with_lower_latencies(rise))
        chances = forecast.chances(loads, judged, test, confirmed_spreads(confirmation.trials, problem, []))
        return chances if any(chances) else None

    def most_promising(self) -> int | None:
        """Return the index of the first load with the most expected throughput; None if the chances are unknown."""
        indices = range(len(self.predictions.loads))
        chances = self.chances(indices, self.sequence.current_error)
        if chances is None:
            return None
        return max(indices, key=lambda index: chances[index] * self.predictions.throughput_infer_per_sec[index])

    def judge(self, index: int, error: float, max_servers: int) -> SlaVerdict:
        """Return the verdict on this load."""
        load, confirmation = self.predictions.loads[index], self.confirmation
        return judge_load(confirmation.trials, self.trial, load, confirmation.problem, error, max_servers)

    def throughput(self, index: int) -> float:
        """Return the throughput at this load: the predicted one, corrected by the measurements on fresh servers.

        They are those at this load if it was tested, otherwise at the one that passed. If no load has passed, all
        fresh servers of the candidate count, also those of its comparison: a disturbed one says little about another
        load. A lost measurement corrects nothing, and a comparison has corrected the predictions before the first
        test.
        """
        predicted = self.predictions.throughput_infer_per_sec
        tested = {self.predictions.loads.index(load) for load in errors_by_load(self.trial)}
        if not tested:
            return predicted[index]
        measured = [other for other in (index, self.sequence.passed) if other in tested][:1]
        if not measured:
            confirmed = {window.load for window in self.trial.confirmations}
            measured = [other for other, load in enumerate(self.predictions.loads) if load in confirmed]
        ratios = [ratio for other in measured for ratio in self._throughput_ratios(other)]
        return predicted[index] * (statistics.geometric_mean(ratios) if ratios else 1.0)

    def _throughput_ratios(self, index: int) -> list[float]:
        """Return the measured throughput over the predicted one at this load, once for each fresh server."""
        servers = server_windows(self.trial, self.predictions.loads[index])
        served = pool_measurements([window for windows in servers for window in windows]).throughput_infer_per_sec
        ratio = (served or 0.0) / self.predictions.throughput_infer_per_sec[index]
        return [ratio] * len(servers) if ratio > 0 else []

    def _server_plan(self, load: LoadPoint, servers: int) -> ServerPlan:
        error = 0.0 if self.sequence.current is None else self.sequence.current_error
        server_plan = self.confirmation.plan_test_server(self.point, load, error)
        return server_plan.fitting(servers, self.confirmation.seconds_left())


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


def next_test(confirmation: ConfirmationState, best: Sequence[Point]) -> NextTest | None:
    """Return which finalist is tested next; None if no further server can change a verdict.

    The first one that can be deployed is tested, and one other, a rival: the one that is expected to be the best by
    its fresh servers. ``choose_candidate`` says which of the two is next.

    Args:
        confirmation: The state of the confirmation.
        best: The best point of each finalist, in the order of testing.
    """
    plan, trials = confirmation.plan, confirmation.trials
    by_number = {trial.number: trial for trial in trials}
    deployable = [point for point in best if by_number[point.trial].status != "failed"]
    if not deployable:
        return None
    compared = _compared_predictions(confirmation)
    rival = _choose_rival(confirmation, deployable[1:], compared)
    tests, states = list[NextTest | None](), list[CandidateState]()
    for point in filter(None, (deployable[0], rival)):
        shares = error_shares(plan, trials, point.trial)
        if shares is None:
            continue
        predictions = compared.get(point.trial) or plan.predictions.get(point.trial)
        test, state = _next_test_of(confirmation, point, predictions, shares)
        tests.append(test)
        states.append(state)
        if test is None and not errors_by_load(by_number[point.trial]):
            break  # there is no time for its first test, nor for that of the rival
    chosen = choose_candidate(states)
    return None if chosen is None else tests[chosen]


def _next_test_of(
    confirmation: ConfirmationState, point: Point, predictions: LoadPredictions | None, shares: tuple[float, ...]
) -> tuple[NextTest | None, CandidateState]:
    """Return the next test of the candidate of ``point``, and how far its tests are.

    The test is None if no load can pass in the time that is left. ``predictions`` are None before its first server.
    """
    if predictions is None:
        test = NextTest(point, confirmation.plan_test_server(point, point.load), LOOKS[0])
        return test, CandidateState(passed=0.0, expected=0.0)
    tests = CandidateTests(confirmation, point, predictions, shares)
    index = tests.next_load()
    if index is None:
        return None, tests.state(None)
    return NextTest(point, tests.server_plan(index), tests.missing_servers(index)), tests.state(index)


def next_verdict(
    plan: ConfirmationPlan, trials: Sequence[Trial], problem: Problem, *, is_cross_checked: bool
) -> NextTest | None:
    """Return the test that a later session continues with; None if no further server can change a verdict.

    ``is_cross_checked`` says whether perf_analyzer measures each tested server as well.
    """
    trials = [without_last_lost_windows(trial) for trial in trials]
    points = fit_speed_correction(trials, problem).correct_points(latest_points(trials))
    start_seconds = estimate_start_seconds(trials)
    confirmation = ConfirmationState(problem, plan, trials, start_seconds, is_cross_checked=is_cross_checked)
    return next_test(confirmation, plan.best_points(points, problem))


def begin_likely(
    confirmation: ConfirmationState, point: Point, predictions: LoadPredictions, shares: tuple[float, ...]
) -> LoadPredictions:
    """Return ``predictions`` with tests that begin at most at the load with the most expected throughput.

    They are unchanged if no probability to pass is known.
    """
    tests = CandidateTests(confirmation, point, predictions, shares)
    if (first := tests.most_promising()) is None:
        return predictions
    limits = (first, predictions.highest_first)
    return replace(predictions, highest_first=min(limit for limit in limits if limit is not None))


def corrected_predictions(confirmation: ConfirmationState, trial: Trial) -> LoadPredictions | None:
    """Return the loads of a candidate that was compared and not tested, corrected by its last comparison.

    They are None if they were not predicted, or if fewer than COMPARED_SERVERS fresh servers were measured. The usual
    states are those of all measurements so far: a comparison in a quiet moment would begin the tests too high.
    """
    plan, problem = confirmation.plan, confirmation.problem
    if not trial.confirmations or errors_by_load(trial):
        return None
    load = list(dict.fromkeys(window.load for window in trial.confirmations))[-1]
    measured = pooled_point(trial, load)
    predictions = plan.predictions.get(trial.number)
    if predictions is None or len(server_windows(trial, load)) < COMPARED_SERVERS:
        return None
    rise = usual_latency_rise(confirmation.trials, trial, load, problem)
    corrected = predictions.for_rival(measured, replace(problem, sla=problem.sla.with_lower_latencies(rise)))
    return None if corrected is None else begin_likely(confirmation, measured, corrected, OTHER_ERROR_SHARES)


def _choose_rival(
    confirmation: ConfirmationState, finalists: Sequence[Point], compared: Mapping[int, LoadPredictions]
) -> Point | None:
    """Return the one of ``finalists`` that may be tested too; None if there are none.

    If tests of some were begun, it is one of these. Among several it is the one whose test is expected to begin with
    the best value of the first objective.
    """

    def worth(point: Point) -> float:
        if point.trial not in compared:
            return 0.0
        tests = CandidateTests(confirmation, point, compared[point.trial], OTHER_ERROR_SHARES)
        return tests.worth(tests.sequence.current or 0)

    tested = [point for point in finalists if errors_by_load(trial_of(point, confirmation.trials))]
    return max(tested or finalists, key=worth, default=None)


def _compared_predictions(confirmation: ConfirmationState) -> dict[int, LoadPredictions]:
    """Return the corrected loads of each finalist that was compared on enough fresh servers and not tested."""
    finalists = (trial for trial in confirmation.trials if trial.number in confirmation.plan.finalists)
    corrected = {trial.number: corrected_predictions(confirmation, trial) for trial in finalists}
    return {number: predictions for number, predictions in corrected.items() if predictions is not None}
