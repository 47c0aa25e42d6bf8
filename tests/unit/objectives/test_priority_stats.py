"""Statistics of the requests of each priority as text, and of several windows together."""

from __future__ import annotations

import numpy as np
import pytest

from objectives.latency_sketch import sketch_latencies
from objectives.metrics import Measurement
from objectives.pooled_windows import pool_measurements
from objectives.priority_stats import PriorityStatistic, from_text, pool, to_text

FAST = PriorityStatistic(1, 3, 0, 1, 0, 30.0, sketch_latencies(np.array([1.0, 2.0, 3.0])))
NONE = PriorityStatistic(2, 0, 5, 0, 2, 0.0)


def test_statistics_are_read_as_they_were_written() -> None:
    assert from_text(to_text([FAST, NONE])) == (FAST, NONE)
    assert from_text("") == ()
    assert FAST.latency_ms(0.5) == pytest.approx(2.0, rel=0.01)
    assert NONE.latency_ms(0.5) is None
    assert NONE.errors == 7


@pytest.mark.parametrize("text", ["1", "1:2:3:4:5:6.0", "1:2:3:4:-5:6.0:", "1:2:3:4:5:nan:", "1:0:0:0:0:0.0:AAAA"])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"priority:served|sketch"):
        from_text(text)


def test_windows_are_pooled() -> None:
    slow = PriorityStatistic(1, 3, 1, 0, 0, 10.0, sketch_latencies(np.array([7.0, 8.0, 9.0])))
    windows = [
        Measurement(10.0, by_priority=to_text(statistics), stable=True) for statistics in ([FAST, NONE], [slow])
    ]
    first, second = from_text(pool_measurements(windows).by_priority)
    assert (first.served, first.rejected, first.timed_out, first.throughput_infer_per_sec) == (6, 1, 1, 20.0)
    assert first.latency_ms(1.0) == pytest.approx(9.0, rel=0.01)
    assert (second.rejected, second.failed, second.sketch) == (5, 2, "")
    assert pool([windows[0].by_priority, ""]) == ""
