"""Tests of the verdict on an SLA from windows on fresh servers."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from scipy import special

from objectives.arrays import FloatArray
from objectives.confidence import SequentialTest
from objectives.intervals import (
    UNBOUNDED,
    ConfidenceInterval,
    GainRatio,
    gain_ratio,
    latency_interval_ms,
    order_statistic_levels,
    throughput_interval,
)
from objectives.metrics import Measurement
from objectives.model_stats import to_text
from objectives.pooled_windows import pool_measurements
from objectives.queue_memory import QueuedLoad
from objectives.sequential import LOOKS
from objectives.server_spread import ServerSpread, has_log, metric_logs, server_spreads
from objectives.sla import DEFAULT_CONFIDENCE, Sla, Verdict
from objectives.verdict import (
    MAX_EXCLUDED_SHARE,
    SlaVerdict,
    count_misses,
    counted_windows,
    is_disturbed,
    is_overloaded,
    judge_sla,
)
from tests.conftest import latency_window

BOUND_MS = 20.0
ERROR = SequentialTest(0.01, 28)
SEVERITY = (Verdict.PASS, Verdict.UNDECIDED, Verdict.FAIL)
P95 = Sla.from_bounds({"p95": BOUND_MS})


def window(middle_ms: float, seed: int, throughput: float = 1000.0, *, sketched: bool = True) -> Measurement:
    """Return a window of 500 requests with lognormal latencies; 4.8 % are over the bound at a middle of 12.2 ms."""
    latencies_ms = np.random.default_rng(seed).lognormal(math.log(middle_ms), 0.3, 500)
    return measured_window(latencies_ms, throughput, sketched=sketched)


def measured_window(latencies_ms: FloatArray, throughput: float = 1000.0, *, sketched: bool) -> Measurement:
    measured = latency_window(latencies_ms, throughput, BOUND_MS)
    return measured if sketched else replace(measured, requests_over_ms="", latency_sketch="")


def servers(middle_ms: float, count: int = LOOKS[0], *, sketched: bool = True) -> list[list[Measurement]]:
    return [[window(middle_ms, 10 * server + n, sketched=sketched) for n in range(8)] for server in range(count)]


def judged(measured: list[list[Measurement]], sla: Sla = P95, test: SequentialTest = ERROR) -> SlaVerdict:
    return judge_sla(measured, sla, server_spreads([measured], sla.bounded_latencies), test)


@pytest.mark.parametrize(
    ("middle_ms", "verdict"), [(9.0, Verdict.PASS), (12.0, Verdict.UNDECIDED), (18.0, Verdict.FAIL)]
)
@pytest.mark.parametrize("sketched", [True, False])
def test_the_share_of_slow_requests_decides(middle_ms: float, verdict: Verdict, sketched: bool) -> None:
    assert judged(servers(middle_ms, sketched=sketched)).verdict is verdict


@pytest.mark.parametrize("sketched", [True, False])
def test_a_bound_holds_for_each_model_under_load(sketched: bool) -> None:
    """A model with few requests is not hidden by one with many."""

    def both(many: Measurement, middle_ms: float, seed: int) -> Measurement:
        latencies_ms = np.random.default_rng(seed).lognormal(math.log(middle_ms), 0.3, 100)
        few = measured_window(latencies_ms, 200.0, sketched=sketched)
        return replace(many, by_model=to_text({"many": many, "few": few}))

    def windows(middle_ms: float) -> list[list[Measurement]]:
        many = servers(9.0, sketched=sketched)
        return [[both(one, middle_ms, 100 * i + n) for n, one in enumerate(server)] for i, server in enumerate(many)]

    passed = judged(windows(9.0))
    assert passed.verdict is Verdict.PASS
    assert passed.effective_requests < judged(servers(9.0)).effective_requests, "those of the model with few requests"
    failed = judged(windows(18.0))
    assert failed.verdict is Verdict.FAIL
    assert failed.reason.startswith("p95 <= 20 ms: 'few': ")


def test_each_model_under_load_has_its_part_of_a_request_rate() -> None:
    """Two models with the same requests, each at half of the rate, have the memory of one at that half."""

    def judged_at(windows: list[list[Measurement]], rate: float) -> SlaVerdict:
        spreads = server_spreads([windows], P95.bounded_latencies)
        return judge_sla(windows, P95, spreads, ERROR, queued=QueuedLoad(rate, rate))

    alone = servers(9.0)
    both = [[replace(one, by_model=to_text({"a": one, "b": one})) for one in server] for server in alone]
    effective = judged_at(alone, 5e4).effective_requests
    assert effective < judged(alone).effective_requests / 2
    assert judged_at(both, 1e5).effective_requests == pytest.approx(effective)
    nothing = Measurement(0.0, requests=0, stable=True)
    silent = [[replace(nothing, by_model=to_text({"a": nothing, "b": nothing}))] * 8] * 4
    assert judged_at(silent, 1e5).verdict is Verdict.UNDECIDED


@pytest.mark.parametrize("metric", ["p50", "p90", "p95", "p99", "avg"])
def test_every_latency_metric_can_be_judged(metric: str) -> None:
    far = {"p50": 20.0, "p90": 30.0, "p95": 35.0, "p99": 60.0, "avg": 20.0}[metric]
    sla = Sla.from_bounds({f"latency-{metric}": far})
    assert judged(servers(10.0), sla).verdict is Verdict.PASS
    assert judged(servers(60.0), sla).verdict is Verdict.FAIL


def test_a_throughput_is_judged_as_a_mean_over_servers() -> None:
    assert judged(servers(9.0), Sla.from_bounds({"throughput": 800.0})).verdict is Verdict.PASS
    assert judged(servers(9.0), Sla.from_bounds({"throughput": 1300.0})).verdict is Verdict.FAIL
    near = judged(servers(9.0), Sla.from_bounds({"throughput": 950.0}))
    assert near.verdict is Verdict.UNDECIDED
    assert near.is_promising, "more servers narrow the interval"


def with_average(average_ms: float, requests: int = 500) -> Measurement:
    return Measurement(1000.0, average_ms, requests=requests, stable=True)


def test_an_average_is_that_of_all_requests() -> None:
    """One window in eight has a pause, so that the geometric mean of the windows is 6.7 ms and their median 5 ms."""
    measured = [[*[with_average(5.0)] * 7, with_average(50.0)]] * 28
    assert (
        pool_measurements([measurement for windows in measured for measurement in windows]).latency_avg_ms == 10.625
    )
    assert judged(measured, Sla.from_bounds({"avg": 10.0})).verdict is Verdict.UNDECIDED
    assert judged(measured, Sla.from_bounds({"avg": 16.0})).verdict is Verdict.PASS
    interval = latency_interval_ms(measured, "latency-avg", 0.0, ServerSpread(0.01, 9.0), DEFAULT_CONFIDENCE)
    assert math.sqrt(interval.low * interval.high) == pytest.approx(10.625)


def test_a_window_with_few_requests_has_a_small_part_in_the_average() -> None:
    measured = [[*[with_average(5.0, 1000)] * 7, with_average(500.0, 10)]] * 28
    assert pool_measurements(measured[0]).latency_avg_ms == pytest.approx(5.706, abs=1e-3)
    assert judged(measured, Sla.from_bounds({"avg": 7.0})).verdict is Verdict.PASS
    assert judged(measured, Sla.from_bounds({"avg": 5.0})).verdict is not Verdict.PASS


@pytest.mark.parametrize("count", [LOOKS[0], LOOKS[-1]])
def test_the_verdict_on_an_average_errs_seldom_if_windows_differ(count: int) -> None:
    """The average is at the bound, in windows whose averages are lognormal."""
    random, deviation, runs = np.random.default_rng(0), 0.5, 200
    sla, test = Sla.from_bounds({"avg": 10.0}), SequentialTest(0.05, 28)
    passed = 0
    for _ in range(runs):
        averages = 10.0 * random.lognormal(-(deviation**2) / 2, deviation, (count, 8))
        measured = [[with_average(float(average)) for average in server_averages] for server_averages in averages]
        passed += judged(measured, sla, test).verdict is Verdict.PASS
    assert passed <= 0.05 * runs


def test_all_constraints_have_to_pass() -> None:
    both = Sla.from_bounds({"p95": BOUND_MS, "throughput": 1300.0})
    result = judged(servers(9.0), both)
    assert result.verdict is Verdict.FAIL
    assert result.reason.startswith("throughput >= 1300")


@pytest.mark.parametrize("middle_ms", [9.0, 12.5, 18.0])
def test_a_verdict_on_several_bounds_is_the_worst_of_those_on_each(middle_ms: float) -> None:
    measured = servers(middle_ms)
    bounds = {"throughput": 990.0, "p50": 25.0, "p95": BOUND_MS, "p99": 26.0, "avg": 15.0}
    sla = Sla.from_bounds(bounds)
    alone = [judged(measured, Sla((constraint,))) for constraint in sla]
    together = judged(measured, sla)
    assert together.verdict is max((one.verdict for one in alone), key=SEVERITY.index)
    assert together.excess == max(one.excess for one in alone[1:]), "a lower load changes latencies"
    assert together.is_promising is all(one.is_promising or one.verdict is Verdict.PASS for one in alone)
    assert together.unlikely == tuple(constraint for one in alone for constraint in one.unlikely)
    assert together.effective_by_metric == {name: n for one in alone for name, n in one.effective_by_metric.items()}
    deciding = [one for one in alone if one.verdict is together.verdict]
    assert together.reason == "; ".join(one.reason for one in deciding)
    known = [one.effective_requests for one in deciding if one.effective_requests]
    assert together.effective_requests == min(known, default=0.0)


def test_the_excess_of_a_bound_on_the_throughput_alone_is_that_of_the_throughput() -> None:
    missed = judged(servers(9.0), Sla.from_bounds({"throughput": 1300.0}))
    assert missed.excess == pytest.approx(math.log(1.3))


def test_without_an_sla_a_load_passes_at_the_first_look() -> None:
    before, at_look = judged(servers(9.0, LOOKS[0] - 1), Sla()), judged(servers(9.0), Sla())
    assert (before.verdict, before.is_promising) == (Verdict.UNDECIDED, True)
    assert at_look.verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("metric", "field", "values", "verdict"),
    [
        ("memory", "gpu_memory_bytes", (1e9, 2e9), Verdict.PASS),
        ("memory", "gpu_memory_bytes", (1e9, 3e9), Verdict.UNDECIDED),
        ("memory", "gpu_memory_bytes", (3e9, 3e9), Verdict.FAIL),
        ("memory", "gpu_memory_bytes", (1e9, None), Verdict.UNDECIDED),
        ("memory", "gpu_memory_bytes", (None, None), Verdict.UNDECIDED),
        ("score", "score", (2e9, 3e9), Verdict.PASS),
        ("score", "score", (1e9, 3e9), Verdict.UNDECIDED),
        ("score", "score", (1e9, 1e9), Verdict.FAIL),
    ],
)
def test_each_window_has_to_meet_a_bound_on_another_metric(
    metric: str, field: str, values: tuple[float | None, float | None], verdict: Verdict
) -> None:
    window_values: list[dict[str, Any]] = [{field: value} for value in values]
    measured = [[replace(window(9.0, 0), **changes) for changes in window_values]] * LOOKS[0]
    assert judged(measured, Sla.from_bounds({metric: 2e9})).verdict is verdict


def test_fewer_servers_than_the_first_look_are_undecided() -> None:
    result = judged(servers(9.0, LOOKS[0] - 1))
    assert result.verdict is Verdict.UNDECIDED
    assert result.is_promising
    assert not judged(servers(30.0, 1)).is_promising, "most requests are slower than the bound"
    assert not judged(servers(9.0, 1), test=SequentialTest(0.01, 3)).is_promising, "the time allows three servers"


def test_a_lost_window_is_undecided() -> None:
    measured = servers(9.0)
    measured[0][0] = Measurement(reason="perf_analyzer timed out")
    assert judged(measured).reason == "a measurement was lost: perf_analyzer timed out"
    assert judged([]).reason == "nothing was measured"


@pytest.mark.parametrize("lost", [Measurement(reason="lost"), Measurement(reason="died", server_crashed=True)])
def test_a_lost_window_changes_no_pooled_latency(lost: Measurement) -> None:
    """One server in four is slow, so the median of the windows' p95 is far below the p95 of all requests."""
    windows = [window(20.0 if n % 4 == 0 else 9.0, n) for n in range(8)]
    pooled, with_lost = pool_measurements(windows), pool_measurements([*windows, lost])
    assert pooled.latency_p95_ms is not None
    assert pooled.latency_p95_ms > BOUND_MS
    assert with_lost.latency_p95_ms == pooled.latency_p95_ms
    assert with_lost.latency_sketch == pooled.latency_sketch
    assert not with_lost.stable
    assert (pooled.server_crashed, with_lost.server_crashed) == (False, lost.server_crashed)


