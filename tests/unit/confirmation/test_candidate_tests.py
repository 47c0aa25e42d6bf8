"""Tests of the state of one candidate's tests: the load at which they begin, and what follows for the next test."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from objectives import model_stats
from objectives.latency_sketch import sketch_latencies
from objectives.load_sequence import ERROR_SHARES, OTHER_ERROR_SHARES
from objectives.metrics import Measurement
from objectives.queue_forecast import PlannedTest
from objectives.server_spread import ServerSpread
from objectives.sla import Sla
from optimizer.config.problem import Problem
from optimizer.confirmation.candidate_tests import CandidateTests, ConfirmationState, begin_likely
from optimizer.confirmation.load_predictions import LoadPredictions, predict_loads
from optimizer.confirmation.plan import ConfirmationPlan
from optimizer.confirmation.rate_forecast import forecast_trial
from optimizer.confirmation.server_plan import START_SECONDS, WINDOWS
from optimizer.core.endpoint import Endpoint
from optimizer.core.load_shapes import RequestTimes
from optimizer.core.trial import ConfirmationWindow, LoadPoint, Trial, latest_points
from tests.conftest import not_none
from tests.random_server import FAST, FASTER, LOADS, RandomServer, searched

ERROR = 0.01
LOWER, HIGHER = LoadPoint(1, 8), LoadPoint(1, 10)
# the higher load is inside the bound by more than the margin of a first candidate, and by less than that of a second
PREDICTIONS = LoadPredictions((LOWER, HIGHER), (-0.5, -0.18), (1000.0, 1100.0))
HIGHER_ONLY_FIRST = LoadPredictions((LOWER, HIGHER), (-0.5, -0.3), (1000.0, 1100.0))  # also for a second candidate


def confirmation_of(trial: Trial, problem: Problem, predictions: LoadPredictions = PREDICTIONS) -> ConfirmationState:
    """Return the state of a confirmation that tests only ``trial``."""
    plan = ConfirmationPlan(ERROR, (trial.number,), {trial.number: predictions})
    return ConfirmationState(problem, plan, [trial], START_SECONDS, is_cross_checked=False)


def make_tests(
    trial: Trial, problem: Problem, shares: tuple[float, ...], predictions: LoadPredictions = PREDICTIONS
) -> CandidateTests:
    return CandidateTests(confirmation_of(trial, problem), latest_points([trial])[0], predictions, shares)


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
    assert PREDICTIONS.loads[not_none(first)] == PREDICTIONS.first_compared_load == HIGHER
    assert PREDICTIONS.loads[not_none(second)] == LOWER


def test_a_load_is_begun_once_a_server_was_measured_to_test_it(trial: Trial, problem: Problem) -> None:
    """A begun test is finished before that of another candidate."""
    tests = make_tests(trial, problem, ERROR_SHARES)
    index = not_none(tests.next_load())
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
    tests = make_tests(trial, problem, OTHER_ERROR_SHARES, HIGHER_ONLY_FIRST)
    assert tests.throughput(1) == pytest.approx(0.4 * 1100.0), "it was tested"
    assert tests.throughput(0) == pytest.approx(1000.0 * 0.4 ** (1 / 3))


CAPACITY = 400.0  # requests per second
BOUND_MS = 60.0


def queue_measurement(rate: float, requests: int, factor: float = 1.0) -> Measurement:
    """Return the measurement of an M/M/1 queue, with latencies that are ``factor`` times as long."""
    mean_ms = factor * 1e3 / (CAPACITY - rate)
    return Measurement(
        rate,
        latency_p50_ms=mean_ms * math.log(2),
        latency_p90_ms=mean_ms * math.log(10),
        latency_p95_ms=mean_ms * math.log(20),
        requests=requests,
        stable=True,
    )


@pytest.fixture
def rate_problem(problem: Problem) -> Problem:
    sla = Sla.from_bounds({"p95": BOUND_MS})
    return replace(problem, sla=sla, open_loop=True, request_times=RequestTimes())


@pytest.fixture
def rate_trial() -> Trial:
    """Return the trial of a search whose highest rate was measured in a lucky moment."""
    measured = {200.0: queue_measurement(200.0, 500), 300.0: queue_measurement(300.0, 700)}
    measured[370.0] = queue_measurement(370.0, 900, factor=0.3)
    overload = Measurement(390.0, latency_p50_ms=200.0, latency_p95_ms=400.0, requests=700, overloaded=True)
    pairs = [(LoadPoint(1, request_rate=rate), one) for rate, one in (measured | {600.0: overload}).items()]
    return Trial(0, FASTER, measurements=tuple(pairs))


def test_at_request_rates_a_test_begins_where_it_is_likely_to_pass(rate_trial: Trial, rate_problem: Problem) -> None:
    points = latest_points([rate_trial])
    best = next(point for point in points if point.load.request_rate == 370)
    predictions = predict_loads(best, points, rate_problem, None)
    expected = dict(zip(predictions.loads, predictions.log_latency_ratios, strict=True))
    assert expected[best.load] > math.log(1.3 * (best.measurement.latency_p95_ms or 0) / BOUND_MS)
    confirmation = confirmation_of(rate_trial, rate_problem, predictions)
    limited = begin_likely(confirmation, best, predictions, ERROR_SHARES)
    begun, by_latency = (
        one.loads[CandidateTests(confirmation, best, one, ERROR_SHARES).sequence.current or 0].request_rate
        for one in (limited, predictions)
    )
    assert begun < by_latency < 370, "near the capacity four servers have too few independent requests"
    assert begun > 200, "and a much lower rate serves less"


def test_the_forecast_of_a_load_shape_is_about_its_mean_rate(rate_trial: Trial, rate_problem: Problem) -> None:
    """Latencies at the same mean rate rise less steeply, because they are those of the bursts."""
    load = LoadPoint(1, request_rate=450.0)
    ratios = []
    for distribution in ("poisson", "spike:4x:10%:1s"):
        times = RequestTimes(distribution, float(distribution != "poisson"))
        forecast = not_none(forecast_trial(rate_trial, replace(rate_problem, request_times=times)))
        ratios.append(forecast.log_latency_ratios([load], rate_problem)[0])
    assert ratios[1] < ratios[0] - 0.1


def test_rates_with_too_few_requests_for_a_pass_are_chosen_by_their_latency(
    rate_trial: Trial, rate_problem: Problem
) -> None:
    """The lowest rate would be the first one otherwise, with the fewest requests."""
    latencies_ms = np.random.default_rng(0).exponential(10.0, 10_000)
    (load, measurement), *_ = rate_trial.measurements
    sketched = replace(measurement, latency_sketch=sketch_latencies(latencies_ms))
    trial, problem = (
        replace(rate_trial, measurements=((load, sketched),)),
        replace(rate_problem, sla=Sla.from_bounds({"p99.99": 2000.0})),
    )
    (point,) = latest_points([trial])
    predictions = predict_loads(point, [point], problem, None)
    confirmation = confirmation_of(trial, problem, predictions)
    tests = CandidateTests(confirmation, point, predictions, ERROR_SHARES)
    assert forecast_trial(trial, problem) is not None
    assert tests.chances([0], ERROR) is None
    assert begin_likely(confirmation, point, predictions, ERROR_SHARES) == predictions


@pytest.mark.parametrize(
    "changes",
    [
        {"open_loop": False},
        {"sla": Sla.from_bounds({"avg": BOUND_MS})},
        {"sla": Sla.from_bounds({"throughput": 100.0})},
    ],
)
def test_without_a_queue_the_predicted_latencies_decide(
    changes: dict[str, Any], rate_trial: Trial, rate_problem: Problem
) -> None:
    assert forecast_trial(rate_trial, rate_problem) is not None
    problem, points = replace(rate_problem, **changes), latest_points([rate_trial])
    assert forecast_trial(rate_trial, problem) is None
    assert all(map(math.isfinite, predict_loads(points[0], points, problem, None).log_latency_ratios))


def test_the_chance_is_that_of_the_model_with_the_fewest_requests(rate_trial: Trial, rate_problem: Problem) -> None:
    """Its latencies are the largest, and its requests are a tenth of all that are sent."""
    alone, pair = list[tuple[LoadPoint, Measurement]](), list[tuple[LoadPoint, Measurement]]()
    for rate in (250.0, 300.0):
        rare, frequent = queue_measurement(rate, 500), queue_measurement(9 * rate / 100, 4500, factor=0.01)
        frequent = replace(frequent, throughput_infer_per_sec=9 * rate)
        models = {"rare": rare, "frequent": frequent}
        both = replace(rare, throughput_infer_per_sec=10 * rate, by_model=model_stats.to_text(models))
        alone.append((LoadPoint(1, request_rate=rate), rare))
        pair.append((LoadPoint(1, request_rate=10 * rate), both))
    chances, ratios = [], []
    for measured in (alone, pair):
        forecast = not_none(forecast_trial(replace(rate_trial, measurements=tuple(measured)), rate_problem))
        loads = [load for load, _ in measured]
        spreads = {"latency-p95": ServerSpread(0.05**2, 3.0)}
        chances.append(forecast.chances(loads, rate_problem, PlannedTest(4, 60.0, ERROR), spreads))
        ratios.append(forecast.log_latency_ratios(loads, rate_problem))
    assert 0 < chances[0][1] < chances[0][0] < 1
    assert chances[1] == pytest.approx(chances[0], rel=0.01)
    assert ratios[1] == pytest.approx(ratios[0], abs=0.01)


def test_in_a_disturbed_run_a_lower_rate_is_likely_to_pass(rate_trial: Trial, rate_problem: Problem) -> None:
    """A verdict adds the usual rise of latency, if other programs were less active in the test than in the run."""
    problem = replace(rate_problem, cpu_count=4)
    points = latest_points([rate_trial])
    predictions = predict_loads(points[1], points, problem, None)
    untested, chances = confirmation_of(rate_trial, problem, predictions), []
    tested = predictions.loads[CandidateTests(untested, points[1], predictions, ERROR_SHARES).sequence.current or 0]
    quiet = replace(queue_measurement(300.0, 1200), other_cpu_share=0.0, measure_seconds=4.0)
    window = ConfirmationWindow(1, tested, quiet, ERROR * ERROR_SHARES[0], latency_slope=1.5)
    trial = rate_trial.with_confirmation(window)
    shares = (0.0, 0.0, 0.0, 0.5, 0.5)
    mixed = tuple((tested, replace(quiet, other_cpu_share=share, measure_seconds=20.0)) for share in shares)
    for search in ((), (Trial(1, FAST, measurements=mixed),)):
        confirmation = replace(untested, trials=[*search, trial])
        tests = CandidateTests(confirmation, points[1], predictions, ERROR_SHARES)
        chances.append(tests.chances(range(len(predictions.loads)), ERROR) or ())
    assert all(disturbed <= usual for usual, disturbed in zip(*chances, strict=True))
    assert sum(chances[1]) < 0.8 * sum(chances[0])
