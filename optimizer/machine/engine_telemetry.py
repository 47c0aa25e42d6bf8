"""Telemetry of the engine of a language model, from the metrics that the vLLM and TensorRT-LLM backends export."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from optimizer.core.endpoint import Endpoint
from optimizer.core.interfaces import Telemetry
from optimizer.core.resource_usage import ResourceUsage
from optimizer.machine.gpu_telemetry import counter_rate
from optimizer.machine.metrics_page import MetricsPage, read_metrics_page
from optimizer.machine.process_telemetry import sampled, total_of

INTERVAL_SECONDS = 0.25

# series that the backends export
_VLLM_CACHE_SHARES = ("vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc")  # used shares, in different versions
_TENSORRT_LLM_BLOCKS = "nv_trt_llm_kv_cache_block_metrics"  # blocks of the KV cache, by kind
_OUTPUT_TOKENS = "vllm:generation_tokens_total"
_PREEMPTIONS = "vllm:num_preemptions_total"  # requests that lost their place in the KV cache


@dataclass(frozen=True, slots=True)
class EngineReading:
    """The state of all engines of a server at one moment; None means unknown.

    ``at_seconds`` is monotonic time, ``kv_cache_share`` that of the fullest cache, 0 to 1. The others are counters
    with an arbitrary start.
    """

    at_seconds: float
    kv_cache_share: float | None = None
    output_tokens: float | None = None
    preemptions: float | None = None


def read_engine(address: str) -> EngineReading | None:
    """Return the state of the engines of a server; None if it exports none. ``address`` is that of its metrics."""
    reading = engine_reading(read_metrics_page(address), time.monotonic())
    return None if reading == EngineReading(reading.at_seconds) else reading


def _read_engines(endpoint: Endpoint) -> EngineReading | None:
    """Return the state of the engines of all servers, with the sum of their counters; None if one exports none."""
    readings = [read_engine(server.metrics) for server in endpoint.servers]
    exported = [reading for reading in readings if reading is not None]
    if len(exported) < len(readings):
        return None
    shares = [reading.kv_cache_share for reading in exported if reading.kv_cache_share is not None]
    return EngineReading(
        exported[0].at_seconds,
        max(shares, default=None),
        total_of([reading.output_tokens for reading in exported]),
        total_of([reading.preemptions for reading in exported]),
    )


def engine_reading(page: MetricsPage, at_seconds: float) -> EngineReading:
    """Return the reading on a metrics page. Counters are summed over the models."""
    shares = [value for name in _VLLM_CACHE_SHARES for value in _values(page, name)]
    used, most = (_values(page, _TENSORRT_LLM_BLOCKS, kv_cache_block_type=kind) for kind in ("used", "max"))
    shares += [used_blocks / blocks for used_blocks, blocks in zip(used, most, strict=False) if blocks > 0]
    tokens, preemptions = _values(page, _OUTPUT_TOKENS), _values(page, _PREEMPTIONS)
    return EngineReading(
        at_seconds,
        max(shares, default=None),
        sum(tokens) if tokens else None,
        sum(preemptions) if preemptions else None,
    )


def _values(page: MetricsPage, name: str, **labels: str) -> list[float]:
    """Return the values on ``page`` of the series ``name`` that have these labels."""
    return [value for all_labels, value in page.get(name, ()) if labels.items() <= all_labels.items()]


def summarize(readings: Sequence[EngineReading]) -> ResourceUsage:
    """Return the engine's values in ``readings``, which are ordered by time."""
    shares = [reading.kv_cache_share for reading in readings if reading.kv_cache_share is not None]
    tokens = [
        (reading.at_seconds, reading.output_tokens) for reading in readings if reading.output_tokens is not None
    ]
    preempted = [reading.preemptions for reading in readings if reading.preemptions is not None]
    return ResourceUsage(
        kv_cache_utilization=max(shares, default=None),
        engine_tokens_per_sec=counter_rate(tokens),
        engine_preemptions=max(0.0, preempted[-1] - preempted[0]) if preempted else None,
    )


class EngineTelemetry:
    """Adds the values of the engine, if the server exports them, to what ``telemetry`` records."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    @contextlib.contextmanager
    def record(self, endpoint: Endpoint) -> Iterator[ResourceUsage]:
        """Sample within the context; the values are filled in when it ends."""
        with self._telemetry.record(endpoint) as usage:
            if not endpoint.metrics:
                yield usage
                return
            with sampled(lambda: _read_engines(endpoint), INTERVAL_SECONDS) as readings:
                yield usage
            usage.fill_in(summarize(readings))
