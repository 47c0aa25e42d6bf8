"""Overload is told from a simulated server: soon where it is there, never where it is not."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from optimizer.open_loop.overload import OverloadWatch

Floats = npt.NDArray[np.float64]


def answer_times(planned: Floats, service_seconds: float, pause: tuple[float, float] = (0, 0)) -> Floats:
    """Of a server that serves one request after the other, and none from ``pause[0]`` to ``pause[1]``."""
    answered, free = np.empty_like(planned), 0.0
    for i, arrival in enumerate(planned):
        start = max(free, arrival)
        if pause[0] < start + service_seconds and start < pause[1]:
            start = pause[1]
        free = answered[i] = start + service_seconds
    return answered


def first_told(planned: Floats, answered: Floats, acceptable_seconds: float) -> tuple[float, str]:
    """When the watch first says so, looking twenty times a second; inf where it never does."""
    watch = OverloadWatch(acceptable_seconds)
    for now in np.arange(0, answered[np.isfinite(answered)].max(initial=0) + 5, 0.05):
        sent = planned <= now
        waiting = sent & (answered > now)
        age = now - planned[waiting].min() if waiting.any() else 0.0
        reason = watch.reason(float(now), int(sent.sum()), int((sent & ~waiting).sum()), float(age))
        if reason:
            return float(now), reason
    return np.inf, ""


def poisson(rate: float, seconds: float, seed: int) -> Floats:
    return np.sort(np.random.default_rng(seed).uniform(0, seconds, round(rate * seconds)))


@pytest.mark.parametrize(("load", "by_seconds"), [(1.03, 3.0), (1.1, 2.1), (1.5, 1.7), (2.0, 1.2), (10.0, 0.7)])
def test_an_overload_is_told_within_three_seconds(load: float, by_seconds: float) -> None:
    planned = np.arange(0, 6, 1 / 1000)
    told, reason = first_told(planned, answer_times(planned, load / 1000), acceptable_seconds=0.02)
    assert told <= by_seconds
    assert reason.startswith("overloaded: ")


@pytest.mark.parametrize("seed", range(5))
def test_a_busy_server_is_not_overloaded(seed: int) -> None:
    """At 95 % of its capacity its queue is long and varies, but it does not grow without end."""
    planned = poisson(1000, 20, seed)
    assert first_told(planned, answer_times(planned, 0.95e-3), acceptable_seconds=0.05)[0] == np.inf


def test_a_pause_that_is_made_good_is_not_an_overload() -> None:
    planned = np.arange(0, 5, 1 / 1000)
    answered = answer_times(planned, 0.2e-3, pause=(2.0, 2.4))
    assert answered.max() - planned.max() < 0.01
    assert first_told(planned, answered, acceptable_seconds=0.02)[0] == np.inf


def test_a_server_that_stops_is_told() -> None:
    planned = np.arange(0, 5, 1 / 1000)
    answered = np.where(planned < 2, planned + 0.001, np.inf)
    assert first_told(planned, answered, acceptable_seconds=0.02)[0] == pytest.approx(2.55, abs=0.06)


def test_a_few_requests_that_take_long_are_not_an_overload() -> None:
    planned = np.arange(0, 5, 1 / 1000)
    answered = planned + np.where(np.arange(len(planned)) % 500 == 0, 3.0, 0.005)
    assert first_told(planned, answered, acceptable_seconds=0.02)[0] == np.inf


def test_a_slow_model_has_its_time() -> None:
    """Each answer takes 2 s, and as many as come are computed at once: no overload, however old they are."""
    planned = np.arange(0, 8, 1 / 50)
    assert first_told(planned, planned + 2.0, acceptable_seconds=2.0)[0] == np.inf
