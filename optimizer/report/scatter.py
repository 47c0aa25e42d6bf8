"""A small plot in characters: measured points in dots of braille, the front in discs, the bound as a line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from optimizer.report import words

XY = tuple[float, float]

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille character, [row][column]
BLANK = 0x2800
FRONT, BOUND = "●", "┊"
UNIT = "infer/s"
LEAST_COLUMNS, LEAST_HEIGHT = 20, 4
MARGIN = 1.1  # beyond the bound, or what was measured
FAR = 3.0  # a bound so many times beyond every point would only squash them


@dataclass(frozen=True, slots=True)
class Frame:
    """What part of the plane is shown: latencies from 0 to ``right`` and throughputs from ``bottom`` to ``top``, on
    ``columns`` x ``rows`` characters."""

    right: float
    bottom: float
    top: float
    columns: int
    rows: int

    def dot(self, point: XY) -> tuple[int, int] | None:
        """(column, row from the top) in dots of braille; None outside of the frame."""
        x, y = point
        if not (0 <= x <= self.right and self.bottom <= y <= self.top):
            return None
        across, up = x / self.right, (y - self.bottom) / (self.top - self.bottom)
        columns, rows = 2 * self.columns, 4 * self.rows
        return min(int(across * columns), columns - 1), rows - 1 - min(int(up * rows), rows - 1)


def scatter(
    points: Sequence[XY], front: Sequence[XY], bound: float | None, label: str, width: int, height: int
) -> list[Text]:
    """(latency in ms, infer/s) as ``height`` lines of at most ``width`` characters, the axes with them; none where
    there is no room or nothing to draw. ``label`` names the latency.

    Up to twice the bound is shown: beyond that nobody chooses.
    """
    every = [point for point in (*points, *front) if all(map(math.isfinite, point)) and min(point) > 0]
    if not every:
        return []
    right = MARGIN * max(x for x, _ in every)
    bound = None if bound is None or bound > FAR * right else bound
    if bound is not None:
        right = max(min(right, 2 * bound), MARGIN * bound)
    seen = [y for x, y in every if x <= right] or [y for _, y in every]
    bottom, top = 0.9 * min(seen), 1.02 * max(seen)
    label_width = max(map(len, (UNIT, words.number(bottom), words.number(top))))
    frame = Frame(right, bottom, top, width - label_width - 2, height - 2)
    if frame.columns < LEAST_COLUMNS or height < LEAST_HEIGHT:
        return []
    lines = [*_canvas(frame, points, front, bound), *_axis(frame, bound, label)]
    labels = {0: words.number(top), frame.rows: words.number(bottom), frame.rows + 1: UNIT}
    return [Text(f"{labels.get(i, ''):>{label_width}} ", "dim").append_text(line) for i, line in enumerate(lines)]


def _canvas(frame: Frame, points: Sequence[XY], front: Sequence[XY], bound: float | None) -> list[Text]:
    dots: dict[tuple[int, int], int] = {}
    for point in points:
        if place := frame.dot(point):
            column, row = place
            cell = (column // 2, row // 4)
            dots[cell] = dots.get(cell, 0) | DOTS[row % 4][column % 2]
    discs = {(place[0] // 2, place[1] // 4) for point in front if (place := frame.dot(point))}
    edge = int(bound / frame.right * frame.columns) if bound is not None else -1
    lines = []
    for row in range(frame.rows):
        cells = [chr(BLANK + dots[x, row]) if (x, row) in dots else " " for x in range(frame.columns)]
        if edge >= 0 and cells[edge] == " ":
            cells[edge] = BOUND
        own = [x for x, y in discs if y == row]
        for x in own:
            cells[x] = FRONT
        line = Text.assemble(("│", "dim"), "".join(cells))
        if edge >= 0 and cells[edge] == BOUND:
            line.stylize("yellow", edge + 1, edge + 2)
        for x in own:
            line.stylize("bold green", x + 1, x + 2)
        lines.append(line)
    return lines


def _axis(frame: Frame, bound: float | None, label: str) -> list[Text]:
    edge = int(bound / frame.right * frame.columns) if bound is not None else -1
    rule = "".join("┴" if column == edge else "─" for column in range(frame.columns))
    ends = Text(f" 0{'':{max(0, edge - 1)}}", "dim")
    if bound is not None:
        ends.append(f"{words.exact(bound)} ms", "yellow")
    right = f"{label} {words.number(frame.right)} ms"
    room = 1 + frame.columns - len(ends.plain) - len(right)
    if room > 0:
        ends.append(" " * room + right, "dim")
    ends.truncate(1 + frame.columns)
    return [Text(f"└{rule}", "dim"), ends]
