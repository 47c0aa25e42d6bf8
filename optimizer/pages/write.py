"""Reports of runs in files: which formats there are, and how the files are called."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from optimizer.errors import BadInputError
from optimizer.pages.content import section
from optimizer.pages.drawings import drawings
from optimizer.pages.html import Plot, html, plot
from optimizer.pages.style import Drawing, png, svg
from optimizer.store.disk import cannot_write, write_whole
from optimizer.store.finished import FinishedRun
from optimizer.untrusted import one_line

SUFFIXES = {"html": ".html", "markdown": ".md", "csv": ".csv", "parquet": ".parquet", "png": ".png", "svg": ".svg"}
PLOTS: Mapping[str, Callable[[Drawing], str | bytes]] = {"png": png, "svg": svg}  # a file a plot
NAME = "report"
MEASUREMENTS = "measurements"


def write(runs: Sequence[FinishedRun], formats: Iterable[str], output: Path) -> list[Path]:
    """Write ``runs``, each of which measured something, and return the files.

    ``output`` is a folder, which is made, or the file where one is written. Raises BadInputError, EnvironmentFault.
    """
    asked = list(dict.fromkeys(formats))
    paths = _paths(asked, output)
    sections = [section(run) for run in runs]
    contents: dict[str, str | bytes] = {}
    if "markdown" in asked:
        from optimizer.pages.markdown import markdown

        contents["markdown"] = markdown(sections)
    if "csv" in asked or "parquet" in asked:
        from optimizer.pages import dataframe

        frame = dataframe.measurements(runs)
        contents |= {name: make(frame) for name, make in dataframe.MAKERS.items() if name in asked}
    written = [_write(paths[name], content) for name, content in contents.items()]
    plots: list[dict[str, Plot]] = []
    for number, (run, told) in enumerate(zip(runs, sections, strict=True), start=1):
        plots.append({})
        prefix = "" if len(runs) == 1 else f"{number}-{re.sub(r'[^A-Za-z0-9.-]+', '-', told.name)[:80]}-"
        for drawn in drawings(run, told) if {"html", *PLOTS} & set(asked) else ():
            if "html" in asked:
                plots[-1][drawn.name] = plot(drawn, number)
            written += [
                _write(output / f"{prefix}{drawn.name}{SUFFIXES[name]}", make(drawn))
                for name, make in PLOTS.items()
                if name in asked
            ]
    if "html" in asked:
        written.append(_write(paths["html"], html(sections, plots)))
    return written


def _paths(asked: Sequence[str], output: Path) -> dict[str, Path]:
    """Of the formats that have one file."""
    if not output.suffix or output.is_dir():
        stems = {"csv": MEASUREMENTS, "parquet": MEASUREMENTS}
        return {name: output / f"{stems.get(name, NAME)}{SUFFIXES[name]}" for name in asked if name not in PLOTS}
    if len(asked) != 1 or asked[0] in PLOTS or output.suffix != SUFFIXES[asked[0]]:
        raise BadInputError(
            f"--output {one_line(str(output))}: a file is for one of html, markdown, csv and parquet, and ends "
            "in .html, .md, .csv or .parquet; give a folder"
        )
    return {asked[0]: output}


def _write(path: Path, content: str | bytes) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from error
    write_whole(path, content)
    return path
