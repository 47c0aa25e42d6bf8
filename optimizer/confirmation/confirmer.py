"""Test the best candidates on fresh servers, and measure others in turn with them for comparison."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from objectives.load_sequence import ERROR_SHARES
from objectives.metrics import Measurement
from objectives.sequential import LOOKS
from objectives.sla import Verdict
from optimizer.config.problem import Problem
from optimizer.confirmation.candidate_tests import (
    CandidateTests,
    ConfirmationState,
    begin_likely,
    corrected_predictions,
    error_shares,
    next_test,
)
from optimizer.confirmation.choice import best_so_far
from optimizer.confirmation.disturbances import DisturbanceCorrection
from optimizer.confirmation.load_predictions import COMPARED_LOADS, LoadPredictions, predict_loads
from optimizer.confirmation.machine_states import LATENCY_SLOPE, disturbance_limit, was_search_disturbed
from optimizer.confirmation.plan import ConfirmationPlan, compared_points, correct_search_points, plan_tests
from optimizer.confirmation.server_plan import COMPARED_SERVERS, ServerPlan, estimate_start_seconds, plan_server
from optimizer.confirmation.verdicts import estimate_capacity, has_queue_memory, judge_confirmations
from optimizer.confirmation.windows import (
    errors_by_load,
    last_lost_windows,
    last_server,
    server_windows,
    without_last_lost_windows,
)
from optimizer.core.budget import Budget
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import DeploymentError, ServerCrashed
from optimizer.core.interfaces import Target
from optimizer.core.trial import FreshServer, LoadPoint, Point, Trial
from optimizer.measure.measurer import CandidateMeasurer, Measurer
from optimizer.options.run_options import RunOptions
from optimizer.simulator.performance_model import ModelFitter, PerformanceModel, fit_model
from optimizer.simulator.predicted_metrics import is_complete, predicted_latencies

OVERLOAD_FACTOR = 1.5  # rate that shows the capacity of a machine, over that of the machine of the search
MAX_ATTEMPTS = 2  # attempts to measure on one server if the load generator fails


@dataclass
class FreshServerMeasurement:
    """The MeasurementSteps of a candidate on one fresh server, which may be deployed again after a crash.

    Attributes:
        measurer: Measures and stores.
        server_plan: How the server is measured.
        fresh: Its number and the error of the test.
        budget: The time that is left.
        windows_before: Windows of the trial on earlier servers.
        attempts: How often the load was begun.
        check_result: Result of the checks of the last deployment that was reached; ``pending`` before the first one.
    """

    measurer: Measurer
    server_plan: ServerPlan
    fresh: FreshServer
    budget: Budget
    windows_before: int
    attempts: int = 0
    check_result: Literal["pending", "passed", "failed"] = "pending"

    @property
    def is_under_test(self) -> bool:
        """Whether a deployment of a test passed its checks, so that a crash decides about the load."""
        return self.check_result == "passed" and self.server_plan.error > 0

    def prepare(self, endpoint: Endpoint) -> None:
        """Check a deployment before its load. Raises DeploymentError."""
        self.check_result = "failed"  # until it has passed
        self.measurer.check_deployment(endpoint)
        self.check_result = "passed"

    def next_load(self, trial: Trial) -> LoadPoint | None:
        """Return the load to measure; None after it was measured, or lost MAX_ATTEMPTS times."""
        measured = trial.confirmations[self.windows_before :]
        can_be_repeated = len(measured) == 1 and measured[0].is_lost and self.attempts < MAX_ATTEMPTS
        return self.server_plan.load if not measured or can_be_repeated else None

    def is_hopeless(self, window: Measurement) -> bool:
        """Return False: the candidate was chosen for its measurements in the search."""
        return False

    def is_worth_retrying(self) -> bool:
        """Return whether there is time to deploy again after a crash that does not decide about the load."""
        return self.budget.seconds_left() > 0 and not self.is_under_test

    def measure(self, trial: Trial, endpoint: Endpoint, load: LoadPoint) -> Trial:
        """Return the trial with the windows of the server, and with perf_analyzer's check if it is planned."""
        self.attempts += 1
        plan = self.server_plan
        trial = self.measurer.confirm(trial, endpoint, load, self.fresh, plan.window_seconds, plan.windows)
        if plan.is_cross_checked:
            trial = self.measurer.cross_check(trial, endpoint, load, self.fresh, plan.cross_check_seconds)
        return trial

    def record_error(self, trial: Trial, error: DeploymentError) -> Trial:
        """Return the trial after ``error`` ended the measurement: with a lost measurement, or as failed.

        The candidate fails if its first fresh server cannot be deployed, or if one has wrong outputs. If a later one
        cannot be deployed, its measurement is lost. So is that of a server that crashes after its checks.
        """
        table, load = self.measurer.table, self.server_plan.load
        if isinstance(error, ServerCrashed):  # in a test, or at the end of the time
            if self.check_result != "passed":
                return trial
            lost = Measurement(reason=str(error), server_crashed=True)
            if not self.attempts:  # otherwise the table has it
                table.append(trial, load, lost, self.fresh)
            return trial.with_row(load, lost, self.fresh)
        if self.windows_before > 0 and self.check_result != "failed":
            lost = Measurement(reason=str(error))
            table.append(trial, load, lost, self.fresh)
            return trial.with_row(load, lost, self.fresh)
        trial = trial.with_failure(error)
        table.append_failure(trial)
        return trial


