"""Tests of the state of one candidate's tests: the load at which they begin, and what follows for the next test."""

from __future__ import annotations

import pytest

from objectives.load_sequence import ERROR_SHARES, OTHER_ERROR_SHARES
from objectives.metrics import Measurement
from optimizer.config.problem import Problem
from optimizer.confirmation.candidate_tests import CandidateTests, ConfirmationState
from optimizer.confirmation.load_predictions import LoadPredictions
from optimizer.confirmation.plan import ConfirmationPlan
from optimizer.confirmation.server_plan import START_SECONDS, WINDOWS
from optimizer.core.endpoint import Endpoint
from optimizer.core.trial import ConfirmationWindow, LoadPoint, Trial, latest_points
from tests.random_server import FASTER, LOADS, RandomServer, searched

ERROR = 0.01
LOWER, HIGHER = LoadPoint(1, 8), LoadPoint(1, 10)
# the higher load is inside the bound by more than the margin of a first candidate, and by less than that of a second
PREDICTIONS = LoadPredictions((LOWER, HIGHER), (-0.5, -0.18), (1000.0, 1100.0))
HIGHER_ONLY_FIRST = LoadPredictions((LOWER, HIGHER), (-0.5, -0.3), (1000.0, 1100.0))  # also for a second candidate


def make_tests(trial: Trial, problem: Problem, shares: tuple[float, ...]) -> CandidateTests:
    plan = ConfirmationPlan(ERROR, (trial.number,), {trial.number: PREDICTIONS})
    confirmation = ConfirmationState(problem, plan, [trial], START_SECONDS, is_cross_checked=False)
    return CandidateTests(confirmation, latest_points([trial])[0], PREDICTIONS, shares)


@pytest.fixture
def trial() -> Trial:
    return searched(RandomServer(), {FASTER: LOADS[FASTER]})[0]


def with_server(trial: Trial, load: LoadPoint, error: float) -> Trial:
    """Return the trial with the windows of a fresh server, whose test errs with ``error``; 0 for a comparison."""
    server = RandomServer()
    server.deployed.append(FASTER)
    for window in server.measure_windows(Endpoint("", FASTER), load, 0.5, WINDOWS):
        trial = trial.with_confirmation(ConfirmationWindow(1, load, window, error))
    return trial


def test_the_tests_begin_at_the_load_at_which_the_candidate_is_compared(trial: Trial, problem: Problem) -> None:
    """The test of a second candidate has less error, so that it begins further inside the bound."""
    first, second = (
        make_tests(trial, problem, shares).sequence.current for shares in (ERROR_SHARES, OTHER_ERROR_SHARES)
    )
    assert first is not None
    assert second is not None
    assert PREDICTIONS.loads[first] == PREDICTIONS.first_compared_load == HIGHER
    assert PREDICTIONS.throughput_infer_per_sec[second] == PREDICTIONS.rival_throughput_infer_per_sec
    assert PREDICTIONS.loads[second] == LOWER


def test_a_load_is_begun_once_a_server_was_measured_to_test_it(trial: Trial, problem: Problem) -> None:
    """A begun test is finished before that of another candidate."""
    tests = make_tests(trial, problem, ERROR_SHARES)
    index = tests.next_load()
    assert index is not None
    assert not tests.state(index).is_begun
    compared = make_tests(with_server(trial, HIGHER, error=0.0), problem, ERROR_SHARES)
    assert not compared.state(index).is_begun, "a comparison is no test"
    tested = make_tests(with_server(trial, HIGHER, ERROR * ERROR_SHARES[0]), problem, ERROR_SHARES)
    assert tested.next_load() == index
    assert tested.state(index).is_begun
    assert not tested.state(0).is_begun, "it is another load"


def test_one_slow_server_at_another_load_does_not_hide_what_a_load_serves(trial: Trial, problem: Problem) -> None:
    """The servers of a comparison count as well for a load that was not tested yet."""
    for number, load in ((1, LOWER), (2, LOWER), (3, HIGHER)):
        share = 0.4 if load == HIGHER else 1.0
        served = share * PREDICTIONS.throughput_infer_per_sec[PREDICTIONS.loads.index(load)]
        error = ERROR * OTHER_ERROR_SHARES[0] if load == HIGHER else 0.0
        window = Measurement(served, latency_p95_ms=10.0)
        trial = trial.with_confirmation(ConfirmationWindow(number, load, window, error))
    plan = ConfirmationPlan(ERROR, (trial.number,), {trial.number: PREDICTIONS})
    confirmation = ConfirmationState(problem, plan, [trial], START_SECONDS, is_cross_checked=False)
    tests = CandidateTests(confirmation, latest_points([trial])[0], HIGHER_ONLY_FIRST, OTHER_ERROR_SHARES)
    assert tests.throughput(1) == pytest.approx(0.4 * 1100.0), "it was tested"
    assert tests.throughput(0) == pytest.approx(1000.0 * 0.4 ** (1 / 3))
