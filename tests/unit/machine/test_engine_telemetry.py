"""Tests of the metrics of language models' engines: pages of a server, and the usage during a measurement."""

from __future__ import annotations

from pathlib import Path

import pytest

from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.resource_usage import ResourceUsage
from optimizer.machine.engine_telemetry import (
    EngineReading,
    EngineTelemetry,
    engine_reading,
    read_engine,
    summarize,
)
from optimizer.machine.metrics_page import parse_metrics_page
from tests.telemetry_fakes import FixedTelemetry, metrics_server

# recorded from the server of tests/stack/test_llm_backends.py, whose backend is a stand-in with vLLM's names
VLLM_PAGE = Path(__file__).parents[2].joinpath("data", "vllm_metrics.txt").read_text()
# written after the example in NVIDIA's documentation of the backend
TENSORRT_LLM_PAGE = """\
# TYPE nv_trt_llm_request_metrics gauge
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 7
# TYPE nv_trt_llm_kv_cache_block_metrics gauge
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="tensorrt_llm",version="1"} 64
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="tensorrt_llm",version="1"} 150
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="free",model="tensorrt_llm",version="1"} 50
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 200
"""


def test_the_metrics_pages_of_both_backends_are_read() -> None:
    assert engine_reading(parse_metrics_page(VLLM_PAGE), 2.0) == EngineReading(2.0, 0.01205555555555556, 1482.0, 0.0)
    assert engine_reading(parse_metrics_page(TENSORRT_LLM_PAGE), 2.0) == EngineReading(2.0, 0.75)


def test_readings_of_several_engines_with_the_newer_metric_name_are_combined() -> None:
    page = 'vllm:kv_cache_usage_perc{model="a"} 0.5\nvllm:kv_cache_usage_perc{model="b"} 0.25\n'
    page += 'vllm:generation_tokens_total{model="a"} 10\nvllm:generation_tokens_total{model="b"} 5\n'
    assert engine_reading(parse_metrics_page(page), 0.0) == EngineReading(0.0, 0.5, 15.0)


@pytest.mark.parametrize(
    "page",
    [
        "",
        "nv_inference_count 3",
        'vllm:gpu_cache_usage_perc{model="a"} many',
        TENSORRT_LLM_PAGE.replace(" 200", " 0"),
    ],
)
def test_metrics_that_are_not_exported_are_unknown(page: str) -> None:
    assert engine_reading(parse_metrics_page(page), 0.0) == EngineReading(0.0)


def test_the_rate_is_that_between_the_first_and_the_last_change() -> None:
    """The load begins after a second and ends before the last one."""
    counts = (100, 100, 110, 210, 310, 310)
    readings = [EngineReading(float(i), 0.1 * i, float(count), 2.0 + (i > 2)) for i, count in enumerate(counts)]
    usage = summarize(readings)
    assert usage.kv_cache_utilization == 0.5
    assert usage.engine_tokens_per_sec == 100.0
    assert usage.engine_preemptions == 1.0


@pytest.mark.parametrize("counts", [(), (5.0,), (5.0, 6.0)])
def test_too_few_readings_have_no_rate(counts: tuple[float, ...]) -> None:
    readings = [EngineReading(float(i), output_tokens=count) for i, count in enumerate(counts)]
    assert summarize(readings) == ResourceUsage()


GPU_TELEMETRY = FixedTelemetry(ResourceUsage(gpu_utilization=0.5))


def test_metrics_of_the_engine_are_added_to_those_of_the_machine() -> None:
    with (
        metrics_server(lambda: TENSORRT_LLM_PAGE) as address,
        EngineTelemetry(GPU_TELEMETRY).record(Endpoint("m", Candidate(1), metrics=address)) as usage,
    ):
        pass
    assert usage == ResourceUsage(gpu_utilization=0.5, kv_cache_utilization=0.75)


def test_a_server_without_metrics_leaves_them_unknown() -> None:
    with EngineTelemetry(GPU_TELEMETRY).record(Endpoint("m", Candidate(1))) as usage:
        pass
    assert usage == ResourceUsage(gpu_utilization=0.5)
    assert read_engine("127.0.0.1:1") is None
