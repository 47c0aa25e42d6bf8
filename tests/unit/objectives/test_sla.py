"""Tests of when a bound is met."""

from __future__ import annotations

import math

import pytest

from objectives.metrics import LATENCY, METRICS, Measurement, four_digits
from objectives.sla import Constraint, Sla


@pytest.mark.parametrize(("latency", "met"), [(19.9, True), (20.0, True), (20.1, False)])
def test_an_upper_bound_is_met_up_to_itself(latency: float, met: bool) -> None:
    violation = Constraint("latency-p95", 20).violation(Measurement(latency_p95_ms=latency))
    assert (violation <= 0) is met
    assert violation == pytest.approx((latency - 20) / 20)


@pytest.mark.parametrize(("rate", "met"), [(999.0, False), (1000.0, True), (1001.0, True), (0.0, False)])
def test_a_lower_bound_is_met_from_itself(rate: float, met: bool) -> None:
    violation = Constraint("throughput", 1000).violation(Measurement(throughput_infer_per_sec=rate))
    assert (violation <= 0) is met


@pytest.mark.parametrize("score", [-0.5, 0.0, 0.5])
def test_the_violation_of_a_bound_of_0_is_in_the_unit_of_the_metric(score: float) -> None:
    assert Constraint("score", 0.0).violation(Measurement(score=score)) == -score


@pytest.mark.parametrize("metric", METRICS)
def test_a_metric_that_is_missing_or_no_number_never_meets_a_bound(metric: str) -> None:
    nothing = Measurement(stable=True)
    no_number = Measurement(
        throughput_infer_per_sec=math.nan, latency_avg_ms=math.nan, latency_p50_ms=math.nan,
        latency_p90_ms=math.nan, latency_p95_ms=math.nan, latency_p99_ms=math.nan,
        gpu_memory_bytes=math.nan, gpu_power_watts=math.nan,
    )  # fmt: skip
    for bound in (1e-9, 1.0, 1e12):
        assert Constraint(metric, bound).violation(nothing) == math.inf
        assert Constraint(metric, bound).violation(no_number) == math.inf


SLA = Sla.from_bounds({"p95": 20.0, "throughput": 1000.0})


def test_the_worst_of_several_bounds_counts() -> None:
    assert SLA.violation(Measurement(latency_p95_ms=10, throughput_infer_per_sec=500)) == 0.5
    assert SLA.violation(Measurement(latency_p95_ms=10)) == math.inf
    assert Sla().violation(Measurement()) == -math.inf


def test_an_sla_is_met_if_every_constraint_is() -> None:
    assert SLA.is_met(Measurement(1000, latency_p95_ms=20))
    assert not SLA.is_met(Measurement(999, latency_p95_ms=20))
    assert not SLA.is_met(Measurement(1000, latency_p95_ms=math.nan))
    assert Sla().is_met(Measurement())
    assert not Sla()


def test_the_missed_constraints_are_those_that_a_measurement_violates() -> None:
    assert SLA.missed(Measurement(999, latency_p95_ms=20)) == Sla.from_bounds({"throughput": 1000.0})
    assert SLA.missed(Measurement(999)) == SLA
    assert SLA.missed(Measurement(1000, latency_p95_ms=1)) == Sla()


def test_the_tightest_latency_bound_and_that_of_one_metric() -> None:
    both = Sla.from_bounds({"p99": 30.0, "throughput": 5.0, "p95": 20.0})
    assert (both.latency_bound_ms("latency-p95"), both.latency_bound_ms("latency-p99")) == (20.0, 30.0)
    assert both.latency_bound_ms("latency-p50") == math.inf
    assert sorted(both.bounds_ms(LATENCY)) == [20.0, 30.0]
    assert Sla.from_bounds({"throughput": 5.0}).bounds_ms(LATENCY) == ()
    assert both.judged_latency == "latency-p99"
    assert Sla().judged_latency == "latency-p95"
    assert (both.throughput_floor, both.latencies.throughput_floor) == (5.0, 0.0)
    assert both.without("throughput", "latency-p95") == Sla.from_bounds({"p99": 30.0})
    assert Sla.parse(["p95 <= 20 ms", "p95 <= 10 ms", "p95 <= 30 ms"]).latency_bound_ms("latency-p95") == 10.0


def test_the_latency_levels_are_those_of_the_quantiles_of_the_latency() -> None:
    sla = Sla.from_bounds({"p99": 30.0, "avg": 9.0, "ttft-p90": 5.0, "throughput": 5.0, "p95": 20.0})
    assert sla.latency_levels == (0.99, 0.95)


def test_the_share_of_the_bound_is_that_of_the_latency_closest_to_its_own() -> None:
    both = Sla.from_bounds({"p50": 10.0, "p95": 20.0, "throughput": 5.0})
    assert both.share_of_bound(Measurement(latency_p50_ms=4, latency_p95_ms=10)) == 0.5
    assert both.share_of_bound(Measurement(latency_p50_ms=4)) == math.inf
    assert both.share_of_bound(Measurement(latency_p50_ms=0.01, latency_p95_ms=0.01)) == 0.01


def test_an_sla_is_read_as_it_is_written() -> None:
    assert str(SLA) == "p95 <= 20 ms and throughput >= 1000 infer/s"
    assert Sla.parse(map(str, SLA)) == SLA


@pytest.mark.parametrize("metric", sorted(METRICS))
def test_a_bound_on_any_metric_is_read_as_it_is_written(metric: str) -> None:
    for bound in (20.0, 0.5, 4294967296.0):
        constraint = Constraint(metric, bound)
        assert Sla.parse([str(constraint)]) == Sla((constraint,))


def test_a_text_that_is_no_bound_is_refused() -> None:
    for text, message in (
        ("p95", "'p95' is not a bound on a metric"),
        ("p95 <=", "'p95 <=' is not a bound on a metric"),
        ("p95 <= ms", "could not convert string to float"),
        ("p100 <= 20 ms", "'p100 ' is not a metric"),
    ):
        with pytest.raises(ValueError, match=message):
            Sla.parse([text])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (11_890.4, "11,890"), (99_999.0, "100,000"), (21.4, "21.4"), (1.23456, "1.235"), (9.99996, "10"),
        (0.002, "0.002"), (5e-5, "0.00005"), (-12_345.0, "-12,340"),
        (1.5e16, "15,000,000,000,000,000"), (0.0, "0"), (math.inf, "inf"),
    ],
)  # fmt: skip
def test_four_digits_have_no_exponent(value: float, text: str) -> None:
    assert four_digits(value) == text


@pytest.mark.parametrize("log_fall", [1e-5, 0.3, 800.0])
def test_a_lowered_bound_is_below_the_given_one_and_above_0(log_fall: float) -> None:
    given_sla = Sla.from_bounds({"p95": 20.006, "throughput": 400.0})
    lowered = given_sla.with_lower_latencies(log_fall)
    assert 0 < lowered.latency_bound_ms("latency-p95") <= 20.006
    assert lowered.latency_bound_ms("latency-p95") == pytest.approx(20.006 * math.exp(-log_fall), rel=1e-3)
    assert lowered.throughput_floor == 400.0
