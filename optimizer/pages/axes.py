"""What the plots have in common: ticks in words, bounds, legends that cover nothing, dots that are told apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from optimizer.pages.style import LIGHT
from optimizer.report import words
from optimizer.trial import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOG_FROM_RATIO = 30.0  # latencies further apart than this are drawn on a logarithmic axis
FINE_TICKS_RATIO = 2000.0  # up to which there is room for 1, 2 and 5 of each decade
FAR = 3.0  # a bound this many times beyond every point would only squash them
MOST_DOTS = 3000  # of a group; more fall on one another anyway
CELL = 1.5  # units of the SVG within which two dots are one, at first
MARGIN, LEGEND_ROW, LABELS = 0.1, 0.27, 0.62  # inches

Placed = tuple[Point, float, float]


def thousands(axes: Axes, *, x: bool = True) -> None:
    from matplotlib.ticker import FuncFormatter

    told = FuncFormatter(lambda value, _: words.exact(value))
    axes.yaxis.set_major_formatter(told)
    if x:
        axes.xaxis.set_major_formatter(told)


def log_latency(axes: Axes, values_ms: Sequence[float]) -> None:
    """The x axis: from 0, or logarithmic where the values are far apart."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = min(values_ms), max(values_ms)
    if high <= LOG_FROM_RATIO * low:
        axes.set_xlim(0, 1.06 * high)
        return
    axes.set_xscale("log")
    axes.set_xlim(low / 1.2, high * 1.2)
    subs = (1, 2, 5) if high <= FINE_TICKS_RATIO * low else (1,)
    axes.xaxis.set_major_locator(LogLocator(10, subs=subs, numticks=8))
    axes.xaxis.set_minor_formatter(NullFormatter())


def bound_line(axes: Axes, bound: float, told: str, *, vertical: bool) -> None:
    """Where the bound is not far off all that was measured; a legend above tells which it is."""
    low, high = axes.get_xlim() if vertical else axes.get_ylim()
    if bound > FAR * high:
        return
    limits, line = (axes.set_xlim, axes.axvline) if vertical else (axes.set_ylim, axes.axhline)
    limits(low, max(high, 1.06 * bound))
    line(bound, color=LIGHT["bad"], linestyle=(0, (5, 4)), linewidth=1.5, label=told)


def dot_size(count: int) -> float:
    """In square units: a few are to be seen, thousands told apart."""
    return 22.0 if count <= 300 else 7.0


def placed(axes: Axes, dots: Sequence[Placed]) -> list[Placed]:
    """Those of ``dots`` that are seen: one of any that lie on one another. The axes have their limits already."""
    kept, cell = list(dots), CELL
    if not kept:
        return kept
    seen = axes.transData.transform(np.array([(x, y) for _, x, y in dots])) * 72 / axes.figure.dpi
    while True:
        _, first = np.unique(np.floor(seen / cell), axis=0, return_index=True)
        if len(first) <= MOST_DOTS:
            return [kept[place] for place in sorted(first.tolist())]
        cell *= 1.25


def legend_above(figure: Figure, *axes: Axes, columns: int = 6) -> int:
    """Above all panels, where nothing is drawn; its rows, that `fit` leaves room for."""
    told: dict[str, Any] = {}
    for one in axes:
        handles, labels = one.get_legend_handles_labels()
        told |= {label: handle for label, handle in zip(labels, handles, strict=True) if label not in told}
    look: dict[str, Any] = {"borderaxespad": 0.2, "handletextpad": 0.5, "columnspacing": 1.4, "fontsize": 10}
    figure.legend(told.values(), told.keys(), loc="upper left", ncols=columns, **look)
    return math.ceil(len(told) / columns)


def no_marks(axes: Axes) -> None:
    axes.tick_params(right=False, labelright=False)


def fit(figure: Figure, legend_rows: int = 0, *, right: float = 0.15) -> None:
    """Margins in inches for the labels, so that nothing has to be measured."""
    width, height = figure.get_size_inches()
    titles = any(axes.get_title(loc="left") for axes in figure.axes)
    top = MARGIN + LEGEND_ROW * legend_rows + (0.3 if titles else 0.1)
    figure.subplots_adjust(
        left=0.95 / width,
        right=1 - right / width,
        bottom=LABELS / height,
        top=1 - top / height,
        wspace=0.22,
        hspace=0.5,
    )
