"""When a bound on latency is called met, missed or undecided."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from objectives.confidence import (
    Verdict,
    Window,
    judge,
    judge_values,
    miss_rate_bounds,
    requests_needed,
)
from objectives.correlation import autocorrelation_time
from objectives.quantiles import misses_from_columns, quantile_levels
from objectives.sla import CONFIDENCE

PASS, FAIL, UNDECIDED = Verdict.PASS, Verdict.FAIL, Verdict.UNDECIDED


def independent(miss_rate: float, windows: int = 32, requests: int = 60, seed: int = 0) -> list[Window]:
    random = np.random.default_rng(seed)
    misses, tails = random.binomial(requests, miss_rate, windows), random.binomial(requests, 0.05, windows)
    return [Window(requests, float(m), float(t)) for m, t in zip(misses, tails, strict=True)]


def windows_of(latencies_ms: list[float], bound_ms: float, quantile: float, windows: int) -> list[Window]:
    own = np.quantile(latencies_ms, quantile, method="higher")
    parts = np.array_split(np.array(latencies_ms), windows)
    return [Window(part.size, float((part > bound_ms).sum()), float((part > own).sum())) for part in parts]


def bursts(windows: int, requests: int, share: float, stay: float, seed: int) -> list[Window]:
    """Misses of a two-state Markov chain: bursts of 1 / (1 - stay) requests on average."""
    random = np.random.default_rng(seed)
    start = (1 - stay) * share / (1 - share)
    state, states = random.random() < share, []
    for draw in random.random(windows * requests):
        state = draw < (stay if state else start)
        states.append(200.0 if state else 1.0)
    return windows_of(states, 100.0, 0.95, windows)


@pytest.mark.parametrize(
    ("miss_rate", "verdict"), [(0.01, PASS), (0.02, PASS), (0.1, FAIL), (0.5, FAIL), (0.05, UNDECIDED)]
)
def test_the_verdict_follows_the_miss_rate(miss_rate: float, verdict: Verdict) -> None:
    judgement = judge(independent(miss_rate), 0.95)
    assert judgement.verdict is verdict
    assert judgement.low <= miss_rate <= judgement.high
    assert judgement.confidence == 0.99


def test_the_same_misses_meet_a_lower_quantile_and_miss_a_higher_one() -> None:
    windows = independent(0.05, requests=200)
    assert [judge(windows, q).verdict for q in (0.5, 0.9, 0.99)] == [PASS, PASS, FAIL]


def test_a_missing_count_is_never_a_pass() -> None:
    passing = independent(0.0)
    assert judge(passing, 0.95).verdict is PASS
    for gap in (Window(60, None), Window(0, 0.0), Window(60, math.nan), Window(60, 61.0)):
        assert judge([*passing[1:], gap], 0.95).verdict is UNDECIDED
    assert judge([], 0.95).verdict is UNDECIDED
    assert judge(passing[:3], 0.95).verdict is UNDECIDED


def test_an_unstable_run_is_never_a_pass_and_may_fail() -> None:
    shaky = Window(60, 0.0, 3.0, stable=False)
    assert judge([*independent(0.0), shaky], 0.95).verdict is UNDECIDED
    assert judge([*independent(0.5), Window(60, 30.0, 3.0, stable=False)], 0.95).verdict is FAIL


@pytest.mark.parametrize(("first", "second"), [(0.0, 0.08), (0.0, 0.12), (0.02, 0.3), (0.3, 0.02)])
def test_drift_leaves_it_undecided(first: float, second: float) -> None:
    judgement = judge(independent(first, 16, 200) + independent(second, 16, 200, seed=1), 0.95)
    assert judgement.verdict is UNDECIDED
    assert "drift" in judgement.reason


def test_a_repeat_that_disagrees_is_seen_as_drift() -> None:
    repeats = [w for k, rate in enumerate((0.01, 0.01, 0.09)) for w in independent(rate, 12, 100, seed=k)]
    assert judge(repeats, 0.95).verdict is UNDECIDED


def test_without_misses_the_correlation_must_be_known() -> None:
    """No miss in 32 windows may be 32 long moments without one burst."""
    assert judge([Window(1000, 0.0)] * 32, 0.95).verdict is UNDECIDED
    assert judge([Window(1000, 0.0)] * 200, 0.95).verdict is PASS
    tails = independent(0.05, requests=1000)
    assert judge([Window(1000, 0.0, w.misses) for w in tails], 0.95).verdict is PASS


def test_extending_a_run_narrows_the_bounds() -> None:
    windows = independent(0.04, 256)
    bounds = [judge(windows[:n], 0.95) for n in (32, 64, 128, 256)]
    assert all(a.high - a.low > b.high - b.low for a, b in pairwise(bounds))


def test_correlated_requests_count_for_less() -> None:
    time = 1 + 2 * 0.9 / (1 - 0.9)  # lag-1 correlation of the chain: 0.895 + ... = stay - start
    found = []
    for seed in range(20):
        windows = bursts(64, 1000, 0.05, 0.9 + 0.1 * 0.05, seed)
        requests, misses = np.full(64, 1000.0), np.array([w.misses for w in windows], dtype=float)
        found.append(float(autocorrelation_time(requests, misses)))
    assert np.mean(found) == pytest.approx(time, rel=0.25)
    assert judge(windows, 0.95).effective_requests == pytest.approx(64_000 / time, rel=0.6)


def test_a_false_pass_is_rare_with_correlated_requests() -> None:
    """Just over the bound, in bursts of 10: at most 1 % of the runs, here with room for chance."""
    said = [judge(bursts(32, 300, 0.055, 0.9, seed), 0.95).verdict for seed in range(100)]
    assert said.count(PASS) <= 3


def test_the_bounds_are_those_of_clopper_and_pearson() -> None:
    low, high = miss_rate_bounds(0.0, 100, 10**9, 0.01, 1e9)
    assert float(low) == 0
    assert float(high) == pytest.approx(1 - 0.01 ** (1 / 100), rel=1e-6)  # (1 - p)^100 = 1 %
    low, high = miss_rate_bounds(1.0, 100, 10**9, 0.01, 1e9)
    assert float(low) == pytest.approx(0.01 ** (1 / 100), rel=1e-6)
    assert float(high) == 1


def test_few_windows_widen_the_bounds() -> None:
    highs = [float(miss_rate_bounds(0.03, 1000, n, 0.01, 0.05)[1]) for n in (4, 8, 32, 1000)]
    assert all(a > b for a, b in pairwise(highs))


def test_requests_follow_from_what_the_verdict_needs() -> None:
    assert requests_needed(0.95, 32) <= 2000
    assert requests_needed(0.95, 32, 0.08) <= 2000
    assert requests_needed(0.95, 32, 0.0) < requests_needed(0.95, 32, 0.01) < requests_needed(0.95, 32, 0.03)
    assert math.inf > requests_needed(0.95, 32, 0.05) > requests_needed(0.95, 32, 0.045) > 10_000
    assert requests_needed(0.99, 32) > requests_needed(0.95, 32) > requests_needed(0.5, 32)
    assert requests_needed(0.95, 32, autocorrelation_requests=10) == pytest.approx(
        10 * requests_needed(0.95, 32), rel=1e-3
    )


@pytest.mark.parametrize(("requests", "column"), [(161, 0.99), (645, 0.97), (2600, 0.96)])
def test_a_column_of_the_load_generator_bounds_p95(requests: int, column: float) -> None:
    assert quantile_levels(requests, 0.95, CONFIDENCE)[1] <= column + 1 / requests


def test_too_few_requests_bound_nothing() -> None:
    assert quantile_levels(89, 0.95, CONFIDENCE)[1] == math.inf
    assert quantile_levels(90, 0.95, CONFIDENCE)[1] == 1


def test_order_statistics_bound_the_quantile() -> None:
    random = np.random.default_rng(0)
    low, high = quantile_levels(400, 0.95, CONFIDENCE)
    samples = np.sort(random.exponential(size=(1000, 400)), axis=1)
    true = -math.log(0.05)
    assert np.mean(samples[:, math.ceil(400 * low) - 1] > true) <= 0.02
    assert np.mean(samples[:, math.ceil(400 * high) - 1] < true) <= 0.02


def test_columns_give_misses() -> None:
    columns = {0.5: 5.0, 0.9: 10.0, 0.95: 12.0, 0.99: 20.0}
    for level, ms in columns.items():
        assert misses_from_columns(1000, columns, ms) == pytest.approx(1000 * (1 - level))
    assert misses_from_columns(1000, columns, 100.0) == pytest.approx(10)
    assert misses_from_columns(1000, columns, 2.5) == pytest.approx(1000 * 0.5**0.5)
    assert 50 < (misses_from_columns(1000, columns, 11.0) or 0) < 100
    assert misses_from_columns(1000, {}, 11.0) is None


def test_columns_alone_can_pass_p95_and_never_p99() -> None:
    random = np.random.default_rng(0)
    windows = []
    for _ in range(32):
        times = random.exponential(2.0, 400)
        columns = {q: float(np.quantile(times, q)) for q in (0.5, 0.9, 0.95, 0.99)}
        misses, tail = (misses_from_columns(400, columns, ms) for ms in (20.0, -2.0 * math.log(0.05)))
        windows.append(Window(400, misses, tail))
    assert judge(windows, 0.95).verdict is PASS
    assert judge(windows, 0.99).verdict is UNDECIDED


def test_averages_are_judged_from_repeats() -> None:
    random = np.random.default_rng(0)
    values = random.normal(10.0, 1.0, 32).tolist()
    assert judge_values(values, [100] * 32, 11.0).verdict is PASS
    assert judge_values(values, [100] * 32, 9.0).verdict is FAIL
    assert judge_values(values, [100] * 32, 10.0).verdict is UNDECIDED
    assert judge_values([None, *values[1:]], [100] * 32, 11.0).verdict is UNDECIDED
    assert judge_values([math.nan, *values[1:]], [100] * 32, 11.0).verdict is UNDECIDED
    assert judge_values(sorted(values), [100] * 32, 20.0).verdict is UNDECIDED
