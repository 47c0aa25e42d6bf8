"""The table of metrics: each finds its figure, and what is unknown stays unknown."""

from __future__ import annotations

import math

import pytest

from objectives.metrics import METRICS, Measurement, Metric

FULL = Measurement(
    throughput_infer_per_sec=2000, latency_avg_ms=1, latency_p50_ms=2, latency_p90_ms=3, latency_p95_ms=4,
    latency_p99_ms=5, gpu_memory_bytes=6, gpu_power_watts=70, server_memory_bytes=8, requests=9, stable=True,
    score=0.5,
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [("throughput", 2000), ("latency-avg", 1), ("latency-p50", 2), ("latency-p90", 3), ("latency-p95", 4),
     ("latency-p99", 5), ("memory", 6), ("gpu-memory", 6), ("energy", 35), ("score", 0.5)],
)  # fmt: skip
def test_values(name: str, value: float) -> None:
    assert METRICS[name].value(FULL) == value


def test_every_metric_is_tested_above() -> None:
    parametrised: list[tuple[str, float]] = test_values.pytestmark[0].args[1]  # type: ignore[attr-defined]
    assert [name for name, _ in parametrised] == list(METRICS)


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_unknown_is_never_zero(metric: Metric) -> None:
    assert metric.value(Measurement()) is None
    assert metric.cost(Measurement()) is None


@pytest.mark.parametrize("name", METRICS)
def test_names_are_their_keys_and_units_are_given(name: str) -> None:
    assert METRICS[name].name == name
    assert METRICS[name].unit or name == "score"


def test_cost_is_lower_where_the_metric_is_better() -> None:
    assert METRICS["throughput"].cost(FULL) == -2000
    assert METRICS["latency-p95"].cost(FULL) == 4


def test_what_is_no_number_is_unknown() -> None:
    assert METRICS["latency-p95"].cost(Measurement(latency_p95_ms=math.nan)) is None


def test_memory_is_the_gpus_where_known_else_the_servers() -> None:
    memory = METRICS["memory"]
    assert memory.value(Measurement(gpu_memory_bytes=0.0, server_memory_bytes=8)) == 0
    assert memory.value(Measurement(server_memory_bytes=8)) == 8


@pytest.mark.parametrize("rate", [None, 0.0])
def test_energy_of_no_inference_is_unknown(rate: float | None) -> None:
    measurement = Measurement(gpu_power_watts=70, throughput_infer_per_sec=rate)
    assert METRICS["energy"].value(measurement) is None


def test_a_new_measurement_is_not_stable() -> None:
    assert not Measurement().stable
