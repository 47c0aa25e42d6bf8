"""Tables of text without lines: to be read on a terminal and copied into documents."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table


def plain_table(*headers: str) -> Table:
    """A plain table; a header that begins with ``>`` is of a column of numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for header in headers:
        number = header.startswith(">")
        table.add_column(header.removeprefix(">"), justify="right" if number else "left", no_wrap=number)
    return table


def print_table(console: Console, table: Table) -> None:
    """Without the blanks that fill the last column: the text is to be copied into documents."""
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        console.out(line.rstrip(), highlight=False)