def test_a_pooled_throughput_is_the_mean_of_the_windows() -> None:
    """A window of 0.5 s holds one or two batches of 32 if the server serves 100 infer/s."""
    windows = [replace(window(9.0, n), throughput_infer_per_sec=128.0 if n % 16 < 9 else 64.0) for n in range(32)]
    assert pool_measurements(windows).throughput_infer_per_sec == 100.0


def test_a_throughput_bound_passes_only_if_less_slow_windows_pass_too() -> None:
    """A window of 2 infer/s is no worse than one of 0."""
    sla = Sla.from_bounds({"throughput": 80.0})
    verdicts, lows = [], []
    for slowest in (0.0, 2.0, 10.0, 50.0):
        measured = [[replace(window(9.0, 0), throughput_infer_per_sec=100.0)] * 8 for _ in range(4)]
        measured[0][7] = replace(window(9.0, 0), throughput_infer_per_sec=slowest)
        spreads = server_spreads([measured], sla.bounded_latencies)
        verdicts.append(judged(measured, sla).verdict)
        lows.append(throughput_interval(measured, spreads["throughput"], DEFAULT_CONFIDENCE).low)
    assert verdicts == [Verdict.PASS] * 4
    assert lows == sorted(lows)


def test_disturbed_windows_are_left_out_whatever_their_latency() -> None:
    measured = servers(9.0)
    for server_windows in measured[: int(len(measured) * MAX_EXCLUDED_SHARE * 2)]:
        server_windows[0] = replace(
            server_windows[0], stable=False, reason="others", latency_p95_ms=99.0, requests_over_ms="20:500"
        )
    result = judged(measured)
    assert result.verdict is Verdict.PASS
    assert 0 < result.disturbed_share <= MAX_EXCLUDED_SHARE
    assert result.slow_share.high < 0.05


