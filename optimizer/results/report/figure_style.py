"""Style of the plots: colours, axes, legends, files, SVG of a page, and the layout for narrow screens."""

from __future__ import annotations

import importlib
import io
import logging
import math
import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias
from xml.etree import ElementTree

import numpy as np

from objectives.sla import Sla
from optimizer.core.trial import Point
from optimizer.results import formatting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# name -> (on a light page, on a dark page); light colours differ, because `_adapt_to_page` replaces them in figures
PALETTE: Mapping[str, tuple[str, str]] = {
    "page": ("#ffffff", "#14171b"),
    "ink": ("#1b1f24", "#e8ebee"),
    "quiet": ("#57606a", "#a2abb5"),
    "rule": ("#d5dae0", "#343b43"),
    "panel": ("#f5f7f9", "#1d2126"),
    "good": ("#0b6b3a", "#63cf94"),
    "bad": ("#b3261e", "#ff8a80"),
    "undecided": ("#7a5b00", "#e6c34a"),
    "front": ("#0b5cad", "#79b8ff"),
    "dot": ("#7d8792", "#8a949f"),
    "stage-1": ("#7a5195", "#b08bd0"),
    "stage-2": ("#1b868b", "#55c0c5"),
    "stage-3": ("#c2571a", "#f0965c"),
    "stage-4": ("#8c6d1f", "#cfae57"),
    "stage-5": ("#2a8f5b", "#6fcf9c"),
    "stage-6": ("#b83280", "#f07fbe"),
    "stage-7": ("#5f6b76", "#99a5b1"),
    "stage-8": ("#6b4226", "#b98a6a"),
}
LIGHT = {name: light for name, (light, _) in PALETTE.items()}
STAGE_COLOURS = tuple(colour for name, colour in LIGHT.items() if name.startswith("stage-"))

ROLE_COLOURS = {
    "recommended": LIGHT["good"],
    "closest": LIGHT["bad"],
    "baseline": LIGHT["stage-3"],
    "dynamic_batching {}": LIGHT["front"],
}

WIDTH, HEIGHT = 10.0, 4.7  # inches, 72 units of the SVG each
PNG_DPI = 144
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_SVG = "http://www.w3.org/2000/svg"
_HREF = "{http://www.w3.org/1999/xlink}href"


@dataclass(frozen=True)
class Drawing:
    """A plot with its text alternative. ``labels`` holds the tooltips of the dots or bars of each group, by gid."""

    name: str
    title: str
    description: str
    figure: Figure
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def _repr_png_(self) -> bytes:
        """Return the plot as a notebook shows it."""
        return png(self)


