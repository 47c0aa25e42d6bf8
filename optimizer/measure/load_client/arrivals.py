"""Arrival processes: the planned send times of an open loop, which may be those of recorded requests.

A trace is a CSV file with the time of each request, and perhaps its samples and its priority:

    time_s,batch_size,priority
    0.000,1,2
    0.013,8,1

Times are seconds since any time, ascending. The columns ``batch_size`` (samples, 1 or more) and ``priority`` (0 for
the default level of the model) may be missing, and the columns may have any order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from objectives.arrays import FloatArray, IntArray
from optimizer.core.errors import BadInputError
from optimizer.core.files import read_csv_rows
from optimizer.core.load_shapes import (
    STEPS,
    LoadShape,
    RequestTimes,
    complete_load_shape,
    is_load_shape,
    parse_load_shape,
)
from optimizer.core.request_sizes import MAX_CHOICES, MAX_SIZE, SizeDistribution
from optimizer.core.safe_text import named_file, one_line, read_bytes, show_path
from optimizer.options.run_options import is_distribution, is_trace

MAX_BYTES = 16 << 20
MAX_INTERVAL_US = 10**12  # longest interval between two requests: eleven days


class Arrivals(Protocol):
    """An arrival process."""

    @property
    def times(self) -> RequestTimes:
        """Return a description of the send times."""

    def plan(self, rate: float, seconds: float, seed: int) -> FloatArray:
        """Return ascending send times in [0, ``seconds``), ``rate`` of them a second on average.

        The period of a load shape ends at ``seconds``. A lead-in before whole periods is thus the end of a period.
        """


def option_arrivals(request_times: str) -> Arrivals:
    """Return the arrival process for ``RunOptions.request_times``, as ``parse_arrivals``.

    Raises BadInputError, which names the option if the file of a recording is missing.
    """
    if is_trace(request_times):
        named_file("--request-trace", request_times, f"a CSV file with a column {TIME}")
    elif not is_distribution(request_times):
        named_file("--request-intervals", request_times, "a file of intervals in microseconds")
    return parse_arrivals(request_times)


def parse_arrivals(text: str) -> Arrivals:
    """Return the arrival process for a distribution or the path of a recording. Raises BadInputError."""
    if text == "constant":
        return ConstantArrivals()
    if text == "poisson":
        return PoissonArrivals()
    if is_load_shape(text):
        return ShapedArrivals(complete_load_shape(text), parse_load_shape(text))
    return RecordedArrivals.read_trace(Path(text)) if is_trace(text) else RecordedArrivals.read(Path(text))


@dataclass(frozen=True, slots=True)
class ConstantArrivals:
    """A request every 1 / rate seconds."""

    times = RequestTimes("constant")

    def plan(self, rate: float, seconds: float, seed: int) -> FloatArray:
        return np.arange(_count(rate, seconds)) / rate


@dataclass(frozen=True, slots=True)
class PoissonArrivals:
    """Independent requests; the times depend on the seed.

    The number of requests is the expected one: given their number, the arrivals of a Poisson process are uniform.
    """

    times = RequestTimes("poisson")

    def plan(self, rate: float, seconds: float, seed: int) -> FloatArray:
        return np.sort(np.random.default_rng(seed).uniform(0, seconds, _count(rate, seconds)))


@dataclass(frozen=True, slots=True)
class ShapedArrivals:
    """Independent requests whose rate follows a load shape: a Poisson process that is not homogeneous.

    A uniform share of all requests is turned into a time by the inverse of the cumulative rate (inversion: Çinlar
    1975, "Introduction to Stochastic Processes", section 4.7). The number of requests is the expected one.
    """

    text: str
    shape: LoadShape

    @property
    def times(self) -> RequestTimes:
        return RequestTimes(self.text, self.shape.seconds)

    def plan(self, rate: float, seconds: float, seed: int) -> FloatArray:
        period_s = self.shape.seconds
        periods = math.ceil(seconds / period_s - 1e-6)
        skipped_s = max(0.0, periods * period_s - seconds)  # the begin of the first period is not planned
        first_share = periods and float(np.interp(skipped_s / period_s, self.shape.edges, self.shape.shares))
        count = max(1, round(rate * period_s * (periods - first_share)))
        shares = np.sort(np.random.default_rng(seed).uniform(first_share, periods, count))
        period_numbers = np.floor(shares)
        positions = np.interp(shares - period_numbers, self.shape.shares, self.shape.edges)  # 0 to 1 in the period
        return np.clip(period_s * (period_numbers + positions) - skipped_s, 0.0, np.nextafter(seconds, 0.0))


@dataclass(frozen=True, eq=False)
class RecordedArrivals:
    """Recorded intervals, scaled to the rate and repeated.

    ``start`` is the number of the interval to start with; None selects it by the seed.
    ``classes`` are the size and the priority of the request before each interval; None if all requests are alike.
    ``name`` is the file.
    """

    intervals: FloatArray
    classes: RecordedClasses | None = None
    name: str = "recorded"
    start: int | None = None

    @cached_property
    def times(self) -> RequestTimes:
        times = np.cumsum(self.intervals) - self.intervals
        counts, _ = np.histogram(times, STEPS, (0.0, float(self.intervals.sum())))
        shares = tuple((counts / len(times)).tolist())
        return RequestTimes(self.name, recorded_requests=len(times), recorded_shares=shares)

    @classmethod
    def read(cls, path: Path) -> RecordedArrivals:
        """Read a file as for perf_analyzer's ``--request-intervals``: microseconds between requests, one per line.

        Raises BadInputError with ``file:line: ...``.
        """
        name = show_path(path)
        lines = read_bytes(path, MAX_BYTES, "give fewer intervals").split(b"\n")
        if not lines[-1].strip():
            lines.pop()
        for number, line in enumerate(lines, start=1):
            text = line.strip()
            if not text.isdigit() or len(text) > len(str(MAX_INTERVAL_US)) or int(text) > MAX_INTERVAL_US:
                shown = one_line(text.decode(errors="replace"), 40)
                raise BadInputError(f"{name}:{number}: '{shown}' is not a whole number of microseconds")
        intervals = np.array(lines, dtype=np.float64)
        if not intervals.any():
            raise BadInputError(f"{name}: no interval is above 0; write the microseconds between requests")
        return cls(intervals, name=name)

    @classmethod
    def read_trace(cls, path: Path) -> RecordedArrivals:
        """Read a trace. Raises BadInputError with ``file:line: ...``."""
        seconds, classes = _read_trace(path)
        intervals = np.diff(seconds)
        # the last request is followed by the first one after the mean interval
        return cls(np.append(intervals, intervals.mean()), classes, show_path(path))

    def classes_of(self, count: int, seed: int) -> IntArray:
        """Return the number of the class of each of the ``count`` requests that ``plan`` returns for ``seed``.

        The result is empty if all requests are alike.
        """
        if self.classes is None:
            return np.empty(0, dtype=np.int64)
        return self.classes.numbers[(self._start(seed) + np.arange(count)) % len(self.intervals)]

    def _start(self, seed: int) -> int:
        """Return the index of the interval with which the plan for ``seed`` starts."""
        if self.start is not None:
            return self.start
        # without ``start``, measurements start at different intervals: together they cover the whole recording
        return int(np.random.default_rng(seed).integers(len(self.intervals)))

    def plan(self, rate: float, seconds: float, seed: int) -> FloatArray:
        intervals = np.roll(self.intervals, -self._start(seed)) / (self.intervals.mean() * rate)
        repeats = math.ceil(seconds / intervals.sum()) + 1
        times = np.concatenate(([0.0], np.cumsum(np.tile(intervals, repeats))))
        return times[: np.searchsorted(times, seconds)]


def _count(rate: float, seconds: float) -> int:
    """Return the expected number of requests, at least one."""
    return max(1, round(rate * seconds))


# -- traces -----------------------------------------------------------------------------------------------------

TIME, SIZE, PRIORITY = COLUMNS = ("time_s", "batch_size", "priority")
MAX_REQUESTS = 200_000
MAX_CLASSES = 128  # combinations of a size and a priority
MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True, eq=False)
class RecordedClasses:
    """The sizes and priorities of recorded requests.

    Attributes:
        classes: Distinct (samples, priority); samples are 0 if the trace has no sizes.
        numbers: The number of the class of each request.
        first_lines: The line of the first request of each class.
    """

    classes: tuple[tuple[int, int], ...]
    numbers: IntArray
    first_lines: tuple[int, ...]

    @property
    def counts(self) -> IntArray:
        """The number of requests of each class."""
        return np.bincount(self.numbers, minlength=len(self.classes))

    @property
    def sizes(self) -> SizeDistribution | None:
        """The distribution of the samples in a request; None if the trace has no sizes."""
        if not self.classes[0][0]:
            return None
        requests: dict[int, float] = {}
        for (size, _), count in zip(self.classes, self.counts.tolist(), strict=True):
            requests[size] = requests.get(size, 0.0) + count
        return SizeDistribution(tuple((size, size, requests[size]) for size in sorted(requests)))


def _read_trace(path: Path) -> tuple[FloatArray, RecordedClasses | None]:
    """Return the times of the requests in seconds, and their sizes and priorities if the file has any."""
    name = show_path(path)
    data = read_bytes(path, MAX_BYTES, "give a shorter trace")
    rows = [(line, row) for line, row in read_csv_rows(data, name, strict=False) if any(map(str.strip, row))]
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
    classes = _recorded_classes(name, table, [line for line, _ in rows[1:]]) if len(columns) > 1 else None
    return seconds, classes


def _row(name: str, line: int, row: list[str], columns: list[str]) -> dict[str, float]:
    """Return the values of a row by column. Raises BadInputError."""
    if len(row) != len(columns):
        raise BadInputError(f"{name}:{line}: has {len(row)} cells; write one for each of {', '.join(columns)}")
    values: dict[str, float] = {}
    for column, cell in zip(columns, map(str.strip, row), strict=True):
        try:
            values[column] = _parse_cell(column, cell)
        except ValueError as error:
            raise BadInputError(f"{name}:{line}: {column} '{one_line(cell, 40)}' is not {error}") from None
    return values


def _parse_cell(column: str, cell: str) -> float:
    """Return the value of ``cell``. Raises ValueError with the allowed values."""
    minimum, maximum = (1, MAX_SIZE) if column == SIZE else (0, MAX_PRIORITY)
    allowed = "a number of seconds" if column == TIME else f"a whole number from {minimum} to {maximum}"
    try:
        value = float(cell) if column == TIME else int(cell)
    except ValueError:
        raise ValueError(allowed) from None
    if not (math.isfinite(value) if column == TIME else minimum <= value <= maximum):
        raise ValueError(allowed)
    return value


def _recorded_classes(name: str, table: list[dict[str, float]], lines: list[int]) -> RecordedClasses:
    """Return the classes of the rows of ``table``, which are in these ``lines`` of the file.

    Raises BadInputError if there are too many sizes or classes.
    """
    class_numbers: dict[tuple[int, int], int] = {}
    numbers, first_lines = np.empty(len(table), dtype=np.int64), list[int]()
    for i, values in enumerate(table):
        request_class = int(values.get(SIZE, 0)), int(values.get(PRIORITY, 0))
        if request_class not in class_numbers:
            class_numbers[request_class] = len(class_numbers)
            first_lines.append(lines[i])
        numbers[i] = class_numbers[request_class]
    sizes = {size for size, _ in class_numbers}
    if len(sizes) > MAX_CHOICES:
        raise BadInputError(f"{name}: has {len(sizes)} different sizes; round them to at most {MAX_CHOICES}")
    if len(class_numbers) > MAX_CLASSES:
        raise BadInputError(
            f"{name}: has {len(class_numbers)} combinations of a size and a priority; round the sizes until at most "
            f"{MAX_CLASSES} remain"
        )
    return RecordedClasses(tuple(class_numbers), numbers, tuple(first_lines))
