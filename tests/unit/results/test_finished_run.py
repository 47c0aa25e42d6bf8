"""Tests of reading a run from its folder."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from objectives.sla import Sla, Verdict
from optimizer.confirmation.confirmer import model_fitter
from optimizer.confirmation.load_predictions import predict_loads
from optimizer.core.errors import BadInputError
from optimizer.core.load_shapes import RequestTimes
from optimizer.core.trial import latest_points
from optimizer.results.finished_run import read_run
from tests.run_folders import change_info

SAMPLE = Path("tests/data/dlrm/sample")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLE, tmp_path / "dlrm" / "sample"))


def test_the_outcome_is_that_in_run_json(run: Path) -> None:
    run_read = read_run(run)
    info = json.loads((run / "run.json").read_text())
    assert run_read.outcome is not None
    assert run_read.outcome.recommended is not None
    assert run_read.status == info["status"]
    assert run_read.name == "dlrm/sample"
    assert run_read.outcome.speedup == pytest.approx(info["result"]["speedup"])
    assert run_read.outcome.recommended.trial == info["result"]["recommended"]["trial"]
    assert run_read.problem.sla == Sla.from_bounds({"p95": 20.0})
    assert len(run_read.problem.space) == info["problem"]["candidates"]


def test_the_runs_of_two_batches_have_different_names(run: Path, tmp_path: Path) -> None:
    batches = [tmp_path / "batches" / "nightly" / stamp for stamp in ("20261129-020000", "20261130-020000-2")]
    names = [read_run(shutil.copytree(run, batch / "dlrm-p95-20-ms")).name for batch in batches]
    assert names == ["20261129-020000/dlrm-p95-20-ms", "20261130-020000-2/dlrm-p95-20-ms"]


def test_a_run_with_a_recommendation_needs_its_trials(run: Path) -> None:
    (run / "trials.csv").unlink()
    with pytest.raises(BadInputError, match=r"trials\.csv: missing or empty, but run\.json has a recommendation"):
        read_run(run)


@pytest.mark.parametrize(
    ("recorded", "gpus", "count"),
    [
        ({"cpu_count": 12}, [], 12),
        ({"cpu_count": 12}, ["Tesla T4"], 12),  # the model is served on the CPU
        ({"cpu_count": None}, [], None),
        ({}, [], 2),  # an older run
        ({}, ["Tesla T4"], None),
    ],
)
def test_the_cpus_of_the_server_are_those_of_the_search(
    run: Path, recorded: dict[str, int | None], gpus: list[str], count: int | None
) -> None:
    info = json.loads((run / "run.json").read_text())
    change_info(run, problem=info["problem"] | recorded, hardware=info["hardware"] | {"gpus": gpus})
    assert read_run(run).problem.cpu_count == count


def cut_table(run: Path) -> None:
    """Cut trials.csv within a row; of the recommended trial it keeps the search, and one of its servers."""
    content = (run / "trials.csv").read_text()
    lines = content.splitlines(keepends=True)
    place = lines[0].split(",").index("confirmation")
    first = next(i for i, line in enumerate(lines) if line.split(",")[place] == "1")
    (run / "trials.csv").write_text("".join(lines[: first + 1]) + lines[first + 1][:40])


def test_a_cut_table_is_refused_if_the_result_counts_its_rows(run: Path) -> None:
    cut_table(run)
    with pytest.raises(BadInputError) as caught:
        read_run(run)
    assert str(caught.value) == (
        f"{run}/trials.csv: lacks measurements that the result in run.json has (59 of 60 on fresh servers); restore "
        f"the file, or begin a new run (`tune --warm-start {run}` learns from this one)"
    )


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_a_table_without_the_recommended_trial_is_refused(run: Path, rows: int) -> None:
    lines = (run / "trials.csv").read_text().splitlines(keepends=True)
    (run / "trials.csv").write_text("".join(lines[: rows + 1]))
    with pytest.raises(BadInputError, match=rf"{28 - rows} of 28 .*, the recommended load of trial 10\)"):
        read_run(run)
    change_info(run, status="none")
    with pytest.raises(BadInputError, match=f"{28 - rows} of 28 of the search, 60 of 60 on"):
        read_run(run)


def test_another_load_of_the_recommended_trial_is_not_enough(run: Path) -> None:
    result = json.loads((run / "run.json").read_text())["result"]
    change_info(run, result=result | {"recommended": result["recommended"] | {"concurrency": 999}})
    with pytest.raises(BadInputError, match=r"\(the recommended load of trial 10\); restore the file"):
        read_run(run)


@pytest.mark.parametrize(
    "values",
    [{"status": "running", "result": {}}, {"status": "running"}, {"status": "interrupted"}, {"result": {}}],
    ids=["killed", "killed with an earlier result", "interrupted", "no result"],
)
def test_a_cut_table_of_a_run_that_was_cut_off_is_read(run: Path, values: dict[str, object]) -> None:
    cut_table(run)
    change_info(run, **values)
    outcome = read_run(run).outcome
    assert outcome is not None
    assert (outcome.measurements, outcome.confirmations) == (28, 1)


def test_gains_of_the_recorded_run_are_from_fresh_servers(run: Path) -> None:
    outcome = read_run(run).outcome
    assert outcome is not None
    gain = outcome.baseline.gain
    assert gain is not None
    assert gain.ratio is not None
    assert gain.ratio.is_measurable
    assert gain.ratio.interval.low < 2.86 < gain.ratio.interval.high
    assert outcome.dynamic_batching is not None
    assert outcome.dynamic_batching.point is not None
    assert outcome.confirmation_of(outcome.dynamic_batching.point) is None
    assert outcome.dynamic_batching.gain is None


def test_the_front_of_the_recorded_run_is_not_dominated_by_a_row(run: Path) -> None:
    outcome = read_run(run).outcome
    assert outcome is not None
    rows = pd.read_csv(run / "trials.csv")
    confirmed = {
        (point.trial, point.load.concurrency) for entry in outcome.confirmed_loads for point in [entry.point]
    }
    searched = rows[rows.confirmation.isna() & rows.stable].drop_duplicates(["trial", "concurrency"], keep="last")
    for point in outcome.front.points:
        served, p95_ms = point.throughput_infer_per_sec, point.measurement.latency_p95_ms or 0.0
        better = searched[(searched.throughput_infer_per_sec > served) & (searched.latency_p95_ms < p95_ms)]
        assert set(zip(better.trial, better.concurrency, strict=True)) <= confirmed
    assert outcome.front.dominating is None
    assert outcome.recommended in outcome.front.points


def test_a_measurement_of_the_search_may_dominate_the_recommendation() -> None:
    outcome = read_run(Path("results/dlrm/sample")).outcome
    assert outcome is not None
    assert outcome.front.dominating is not None
    assert (outcome.front.dominating.trial, outcome.front.dominating.load.concurrency) == (7, 41)
    assert outcome.recommended not in outcome.front.points


def test_a_load_that_the_search_did_not_try_is_predicted_for_a_comparison(run: Path) -> None:
    """The test keeps only the lowest load of the baseline, which met the bound up to 19 requests in flight."""
    finished = read_run(run)
    points = [point for point in latest_points(finished.trials) if point.trial or point.load.concurrency == 4]
    (lowest,) = (point for point in points if point.candidate == finished.baseline)
    model = model_fitter(finished.problem, finished.options)(points)
    assert model is not None
    predictions = predict_loads(lowest, points, finished.problem, model, every_load=True)
    assert 13 <= predictions.first_compared_load.concurrency <= 18


def test_the_run_that_the_readme_shows_is_complete() -> None:
    sample = Path("results/dlrm/sample")
    run_read = read_run(sample)
    assert run_read.outcome is not None
    confirmed = run_read.outcome.confirmed
    assert confirmed is not None
    assert confirmed.judged.verdict is Verdict.PASS
    assert run_read.problem.client_shares_cpus  # then perf_analyzer may measure less without blocking PASS
    assert {"pareto.csv", "report.html", "best"} <= {path.name for path in sample.iterdir()}
    assert (sample / "best/config.pbtxt").read_text()


def test_a_run_is_found_in_the_results_folder(run: Path) -> None:
    assert read_run("dlrm/sample", str(run.parent.parent)).folder.path == run


def test_a_torn_line_is_skipped_and_kept(run: Path) -> None:
    whole = read_run(run).trials
    with (run / "trials.csv").open("a") as table:
        table.write("dlrm,99,4")
    before = (run / "trials.csv").read_bytes()
    assert read_run(run).trials == whole
    assert (run / "trials.csv").read_bytes() == before


def test_a_run_without_measurements_has_no_outcome(run: Path) -> None:
    (run / "trials.csv").unlink()
    change_info(run, status="interrupted")
    assert read_run(run).outcome is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not the record of a run"),
        ("[]", "not the record of a run"),
        ('{"options": {}}', "no 'schema_version'"),
        ('{"schema_version": 0, "options": {}}', "schema_version 0, but this version of tune reads 1"),
        ('{"schema_version": 1, "options": {}}', "not the record of a run"),
        ('{"schema_version": 1, "options": {"model": "dlrm"}}', "not the record of a run"),
        (
            '{"schema_version": 1, "options": {"model": "dlrm"}, "problem": {}, "hardware": {}}',
            "no 'request_batch_size'",
        ),
    ],
)
def test_a_damaged_record_is_refused_in_one_line(run: Path, text: str, message: str) -> None:
    (run / "run.json").write_text(text)
    with pytest.raises(BadInputError, match=message) as caught:
        read_run(run)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("problem.request_batch_size", 0, "request_batch_size 0 is not a number from 1 to 2147483647"),
        ("problem.request_batch_size", "4", "request_batch_size '4' is not a number"),
        ("problem.space.instance_count", [1, 999999999], "instance_count 999999999 is not a whole number"),
        ("problem.baseline.instance_count", 0, "instance_count 0 is not a whole number from 1 to 1024"),
        ("problem.baseline.max_queue_delay_us", int("9" * 20), "max_queue_delay_us 9+ is not a whole number"),
        ("problem.dynamic_batching.max_batch_size", "8", "max_batch_size '8' is not a whole number"),
        ("problem.baseline.dynamic_batching", [], r"dynamic_batching \[\] is neither true nor false"),
        ("problem.facts", [], "facts is not an object"),
        ("problem.cpu_count", 0, "problem.cpu_count 0 is not a number of CPUs"),
        ("problem.cpu_count", True, "problem.cpu_count True is not a number of CPUs"),
        ("hardware.cpu_count", 0, "hardware.cpu_count 0 is not a number of CPUs"),
        ("hardware.gpus", 5, "hardware.gpus is not a list of names"),
        ("hardware.cpu", None, "hardware.cpu is not a name"),
    ],
)
def test_a_value_of_the_record_that_no_run_has_is_refused(run: Path, path: str, value: object, message: str) -> None:
    info = json.loads((run / "run.json").read_text())
    *parents, name = path.split(".")
    functools.reduce(lambda part, key: part[key], parents, info)[name] = value
    (run / "run.json").write_text(json.dumps(info))
    with pytest.raises(BadInputError, match=message) as caught:
        read_run(run)
    assert str(caught.value).startswith(f"{run}/run.json: not the record of a run (")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ({"distribution": 7}, "request_times.distribution is not a name"),
        ({"distribution": "spike:x"}, "write spike:FACTORx:SHARE%:DURATION"),
        ({"period_seconds": 1e9}, "request_times.period_seconds 1000000000.0 is not from 0 to 60"),
        ({"recorded_requests": -1}, "requests -1 is not a whole number"),
        ({"recorded_requests": "many"}, "requests 'many' is not a whole number"),
        ({"recorded_shares": [0.5, "half"]}, "request_times.recorded_shares are not from 0 to 1"),
        ({"recorded_shares": [0.0, 0.0]}, "request_times.recorded_shares do not add up to 1"),
        ({"other": 1}, "other"),
    ],
)
def test_times_of_requests_that_no_run_has_are_refused(run: Path, times: dict[str, object], message: str) -> None:
    whole = {"distribution": "spike:2s", "period_seconds": 2.0, "recorded_requests": 0}
    change_info(change_info(run, "options", load="rate"), "problem", request_times=whole)
    assert read_run(run).problem.request_times == RequestTimes("spike:2s", 2.0)
    recorded = {"distribution": "trace.csv", "recorded_requests": 8, "recorded_shares": [0.25, 0.75]}
    change_info(run, "problem", request_times=recorded)
    assert read_run(run).problem.request_times == RequestTimes("trace.csv", 0.0, 8, (0.25, 0.75))
    change_info(run, "problem", request_times={**whole, **times})
    with pytest.raises(BadInputError, match=message) as caught:
        read_run(run)
    assert "\n" not in str(caught.value)


def test_a_folder_without_run_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"no run\.json there"):
        read_run(tmp_path)
