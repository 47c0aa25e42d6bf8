"""The layout of a plot for a narrow screen: panels below each other, and a legend of at most two columns."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from optimizer.results.report.figure_style import LABELS_HEIGHT, LEGEND_LOOK, LEGEND_ROW_HEIGHT, TOP_MARGIN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NARROW_WIDTH = 5.4  # inches; text is then about as large as that of the page on a telephone
LEFT, RIGHT, RIGHT_AXIS = 0.95, 0.2, 0.95  # margins in inches, the last one for a second axis
PANEL, SMALL_PANEL, GAP, SMALL_GAP = 2.3, 1.5, 0.9, 0.62  # heights of panels and of the space between them
MAX_LARGE = 3  # more panels are small
MAX_LABEL_LENGTH = 26  # characters of a legend of two columns
TITLE_SIZE, MIN_SIZE = 9.5, 6.5  # points
MAX_LETTERS = 40  # characters that fit below a panel at full size, with the space between the texts


def make_narrow(figure: Figure) -> None:
    """Change the layout of ``figure``, whose colours, limits and tooltips stay."""
    legend_rows = _rearrange_legend(figure)
    panels = _panels(figure)
    grid = panels[0][0].get_gridspec()
    has_titles = any(axes.get_title(loc="left") for axes in figure.axes)
    top = TOP_MARGIN + LEGEND_ROW_HEIGHT * legend_rows + (0.3 if has_titles else 0.1)
    for axes in figure.axes:
        axes.set_title(axes.get_title(loc="left"), loc="left", fontsize=TITLE_SIZE)
    if grid is None or grid.ncols == 1:
        _narrow_column(figure, top)
    else:
        _stack_panels(figure, panels, top)


def _narrow_column(figure: Figure, top: float) -> None:
    """Reduce the width of panels that are below each other; ``top`` is the upper margin in inches."""
    width, height = figure.get_size_inches()
    margins = figure.subplotpars
    left, bottom, old_top = margins.left * width, margins.bottom * height, (1 - margins.top) * height
    height += top - old_top
    figure.set_size_inches(NARROW_WIDTH, height)
    figure.subplots_adjust(
        left=left / NARROW_WIDTH,
        right=1 - RIGHT / NARROW_WIDTH,
        top=1 - top / height,
        bottom=bottom / height,
    )


def _stack_panels(figure: Figure, panels: Sequence[Sequence[Axes]], top: float) -> None:
    """Arrange the panels of several columns in one; ``top`` is the upper margin in inches."""
    panel, gap = (PANEL, GAP) if len(panels) <= MAX_LARGE else (SMALL_PANEL, SMALL_GAP)
    height = top + len(panels) * panel + (len(panels) - 1) * gap + LABELS_HEIGHT
    figure.set_size_inches(NARROW_WIDTH, height)
    has_second_axis = any(len(group) > 1 for group in panels)
    cells = figure.add_gridspec(
        len(panels),
        1,
        left=LEFT / NARROW_WIDTH,
        right=1 - (RIGHT_AXIS if has_second_axis else RIGHT) / NARROW_WIDTH,
        top=1 - top / height,
        bottom=LABELS_HEIGHT / height,
        hspace=gap / panel,
    )
    first_axes, last_axes = panels[0][0], panels[-1][-1]
    for row, group in enumerate(panels):
        for axes in group:
            axes.set_subplotspec(cells[row, 0])
        group[0].tick_params(labelleft=True)
        _shrink_labels(group[0])
        for second in group[1:]:
            second.spines["right"].set_visible(True)
            second.tick_params(right=False, labelright=True)
            second.set_ylabel(last_axes.get_ylabel(), color=last_axes.yaxis.label.get_color())
            group[0].set_ylabel(first_axes.get_ylabel())


def _shrink_labels(axes: Axes) -> None:
    """Write the texts below a panel smaller if they would overlap."""
    texts = axes.get_xticklabels()
    longest = max((len(line) for text in texts for line in text.get_text().split("\n")), default=0)
    if (needed := longest * len(texts)) > MAX_LETTERS:
        for text in texts:
            text.set_fontsize(max(float(text.get_fontsize()) * MAX_LETTERS / needed, MIN_SIZE))


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
    columns = 2 if max(map(len, labels), default=0) <= MAX_LABEL_LENGTH else 1
    figure.legend(handles, labels, ncols=columns, **LEGEND_LOOK)
    return math.ceil(len(labels) / columns)
