"""The studies on a GPU in ``benchmarks/gpu``: their commands, and the comparison with published results."""

from __future__ import annotations

import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "seeds"))
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from gpu import pack, report, run
from gpu.steps import BERT, DLRM, ONE_BY_ONE, PROFILES, RANDOM, STUDIES, GpuStep, OnGpu, recommended

from optimizer.cli.run import read_run_arguments
from optimizer.cli.sweep import read_sweep_arguments
from optimizer.model.profile import parse_profile
from optimizer.results.finished_run import read_run
from optimizer.results.forecast_accuracy import check_forecasts

SAMPLE = Path(__file__).parents[3] / "results" / "dlrm" / "sample"
STEPS = [(study, step) for study in STUDIES.values() for step in study.steps if step.command != "rounds"]


@pytest.mark.parametrize(("study", "step"), STEPS)
def test_the_commands_are_tunes(study: OnGpu, step: GpuStep) -> None:
    read = read_run_arguments if step.command == "run" else read_sweep_arguments
    for words in filter(None, (step.words, step.smoke)):
        parsed: Any = read([*words.split(), *RANDOM.split(), f"{study.model}.yaml"])
        assert parsed.options.model == f"{study.model}.yaml"


@pytest.mark.parametrize("model", PROFILES)
def test_the_spaces_are_good(model: str, tmp_path: Path) -> None:
    (tmp_path / "models" / model).mkdir(parents=True)
    text = f"model: {{repository: models, name: {model}}}\n{PROFILES[model]}\n"
    profile = parse_profile(text.encode(), tmp_path / "p.yaml")
    assert profile.space is not None
    assert profile.space.max_batch_size


def test_a_row_has_the_measured_and_the_published_figure() -> None:
    cell = dict.fromkeys(("latency_avg_ms", "latency_p90_ms", "latency_p95_ms", "latency_p99_ms"))
    cell |= {"label": ONE_BY_ONE, "request_batch_size": 4096, "concurrency": 1, "throughput_infer_per_sec": 2e6}
    cell |= {"gpu_power_watts": 350.0, "gpu_memory_bytes": 9.1e9, "energy_joules_per_1000_infer": 0.175}
    results = report.StudyResults([cell], hardware="a GPU", notes=["a note"], commands=["tune sweep"])
    text = report.markdown(DLRM, results)
    assert f"| {ONE_BY_ONE} | 4096 | 1 | 2,000,000 | 1,104,280 | 3.7 | 3.78 | 3.86 |" in text
    assert f"| {ONE_BY_ONE} | 4096 | 1 |  | 9.1 | 350 | 0.175 |  |" in text
    assert "- Machine: a GPU;" in text
    assert "- Note: a note." in text


def test_a_run_gives_what_was_given_and_what_it_recommends() -> None:
    document: dict[str, Any] = {"baseline": {"concurrency": 1}, "recommended": None, "pareto": []}
    assert run._cells(document) == [{"concurrency": 1, "role": "as given"}]
    labels = [recommended(cell) for cell in run._cells(document | {"recommended": {"concurrency": 9}})]
    assert labels == ["tune: as given", "tune: recommended"]


def test_on_a_cpu_there_is_no_table_of_a_gpu() -> None:
    cell = {"label": "x", "request_batch_size": 1, "concurrency": 1, "throughput_infer_per_sec": 1.0}
    assert "## GPU metrics" not in report.markdown(BERT, report.StudyResults([cell]))


def test_the_forecasts_and_the_runs_of_a_study_are_kept(tmp_path: Path) -> None:
    sample = read_run(SAMPLE)
    checked = check_forecasts(sample.trials)
    results = report.StudyResults(forecasts=list(zip(checked.throughput, checked.latency, strict=True)))
    report.write_files(BERT, results, tmp_path, SAMPLE)
    text = (tmp_path / "bert.md").read_text()
    first, latency = checked.throughput[0], checked.latency[0]
    assert (
        f"| {first.point.load.concurrency} | {first.expected:,.4g} ({first.low:,.4g} to {first.high:,.4g}) |" in text
    )
    assert f"{latency.high:,.4g}) | {latency.measured:,.4g} |" in text
    with tarfile.open(tmp_path / "bert-runs.tar.xz") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path)
    assert read_run(tmp_path / "bert").trials == sample.trials


