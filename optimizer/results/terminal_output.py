"""Texts, tables and scatter plots on a terminal. Lines keep a number with its unit, and a setting in one piece."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from optimizer.core.safe_text import one_line
from optimizer.results import formatting

LABEL_WIDTH = 14
MAX_WORD_LENGTH = 16  # characters of a word, such as a path, that a column of a table keeps in one piece
_UNITS = "|".join(
    (
        *("ms", "µs", "s", "%", "MB", "GB", "MiB", "GiB", "infer/s", "req/s", "tokens/s"),
        *("instances?", "requests?", "samples?", "servers?", "measurements?", "trials?"),
    )
)
_LABELS = "|".join(("batch", "delay", "preferred", "concurrency", "trial", "p[0-9.]+", "CPUs"))
_PHRASES = "|".join(("in the search", "misses the bound", "no dynamic batching", "(?:TTFT|inter-token) p"))
_JOINED = re.compile(
    rf"\b(?:{_PHRASES})|(?<=[0-9]) (?=(?:{_UNITS})(?![\w/]))"  # a number and its unit
    rf"| (?=±)|(?<=±) | (?=[<>]=)|(?<=[<>]=) | (?=·)"
    rf"|\b(?:{_LABELS}) (?=[0-9])"
)
_UNBROKEN_BLANK = (
    "\ue000"  # stands for a blank at which no line ends; texts for a terminal have no private characters
)


def wrap(text: str, width: int, *, first_indent: str = "", indent: str = "") -> list[str]:
    """Return ``text`` as lines of at most ``width`` characters; a part that is longer is broken at any blank.

    A word that is longer than a line, such as a path, is kept whole.
    """
    joined = _JOINED.sub(lambda match: match[0].replace(" ", _UNBROKEN_BLANK), text)
    lines = [line.replace(_UNBROKEN_BLANK, " ") for line in _wrap_words(joined, width, first_indent, indent)]
    return [part for line in lines for part in _fitting(line, width, indent)]


def _fitting(line: str, width: int, indent: str) -> list[str]:
    if len(line) <= width:
        return [line]
    text = line.lstrip()
    return _wrap_words(text, width, line[: len(line) - len(text)], indent)


def _wrap_words(text: str, width: int, first_indent: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=first_indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def print_wrapped(console: Console, label: str, text: str) -> None:
    """Print ``text`` after ``label``, wrapped and indented."""
    room = max(LABEL_WIDTH, console.width - LABEL_WIDTH)
    for i, line in enumerate(wrap(one_line(" ".join(text.split())), room) or [""]):
        console.print(Text.assemble(((label if i == 0 else "").ljust(LABEL_WIDTH), "dim"), line))


def print_unwrapped(console: Console, label: str, text: str) -> None:
    """Print ``text`` after ``label`` without line breaks, so that a path or command can be copied."""
    console.print(Text.assemble((label.ljust(LABEL_WIDTH), "dim"), one_line(text)), soft_wrap=True)


def plain_table(*headers: str) -> Table:
    """Return a table without borders. Columns whose header begins with ``>`` hold numbers and are right-aligned."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for header in headers:
        number = header.startswith(">")
        table.add_column(header.removeprefix(">"), justify="right" if number else "left", no_wrap=number)
    return table


def print_line(console: Console, text: str = "", style: str = "") -> None:
    """Print ``text`` without interpreting rich markup, which names of models and files could contain.

    No line ends with the blank at which rich has broken it.
    """
    for line in Text(text, style).wrap(console, console.width):
        line.rstrip()
        console.print(line)


def print_unbroken(console: Console, text: str = "", style: str = "") -> None:
    """Print ``text`` as ``print_line``, but without line breaks, so that a path or command can be copied."""
    console.print(Text(text, style), soft_wrap=True)