def disturbed_in(measured: list[list[Measurement]], windows: int) -> list[list[Measurement]]:
    """Return the servers of ``measured``, disturbed in the first ``windows`` of each server."""
    return [
        [
            replace(measurement, stable=place >= windows, reason="others" * (place < windows))
            for place, measurement in enumerate(server)
        ]
        for server in measured
    ]


def test_all_windows_count_if_too_many_were_disturbed() -> None:
    quick, slow = disturbed_in(servers(9.0), 4), disturbed_in(servers(30.0), 4)
    passed = judged(quick)
    assert passed.verdict is Verdict.PASS
    assert passed.counts_disturbed
    assert passed.slow_share == judged(servers(9.0)).slow_share
    missed = judged(slow)
    assert missed.verdict is Verdict.UNDECIDED, "the bound may be missed because of the disturbance"
    assert not missed.is_promising, "a lower load is tested"
    assert missed.excess == judged(servers(30.0)).excess
    assert re.fullmatch(r"(\d+) of (\d+) windows were disturbed: others", missed.reason)


@pytest.mark.parametrize(("disturbed", "kept"), [([0, 0, 0], 12), ([2, 0, 0], 10), ([4, 0, 0], 12), ([4, 4, 4], 12)])
def test_few_disturbed_windows_do_not_count(disturbed: list[int], kept: int) -> None:
    windows = [[place < count for place in range(4)] for count in disturbed]
    counted = counted_windows(windows, bool)
    assert sum(map(len, counted)) == kept
    assert all(counted)
    assert counted_windows([*windows, []], bool) == counted, "a server without windows does not count"


