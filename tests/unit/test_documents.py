"""Check the README and the pages of docs/ and benchmarks/: links, the commands of the README, the shown result."""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from optimizer.cli.run import read_run_arguments
from optimizer.core.notes import OwnBackend, SearchConverged, SharedMachine, SpeedVaried
from optimizer.results.finished_run import read_run
from optimizer.results.terminal_summary import print_outcome

ROOT = Path(__file__).parents[2]
README, READING = ROOT / "README.md", ROOT / "docs/reading-results.md"
PAGES = [
    *(README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """Return the text of a page without its fenced blocks."""
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def blocks(page: Path, *languages: str) -> list[str]:
    return [text for language, text in FENCED.findall(page.read_text(encoding="utf-8")) if language in languages]


def anchors(page: Path) -> set[str]:
    """Return the names by which links refer to the headings of a page on GitHub."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(page: Path) -> list[str]:
    return [line for text in blocks(page, "sh", "bash") for line in text.splitlines() if line.startswith("tune ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_link_of_the_page_leads_to_a_file_and_a_heading(page: Path) -> None:
    for link in re.findall(r"\]\(([^()\s]+)\)", prose(page)):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("command", commands(README))
def test_each_command_of_the_readme_can_be_given(command: str) -> None:
    words = shlex.split(command, comments=True)[1:]
    if words[0].startswith(("-", "./")):  # others name a command
        assert read_run_arguments(words).options.model


def test_the_readme_has_the_line_that_ci_runs() -> None:
    lines = [line for text in blocks(README, "sh") for line in text.splitlines()]
    (tests,) = (line for line in lines if re.match("python3 -m venv .* -m pytest ", line))
    assert "'.[test]'" in tests
    (tune,) = (line for line in lines if re.match("python3 -m venv .* .venv/bin/tune ", line))
    assert tune.endswith("&& .venv/bin/tune --sla-p95 20ms dlrm")


def printed_result(*, verbose: bool) -> list[str]:
    """Return the lines that the run of the sample printed at its end."""
    run, text = read_run(ROOT / "results/dlrm/sample"), io.StringIO()
    assert run.outcome is not None
    folder = Path(run.info["result"]["results_dir"])
    print_outcome(
        Console(file=text, width=80),
        run.outcome,
        run.problem,
        baseline=run.baseline,
        hardware=run.info["result"]["hardware"],
        notes=(OwnBackend("onnxruntime"), SharedMachine(2, 2), SpeedVaried(1.6), SearchConverged(0.02)),
        facts=run.facts,
        results_dir=folder,
        command=run.info["command"],
        config_path=folder / "best/config.pbtxt",
        report_path=folder / "report.html",
        verbose=verbose,
    )
    return text.getvalue().splitlines()


@pytest.mark.parametrize("verbose", [False, True])
def test_the_page_on_results_shows_those_of_the_sample(verbose: bool) -> None:
    command, *lines = blocks(READING, "text")[verbose].splitlines()
    assert command == f"$ tune{' -v' if verbose else ''} --sla-p95 20ms dlrm"
    assert lines == printed_result(verbose=verbose)


def test_the_readme_shows_the_first_lines_of_the_same_result() -> None:
    shown, lines = blocks(README, "text")[0].splitlines(), printed_result(verbose=False)
    places = [lines.index(line) for line in shown if line not in ("", "…")]
    assert places == sorted(places)
    assert [line for line in lines if line.startswith(("dlrm: ", "  + ", "recommended", "current", "dynamic"))] == [
        line for line in shown if line.startswith(("dlrm: ", "  + ", "recommended", "current", "dynamic"))
    ]
