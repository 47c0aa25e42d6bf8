"""Test the forecast on a queue with one server and exponential service times (M/M/1), whose latency is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from objectives.queue_forecast import PlannedTest, QueueForecast, RateMeasurement
from objectives.sequential import LOOKS
from objectives.server_spread import ServerSpread

ALLOWED, CAPACITY = 0.05, 400.0
SPREAD, FIRST_LOOK = ServerSpread(0.03**2, 6.0), PlannedTest(LOOKS[0], 4.0, 0.005)
OVERLOAD = RateMeasurement(2 * CAPACITY, CAPACITY, 500)


def latency_ms(rate: float) -> float:
    return 1e3 * math.log(1 / ALLOWED) / (CAPACITY - rate)


def measured(rate: float, requests: int = 1_000_000, factor: float = 1.0) -> RateMeasurement:
    """Return a measurement whose quantile is ``factor`` times the one in the long run."""
    return RateMeasurement(rate, rate, requests, factor * latency_ms(rate), 1 / math.log(1 / ALLOWED))


def chance(forecast: QueueForecast, rate: float, bound_ms: float, test: PlannedTest = FIRST_LOOK) -> float:
    return float(forecast.chances(np.array([rate]), bound_ms, test, SPREAD)[0])


KNOWN = QueueForecast([measured(200.0), measured(280.0), measured(340.0), OVERLOAD], ALLOWED)


def test_latencies_at_other_rates_follow_from_the_capacity() -> None:
    rates = np.array([120.0, 240.0, 310.0, 360.0])
    expected = np.log([latency_ms(rate) for rate in rates])
    assert KNOWN.log_latency_ms(rates) == pytest.approx(expected, abs=0.15)


@pytest.mark.parametrize(
    ("highest", "log_fall", "low", "high"),
    # the shares of simulated tests that pass are in benchmarks/rate_runs.md
    [
        (320.0, 0.0, 0.0, 0.05),
        (320.0, 0.4, 0.2, 0.7),
        (320.0, 1.0, 0.9, 1.0),
        (360.0, 0.4, 0.0, 0.05),
        (360.0, 1.0, 0.8, 1.0),
    ],
)
def test_the_chance_is_about_the_share_of_tests_that_pass(
    highest: float, log_fall: float, low: float, high: float
) -> None:
    """The bound is met up to the rate ``highest``. At the tested rate the log of latency is lower by ``log_fall``."""
    rate = CAPACITY - (CAPACITY - highest) * math.exp(log_fall)
    assert low <= chance(KNOWN, rate, latency_ms(highest)) <= high


def test_a_test_of_more_servers_is_likelier_to_pass_near_the_capacity() -> None:
    later = PlannedTest(LOOKS[1], 4.0, 0.005)
    bound_ms = 1.6 * latency_ms(320.0)
    assert chance(KNOWN, 320.0, bound_ms, later) > chance(KNOWN, 320.0, bound_ms) + 0.05


def test_a_short_measurement_near_the_capacity_is_not_believed() -> None:
    """It is often too good, because a server that starts without a queue has seen no long one."""
    lucky, lucky_ms = measured(390.0, requests=800, factor=0.1), 0.1 * latency_ms(390.0)
    forecast = QueueForecast([measured(200.0, 500), measured(300.0, 600), lucky, OVERLOAD], ALLOWED)
    assert forecast.log_latency_ms(np.array([390.0]))[0] > math.log(2 * lucky_ms)
    assert chance(forecast, 390.0, 2 * lucky_ms) < 0.1


def test_an_overload_shows_the_capacity() -> None:
    known = [measured(150.0), measured(200.0)]
    rates = np.array([300.0])
    free, limited = (QueueForecast(points, ALLOWED) for points in (known, [*known, RateMeasurement(900, 305, 500)]))
    assert free.log_latency_ms(rates)[0] < limited.log_latency_ms(rates)[0]


def test_a_share_of_the_requests_has_a_shorter_memory() -> None:
    """Two equal queues show twice as many long queues."""
    bound_ms = 1.6 * latency_ms(320.0)
    points = [measured(200.0), measured(280.0), measured(340.0), OVERLOAD]
    assert chance(QueueForecast(points, ALLOWED, queues=2), 320.0, bound_ms) > chance(KNOWN, 320.0, bound_ms)
