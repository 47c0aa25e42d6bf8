"""The guide where requests come at a rate: on a server that the simulator plays under Poisson arrivals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from objectives.metrics import Measurement
from objectives.sla import Constraint
from optimizer.batcher.simulator import OpenLoop, Overheads, ServiceTimes, lognormal_jitter, simulate
from optimizer.load.rate_sweep import next_rate
from optimizer.load.sweep import SweepRules
from optimizer.problem import Problem
from optimizer.requests.sizes import parse_dim
from optimizer.search.guide import Guide
from optimizer.search.in_flight import in_flight
from optimizer.space import Space
from optimizer.trial import Candidate, LoadPoint, Point, Trial
from tests.played_server import told

BOUND = Constraint("latency-p95", 25.0)
SPACE = Space((1, 8, 32), ("off", 0, 500, 2000), ("none", "max/2"), (1, 2, 3))
PROBLEM = Problem("m", SPACE, 1, 64, constraints=(BOUND,), open_loop=True)


def served(candidate: Candidate, rate: float) -> Measurement:
    """By a server with 3 ms + 0.3 ms a sample whose instances take half of each other's time."""
    service = ServiceTimes.linear(3e-3, 3e-4, max(candidate.max_batch_size, 1), 8, contention=0.5)
    overheads = Overheads(2e-4, 2e-4, 0.0, 5e-5)
    load = OpenLoop.poisson(rate, 3000)
    s = simulate(candidate, load, service, overheads, jitter=lognormal_jitter(0.1))
    return told(s, candidate)


def meets(measurement: Measurement) -> bool:
    return BOUND.violation(measurement) <= 0


def swept(number: int, candidate: Candidate, start: float) -> Trial:
    """As the tuner measures it."""
    measured: tuple[tuple[LoadPoint, Measurement], ...] = ()
    rules = SweepRules(1, 64, (BOUND,), start=start, max_loads=5)
    while (load := next_rate(measured, rules)) is not None:
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
    guide = Guide(PROBLEM)
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
    (seen,) = in_flight([point], replace(PROBLEM, space=replace(SPACE, max_batch_size=(8,), request_batch_size=2)))
    assert seen.load == LoadPoint(2, 5)  # 250 requests of 2 samples a second, 20 ms each
    assert seen.measurement == measured


def test_requests_of_a_mix_are_known_by_the_samples_in_flight() -> None:
    measured = Measurement(500.0, latency_avg_ms=20.0, latency_p95_ms=30.0, requests=500, stable=True)
    point = Point(0, Candidate(8), LoadPoint(2.5, request_rate=200.0), measured)
    (seen,) = in_flight([point], replace(PROBLEM, request_batch_size=2.5, request_mix=parse_dim("1|4")))
    assert seen.load == LoadPoint(1, 10)


@pytest.mark.parametrize("measured", [Measurement(500.0, latency_p95_ms=30.0), Measurement(latency_avg_ms=20.0)])
def test_what_tells_no_requests_in_flight_is_left_out(measured: Measurement) -> None:
    assert in_flight([Point(0, Candidate(8), LoadPoint(1, request_rate=500.0), measured)], PROBLEM) == []


def test_the_queue_of_an_overloaded_server_counts_as_the_most_that_is_measured() -> None:
    measured = Measurement(500.0, latency_avg_ms=3000.0, latency_p95_ms=5000.0)
    (seen,) = in_flight([Point(0, Candidate(8), LoadPoint(1, request_rate=900.0), measured)], PROBLEM)
    assert seen.load.concurrency == PROBLEM.max_concurrency
