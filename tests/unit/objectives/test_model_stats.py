"""Values of each model as text, and of several windows together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from objectives.latency_sketch import sketch_latencies
from objectives.metrics import Measurement
from objectives.model_stats import from_text, to_text
from objectives.pooled_windows import pool_measurements

SKETCH = sketch_latencies(np.array([1.0, 2.0]))
FAST = Measurement(30.5, latency_avg_ms=1.25, latency_p50_ms=1.0, latency_p95_ms=2.0, requests=300)
SLOW = Measurement(10.0, queue_ms=2.0, latency_avg_ms=4.0, latency_p50_ms=3.0, latency_p95_ms=8.0, requests=100)
BY_MODEL = {
    "a b:c=é": replace(FAST, requests_over_ms="20:13 10:155", latency_sketch=SKETCH, batch_stats="4:9:100 8:1:50"),
    "other": Measurement(),
}


def test_the_values_of_each_model_are_read_as_they_were_written() -> None:
    assert from_text(to_text(BY_MODEL)) == BY_MODEL
    assert from_text("") == {}


@pytest.mark.parametrize(
    ("end", "message"),
    [("20%3Ax::", "not a list of bounds"), (":AAAA:", "sketch"), ("::4%3Ax", "size:executions")],
    ids=["counts", "sketch", "batches"],
)
def test_a_part_of_another_form_is_refused(end: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_text(f"a:1:2:3:4:5:6:7:8:9:0:1:{end}")


def test_windows_are_pooled_by_model() -> None:
    windows = [Measurement(by_model=to_text({"a": a, "b": b}), stable=True) for a, b in ((FAST, SLOW), (SLOW, FAST))]
    pooled = from_text(pool_measurements(windows).by_model)
    assert pooled["a"] == pooled["b"]
    assert (pooled["a"].throughput_infer_per_sec, pooled["a"].requests) == (20.25, 400)
    assert pooled["a"].latency_avg_ms == (300 * 1.25 + 100 * 4.0) / 400
    assert pool_measurements([*windows, Measurement()]).by_model == ""
    assert pool_measurements([]).by_model == ""


def test_a_pooled_latency_is_that_of_the_slowest_model_over_all_windows() -> None:
    """The slowest model of each window need not be the same."""
    by_model = [to_text({"a": a, "b": b}) for a, b in ((FAST, SLOW), (SLOW, FAST))]
    windows = [Measurement(40.5, latency_avg_ms=4.0, requests=100, by_model=text) for text in by_model]
    assert pool_measurements(windows).latency_avg_ms == (300 * 1.25 + 100 * 4.0) / 400
    unknown = [replace(window, by_model=to_text({"a": FAST, "b": Measurement(10.0)})) for window in windows]
    assert pool_measurements(unknown).latency_avg_ms is None
