"""Test the queue of a load whose rate changes on queues with one server and exponential service times."""

from __future__ import annotations

import math

import numpy as np
import pytest

from objectives.arrays import FloatArray
from objectives.periodic_queue import LoadPeriod, periodic_queue
from objectives.queue_forecast import QueueForecast, RateMeasurement
from optimizer.core.load_shapes import DEFAULTS, STEPS, RequestTimes
from optimizer.measure.load_client.arrivals import parse_arrivals

ALLOWED, CAPACITY, PERIODS = 0.05, 1000.0, 600


def periods_of(shape: str, rate: float) -> tuple[FloatArray, FloatArray]:
    """Return the latency in ms of each request of a simulated queue, and the number of its period of a second."""
    arrivals_s = parse_arrivals(shape).plan(rate, PERIODS, seed=1)
    served_s = np.random.default_rng(2).exponential(1 / CAPACITY, len(arrivals_s))
    work_s = np.cumsum(served_s)
    latencies_s = work_s - arrivals_s + np.maximum.accumulate(arrivals_s - work_s + served_s)
    return 1e3 * latencies_s, np.floor(arrivals_s)


def quantile_ms(shape: str, rate: float) -> float:
    return float(np.quantile(periods_of(shape, rate)[0], 1 - ALLOWED))


def shares_of(shape: str) -> tuple[float, ...]:
    return RequestTimes(shape, 1.0).shares


@pytest.mark.parametrize("use", [0.3, 0.6, 0.8])
def test_the_queue_of_a_constant_rate_grows_with_the_inverse_of_the_capacity_that_is_left(use: float) -> None:
    queue = periodic_queue(LoadPeriod((1 / STEPS,) * STEPS, 1.0), ALLOWED)
    growth = queue.log_growth(np.array([use]), np.array([1000.0]))[0]
    assert growth == pytest.approx(math.log(1 / (1 - use)), abs=0.1)


@pytest.mark.parametrize(
    ("shape", "peak_use"), [(shape, use) for shape in DEFAULTS.values() for use in (0.6, 0.9, 1.2)]
)
def test_the_latencies_and_their_variance_are_those_of_a_queue(shape: str, peak_use: float) -> None:
    period = LoadPeriod(shares_of(shape), 1.0)
    use = peak_use / period.peak
    latencies_ms, periods = periods_of(shape, use * CAPACITY)
    quantile = np.quantile(latencies_ms, 1 - ALLOWED)
    over = np.bincount(periods.astype(int), latencies_ms > quantile) / np.bincount(periods.astype(int))
    queue, at = periodic_queue(period, ALLOWED), (np.array([use]), np.array([CAPACITY]))
    expected_ms = 1e3 / CAPACITY * math.log(1 / ALLOWED) * np.exp(queue.log_growth(*at)[0])
    assert math.log(expected_ms) == pytest.approx(math.log(quantile), abs=0.3)
    requests = use * CAPACITY
    seen = requests * np.square(np.diff(over)).mean() / 2 / (ALLOWED * (1 - ALLOWED))
    assert math.log(1 + requests * queue.variance(*at)[0]) == pytest.approx(math.log(seen), abs=0.6)


@pytest.mark.parametrize("shape", DEFAULTS.values())
def test_the_forecast_follows_the_shape_of_the_load(shape: str) -> None:
    period = LoadPeriod(shares_of(shape), 1.0)
    rates = [share * CAPACITY / period.peak for share in (0.5, 0.8, 1.0)]
    measured = [
        RateMeasurement(rate, rate, 100_000, quantile_ms(shape, rate), 1 / math.log(1 / ALLOWED)) for rate in rates
    ]
    other = 0.9 * CAPACITY / period.peak
    forecast = QueueForecast(measured, ALLOWED, period=period)
    expected = math.log(quantile_ms(shape, other))
    assert forecast.log_latency_ms(np.array([other]))[0] == pytest.approx(expected, abs=0.1)
    with_constant_rate = QueueForecast(measured, ALLOWED).log_latency_ms(np.array([1.2 * CAPACITY / period.peak]))[0]
    far = forecast.log_latency_ms(np.array([1.2 * CAPACITY / period.peak]))[0]
    known = math.log(quantile_ms(shape, 1.2 * CAPACITY / period.peak))
    assert abs(far - known) < abs(with_constant_rate - known)


def test_a_recording_has_the_period_of_its_requests() -> None:
    rates = np.array([100.0, 200.0])
    assert LoadPeriod((0.5, 0.5), requests=400).seconds_at(rates).tolist() == [4.0, 2.0]
    assert LoadPeriod((0.25, 0.75), seconds=3.0).seconds_at(rates).tolist() == [3.0, 3.0]


def test_periods_of_a_recording_differ_by_the_service_times_alone() -> None:
    shares, at = shares_of(DEFAULTS["spike"]), (np.array([0.8]), np.array([CAPACITY]))
    drawn, recorded = (
        periodic_queue(LoadPeriod(shares, seconds, requests), ALLOWED).variance(*at)[0]
        for seconds, requests in ((1.0, 0), (0.0, 400))
    )
    assert recorded < 0.8 * drawn
