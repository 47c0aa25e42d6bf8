"""The studies of documents in ``benchmarks/seeds``: their results, commands and tables, without a server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "seeds"))

import side_by_side
from published import FILE, Row, published
from studies import DYNAMIC, STATIC, STUDIES, Ratio, Step

from optimizer.cli.run import read_run_arguments
from optimizer.cli.sweep import read_sweep_arguments
from optimizer.model.profile import load_profile

SEEDS = FILE.parent
STEPS = [(study.name, step) for study in STUDIES.values() for step in study.steps if step.command != "fastapi"]


def cell(label: str, concurrency: int, throughput: float | None, **more: object) -> Row:
    figures = dict.fromkeys(side_by_side.FIGURES) | {"throughput_infer_per_sec": throughput}
    return {"label": label, "request_batch_size": 2, "concurrency": concurrency, **figures, **more}


@pytest.mark.parametrize(("study", "rows"), [("000", 2), ("001", 18), ("002", 40), ("003", 2), ("004", 24)])
def test_the_published_figures_are_read(study: str, rows: int) -> None:
    assert len(published(study)) == rows


def test_every_published_row_belongs_to_a_study() -> None:
    lines = FILE.read_text(encoding="utf-8").splitlines()[1:]
    assert {line.partition(",")[0] for line in lines} <= STUDIES.keys()
    assert sum(len(published(name)) for name in STUDIES) == len(lines)


def test_figures_missing_from_the_documents_are_unknown() -> None:
    first, last = published("004")[0], published("004")[-1]
    assert (first["latency_p95_ms"], first["latency_avg_ms"]) == (4.311, None)
    assert (last["concurrency"], last["throughput_infer_per_sec"], last["latency_p99_ms"]) == (16, 4134.09, 8.563)


@pytest.mark.parametrize(
    ("study", "values"),
    [("000", [4.34, 1.84]), ("001", [10.43, 15.31, 2.01]), ("002", [36.38, 0.95]), ("004", [3.26, 1.30, 3.22])],
)
def test_the_ratios_are_those_that_the_documents_speak_of(study: str, values: list[float]) -> None:
    result = [side_by_side.ratio(one, published(study)) for one in STUDIES[study].ratios]
    assert [round(one, 2) for one in result if one is not None] == values


@pytest.mark.parametrize(("study", "step"), STEPS, ids=lambda value: value if isinstance(value, str) else value.words)
def test_tune_accepts_each_command(study: str, step: Step) -> None:
    words = step.words.split()
    if step.command == "sweep":
        read_sweep_arguments(words)
    else:
        read_run_arguments(words)
    profile = SEEDS / "profiles" / f"{words[-1]}.yaml"
    if profile.exists():
        load_profile(profile)
    else:
        assert words[-1] in ("dlrm", "bert_mini_int8")


def test_a_row_has_the_figures_of_both_machines() -> None:
    cells = [
        cell(STATIC, 2, 100.0, reason="", **dict.fromkeys(side_by_side.STAGES, 0.25)),
        cell(DYNAMIC, 2, None, reason="no memory"),
    ]
    printed = [cell(STATIC, 2, 955.708), cell(DYNAMIC, 16, 3187.76)]
    ratios = [Ratio("dynamic over static", DYNAMIC, STATIC), Ratio("none", STATIC, "other", said="a plot")]
    lines = side_by_side.tables(cells, printed, ratios).splitlines()
    assert lines[2:8] == [
        "|  | batch | concurrency | infer/s | published infer/s |",
        "| --- | --: | --: | --: | --: |",
        f"| {STATIC} | 2 | 2 | 100 | 955.7 |",
        f"| {DYNAMIC} | 2 | 2 |  |  |",
        f"| {DYNAMIC} | 2 | 16 |  | 3,188 |",
        "",
    ]
    assert f"- {DYNAMIC}: no memory" in lines
    assert "| dynamic over static | not measured | 3.34x |" in lines
    assert "| none | not measured | a plot |" in lines
    assert lines[-1].startswith(f"| {STATIC} | 2 | 2 | 0.250 |")
