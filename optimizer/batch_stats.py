"""The text of executions counted by batch size: ``size:executions:compute_ns``, separated by spaces.

So it stands in a measurement and in a table's column ``batch_stats``. Here alone it is written, read and held to
its form; plain tuples, since what only passes it on needs no more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeAlias

# batch size in samples, executions of it, and the time that they computed: input, inference and output
Entry: TypeAlias = tuple[int, int, int]

# more than a launch of days computes is no measurement, and sums of it would leave 64 bits
_ENTRY = re.compile("[1-9][0-9]{0,9}:[1-9][0-9]{0,8}:(0|[1-9][0-9]{0,14})", re.ASCII)


def to_text(entries: Iterable[Entry]) -> str:
    return " ".join(f"{size}:{executions}:{compute_ns}" for size, executions, compute_ns in entries)


def from_text(text: str) -> tuple[Entry, ...]:
    """None for an empty text. Raises ValueError, saying what would be right."""
    if not all(_ENTRY.fullmatch(entry) for entry in text.split()):
        raise ValueError("not a list of size:executions:compute_ns, such as 8:90:72000")
    parts = (map(int, entry.split(":")) for entry in text.split())
    return tuple((size, executions, compute_ns) for size, executions, compute_ns in parts)


def total(counted: Iterable[Iterable[Entry]]) -> tuple[Entry, ...]:
    """The sums of several, by size."""
    sums: dict[int, tuple[int, int]] = {}
    for size, executions, compute_ns in (entry for entries in counted for entry in entries):
        before = sums.get(size, (0, 0))
        sums[size] = before[0] + executions, before[1] + compute_ns
    return tuple((size, *sums[size]) for size in sorted(sums))
