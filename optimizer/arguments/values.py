"""Values of flags, and the parser that all commands share."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from typing import Any, NoReturn

from objectives.sla import parse_duration_ms
from optimizer.errors import BadInputError
from optimizer.load.windows import LONGEST_WINDOW_MS, SHORTEST_WINDOW_MS
from optimizer.options import SLA_METRICS
from optimizer.untrusted import one_line

LONGEST_QUOTE = 300  # characters of what was given
LARGEST_SEED = 2**32 - 1  # numpy's
LARGEST_INT32 = 2**31 - 1  # Triton's sizes


class _NoColor(argparse.Action):
    """As the variable that rich and others obey (no-color.org); also for what is started from here."""

    def __call__(self, *_: object) -> None:
        os.environ["NO_COLOR"] = "1"


class Parser(argparse.ArgumentParser):
    """argparse, with errors in one line. Every command takes ``--no-color``."""

    page = "tune --help"

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.add_argument(
            "--no-color",
            action=_NoColor,
            nargs=0,
            dest=argparse.SUPPRESS,
            default=argparse.SUPPRESS,
            help="as the variable NO_COLOR",
        )

    def error(self, message: str) -> NoReturn:
        raise BadInputError(f"{one_line(message, LONGEST_QUOTE)}; `{self.page}` shows the options")


def with_negative_values(arguments: list[str]) -> list[str]:
    """``--budget -5m`` as ``--budget=-5m``: argparse takes -5m for a flag, and the value would go unnamed."""
    joined: list[str] = []
    for word in arguments:
        if joined and re.match(r"-\.?[0-9]", word) and re.fullmatch("--[a-z][a-z0-9-]*", joined[-1]):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def add_slas(parser: argparse._ActionsContainer) -> None:
    for name in SLA_METRICS:
        what = "average latency" if name == "avg" else f"{name} latency"
        parser.add_argument(f"--sla-{name}", metavar="TIME", help=f"upper bound on the {what}: 20ms, 0.02s, 500us")


def slas(given: argparse.Namespace) -> dict[str, float]:
    """The bounds in ms by ``p95`` and the like."""
    return {
        name: parsed(f"--sla-{name}", text, parse_duration_ms)
        for name in SLA_METRICS
        if (text := getattr(given, f"sla_{name}")) is not None
    }


def interval_ms(text: str) -> float:
    milliseconds = parse_duration_ms(text, example="300ms")
    if not SHORTEST_WINDOW_MS <= milliseconds <= LONGEST_WINDOW_MS:
        raise ValueError(f"write a time from {SHORTEST_WINDOW_MS}ms to {LONGEST_WINDOW_MS / 1000:g}s")
    return milliseconds


def budget_ms(text: str) -> float:
    return parse_duration_ms(text, example="5m")


def parsed(flag: str, text: str, parse: Callable[[str], float]) -> float:
    try:
        return parse(text)
    except ValueError as error:
        raise BadInputError(f"{flag} {shown(text)}: {error}") from None


def whole(flag: str, text: str, least: int, most: int | None = None) -> int:
    try:
        if len(text) > 20:
            raise ValueError
        number = int(text)
        if number < least or (most is not None and number > most):
            raise ValueError
        return number
    except ValueError:
        bounds = f"of {least} or more" if most is None else f"from {least} to {most}"
        raise BadInputError(f"{flag} {shown(text)}: write a whole number {bounds}") from None


def shown(text: str) -> str:
    """A value on one line, also an empty one."""
    return one_line(text, LONGEST_QUOTE) if text.strip() else ascii(text[:LONGEST_QUOTE])
