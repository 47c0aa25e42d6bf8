"""Service times of the batch sizes that no measurement formed: the expected, the shortest and the longest plausible.

A closed loop near its knee forms few batch sizes, and no small ones. Traffic from many users forms them all. A curve
through the measured sizes can bend or step between them, so a plan has to know how far.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from objectives.arrays import FloatArray
from optimizer.simulator.calibration import Observation
from optimizer.simulator.fitted_parameters import ENOUGH_EXECUTIONS
from optimizer.simulator.scenario import ServiceTimes

FIXED_SHARE = 0.3  # expected share of the smallest measured batch's time that a single request takes too


@dataclass(frozen=True, eq=False)
class PlausibleTimes:
    """Service times in seconds [batch sizes, busy instances], for sizes of ``step`` samples, 2 ``step``, ..."""

    shortest: FloatArray
    expected: FloatArray
    longest: FloatArray
    step: int

    def at(self, position: float) -> ServiceTimes:
        """Return the shortest times for -1, the expected ones for 0, the longest for 1, and times in between."""
        bound = self.longest if position > 0 else self.shortest
        return ServiceTimes(self.expected + abs(position) * (bound - self.expected), self.step)


def plausible_times(fitted: ServiceTimes, observed: Sequence[Observation]) -> PlausibleTimes:
    """Return the plausible times around the ``fitted`` ones.

    Larger batches take no less time. So the time of a size between two measured ones is between theirs. A smaller
    batch than all measured ones takes at least its share of the smallest one's time. A larger one than all measured
    ones takes at most as long per sample as the largest one.
    """
    times, step = fitted.seconds, fitted.step
    executions = Counter[int]()
    for seen in observed:
        executions.update({batch.batch_size: batch.executions for batch in seen.batches})
    most = max(executions.values())
    enough = [size for size, count in executions.items() if count >= min(ENOUGH_EXECUTIONS, most)]
    rows = np.arange(len(times))
    measured = np.unique(np.clip(np.rint(np.array(enough) / step).astype(int) - 1, 0, len(times) - 1))
    first, last = measured[0], measured[-1]
    share = ((rows[:first] + 1) / (first + 1))[:, np.newaxis]
    shortest = times[measured[np.maximum(np.searchsorted(measured, rows, "right") - 1, 0)]]
    longest = times[measured[np.minimum(np.searchsorted(measured, rows), len(measured) - 1)]]
    expected = times.copy()
    expected[:first] = np.maximum(times[:first], times[first] * (FIXED_SHARE + (1 - FIXED_SHARE) * share))
    shortest[:first] = times[first] * share
    longest[last + 1 :] = times[last] * ((rows[last + 1 :] + 1) / (last + 1))[:, np.newaxis]
    return PlausibleTimes(np.minimum(shortest, expected), expected, np.maximum(longest, expected), step)