def print_indented(console: Console, text: str, *, first_indent: str = "", indent: str = "  ") -> None:
    """Print ``text`` with line breaks between words; ``indent`` precedes all lines but the first."""
    for line in wrap(text, console.width, first_indent=first_indent, indent=indent):
        print_line(console, line)


def print_table(console: Console, table: Table) -> None:
    """Print ``table`` without trailing blanks, so that it can be copied into documents.

    On a terminal that is too narrow for the words of its columns, each cell has a line with the header of its column.
    """
    _, right, _, left = table.padding
    gaps = (left + right) * (len(table.columns) - 1)
    room = console.width - gaps
    if table.show_header and sum(map(_least_width, table.columns)) > room:
        table = _one_line_for_each_cell(table)
    elif table.show_header:
        _set_widths(table.columns, room)
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        console.out(line.rstrip(), highlight=False)


def _least_width(column: Column) -> int:
    """Return the width that ``column`` needs so that no word is broken, except for long ones in columns that wrap."""
    return (
        _widest_line(column) if column.no_wrap else max(min(width, MAX_WORD_LENGTH) for width in _word_widths(column))
    )


def _longest_word(column: Column) -> int:
    return _widest_line(column) if column.no_wrap else max(_word_widths(column))


def _word_widths(column: Column) -> list[int]:
    texts = (str(column.header), *map(str, column.cells))
    return [cell_len(word) for text in texts for word in text.split() or [""]]


def _widest_line(column: Column) -> int:
    texts = (str(column.header), *map(str, column.cells))
    return max(cell_len(line) for text in texts for line in text.split("\n"))


def _set_widths(columns: Sequence[Column], room: int) -> None:
    """Set the widths of ``columns`` if these need more than ``room``, because rich would break words.

    Each column gets its least width. The rest goes to long words, then to the columns that need the least more.
    """
    if sum(map(_widest_line, columns)) <= room:
        return
    widths = list(map(_least_width, columns))
    for targets in (list(map(_longest_word, columns)), list(map(_widest_line, columns))):
        missing = [target - width for target, width in zip(targets, widths, strict=True)]
        for index in sorted(range(len(columns)), key=lambda index: missing[index]):
            widths[index] += min(missing[index], room - sum(widths))
    for column, width in zip(columns, widths, strict=True):
        column.width = width


def _one_line_for_each_cell(table: Table) -> Table:
    """Return ``table`` with the rows below each other, divided by empty lines."""
    lines = plain_table("", "")
    lines.show_header = False
    lines.columns[0].no_wrap = True
    lines.columns[1].overflow = "fold"
    headers = [Text(" ".join(str(column.header).split()), "dim") for column in table.columns]
    for i, cells in enumerate(zip(*(column.cells for column in table.columns), strict=True)):
        if i:
            lines.add_row()
        for header, cell in zip(headers, cells, strict=True):
            lines.add_row(header, cell)
    return lines


XY = tuple[float, float]

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bits of a braille character, [row][column]
BLANK = 0x2800
FRONT, BOUND = "●", "┊"
MIN_COLUMNS, MIN_HEIGHT = 20, 4
MARGIN = 1.1  # ratio of the axis to the bound or the largest latency
FAR = 3.0  # a bound this many times beyond all points is not shown, because it would squeeze them


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
    right = MARGIN * max(x for x, _ in drawable)
    bound = None if bound is None or bound > FAR * right else bound
    if bound is not None:
        right = max(min(right, 2 * bound), MARGIN * bound)
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
            cells[edge] = BOUND
        front_columns = [x for x, y in discs if y == row]
        for x in front_columns:
            cells[x] = FRONT
        line = Text.assemble(("│", "dim"), "".join(cells))
        if edge >= 0 and cells[edge] == BOUND:
            line.stylize("yellow", edge + 1, edge + 2)
        for x in front_columns:
            line.stylize("bold green", x + 1, x + 2)
        lines.append(line)
    return lines


def _axis(frame: PlotFrame, bound: float | None, label: str) -> list[Text]:
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
