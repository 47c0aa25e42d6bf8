"""Tests of the verdict on a load of a run beyond that on its SLA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from objectives.metrics import Measurement
from objectives.periodic_queue import LoadPeriod
from objectives.queue_memory import QueuedLoad
from objectives.sequential import LOOKS
from objectives.sla import Sla, Verdict
from optimizer.config.problem import ModelKind, Problem
from optimizer.confirmation.verdicts import MAX_RISE, judge_load, queued_load
from optimizer.core.endpoint import Endpoint
from optimizer.core.load_shapes import RequestTimes
from optimizer.core.trial import ConfirmationWindow, LoadPoint, Trial
from tests.random_server import BOUND_MS, FASTER, RandomServer

ERROR = 0.005
WINDOWS = 9
LIMIT_MS = MAX_RISE * BOUND_MS


def trial_with_rises(load: LoadPoint, rises_ms: Sequence[float]) -> Trial:
    """Return a trial whose test has a server for each of ``rises_ms``, after a comparison in which nothing rises.

    The mean latency rises linearly by so much from the middle of the first third of the windows to that of the last.
    """
    window = RandomServer().measure(Endpoint("", FASTER), LoadPoint(1, 8))
    windows = [
        ConfirmationWindow(number, load, replace(window, latency_avg_ms=5 + rise_ms * place / 6), ERROR)
        for number, rise_ms in enumerate(rises_ms, 1)
        for place in range(WINDOWS)
    ]
    compared = [ConfirmationWindow(0, load, replace(window, latency_avg_ms=5))] * WINDOWS
    return Trial(1, FASTER, confirmations=(*compared, *windows))


@pytest.mark.parametrize(
    ("rises_ms", "verdict"),
    [
        ([0.99 * LIMIT_MS] * LOOKS[0], Verdict.PASS),
        ([1.01 * LIMIT_MS] * LOOKS[0], Verdict.UNDECIDED),
        ([-LIMIT_MS] * LOOKS[0], Verdict.PASS),
        ([0.1 * LIMIT_MS, *[1.4 * LIMIT_MS] * (LOOKS[0] - 1)], Verdict.UNDECIDED),
        ([0.0, *[5 * LIMIT_MS] * (LOOKS[0] - 1)], Verdict.PASS),
    ],
)
def test_a_request_rate_does_not_pass_if_the_mean_latency_rises_on_each_server(
    problem: Problem, rises_ms: Sequence[float], verdict: Verdict
) -> None:
    """A rate above the capacity makes a queue grow on all servers. In a closed loop, no queue can grow."""
    problem = replace(
        problem, sla=Sla.from_bounds({"p95": BOUND_MS, "p99": 10 * BOUND_MS})
    )  # the tightest bound counts
    for load, expected in ((LoadPoint(1, request_rate=1000.0), verdict), (LoadPoint(1, 8), Verdict.PASS)):
        trial = trial_with_rises(load, rises_ms)
        judged = judge_load([trial], trial, load, problem, ERROR)
        assert judged.verdict is expected
        assert ("the rate may exceed the capacity" in judged.reason) is (expected is Verdict.UNDECIDED)


def searched_trial(answered: float, load: LoadPoint) -> Trial:
    """Return a trial that was tested at ``load``, after ``answered`` requests per second in an overload."""
    overload = LoadPoint(1, request_rate=8e5), Measurement(answered, overloaded=True)
    met = LoadPoint(1, request_rate=500.0), Measurement(510.0, stable=True)
    return replace(trial_with_rises(load, [0.0] * LOOKS[0]), measurements=(met, overload))


@pytest.mark.parametrize(("answered", "verdict"), [(8e5, Verdict.PASS), (4.01e5, Verdict.UNDECIDED)])
def test_near_the_capacity_a_request_rate_needs_longer_measurements(
    problem: Problem, answered: float, verdict: Verdict
) -> None:
    """There the queue changes more slowly, so fewer of the same requests are independent."""
    load = LoadPoint(1, request_rate=4e5)
    for times, expected in ((RequestTimes(), verdict), (None, Verdict.PASS)):
        trial = searched_trial(answered, load)
        judged = judge_load([trial], trial, load, replace(problem, request_times=times), ERROR)
        assert judged.verdict is expected


@pytest.mark.parametrize("statistic", ["p50", "p80", "p90", "p99"])
def test_the_memory_of_the_queue_counts_for_each_percentile(problem: Problem, statistic: str) -> None:
    load = LoadPoint(1, request_rate=4e5)
    problem = replace(problem, sla=Sla.from_bounds({statistic: BOUND_MS}))
    effective = []
    for times in (None, RequestTimes()):
        trial = searched_trial(4.01e5, load)
        judged = judge_load([trial], trial, load, replace(problem, request_times=times), ERROR)
        effective.append(judged.effective_requests)
    assert 0 < 2 * effective[1] < effective[0]


@pytest.mark.parametrize(("answered", "verdict"), [(8e5, Verdict.PASS), (4.01e5, Verdict.UNDECIDED)])
def test_the_memory_of_the_queue_counts_for_a_mean_latency(
    problem: Problem, answered: float, verdict: Verdict
) -> None:
    load, trial = LoadPoint(1, request_rate=4e5), searched_trial(answered, LoadPoint(1, request_rate=4e5))
    problem = replace(problem, sla=Sla.from_bounds({"avg": 6.5}))  # the windows have a mean of 5 ms
    for times, expected in ((RequestTimes(), verdict), (None, Verdict.PASS)):
        judged = judge_load([trial], trial, load, replace(problem, request_times=times), ERROR)
        assert judged.verdict is expected


def test_a_rate_far_above_the_capacity_fails(problem: Problem) -> None:
    """Most latencies miss the bound, so no memory of a queue that meets it explains them."""
    load, bound_ms = LoadPoint(1, request_rate=4e5), BOUND_MS / 4
    trial = searched_trial(4.01e5, load)
    steady = replace(problem, request_times=RequestTimes(), sla=Sla.from_bounds({"p95": bound_ms}))
    assert judge_load([trial], trial, load, steady, ERROR).verdict is Verdict.FAIL


def test_a_load_shape_and_a_recording_have_the_memory_of_their_mean_rate(problem: Problem) -> None:
    load = LoadPoint(1, request_rate=300.0)
    spike, recording = RequestTimes("spike:4x:10%:1s", 1.0), RequestTimes("recorded", 0.0, 600, (0.25, 0.75))
    trial = searched_trial(900.0, load)
    for times, seconds in ((spike, 1.0), (recording, 2.0)):
        problem = replace(problem, request_times=times)
        period = LoadPeriod(times.shares, times.period_seconds, times.recorded_requests)
        assert problem.load_period == period
        assert queued_load([trial], trial, load, problem) == QueuedLoad(300.0, 900.0, period, seconds)


def test_the_capacity_is_the_highest_rate_that_the_configuration_answered(problem: Problem) -> None:
    load, steady = LoadPoint(1, request_rate=300.0), replace(problem, request_times=RequestTimes())
    for answered, capacity in ((900.0, 900.0), (200.0, 500.0)):
        trial = searched_trial(answered, load)
        assert queued_load([trial], trial, load, steady) == QueuedLoad(300.0, capacity), "not 510 of 500"
    others = [
        (LoadPoint(1, 8), steady),
        (load, problem),
        (load, replace(problem, request_times=RequestTimes("recorded"))),  # of a rate that is not known
        (load, replace(steady, kind=ModelKind.STREAMING)),
    ]
    for other, its_problem in others:
        assert queued_load([trial], trial, other, its_problem) is None