def test_each_round_of_perf_analyzer_is_shown() -> None:
    rounds = [
        {"role": "baseline", "round": 1, "throughput_infer_per_sec": 100.0, "latency_p95_ms": 8.25, "reason": ""},
        {"role": "recommended", "round": 1, "throughput_infer_per_sec": 2500.0, "latency_p95_ms": 9.5, "reason": ""},
        {
            "role": "baseline",
            "round": 2,
            "throughput_infer_per_sec": None,
            "latency_p95_ms": None,
            "reason": "no memory",
        },
    ]
    lines = report.markdown(BERT, report.StudyResults(rounds=rounds)).splitlines()
    assert "| 1 | 100 (8.25) | 2,500 (9.5) |" in lines
    assert "| 2 | no memory |  |" in lines


def test_without_a_run_nothing_is_measured_again(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+") as log, pytest.raises(run.NotMeasured, match="no `tune` has measured"):
        run._measure_again(["--rounds", "1"], None, time.monotonic() + 60, log)


def test_a_step_that_fails_is_listed_with_its_reason_and_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "_write_model", lambda *_, **__: None)
    refused = GpuStep("", "--no-such-option", lambda _: "")
    study = replace(BERT, steps=(refused, replace(refused, smoke="--concurrency none")))
    results = run.measure(study, tmp_path, tmp_path / "work", run.Clock(time.monotonic() + 60, 3), smoke=True)
    assert [failure.partition("`: ")[0] for failure in results.failures] == [
        f"`tune sweep {words} {RANDOM} bert.yaml" for words in ("--no-such-option", "--concurrency none")
    ]
    assert all("(exit code 2)" in failure for failure in results.failures)
    assert f"- Not measured: {results.failures[0]}." in (tmp_path / "bert.md").read_text()
    assert "--no-such-option" in (tmp_path / "bert.log").read_text().partition("bert.yaml")[2]
    assert "not measured: " in capsys.readouterr().err


def test_a_model_that_cannot_be_written_ends_its_study_only(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.write_text("a file")
    steps = DLRM.steps_of(smoke=True)
    clock = run.Clock(time.monotonic() + 60, 1 + len(steps) + 1)
    results = run.measure(DLRM, tmp_path, work, clock, smoke=True)
    assert clock.steps == 1  # the skipped ones do not share the time
    assert results.failures == ["`python benchmarks/gpu/models.py dlrm`: " + results.failures[0].partition("`: ")[2]]
    assert "FileExistsError" in results.failures[0]
    assert (tmp_path / "dlrm.md").exists()


def test_a_step_gets_at_most_twice_its_share_of_the_time() -> None:
    before = time.monotonic()
    clock = run.Clock(before + 100, 4)
    limit = clock.next_limit()
    begun_seconds = time.monotonic() - before
    assert before + 50 <= limit <= before + 50 + begun_seconds
    assert clock.steps == 3
    assert run.Clock(before + 100, 1).next_limit() == before + 100
    with pytest.raises(run.NotMeasured, match="time limit"):
        run.Clock(before + 1, 2).next_limit()


def test_the_pack_has_all_dependencies_that_the_machine_lacks() -> None:
    names = {pin.partition("==")[0] for pin in pack.dependencies("3.12")}
    assert {"optuna", "sqlalchemy", "ddsketch", "hpack", "tritonclient", "protobuf", "pydantic-core"} <= names
    assert not names & {*pack.PRESENT, *pack.UNUSED, "gevent", "llvmlite", "pillow"}
