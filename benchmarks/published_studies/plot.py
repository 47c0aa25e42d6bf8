"""Draw the plots of benchmarks/published_studies.md from the kept measurements and the published results.

    python benchmarks/published_studies/plot.py

Writes docs/images/study-STUDY.svg for each of the five published studies. The colours follow the page: light or dark.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kept import all_cells, read_kept
from optimizer.results.report.figure_style import (
    LABELS_HEIGHT,
    LEGEND_ROW_HEIGHT,
    LIGHT,
    PALETTE,
    TOP_MARGIN,
    Drawing,
    format_thousands,
    legend_above,
    new_figure,
    report_style,
    set_margins,
    svg,
)
from published import Row, published
from side_by_side import HIGHER_IS_BETTER, number, ratio
from studies import AS_GIVEN, DYNAMIC, OFF_DLRM, ON_CPU, ON_DLRM, STATIC, STUDIES, TWO_DYNAMIC

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import Locator

IMAGES = Path(__file__).parents[2] / "docs" / "images"
WIDTH = 5.4  # inches; with a wider plot the text would be too small on a phone
PANEL, ROW, GAP = 2.9, 0.52, 0.95  # heights in inches: a panel with axes, a row of dots, between two panels
FINE_TICKS_RATIO = 100.0  # ratio of the values up to which there is room for ticks at 1, 2 and 5 of each decade
LOOKS: dict[str, dict[str, Any]] = {
    "measured": {"marker": "o", "markersize": 5},
    "published": {
        "marker": "D",
        "markersize": 5,
        "markerfacecolor": LIGHT["page"],
        "linestyle": (0, (4, 3)),
    },
}


@dataclass(frozen=True)
class Series:
    """The cells labeled ``label``, with requests of ``batch`` samples if given; ``name`` is shown in the legend."""

    label: str
    name: str
    colour: str
    batch: int | None = None

    def points(self, rows: Iterable[Row], x: Callable[[Row], int]) -> list[tuple[int, float]]:
        """Return the positions and throughputs of those cells that have figures."""
        own = [row for row in rows if row["label"] == self.label and self.batch in (None, row["request_batch_size"])]
        return sorted((x(row), value) for row in own if (value := row.get(HIGHER_IS_BETTER)) is not None)


@dataclass(frozen=True)
class Pair:
    """A value measured here and the published one; None if unknown."""

    name: str
    measured: float | None
    published: float | None


def concurrency(row: Row) -> int:
    return int(row["concurrency"])


def request_batch_size(row: Row) -> int:
    return int(row["request_batch_size"])


def samples_in_flight(row: Row) -> int:
    return concurrency(row) * request_batch_size(row)


def results(*studies: str) -> tuple[list[Row], list[Row]]:
    """Return the kept cells and the published rows of these studies."""
    cells = [cell for name in studies for cell in all_cells(read_kept(name).values())]
    return cells, [row for name in studies for row in published(name)]


def draw_throughput(
    axes: Axes,
    series: Sequence[Series],
    x: Callable[[Row], int],
    x_label: str,
    rows: tuple[list[Row], list[Row]],
    *,
    title: str = "throughput (infer/s)",
    y_log: bool = True,
) -> None:
    """Draw the throughput over ``x``, on a binary logarithmic axis; published values are dashed and hollow."""
    positions: set[int] = set()
    highest, lowest = 0.0, float("inf")
    for one in series:
        for (source, look), own in zip(LOOKS.items(), rows, strict=True):
            points = one.points(own, x)
            if not points:
                continue
            at, values = [point[0] for point in points], [point[1] for point in points]
            name = one.name if source == "measured" else f"{one.name}, published"
            axes.plot(at, values, color=LIGHT[one.colour], label=name, gid=mark_group(source, one.name), **look)
            positions.update(at)
            lowest, highest = min(lowest, *values), max(highest, *values)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks := spaced(sorted(positions)), [f"{tick:,}" for tick in ticks])
    axes.set_title(title)
    axes.set_xlabel(x_label)
    if y_log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(log_locator(highest / lowest))
    else:
        axes.set_ylim(0, 1.15 * highest)
    axes.minorticks_off()
    format_thousands(axes, x=False)


def mark_group(source: str, name: str) -> str:
    """Return the id of the group of marks in the SVG."""
    slug = re.sub(r"\W+", "-", name)
    return f"{source}-{slug}"


def spaced(positions: Sequence[int]) -> list[int]:
    """Return about eight of the positions, whose labels do not overlap on a logarithmic axis."""
    kept: list[int] = []
    apart = max(2.0, (positions[-1] / positions[0]) ** (1 / 8))
    for position in positions:
        if not kept or position >= apart * kept[-1]:
            kept.append(position)
    return kept


def log_locator(span: float) -> Locator:
    """Return the ticks of a logarithmic axis whose largest value is ``span`` times its smallest one."""
    from matplotlib.ticker import LogLocator

    return LogLocator(10, subs=(1, 2, 5) if span <= FINE_TICKS_RATIO else (1,))


def draw_pairs(axes: Axes, pairs: Sequence[Pair], title: str, shown: Callable[[float], str]) -> None:
    """Draw a row for each pair, on a logarithmic axis; the name is above its values."""
    heights = range(len(pairs) - 1, -1, -1)
    values = [value for pair in pairs for value in (pair.measured, pair.published) if value is not None]
    axes.set_xscale("log")
    axes.set_xlim(min(values) / 2.2, 2.6 * max(values))
    axes.xaxis.set_major_locator(log_locator(max(values) / min(values)))
    text: dict[str, Any] = {"fontsize": 10, "bbox": {"facecolor": LIGHT["page"], "edgecolor": "none", "pad": 1}}
    axes.set_ylim(-0.45, len(pairs) - 0.3)
    for source, look in LOOKS.items():
        known = [(value, at) for at, pair in zip(heights, pairs, strict=True) if (value := getattr(pair, source))]
        dots = look | {"linestyle": "none", "color": LIGHT["front" if source == "measured" else "stage-3"]}
        group = mark_group(source, "pairs")
        axes.plot([value for value, _ in known], [at for _, at in known], label=source, gid=group, **dots)
    for at, pair in zip(heights, pairs, strict=True):
        known_values = sorted(value for value in (pair.measured, pair.published) if value is not None)
        axes.plot(known_values, [at] * len(known_values), color=LIGHT["rule"], linewidth=2, zorder=1)
        for place, value in enumerate(known_values):
            left = place == 0 and len(known_values) == 2
            aside: dict[str, Any] = {"xytext": (-7 if left else 7, -4), "ha": "right" if left else "left"}
            axes.annotate(shown(value), (value, at), textcoords="offset points", **aside, **text)
        axes.text(0, at + 0.33, pair.name, transform=axes.get_yaxis_transform(), **text)
    axes.set_yticks([])
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.set_title(title)
    axes.minorticks_off()
    format_thousands(axes)
    place_legend: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.0, 0.99), "borderaxespad": 0.0}
    axes.legend(ncols=2, fontsize=10, handletextpad=0.1, columnspacing=1.0, **place_legend)


def draw_ratios(axes: Axes, study: str, rows: tuple[list[Row], list[Row]]) -> None:
    """Draw the ratios of a study, and a line at 1."""
    pairs = [Pair(one.name, ratio(one, rows[0]), ratio(one, rows[1])) for one in STUDIES[study].ratios]
    draw_pairs(axes, pairs, "ratio", "{:.2f}x".format)
    axes.axvline(1, color=LIGHT["quiet"], linewidth=1, zorder=0)


def two_panels() -> tuple[Figure, Axes, Axes]:
    figure = new_figure()
    upper, lower = figure.subplots(2, 1)
    return figure, upper, lower


def arrange(figure: Figure, upper: float, lower: float, legend_rows: int = 0) -> None:
    """Set the heights of the two panels, in inches, and the margins."""
    top = TOP_MARGIN + LEGEND_ROW_HEIGHT * legend_rows + 0.3
    figure.set_size_inches(WIDTH, top + upper + GAP + lower + LABELS_HEIGHT)
    grid = figure.axes[0].get_gridspec()
    assert grid is not None
    grid.set_height_ratios([upper, lower])
    set_margins(figure, legend_rows)
    figure.subplots_adjust(hspace=2 * GAP / (upper + lower))


def throughput_and_ratios(
    study: str, title: str, series: Sequence[Series], size: Callable[[Row], int], label: str
) -> Drawing:
    """Return a drawing with the throughput by ``size`` above and the ratios of the study below."""
    rows = results(study)
    figure, upper, lower = two_panels()
    draw_throughput(upper, series, size, label, rows)
    draw_ratios(lower, study, rows)
    arrange(figure, PANEL, ROW * len(STUDIES[study].ratios), legend_above(figure, upper, columns=2))
    return Drawing(f"study-{study}", title, "", figure)


def bert() -> Drawing:
    series = (
        Series(STATIC, "static, batch 1", "front", 1),
        Series(STATIC, "static, batch 8", "stage-1", 8),
        Series(DYNAMIC, "dynamic, batch 1", "good"),
        Series("static · 4 instances", "4 instances, batch 1", "stage-3"),
    )
    return throughput_and_ratios("bert", "BERT", series, samples_in_flight, "samples in flight")


def resnext() -> Drawing:
    series = (Series("FP32", "FP32", "front"), Series("FP16", "FP16", "stage-3"))
    return throughput_and_ratios("resnext", "ResNeXt", series, concurrency, "requests in flight")


def dlrm() -> Drawing:
    rows = results("dlrm")
    figure, upper, lower = two_panels()
    by_size = (
        Series(ON_CPU, "ONNX FP32, CPU", "front"),
        Series("ONNX FP16 on V100", "ONNX FP16, V100", "stage-1"),
    )
    draw_throughput(upper, by_size, request_batch_size, "samples in a request, one request in flight", rows)
    by_load = (Series(OFF_DLRM, "static", "front"), Series(ON_DLRM, "dynamic", "good"))
    title = "measured throughput of requests of 4 (infer/s)"
    draw_throughput(lower, by_load, concurrency, "requests in flight", rows, title=title, y_log=False)
    lower.legend(loc="upper left", fontsize=10)
    arrange(figure, PANEL, PANEL, legend_above(figure, upper, columns=2))
    return Drawing("study-dlrm", "DLRM", "", figure)


def minilm() -> Drawing:
    cells, printed = rows = results("minilm", "minilm-fastapi", "minilm-variants")

    def pair(name: str, here: str, there: str) -> Pair:
        return Pair(name, latency(cells, here), latency(printed, there))

    pairs = (
        *(
            pair(f"Triton, {tokens} tokens", f"{tokens} tokens · {AS_GIVEN}", f"{tokens} tokens · {AS_GIVEN}")
            for tokens in (16, 128)
        ),
        pair("FastAPI, 16 tokens (published: with curl)", "FastAPI · 16 tokens", "FastAPI · short sentence"),
        pair("no graph optimization (here: BERT mini)", "FP32, graph level 2", "ONNX Runtime (vanilla)"),
        pair("all graph optimizations (here: BERT mini)", "FP32, graph level 0", "ONNX Runtime (optimized)"),
    )
    figure, upper, lower = two_panels()
    draw_pairs(upper, pairs, "average latency (ms)", lambda value: f"{number(value)} ms")
    series = (
        Series("FastAPI · 16 tokens", "FastAPI", "stage-3"),
        Series("Triton · 16 tokens", "Triton", "front"),
        Series("Triton, dynamic batching · 16 tokens", "Triton, dynamic batching", "good"),
    )
    title = "measured throughput of 16 tokens (infer/s)"
    draw_throughput(lower, series, concurrency, "requests in flight", rows, title=title, y_log=False)
    lower.legend(loc="upper left", fontsize=10)
    arrange(figure, ROW * len(pairs), PANEL)
    return Drawing("study-minilm", "MiniLM", "", figure)


def latency(rows: Iterable[Row], label: str) -> float | None:
    """Return the average latency of the cells with this label and one request in flight, in ms."""
    known = [row["latency_avg_ms"] for row in rows if row["label"] == label and row["concurrency"] == 1]
    return known[0] if known else None


def text_recognition() -> Drawing:
    rows = results("text_recognition")
    figure, upper, lower = two_panels()
    series = (
        Series(STATIC, "static", "front"),
        Series(DYNAMIC, "dynamic", "good"),
        Series("static · 2 instances", "static, 2 instances", "stage-1"),
        Series(TWO_DYNAMIC, "dynamic, 2 instances", "stage-3"),
    )
    draw_throughput(upper, series, concurrency, "requests in flight, 2 samples each", rows)
    draw_ratios(lower, "text_recognition", rows)
    arrange(figure, PANEL, ROW * len(STUDIES["text_recognition"].ratios), legend_above(figure, upper, columns=2))
    return Drawing("study-text_recognition", "text recognition", "", figure)


PLOTS = {"bert": bert, "resnext": resnext, "dlrm": dlrm, "minilm": minilm, "text_recognition": text_recognition}


def plot_of(study: str) -> str:
    """Return the name of the plot that shows a study: minilm-fastapi and minilm-variants are parts of minilm."""
    return study.partition("-")[0]


def draw(name: str) -> str:
    """Return a plot as an SVG file."""
    with report_style():
        return adapt_to_dark(svg(PLOTS[name]()))


def adapt_to_dark(text: str) -> str:
    """Add a style sheet that replaces the colours where the browser prefers a dark page. Other viewers ignore it."""
    rules = [
        f'[style*="{kind}: {light}"] {{ {kind}: {dark} !important }}'
        for light, dark in PALETTE.values()
        for kind in ("fill", "stroke")
        if f"{kind}: {light}" in text
    ]
    sheet = f"<style>@media (prefers-color-scheme: dark) {{ {' '.join(rules)} }}</style>"
    return re.sub(r"(<svg\b[^>]*>)", lambda tag: tag[0] + sheet, text, count=1)


def write(names: Iterable[str], folder: Path = IMAGES) -> None:
    """Write these plots as study-STUDY.svg."""
    for name in names:
        (folder / f"study-{name}.svg").write_text(draw(name), encoding="utf-8")


if __name__ == "__main__":
    write(PLOTS)
