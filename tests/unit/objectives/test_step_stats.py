"""Test the text with the statistics of the models that serve parts of a request."""

from __future__ import annotations

import pytest

from objectives.metrics import Measurement
from objectives.pooled_windows import pool_measurements
from objectives.step_stats import StepStatistic, from_text, to_text

CHAIN = StepStatistic("chain", 0, 100, 100, 500, 90_000, 90_000)
FIRST = StepStatistic("first step: ü", 2, 100, 30, 4_000, 60_000, 20_000)


def test_statistics_are_read_back_with_any_name_of_a_model() -> None:
    text = to_text([CHAIN, FIRST])
    assert text.startswith("chain:0:100:100:500:90000:90000 first")
    assert len(text.split()) == 2
    assert from_text(text) == (CHAIN, FIRST)
    assert from_text("") == ()


@pytest.mark.parametrize("text", ["chain", "chain:0:1:1:1:1", "a:0:1:1:1:1:-1", "a%0A:0:1:1:1:1:1", ":0:1:1:1:1:1"])
def test_another_text_is_refused_with_the_expected_form(text: str) -> None:
    with pytest.raises(ValueError, match="not a list of model:instances:requests:executions:queue_ns:compute_ns"):
        from_text(text)


def test_the_counters_of_windows_are_summed_by_model() -> None:
    window = Measurement(100.0, step_stats=to_text([CHAIN, FIRST]), stable=True)
    pooled = pool_measurements([window, Measurement(reason="lost"), window])
    assert from_text(pooled.step_stats) == (
        StepStatistic("chain", 0, 200, 200, 1_000, 180_000, 180_000),
        StepStatistic("first step: ü", 2, 200, 60, 8_000, 120_000, 40_000),
    )
    assert pool_measurements([Measurement(100.0, stable=True)]).step_stats == ""
