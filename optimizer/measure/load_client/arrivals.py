"""Arrival processes: the planned send times of an open loop."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import one_line, read_bytes

Floats: TypeAlias = npt.NDArray[np.float64]

MAX_BYTES = 16 << 20
LONGEST_US = 10**12  # longest interval between two requests: eleven days


class Arrivals(Protocol):
    """An arrival process."""

    def plan(self, rate: float, seconds: float, seed: int) -> Floats:
        """Return ascending send times in [0, ``seconds``), ``rate`` of them a second on average."""


def parse_arrivals(text: str) -> Arrivals:
    """Return the arrival process for ``constant``, ``poisson`` or the path of a recording. Raises BadInputError."""
    if text == "constant":
        return ConstantArrivals()
    return PoissonArrivals() if text == "poisson" else RecordedArrivals.read(Path(text))


@dataclass(frozen=True, slots=True)
class ConstantArrivals:
    """A request every 1 / rate seconds."""

    def plan(self, rate: float, seconds: float, seed: int) -> Floats:
        return np.arange(_count(rate, seconds)) / rate


@dataclass(frozen=True, slots=True)
class PoissonArrivals:
    """Independent requests; the times depend on the seed.

    The number of requests is the expected one: given their number, the arrivals of a Poisson process are uniform.
    """

    def plan(self, rate: float, seconds: float, seed: int) -> Floats:
        return np.sort(np.random.default_rng(seed).uniform(0, seconds, _count(rate, seconds)))


@dataclass(frozen=True, eq=False)
class RecordedArrivals:
    """Recorded intervals, scaled to the rate and repeated; the seed selects the interval to start with."""

    intervals: Floats

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
        return cls(intervals)

    def plan(self, rate: float, seconds: float, seed: int) -> Floats:
        # measurements start at different intervals, so that together they cover the whole recording
        start = np.random.default_rng(seed).integers(len(self.intervals))
        intervals = np.roll(self.intervals, -start) / (self.intervals.mean() * rate)
        repeats = math.ceil(seconds / intervals.sum()) + 1
        times = np.concatenate(([0.0], np.cumsum(np.tile(intervals, repeats))))
        return times[: np.searchsorted(times, seconds)]


def _count(rate: float, seconds: float) -> int:
    return max(1, round(rate * seconds))
