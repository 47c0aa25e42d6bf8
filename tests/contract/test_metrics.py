"""The contract of metrics, which are objectives and bounds. A new metric adds its value of ``FULL`` to ``VALUES``."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest

from objectives.metrics import METRICS, STATISTICS, Measurement, Metric
from objectives.sla import Sla
from optimizer.options.values import OBJECTIVES, parse_objectives

FULL = Measurement(
    throughput_infer_per_sec=2000, latency_avg_ms=1, latency_p50_ms=2, latency_p90_ms=3, latency_p95_ms=4,
    latency_p99_ms=5, ttft_avg_ms=11, ttft_p50_ms=12, ttft_p90_ms=13, ttft_p95_ms=14, ttft_p99_ms=15, itl_avg_ms=21,
    itl_p50_ms=22, itl_p90_ms=23, itl_p95_ms=24, itl_p99_ms=25, output_tokens_per_sec=30, gpu_memory_bytes=6,
    gpu_power_watts=70, server_memory_bytes=8, requests=9, stable=True, score=0.5,
    goodput_infer_per_sec=1900, rejected_requests=1, timed_out_requests=0, failed_requests=0,
)  # fmt: skip
VALUES: dict[str, float] = {
    "throughput": 2000,
    "goodput": 1900,
    "output-throughput": 30,
    "latency-avg": 1,
    "latency-p50": 2,
    "latency-p90": 3,
    "latency-p95": 4,
    "latency-p99": 5,
    **dict(zip((f"ttft-{name}" for name in STATISTICS), range(11, 16), strict=True)),
    **dict(zip((f"itl-{name}" for name in STATISTICS), range(21, 26), strict=True)),
    "error-rate": 10,
    "memory": 6,
    "gpu-memory": 6,
    "energy": 35,
    "score": 0.5,
}


@dataclass(frozen=True)
class Point:
    measurement: Measurement


def test_every_metric_is_covered_by_the_contract() -> None:
    assert list(VALUES) == list(METRICS)


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
class TestMetric:
    def test_the_value_and_the_cost_are_those_of_the_measurement(self, metric: Metric) -> None:
        assert metric.value(FULL) == VALUES[metric.name]
        assert metric.cost(FULL) == (-1 if metric.better == "higher" else 1) * VALUES[metric.name]

    def test_an_unknown_value_is_not_zero(self, metric: Metric) -> None:
        assert metric.value(Measurement()) is None
        assert metric.cost(Measurement()) is None
        assert metric.worth(Measurement()) is None

    def test_twice_the_worth_is_twice_as_good(self, metric: Metric) -> None:
        value = VALUES[metric.name] if metric.has_ratio else None
        assert metric.worth(FULL) == (1 / value if value and metric.better == "lower" else value)

    def test_the_name_is_the_key_and_a_unit_is_given(self, metric: Metric) -> None:
        assert METRICS[metric.name] is metric
        assert metric.unit or metric.name == "score"

    def test_a_bound_on_it_is_met_at_the_bound_and_not_met_if_the_value_is_unknown(self, metric: Metric) -> None:
        sla = Sla.from_bounds({metric.name: VALUES[metric.name]})
        served = replace(FULL, rejected_requests=0) if metric.timing else FULL
        assert sla.violation(served) == 0
        assert sla.violation(Measurement()) == math.inf
        assert Sla.parse([str(sla)]) == sla

    def test_a_known_value_is_better_than_an_unknown_one(self, metric: Metric) -> None:
        measured_point, empty_point = Point(FULL), Point(Measurement(stable=True))
        assert Sla().best_point([empty_point, measured_point], [metric]) is measured_point
        assert Sla().best_point([empty_point], [metric]) is None


def test_each_objective_can_be_given_on_the_command_line() -> None:
    assert [parse_objectives(name) for name in OBJECTIVES] == [(name,) for name in OBJECTIVES]


def test_a_value_that_is_not_a_number_is_unknown() -> None:
    assert METRICS["latency-p95"].cost(Measurement(latency_p95_ms=math.nan)) is None


def test_memory_is_that_of_the_gpus_or_else_that_of_the_server() -> None:
    memory = METRICS["memory"]
    assert memory.value(Measurement(gpu_memory_bytes=0.0, server_memory_bytes=8)) == 0
    assert memory.value(Measurement(server_memory_bytes=8)) == 8


@pytest.mark.parametrize("rate", [None, 0.0])
def test_the_energy_of_no_inference_is_unknown(rate: float | None) -> None:
    measurement = Measurement(gpu_power_watts=70, throughput_infer_per_sec=rate)
    assert METRICS["energy"].value(measurement) is None


def test_a_new_measurement_is_not_stable() -> None:
    assert not Measurement().stable
