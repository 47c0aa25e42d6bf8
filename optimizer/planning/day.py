"""A day of traffic: a sine of 24 hours around its mean, the same every day."""

from __future__ import annotations

import math
from dataclasses import dataclass

HOURS = 24


@dataclass(frozen=True, slots=True)
class Day:
    """At ``t`` hours the rate is ``1 + (peak_factor - 1) sin(2 pi t / 24)`` times the day's mean.

    ``peak_factor`` is from 1 (no peak) to 2 (nothing at all comes at the lowest).
    """

    peak_factor: float = 1.0

    def busiest(self, hour: int) -> float:
        """The highest rate within the ``hour``-th hour, from 0, as a multiple of the mean."""
        wave = max(math.sin(2 * math.pi * t / HOURS) for t in (hour, hour + 1))
        return 1 + (self.peak_factor - 1) * wave  # the peak itself is at 6 o'clock sharp


STEADY = Day()