@contextmanager
def report_style() -> Iterator[None]:
    """Set matplotlib to the style of the report, without warnings and without formulas in text."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    mpl = _import_matplotlib()
    hidden = ("axes.spines.right", "axes.spines.top", "legend.frameon", "xtick.bottom", "ytick.left")
    style: dict[Any, Any] = {
        **dict.fromkeys((*hidden, "text.parse_math"), False),
        **dict.fromkeys(("axes.axisbelow", "axes.grid"), True),
        **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), LIGHT["quiet"]),
        **dict.fromkeys(("axes.titlecolor", "legend.labelcolor", "text.color"), LIGHT["ink"]),
        **dict.fromkeys(("axes.facecolor", "figure.facecolor", "svg.fonttype"), "none"),
        **dict.fromkeys(("axes.labelsize", "axes.titlesize", "font.size"), 11),
        **dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), 10),
        "axes.titlelocation": "left",
        "axes.titley": 1.0,  # otherwise matplotlib lays out all ticks twice to find it
        "font.family": "DejaVu Sans",
        "grid.color": LIGHT["rule"],
        "svg.hashsalt": "tritune",
    }
    with mpl.rc_context(style), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a letter that the font lacks; the browser has it
        yield


def new_figure(height: float = HEIGHT) -> Figure:
    """Return an empty figure, without pyplot, which keeps figures in memory and needs a display."""
    return _figure_class()(figsize=(WIDTH, height))


def _figure_class() -> type[Figure]:
    """Return matplotlib's Figure. Its first import leaves the lists of properties out of matplotlib's docstrings.

    Making these lists takes a third of the time of the import.
    """
    _import_matplotlib()
    from matplotlib import artist as artists

    list_properties = artists.kwdoc
    artists.kwdoc = lambda artist: ""
    try:
        from matplotlib.figure import Figure
    finally:
        artists.kwdoc = list_properties
    return Figure


def _import_matplotlib() -> Any:
    """Return the module matplotlib. Its import fails if the variable MPLBACKEND names no backend.

    The plots use no backend, but a notebook that imports matplotlib later expects that of the variable.
    """
    if "matplotlib" in sys.modules or "MPLBACKEND" not in os.environ:
        return importlib.import_module("matplotlib")
    backend = os.environ.pop("MPLBACKEND")
    try:
        mpl = importlib.import_module("matplotlib")
    finally:
        os.environ["MPLBACKEND"] = backend
    with suppress(ValueError):
        mpl.rcParams["backend"] = backend
    return mpl


def svg(drawn: Drawing) -> str:
    """Return a plot as an SVG file, in light colours on white."""
    text = io.StringIO()
    with report_style():
        drawn.figure.savefig(text, format="svg", metadata=NO_METADATA, facecolor=LIGHT["page"])
    return text.getvalue()


def png(drawn: Drawing) -> bytes:
    """Return a plot as a PNG file."""
    data = io.BytesIO()
    with report_style():
        drawn.figure.savefig(data, format="png", dpi=PNG_DPI, facecolor=LIGHT["page"])
    return data.getvalue()


def inline(drawn: Drawing, prefix: str, kind: str) -> str:
    """Return a plot as SVG for a page: colours are CSS variables, ids begin with ``prefix``, values have tooltips.

    ``kind``, which is ``wide`` or ``narrow``, is in the ids and is a class of the plot.
    """
    text = io.BytesIO()
    with report_style():
        drawn.figure.savefig(text, format="svg", metadata=NO_METADATA)
    root = ElementTree.fromstring(text.getvalue())
    mark = f"{prefix}-{drawn.name}" + ("-narrow" if kind == "narrow" else "")
    for group, labels in drawn.labels.items():
        element = next((g for g in root.iter(f"{{{_SVG}}}g") if g.get("id") == group), None)
        marks = [] if element is None else list(element.iter(f"{{{_SVG}}}use")) or _bar_paths(element)
        for mark_of_value, label in zip(marks, labels, strict=False):
            ElementTree.SubElement(mark_of_value, "title").text = label
    _adapt_to_page(root, mark)
    _describe(root, drawn, mark, kind)
    return ElementTree.tostring(root, encoding="unicode")


def _bar_paths(element: ElementTree.Element) -> list[ElementTree.Element]:
    """Return the bars of a group: its paths that no other element refers to."""
    return [path for path in element.iter(f"{{{_SVG}}}path") if path.get("id") is None]


def _adapt_to_page(root: ElementTree.Element, mark: str) -> None:
    """Remove namespaces, style sheets and unused ids, and replace colours by CSS variables of the page."""
    for definitions in list(root.iter(f"{{{_SVG}}}defs")):
        for sheet in definitions.findall(f"{{{_SVG}}}style"):
            definitions.remove(sheet)
    used = {element.get(_HREF, "").removeprefix("#") for element in root.iter()}
    used |= {element.get("clip-path", "")[5:-1] for element in root.iter()}  # url(#…)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        attributes = element.attrib
        if attributes.get("id") in used:
            attributes["id"] = f"{mark}-{attributes['id']}"
        else:
            attributes.pop("id", None)
        if (target := attributes.pop(_HREF, None)) is not None:
            attributes["href"] = f"#{mark}-{target.removeprefix('#')}"
        if "clip-path" in attributes:
            attributes["clip-path"] = attributes["clip-path"].replace("url(#", f"url(#{mark}-")
        if "style" in attributes:
            for colour, value in LIGHT.items():
                attributes["style"] = attributes["style"].replace(value, f"var(--{colour})")


def _describe(root: ElementTree.Element, drawn: Drawing, mark: str, kind: str) -> None:
    """Make the SVG ``root`` an image of the page's width, with a title and a description for screen readers."""
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    described = {"aria-labelledby": f"{mark}-title", "aria-describedby": f"{mark}-desc"}
    root.attrib |= {"class": f"plot {kind}", "role": "img", **described}
    for index, (tag, text) in enumerate((("title", drawn.title), ("desc", drawn.description))):
        element = ElementTree.Element(tag, {"id": f"{mark}-{tag}"})
        element.text = text
        root.insert(index, element)


