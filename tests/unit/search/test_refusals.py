"""Forecasts of refused requests, on a simulated server with a limited queue and Poisson arrivals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from objectives.metrics import Measurement
from objectives.sla import Sla
from optimizer.config.problem import Problem
from optimizer.config.queue_policy import (
    DEFAULT_PRIORITY_LEVEL,
    MAX_QUEUE_SIZE,
    PRIORITY_LEVELS,
    PRIORITY_POLICY,
    TIMEOUT_ACTION,
    TIMEOUT_US,
)
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import SERVER_PROCESSES, Candidate, FieldValue
from optimizer.core.request_sizes import SizeDistribution, parse_priorities
from optimizer.core.trial import LoadPoint, Point, Trial
from optimizer.search.candidate_selector import CandidateSelector, fit_surrogate
from optimizer.search.refusals import permitted_share
from optimizer.simulator.dynamic_batching_model import DynamicBatchingModel
from optimizer.simulator.fitted_parameters import FittedOverheads
from optimizer.simulator.performance_model import fit_model
from optimizer.simulator.scenario import Overheads, Scenario
from optimizer.simulator.simulate import lognormal_jitter, simulate_many
from tests.simulated_results import measurement_of
from tests.simulation import linear_times, poisson_load

SLA = Sla.from_bounds({"p95": 60.0, "error-rate": 1.0})
SPACE = SearchSpace((8,), (0,), fields={MAX_QUEUE_SIZE: (0, 2, 64)})
PROBLEM = Problem("m", SPACE, 1, 64, sla=SLA, open_loop=True)
NO_LIMIT, SHORT, LONG = SPACE.candidates()


def served(candidate: Candidate, rate: float, missed_share: float = 0.4) -> Measurement:
    """Return the measurement of a simulated server with 3 ms + 0.5 ms a sample."""
    scenario = Scenario(
        candidate,
        poisson_load(rate, 4000, seed=3),
        linear_times(3e-3, 5e-4, 8),
        Overheads(2e-4, 2e-4, 0.0, 5e-5),
        missed_share=missed_share,
    )
    (result,) = simulate_many([scenario], jitter=lognormal_jitter(0.1))
    measured = measurement_of(result, candidate)
    return replace(
        measured,
        requests=result.requests,
        rejected_requests=result.rejected,
        timed_out_requests=result.timed_out,
        failed_requests=0,
    )


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


def test_measured_refusals_add_none_where_none_are_simulated() -> None:
    refused = replace(served(LONG, 300.0), rejected_requests=800)
    refusals = fit_surrogate(PROBLEM, [Trial(0, LONG, ((LoadPoint(1, request_rate=300.0), refused),))]).refusals
    assert refusals.compared == 1
    some, none = refusals.corrected(np.array([0.002, 0.0]))
    assert some > 0.002
    assert none == 0


def test_the_search_tries_the_long_queue_before_the_short_one() -> None:
    trials = [trial(0, NO_LIMIT, 300.0, 600.0)]
    decision = CandidateSelector(PROBLEM).decide(trials, {NO_LIMIT})
    assert decision is not None
    assert decision.candidate == LONG


def test_an_overload_fills_larger_batches_than_the_maximum_concurrency() -> None:
    """The queue holds as many requests as arrive, so batches of 128 occur although 64 requests are in flight."""
    space = SearchSpace((8, 128), (0,), fields={MAX_QUEUE_SIZE: (0, 64)})
    problem = replace(PROBLEM, space=space)
    refusals = fit_surrogate(problem, [trial(0, NO_LIMIT, 300.0, 600.0)]).refusals
    cells = [(candidate, 64) for candidate in space.candidates()]
    none, small, also_none, large = refusals.probabilities(cells, lambda: np.full(4, 1500.0)).tolist()
    assert none == also_none == 1.0
    assert small < 0.1, "1,142 samples/s is the most with batches of 8"
    assert large > 0.8, "a batch of 128 takes 67 ms, 1,910 samples/s"


def test_a_simulation_that_is_wrong_is_not_used() -> None:
    """The server refuses as many requests as it serves, where the simulation expects none to be refused."""
    rates = (20.0, 60.0, 100.0, 150.0)
    calm = trial(1, LONG, *rates)
    refusing = tuple((load, replace(m, rejected_requests=m.requests)) for load, m in calm.measurements)
    wrong = fit_surrogate(PROBLEM, [trial(0, NO_LIMIT, *rates), replace(calm, measurements=refusing)]).refusals
    assert (wrong.compared, wrong.agreed, wrong.is_trusted) == (4, 0, False)
    assert wrong.probabilities([(SHORT, 6)], lambda: np.full(1, 600.0)) == 1.0
    right = fit_surrogate(PROBLEM, [trial(0, NO_LIMIT, *rates), calm]).refusals
    assert (right.compared, right.is_trusted) == (4, True)


def test_the_share_of_missed_notifications_follows_from_the_measurements() -> None:
    """At these rates, two waiting requests are refused only if the batcher sleeps."""
    rates = (20.0, 60.0, 100.0, 150.0)
    awake = Trial(1, SHORT, tuple((LoadPoint(1, request_rate=r), served(SHORT, r, 0.0)) for r in rates))
    cells = [(SHORT, 1)]
    shares = []
    for short_trial in (awake, trial(1, SHORT, *rates)):
        refusals = fit_surrogate(PROBLEM, [trial(0, NO_LIMIT, *rates), short_trial]).refusals
        assert refusals.is_trusted
        shares.append(float(refusals.probabilities(cells, lambda: np.full(1, 60.0))[0]))
    assert shares[0] > 0.5 > shares[1]


def test_a_limit_that_only_the_configuration_has_is_simulated() -> None:
    """No choice of the space concerns the queue."""
    plain = replace(PROBLEM, space=SearchSpace((8,), (0,)))
    (candidate,) = plain.space.candidates()
    measured = Trial(0, candidate, trial(0, NO_LIMIT, 300.0, 600.0).measurements)
    probabilities = []
    for limit in (2, 64):
        problem = replace(plain, queue=((MAX_QUEUE_SIZE, limit),))
        refusals = fit_surrogate(problem, [measured]).refusals
        assert refusals.applies
        assert refusals.compared == 2
        probabilities.append(float(refusals.probabilities([(candidate, 6)], lambda: np.full(1, 600.0))[0]))
    assert probabilities[1] > 0.8
    assert not fit_surrogate(plain, [measured]).refusals.applies


def test_nothing_is_simulated_without_a_limit_or_a_bound_or_with_mixed_sizes() -> None:
    for problem in (
        replace(PROBLEM, sla=Sla.from_bounds({"p95": 60.0})),
        replace(PROBLEM, space=SearchSpace((8,), (0,), fields={MAX_QUEUE_SIZE: (0,)})),
        replace(PROBLEM, request_batch_size=4.0, request_mix=SizeDistribution(((1, 7, 1.0),))),
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


def test_the_levels_of_a_mix_of_priorities_are_simulated() -> None:
    """Only a fifth of the requests has the level with the short queue, so at most a fifth is refused."""
    levels = {PRIORITY_LEVELS: (2,), DEFAULT_PRIORITY_LEVEL: (2,)}
    space = SearchSpace((8,), (0,), fields={**levels, f"{PRIORITY_POLICY}.1.max_queue_size": (0, 1)})
    problem = replace(PROBLEM, space=space, priorities=parse_priorities("1*20|2*80"))
    model = fit_model([Point(0, NO_LIMIT, LoadPoint(1, 8), served(NO_LIMIT, 600.0))], problem, ("latency-p95",), 0)
    assert isinstance(model, DynamicBatchingModel)
    cells = [(candidate, 8) for candidate in space.candidates()]
    unlimited, limited = model.refused_shares(cells, [600.0, 600.0], problem.priorities).tolist()
    assert unlimited == 0
    assert 0.02 < limited < 0.2


def refused_shares(space: SearchSpace, loads: Sequence[int], rates: Sequence[float] | None) -> list[float]:
    """Return the refused shares of the candidates of ``space`` at one load each."""
    times = linear_times(3e-3, 5e-4, 8)
    model = DynamicBatchingModel(lambda _: times, 1, FittedOverheads(2e-4))
    cells = list(zip(space.candidates(), loads, strict=True))
    shares: list[float] = model.refused_shares(cells, rates).tolist()
    return shares


@pytest.mark.parametrize("rates", [None, (500.0, 1000.0)], ids=["closed", "open"])
def test_each_server_process_refuses_as_one_with_its_share_of_the_load(rates: Sequence[float] | None) -> None:
    space = SearchSpace((8,), (0,), fields={MAX_QUEUE_SIZE: (4,), SERVER_PROCESSES: (1, 2)})
    single_share, pair_share = refused_shares(space, (16, 32), rates)
    assert single_share == pair_share > 0


@pytest.mark.parametrize(("levels", "default"), [(1, 1), (2, 2)])
def test_requests_without_a_priority_have_the_policy_of_the_default_level(levels: int, default: int) -> None:
    priority_fields: dict[str, tuple[FieldValue, ...]] = {
        PRIORITY_LEVELS: (levels,),
        DEFAULT_PRIORITY_LEVEL: (default,),
    }
    limit = f"{PRIORITY_POLICY}.{default}.max_queue_size"
    (limited,) = refused_shares(SearchSpace((8,), (0,), fields={**priority_fields, limit: (1,)}), (32,), None)
    (unlimited,) = refused_shares(
        SearchSpace((8,), (0,), fields={**priority_fields, MAX_QUEUE_SIZE: (1,), limit: (0,)}), (32,), None
    )
    assert limited > 0
    assert unlimited == 0
