"""Check the README and the pages of docs/ and benchmarks/: links, commands, the shown result, and the site."""

from __future__ import annotations

import ast
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from optimizer.cli.run import read_run_arguments
from optimizer.core.notes import OwnBackend, SearchConverged, SharedMachine, SpeedVaried
from optimizer.results.finished_run import read_run
from optimizer.results.terminal_summary import RunDetails, print_outcome
from tests.documents import PAGES_WITH_COMMANDS, README, ROOT, SHELLS, blocks, prose

READING = ROOT / "docs/reading-results.md"
PAGES = [
    *(README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]
# how a line of a command begins, with or without a prompt
COMMAND = re.compile(
    r"^(\$ |(sudo )?(tune|pip|python3?|docker|podman|apt-get|source|export|[a-z]+-[a-z]+|\.venv/bin/\w+) )",
    re.MULTILINE,
)
RUN_BY_CI = "python3 -m venv "  # the README's two lines; .ci/run takes them from there


def anchors(page: Path) -> set[str]:
    """Return the names by which links refer to the headings of a page on GitHub."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def readme_commands() -> list[str]:
    return [line for block in blocks(README, "sh", "bash") for line in block.commands if line.startswith("tune ")]


def defines(file: Path, name: str) -> bool:
    """Return whether a source file defines the function, class or variable ``name``."""
    return re.search(rf"^ *(def|class) {name}\b|^{name}\b.* = ", file.read_text(), re.MULTILINE) is not None


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_each_link_of_the_page_leads_to_a_file_and_a_heading(page: Path) -> None:
    for link in re.findall(r"\]\(([^()\s]+)\)", prose(page)):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md", ROOT / "docs/architecture.md"], ids=page_name)
def test_each_source_file_that_the_page_names_exists_with_the_name_in_it(page: Path) -> None:
    text = page.read_text()
    files = [
        name for name in re.findall(r"`((?:optimizer|objectives|tests)/[\w/.]+\.py)`", text) if "NAME" not in name
    ]
    assert len(files) > 5
    assert [name for name in files if not (ROOT / name).is_file()] == []
    named = re.findall(r"`(\w+)` (?:in|of) `((?:optimizer|objectives)/[\w/]+\.py)`", text)
    assert len(named) > 5
    assert [(name, file) for name, file in named if not defines(ROOT / file, name)] == []


@pytest.mark.parametrize("page", [*PAGES_WITH_COMMANDS, ROOT / "CONTRIBUTING.md"], ids=page_name)
def test_each_command_of_the_page_is_run_or_has_the_reason_why_not(page: Path) -> None:
    """``tests/stack/test_docs.py`` runs the commands of blocks of sh without a mark.

    The pages of benchmarks/ have the commands by which their values were measured, which take long.
    """
    for block in blocks(page):
        if block.not_run is not None:
            continue
        assert block.language == "sh" or block.language not in SHELLS, f"no test runs:\n{block.text}"
        if block.language == "sh":
            begins = ("tune ", RUN_BY_CI) if page == README else ("tune ",)
            untested_commands = [
                line for line in block.commands if not line.startswith(begins) or line.endswith("\\")
            ]
            assert untested_commands == []
        else:
            assert not COMMAND.search(block.text), f"no test runs:\n{block.text}"


@pytest.mark.parametrize("command", readme_commands())
def test_each_command_of_the_readme_can_be_given(command: str) -> None:
    words = shlex.split(command, comments=True)[1:]
    if words[0].startswith(("-", "./")):  # others name a command
        assert read_run_arguments(words).options.model


def test_the_readme_has_the_line_that_ci_runs() -> None:
    lines = [line for block in blocks(README, "sh") for line in block.commands]
    (tests,) = (line for line in lines if re.match("python3 -m venv .* -m pytest ", line))
    assert "'.[test]'" in tests
    (tune,) = (line for line in lines if re.match("python3 -m venv .* .venv/bin/tune ", line))
    assert tune.endswith("&& .venv/bin/tune --sla-p95 20ms dlrm")


def printed_result(*, verbose: bool) -> list[str]:
    """Return the lines that the run of the sample printed at its end."""
    run, text = read_run(ROOT / "results/dlrm/sample"), io.StringIO()
    assert run.outcome is not None
    folder = Path(run.info["result"]["results_dir"])
    details = RunDetails(
        baseline=run.baseline,
        hardware=run.info["result"]["hardware"],
        notes=(OwnBackend("onnxruntime"), SharedMachine(2, 2), SpeedVaried(2.0), SearchConverged(0.02)),
        facts=run.facts,
        results_dir=folder,
        command=run.info["command"],
        config_path=folder / "best/config.pbtxt",
        report_path=folder / "report.html",
        can_serve=True,
    )
    print_outcome(Console(file=text, width=80), run.outcome, run.problem, details, verbose=verbose)
    return text.getvalue().splitlines()


def test_the_page_on_results_shows_those_of_the_sample() -> None:
    result, details = (block.text.splitlines() for block in blocks(READING, "text")[:2])
    short, verbose = printed_result(verbose=False), printed_result(verbose=True)
    assert result == ["$ tune --sla-p95 20ms dlrm", *short]
    (same,) = (number for number, line in enumerate(verbose) if line.startswith("throughput "))
    assert verbose[:same] == short[:same]
    assert details == ["$ tune -v --sla-p95 20ms dlrm", "…", *verbose[same:]]


def test_the_readme_shows_the_first_lines_of_the_same_result() -> None:
    shown, lines = blocks(README, "text")[0].text.splitlines(), printed_result(verbose=False)
    places = [lines.index(line) for line in shown if line not in ("", "…")]
    assert places == sorted(places)
    assert [line for line in lines if line.startswith(("dlrm: ", "  + ", "recommended", "current", "dynamic"))] == [
        line for line in shown if line.startswith(("dlrm: ", "  + ", "recommended", "current", "dynamic"))
    ]


def test_each_message_of_the_troubleshooting_page_is_in_the_source() -> None:
    page = prose(ROOT / "docs" / "troubleshooting.md")
    files = [file for top in ("objectives", "optimizer") for file in (ROOT / top).rglob("*.py")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    texts = "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    first_cells = re.findall(r"^\| (.*?) \|", page, re.MULTILINE)
    shown = [message for cell in first_cells for message in re.findall("`([^`]+)`", cell)]
    parts = [part for message in shown for part in message.split("…") if len(part) > 5]
    assert len(parts) > 50
    assert [part for part in parts if part not in texts] == []


def test_the_map_of_the_documentation_has_each_page_under_its_title() -> None:
    """The navigation of the site has the pages of the map only."""
    folder = ROOT / "docs"
    mapped = re.findall(r"^\| \[(.+?)\]\((.+?\.md)\) \|", prose(folder / "README.md"), re.MULTILINE)
    titles = {page.name: page.read_text(encoding="utf-8").splitlines()[0] for page in folder.glob("*.md")}
    del titles["README.md"], titles["index.md"]
    assert {name: f"# {title}" for title, name in mapped} == titles


@pytest.mark.parametrize("theme", ["basic", pytest.param("furo", marks=pytest.mark.long)])  # furo takes twice as long
def test_the_site_is_built_without_warnings(theme: str, tmp_path: Path) -> None:
    """The build needs no network: the configuration names no inventory of another project."""
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", "-D", f"html_theme={theme}"]
    ended = subprocess.run([*build, ".", tmp_path], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert {f"{page.stem}.html" for page in (ROOT / "docs").glob("*.md")} <= {
        file.name for file in (tmp_path / "docs").iterdir()
    }
