"""Test the loads and windows of a confirmation whose bounds or objective only tune's own client measures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from objectives.metrics import METRICS
from objectives.sequential import LOOKS
from objectives.sla import Sla
from objectives.verdict import needed_requests
from optimizer.config.search_space import Problem
from optimizer.confirmation.load_predictions import predict_loads
from optimizer.confirmation.server_plan import LONGEST_SECONDS, WINDOWS, plan_server
from optimizer.core.trial import Candidate, LoadPoint, Point
from tests.conftest import known_problem, measurement

POINT = Point(0, Candidate(16, True), LoadPoint(1, 8), measurement(800.0, 10.0))
GOODPUT = replace(known_problem(), objectives=(METRICS["goodput"],))
ERRORS = replace(known_problem(), sla=Sla.from_bounds({"p95": 20.0, "error-rate": 0.1}))


@pytest.mark.parametrize(("problem", "is_capped"), [(known_problem(), False), (GOODPUT, True), (ERRORS, True)])
def test_no_load_above_the_best_one_is_tested_if_only_measurements_show_its_limit(
    problem: Problem, is_capped: bool
) -> None:
    predictions = predict_loads(POINT, [POINT], problem, None)
    assert (predictions.loads[-1] == POINT.load) is is_capped
    assert predictions.loads[0].concurrency < POINT.load.concurrency


def test_windows_are_long_enough_for_a_high_percentile() -> None:
    usual = plan_server(POINT, POINT.load, None, sla=Sla.from_bounds({"p95": 20.0}))
    assert usual.window_seconds == plan_server(POINT, POINT.load, None).window_seconds == 0.5
    slow = replace(POINT, measurement=measurement(100.0, 10.0))
    (bound,) = high = Sla.from_bounds({"p99.9": 20.0})
    requests = LOOKS[0] * WINDOWS * 100.0 * plan_server(slow, POINT.load, None, sla=high).window_seconds
    assert requests == pytest.approx(needed_requests(bound))
    longest = plan_server(slow, POINT.load, None, sla=Sla.from_bounds({"p99.99": 20.0}))
    assert longest.window_seconds == LONGEST_SECONDS
