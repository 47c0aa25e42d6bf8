"""A scatter plot of latency and throughput on a terminal, with the Pareto front and the latency bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rich.text import Text

from optimizer.results import formatting

XY: TypeAlias = tuple[float, float]

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bits of a braille character, [row][column]
BLANK = 0x2800
FRONT_MARK, BOUND_MARK = "●", "┊"
MIN_COLUMNS, MIN_HEIGHT = 20, 4
AXIS_MARGIN = 1.1  # ratio of the axis to the bound or the largest latency
FAR_BOUND = 3.0  # a bound this many times beyond all points is not shown, because it would squeeze them


@dataclass(frozen=True, slots=True)
class PlotFrame:
    """The visible part of the plane, in ``columns`` x ``rows`` characters.

    Latencies go from 0 to ``right``, throughputs from ``bottom`` to ``top``.
    """

    right: float
    bottom: float
    top: float
    columns: int
    rows: int

    def dot(self, point: XY) -> tuple[int, int] | None:
        """Return (column, row from the top) in braille dots; None outside of the frame."""
        x, y = point
        if not (0 <= x <= self.right and self.bottom <= y <= self.top):
            return None
        across, up = x / self.right, (y - self.bottom) / (self.top - self.bottom)
        columns, rows = 2 * self.columns, 4 * self.rows
        return min(int(across * columns), columns - 1), rows - 1 - min(int(up * rows), rows - 1)


def scatter(
    points: Sequence[XY],
    front: Sequence[XY],
    bound: float | None,
    label: str,
    width: int,
    height: int,
    unit: str = "infer/s",
) -> list[Text]:
    """Return a plot with axes, as ``height`` lines of at most ``width`` characters.

    Points are (latency in ms, throughput in ``unit``). The result is empty if there is no room or nothing to draw.
    ``label`` names the latency metric. Points beyond twice the bound are not shown.
    """
    drawable = [point for point in (*points, *front) if all(map(math.isfinite, point)) and min(point) > 0]
    if not drawable:
        return []
    right = AXIS_MARGIN * max(x for x, _ in drawable)
    bound = None if bound is None or bound > FAR_BOUND * right else bound
    if bound is not None:
        right = max(min(right, 2 * bound), AXIS_MARGIN * bound)
    visible = [y for x, y in drawable if x <= right] or [y for _, y in drawable]
    bottom, top = 0.9 * min(visible), 1.02 * max(visible)
    label_width = max(map(len, (unit, formatting.number(bottom), formatting.number(top))))
    frame = PlotFrame(right, bottom, top, width - label_width - 2, height - 2)
    if frame.columns < MIN_COLUMNS or height < MIN_HEIGHT:
        return []
    lines = [*_canvas(frame, points, front, bound), *_axis(frame, bound, label)]
    labels = {0: formatting.number(top), frame.rows: formatting.number(bottom), frame.rows + 1: unit}
    return [Text(f"{labels.get(i, ''):>{label_width}} ", "dim").append_text(line) for i, line in enumerate(lines)]


def _canvas(frame: PlotFrame, points: Sequence[XY], front: Sequence[XY], bound: float | None) -> list[Text]:
    """Return the lines inside ``frame`` from the top: a braille dot for each point, a mark on the front and bound."""
    bits: dict[tuple[int, int], int] = {}  # the dots of the braille character in each (column, row)
    for point in points:
        if dot := frame.dot(point):
            column, row = dot
            cell = (column // 2, row // 4)
            bits[cell] = bits.get(cell, 0) | DOTS[row % 4][column % 2]
    discs = {(dot[0] // 2, dot[1] // 4) for point in front if (dot := frame.dot(point))}
    edge = int(bound / frame.right * frame.columns) if bound is not None else -1
    lines = []
    for row in range(frame.rows):
        cells = [chr(BLANK + bits[x, row]) if (x, row) in bits else " " for x in range(frame.columns)]
        if edge >= 0 and cells[edge] == " ":
            cells[edge] = BOUND_MARK
        front_columns = [x for x, y in discs if y == row]
        for x in front_columns:
            cells[x] = FRONT_MARK
        line = Text.assemble(("│", "dim"), "".join(cells))
        if edge >= 0 and cells[edge] == BOUND_MARK:
            line.stylize("yellow", edge + 1, edge + 2)
        for x in front_columns:
            line.stylize("bold green", x + 1, x + 2)
        lines.append(line)
    return lines


def _axis(frame: PlotFrame, bound: float | None, label: str) -> list[Text]:
    """Return the latency axis and the line of its labels: 0, the bound and the largest latency in ms."""
    edge = int(bound / frame.right * frame.columns) if bound is not None else -1
    rule = "".join("┴" if column == edge else "─" for column in range(frame.columns))
    ends = Text(f" 0{'':{max(0, edge - 1)}}", "dim")
    if bound is not None:
        ends.append(f"{formatting.exact(bound)} ms", "yellow")
    right = f"{label} {formatting.number(frame.right)} ms"
    room = 1 + frame.columns - len(ends.plain) - len(right)
    if room > 0:
        ends.append(" " * room + right, "dim")
    ends.truncate(1 + frame.columns)
    return [Text(f"└{rule}", "dim"), ends]