LOG_FROM_RATIO = 30.0  # ratio of the latencies above which their axis is logarithmic
FINE_TICKS_RATIO = 2000.0  # ratio up to which there is room for ticks at 1, 2 and 5 of each decade
FAR_BOUND = 3.0  # a bound this many times beyond all points is not drawn, because it would squeeze them
MAX_DOTS = 3000  # per group; more would overlap
FIRST_CELL = 1.5  # initial size, in units of the SVG, of a cell in which one dot is kept
TOP_MARGIN, LEGEND_ROW_HEIGHT, LABELS_HEIGHT = 0.1, 0.27, 0.62  # inches
LABEL_DISTANCE = 21 / 72  # inches from an x axis to its label, below the texts of the ticks
LEGEND_LOOK: Mapping[str, Any] = {
    "loc": "upper left",
    "borderaxespad": 0.2,
    "handletextpad": 0.5,
    "columnspacing": 1.4,
    "fontsize": 10,
}

PlacedPoint: TypeAlias = tuple[Point, float, float]  # a point with its x and y


def format_thousands(axes: Axes, *, x: bool = True) -> None:
    """Write numbers of the y axis, and of the x axis, with thousands separators."""
    from matplotlib.ticker import FuncFormatter

    formatter = FuncFormatter(lambda value, _: formatting.exact(value))
    axes.yaxis.set_major_formatter(formatter)
    if x:
        axes.xaxis.set_major_formatter(formatter)


def mark_whole_numbers(axes: Axes) -> None:
    """Mark whole numbers only on the x axis, which counts something."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))


def set_latency_axis(axes: Axes, values_ms: Sequence[float]) -> None:
    """Set the x axis for latencies: from 0, or logarithmic if the values are far apart."""
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


def draw_bounds(axes: Axes, sla: Sla, metric: str, *, vertical: bool = False) -> None:
    """Draw the bounds on ``metric``, with a label for the legend, unless they are far beyond all points."""
    for constraint in sla:
        low, high = axes.get_xlim() if vertical else axes.get_ylim()
        if constraint.metric != metric or constraint.bound > FAR_BOUND * high:
            continue
        limits, line = (axes.set_xlim, axes.axvline) if vertical else (axes.set_ylim, axes.axhline)
        limits(low, max(high, 1.06 * constraint.bound))
        look: dict[str, Any] = {"color": LIGHT["bad"], "linestyle": (0, (5, 4)), "linewidth": 1.5}
        line(constraint.bound, label=formatting.bound(constraint), **look)


def dot_size(count: int) -> float:
    """Return the area of a dot in square points: large for few dots, small for many."""
    return 22.0 if count <= 300 else 7.0


def visible_dots(axes: Axes, dots: Sequence[PlacedPoint]) -> list[PlacedPoint]:
    """Return ``dots`` without those that are hidden by others. The limits of the axes must be set before."""
    kept, cell = list(dots), FIRST_CELL
    if not kept:
        return kept
    positions = axes.transData.transform(np.array([(x, y) for _, x, y in dots])) * 72 / axes.figure.dpi
    while True:
        _, first = np.unique(np.floor(positions / cell), axis=0, return_index=True)
        if len(first) <= MAX_DOTS:
            return [kept[index] for index in sorted(first.tolist())]
        cell *= 1.25


def draw_dots(axes: Axes, places: Iterable[tuple[float, float]], **look: Any) -> None:
    """Draw a dot at each (x, y) of ``places``; ``look`` are arguments of matplotlib's ``scatter``."""
    x, y = np.reshape(list(places), (-1, 2)).T
    axes.scatter(x, y, **look)