@pytest.mark.parametrize("disturbed", range(8))
def test_a_verdict_says_whether_disturbed_windows_count(disturbed: int) -> None:
    """Two of ten windows are the limit, at which they do not count."""
    measured = disturbed_in([[window(9.0, n) for n in range(10)]] * LOOKS[0], disturbed)
    counted = counted_windows(measured, is_disturbed)
    assert judged(measured).counts_disturbed is (counted == measured and disturbed > 0)


@pytest.mark.parametrize(("level", "sketched"), [(0.5, True), *itertools.product((0.9, 0.95, 0.99), (True, False))])
def test_the_slope_and_the_distance_are_those_of_the_distribution_in_any_unit(level: float, sketched: bool) -> None:
    """The normal quantile of the share over a bound rises by 1 / 0.3 with the log of a latency with deviation 0.3."""
    for middle in (1e-3, 9.0, 1e4):
        latencies = np.random.default_rng(0).lognormal(math.log(middle), 0.3, (4, 4000))
        windows = [measured_window(own, sketched=sketched) for own in latencies]
        counts = count_misses([windows], 2 * middle, level)
        assert counts.slope == pytest.approx(1 / 0.3, rel=0.15)
        expected = math.log(2) - 0.3 * NormalDist().inv_cdf(level)
        assert counts.distance == pytest.approx(expected, abs=0.02)


