"""All plots of a run, in the order of the page."""

from __future__ import annotations

from collections.abc import Iterator

from optimizer.pages.content import Section
from optimizer.pages.style import Drawing, drawing
from optimizer.store.finished import FinishedRun


def drawings(run: FinishedRun, told: Section) -> Iterator[Drawing]:
    """One at a time, since a figure takes memory; those that have nothing to show are left out."""
    from optimizer.pages import parameter_plots, plots

    makers = [lambda draw=draw: draw(run) for draw in plots.DRAWN]  # type: ignore[misc]
    makers.append(lambda: parameter_plots.importance(told.importance, len(told.samples)))
    makers.append(lambda: parameter_plots.slices(run, told.samples))
    for make in makers:
        with drawing():
            drawn = make()
        if drawn is not None:
            yield drawn
