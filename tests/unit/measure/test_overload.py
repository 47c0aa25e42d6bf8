"""Test the overload detector on simulated servers: it is fast and gives no false alarm."""

from __future__ import annotations

import numpy as np
import pytest

from objectives.arrays import FloatArray
from optimizer.measure.load_client.arrivals import parse_arrivals
from optimizer.measure.load_client.overload import OverloadDetector

PERIOD = 4.0  # seconds of a load shape


def answer_times(planned: FloatArray, service_seconds: float, pause: tuple[float, float] = (0, 0)) -> FloatArray:
    """Simulate a server that serves one request at a time, and none from ``pause[0]`` to ``pause[1]``."""
    answered, free = np.empty_like(planned), 0.0
    for i, arrival in enumerate(planned):
        start = max(free, arrival)
        if pause[0] < start + service_seconds and start < pause[1]:
            start = pause[1]
        free = answered[i] = start + service_seconds
    return answered


def first_overload(
    planned: FloatArray, answered: FloatArray, acceptable_seconds: float, period_seconds: float = 0.0
) -> tuple[float, str]:
    """Return when the detector, called 20 times a second, first reports an overload; inf if never."""
    watch = OverloadDetector(acceptable_seconds, period_seconds)
    for now in np.arange(0, answered[np.isfinite(answered)].max(initial=0) + 5, 0.05):
        sent = planned <= now
        waiting = sent & (answered > now)
        age = now - planned[waiting].min() if waiting.any() else 0.0
        reason = watch.reason(float(now), int(sent.sum()), int((sent & ~waiting).sum()), float(age))
        if reason:
            return float(now), reason
    return np.inf, ""


def poisson_arrivals(rate: float, seconds: float, seed: int) -> FloatArray:
    return np.sort(np.random.default_rng(seed).uniform(0, seconds, round(rate * seconds)))


@pytest.mark.parametrize(("load", "by_seconds"), [(1.03, 3.0), (1.1, 2.1), (1.5, 1.7), (2.0, 1.2), (10.0, 0.7)])
def test_an_overload_is_detected_within_three_seconds(load: float, by_seconds: float) -> None:
    planned = np.arange(0, 6, 1 / 1000)
    reported_seconds, reason = first_overload(planned, answer_times(planned, load / 1000), acceptable_seconds=0.02)
    assert reported_seconds <= by_seconds
    assert reason.startswith("overloaded: ")


@pytest.mark.parametrize("seed", range(5))
def test_a_busy_server_is_not_overloaded(seed: int) -> None:
    """The queue is long and varies at 95 % of the capacity, but it is stationary."""
    planned = poisson_arrivals(1000, 20, seed)
    assert first_overload(planned, answer_times(planned, 0.95e-3), acceptable_seconds=0.05)[0] == np.inf


def test_a_pause_that_the_server_recovers_from_is_not_an_overload() -> None:
    planned = np.arange(0, 5, 1 / 1000)
    answered = answer_times(planned, 0.2e-3, pause=(2.0, 2.4))
    assert answered.max() - planned.max() < 0.01
    assert first_overload(planned, answered, acceptable_seconds=0.02)[0] == np.inf


def test_a_stopped_server_is_an_overload() -> None:
    planned = np.arange(0, 5, 1 / 1000)
    answered = np.where(planned < 2, planned + 0.001, np.inf)
    assert first_overload(planned, answered, acceptable_seconds=0.02)[0] == pytest.approx(2.55, abs=0.06)


def test_a_few_slow_requests_are_not_an_overload() -> None:
    planned = np.arange(0, 5, 1 / 1000)
    answered = planned + np.where(np.arange(len(planned)) % 500 == 0, 3.0, 0.005)
    assert first_overload(planned, answered, acceptable_seconds=0.02)[0] == np.inf


def test_a_slow_model_is_not_an_overload() -> None:
    """Each request takes 2 s and all run in parallel, so even old requests are no overload."""
    planned = np.arange(0, 8, 1 / 50)
    assert first_overload(planned, planned + 2.0, acceptable_seconds=2.0)[0] == np.inf


def spike_arrivals(rate: float, seconds: float, seed: int = 0) -> FloatArray:
    arrivals = parse_arrivals(f"spike:8x:20%:{PERIOD:g}s")
    return arrivals.plan(rate, seconds, seed)


@pytest.mark.parametrize("seed", range(3))
def test_a_burst_that_the_server_recovers_from_is_not_an_overload(seed: int) -> None:
    """The rate is 1.87 times the capacity in the burst of 0.8 s, and the queue grows to 0.7 s."""
    planned = spike_arrivals(560, 20, seed)
    answered = answer_times(planned, 1e-3)
    assert 0.6 < (answered - planned).max() < 0.9
    assert first_overload(planned, answered, 0.02, PERIOD)[0] == np.inf
    assert first_overload(planned, answered, 0.02)[0] < np.inf, "a steady load with this queue is overloaded"


@pytest.mark.parametrize(("load", "by_seconds"), [(1.3, 12.0), (2.0, 6.5), (10.0, 4.8)])
def test_a_mean_rate_above_the_capacity_is_an_overload(load: float, by_seconds: float) -> None:
    planned = spike_arrivals(1000, 40)
    reported_seconds, reason = first_overload(planned, answer_times(planned, load / 1000), 0.02, PERIOD)
    assert reported_seconds <= by_seconds
    assert reason.startswith("overloaded: ")


def test_a_stopped_server_is_an_overload_after_a_period() -> None:
    planned = spike_arrivals(500, 30)
    answered = np.where(planned < 5, planned + 0.001, np.inf)
    assert 5 + PERIOD < first_overload(planned, answered, 0.02, PERIOD)[0] < 5 + PERIOD + 1
