"""Arrival processes: the planned send times of an open loop."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from objectives.arrays import FloatArray, IntArray
from optimizer.core.errors import BadInputError
from optimizer.core.load_shapes import LoadShape, RequestTimes, complete_shape, is_shape, parse_shape
from optimizer.core.safe_text import one_line, read_bytes
from optimizer.measure.load_client.request_trace import RecordedKinds, read_trace
from optimizer.options.run_options import is_trace

MAX_BYTES = 16 << 20
LONGEST_US = 10**12  # longest interval between two requests: eleven days


class Arrivals(Protocol):
    """An arrival process."""

    @property
    def times(self) -> RequestTimes:
        """Return a description of the send times."""

    def plan(self, rate: float, seconds: float, seed: int) -> FloatArray:
        """Return ascending send times in [0, ``seconds``), ``rate`` of them a second on average.

        The period of a load shape ends at ``seconds``. So a lead-in before whole periods has the end of a period.
        """


def parse_arrivals(text: str) -> Arrivals:
    """Return the arrival process for a distribution or the path of a recording. Raises BadInputError."""
    if text == "constant":
        return ConstantArrivals()
    if text == "poisson":
        return PoissonArrivals()
    if is_shape(text):
        return ShapedArrivals(complete_shape(text), parse_shape(text))
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
        period = self.shape.seconds
        whole = math.ceil(seconds / period - 1e-6)
        cut = max(0.0, whole * period - seconds)  # of the first period, whose end alone is planned
        first = whole and float(np.interp(cut / period, self.shape.edges, self.shape.shares))
        count = max(1, round(rate * period * (whole - first)))
        shares = np.sort(np.random.default_rng(seed).uniform(first, whole, count))
        begun = np.floor(shares)
        within = np.interp(shares - begun, self.shape.shares, self.shape.edges)
        return np.clip(period * (begun + within) - cut, 0.0, np.nextafter(seconds, 0.0))


@dataclass(frozen=True, eq=False)
class RecordedArrivals:
    """Recorded intervals, scaled to the rate and repeated; the seed selects the interval to start with.

    ``kinds`` are the size and the priority of the request before each interval; None if all requests are alike.
    ``name`` is the file.
    """

    intervals: FloatArray
    kinds: RecordedKinds | None = None
    name: str = "recorded"

    @property
    def times(self) -> RequestTimes:
        return RequestTimes(self.name, recorded_requests=len(self.intervals))

    @classmethod
    def read(cls, path: Path) -> RecordedArrivals:
        """Read a file as for perf_analyzer's ``--request-intervals``: microseconds between requests, one per line.

        Raises BadInputError with ``file:line: ...``.
        """
        name = one_line(str(path))
        lines = read_bytes(path, MAX_BYTES, "give fewer intervals").split(b"\n")
        if not lines[-1].strip():
            lines.pop()
        for number, line in enumerate(lines, start=1):
            text = line.strip()
            if not text.isdigit() or len(text) > len(str(LONGEST_US)) or int(text) > LONGEST_US:
                shown = one_line(text.decode(errors="replace"), 40)
                raise BadInputError(f"{name}:{number}: '{shown}' is not a whole number of microseconds")
        intervals = np.array(lines, dtype=np.float64)
        if not intervals.any():
            raise BadInputError(f"{name}: no interval is above 0; write the microseconds between requests")
        return cls(intervals, name=name)

    @classmethod
    def read_trace(cls, path: Path) -> RecordedArrivals:
        """Read a file with the time of each request, see ``request_trace``. Raises BadInputError."""
        trace = read_trace(path)
        intervals = np.diff(trace.seconds)
        # the last request is followed by the first one after the mean interval
        return cls(np.append(intervals, intervals.mean()), trace.kinds, one_line(str(path)))

    def kinds_of(self, count: int, seed: int) -> IntArray:
        """Return the number of the kind of each of the ``count`` requests that ``plan`` returns for ``seed``."""
        assert self.kinds is not None
        return self.kinds.numbers[(self._start(seed) + np.arange(count)) % len(self.intervals)]

    def _start(self, seed: int) -> int:
        return int(np.random.default_rng(seed).integers(len(self.intervals)))

    def plan(self, rate: float, seconds: float, seed: int) -> FloatArray:
        # measurements start at different intervals, so that together they cover the whole recording
        intervals = np.roll(self.intervals, -self._start(seed)) / (self.intervals.mean() * rate)
        repeats = math.ceil(seconds / intervals.sum()) + 1
        times = np.concatenate(([0.0], np.cumsum(np.tile(intervals, repeats))))
        return times[: np.searchsorted(times, seconds)]


def _count(rate: float, seconds: float) -> int:
    return max(1, round(rate * seconds))
