"""The stopwatch: times by kind of work, and parts of the own time."""

from __future__ import annotations

import time

import pytest

from optimizer.core.timing import Stopwatch


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
