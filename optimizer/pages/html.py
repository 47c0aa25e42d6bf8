"""One HTML page of one run or of several, that needs nothing else: no network, no script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from optimizer.pages.content import Section
from optimizer.pages.style import PALETTE, Drawing, inline
from optimizer.report.templates import environment

TEMPLATE = "report.html.j2"


@dataclass(frozen=True)
class Plot:
    """``svg`` is safe to stand in a page; ``told`` says what is to be seen."""

    svg: Markup
    told: str


def plot(drawn: Drawing, number: int) -> Plot:
    """Of the run of that ``number`` on the page, from 1."""
    return Plot(Markup(inline(drawn, f"run-{number}")), drawn.description)  # ElementTree has escaped its texts


def html(sections: Sequence[Section], plots: Sequence[Mapping[str, Plot]]) -> str:
    """The page; ``plots`` of each section by name, those that there are."""
    templates = environment(Path(__file__).parent, html=True)
    told = [(f"run-{number}", *one) for number, one in enumerate(zip(sections, plots, strict=True), start=1)]
    return templates.get_template(TEMPLATE).render(sections=told, palette=PALETTE)
