"""Writes the report of runs: HTML and Markdown from Jinja templates, tables and plots as files."""

from __future__ import annotations

import gc
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup

from optimizer.core.errors import BadInputError
from optimizer.core.files import output_error, replace_file, write_error
from optimizer.core.safe_text import one_line, show_path
from optimizer.results.finished_run import FinishedRun
from optimizer.results.report.content import ReportSection, report_section
from optimizer.results.report.figure_style import PALETTE, Drawing, inline, make_narrow, png, report_style, svg


def template_environment(folder: Path, *, html: bool) -> jinja2.Environment:
    """Return a Jinja environment for the templates in ``folder``; with ``html``, all values are escaped."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=html,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def drawings(run: FinishedRun, section: ReportSection) -> Iterator[Drawing]:
    """Yield the plots of ``run`` one at a time, because a figure takes memory; empty plots are left out."""
    from optimizer.results.report import plots, server_plots

    makers: list[Callable[[], Drawing | None]] = [
        lambda: plots.pareto(run),
        lambda: plots.load(run),
        lambda: server_plots.response_times(run),
        lambda: server_plots.timeline(run),
        lambda: server_plots.stages(run),
        lambda: server_plots.batches(run),
        lambda: plots.progress(run),
        lambda: plots.forecasts(section.forecasts),
        lambda: plots.importance(section.importance, len(section.samples)),
        lambda: plots.slices(run, section.samples),
        lambda: server_plots.noise(run),
    ]
    # Figures have many objects in cycles. Garbage collections meanwhile leave out all older objects, of which a run
    # has a million; with them they took a fifth of the time of the page.
    gc.freeze()
    try:
        for make in makers:
            with report_style():
                drawn = make()
            if drawn is not None:
                yield drawn
    finally:
        gc.unfreeze()


@dataclass(frozen=True)
class PagePlot:
    """A plot for wide and for narrow screens as SVG that can be embedded in a page, and its description in words."""

    svg: Markup
    description: str


def plot(drawn: Drawing, number: int) -> PagePlot:
    """Return the plot for run ``number`` of the page, counted from 1. The figure then has its narrow layout."""
    prefix = f"run-{number}"
    wide = inline(drawn, prefix, "wide")
    with report_style():
        make_narrow(drawn.figure)
    both = wide + inline(drawn, prefix, "narrow")  # ElementTree escapes all texts
    return PagePlot(Markup(both), drawn.description)


def html(sections: Sequence[ReportSection], plots: Sequence[Mapping[str, PagePlot]]) -> str:
    """Return the HTML page; ``plots`` holds the plots of each section by name."""
    templates = template_environment(Path(__file__).parent, html=True)
    templates.filters["unbroken"] = _unbroken
    anchored = [(f"run-{number}", *pair) for number, pair in enumerate(zip(sections, plots, strict=True), start=1)]
    return templates.get_template("report.html.j2").render(sections=anchored, palette=PALETTE)


def _unbroken(text: str) -> str:
    """Return ``text`` without line breaks between ± and its number, which a narrow column would have."""
    return text.replace("± ", "±\N{NO-BREAK SPACE}")


_SPECIAL = re.compile(
    r"[\\`*_\[\]<>|~&$!#]|(?<=[a-z]):(?=//)"
)  # characters with a meaning in Markdown, or in HTML within it


def markdown(sections: Sequence[ReportSection]) -> str:
    """Return the report in GitHub's Markdown, which has tables."""
    templates = template_environment(Path(__file__).parent, html=False)  # the filter `plain` escapes
    templates.filters |= {"plain": markdown_text, "fence": _fence}
    return templates.get_template("report.md.j2").render(sections=sections).strip() + "\n"


def markdown_text(text: str) -> str:
    """Return ``text`` on one line, with all Markdown characters escaped."""
    return _SPECIAL.sub(lambda match: f"\\{match[0]}", one_line(text))


def _fence(text: str) -> str:
    """Return a code fence that is longer than any row of backticks in ``text``."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    return "`" * max(3, longest + 1)


SUFFIXES = {"html": ".html", "markdown": ".md", "csv": ".csv", "parquet": ".parquet", "png": ".png", "svg": ".svg"}
PLOTS: Mapping[str, Callable[[Drawing], str | bytes]] = {"png": png, "svg": svg}  # formats with one file per plot
NAME = "report"
MEASUREMENTS = "measurements"


def write_page(run: FinishedRun) -> None:
    """Write the page of a run that ends to its folder. Raises EnvironmentFault if it cannot be written."""
    path, section = run.folder.report, report_section(run)
    page = html([section], [{drawn.name: plot(drawn, 1) for drawn in drawings(run, section)}])
    try:
        replace_file(path, page)
    except OSError as error:
        remedy = f"write it with `tune report {shlex.quote(show_path(run.folder.path))}`"
        raise write_error(path, error, remedy) from error


def write(runs: Sequence[FinishedRun], formats: Iterable[str], output: Path) -> list[Path]:
    """Write a report of ``runs``, which all have measurements, and return its files.

    ``output`` is a folder, which is created, or the file if only one is written. Raises BadInputError if ``output``
    does not fit the formats or cannot be written, EnvironmentFault if its disk is full.
    """
    requested = list(dict.fromkeys(formats))
    paths = file_paths(requested, output)
    sections = [report_section(run) for run in runs]
    contents: dict[str, str | bytes] = {}
    if "markdown" in requested:
        contents["markdown"] = markdown(sections)
    if "csv" in requested or "parquet" in requested:
        from optimizer.results import data_frames

        frame = data_frames.measurements(runs)
        contents |= {name: make(frame) for name, make in data_frames.WRITERS.items() if name in requested}
    written = [write_file(paths[name], content) for name, content in contents.items()]
    plots: list[dict[str, PagePlot]] = []
    for number, (run, section) in enumerate(zip(runs, sections, strict=True), start=1):
        plots.append({})
        prefix = "" if len(runs) == 1 else f"{number}-{re.sub(r'[^A-Za-z0-9.-]+', '-', section.name)[:80]}-"
        for drawn in drawings(run, section) if {"html", *PLOTS} & set(requested) else ():
            written += [
                write_file(output / f"{prefix}{drawn.name}{SUFFIXES[name]}", make(drawn))
                for name, make in PLOTS.items()
                if name in requested
            ]
            if "html" in requested:
                plots[-1][drawn.name] = plot(drawn, number)  # changes the layout
    if "html" in requested:
        written.append(write_file(paths["html"], html(sections, plots)))
    return written


def file_paths(formats: Sequence[str], output: Path, name: str = NAME) -> dict[str, Path]:
    """Return the path of each format that has a single file; ``name`` is that of the page without its suffix.

    Raises BadInputError if ``output`` is a file and does not fit the formats.
    """
    if not output.suffix or output.is_dir():
        stems = {"csv": MEASUREMENTS, "parquet": MEASUREMENTS}
        single = [format_name for format_name in formats if format_name not in PLOTS]
        return {one: output / f"{stems.get(one, name)}{SUFFIXES[one]}" for one in single}
    if len(formats) != 1 or formats[0] in PLOTS or output.suffix != SUFFIXES[formats[0]]:
        raise BadInputError(
            f"--out {show_path(output)}: a single file needs one of the formats html, markdown, csv and "
            "parquet, and a name that ends in .html, .md, .csv or .parquet; give a folder"
        )
    return {formats[0]: output}


def write_file(path: Path, content: str | bytes) -> Path:
    """Write a file, whose folder is created, and return its path. Raises as ``write``."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    except OSError as error:
        raise output_error(path, error) from error
    return path