@dataclass
class Confirmer:
    """Confirms the best of ``trials``. Each measurement is written to the table at once.

    Attributes:
        problem: The search problem.
        target: Deploys the candidates.
        measurer: Measures and stores.
        budget: Its time that is left is used.
        trials: The trials of the search; they get confirmations.
        fit: Fits a performance model to the search's points; None predicts latencies without one.
        recorded_plan: The plan of an earlier session, whose tests continue, then the one that was stored last.
        store_plan: Stores a plan; called before the first window that depends on it.
    """

    problem: Problem
    target: Target
    measurer: Measurer
    budget: Budget
    trials: list[Trial]
    fit: ModelFitter = lambda _: None
    recorded_plan: ConfirmationPlan | None = None
    store_plan: Callable[[ConfirmationPlan], None] = lambda _: None
    _disturbances: DisturbanceCorrection = field(default_factory=DisturbanceCorrection, init=False)
    _latency_slope: float | None = field(default=None, init=False)  # see FreshServer
    # number of the first lost server of each trial whose measurement is still to be repeated
    _lost_servers: dict[int, int] = field(default_factory=dict, init=False)
    _baseline: Candidate | None = field(default=None, init=False)
    _last_server: int = field(default=0, init=False)  # number of the last one of the earlier sessions
    _start_seconds: list[float] = field(default_factory=list, init=False)  # start times of the fresh servers so far
    _points: Sequence[Point] = field(default=(), init=False)  # points of the search, corrected
    _finalists: Sequence[Point] = field(default=(), init=False)  # best point of each, in the order of testing
    _is_separate: bool = field(default=False, init=False)  # the best so far is one that this test measured
    _plan: ConfirmationPlan = field(init=False)  # has the loads that were predicted so far

    def run(self, comparisons: Sequence[Candidate]) -> list[Trial]:
        """Return the trials with their confirmations.

        The best candidate is tested until its highest load is found that passes. ``comparisons``, of which the first
        one is the baseline, and the runner-up are measured for comparison, in turn with the first servers of the
        best. If no load of the best candidate passes, or another one is expected to be clearly better, that one is
        tested. Tests of an earlier session continue where they ended. If the time is too short for a verdict, it is
        used for the first servers of the test, which a later session continues. Otherwise the time that is left is
        used for comparisons that were left out, or whose load was too low or too high.

        After a disturbed search, servers differ so much that the verdict needs more of them. So comparisons wait
        until a load has passed.

        Raises BadInputError if the confirmations of ``trials`` do not belong to the plan.
        """
        self._baseline = next(iter(comparisons), None)
        self._last_server = last_server(self.trials)
        self._lost_servers = {
            trial.number: lost[0].server for trial in self.trials if (lost := last_lost_windows(trial))
        }
        self.trials = [without_last_lost_windows(trial) for trial in self.trials]
        with self.measurer.stopwatch.count("search"):
            self._points, self._disturbances = correct_search_points(self.trials, self.problem, self.fit)
        fitted_slope = self._disturbances.latency_slope
        self._latency_slope = LATENCY_SLOPE if fitted_slope is None else fitted_slope
        self._plan = plan_tests(self.recorded_plan, self.trials, self._points, self.problem, self._disturbances)
        self.measurer.disturbance_limit = disturbance_limit(self.trials, self.measurer.node)
        self._finalists = self._plan.best_points(self._points, self.problem)
        if not self._finalists:
            return self.trials
        best = self._finalists[0]
        compared = compared_points(self._finalists, comparisons, self._points, self.problem)
        self._predict_loads([best, *compared])
        if was_search_disturbed(self.trials):
            self._test(until_pass=True)
        if (tests := self._tests(best)) is not None:
            untested = [point for point in compared if not errors_by_load(self.trial(point.trial))]
            loads = [self._first_compared_load(point) for point in untested]
            self._measure_in_turn(tests, list(map(self._comparison_plan, untested, loads)))
        self._test()
        self._begin_test(best)
        self._continue_comparisons(compared)
        return self.trials

    def test_recommendation(self, recommended: Point, comparisons: Sequence[ServerPlan]) -> list[Trial]:
        """Return the trials with a separate test of the recommendation at its own load.

        Windows and crashes of earlier tests do not count, and are not in the returned trials.

        At a request rate the capacity is measured first, because that of the machine of the search may be another.
        ``comparisons`` are measured in turn with its first servers. Those for which the time seemed too short are
        measured after the test, if it left enough.
        """
        self._is_separate = True
        self.trials = [replace(trial, confirmations=(), cross_checks=(), crashes=()) for trial in self.trials]
        only = LoadPredictions((recommended.load,), (-math.inf,), (recommended.throughput_infer_per_sec,))
        self.measurer.disturbance_limit = disturbance_limit(self.trials, self.measurer.node)
        self._plan = ConfirmationPlan(1 - self.problem.confidence, (recommended.trial,))
        self._measure_capacity(recommended)
        tests = CandidateTests(self._state(), recommended, only, (1.0,))
        self._measure_in_turn(tests, comparisons)
        while (index := tests.next_load()) is not None and self.measure(tests.server_plan(index)):
            pass
        if self.trial(recommended.trial).confirmations:  # otherwise there is nothing to compare with
            self._compare_in_turn(comparisons)
        return self.trials

    def _measure_capacity(self, recommended: Point) -> None:
        """Replace the measurements of ``recommended`` in the search by one above the capacity, if it is judged by it.

        A failed one replaces nothing.
        """
        trial, load = self.trial(recommended.trial), recommended.load
        points = [trial.point(*pair) for pair in trial.measurements]
        if not has_queue_memory(load, self.problem) or not points or self.budget.seconds_left() <= 0:
            return
        load = replace(load, request_rate=float(f"{OVERLOAD_FACTOR * estimate_capacity(points):.3g}"))
        with contextlib.suppress(DeploymentError), self.target.deploy(trial.candidate) as endpoint:
            self.measurer.warm_up(endpoint, recommended.load)  # a cold server answers fewer requests
            measured = self.measurer.measure(replace(trial, measurements=()), endpoint, load)
            if measured.measurements[0][1].has_values:
                self.trials[self._index(trial.number)] = measured

    def measure(self, server_plan: ServerPlan) -> bool:
        """Measure one more fresh server by ``server_plan``. Return False if it could not be measured.

        A server that crashes under the load of a test is not started again, because the load can no longer pass.
        """
        trial = self.trial(server_plan.trial)
        seconds_left = self.budget.seconds_left()
        if seconds_left <= 0 or trial.status == "failed":
            return False
        self.measurer.observer.trial_started(trial.number, trial.candidate, "confirm")
        number = max(last_server(self.trials), self._last_server) + 1
        repeats = self._lost_servers.pop(trial.number, 0)
        fresh = FreshServer(number, server_plan.error, repeats=repeats, latency_slope=self._latency_slope)
        measurement = FreshServerMeasurement(self.measurer, server_plan, fresh, self.budget, len(trial.confirmations))
        trial, error = CandidateMeasurer(self.target, self.measurer, measurement, fresh=fresh).run(trial)
        trial = trial if error is None else measurement.record_error(trial, error)
        self.trials[self._index(trial.number)] = trial
        if isinstance(error, ServerCrashed):
            return False
        if error is None and measurement.attempts == 1:
            taken_seconds = seconds_left - self.budget.seconds_left()
            self._start_seconds.append(server_plan.start_seconds + taken_seconds - server_plan.server_seconds)
        shown = [replace(one, measurements=()) for one in self.trials] if self._is_separate else self.trials
        self.measurer.observer.trial_finished(trial, best_so_far(shown, self.problem, self._baseline))
        return trial.status == "ok"

    def trial(self, number: int) -> Trial:
        """Return the trial with this number, with its confirmations so far."""
        return self.trials[self._index(number)]

    def _test(self, *, until_pass: bool = False) -> None:
        """Measure one server after another of the candidate that is tested next."""
        while (test := next_test(self._state(), self._finalists)) is not None:
            if until_pass and self._has_passed():
                break
            plan = self._plan
            self._predict_loads([test.point])
            self._correct_loads(test.point)
            if self._plan != plan:  # the next load may be another one
                continue
            before = self.trial(test.point.trial)
            self.measure(test.server)
            if self.trial(test.point.trial) == before:
                break

    def _state(self) -> ConfirmationState:
        return ConfirmationState(
            self.problem,
            self._plan,
            self.trials,
            self._expected_start_seconds(),
            is_cross_checked=self.measurer.cross_checking is not None,
            seconds_left=self.budget.seconds_left,
        )

    def _expected_start_seconds(self) -> float:
        """Return the time that the start of the next fresh server is expected to take.

        It is the mean of those so far, if they took longer than was estimated from the search. Servers start more
        slowly on a busy machine and in containers.
        """
        estimate = estimate_start_seconds(self.trials)
        return max(estimate, statistics.fmean(self._start_seconds)) if self._start_seconds else estimate

    def _comparison_plan(self, point: Point, load: LoadPoint) -> ServerPlan:
        """Return how the candidate of ``point`` is measured at ``load`` for comparison."""
        return plan_server(point, load, self.problem.request_times, start_seconds=self._expected_start_seconds())

    def _tests(self, point: Point) -> CandidateTests | None:
        """Return the tests of the candidate of ``point``; None if other candidates use all of the error."""
        shares = error_shares(self._plan, self.trials, point.trial)
        if shares is None:
            return None
        return CandidateTests(self._state(), point, self._plan.predictions[point.trial], shares)

    def _index(self, number: int) -> int:
        return next(index for index, trial in enumerate(self.trials) if trial.number == number)

    def _first_compared_load(self, point: Point) -> LoadPoint:
        """Return the load of the first comparison of the candidate of ``point``, which may still be to come."""
        measured = [window.load for window in self.trial(point.trial).confirmations]
        return measured[0] if measured else self._plan.predictions[point.trial].first_compared_load

    def _predict_loads(self, candidates: Sequence[Point]) -> None:
        """Add the loads of ``candidates`` to the plan, and store it if it is new.

        The search knows the first of them well, so its loads are near its best one. All loads of the others are
        possible. After a disturbed search, all loads of each candidate are, because its best one may be far too low.
        """
        new = [point for point in candidates if point.trial not in self._plan.predictions]
        added: dict[int, LoadPredictions] = {}
        if new:
            with self.measurer.stopwatch.count("search"):
                model, is_disturbed = self.fit(self._points), was_search_disturbed(self.trials)
                added = {
                    point.trial: predict_loads(
                        point,
                        self._points,
                        self.problem,
                        model,
                        every_load=is_disturbed or point.trial != candidates[0].trial,
                    ).slower(self._disturbances.expected_slowdown)
                    for point in new
                }
            first = candidates[0]
            if first in new:
                predictions = added[first.trial]
                if self._begins_lower(first):
                    predictions = predictions.for_single_load()
                added[first.trial] = begin_likely(self._state(), first, predictions, ERROR_SHARES)
        self._extend_plan(added)

    def _begins_lower(self, point: Point) -> bool:
        """Return whether the first load is one that is likelier to pass, because no time is left for a second one.

        After a disturbed search it is not: in simulations of a machine that is disturbed half of the time, fewer runs
        passed.
        """
        if was_search_disturbed(self.trials):
            return False
        server_plan = self._state().plan_test_server(point, point.load)
        return self.budget.seconds_left() < server_plan.reserved_seconds(LOOKS[0])

    def _correct_loads(self, point: Point) -> None:
        """Correct the loads of an untested candidate in the plan by its comparisons."""
        corrected = corrected_predictions(self._state(), self.trial(point.trial))
        if corrected is not None:
            self._extend_plan({point.trial: corrected})

    def _extend_plan(self, predictions: Mapping[int, LoadPredictions]) -> None:
        """Add ``predictions`` to the plan, and store it if it is new."""
        self._plan = replace(self._plan, predictions={**self._plan.predictions, **predictions})
        if self._plan != self.recorded_plan and self._plan.finalists:
            self.recorded_plan = self._plan
            self.store_plan(self._plan)

    def _measure_in_turn(self, tests: CandidateTests, comparisons: Sequence[ServerPlan]) -> None:
        """Measure the first servers of all candidates in turn, so that a drift of the machine affects all alike.

        If time is short, the last of ``comparisons`` are left out: the verdict needs the time, see
        ``ServerPlan.reserved_seconds``. Servers of an earlier session count.
        """
        index = tests.sequence.current or 0
        reserved_seconds = tests.server_plan(index).reserved_seconds(max(0, LOOKS[0] - tests.servers(index)))
        affordable = self._affordable(comparisons, self.budget.seconds_left() - reserved_seconds)
        for servers in range(1, COMPARED_SERVERS + 1) if affordable else ():
            if tests.servers(index) < servers:
                self.measure(tests.server_plan(index))
            self._add_servers(affordable, servers)

    def _begin_test(self, point: Point) -> None:
        """Measure those of the first servers of the next load that the time allows, unless a candidate has passed."""
        tests = self._tests(point)
        if tests is None or self._has_passed():
            return
        tests.next_load()
        if (index := tests.sequence.current) is None:
            return
        for _ in range(LOOKS[0] - tests.servers(index)):
            if not tests.possible_servers() or not self.measure(tests.server_plan(index)):
                return

    def _has_passed(self) -> bool:
        judged = judge_confirmations(self.trials, self.problem)
        return any(entry.judged.verdict is Verdict.PASS for entry in judged)

    def _affordable(self, comparisons: Sequence[ServerPlan], seconds: float) -> list[ServerPlan]:
        """Return those ``comparisons`` that lack servers, without the last ones if they take over ``seconds``."""
        affordable, needed_seconds = list[ServerPlan](), 0.0
        for server_plan in comparisons:
            missing = COMPARED_SERVERS - self._measured_servers(server_plan)
            if missing <= 0:
                continue
            needed_seconds += missing * server_plan.server_seconds
            if needed_seconds > seconds:
                break
            affordable.append(server_plan)
        return affordable

    def _continue_comparisons(self, compared: Sequence[Point]) -> None:
        """Measure comparisons at better loads, in turn, while there are such loads and time is left."""
        for _ in range(COMPARED_LOADS):
            judged = judge_confirmations(self.trials, self.problem)
            server_plans = list[ServerPlan]()
            for point in compared:
                entries = [entry for entry in judged if entry.point.trial == point.trial]
                if any(entry.error for entry in entries) or self.trial(point.trial).status == "failed":
                    continue
                predictions = self._plan.predictions[point.trial]
                if (load := predictions.next_compared_load(entries, self.problem)) is not None:
                    server_plans.append(self._comparison_plan(point, load))
            self._compare_in_turn(server_plans)

    def _compare_in_turn(self, comparisons: Sequence[ServerPlan]) -> None:
        """Measure the missing servers of those ``comparisons`` for which the time suffices, in turn."""
        affordable = self._affordable(comparisons, self.budget.seconds_left())
        for servers in range(1, COMPARED_SERVERS + 1):
            self._add_servers(affordable, servers)

    def _add_servers(self, comparisons: Sequence[ServerPlan], servers: int) -> None:
        """Measure one more server of each of ``comparisons`` that has fewer than ``servers``."""
        for server_plan in comparisons:
            if self._measured_servers(server_plan) < servers:
                self.measure(server_plan)

    def _measured_servers(self, server_plan: ServerPlan) -> int:
        return len(server_windows(self.trial(server_plan.trial), server_plan.load))


def model_fitter(problem: Problem, options: RunOptions) -> ModelFitter:
    """Return a function that fits a performance model to measured points.

    It returns None where the search did not use the model either: its first use on a machine takes a minute.
    """

    def fit(points: Sequence[Point]) -> PerformanceModel | None:
        latencies = predicted_latencies(problem, points)
        complete = [point for point in points if is_complete(point, *latencies)]
        if options.search != "simulated" or problem.open_loop or not complete:
            return None
        return fit_model(complete, problem, latencies, options.seed)

    return fit
