"""Test the loads and windows of a confirmation whose bounds or objective only tune's own client measures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from objectives.metrics import METRICS
from objectives.sequential import LOOKS
from objectives.sla import Sla
from objectives.verdict import needed_requests
from optimizer.config.search_space import Problem
from optimizer.core.trial import Candidate, LoadPoint, Point
from optimizer.results.confirmation_plan import LONGEST_SECONDS, WINDOWS, confirmation_candidate, load_ladder
from tests.conftest import known_problem, measurement

POINT = Point(0, Candidate(16, True), LoadPoint(1, 8), measurement(800.0, 10.0))
GOODPUT = replace(known_problem(), objectives=(METRICS["goodput"],))
ERRORS = replace(known_problem(), sla=Sla.from_bounds({"p95": 20.0, "error-rate": 0.1}))


@pytest.mark.parametrize(("problem", "is_capped"), [(known_problem(), False), (GOODPUT, True), (ERRORS, True)])
def test_no_load_above_the_best_one_is_tested_if_only_measurements_show_its_limit(
    problem: Problem, is_capped: bool
) -> None:
    ladder = load_ladder(POINT, [POINT], problem, None)
    assert (ladder.loads[-1] == POINT.load) is is_capped
    assert ladder.loads[0].concurrency < POINT.load.concurrency


def test_windows_are_long_enough_for_a_high_percentile() -> None:
    usual = confirmation_candidate(POINT, POINT.load, None, sla=Sla.from_bounds({"p95": 20.0}))
    assert usual.seconds == confirmation_candidate(POINT, POINT.load, None).seconds == 0.5
    slow = replace(POINT, measurement=measurement(100.0, 10.0))
    (bound,) = high = Sla.from_bounds({"p99.9": 20.0})
    requests = LOOKS[0] * WINDOWS * 100.0 * confirmation_candidate(slow, POINT.load, None, sla=high).seconds
    assert requests == pytest.approx(needed_requests(bound))
    longest = confirmation_candidate(slow, POINT.load, None, sla=Sla.from_bounds({"p99.99": 20.0}))
    assert longest.seconds == LONGEST_SECONDS