def test_unanswered_requests_of_an_overloaded_server_count() -> None:
    """``requests`` has the answered ones; the latencies are those of all."""
    measured = [[replace(window(90.0, n), requests=60, overloaded=True)] for n in range(LOOKS[0])]
    counts = count_misses(measured, BOUND_MS, 0.95)
    assert [server_requests.tolist() for server_requests in counts.requests] == [[500.0]] * LOOKS[0]
    assert 0.99 < counts.share <= 1
    assert judged(measured).verdict is Verdict.FAIL


def test_an_overloaded_window_counts() -> None:
    measured = servers(9.0)
    for server_windows in measured:
        server_windows[:] = [replace(window(90.0, 1), stable=False, overloaded=True)]
    assert judged(measured).verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("count", "disturbed", "share", "verdict"),
    [(4, 4, 1.0, Verdict.UNDECIDED), (4, 1, 1 / 4, Verdict.UNDECIDED), (6, 1, 1 / 6, Verdict.PASS)],
)
def test_an_overload_of_a_disturbed_machine_counts_as_its_other_disturbed_windows(
    count: int, disturbed: int, share: float, verdict: Verdict
) -> None:
    """The only window of an overloaded server has the weight of all windows of another one."""
    overload = replace(window(90.0, 1), stable=False, overloaded=True, disturbed=True, reason="others")
    measured = [[overload] if number < disturbed else server for number, server in enumerate(servers(9.0, count))]
    counted = counted_windows(measured, is_disturbed, is_overloaded)
    result = judge_sla(measured, P95, server_spreads([counted], P95.bounded_latencies), ERROR)
    assert result.verdict is verdict
    assert result.disturbed_share == pytest.approx(share)
    assert result.counts_disturbed is (verdict is Verdict.UNDECIDED)
    if verdict is Verdict.UNDECIDED:
        assert result.reason.endswith(" windows were disturbed: others")


@pytest.mark.parametrize("metric", ["p95", "ttft-p95", "error-rate"])
@pytest.mark.parametrize("count", [1, LOOKS[0]])
def test_a_load_without_a_request_is_undecided(metric: str, count: int) -> None:
    """The server paused in all windows that count."""
    paused = Measurement(0.0, requests=0, failed_requests=0, stable=True)
    result = judged([[paused] * 3 for _ in range(count)], Sla.from_bounds({metric: 20.0}))
    assert result.verdict is Verdict.UNDECIDED
    assert result.reason.endswith(": no request was counted")
    assert not result.is_promising
    assert result.excess > 0, "a lower load is tested"


@pytest.mark.parametrize("count", [1, 2, LOOKS[0]])
def test_a_load_is_likely_to_pass_if_its_latency_is_lower_by_the_excess(count: int) -> None:
    shift = judged(servers(14.0, count)).excess
    assert judged(servers(14.0 * math.exp(-shift))).verdict is Verdict.PASS
    assert judged(servers(14.0 * math.exp(-shift / 2))).verdict is Verdict.UNDECIDED
    assert judged(servers(9.0)).excess < 0, "it may rise"


def test_windows_without_requests_count_as_slow() -> None:
    empty = Measurement(10.0, stable=True, requests=7)
    assert count_misses([[empty]], BOUND_MS, 0.95).misses[0].tolist() == [7.0]


def test_without_effective_requests_a_latency_has_no_interval() -> None:
    assert (
        latency_interval_ms(servers(9.0), "latency-p95", 0.0, ServerSpread(0.01, 9.0), DEFAULT_CONFIDENCE)
        == UNBOUNDED
    )


@pytest.mark.parametrize(
    ("low", "high", "is_unknown", "is_measurable"),
    [
        (0.9, 1.1, False, False),
        (1.01, 1.1, False, True),
        (0.9, 0.99, False, True),
        (-math.inf, math.inf, True, False),
        (math.nan, 0.9, True, True),
        (1.1, math.nan, True, True),
        (0.9, math.inf, False, False),
    ],
)
def test_an_interval_is_unknown_or_shows_a_difference(
    low: float, high: float, is_unknown: bool, is_measurable: bool
) -> None:
    interval = ConfidenceInterval(low, high)
    assert interval.is_unknown is is_unknown
    assert GainRatio(1.0, interval).is_measurable is is_measurable


