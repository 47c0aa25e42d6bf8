"""The comparison of forecasts with measurements, on made-up runs and recorded tables."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from objectives.sla import Sla
from optimizer.config.search_space import Problem, SearchSpace
from optimizer.core.trial import Candidate, LoadPoint, Trial
from optimizer.replay.engine import recorded_problem
from optimizer.search.candidate_selector import fit_surrogate
from optimizer.store.recording import read_recording
from optimizer.store.trials_table import TrialsTable
from tests.conftest import known_server, measurement
from tests.run_folders import write_run

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import forecast_errors
from forecast_errors import LEVELS, Check, SearchChecks
from tune_runs import TuneRun

SPACE = SearchSpace((1, 8), ("off", 0), instance_count=(1, 2))
PROBLEM = Problem("made-up", SPACE, 1, 16, sla=Sla.from_bounds({"p95": 20.0}))


def trial(number: int, candidate: Candidate, *loads: LoadPoint, stable: bool = True) -> Trial:
    measured = [known_server(candidate, load.concurrency, 1) for load in loads]
    if not stable:
        measured = [measurement(100, 5, stable=False)]
    return Trial(number, candidate, tuple(zip(loads, measured, strict=True)))


def check(measured: float, *quantiles: float) -> Check:
    assert len(quantiles) == len(LEVELS)
    return Check(measured, quantiles)


def test_an_interval_of_80_percent_is_inside_that_of_95_percent() -> None:
    own = check(120.0, 100.0, 90.0, 110.0, 80.0, 130.0)
    assert (own.is_inside(0), own.is_inside(1)) == (False, True)
    assert own.error == pytest.approx(1 / 6)


def test_each_stable_measurement_is_forecast_from_the_trials_before() -> None:
    four = LoadPoint(1, 4)
    trials = [
        trial(1, Candidate(8, True), four, LoadPoint(1, 8)),
        trial(0, Candidate(1), four),  # nothing was known before
        trial(2, Candidate(8, True, instance_count=2), four, stable=False),
    ]
    made = forecast_errors.checks("m", "run", PROBLEM, trials, 0)
    assert len(made.throughput) == len(made.latency) == 2
    cells = [(Candidate(8, True), 4), (Candidate(8, True), 8)]
    medians = fit_surrogate(PROBLEM, [trials[1]]).measurement_quantiles(cells, [0.5])
    for own, expected in zip((made.throughput, made.latency), medians, strict=True):
        assert [one.quantiles[0] for one in own] == pytest.approx(expected[0].tolist())
        for one in own:
            low, low_80, middle, high_80, high = sorted(one.quantiles)
            assert one.quantiles == (middle, low_80, high_80, low, high)
    assert made.latency[0].measured == pytest.approx(1e-3 * (trials[0].measurements[0][1].latency_p95_ms or 0))


def test_a_recorded_table_is_searched(tmp_path: Path) -> None:
    table = TrialsTable(tmp_path / "made-up.csv", "made-up", {})
    for number, candidate in enumerate(SPACE.candidates()):
        for load in (1, 4, 16):
            table.append(Trial(number, candidate), LoadPoint(1, load), known_server(candidate, load, 1))
    recording = read_recording(tmp_path / "made-up.csv")
    problem = recorded_problem(recording, {"p95": 20.0})
    trials = forecast_errors.search(recording, problem, 0)
    made = forecast_errors.checks("made-up", "table", problem, trials, 0)
    recorded = [m.forecast for t in trials for _, m in t.measurements if m.forecast is not None and m.stable]
    assert [one.throughput_infer_per_sec for one in recorded] == pytest.approx(
        [one.quantiles[0] for one in made.throughput], rel=1e-5
    ), "the search has recorded the same forecasts"


def test_only_runs_that_are_missing_or_unfinished_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = write_run(tmp_path / "dlrm", "dlrm")
    write_run(tmp_path / "mlp", "mlp", status="running")
    made: list[str] = []

    def run_tune(words: list[str], out: Path) -> TuneRun:
        made.append(words[-1])
        return TuneRun(0, 1.0, 0.0, out / words[-1] / "new", {})

    monkeypatch.setattr(forecast_errors, "run_tune", run_tune)
    first, *rest = forecast_errors._made_runs(tmp_path, "1m")
    assert first == kept
    assert made == list(forecast_errors.MODELS[1:])
    assert rest == [tmp_path / model / "new" for model in made]


def test_the_report_judges_the_coverage_of_runs_and_tables_apart() -> None:
    inside, outside = check(100.0, 100.0, 90.0, 110.0, 80.0, 130.0), check(200.0, 100.0, 90.0, 110.0, 80.0, 130.0)
    searches = [
        SearchChecks("dlrm", "run", [inside] * 4 + [outside], [inside] * 5),
        SearchChecks("dlrm", "run", [inside] * 4 + [outside], [outside] * 5),
        SearchChecks("wide", "table", [inside] * 19 + [outside], [inside] * 20),
        SearchChecks("mlp", "run", [], []),
    ]
    text = "\n".join(forecast_errors.report(searches, ("1.0 %", "3.2 %")))
    assert "| dlrm | run | 2 | 10 | 0.0% | 80% | 80% | 25.0% | 50% | 50% |" in text
    assert "| **all** | table | 1 | 20 | 0.0% | 95% | 95% | 0.0% | 100% | 100% |" in text
    assert "| mlp |" not in text
    assert "- runs, throughput, 80 %: 80.0% (75% to 85%: met)" in text
    assert "- tables, throughput, 95 %: 95.0% (92% to 98%: met)" in text
    assert "- runs, latency, 95 %: 50.0% (92% to 98%: **missed**)" in text
    assert "1.0 % in throughput and 3.2 % in p95" in text


def test_the_errors_of_the_sleeping_model_are_read_from_its_page() -> None:
    throughput, p95 = forecast_errors._proof_errors()
    assert float(throughput.removesuffix(" %")) < float(p95.removesuffix(" %")) < 20
