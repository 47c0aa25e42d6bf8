"""Forecasts of refused requests, on a simulated server with a limited queue and Poisson arrivals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from objectives.metrics import Measurement
from objectives.sla import Sla
from optimizer.config.queue_policy import MAX_QUEUE_SIZE, TIMEOUT_ACTION, TIMEOUT_US
from optimizer.config.search_space import Problem, SearchSpace
from optimizer.core.trial import Candidate, LoadPoint, Trial
from optimizer.search.candidate_selector import CandidateSelector, fit_surrogate
from optimizer.search.refusals import permitted_share
from optimizer.simulator.scenario import Overheads, Scenario
from optimizer.simulator.simulate import lognormal_jitter, simulate_many
from tests.played_server import simulated_measurement
from tests.simulation import linear_times, poisson_load

SLA = Sla.from_bounds({"p95": 60.0, "error-rate": 1.0})
SPACE = SearchSpace((8,), (0,), fields={MAX_QUEUE_SIZE: (0, 2, 64)})
PROBLEM = Problem("m", SPACE, 1, 64, sla=SLA, open_loop=True)
NO_LIMIT, SHORT, LONG = SPACE.candidates()


def served(candidate: Candidate, rate: float, missed_share: float = 0.45) -> Measurement:
    """Return the measurement of a simulated server with 3 ms + 0.5 ms a sample."""
    scenario = Scenario(
        candidate,
        poisson_load(rate, 4000, seed=3),
        linear_times(3e-3, 5e-4, 8),
        Overheads(2e-4, 2e-4, 0.0, 5e-5),
        missed_share=missed_share,
    )
    (result,) = simulate_many([scenario], jitter=lognormal_jitter(0.1))
    measured = simulated_measurement(result, candidate)
    refused = {"rejected_requests": result.rejected, "timed_out_requests": result.timed_out}
    return replace(measured, requests=result.requests, failed_requests=0, **refused)


def trial(number: int, candidate: Candidate, *rates: float) -> Trial:
    return Trial(number, candidate, tuple((LoadPoint(1, request_rate=r), served(candidate, r)) for r in rates))


def test_a_failed_request_misses_the_bound_on_a_percentile_too() -> None:
    assert permitted_share(PROBLEM) == 0.01
    assert permitted_share(replace(PROBLEM, sla=Sla.from_bounds({"p99": 9.0, "error-rate": 5.0}))) == pytest.approx(
        0.01
    )
    assert permitted_share(replace(PROBLEM, sla=Sla.from_bounds({"p95": 9.0}))) == 0


def test_a_short_queue_is_expected_to_refuse_too_many() -> None:
    """Only the simulation tells the limits apart, because none of them has been measured."""
    refusals = fit_surrogate(PROBLEM, [trial(0, NO_LIMIT, 300.0, 600.0)]).refusals
    cells = [(NO_LIMIT, 6), (SHORT, 6), (LONG, 6)]
    none, short, long = refusals.probabilities(cells, lambda: np.full(3, 600.0)).tolist()
    assert none == 1.0
    assert short < 0.1
    assert long > 0.8
    assert refusals.is_trusted


def test_the_search_tries_the_long_queue_before_the_short_one() -> None:
    trials = [trial(0, NO_LIMIT, 300.0, 600.0)]
    decision = CandidateSelector(PROBLEM).decide(trials, {NO_LIMIT})
    assert decision is not None
    assert decision.candidate == LONG


def test_a_simulation_that_is_wrong_is_not_used() -> None:
    """The server refuses nothing where the simulation expects most requests to be refused."""
    rates = (20.0, 60.0, 100.0, 150.0)
    calm = trial(1, SHORT, *rates)
    quiet = tuple(
        (load, replace(served(NO_LIMIT, load.request_rate), rejected_requests=0)) for load, _ in calm.measurements
    )
    wrong = fit_surrogate(PROBLEM, [trial(0, NO_LIMIT, *rates), replace(calm, measurements=quiet)]).refusals
    assert (wrong.compared, wrong.is_trusted) == (4, False)
    assert wrong.probabilities([(SHORT, 6)], lambda: np.full(1, 600.0)) == 1.0
    right = fit_surrogate(PROBLEM, [trial(0, NO_LIMIT, *rates), calm]).refusals
    assert (right.compared, right.is_trusted) == (4, True)


def test_nothing_is_simulated_without_a_limit_or_a_bound() -> None:
    for problem in (
        replace(PROBLEM, sla=Sla.from_bounds({"p95": 60.0})),
        replace(PROBLEM, space=SearchSpace((8,), (0,), fields={MAX_QUEUE_SIZE: (0,)})),
    ):
        assert not fit_surrogate(problem, [trial(0, NO_LIMIT, 300.0)]).refusals.applies


def test_a_timeout_that_only_delays_refuses_nothing() -> None:
    fields = {TIMEOUT_US: (5000,), TIMEOUT_ACTION: ("REJECT", "DELAY")}
    problem = replace(PROBLEM, space=SearchSpace((8,), (0,), fields=fields))
    rejecting, delaying = problem.space.candidates()
    refusals = fit_surrogate(problem, [trial(0, NO_LIMIT, 300.0, 900.0)]).refusals
    expired, delayed = refusals.probabilities([(rejecting, 30), (delaying, 30)], lambda: np.full(2, 1000.0)).tolist()
    assert expired < 0.5 < delayed


def test_refusals_of_a_closed_loop_are_simulated_at_its_concurrency() -> None:
    problem = replace(PROBLEM, open_loop=False)
    trials = [Trial(0, NO_LIMIT, ((LoadPoint(1, 4), served(NO_LIMIT, 500.0)),))]
    refusals = fit_surrogate(problem, trials).refusals
    within, beyond = refusals.probabilities([(LONG, 16), (SHORT, 32)], lambda: np.zeros(2)).tolist()
    assert within > 0.8
    assert beyond < 0.1
