"""Executions counted by batch size, as text: ``size:executions:compute_ns``, separated by spaces.

This is the form of ``Measurement.batch_stats`` and of the column ``batch_stats``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple


class BatchStatistic(NamedTuple):
    """The executions of one batch size (in samples) and their total compute time: input, inference and output."""

    batch_size: int
    executions: int
    compute_ns: int


# bounded digits: sums stay below 64 bits, and a longer compute time than 11 days is no measurement
_STATISTIC = re.compile("[1-9][0-9]{0,9}:[1-9][0-9]{0,8}:(0|[1-9][0-9]{0,14})", re.ASCII)


def to_text(statistics: Iterable[tuple[int, int, int]]) -> str:
    """Return the statistics as text that ``from_text`` reads."""
    return " ".join(f"{size}:{executions}:{compute_ns}" for size, executions, compute_ns in statistics)


def from_text(text: str) -> tuple[BatchStatistic, ...]:
    """Return the statistics in ``text``; an empty tuple for an empty text.

    Raises ValueError naming the expected form.
    """
    words = text.split()
    if not all(map(_STATISTIC.fullmatch, words)):
        raise ValueError("not a list of size:executions:compute_ns, such as 8:90:72000")
    return tuple(BatchStatistic(*map(int, word.split(":"))) for word in words)


def sum_by_size(measurements: Iterable[Iterable[tuple[int, int, int]]]) -> tuple[BatchStatistic, ...]:
    """Return the sums over several measurements, one statistic per batch size, in ascending order of size."""
    sums: dict[int, tuple[int, int]] = {}
    for size, executions, compute_ns in (statistic for statistics in measurements for statistic in statistics):
        before = sums.get(size, (0, 0))
        sums[size] = before[0] + executions, before[1] + compute_ns
    return tuple(BatchStatistic(size, *sums[size]) for size in sorted(sums))
