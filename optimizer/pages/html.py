"""One HTML page of one run or of several, that needs nothing else: no network, no script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup

from optimizer.pages.content import Section, section
from optimizer.pages.drawings import drawings
from optimizer.pages.style import PALETTE, Drawing, inline
from optimizer.store.disk import write_whole
from optimizer.store.finished import FinishedRun

TEMPLATE = "report.html.j2"


def write_html(path: Path, runs: Sequence[FinishedRun]) -> None:
    """Write the page of ``runs``, each of which measured something. Raises EnvironmentFault."""
    sections = [section(run) for run in runs]
    write_whole(path, page(sections, [drawings(run, told) for run, told in zip(runs, sections, strict=True)]))


def page(sections: Sequence[Section], drawn: Sequence[Iterable[Drawing]]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    told = [
        (f"run-{number}", one, {each.name: _plot(each, f"run-{number}") for each in plots})
        for number, (one, plots) in enumerate(zip(sections, drawn, strict=True), start=1)
    ]
    return environment.get_template(TEMPLATE).render(sections=told, palette=PALETTE)


def _plot(drawn: Drawing, prefix: str) -> dict[str, object]:
    # the SVG is made of escaped text by ElementTree
    return {"svg": Markup(inline(drawn, prefix)), "told": drawn.description}  # noqa: S704
