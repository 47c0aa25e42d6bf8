"""Traffic of a fleet: arrival processes and recordings, their split by load balancers, and the course of a day.

``replica_arrivals_s`` of each kind of traffic returns the arrivals that a plan simulates at one replica.
``read_trace`` reads a recording.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from objectives.arrays import FloatArray
from optimizer.core.errors import BadInputError
from optimizer.core.files import read_csv_rows
from optimizer.core.safe_text import read_bytes, show_path
from optimizer.results import formatting

HOURS = 24


@dataclass(frozen=True, slots=True)
class Day:
    """The course of a day: at ``t`` hours the rate is ``1 + (peak_factor - 1) sin(2 pi t / 24)`` times the mean.

    ``peak_factor`` is from 1 (constant) to 2 (no traffic at the minimum).
    """

    peak_factor: float = 1.0

    def hourly_peak(self, hour: int) -> float:
        """Return the highest rate within hour ``hour``, counted from 0, as a multiple of the mean."""
        wave = max(math.sin(2 * math.pi * t / HOURS) for t in (hour, hour + 1))
        return 1 + (self.peak_factor - 1) * wave  # the peak is at 6:00, the end of an hour


CONSTANT_DAY = Day()


Balancer: TypeAlias = Literal["round-robin", "random", "least-outstanding"]
BALANCERS: tuple[Balancer, ...] = ("round-robin", "random", "least-outstanding")
BALANCER_SPLITS = {
    "round-robin": "each replica gets every n-th request, so arrivals are more even than at random",
    "random": "each request goes to a random replica",
    "least-outstanding": "each request goes to the least busy replica; planned as random, which is no better",
}


@dataclass(frozen=True, slots=True)
class PoissonTraffic:
    """Independent requests: a Poisson process.

    ``is_steady`` is true if the rate is constant, so that an overload shows as a queue that only grows.
    """

    name = "poisson"
    note = ""
    is_steady = True

    def replica_arrivals_s(
        self, rate: float, replicas: int, balancer: Balancer, requests: int, seed: int
    ) -> FloatArray:
        """Return the ascending times in seconds of about ``requests`` arrivals at one of ``replicas``.

        The whole fleet gets ``rate`` requests per second. Random assignment gives a Poisson process again. With
        round-robin a gap is the sum of n exponential gaps.
        """
        rng = np.random.default_rng(seed)
        if balancer == "round-robin":
            return np.cumsum(rng.gamma(replicas, 1 / rate, requests))
        return np.cumsum(rng.exponential(replicas / rate, requests))


@dataclass(frozen=True, slots=True)
class ConstantTraffic:
    """One request every 1 / rate seconds."""

    name = "constant"
    note = ""
    is_steady = True

    def replica_arrivals_s(
        self, rate: float, replicas: int, balancer: Balancer, requests: int, seed: int
    ) -> FloatArray:
        if balancer == "round-robin":
            return np.arange(1, requests + 1, dtype=np.float64) * (replicas / rate)
        gaps = np.random.default_rng(seed).geometric(1 / replicas, requests)
        return np.asarray(np.cumsum(gaps) / rate, np.float64)


@dataclass(frozen=True, eq=False)
class RecordedTraffic:
    """A recording, stretched in time to the planned rate. ``intervals_s`` are the gaps between its requests.

    ``note`` says which rows of the file were left out or changed; it is empty if none was.
    """

    intervals_s: FloatArray
    note: str = ""
    name = "recorded"
    is_steady = False

    @property
    def rate(self) -> float:
        """Return the recorded rate in requests per second."""
        return float(1 / self.intervals_s.mean())

    def replica_arrivals_s(
        self, rate: float, replicas: int, balancer: Balancer, requests: int, seed: int
    ) -> FloatArray:
        """Return the arrival times of several replicas in one sequence: replica after replica.

        It has as many replicas as have ``requests`` arrivals together, or all of them. Each replica's share has the
        length of the whole recording, so that all its peaks are included.
        """
        times = np.cumsum(self.intervals_s) * (self.rate / rate)
        length, count = float(times[-1]), len(times)
        rng = np.random.default_rng(seed)
        owner = np.arange(count) % replicas if balancer == "round-robin" else rng.integers(replicas, size=count)
        # shares are a recording's length apart, so that the queue of one does not delay the next
        shares = [times[owner == k] + 2 * k * length for k in range(self._replica_count(replicas, requests))]
        return np.concatenate(shares)

    def between_shares_s(self, rate: float, replicas: int, requests: int, last_s: float) -> float:
        """Return how many of the last ``last_s`` seconds of ``replica_arrivals_s`` lie between two replicas' shares.

        No request arrives in this time.
        """
        length = float(self.intervals_s.sum()) * self.rate / rate
        ends = 2 * length * np.arange(1, self._replica_count(replicas, requests))
        begin = ends[-1] + length - last_s if len(ends) else 0.0
        return float(np.clip(ends - begin, 0.0, length).sum())

    def _replica_count(self, replicas: int, requests: int) -> int:
        """Return the number of replicas that have ``requests`` arrivals together, at most ``replicas``."""
        return min(replicas, max(1, -(-requests * replicas // len(self.intervals_s))))


Traffic: TypeAlias = PoissonTraffic | ConstantTraffic | RecordedTraffic  # how requests arrive at a fleet

MAX_BYTES = 256 << 20
COLUMNS = ("timestamp", "time", "ts")  # names of the column; without them the first column is read
MIN_TIMESTAMPS = 100  # fewer do not determine the rate
MAX_GAPS = 10  # more long intervals are idle times of the traffic
GAP_FACTOR = 50.0  # a gap is this many times as long as the interval around a random instant of the other intervals
MIN_EQUAL_SHARE = 0.01  # share of the timestamps from which a note says that equal ones were spread
LARGEST_EPOCH_TIMES = (1e11, 1e14, 1e17)  # limits in s, ms and µs; larger numbers are in the next smaller unit


def read_trace(path: Path) -> RecordedTraffic:
    """Read the timestamps of a CSV file from a column named one of COLUMNS, or the first column.

    Timestamps are seconds, milliseconds, microseconds or nanoseconds since any time, or ISO 8601 dates. Raises
    BadInputError if fewer than MIN_TIMESTAMPS can be read.
    """
    name = show_path(path)
    cells, lines = _timestamp_cells(read_bytes(path, MAX_BYTES, "give a shorter recording"), name)
    seconds = _seconds(cells)
    unreadable_rows = np.flatnonzero(np.isnan(seconds))
    times = np.sort(seconds[~np.isnan(seconds)])
    _check_times(times, len(cells), name)
    left_out, notes = [], []
    if len(unreadable_rows):
        line = lines[unreadable_rows[0]]
        left_out.append(f"{len(unreadable_rows):,} rows without a timestamp, the first in line {line}")
    steps = np.diff(times)
    repeated_count, resolution_s = int((steps == 0).sum()), float(steps[steps > 0].min())
    if repeated_count:
        times = _spread_equal(times, resolution_s)
    intervals = np.diff(times)
    is_gap = _find_gaps(intervals)
    if is_gap.any():
        gaps = f"{int(is_gap.sum()):,} gaps of {intervals[is_gap].sum():,.4g} s in total"
        left_out.append(f"{gaps} in {times[-1] - times[0]:,.4g} s")
        intervals = intervals[~is_gap]
    if left_out:
        notes.append(f"{' and '.join(left_out)} left out")
    if repeated_count > MIN_EQUAL_SHARE * len(times):
        notes.append(
            f"{repeated_count:,} requests with the timestamp of another one were spread over {resolution_s:.3g} s"
        )
    return RecordedTraffic(intervals, f"{name}: {'; '.join(notes)}" if notes else "")


def _check_times(times: FloatArray, row_count: int, name: str) -> None:
    """Raise BadInputError if the ascending ``times``, read from ``row_count`` rows of a file, determine no rate."""
    if len(times) < MIN_TIMESTAMPS:
        raise BadInputError(
            f"{name}: has {formatting.count(len(times), 'readable timestamp')} in "
            f"{formatting.count(row_count, 'row')}; give at least {MIN_TIMESTAMPS}"
        )
    if times[0] == times[-1]:
        raise BadInputError(f"{name}: all timestamps are equal; give the time of each request in finer units")


def _spread_equal(times: FloatArray, resolution_s: float) -> FloatArray:
    """Return the ascending ``times``, from the first one on, with equal ones at random places within the resolution.

    The resolution is the shortest time between two different ones: a log with whole seconds has all requests of a
    second at its beginning.
    """
    is_repeated = np.diff(times) == 0
    is_equal = np.append(is_repeated, False) | np.append(False, is_repeated)
    offsets_s = np.random.default_rng(0).uniform(0.0, resolution_s, len(times))
    return np.sort(times - times[0] + np.where(is_equal, offsets_s, 0.0))


def _find_gaps(intervals: FloatArray) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which intervals are gaps in the recording, at most MAX_GAPS.

    The interval around a random instant is long in traffic that comes in bursts, so that its idle times are no gaps.
    In Poisson traffic it is twice the mean interval.
    """
    ascending = np.sort(intervals)
    for count in range(MAX_GAPS, 0, -1):
        shorter = ascending[:-count]
        if ascending[-count] * float(shorter.sum()) > GAP_FACTOR * float((shorter**2).sum()):
            return np.asarray(intervals >= ascending[-count])
    return np.zeros(len(intervals), dtype=np.bool_)


