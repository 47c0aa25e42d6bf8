"""Texts and tables on a terminal. Lines keep a number with its unit, and a setting in one piece."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from optimizer.core.safe_text import one_line

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
# stands for a blank at which no line ends; texts for a terminal have no private characters
_UNBROKEN_BLANK = "\ue000"


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


def print_indented(
    console: Console, text: str, *, first_indent: str = "", indent: str = "  ", style: str = ""
) -> None:
    """Print ``text`` with line breaks between words; ``indent`` precedes all lines but the first."""
    for line in wrap(text, console.width, first_indent=first_indent, indent=indent):
        print_line(console, line, style)


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
