"""The stopwatch: times by kind of work, and parts of the own time."""

from __future__ import annotations

import math
import time

import pytest

from optimizer.core.stopwatch import Stopwatch, with_earlier_times


def test_parts_of_the_own_time_are_part_of_it() -> None:
    stopwatch = Stopwatch()
    with stopwatch.count("load_generator"):
        time.sleep(0.05)
    for _ in range(2):
        with stopwatch.count_own("rows"):
            time.sleep(0.02)
    with pytest.raises(RuntimeError):
        _fail_within(stopwatch)
    times = {name: value or 0.0 for name, value in stopwatch.report().items()}
    assert times["own_rows_seconds"] >= 0.04
    assert times["own_probes_seconds"] >= 0.02, "also if the work fails"
    assert times["own_display_seconds"] == 0.0
    assert times["own_rows_seconds"] + times["own_probes_seconds"] <= times["own_seconds"] + 0.002
    assert times["own_seconds"] == pytest.approx(times["wall_seconds"] - times["load_generator_seconds"], abs=0.002)


def _fail_within(stopwatch: Stopwatch) -> None:
    with stopwatch.count_own("probes"):
        time.sleep(0.02)
        raise RuntimeError


def test_the_times_of_earlier_sessions_are_added() -> None:
    now = {"wall_seconds": 2.5, "own_seconds": 0.5, "peak_memory_bytes": 100}
    earlier = {"wall_seconds": 10.0, "own_seconds": 1, "peak_memory_bytes": 300, "older_seconds": 4.0}
    assert with_earlier_times(now, earlier) == {"wall_seconds": 12.5, "own_seconds": 1.5, "peak_memory_bytes": 300}
    assert with_earlier_times({"peak_memory_bytes": None}, earlier) == {"peak_memory_bytes": 300}


@pytest.mark.parametrize(
    "earlier", [None, [], {"wall_seconds": "10"}, {"wall_seconds": math.nan}, {"wall_seconds": -1}]
)
def test_damaged_times_of_earlier_sessions_are_left_out(earlier: object) -> None:
    assert with_earlier_times({"wall_seconds": 2.5}, earlier) == {"wall_seconds": 2.5}
