"""Forecasts compared with measurements: on the report page, in data frames and by ``tune explain``."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from objectives.metrics import Forecast, Measurement
from optimizer.cli.report import main
from optimizer.core.candidate import Candidate
from optimizer.core.trial import LoadPoint, Trial
from optimizer.explain.explain_report import print_explanation
from optimizer.explain.explanation import explain
from optimizer.explain.explanation_document import document
from optimizer.results.finished_run import read_run
from optimizer.results.forecast_accuracy import check_forecasts
from optimizer.results.report.plots import MAX_FORECASTS, forecasts
from optimizer.store.trials_reader import FORECAST_COLUMNS
from tests.conftest import measurement
from tests.csv_tables import read_rows, write_rows

SAMPLE = Path("tests/data/dlrm/sample")
RIGHT = Forecast(100.0, 90.0, 110.0, 10.0, 8.0, 12.0, "latency-p95")


def trial(number: int, *measured: Measurement) -> Trial:
    return Trial(number, Candidate(8), tuple((LoadPoint(1, load), m) for load, m in enumerate(measured, start=1)))


def test_only_stable_measurements_with_a_forecast_are_checked() -> None:
    trials = [
        trial(0, measurement(100, 10)),
        trial(1, replace(measurement(105, 9), forecast=RIGHT), replace(measurement(80, 12.5), forecast=RIGHT)),
        trial(2, replace(measurement(300, 40, stable=False), forecast=RIGHT)),
        trial(3, replace(measurement(110, 16), forecast=RIGHT)),
    ]
    checks = check_forecasts(trials)
    assert [check.measured for check in checks.throughput] == [105, 80, 110]
    assert [check.is_inside for check in checks.throughput] == [True, False, True]
    assert [check.is_inside for check in checks.latency] == [True, False, False]
    assert checks.throughput[1].error == pytest.approx(0.25)
    assert str(checks) == (
        "Of 3 measurements that the search forecast, 2 of the throughputs and 1 of the latencies were within "
        "the 95 % interval; the median errors were 9 % and 20 %."
    )


def test_the_latency_is_that_of_the_forecast() -> None:
    checks = check_forecasts(
        [trial(0, replace(measurement(100, 10), forecast=replace(RIGHT, latency="latency-p99")))]
    )
    assert checks.latency[0].measured == pytest.approx(13.0)
    assert not checks.latency[0].is_inside


def test_nothing_is_drawn_or_said_without_forecasts() -> None:
    checks = check_forecasts([trial(0, measurement(100, 10))])
    assert str(checks) == ""
    assert forecasts(checks) is None


def test_the_measurements_are_numbered_with_whole_numbers() -> None:
    trials = [trial(number, replace(measurement(100, 10), forecast=RIGHT)) for number in (1, 2)]
    drawn = forecasts(check_forecasts(trials))
    assert drawn is not None
    for axes in drawn.figure.axes:
        assert all(float(place).is_integer() for place in axes.get_xticks())


def test_a_long_search_is_drawn_in_even_steps() -> None:
    trials = [trial(number, replace(measurement(100 + number / 10, 10), forecast=RIGHT)) for number in range(1000)]
    drawn = forecasts(check_forecasts(trials))
    assert drawn is not None
    shown = [text for name, labels in drawn.labels.items() if name.startswith("throughput") for text in labels]
    assert 0.5 * MAX_FORECASTS < len(shown) <= MAX_FORECASTS
    assert shown[0].startswith("trial 0: ")
    assert shown[0].endswith("; forecast: 100 infer/s (90.0 to 110)")


# -- runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the sample with forecasts of 1.1 times each throughput, and of half of each latency (outside)."""
    folder = Path(shutil.copytree(SAMPLE, tmp_path / "dlrm" / "sample"))
    table = folder / "trials.csv"
    write_rows(
        table, ({**row, **dict(zip(FORECAST_COLUMNS, forecast_cells(row), strict=True))} for row in read_rows(table))
    )
    return folder


def forecast_cells(row: dict[str, str]) -> Sequence[object]:
    if row["confirmation"] or row["trial"] == "0" or not row["throughput_infer_per_sec"]:
        return [""] * len(FORECAST_COLUMNS)
    throughput, latency = float(row["throughput_infer_per_sec"]), float(row["latency_p95_ms"])
    expected = [1.1 * throughput, 0.9 * throughput, 1.3 * throughput]
    return [*expected, 0.5 * latency, 0.4 * latency, 0.9 * latency, "latency-p95"]


def test_the_report_compares_forecasts_with_measurements(run: Path) -> None:
    assert main([str(run), "--format", "html,markdown,csv,svg", "--out", str(run / "out")]) == 0
    page, text = ((run / "out" / name).read_text() for name in ("report.html", "report.md"))
    count = len(check_forecasts(read_run(run).trials).throughput)
    said = f"Of {count} measurements that the search forecast, {count} of the throughputs and 0 of the latencies"
    assert count > 10
    assert said in page
    assert said in text
    assert "Forecasts of the search" in re.findall(r'<a href="#run-1-part-forecasts">(.*?)</a>', page)
    assert (run / "out" / "forecasts.svg").exists()
    frame = pd.read_csv(run / "out" / "measurements.csv")
    assert frame.forecast_latency.dropna().unique().tolist() == ["latency-p95"]
    forecast_rows = frame[frame.forecast_latency.notna()]
    assert forecast_rows.forecast_throughput_infer_per_sec.tolist() == pytest.approx(
        (1.1 * forecast_rows.throughput_infer_per_sec).tolist()
    )


def test_a_report_without_forecasts_has_no_such_section(tmp_path: Path) -> None:
    assert main([str(SAMPLE), "--format", "markdown", "--out", str(tmp_path)]) == 0
    assert "Forecasts of the search" not in (tmp_path / "report.md").read_text()


def test_an_explanation_says_how_good_the_forecasts_were(run: Path) -> None:
    explanation, out = explain(read_run(run)), io.StringIO()
    print_explanation(Console(file=out, width=200), explanation)
    assert "0 of the latencies were within the 95 % interval" in " ".join(out.getvalue().split())
    made = json.loads(json.dumps(document(explanation)))["forecasts"]
    assert made["throughput"]["median_error"] == pytest.approx(0.1, abs=1e-4)
    assert made["throughput"]["within_interval"] == made["throughput"]["measurements"]
    assert made["latency"] == {"measurements": made["throughput"]["measurements"]} | {
        "within_interval": 0,
        "median_error": pytest.approx(0.5, abs=1e-4),
    }
    assert document(explain(read_run(SAMPLE)))["forecasts"] == {"throughput": None, "latency": None}
