"""The studies on a GPU in ``benchmarks/gpu``: their commands, spaces, forecasts and failed steps."""

from __future__ import annotations

import shutil
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpu import pack, report, run
from gpu.steps import BERT, PROFILES, RANDOM, STUDIES, GpuStep, OnGpu
from optimizer.cli.run import read_run_arguments
from optimizer.cli.sweep import read_sweep_arguments
from optimizer.model.profile import parse_profile
from optimizer.results.finished_run import read_run
from optimizer.results.forecast_accuracy import check_forecasts

SAMPLE = Path(__file__).parents[3] / "results" / "dlrm" / "sample"
STEPS = [(study, step) for study in STUDIES.values() for step in study.steps if step.command != "rounds"]


@pytest.mark.parametrize(("study", "step"), STEPS)
def test_tune_accepts_the_arguments_of_each_step(study: OnGpu, step: GpuStep) -> None:
    read = read_run_arguments if step.command == "run" else read_sweep_arguments
    for words in filter(None, (step.words, step.smoke)):
        parsed: Any = read([*words.split(), *RANDOM.split(), f"{study.model}.yaml"])
        assert parsed.options.model == f"{study.model}.yaml"


@pytest.mark.parametrize("model", PROFILES)
def test_each_profile_has_a_valid_space(model: str, tmp_path: Path) -> None:
    (tmp_path / "models" / model).mkdir(parents=True)
    text = f"model: {{repository: models, name: {model}}}\n{PROFILES[model]}\n"
    profile = parse_profile(text.encode(), tmp_path / "p.yaml")
    assert profile.space is not None
    assert profile.space.max_batch_size


def test_the_forecasts_and_the_runs_of_a_study_are_kept(tmp_path: Path) -> None:
    sample = read_run(SAMPLE)
    checked = check_forecasts(sample.trials)
    results = report.StudyResults(forecasts=list(zip(checked.throughput, checked.latency, strict=True)))
    runs = tmp_path / "runs"
    shutil.copytree(SAMPLE, runs)
    runs.joinpath("reference.npz").write_bytes(b"large")
    report.write_files(BERT, results, tmp_path, runs)
    text = (tmp_path / "bert.md").read_text()
    first, latency = checked.throughput[0], checked.latency[0]
    assert (
        f"| {first.point.load.concurrency} | {first.expected:,.4g} ({first.low:,.4g} to {first.high:,.4g}) |" in text
    )
    assert f"{latency.high:,.4g}) | {latency.measured:,.4g} |" in text
    with tarfile.open(tmp_path / "bert-runs.tar.xz") as archive:
        assert not [name for name in archive.getnames() if name.endswith("reference.npz")]
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path)
    assert read_run(tmp_path / "bert").trials == sample.trials


def test_the_table_of_gpu_metrics_has_their_units_and_leaves_unknown_ones_empty() -> None:
    known = {"gpu_utilization": 0.75, "gpu_memory_bytes": 9.5e9, "gpu_power_watts": 412.0, "gpu_sm_clock_mhz": 1980.0}
    metrics: tuple[dict[str, Any], ...]
    metrics = (known, {**known, "gpu_utilization": None, "gpu_power_watts": None}, dict.fromkeys(known))
    cells = [
        {"label": "static", "request_batch_size": 8, "concurrency": number, **of_gpu}
        for number, of_gpu in enumerate(metrics)
    ]
    text = report.markdown(BERT, report.StudyResults(cells=cells)).partition("## GPU metrics")[2]
    assert "| static | 8 | 0 | 75 | 9.5 | 412 |  | 1,980 |" in text
    assert "| static | 8 | 1 |  | 9.5 |  |  | 1,980 |" in text
    assert "| static | 8 | 2 |" not in text


def test_a_step_that_fails_is_listed_with_its_reason_and_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = GpuStep("", "--no-such-option", lambda _: "")
    study = replace(BERT, steps=(refused, replace(refused, smoke="--concurrency none")))
    clock = run.Clock(time.monotonic() + 60, 3)
    results = run.measure(study, tmp_path, tmp_path / "work", clock, smoke=True, write=lambda *_, **__: None)
    assert [failure.partition("`: ")[0] for failure in results.failures] == [
        f"`tune sweep {words} {RANDOM} bert.yaml" for words in ("--no-such-option", "--concurrency none")
    ]
    assert all("(exit code 2)" in failure for failure in results.failures)
    assert f"- Not measured: {results.failures[0]}." in (tmp_path / "bert.md").read_text()
    assert "--no-such-option" in (tmp_path / "bert.log").read_text().partition("bert.yaml")[2]
    assert "not measured: " in capsys.readouterr().err


def test_the_pack_has_all_dependencies_that_the_machine_lacks() -> None:
    names = {pin.partition("==")[0] for pin in pack.dependencies("3.12")}
    assert {"optuna", "sqlalchemy", "ddsketch", "hpack", "tritonclient", "protobuf", "pydantic-core"} <= names
    assert not names & {*pack.PRESENT, *pack.UNUSED, "gevent", "llvmlite", "pillow"}
