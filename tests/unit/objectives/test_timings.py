"""Times of a request: bounds, verdicts and pooled quantiles of TTFT and inter-token latency, next to the latency."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from objectives.confidence import SequentialTest
from objectives.latency_sketch import count_over, sketch_latencies
from objectives.metrics import ITL, LATENCY, METRICS, QUANTILES, STATISTICS, TIMINGS, TTFT, Measurement, Timing
from objectives.pooled_windows import pool_measurements
from objectives.server_spread import server_spreads
from objectives.sla import Sla, Verdict
from objectives.verdict import count_misses, judge_sla

BOUNDS_MS = {"ttft-p95": 200.0, "itl-p95": 30.0}
TEST = SequentialTest(error=0.01, max_servers=8)


def window(seed: int, ttft_ms: float = 100.0, itl_ms: float = 15.0) -> Measurement:
    """Return a window of 400 requests with log-normal times around the medians ``ttft_ms`` and ``itl_ms``."""
    rng = np.random.default_rng(seed)
    measured = Measurement(throughput_infer_per_sec=50.0, requests=400, stable=True)
    for timing, median_ms in ((LATENCY, 1000.0), (TTFT, ttft_ms), (ITL, itl_ms)):
        times_ms = median_ms * np.exp(rng.normal(0, 0.1, 400))
        timing_fields: dict[str, object] = {
            timing.field_of(name): float(np.quantile(times_ms, level)) for name, level in QUANTILES.items()
        }
        timing_fields[timing.over_field] = count_over(
            times_ms, [BOUNDS_MS[f"{timing.name}-p95"]] if timing != LATENCY else []
        )
        timing_fields[timing.sketch_field] = sketch_latencies(times_ms)
        measured = replace(measured, **timing_fields)  # type: ignore[arg-type]
    return measured


def servers(**medians_ms: float) -> list[list[Measurement]]:
    return [[window(10 * server + number, **medians_ms) for number in range(3)] for server in range(6)]


@pytest.mark.parametrize(
    ("medians_ms", "expected"),
    [
        ({}, Verdict.PASS),
        ({"ttft_ms": 400.0}, Verdict.FAIL),
        ({"itl_ms": 60.0}, Verdict.FAIL),
    ],
)
def test_each_bound_is_judged_by_its_own_time(medians_ms: dict[str, float], expected: Verdict) -> None:
    sla, windows = Sla.from_bounds(BOUNDS_MS), servers(**medians_ms)
    judged = judge_sla(windows, sla, server_spreads([windows], sla.bounded_latencies), TEST)
    assert judged.verdict is expected
    assert all(f"{timing}-p95" in judged.reason for timing in ("ttft", "itl") if f"{timing}_ms" in medians_ms)


@pytest.mark.parametrize("timing", TIMINGS, ids=lambda timing: timing.name)
def test_requests_over_a_bound_are_those_of_the_timing(timing: Timing) -> None:
    counts = {LATENCY: "1100:3", TTFT: "1100:5", ITL: "1100:7"}
    measured = replace(window(0), **{counted_timing.over_field: text for counted_timing, text in counts.items()})  # type: ignore[arg-type]
    assert count_misses([[measured]], 1100.0, 0.95, timing).misses[0].tolist() == [
        float(counts[timing].split(":")[1])
    ]


def test_pooled_quantiles_of_all_timings_are_those_of_all_requests() -> None:
    pooled = pool_measurements([window(seed) for seed in range(8)])
    for timing, median_ms in ((LATENCY, 1000.0), (TTFT, 100.0), (ITL, 15.0)):
        assert getattr(pooled, timing.field_of("p50")) == pytest.approx(median_ms, rel=0.02)
        assert getattr(pooled, timing.field_of("p95")) == pytest.approx(1.18 * median_ms, rel=0.03)


def test_bounds_on_ttft_and_inter_token_latency_are_no_bounds_on_the_latency_of_a_request() -> None:
    sla = Sla.from_bounds({**BOUNDS_MS, "p99": 4000.0})
    assert sla.bounds_ms(LATENCY) == (4000.0,)
    assert sla.latency_bound_ms("itl-p95") == 30.0
    assert [bound.metric for bound in sla.latencies] == ["ttft-p95", "itl-p95", "latency-p99"]


def test_a_metric_says_which_time_it_describes_and_by_which_statistic() -> None:
    described = [(METRICS[timing.metric(name)], timing, name) for timing in TIMINGS for name in STATISTICS]
    assert all((metric.timing, metric.statistic) == (timing, name) for metric, timing, name in described)
    assert [METRICS[f"ttft-{name}"].quantile for name in STATISTICS] == [None, 0.5, 0.9, 0.95, 0.99]
    assert METRICS["throughput"].timing is METRICS["output-throughput"].timing is None
    assert METRICS["throughput"].quantile is None


def test_only_the_latency_of_a_request_has_a_short_name() -> None:
    names = ("latency-p95", "ttft-p95", "throughput")
    assert [METRICS[name].short_name for name in names] == ["p95", "ttft-p95", "throughput"]


@pytest.mark.parametrize(("with_itl", "expected"), [(400, Verdict.FAIL), (40, Verdict.UNDECIDED)])
def test_a_time_is_judged_among_the_requests_that_have_it(with_itl: int, expected: Verdict) -> None:
    """Requests with a single response have no inter-token latency and say nothing about its bound."""

    def partly(measurement: Measurement, seed: int) -> Measurement:
        times_ms = 27.0 * np.exp(np.random.default_rng(seed).normal(0, 0.1, with_itl))
        return replace(
            measurement, itl_sketch=sketch_latencies(times_ms), requests_over_itl_ms=count_over(times_ms, [30.0])
        )

    sla = Sla.from_bounds({"itl-p95": 30.0})
    windows = [
        [partly(window, 10 * i + j) for j, window in enumerate(server_windows)]
        for i, server_windows in enumerate(servers())
    ]
    counts = count_misses(windows, 30.0, 0.95, ITL)
    assert sum(map(sum, counts.requests)) == with_itl * sum(map(len, windows))
    assert counts.share == pytest.approx(0.146, abs=0.04)
    assert judge_sla(windows, sla, server_spreads([windows], sla.bounded_latencies), TEST).verdict is expected


def test_the_interval_of_each_time_has_the_effective_requests_of_its_own_bound() -> None:
    sla, windows = Sla.from_bounds(BOUNDS_MS), servers(itl_ms=60.0)
    judged = judge_sla(windows, sla, server_spreads([windows], sla.bounded_latencies), TEST)
    assert set(judged.effective_by_metric) == set(BOUNDS_MS)
    assert judged.effective_requests_of("itl-p95") == judged.effective_by_metric["itl-p95"]
    assert judged.effective_requests_of("latency-p95") == judged.effective_requests
