"""Reports of runs in files: which formats there are, and how the files are called."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from optimizer.errors import BadInputError
from optimizer.pages.content import Section, section
from optimizer.store.disk import cannot_write, write_whole
from optimizer.store.finished import FinishedRun
from optimizer.untrusted import one_line

SUFFIXES = {"html": ".html", "markdown": ".md", "csv": ".csv", "parquet": ".parquet", "png": ".png", "svg": ".svg"}
PLOTS = ("png", "svg")  # a file a plot
NAME = "report"
MEASUREMENTS = "measurements"


def write(runs: Sequence[FinishedRun], formats: Iterable[str], output: Path) -> list[Path]:
    """Write ``runs``, each of which measured something, and return the files.

    ``output`` is a folder, which is made, or the file where one is written. Raises BadInputError, EnvironmentFault.
    """
    asked = list(dict.fromkeys(formats))
    sections = [section(run) for run in runs]
    if output.suffix and not output.is_dir():
        if len(asked) != 1 or asked[0] in PLOTS or output.suffix != SUFFIXES[asked[0]]:
            raise BadInputError(
                f"--output {one_line(str(output))}: a file is for one of html, markdown, csv and parquet, and ends "
                "in .html, .md, .csv or .parquet; give a folder"
            )
        return [_write(output, _content(asked[0], runs, sections))]
    written = []
    for name in asked:
        if name in PLOTS:
            written += _write_plots(name, runs, sections, output)
        else:
            stem = MEASUREMENTS if name in ("csv", "parquet") else NAME
            written.append(_write(output / f"{stem}{SUFFIXES[name]}", _content(name, runs, sections)))
    return written


def _content(name: str, runs: Sequence[FinishedRun], sections: Sequence[Section]) -> str | bytes:
    if name == "html":
        from optimizer.pages.html import html

        return html(runs, sections)
    if name == "markdown":
        from optimizer.pages.markdown import markdown

        return markdown(sections)
    from optimizer.pages import table

    frame = table.measurements(runs)
    return table.csv(frame) if name == "csv" else table.parquet(frame)


def _write_plots(name: str, runs: Sequence[FinishedRun], sections: Sequence[Section], folder: Path) -> list[Path]:
    from optimizer.pages.drawings import drawings
    from optimizer.pages.style import png, svg

    written = []
    for number, (run, told) in enumerate(zip(runs, sections, strict=True), start=1):
        prefix = "" if len(runs) == 1 else f"{number}-{re.sub(r'[^A-Za-z0-9.-]+', '-', run.name)[:80]}-"
        for drawn in drawings(run, told):
            content = svg(drawn) if name == "svg" else png(drawn)
            written.append(_write(folder / f"{prefix}{drawn.name}{SUFFIXES[name]}", content))
    return written


def _write(path: Path, content: str | bytes) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from error
    write_whole(path, content)
    return path
