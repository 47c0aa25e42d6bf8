"""What surrounds the computation, recovered from servers that the simulator plays."""

from __future__ import annotations

import pytest

from objectives.metrics import Measurement
from objectives.sla import Constraint
from optimizer.batcher.simulator import (
    ClosedLoop,
    Overheads,
    ServiceTimes,
    Window,
    exponential_delays,
    lognormal_jitter,
    simulate,
)
from optimizer.problem import Problem
from optimizer.search.server_model import fit
from optimizer.search.surroundings import gap_limit_s, way_s
from optimizer.space import Space
from optimizer.trial import Candidate, LoadPoint, Point
from tests.played_server import told

SPACE = Space((8, 32), (0, 500), ("none",), (1, 2))
PROBLEM = Problem("m", SPACE, 1, 32, constraints=(Constraint("latency-p95", 20.0),))
LOADS = (4, 8, 16, 32)
WINDOW = Window(warm_up_requests=500, requests=8000)


def served(candidate: Candidate, load: int, way_s: float, gap_s: float, hop_s: float, seed: int) -> Point:
    """By a server with 1 ms + 0.05 ms a sample."""
    service = ServiceTimes.linear(1e-3, 5e-5, candidate.max_batch_size, candidate.instance_count, contention=0.5)
    overheads = Overheads(way_s / 2, way_s / 2, wake_s=hop_s, dispatch_s=hop_s)
    jitter, gaps = lognormal_jitter(0.1, seed), exponential_delays(gap_s, seed)
    s = simulate(candidate, ClosedLoop(load), service, overheads, jitter=jitter, gaps_s=gaps, window=WINDOW)
    return Point(candidate.instance_count, candidate, LoadPoint(1, load), told(s, candidate))


@pytest.mark.parametrize(("gap_s", "hop_s"), [(1e-4, 2e-5), (1e-6, 1e-4)])
def test_gaps_and_wake_ups_are_known_from_what_was_measured(gap_s: float, hop_s: float) -> None:
    """What is predicted of candidates that were not measured is what they would do."""
    known = [
        served(candidate, load, 2e-4, gap_s, hop_s, seed=7)
        for candidate in (Candidate(8, True), Candidate(32, True))
        for load in LOADS
    ]
    model = fit(known, PROBLEM, "latency-p95")
    others = [(Candidate(8, True, 500), load) for load in LOADS] + [(Candidate(8), load) for load in LOADS]
    for (candidate, load), predicted in zip(others, model.simulate(others), strict=True):
        truth = served(candidate, load, 2e-4, gap_s, hop_s, seed=8).measurement
        assert predicted.throughput_infer_per_s == pytest.approx(truth.throughput_infer_per_sec, rel=0.1)
        assert 1e3 * predicted.latency_p95_s == pytest.approx(truth.latency_p95_ms, rel=0.15)


def way(load: int, way_ms: float) -> Point:
    measured = Measurement(1e3 * load / (way_ms + 6.0), queue_ms=1.0, compute_infer_ms=5.0)
    return Point(0, Candidate(8, True), LoadPoint(1, load), measured)


def test_the_way_is_that_of_requests_that_do_not_wait_for_each_other() -> None:
    assert way_s([way(4, 0.9), way(8, 1.3), way(32, 3.7)]) == pytest.approx(1e-3, rel=0.1)
    assert way_s([way(4, 0.9)]) == pytest.approx(0.9e-3)


def test_where_nothing_is_told_there_is_no_way() -> None:
    assert way_s([Point(0, Candidate(8), LoadPoint(1, 4), Measurement(100.0))]) is None


def test_a_gap_leaves_room_for_the_highest_rate() -> None:
    quick = Point(0, Candidate(8), LoadPoint(2, 4), Measurement(20_000.0))
    assert gap_limit_s([quick, quick]) == pytest.approx(0.95e-4)
