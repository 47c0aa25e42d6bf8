"""One HTML page of one run or of several, that needs nothing else: no network, no script."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup

from optimizer.pages.content import Section
from optimizer.pages.drawings import drawings
from optimizer.pages.style import PALETTE, Drawing, inline
from optimizer.store.finished import FinishedRun

TEMPLATE = "report.html.j2"


def html(runs: Sequence[FinishedRun], sections: Sequence[Section]) -> str:
    """The page; ``sections`` are those of ``runs``."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    told = [
        (f"run-{number}", one, {drawn.name: _plot(drawn, f"run-{number}") for drawn in drawings(run, one)})
        for number, (run, one) in enumerate(zip(runs, sections, strict=True), start=1)
    ]
    return environment.get_template(TEMPLATE).render(sections=told, palette=PALETTE)


def _plot(drawn: Drawing, prefix: str) -> dict[str, str]:
    # ElementTree has escaped the texts in it
    return {"svg": Markup(inline(drawn, prefix)), "told": drawn.description}
