"""Print Markdown on standard output and progress on standard error, as all benchmarks do."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from optimizer.machine import hardware


def print_progress(line: str) -> None:
    """Print progress with the time next to the table, which is on standard output."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def print_title(title: str, words: Sequence[str] | None = None) -> None:
    """Print the title of a page and the command that measures it."""
    print(f"# {title}\n\n{command(words)}\n")


def command(words: Sequence[str] | None = None) -> str:
    """Return this benchmark's command with ``words``, by default those of this process, as Markdown."""
    words = sys.argv[1:] if words is None else words
    return f"`{shlex.join(['python', f'benchmarks/{Path(sys.argv[0]).name}', *words])}`"


def row(*cells: str) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(cells)} |"


def head(*columns: str, text: int = 1) -> list[str]:
    """Return the first two lines of a table. The first ``text`` columns have text, the others numbers."""
    return [row(*columns), row(*[":--"] * text, *["--:"] * (len(columns) - text))]


def print_head(*columns: str, text: int = 1) -> None:
    """Print the first two lines of a table, as ``head`` returns them."""
    print(*head(*columns, text=text), sep="\n", flush=True)


def judged(is_met: bool) -> str:
    """Return whether a target is met as text."""
    return "met" if is_met else "**missed**"


def measured_on(*notes: str, machine: str = "") -> str:
    """Return the last line of a page: ``notes``, the machine (by default its hardware) and the date."""
    return "; ".join([*notes, machine or str(hardware.detect()), time.strftime("%Y-%m-%d")])
