"""The studies of documents in ``benchmarks/seeds``: their results, commands and tables, without a server."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "seeds"))

import plot
import run
import side_by_side
from kept import StepRecord, StepResults, all_cells, read_kept, write_kept
from page import markdown
from published import FILE, Row, published
from studies import DLRM_STUDY, DYNAMIC, ON_CPU, STATIC, STUDIES, Ratio, Step

from optimizer.cli.run import read_run_arguments
from optimizer.cli.sweep import read_sweep_arguments
from optimizer.model.profile import load_profile

SEEDS = FILE.parent
PAGE = SEEDS.parent / "published_studies.md"
SVG = "{http://www.w3.org/2000/svg}"
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


def results(
    cells: list[Row], command: str = "tune sweep dlrm", load_average: float | None = 0.5, notes: tuple[str, ...] = ()
) -> StepResults:
    return StepResults(command, "2 cores", "2026-11-24", load_average, cells, list(notes))


def table_rows(text: str) -> Iterator[dict[str, str]]:
    """Return the rows of all Markdown tables, by the names of their columns."""
    for table in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        header, _, *lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
        yield from (dict(zip(header, cells, strict=True)) for cells in lines)


def section(study: str) -> str:
    """Return the section of the page on published studies that is about this study."""
    found = re.search(rf"^## {study}: .*?(?=^## )", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[0]


def marks(svg: str) -> dict[str, list[float]]:
    """Return the positions of the marks of each group that shows results."""
    groups = [group for group in ElementTree.fromstring(svg).iter(f"{SVG}g") if group.get("id")]
    return {
        name: [float(mark.get(axis, "")) for mark in group.iter(f"{SVG}use") for axis in ("x", "y")]
        for group in groups
        if (name := group.get("id", "")).startswith(("measured-", "published-"))
    }


def test_kept_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    some = dict.fromkeys(side_by_side.STAGES) | cell(STATIC, 2, 100.5, reason=None)
    first, last = results([some], notes=("2 CPUs",)), results([], load_average=None)
    records: dict[int, StepRecord] = {0: first, 1: "not measured: needs a GPU", 2: last}
    write_kept("002", records, tmp_path)
    assert read_kept("002", tmp_path) == records
    assert read_kept("004", tmp_path) == {}
    assert all_cells(records.values()) == [some]


@pytest.mark.parametrize("study", STUDIES)
def test_the_tables_are_those_of_the_kept_results(study: str) -> None:
    assert (SEEDS / f"{study}.md").read_text(encoding="utf-8") == markdown(STUDIES[study], read_kept(study))


@pytest.mark.parametrize("study", STUDIES)
def test_each_step_has_a_kept_record(study: str) -> None:
    assert sorted(read_kept(study)) == list(range(len(STUDIES[study].steps)))


def test_a_single_step_replaces_its_own_results_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = results([cell(ON_CPU, 1, 50.0)]), results([cell(ON_CPU, 1, None, reason="killed")])
    write_kept("002", {0: first, 1: second, 2: results([])}, tmp_path)
    measured: list[tuple[Step, str, bool]] = []
    drawn: list[str] = []

    def measure(step: Step, folder: Path, *, again: bool) -> StepResults:
        measured.append((step, folder.name, again))
        return results([cell(ON_CPU, 1, 70.0)], command="tune sweep -b 4096 dlrm")

    monkeypatch.setattr(run, "measure", measure)
    monkeypatch.setattr(plot, "write", drawn.extend)
    assert run.repeat(DLRM_STUDY, tmp_path / "out", 1, again=False, folder=tmp_path) == 0
    assert measured == [(DLRM_STUDY.steps[1], "002-1", False)]
    assert drawn == ["002"]
    records = read_kept("002", tmp_path)
    assert [one["throughput_infer_per_sec"] for one in all_cells(records.values())] == [50.0, 70.0]
    text = (tmp_path / "002.md").read_text(encoding="utf-8")
    assert "tune sweep -b 4096 dlrm\n" in text
    assert "killed" not in text


def test_requests_of_4096_are_a_step_of_their_own() -> None:
    (step,) = (step for step in DLRM_STUDY.steps if "-b 4096" in step.words)
    request = read_sweep_arguments(step.words.split()).request
    assert (request.request_batch_size, request.concurrency) == ((4096,), (1,))


@pytest.mark.parametrize("name", plot.PLOTS)
def test_the_plot_on_the_page_shows_the_kept_results(name: str) -> None:
    shown = (plot.IMAGES / f"study-{name}.svg").read_text(encoding="utf-8")
    on_page, drawn = marks(shown), marks(plot.draw(name))
    assert on_page.keys() == drawn.keys()
    for group, positions in drawn.items():
        assert on_page[group] == pytest.approx(positions, abs=0.5), group  # units of the SVG, as versions differ
    assert len(shown.encode()) < 100_000
    assert "infer/s" in shown
    assert "prefers-color-scheme: dark" in shown


def test_a_plot_has_a_mark_for_each_cell_with_a_throughput(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [cell(STATIC, 2, 100.0), cell(STATIC, 4, 200.0), cell(STATIC, 8, None), cell(DYNAMIC, 2, 300.0)]
    printed = [cell(STATIC, 2, 955.0)]
    monkeypatch.setattr(plot, "results", lambda *_: (cells, printed))
    found = marks(plot.draw("004"))
    assert {name: len(positions) // 2 for name, positions in found.items() if "pairs" not in name} == {
        "measured-static": 2,
        "published-static": 1,
        "measured-dynamic": 1,
    }
    first, second = found["measured-static"][1::2]
    assert first > second > found["measured-dynamic"][1] > found["published-static"][1]  # y grows downwards


@pytest.mark.parametrize("name", plot.PLOTS)
def test_the_values_of_the_page_are_those_of_the_tables(name: str) -> None:
    text = section(name)
    tables = "".join(path.read_text(encoding="utf-8") for path in sorted(SEEDS.glob(f"{name}*.md")))
    known: dict[tuple[str, ...], dict[str, str]] = {}
    ratios: list[list[str]] = []
    for row in table_rows(tables):
        if "measured" in row:
            ratios.append(list(row.values()))
        elif "client send" not in row:
            known[row[""], row["batch"], row["concurrency"]] = row
    kinds = set()
    for row in table_rows(text):
        kinds.add(kind := next(iter(row)))
        if kind == "ratio":
            assert list(row.values()) in ratios
        else:
            cells = known[row.pop("configuration"), row["batch"], row["concurrency"]]
            assert row == {column: cells.get(column, "") for column in row}
    assert kinds == {"configuration", "ratio"}
    assert f"](../docs/images/study-{name}.svg)" in text
    prose = re.sub(r"Triton \d\d\.\d\d", "", re.sub(r"^\|.*", "", text, flags=re.MULTILINE))
    decimals = re.findall(r"\d[\d,]*[.,]\d+", prose)
    assert [number for number in decimals if number not in tables] == []
