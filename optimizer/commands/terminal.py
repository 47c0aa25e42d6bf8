"""What is told on the terminal while something slow goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from optimizer.untrusted import one_line

if TYPE_CHECKING:
    from rich.console import Console

    from optimizer.stack import WatcherMaker

INTERRUPTED = 130


def fail(message: str, code: int) -> int:
    """Tell it on standard error; gives ``code``."""
    print(f"tune: {one_line(message)}", file=sys.stderr)
    return code


def terminal() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def shown_on(on: Console, log: str | None = None) -> tuple[Callable[[str], None], WatcherMaker]:
    """What is told while something slow goes on: a line for each preparation, then what ``log`` asks for."""
    from optimizer.report.console import watcher

    def say(line: str) -> None:
        if log == "plain" or (on.is_terminal and log != "none"):
            on.print(one_line(line), highlight=False, markup=False)

    return say, lambda problem, budget, hardware: watcher(log, on, problem, budget, str(hardware))