def draw_bars(
    axes: Axes, corners: Sequence[tuple[float, float, float, float]], colour: str, gid: str, label: str
) -> None:
    """Draw a bar for each (left, low, right, high); ``gid`` is their group's, ``label`` their text in the legend."""
    from matplotlib.collections import PolyCollection

    shapes = [[(left, low), (left, high), (right, high), (right, low)] for left, low, right, high in corners]
    look: dict[str, Any] = {"facecolors": colour, "edgecolors": LIGHT["page"], "linewidths": 0.5}
    axes.add_collection(PolyCollection(shapes, label=label, gid=gid, **look))


def legend_above(figure: Figure, *axes: Axes, columns: int = 6) -> int:
    """Add a legend above all panels; return the number of its rows, for which `set_margins` makes room."""
    entries: dict[str, Any] = {}
    for panel in axes:
        handles, labels = panel.get_legend_handles_labels()
        entries |= {label: handle for label, handle in zip(labels, handles, strict=True) if label not in entries}
    figure.legend(entries.values(), entries.keys(), ncols=columns, **LEGEND_LOOK)
    return math.ceil(len(entries) / columns)


def set_margins(figure: Figure, legend_rows: int = 0, *, right: float = 0.15) -> None:
    """Set fixed margins for labels and legend, which is faster than measuring text; ``right`` is in inches."""
    width, height = figure.get_size_inches()
    figure.subplots_adjust(
        left=0.95 / width,
        right=1 - right / width,
        bottom=LABELS_HEIGHT / height,
        top=1 - _top_margin(figure, legend_rows) / height,
        wspace=0.22,
        hspace=0.5,
    )
    place_labels(figure)


def _top_margin(figure: Figure, legend_rows: int) -> float:
    """Return the inches above the panels, for their titles and the legend."""
    has_titles = any(axes.get_title(loc="left") for axes in figure.axes)
    return TOP_MARGIN + LEGEND_ROW_HEIGHT * legend_rows + (0.3 if has_titles else 0.1)


def place_labels(figure: Figure) -> None:
    """Fix the place of the labels of all x axes; matplotlib would measure the texts of all ticks to find it.

    The distance of a label from a y axis depends on the texts of the ticks, so these are measured if there is one.
    """
    from matplotlib.transforms import ScaledTranslation

    has_y_labels = any(axes.get_ylabel() for axes in figure.axes)
    below = ScaledTranslation(0, -LABEL_DISTANCE, figure.dpi_scale_trans)
    for axes in figure.axes:
        axes.xaxis.set_label_coords(0.5, 0, axes.transAxes + below)
        if not has_y_labels:
            axes.yaxis.set_label_coords(0, 0.5)


# -- the layout for a narrow screen: panels below each other, and a legend of at most two columns -----------------

NARROW_WIDTH = 5.4  # inches; text is then about as large as that of the page on a telephone
NARROW_LEFT, NARROW_RIGHT, NARROW_RIGHT_AXIS = 0.95, 0.2, 0.95  # margins in inches, the last one for a second axis
PANEL, SMALL_PANEL, GAP, SMALL_GAP = 2.3, 1.5, 0.9, 0.62  # heights of panels and of the space between them
MAX_LARGE = 3  # more panels are small
MAX_LABEL_LENGTH = 26  # characters of a legend of two columns
NARROW_TITLE_SIZE, MIN_LABEL_SIZE = 9.5, 6.5  # points
MAX_LETTERS = 40  # characters that fit below a panel at full size, with the space between the texts


def make_narrow(figure: Figure) -> None:
    """Change the layout of ``figure``, whose colours, limits and tooltips stay."""
    top = _top_margin(figure, _rearrange_legend(figure))
    panels = _panels(figure)
    grid = panels[0][0].get_gridspec()
    for axes in figure.axes:
        axes.set_title(axes.get_title(loc="left"), loc="left", fontsize=NARROW_TITLE_SIZE)
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
        right=1 - NARROW_RIGHT / NARROW_WIDTH,
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
        left=NARROW_LEFT / NARROW_WIDTH,
        right=1 - (NARROW_RIGHT_AXIS if has_second_axis else NARROW_RIGHT) / NARROW_WIDTH,
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
            text.set_fontsize(max(float(text.get_fontsize()) * MAX_LETTERS / needed, MIN_LABEL_SIZE))


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
