"""Test percentiles of any level: their names, their values, and the requests that a verdict on them needs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from objectives import latency_sketch
from objectives.agreement import ServerPair, compare_load_generators
from objectives.arrays import FloatArray
from objectives.confidence import SequentialTest, clopper_pearson_bounds, fewest_requests
from objectives.latency_sketch import RELATIVE_ACCURACY, sketch_latencies
from objectives.metrics import METRICS, QUANTILES, Measurement
from objectives.pooled_windows import pool_measurements
from objectives.quantiles import parse_percentile, quantile_at
from objectives.server_spread import server_spreads
from objectives.sla import DEFAULT_CONFIDENCE, Sla, Verdict
from objectives.verdict import judge_sla, needed_requests
from tests.conftest import latency_window

BOUND_MS = 30.0
SLA = Sla.from_bounds({"p99.9": BOUND_MS})


def window(latencies_ms: FloatArray) -> Measurement:
    return latency_window(latencies_ms, 1000.0, BOUND_MS)


@pytest.mark.parametrize(
    ("text", "name", "level"),
    [("p99.9", "p99.9", 0.999), ("p99.90", "p99.9", 0.999), ("p99.0", "p99", 0.99), ("p050", "p50", 0.5)],
)
def test_a_percentile_has_one_name_and_an_exact_level(text: str, name: str, level: float) -> None:
    assert parse_percentile(text) == (name, level)
    assert METRICS[f"latency-{text}"].name == f"latency-{name}"
    assert METRICS[f"latency-{text}"] is METRICS[f"latency-{name}"]


@pytest.mark.parametrize(
    "text", ["p0", "p100", "p49.9999", "p", "99.9", "p99.99999", "p-1", "pnan", "p1e1", "p99.9 "]
)
def test_other_texts_are_no_percentiles(text: str) -> None:
    with pytest.raises(ValueError, match=r"at least 50 and below 100"):
        parse_percentile(text)
    with pytest.raises(KeyError):
        METRICS[f"latency-{text}"]


def test_a_listed_percentile_keeps_its_field() -> None:
    metric = METRICS["ttft-p95.0"]
    assert metric is METRICS["ttft-p95"]
    assert not metric.needs_own_client
    assert metric.value(Measurement(ttft_p95_ms=3.0)) == 3.0
    assert "latency-p99.9" not in list(METRICS)


def test_the_value_of_a_percentile_is_the_quantile_of_the_sketch() -> None:
    latencies_ms = np.random.default_rng(0).gamma(9.0, 1.0, 20_000)
    measured = METRICS["latency-p99.9"].value(window(latencies_ms))
    assert measured == pytest.approx(float(np.quantile(latencies_ms, 0.999, method="lower")), RELATIVE_ACCURACY)
    assert METRICS["latency-p99.9"].value(Measurement(latency_p99_ms=3.0)) is None


def test_a_bound_on_a_percentile_is_written_and_read() -> None:
    sla = Sla.from_bounds({"p99.90": 30.0, "ttft-p99.5": 200.0})
    assert str(sla) == "p99.9 <= 30 ms and ttft-p99.5 <= 200 ms"
    assert Sla.parse(map(str, sla)) == sla
    assert sla.judged_latency == "latency-p99.9"
    assert sla.violation(Measurement(latency_p99_ms=1.0)) == math.inf


def test_a_percentile_of_pooled_windows_is_that_of_all_requests() -> None:
    latencies_of_windows = [np.random.default_rng(seed).gamma(9.0, 1.0, 5000) for seed in range(4)]
    pooled = pool_measurements([window(latencies_ms) for latencies_ms in latencies_of_windows])
    exact_ms = float(np.quantile(np.concatenate(latencies_of_windows), 0.999, method="lower"))
    assert METRICS["latency-p99.9"].value(pooled) == pytest.approx(exact_ms, RELATIVE_ACCURACY)
    assert latency_sketch.count(pooled.latency_sketch) == 20_000


def test_a_scaled_sketch_has_scaled_quantiles() -> None:
    sketch = sketch_latencies(np.random.default_rng(0).gamma(9.0, 1.0, 5000))
    before, after = (
        latency_sketch.pooled_quantile_ms([text], 0.9) for text in (sketch, latency_sketch.scale(sketch, 1.3))
    )
    assert after / before == pytest.approx(1.3, RELATIVE_ACCURACY)


def test_a_quantile_between_and_beyond_known_ones_is_exponential() -> None:
    quantiles = {level: -math.log(1 - level) for level in QUANTILES.values()}
    for level in (0.2, 0.97, 0.995, 0.999):
        assert quantile_at(quantiles, level) == pytest.approx(-math.log(1 - level))


@pytest.mark.parametrize("scale", [0.5, 1.6])
def test_a_percentile_is_judged_by_exact_counts(scale: float) -> None:
    rng = np.random.default_rng(3)
    servers = [[window(scale * rng.gamma(9.0, 1.0, 3000)) for _ in range(8)] for _ in range(6)]
    judged = judge_sla(servers, SLA, server_spreads([servers], SLA.bounded_latencies), SequentialTest(0.01))
    assert judged.verdict is (Verdict.PASS if scale < 1 else Verdict.FAIL)
    assert judged.effective_requests > needed_requests(SLA.constraints[0], 1 - DEFAULT_CONFIDENCE)


def test_the_needed_requests_are_those_of_the_exact_bound() -> None:
    needed = fewest_requests(0.001, 0.005)
    assert needed == needed_requests(SLA.constraints[0], 0.005) == 5296
    _, high = clopper_pearson_bounds(0.0, needed, 1e9, 0.005)
    assert high == pytest.approx(0.001, rel=1e-3)
    assert needed_requests(Sla.from_bounds({"error-rate": 0.1}).constraints[0], 0.005) == needed
    assert needed_requests(Sla.from_bounds({"avg": 1.0}).constraints[0], 0.005) == 0


def test_perf_analyzer_is_compared_at_the_nearest_percentile_that_it_reports() -> None:
    latencies_ms = np.random.default_rng(0).gamma(9.0, 1.0, 2000)
    client_window = window(latencies_ms)
    perf_analyzer_window = replace(client_window, latency_sketch="", requests_over_ms="")
    agreement = compare_load_generators([ServerPair([client_window], perf_analyzer_window)] * 4, SLA, 0.01)
    assert [ratio.metric for ratio in agreement.ratios] == ["throughput", "latency-p99"]
    assert not agreement.disagreement
    assert agreement.ratios[1].bound is None
