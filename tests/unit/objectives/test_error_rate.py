"""Test the verdict on the share of failed requests, and that failed requests count as late."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from objectives.confidence import UNSERVED_EXCESS, SequentialTest, fewest_requests
from objectives.intervals import gain_ratio, throughput_interval
from objectives.latency_sketch import sketch_latencies
from objectives.metrics import METRICS, Measurement
from objectives.pooled_windows import pool_measurements
from objectives.sequential import LOOKS
from objectives.server_spread import server_spreads
from objectives.sla import DEFAULT_CONFIDENCE, Sla, Verdict
from objectives.verdict import SlaVerdict, count_misses, judge_sla
from tests.conftest import latency_window

BOUND_MS = 20.0
SLA = Sla.from_bounds({"p95": BOUND_MS, "error-rate": 0.5})


def window(rng: np.random.Generator, failed: int) -> Measurement:
    """Return a window of half a second in which 2,000 requests are served; hardly any takes more than BOUND_MS."""
    served = latency_window(rng.gamma(9.0, 1.0, 2000), 4000.0, BOUND_MS)
    return replace(served, rejected_requests=failed, timed_out_requests=0, failed_requests=0)


SERVED = replace(window(np.random.default_rng(0), 0), throughput_infer_per_sec=100.0)
NOTHING_SERVED = Measurement(
    0.0,
    goodput_infer_per_sec=0.0,
    requests=0,
    rejected_requests=9,
    timed_out_requests=0,
    failed_requests=0,
    stable=True,
)


def judged(servers: list[list[Measurement]], sla: Sla = SLA) -> SlaVerdict:
    return judge_sla(servers, sla, server_spreads([servers], sla.bounded_latencies), SequentialTest(0.01, 9))


def judge(failed: Sequence[int], sla: Sla = SLA, windows: int = 8) -> SlaVerdict:
    """Return the verdict on servers with these numbers of failed requests in each of their windows."""
    rng = np.random.default_rng(0)
    return judged([[window(rng, count) for _ in range(windows)] for count in failed], sla)


def test_no_failures_in_many_requests_pass() -> None:
    verdict = judge([0] * 6)
    assert verdict.verdict is Verdict.PASS
    between = 3 * (0.4 * 0.005) ** 2 / (3 + 5)  # the prior, since the servers are equal
    expected = 6 * 0.005 * 0.995 / (between + 0.005 * 0.995 / (8 * 2000))
    assert verdict.effective_by_metric["error-rate"] == pytest.approx(expected)


def test_many_failures_fail_with_the_interval() -> None:
    verdict = judge([100] * 6)
    assert verdict.verdict is Verdict.FAIL
    assert verdict.reason.startswith("error-rate <= 0.5 %: ")
    assert "of the requests fail (allowed: 0.5 %)" in verdict.reason
    assert verdict.excess > 0


def test_a_share_at_the_bound_is_undecided() -> None:
    verdict = judge([10] * 6)
    assert verdict.verdict is Verdict.UNDECIDED
    assert "are needed" not in verdict.reason, "the requests are enough"


def test_the_interval_contains_the_share_of_all_requests() -> None:
    """1,000 of 3,000 requests fail in each window."""
    sla = Sla.from_bounds({"error-rate": 0.5})
    reason = judge([1000] * 6, sla).reason
    low, high = map(float, re.findall(r"([\d.]+) %", reason)[1:3])
    assert low < 100 / 3 < high < 40
    assert judge_sla([[NOTHING_SERVED] * 8] * 6, sla, {}, SequentialTest(0.01)).verdict is Verdict.FAIL


def test_few_requests_do_not_prove_a_small_rate() -> None:
    verdict = judge([0] * 4, Sla.from_bounds({"error-rate": 0.001}), windows=2)
    assert verdict.verdict is Verdict.UNDECIDED
    assert verdict.reason.endswith(f"at least {fewest_requests(1e-5, 0.01):,} are needed")
    assert "are needed" not in judge([0] * 3, Sla.from_bounds({"error-rate": 0.001}), windows=2).reason


def test_servers_that_differ_carry_less_information() -> None:
    alike, different = (judge(failed).effective_by_metric["error-rate"] for failed in ([6] * 6, [0, 0, 0, 0, 0, 36]))
    assert different < 0.1 * alike


def test_uncounted_failures_are_undecided() -> None:
    plain = replace(SERVED, rejected_requests=None, timed_out_requests=None, failed_requests=None)
    verdict = judged([[plain] * 8] * 6)
    assert verdict.verdict is Verdict.UNDECIDED
    assert pool_measurements([plain] * 8).errors is None
    assert "failed requests were not counted" in verdict.reason


def test_failed_requests_are_late() -> None:
    """Hardly any of the served requests is late, but 8 % of all fail."""
    sla = Sla.from_bounds({"p95": BOUND_MS})
    assert judge([0] * 6, sla).verdict is Verdict.PASS
    assert judge([174] * 6, sla).verdict is Verdict.FAIL
    rng = np.random.default_rng(0)
    counts = count_misses([[window(rng, 500)]], BOUND_MS, 0.95)
    assert counts.requests[0].tolist() == [2500]
    assert counts.share == pytest.approx(0.2, abs=0.02)
    assert counts.distance == -np.inf


def test_a_bound_that_failed_requests_nearly_miss_is_undecided() -> None:
    """4.8 % fail, and the others are far inside the bound. More than 5 % may fail on the next server."""
    verdict = judge([101] * 6, Sla.from_bounds({"p95": 30.0}))
    assert verdict.verdict is Verdict.UNDECIDED
    assert verdict.slow_share.high > 0.05


@pytest.mark.parametrize("differing", [0.1, 0.3, 0.5])
def test_at_the_bound_a_pass_is_as_rare_as_planned_if_servers_differ(differing: float) -> None:
    """The mean share of failed requests is 1 %, which is the bound. The servers differ by up to a half of it."""
    random, passed, runs = np.random.default_rng(0), 0, 800
    sla, test = Sla.from_bounds({"error-rate": 1.0}), SequentialTest(0.005, 4)
    for _ in range(runs):
        shares = 0.01 * random.gamma(differing**-2, differing**2, (4, 1))
        failed = random.binomial(1000, np.broadcast_to(shares, (4, 8)))
        servers = [[counted(int(count)) for count in counts] for counts in failed]
        passed += judge_sla(servers, sla, {}, test).verdict is Verdict.PASS
    assert passed / runs <= 0.0025, "half of the error of 0.5 % is spent at the first look"


@pytest.mark.parametrize("failed", [0, 1, 2])
def test_a_share_far_inside_passes_on_the_first_servers(failed: int) -> None:
    measured = [[counted(failed)] * 8] * 4
    verdict = judge_sla(measured, Sla.from_bounds({"error-rate": 1.0}), {}, SequentialTest(0.005))
    assert verdict.verdict is Verdict.PASS
    assert verdict.excess < 0, "a higher load may be tested"


def counted(failed: int) -> Measurement:
    """Return a window of 1000 requests."""
    return Measurement(
        1000.0,
        requests=1000 - failed,
        rejected_requests=failed,
        timed_out_requests=0,
        failed_requests=0,
        stable=True,
    )


def test_the_bound_applies_to_a_higher_quantile_of_the_served_requests() -> None:
    served_window = window(np.random.default_rng(0), 60)  # 2.9 % failed
    p95 = METRICS["latency-p95"]
    assert p95.value(served_window) == served_window.latency_p95_ms
    assert p95.bounded_value(served_window) == pytest.approx(METRICS["latency-p97.85"].value(served_window))
    assert p95.bounded_value(replace(served_window, rejected_requests=0)) == served_window.latency_p95_ms
    assert p95.bounded_value(replace(served_window, rejected_requests=2000)) == np.inf


def test_pooled_windows_have_all_failures() -> None:
    rng = np.random.default_rng(0)
    pooled = pool_measurements([window(rng, 3), window(rng, 5)])
    assert (pooled.requests, pooled.rejected_requests, pooled.timed_out_requests, pooled.errors) == (4000, 8, 0, 8)


def test_windows_that_served_nothing_lower_the_throughput() -> None:
    sla = Sla.from_bounds({"throughput": 90.0})
    half = [[SERVED, NOTHING_SERVED] * 4] * 6
    spreads = server_spreads([half], sla.bounded_latencies)
    assert judge_sla([[SERVED] * 8] * 6, sla, spreads, SequentialTest(0.01, 9)).verdict is Verdict.PASS
    assert judged(half, sla).verdict is Verdict.FAIL
    interval = throughput_interval(half, spreads["throughput"], DEFAULT_CONFIDENCE)
    assert interval.low < 50 < interval.high < 90
    ratio = gain_ratio(half, [[SERVED] * 8] * 6, "throughput", spreads["throughput"], DEFAULT_CONFIDENCE)
    assert ratio is not None
    assert ratio.estimate == pytest.approx(0.5)


def test_a_throughput_far_below_its_bound_lacks_throughput_unless_a_server_served_nothing() -> None:
    """A lower load serves even less; only a server that served nothing may serve more there."""
    sla = Sla.from_bounds({"throughput": 300.0})
    all_serve, one_does_not = (
        judged(servers, sla) for servers in ([[SERVED] * 8] * 6, [[SERVED] * 8] * 5 + [[NOTHING_SERVED] * 8])
    )
    assert (all_serve.verdict, all_serve.lacks_throughput) == (Verdict.FAIL, True)
    assert (one_does_not.verdict, one_does_not.lacks_throughput) == (Verdict.FAIL, False)


@pytest.mark.parametrize(
    ("bound", "count", "unserved", "verdict"),
    [
        (1.0, 6, 1, Verdict.UNDECIDED),
        (300.0, 6, 1, Verdict.FAIL),
        (1.0, 6, 6, Verdict.FAIL),
        (300.0, 3, 1, Verdict.UNDECIDED),
        (1.0, 3, 3, Verdict.UNDECIDED),
    ],
)
def test_a_throughput_fails_only_if_its_interval_is_below_the_bound(
    bound: float, count: int, unserved: int, verdict: Verdict
) -> None:
    """A server that served nothing is no PASS, but the mean over servers may still meet the bound."""
    sla = Sla.from_bounds({"throughput": bound})
    servers = [[SERVED] * 8] * (count - unserved) + [[NOTHING_SERVED] * 8] * unserved
    result = judged(servers, sla)
    assert (result.verdict, result.excess, result.is_promising) == (verdict, UNSERVED_EXCESS, False)
    spreads = server_spreads([servers], sla.bounded_latencies)
    interval = throughput_interval(servers, spreads["throughput"], DEFAULT_CONFIDENCE)
    assert interval.low == 0
    assert interval.high < bound or verdict is Verdict.UNDECIDED
    assert gain_ratio(servers, servers, "throughput", spreads["throughput"], DEFAULT_CONFIDENCE) is None


def test_a_mean_latency_is_not_met_where_nothing_was_served() -> None:
    sla = Sla.from_bounds({"avg": 20.0})
    assert judged([[SERVED] * 8] * 6, sla).verdict is Verdict.PASS
    verdict = judged([[SERVED] * 7 + [NOTHING_SERVED]] * 6, sla)
    assert verdict.verdict is Verdict.UNDECIDED
    assert "no request was served in 6 of 48 windows" in verdict.reason
    assert not verdict.is_promising
    assert verdict.excess > 0, "a lower load is tested"


def test_an_overloaded_server_misses_a_bound_on_the_error_rate() -> None:
    """The client stopped early, so that unanswered requests are not among the failed ones."""
    overloaded = replace(SERVED, overloaded=True, stable=False)
    sla = Sla.from_bounds({"error-rate": 0.5})
    for count, verdict in ((LOOKS[0], Verdict.FAIL), (LOOKS[0] - 1, Verdict.UNDECIDED)):
        result = judged([[overloaded] * 8] * count, sla)
        assert result.verdict is verdict
        assert "the server was overloaded, and requests stayed unanswered" in result.reason
        assert not result.is_promising
        assert judged([[*[SERVED] * 7, overloaded]] * count, sla).verdict is verdict


def test_a_window_that_served_nothing_keeps_the_percentiles_of_the_others() -> None:
    served_window = window(np.random.default_rng(0), 3)
    pooled = pool_measurements([served_window, NOTHING_SERVED])
    assert pooled.latency_sketch
    assert pooled.latency_p95_ms == pytest.approx(served_window.latency_p95_ms, rel=0.01)
    assert (pooled.requests, pooled.errors) == (served_window.requests, 12)
    assert (pool_measurements([NOTHING_SERVED]).requests, pool_measurements([NOTHING_SERVED]).errors) == (None, 9)


def test_a_window_that_served_nothing_has_only_its_failures() -> None:
    counts = count_misses([[NOTHING_SERVED]], BOUND_MS, 0.95)
    assert (counts.requests[0].tolist(), counts.misses[0].tolist(), counts.tail[0].tolist()) == ([9], [9], [9])


def test_a_bound_on_the_inter_token_latency_counts_the_requests_that_have_one() -> None:
    """Half of the served requests have one response: 3.8 % of those with an inter-token latency or no answer fail."""
    served_window = window(np.random.default_rng(0), 40)
    streamed = replace(served_window, itl_sketch=sketch_latencies(np.random.default_rng(0).gamma(9.0, 1.0, 1000)))
    p95, p97 = METRICS["itl-p95"], METRICS["itl-p97"]
    assert p95.bounded_value(streamed) == pytest.approx(METRICS["itl-p98.8"].value(streamed))
    assert p97.bounded_value(streamed) == np.inf
