"""The selection of candidates with request rates, on a simulated server with Poisson arrivals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from objectives.metrics import Measurement
from objectives.sla import Sla
from optimizer.config.problem import Problem
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import Candidate
from optimizer.core.request_sizes import parse_size_distribution
from optimizer.core.trial import LoadPoint, Point, Trial
from optimizer.measure.load_search import LoadSearchRules, RateSearch
from optimizer.search.candidate_selector import CandidateSelector
from optimizer.simulator.predicted_metrics import as_closed_loop
from optimizer.simulator.scenario import Overheads
from optimizer.simulator.simulate import lognormal_jitter
from tests.simulated_results import measurement_of
from tests.simulation import linear_times, poisson_load, simulate

SLA = Sla.from_bounds({"p95": 25.0})
SPACE = SearchSpace((1, 8, 32), ("off", 0, 500, 2000), ("none", "max/2"), (1, 2, 3))
PROBLEM = Problem("m", SPACE, 1, 64, sla=SLA, open_loop=True)


def served(candidate: Candidate, rate: float) -> Measurement:
    """Return the measurement of a simulated server with 3 ms + 0.3 ms a sample and a contention of 0.5."""
    service = linear_times(3e-3, 3e-4, max(candidate.max_batch_size, 1), 8, contention=0.5)
    overheads = Overheads(2e-4, 2e-4, 0.0, 5e-5)
    load = poisson_load(rate, 3000)
    s = simulate(candidate, load, service, overheads, jitter=lognormal_jitter(0.1))
    return measurement_of(s, candidate)


def meets(measurement: Measurement) -> bool:
    return SLA.is_met(measurement)


def swept(number: int, candidate: Candidate, start: float) -> Trial:
    """Return a trial with a load sweep like the tuner's."""
    measured: tuple[tuple[LoadPoint, Measurement], ...] = ()
    rules = LoadSearchRules(1, 64, SLA, first_load=start, max_loads=5)
    while (load := RateSearch(measured, rules).next_load()) is not None:
        measured = (*measured, (load, served(candidate, load.request_rate)))
    return Trial(number, candidate, measured)


def best_rate(trials: list[Trial]) -> float:
    return max(load.request_rate for trial in trials for load, m in trial.measurements if meets(m))


def highest_rate(candidate: Candidate) -> float:
    low, high = 50.0, 5000.0
    while high > 1.02 * low:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if meets(served(candidate, middle)) else (low, middle)
    return low


def test_a_few_deployments_find_the_highest_rate() -> None:
    trials = [swept(0, Candidate(1), 100), swept(1, Candidate(32, True), 300)]
    guide = CandidateSelector(PROBLEM)
    for number in range(2, 6):
        decision = guide.decide(trials, {trial.candidate for trial in trials})
        assert decision is not None
        trials.append(swept(number, decision.candidate, best_rate(trials)))
    highest = max(map(highest_rate, SPACE.candidates()))
    assert best_rate(trials) > 1.05 * best_rate(trials[:2])
    assert best_rate(trials) >= 0.85 * highest


def test_a_rate_is_known_by_its_requests_in_flight() -> None:
    measured = Measurement(500.0, latency_avg_ms=20.0, latency_p95_ms=30.0, requests=500, stable=True)
    point = Point(0, Candidate(8), LoadPoint(2, request_rate=250.0), measured)
    (seen,) = as_closed_loop(
        [point], replace(PROBLEM, space=replace(SPACE, max_batch_size=(8,), request_batch_size=2))
    )
    assert seen.load == LoadPoint(2, 5)  # 250 requests of 2 samples a second, 20 ms each
    assert seen.measurement == measured


def test_requests_of_a_mix_are_known_by_the_samples_in_flight() -> None:
    measured = Measurement(500.0, latency_avg_ms=20.0, latency_p95_ms=30.0, requests=500, stable=True)
    point = Point(0, Candidate(8), LoadPoint(2.5, request_rate=200.0), measured)
    (seen,) = as_closed_loop(
        [point], replace(PROBLEM, request_batch_size=2.5, request_mix=parse_size_distribution("1|4"))
    )
    assert seen.load == LoadPoint(1, 10)


@pytest.mark.parametrize("measured", [Measurement(500.0, latency_p95_ms=30.0), Measurement(latency_avg_ms=20.0)])
def test_measurements_without_requests_in_flight_are_left_out(measured: Measurement) -> None:
    assert as_closed_loop([Point(0, Candidate(8), LoadPoint(1, request_rate=500.0), measured)], PROBLEM) == []


def test_the_queue_of_an_overloaded_server_counts_as_the_most_that_is_measured() -> None:
    measured = Measurement(500.0, latency_avg_ms=3000.0, latency_p95_ms=5000.0)
    (seen,) = as_closed_loop([Point(0, Candidate(8), LoadPoint(1, request_rate=900.0), measured)], PROBLEM)
    assert seen.load.concurrency == PROBLEM.max_concurrency