def test_an_unknown_throughput_has_no_ratio_and_no_log() -> None:
    unknown, spread = [[replace(window(9.0, 0), throughput_infer_per_sec=None)]], ServerSpread(0.01, 9.0)
    assert gain_ratio(servers(9.0), unknown, "throughput", spread, DEFAULT_CONFIDENCE) is None
    assert gain_ratio(unknown, servers(9.0), "throughput", spread, DEFAULT_CONFIDENCE) is None
    assert not has_log(unknown[0], "throughput")
    assert has_log(servers(9.0)[0], "throughput")


@pytest.mark.parametrize("metric", ["throughput", "latency-avg"])
def test_the_logs_of_a_mean_are_linear_in_it(metric: str) -> None:
    """The mean over servers of the logs is the log of the mean, and that of a server has its distance to it."""
    random = np.random.default_rng(0)
    measured, means = list[list[Measurement]](), list[float]()
    for count in (8, 3, 1, 5):
        values, requests = random.lognormal(3.0, 0.5, count), random.integers(1, 500, count)
        weights = requests if metric == "latency-avg" else None
        means.append(float(np.average(values, weights=weights)))
        measured.append([Measurement(v, v, requests=int(n)) for v, n in zip(values, requests, strict=True)])
    logs = metric_logs([*measured, [Measurement()]], metric)
    mean = float(np.mean(means))
    assert [own.mean() for own in logs] == pytest.approx([math.log(mean) + own / mean - 1 for own in means])


def test_the_throughput_interval_has_the_variance_between_servers() -> None:
    narrow, wide = (
        throughput_interval(servers(9.0), ServerSpread(sigma**2, 9.0), DEFAULT_CONFIDENCE) for sigma in (0.01, 0.1)
    )
    assert wide.low < narrow.low < 1000 < narrow.high < wide.high


# -- order statistics ----------


def test_too_few_requests_bound_nothing() -> None:
    assert order_statistic_levels(89, 0.95, DEFAULT_CONFIDENCE)[1] == math.inf
    assert order_statistic_levels(90, 0.95, DEFAULT_CONFIDENCE)[1] == 1


@pytest.mark.parametrize("requests", [90, 161, 400, 2600])
@pytest.mark.parametrize("level", [0.5, 0.95])
def test_the_order_statistics_are_the_nearest_ones_that_bound_the_quantile(requests: int, level: float) -> None:
    low, high = order_statistic_levels(requests, level, DEFAULT_CONFIDENCE)
    above_low, above_high = round(requests * (1 - low)), round(requests * (1 - high))
    chance = [float(special.bdtr(above, requests, 1 - level)) for above in range(-1, requests + 1)]
    assert chance[above_low] < DEFAULT_CONFIDENCE <= chance[above_low + 1]
    assert chance[above_high + 1] <= 1 - DEFAULT_CONFIDENCE < chance[above_high + 2]


@pytest.mark.parametrize("burst_share", [0.0, 0.1], ids=["steady", "a tenth of the windows is twice as slow"])
def test_the_interval_of_a_ratio_of_percentiles_holds_the_true_ratio(burst_share: float) -> None:
    """The other configuration has four times the p95, so ours is four times better. Few ends are beyond the truth."""
    random = np.random.default_rng(5)

    def drawn(scale: float, count: int) -> list[list[Measurement]]:
        return [
            [
                Measurement(100.0, latency_p95_ms=scale * speed * (1 + (random.random() < burst_share)) * error)
                for error in np.exp(random.normal(0, 0.05, 8))
            ]
            for speed in np.exp(random.normal(0, 0.05, count))
        ]

    misses, runs = 0, 200
    for _ in range(runs):
        ours, theirs = drawn(1.0, 4), drawn(4.0, 2)
        spread = server_spreads([ours, theirs], ["latency-p95"])["latency-p95"]
        ratio = gain_ratio(ours, theirs, "latency-p95", spread, DEFAULT_CONFIDENCE)
        assert ratio is not None
        misses += not ratio.interval.low < 4 < ratio.interval.high
    assert misses <= 0.04 * runs