def _timestamp_cells(data: bytes, name: str) -> tuple[list[str], list[int]]:
    """Return the column of timestamps, and the line number of each of its rows. Raises BadInputError."""
    rows = list(read_csv_rows(data, name, strict=False))  # the other columns of a log may have misplaced quotes
    while rows and not any(rows[-1][1]):
        rows.pop()
    if not rows:
        raise BadInputError(f"{name}: empty; give a timestamp in each row")
    first_row = rows[0][1]
    header = [cell.strip().lower() for cell in first_row]
    named_column = next((header.index(column) for column in COLUMNS if column in header), None)
    has_header = named_column is not None or bool(np.isnan(_seconds(first_row[:1])).all())
    column = named_column or 0
    timed_rows = rows[1:] if has_header else rows
    cells = [row[column] if column < len(row) else "" for _, row in timed_rows]
    return cells, [line for line, _ in timed_rows]


def _seconds(cells: list[str]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the timestamps in seconds; NaN if a cell is not one."""
    import pandas as pd  # slow to import, and only recordings need it

    texts = pd.Series(cells, dtype=str).str.strip()
    numbers = pd.to_numeric(texts, errors="coerce").to_numpy(np.float64, copy=True)
    numbers[~np.isfinite(numbers)] = np.nan
    if 2 * np.isnan(numbers).sum() > len(numbers):  # dates
        dates = pd.to_datetime(texts, errors="coerce", format="ISO8601", utc=True)
        since = (dates - pd.Timestamp("2000-01-01", tz="UTC")) / pd.Timedelta(1, "s")
        return np.asarray(since.to_numpy(np.float64))
    size = float(np.nanmedian(np.abs(numbers))) if len(numbers) else 0.0
    units_per_second = 1.0
    for largest in LARGEST_EPOCH_TIMES:
        units_per_second *= 1e3 if size > largest else 1
    return numbers / units_per_second
