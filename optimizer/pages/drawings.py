"""All plots of a run, in the order of the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from optimizer.pages.content import Section
from optimizer.pages.style import Drawing, drawing
from optimizer.store.finished import FinishedRun


def drawings(run: FinishedRun, told: Section) -> Iterator[Drawing]:
    """One at a time, since a figure takes memory; those that have nothing to show are left out."""
    from optimizer.pages import parameter_plots, plots, server_plots

    makers: list[Callable[[], Drawing | None]] = [
        lambda: plots.pareto(run),
        lambda: plots.load(run),
        lambda: server_plots.stages(run),
        lambda: server_plots.batches(run),
        lambda: plots.progress(run),
        lambda: parameter_plots.importance(told.importance, len(told.samples)),
        lambda: parameter_plots.slices(run, told.samples),
        lambda: server_plots.noise(run),
    ]
    for make in makers:
        with drawing():
            drawn = make()
        if drawn is not None:
            yield drawn
