"""Tests of how long each fresh server is measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from objectives.metrics import Measurement
from objectives.model_stats import to_text
from objectives.sequential import LOOKS
from optimizer.confirmation.server_plan import (
    CROSS_CHECK_START_SECONDS,
    CROSS_CHECK_WINDOWS,
    FEWER_WINDOWS,
    MAX_WINDOW_SECONDS,
    WINDOW_REQUESTS,
    WINDOWS,
    ServerPlan,
    plan_server,
)
from optimizer.core.trial import LoadPoint, Point
from tests.random_server import FAST

PLAN = ServerPlan(0, FAST, LoadPoint(1, 8), window_seconds=2.0, start_seconds=3.0, lead_in_seconds=1.0)


def test_the_time_of_a_server_is_that_of_its_parts() -> None:
    assert PLAN.server_seconds == 3 + 1 + 2 * WINDOWS
    checked = replace(PLAN, is_cross_checked=True)
    assert checked.cross_check_seconds == 2 * CROSS_CHECK_WINDOWS
    assert checked.server_seconds == PLAN.server_seconds + CROSS_CHECK_START_SECONDS + 2 * CROSS_CHECK_WINDOWS


def test_a_server_has_fewer_windows_only_if_the_time_is_short() -> None:
    fewer, needed_seconds = replace(PLAN, windows=FEWER_WINDOWS), 5 * PLAN.server_seconds
    for planned in (PLAN, fewer):
        assert planned.fitting(5, needed_seconds) == PLAN
        assert planned.fitting(5, 0.99 * needed_seconds) == fewer


def test_at_a_request_rate_a_server_has_all_windows_that_the_time_allows() -> None:
    planned = replace(PLAN, load=LoadPoint(1, request_rate=50.0))
    for windows, expected in ((9, WINDOWS), (6, 6), (1, FEWER_WINDOWS)):
        seconds = 5 * replace(planned, windows=windows).server_seconds
        assert planned.fitting(5, seconds + 0.1) == replace(planned, windows=expected)


def test_the_time_of_a_lower_load_is_reserved_for_the_recommendation() -> None:
    fewer = replace(PLAN, windows=FEWER_WINDOWS)
    assert PLAN.reserved_seconds(0) == LOOKS[0] * fewer.server_seconds
    assert PLAN.reserved_seconds(3) - PLAN.reserved_seconds(0) == pytest.approx(3 * PLAN.server_seconds)


@pytest.mark.parametrize(
    ("inferences_per_sec", "seconds"),
    [(80.0, WINDOW_REQUESTS / 20), (0.8, MAX_WINDOW_SECONDS), (0.0, MAX_WINDOW_SECONDS)],
)
def test_a_window_has_enough_requests_of_a_slow_model(inferences_per_sec: float, seconds: float) -> None:
    load = LoadPoint(4, 8)  # four inferences for each request
    point = Point(0, FAST, load, Measurement(inferences_per_sec, latency_p95_ms=10.0, stable=True))
    planned = plan_server(point, load, None, is_cross_checked=True)
    assert planned.window_seconds == seconds
    assert planned.is_cross_checked
    both = to_text({"fast": Measurement(1000.0), "slow": Measurement(inferences_per_sec)})
    with_fast_model = replace(point, measurement=Measurement(1000.0 + inferences_per_sec, by_model=both))
    assert plan_server(with_fast_model, load, None).window_seconds == seconds
