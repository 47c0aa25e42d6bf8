"""Traces of requests: CSV files with the time of each request, and perhaps its samples and its priority.

    time_s,batch_size,priority
    0.000,1,2
    0.013,8,1

Times are seconds since any time, ascending. The columns ``batch_size`` (samples, 1 or more) and ``priority`` (0 for
the default level of the model) may be missing, and the columns may have any order.
"""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from objectives.arrays import FloatArray, IntArray
from optimizer.core.errors import BadInputError
from optimizer.core.request_sizes import MAX_CHOICES, MAX_SIZE, SizeDistribution
from optimizer.core.safe_text import one_line, read_bytes

TIME, SIZE, PRIORITY = COLUMNS = ("time_s", "batch_size", "priority")
MAX_BYTES, MAX_REQUESTS = 16 << 20, 200_000
MAX_KINDS = 128  # combinations of a size and a priority
MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True, eq=False)
class RecordedKinds:
    """The sizes and priorities of recorded requests.

    Attributes:
        kinds: Distinct (samples, priority); samples are 0 if the trace has no sizes.
        numbers: The number of the kind of each request.
        first_lines: The line of the first request of each kind.
    """

    kinds: tuple[tuple[int, int], ...]
    numbers: IntArray
    first_lines: tuple[int, ...]

    @property
    def counts(self) -> IntArray:
        """The number of requests of each kind."""
        return np.bincount(self.numbers, minlength=len(self.kinds))

    @property
    def sizes(self) -> SizeDistribution | None:
        """The distribution of the samples in a request; None if the trace has no sizes."""
        if not self.kinds[0][0]:
            return None
        requests: dict[int, float] = {}
        for (size, _), count in zip(self.kinds, self.counts.tolist(), strict=True):
            requests[size] = requests.get(size, 0.0) + count
        return SizeDistribution(tuple((size, size, requests[size]) for size in sorted(requests)))


@dataclass(frozen=True, eq=False)
class RequestTrace:
    """The times of recorded requests in seconds, and their sizes and priorities if the file has any."""

    seconds: FloatArray
    kinds: RecordedKinds | None


def read_trace(path: Path) -> RequestTrace:
    """Read a trace. Raises BadInputError with ``file:line: ...``."""
    name = one_line(str(path))
    data = read_bytes(path, MAX_BYTES, "give a shorter trace")
    try:
        reader = csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""))
        rows = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadInputError(f"{name}: not a CSV file ({one_line(str(error), 100)})") from None
    columns = [cell.strip().lower() for cell in rows[0][1]] if rows else []
    unknown = [column for column in columns if column not in COLUMNS]
    if TIME not in columns or unknown or len(set(columns)) < len(columns):
        shown = one_line(",".join(columns), 60)
        raise BadInputError(
            f"{name}:1: '{shown}' is not a header of the columns {', '.join(COLUMNS)}; {TIME} is needed"
        )
    if len(rows) - 1 > MAX_REQUESTS:
        raise BadInputError(f"{name}: has {len(rows) - 1:,} requests; give a part of at most {MAX_REQUESTS:,}")
    table = [_row(name, line, row, columns) for line, row in rows[1:]]
    seconds = np.array([values[TIME] for values in table], dtype=np.float64)
    if len(table) < 2 or seconds[0] == seconds[-1]:
        raise BadInputError(f"{name}: has no two requests at different times; record more of them")
    falls = np.flatnonzero(np.diff(seconds) < 0)
    if len(falls):
        line = rows[2 + int(falls[0])][0]
        raise BadInputError(f"{name}:{line}: {TIME} is before that of the request above; sort the rows by it")
    kinds = _kinds(name, table, [line for line, _ in rows[1:]]) if len(columns) > 1 else None
    return RequestTrace(seconds - seconds[0], kinds)


def _row(name: str, line: int, row: list[str], columns: list[str]) -> dict[str, float]:
    """Return the values of a row by column. Raises BadInputError."""
    if len(row) != len(columns):
        raise BadInputError(f"{name}:{line}: has {len(row)} cells; write one for each of {', '.join(columns)}")
    values: dict[str, float] = {}
    for column, cell in zip(columns, map(str.strip, row), strict=True):
        least, most = (1, MAX_SIZE) if column == SIZE else (0, MAX_PRIORITY)
        try:
            values[column] = float(cell) if column == TIME else int(cell)
        except ValueError:
            values[column] = math.nan
        is_valid = math.isfinite(values[column]) if column == TIME else least <= values[column] <= most
        if not is_valid:
            allowed = "a number of seconds" if column == TIME else f"a whole number from {least} to {most}"
            raise BadInputError(f"{name}:{line}: {column} '{one_line(cell, 40)}' is not {allowed}")
    return values


def _kinds(name: str, table: list[dict[str, float]], lines: list[int]) -> RecordedKinds:
    places: dict[tuple[int, int], int] = {}
    numbers, first_lines = np.empty(len(table), dtype=np.int64), list[int]()
    for i, values in enumerate(table):
        kind = int(values.get(SIZE, 0)), int(values.get(PRIORITY, 0))
        if kind not in places:
            places[kind] = len(places)
            first_lines.append(lines[i])
        numbers[i] = places[kind]
    sizes = {size for size, _ in places}
    if len(sizes) > MAX_CHOICES:
        raise BadInputError(f"{name}: has {len(sizes)} different sizes; round them to at most {MAX_CHOICES}")
    if len(places) > MAX_KINDS:
        raise BadInputError(
            f"{name}: has {len(places)} combinations of a size and a priority; round the sizes to have at most "
            f"{MAX_KINDS}"
        )
    return RecordedKinds(tuple(places), numbers, tuple(first_lines))
