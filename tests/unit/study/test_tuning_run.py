from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from objectives.confidence import Verdict
from objectives.metrics import Measurement
from objectives.sequential import LOOKS
from optimizer.core.endpoint import Endpoint
from optimizer.core.notes import HighestConcurrency, LessThanInSearch, SpeedVaried, UntestedServedMore
from optimizer.core.trial import Confirmation, LoadPoint, Trial
from optimizer.results.recommendation import assess
from optimizer.store.run_folder import RunFolder
from optimizer.study.run_notes import (
    _highest_concurrency,
    _less_than_in_search,
    _untested_served_more,
    notes_on_measurements,
)
from optimizer.study.run_record import RunRecord, current_versions
from tests.drawn_server import BASELINE, FAST, FASTER, Drawing, drawn_problem, searched


@pytest.mark.parametrize(
    ("concurrency", "allowed", "noted"),
    [
        (8, 8, HighestConcurrency(8)),
        (8, 16, None),
        (15, 15, None),  # 18 of 20 ms: the bound limits it as well
    ],
)
def test_a_load_that_only_the_profile_limits_is_noted(
    concurrency: int, allowed: int, noted: HighestConcurrency | None
) -> None:
    problem = replace(drawn_problem(), max_concurrency=allowed)
    outcome = assess(searched(Drawing(), {FASTER: concurrency}), problem, BASELINE, FAST)
    assert outcome.recommended is not None
    assert outcome.recommended.load.concurrency == concurrency
    assert _highest_concurrency(outcome, problem) == noted


@pytest.mark.parametrize(("factor", "is_noted"), [(1.3, False), (2.0, True)])
def test_a_search_that_measured_much_more_is_noted(factor: float, is_noted: bool) -> None:
    problem, load = drawn_problem(), LoadPoint(1, 8)
    windows = [
        Confirmation(server, load, window, 0.01)
        for server in range(1, LOOKS[0] + 1)
        for window in Drawing().measure_windows(Endpoint("", FASTER), load, 0.5, 8)
    ]
    measured = factor * (windows[0].measurement.throughput_infer_per_sec or 0.0)
    searched = Measurement(measured, latency_p95_ms=12.0, stable=True)
    trial = Trial(1, FASTER, ((load, searched),), confirmations=tuple(windows))
    outcome = assess([trial], problem, BASELINE, FAST)
    assert outcome.confirmed is not None
    assert outcome.recommended is not None
    assert outcome.confirmed.judged.verdict is Verdict.PASS
    served = outcome.recommended.throughput_infer_per_sec
    expected = LessThanInSearch(measured, served) if is_noted else None
    assert _less_than_in_search(outcome, [trial], problem) == expected
    assert _untested_served_more(outcome, [trial], problem) is None
    untested = Trial(2, FAST, ((load, searched),))
    expected_other = UntestedServedMore(2, measured) if is_noted else None
    assert _untested_served_more(outcome, [trial, untested], problem) == expected_other


def test_the_speed_is_compared_over_all_sessions() -> None:
    load = LoadPoint(1, 4)
    first, second = Measurement(100.0, speed_probe_ms=20.0), Measurement(60.0, speed_probe_ms=32.0)
    trial = Trial(0, FAST, ((load, first),), confirmations=(Confirmation(1, load, second, 0.01),))
    assert SpeedVaried(1.6) in notes_on_measurements([trial])


@pytest.mark.parametrize(
    ("before", "now", "recorded"),
    [
        ({"versions": {"tritonserver": "2.51.0"}}, "", "2.51.0"),
        ({"versions": {"tritonserver": "unknown"}}, "2.51.0", "2.51.0"),
        ({"versions": ["2.51.0"]}, "", "unknown"),
        ({}, "2.51.0", "2.51.0"),
        ({}, "", "unknown"),
    ],
)
def test_a_session_without_a_server_keeps_the_version_of_the_run(
    before: dict[str, object], now: str, recorded: str, tmp_path: Path
) -> None:
    versions = current_versions(before)
    record = RunRecord(RunFolder(tmp_path), None, None, None, (), versions=versions)  # type: ignore[arg-type]
    with record.adding_version(lambda: now):
        pass
    assert record.versions["tritonserver"] == recorded
    assert record.versions["tritune"]
