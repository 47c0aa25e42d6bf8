"""The studies on a GPU in ``benchmarks/gpu``: their commands, and the comparison with published results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "seeds"))
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from gpu import run
from gpu.steps import BERT, DLRM, ONE_BY_ONE, PROFILES, RANDOM, GpuStep, OnGpu, recommended

from optimizer.cli.run import read_run_arguments
from optimizer.cli.sweep import read_sweep_arguments
from optimizer.model.profile import parse_profile

STEPS = [(study, step) for study in (DLRM, BERT) for step in study.steps]


@pytest.mark.parametrize(("study", "step"), STEPS)
def test_the_commands_are_tunes(study: OnGpu, step: GpuStep) -> None:
    read = read_run_arguments if step.run else read_sweep_arguments
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
    text = run.markdown(DLRM, run.StudyResults([cell], "a GPU", ["a note"], ["tune sweep"]))
    assert f"| {ONE_BY_ONE} | 4096 | 1 | 2,000,000 | 1,104,280 | 3.7 | 3.78 | 3.86 |" in text
    assert f"| {ONE_BY_ONE} | 4096 | 1 |  | 9.1 | 350 | 0.175 |  |" in text
    assert "- Machine: a GPU;" in text
    assert "- Note: a note." in text


def test_a_run_gives_what_was_given_and_what_it_recommends() -> None:
    document: dict[str, Any] = {"baseline": {"concurrency": 1}, "recommended": None, "pareto": []}
    assert run._of_run(document) == [{"concurrency": 1, "role": "as given"}]
    labels = [recommended(cell) for cell in run._of_run(document | {"recommended": {"concurrency": 9}})]
    assert labels == ["tune: as given", "tune: recommended"]


def test_on_a_cpu_there_is_no_table_of_a_gpu() -> None:
    cell = {"label": "x", "request_batch_size": 1, "concurrency": 1, "throughput_infer_per_sec": 1.0}
    assert "## GPU metrics" not in run.markdown(BERT, run.StudyResults([cell]))
