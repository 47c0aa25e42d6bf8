"""A recording of when requests came: a CSV with a time in each row, holes and all."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from optimizer.errors import BadInputError
from optimizer.planning.traffic import Recorded
from optimizer.untrusted import one_line, read_bytes

MAX_BYTES = 256 << 20
COLUMNS = ("timestamp", "time", "ts")  # what the column may be called; else it is the first one
FEWEST = 100  # times: fewer say nothing of a rate
HOLE, LONGEST = 100.0, 0.02  # so many times the mean interval, the longest of all apart: nobody recorded
EPOCH_UNITS = {"s": 1e11, "ms": 1e14, "us": 1e17}  # a number above it is in the next smaller unit


@dataclass(frozen=True, slots=True)
class Trace:
    """``note`` tells of what could not be used; empty where that is nothing."""

    traffic: Recorded
    note: str


def read_trace(path: Path) -> Trace:
    """Seconds, milliseconds, microseconds or nanoseconds since whenever, or dates as ISO 8601, in a column called one
    of COLUMNS or the first one. Raises BadInputError where fewer than FEWEST times can be read."""
    name = one_line(str(path))
    cells, first = _cells(read_bytes(path, MAX_BYTES, "give a shorter recording"), name)
    seconds = _seconds(cells)
    unreadable = np.flatnonzero(np.isnan(seconds))
    times = np.sort(seconds[~np.isnan(seconds)])
    if len(times) < FEWEST:
        raise BadInputError(f"{name}: {len(times)} times can be read in {len(cells)} rows; give {FEWEST} or more")
    intervals = np.diff(times)
    if not intervals.any():
        raise BadInputError(f"{name}: all times are the same; give the time of each request in finer units")
    told = []
    if len(unreadable):
        told.append(f"{len(unreadable):,} rows without a time, the first in line {first + int(unreadable[0])}")
    ascending = np.sort(intervals)  # the mean is taken without the longest: holes do not hide behind each other
    holes = intervals > HOLE * float(ascending[: int(len(ascending) * (1 - LONGEST))].mean())
    holes &= intervals > HOLE * float(np.median(intervals))
    if holes.any():
        told.append(f"{int(holes.sum()):,} holes of {intervals[holes].sum():,.4g} s together in {_span(times)}")
        intervals = intervals[~holes]
    note = f"{name}: {' and '.join(told)}: planned with the rest" if told else ""
    return Trace(Recorded(intervals), note)


def _cells(data: bytes, name: str) -> tuple[list[str], int]:
    """The column of times, and the line of its first row."""
    try:
        rows = list(csv.reader(io.StringIO(data.decode("utf-8-sig"), newline="")))
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadInputError(f"{name}: not a CSV file ({one_line(str(error), 100)})") from None
    while rows and not any(rows[-1]):
        rows.pop()
    if not rows:
        raise BadInputError(f"{name}: empty; give a time in each row")
    header = [cell.strip().lower() for cell in rows[0]]
    named = next((header.index(column) for column in COLUMNS if column in header), None)
    is_header = named is not None or bool(np.isnan(_seconds(rows[0][:1])).all())
    column = named or 0
    cells = [row[column] if column < len(row) else "" for row in rows[is_header:]]
    return cells, 1 + is_header


def _seconds(cells: list[str]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """NaN where a cell is no time."""
    texts = pd.Series(cells, dtype=str).str.strip()
    numbers = pd.to_numeric(texts, errors="coerce").to_numpy(np.float64, copy=True)
    numbers[~np.isfinite(numbers)] = np.nan
    if 2 * np.isnan(numbers).sum() > len(numbers):  # dates
        dates = pd.to_datetime(texts, errors="coerce", format="ISO8601", utc=True)
        since = (dates - pd.Timestamp("2000-01-01", tz="UTC")) / pd.Timedelta(1, "s")
        return np.asarray(since.to_numpy(np.float64))
    size = float(np.nanmedian(np.abs(numbers))) if len(numbers) else 0.0
    per_second = 1.0
    for most in EPOCH_UNITS.values():
        per_second *= 1e3 if size > most else 1
    return numbers / per_second


def _span(times: np.ndarray[tuple[int], np.dtype[np.float64]]) -> str:
    return f"{times[-1] - times[0]:,.4g} s"
