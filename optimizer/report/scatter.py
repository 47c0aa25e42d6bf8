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
LABEL = 8  # characters of a label on the left, and a blank
LEAST_WIDTH, LEAST_HEIGHT = 30, 4
MARGIN = 1.1  # of the bound: latencies beyond it and the measured ones are not drawn


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
    if not every or width < LEAST_WIDTH or height < LEAST_HEIGHT:
        return []
    right = MARGIN * max(x for x, _ in every)
    if bound is not None:
        right = max(min(right, 2 * bound), MARGIN * bound)
    seen = [y for x, y in every if x <= right] or [y for _, y in every]
    frame = Frame(right, 0.9 * min(seen), 1.02 * max(seen), width - LABEL - 1, height - 2)
    return [*_canvas(frame, points, front, bound), *_axis(frame, bound, label)]


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
        shown = words.number(frame.top) if row == 0 else ""
        line = Text(f"{shown:>{LABEL - 1}} ", "dim").append("│", "dim")
        for column in range(frame.columns):
            if (column, row) in discs:
                line.append(FRONT, "bold green")
            elif (column, row) in dots:
                line.append(chr(BLANK + dots[column, row]))
            else:
                line.append(BOUND if column == edge else " ", "yellow")
        lines.append(line)
    return lines


def _axis(frame: Frame, bound: float | None, label: str) -> list[Text]:
    edge = int(bound / frame.right * frame.columns) if bound is not None else -1
    rule = "".join("┴" if column == edge else "─" for column in range(frame.columns))
    ends = Text(f"{'infer/s':>{LABEL - 1}} ", "dim")
    ends.append(f"0{'':{max(0, edge - 1)}}", "dim")
    right = f"{label} {words.number(frame.right)} ms"
    if bound is not None:
        ends.append(f"{words.exact(bound)} ms", "yellow")
    room = LABEL + 1 + frame.columns - len(ends.plain) - len(right)
    if room > 0:
        ends.append(" " * room + right, "dim")
    return [Text(f"{words.number(frame.bottom):>{LABEL - 1}} └{rule}", "dim"), ends]
