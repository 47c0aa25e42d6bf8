"""The queue of a load that repeats: how its latencies rise with the mean rate, and how much its periods differ.

In heavy traffic the workload of any queue is a reflected Brownian motion (Kingman 1962). Here its drift follows the
rate within the period of a load shape or of a recording. It is simulated once for each shape, with the mean
latency of an idle server as the unit of time, so that one table describes all servers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from objectives.arrays import FloatArray

USES = np.linspace(0.02, 0.98, 25)  # mean rate over the capacity
LENGTHS = np.geomspace(3.0, 1e5, 10)  # length of the period over the mean latency of an idle server
SIMULATED_PERIODS, SKIPPED_PERIODS = 105, 5


@dataclass(frozen=True, slots=True)
class LoadPeriod:
    """A load that repeats.

    Attributes:
        shares: The share of the requests in each of equal parts of the period.
        seconds: The length of the period; 0 if it has a fixed number of requests instead.
        requests: The number of requests in a period; 0 if the period has a length in seconds.
    """

    shares: tuple[float, ...]
    seconds: float = 0.0
    requests: int = 0

    @property
    def peak(self) -> float:
        """The highest rate as a multiple of the mean."""
        return max(self.shares) * len(self.shares)

    def seconds_at(self, rates: FloatArray | float) -> FloatArray:
        """Return the length of the period in seconds at each of ``rates`` per second."""
        return np.full_like(rates, self.seconds) if self.seconds else self.requests / np.asarray(rates)


@dataclass(frozen=True, eq=False)
class PeriodicQueue:
    """The queue of one shape, for one quantile. ``table`` has both values at USES and LENGTHS [2, uses, lengths]."""

    table: FloatArray

    def log_growth(self, uses: FloatArray, lengths: FloatArray) -> FloatArray:
        """Return the log of the latency quantile over that of an idle server, at values as in USES and LENGTHS."""
        return _interpolate(self.table[0], uses, lengths)

    def variance(self, uses: FloatArray, lengths: FloatArray) -> FloatArray:
        """Return the variance of the share over the quantile between neighboring periods, over that of a request."""
        return _interpolate(self.table[1], uses, lengths)


@lru_cache(maxsize=8)
def periodic_queue(period: LoadPeriod, allowed: float) -> PeriodicQueue:
    """Return the queue of ``period``, for the latency quantile that the share ``allowed`` of the requests exceeds.

    Half of the variance is that of the service times, and half that of the arrivals, which a recording repeats.
    """
    shares, noise = period.shares, 1.0 if period.requests else 2.0
    random, parts = np.random.default_rng(0), len(shares)
    weights = np.tile(shares, SIMULATED_PERIODS)
    normal, uniform = random.standard_normal(len(weights)), 1 - random.random(len(weights))
    kept = np.tile(shares, SIMULATED_PERIODS - SKIPPED_PERIODS)
    table = np.empty((2, len(USES), len(LENGTHS)))
    for row, use in enumerate(USES):
        for column, length in enumerate(LENGTHS):
            step = length / parts
            change = (use * parts * weights - 1) * step + math.sqrt(noise * step) * normal
            # the minimum of a Brownian bridge within each step, so that long steps are exact too
            fall = (change - np.sqrt(change**2 - 2 * noise * step * np.log(uniform))) / 2
            path = np.cumsum(change)
            lowest = np.minimum.accumulate(np.minimum(path - change + fall, 0.0))
            workload = (path - lowest)[parts * SKIPPED_PERIODS :]
            order = np.argsort(workload)
            total = np.cumsum(kept[order])
            quantile = workload[order[np.searchsorted(total, (1 - allowed) * total[-1])]]
            over = ((workload > quantile) * kept).reshape(-1, parts).sum(axis=1)
            table[0, row, column] = math.log(quantile / math.log(1 / allowed))
            table[1, row, column] = np.square(np.diff(over)).mean() / 2 / (allowed * (1 - allowed))
    return PeriodicQueue(table)


def _interpolate(table: FloatArray, uses: FloatArray, lengths: FloatArray) -> FloatArray:
    """Return the values of ``table`` between its points, and at its edges beyond them."""
    from scipy import ndimage

    rows = (uses - USES[0]) / (USES[1] - USES[0])
    columns = np.log(lengths / LENGTHS[0]) / math.log(LENGTHS[1] / LENGTHS[0])
    return np.asarray(ndimage.map_coordinates(table, np.broadcast_arrays(rows, columns), order=1, mode="nearest"))
