"""When requests are sent: planned times at a constant rate, as a Poisson process, or as they were once recorded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from optimizer.errors import BadInputError
from optimizer.untrusted import one_line, read_bytes

Floats: TypeAlias = npt.NDArray[np.float64]

MAX_BYTES = 16 << 20
LONGEST_US = 10**12  # eleven days between two requests: no load


class Arrivals(Protocol):
    def plan(self, rate: float, seconds: float, seed: int) -> Floats:
        """Ascending times in seconds, from 0 on and below ``seconds``, on average ``rate`` of them a second."""
        ...


def arrivals(text: str) -> Arrivals:
    """``constant``, ``poisson``, or the file of a recording. Raises BadInputError."""
    if text == "constant":
        return Constant()
    return Poisson() if text == "poisson" else Recorded.read(Path(text))


@dataclass(frozen=True, slots=True)
class Constant:
    """A request every 1 / rate seconds."""

    def plan(self, rate: float, seconds: float, seed: int) -> Floats:
        return np.arange(_count(rate, seconds)) / rate


@dataclass(frozen=True, slots=True)
class Poisson:
    """Requests that know nothing of each other, so that they come in bunches; each seed has its own.

    Exactly as many as are expected: a Poisson process of which the number is known has uniform times.
    """

    def plan(self, rate: float, seconds: float, seed: int) -> Floats:
        return np.sort(np.random.default_rng(seed).uniform(0, seconds, _count(rate, seconds)))


@dataclass(frozen=True, eq=False)
class Recorded:
    """Recorded intervals, stretched in time to the wanted rate and repeated; each seed has its own beginning."""

    intervals: Floats

    @classmethod
    def read(cls, path: Path) -> Recorded:
        """perf_analyzer's ``--request-intervals``: the microseconds from one request to the next, a number a line.

        Raises BadInputError: ``file:line: …``.
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
        # each measurement begins somewhere else: together they see all of the recording
        begin = np.random.default_rng(seed).integers(len(self.intervals))
        intervals = np.roll(self.intervals, -begin) / (self.intervals.mean() * rate)
        repeats = math.ceil(seconds / intervals.sum()) + 1
        times = np.concatenate(([0.0], np.cumsum(np.tile(intervals, repeats))))
        return times[: np.searchsorted(times, seconds)]


def _count(rate: float, seconds: float) -> int:
    return max(1, round(rate * seconds))
