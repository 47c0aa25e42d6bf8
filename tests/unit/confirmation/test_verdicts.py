"""Tests of the verdict on a load of a run beyond that on its SLA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from objectives.sequential import LOOKS
from objectives.sla import Sla, Verdict
from optimizer.config.problem import Problem
from optimizer.confirmation.verdicts import MAX_RISE, judge_load
from optimizer.core.endpoint import Endpoint
from optimizer.core.trial import ConfirmationWindow, LoadPoint, Trial
from tests.random_server import BOUND_MS, FASTER, RandomServer

ERROR = 0.005
WINDOWS = 9
LIMIT_MS = MAX_RISE * BOUND_MS


def trial_with_rises(load: LoadPoint, rises_ms: Sequence[float]) -> Trial:
    """Return a trial whose test has a server for each of ``rises_ms``.

    The mean latency rises linearly by so much from the middle of the first third of the windows to that of the last.
    """
    window = RandomServer().measure(Endpoint("", FASTER), LoadPoint(1, 8))
    windows = [
        ConfirmationWindow(number, load, replace(window, latency_avg_ms=5 + rise_ms * place / 6), ERROR)
        for number, rise_ms in enumerate(rises_ms, 1)
        for place in range(WINDOWS)
    ]
    return Trial(1, FASTER, confirmations=tuple(windows))


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
