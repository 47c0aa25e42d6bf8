"""The layout of a figure for a narrow screen: panels one below the other, and a legend of at most two columns."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from optimizer.results.report.figure_style import LABELS, LEGEND_LOOK, LEGEND_ROW, MARGIN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 5.4  # inches; text is then about as large as that of the page on a telephone
LEFT, RIGHT, RIGHT_AXIS = 0.95, 0.2, 0.95  # margins in inches, the last one for a second axis
PANEL, SMALL_PANEL, GAP, SMALL_GAP = 2.3, 1.5, 0.9, 0.62  # heights of panels and of the space between them
MOST_LARGE = 3  # more panels are small
LONGEST_LABEL = 26  # characters of a legend of two columns
TITLE_SIZE, SMALLEST_SIZE = 9.5, 6.5  # points
MOST_LETTERS = 40  # that fit below a panel at full size, with the space between the texts


def make_narrow(figure: Figure) -> None:
    """Change the layout of ``figure``, whose colours, limits and tooltips stay."""
    width, height = figure.get_size_inches()
    legend_rows = _rearrange_legend(figure)
    panels = _panels(figure)
    grid = panels[0][0].get_gridspec()
    has_titles = any(axes.get_title(loc="left") for axes in figure.axes)
    top = MARGIN + LEGEND_ROW * legend_rows + (0.3 if has_titles else 0.1)
    for axes in figure.axes:
        axes.set_title(axes.get_title(loc="left"), loc="left", fontsize=TITLE_SIZE)
    if grid is None or grid.ncols == 1:
        pars = figure.subplotpars
        old_top, bottom = (1 - pars.top) * height, pars.bottom * height
        height += top - old_top
        figure.set_size_inches(WIDTH, height)
        left = pars.left * width
        figure.subplots_adjust(
            left=left / WIDTH, right=1 - RIGHT / WIDTH, top=1 - top / height, bottom=bottom / height
        )
        return
    panel, gap = (PANEL, GAP) if len(panels) <= MOST_LARGE else (SMALL_PANEL, SMALL_GAP)
    height = top + len(panels) * panel + (len(panels) - 1) * gap + LABELS
    figure.set_size_inches(WIDTH, height)
    has_second_axis = any(len(group) > 1 for group in panels)
    cells = figure.add_gridspec(
        len(panels),
        1,
        left=LEFT / WIDTH,
        right=1 - (RIGHT_AXIS if has_second_axis else RIGHT) / WIDTH,
        top=1 - top / height,
        bottom=LABELS / height,
        hspace=gap / panel,
    )
    for place, group in enumerate(panels):
        for axes in group:
            axes.set_subplotspec(cells[place, 0])
        group[0].tick_params(labelleft=True)
        _shrink_labels(group[0])
        for second in group[1:]:
            second.spines["right"].set_visible(True)
            second.tick_params(right=False, labelright=True)
            second.set_ylabel(panels[-1][-1].get_ylabel(), color=panels[-1][-1].yaxis.label.get_color())
            group[0].set_ylabel(panels[0][0].get_ylabel())


def _shrink_labels(axes: Axes) -> None:
    """Write the texts below a panel smaller if they would overlap."""
    texts = axes.get_xticklabels()
    longest = max((len(line) for text in texts for line in text.get_text().split("\n")), default=0)
    if (needed := longest * len(texts)) > MOST_LETTERS:
        for text in texts:
            text.set_fontsize(max(float(text.get_fontsize()) * MOST_LETTERS / needed, SMALLEST_SIZE))


def _panels(figure: Figure) -> list[list[Axes]]:
    """Return the visible panels, each with the axes that share its place."""
    groups = defaultdict[int, "list[Axes]"](list)
    for axes in figure.axes:
        spec = axes.get_subplotspec()
        if axes.get_visible():
            groups[-1 if spec is None else spec.num1].append(axes)
    return list(groups.values())


def _rearrange_legend(figure: Figure) -> int:
    """Put the legend into fewer columns and return the number of its rows; 0 without a legend."""
    if not figure.legends:
        return 0
    legend = figure.legends[0]
    handles: list[Any] = list(legend.legend_handles)
    labels = [text.get_text() for text in legend.get_texts()]
    legend.remove()
    columns = 2 if max(map(len, labels), default=0) <= LONGEST_LABEL else 1
    figure.legend(handles, labels, ncols=columns, **LEGEND_LOOK)
    return math.ceil(len(labels) / columns)
