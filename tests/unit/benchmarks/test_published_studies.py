"""The studies in ``benchmarks/published_studies``: their kept results, commands, tables and plots."""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.etree import ElementTree

import pytest

import plot
from kept import read_kept
from optimizer.cli.run import read_run_arguments
from optimizer.cli.sweep import read_sweep_arguments
from optimizer.model.profile import load_profile
from page import markdown
from published import FILE
from studies import STUDIES, Step

FOLDER = FILE.parent
PAGE = FOLDER.parent / "published_studies.md"
SVG = "{http://www.w3.org/2000/svg}"
STEPS = [(study.name, step) for study in STUDIES.values() for step in study.steps if step.command != "fastapi"]


@pytest.mark.parametrize(("study", "step"), STEPS, ids=lambda value: value if isinstance(value, str) else value.words)
def test_tune_accepts_each_command(study: str, step: Step) -> None:
    words = step.words.split()
    if step.command == "sweep":
        read_sweep_arguments(words)
    else:
        read_run_arguments(words)
    profile = FOLDER / "profiles" / f"{words[-1]}.yaml"
    if profile.exists():
        load_profile(profile)
    else:
        assert words[-1] in ("dlrm", "bert_mini_int8")


def table_rows(text: str) -> Iterator[dict[str, str]]:
    """Return the rows of all Markdown tables, by the names of their columns."""
    for table in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        header, _, *lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
        yield from (dict(zip(header, cells, strict=True)) for cells in lines)


def section(study: str) -> str:
    """Return the section of the page on published studies that is about this study."""
    heading = rf"^## (?i:{study.replace('_', ' ')}): .*?(?=^## )"
    found = re.search(heading, PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
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


@pytest.mark.parametrize("study", STUDIES)
def test_the_tables_are_those_of_the_kept_results(study: str) -> None:
    assert (FOLDER / f"{study}.md").read_text(encoding="utf-8") == markdown(STUDIES[study], read_kept(study))


@pytest.mark.parametrize("study", STUDIES)
def test_each_step_has_a_kept_record(study: str) -> None:
    assert sorted(read_kept(study)) == list(range(len(STUDIES[study].steps)))


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


@pytest.mark.parametrize("name", plot.PLOTS)
def test_the_values_of_the_page_are_those_of_the_tables(name: str) -> None:
    text = section(name)
    tables = "".join(path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob(f"{name}*.md")))
    rows_by_cell: dict[tuple[str, ...], dict[str, str]] = {}
    ratios: list[list[str]] = []
    for row in table_rows(tables):
        if "measured" in row:
            ratios.append(list(row.values()))
        elif "client send" not in row:
            rows_by_cell[row[""], row["batch"], row["concurrency"]] = row
    kinds = set()
    for row in table_rows(text):
        kinds.add(kind := next(iter(row)))
        if kind == "ratio":
            assert list(row.values()) in ratios
        else:
            cells = rows_by_cell[row.pop("configuration"), row["batch"], row["concurrency"]]
            assert row == {column: cells.get(column, "") for column in row}
    assert kinds == {"configuration", "ratio"}
    assert f"](../docs/images/study-{name}.svg)" in text
    prose = re.sub(r"Triton \d\d\.\d\d", "", re.sub(r"^\|.*", "", text, flags=re.MULTILINE))
    decimals = re.findall(r"\d[\d,]*[.,]\d+", prose)
    assert [number for number in decimals if number not in tables] == []
