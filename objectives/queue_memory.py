"""How alike the latencies of successive requests are at a request rate: the queue changes its length slowly.

Near the capacity of a server the length of the queue changes more slowly than a window takes. So the windows of a
fresh server are alike, their differences show only the fast part of the variance, and few servers see one of the rare
long queues. In heavy traffic any queue is a reflected Brownian motion (Kingman 1962, "On queues in heavy traffic"),
whose memory follows from its tail and the capacity that is left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from objectives.arrays import FloatArray

# Share of the capacity that is left at least, by the error of the measured capacity. A rate above all that were
# answered has no smaller share.
MIN_HEADROOM = 0.02
MIN_TAIL_LEVEL = 0.9  # lowest level of the quantile that shows the tail of the latencies


@dataclass(frozen=True, slots=True)
class QueuedLoad:
    """A request rate at one server and the highest one that it can answer, in requests per second."""

    request_rate: float
    capacity: float

    @property
    def headroom(self) -> float:
        """The share of the capacity that is left."""
        return float(headroom(self.request_rate, self.capacity)) if self.capacity else MIN_HEADROOM

    def part(self, share: float) -> QueuedLoad:
        """Return this share of the load with the same headroom: that of one of several servers or models."""
        return QueuedLoad(share * self.request_rate, share * self.capacity)

    def memory_seconds(self, tail_ms: float) -> float:
        """Return ``relaxation_seconds`` of the queue."""
        return float(relaxation_seconds(tail_ms, self.headroom))

    def overdispersion(self, allowed: float, tail_ms: float) -> float:
        """Return ``queue_overdispersion`` of this load. ``tail_ms`` is that of ``relaxation_seconds``."""
        return float(queue_overdispersion(allowed, self.request_rate, self.memory_seconds(tail_ms)))


def headroom(request_rate: FloatArray | float, capacity: FloatArray | float) -> FloatArray:
    """Return the share of ``capacity`` that is left, at least MIN_HEADROOM. Both are in requests per second."""
    return np.maximum(MIN_HEADROOM, 1 - np.asarray(request_rate) / capacity)


def relaxation_seconds(tail_ms: FloatArray | float, left: FloatArray | float) -> FloatArray:
    """Return the relaxation time of a queue: 4 * ``tail_ms`` / ``left``, in seconds.

    The workload is a reflected Brownian motion with drift -left and variance s per second. The mean of its
    exponential distribution is s / (2 left), and its relaxation time is 2 s / left**2. ``tail_ms`` is that mean, by
    the tail of the latencies. ``left`` is the share of the capacity that is left.
    """
    return 4 * np.asarray(tail_ms) / 1e3 / left


def queue_overdispersion(
    allowed: float, request_rate: FloatArray | float, memory_seconds: FloatArray | float
) -> FloatArray:
    """Return how much more the share over a quantile varies than that of independent requests would.

    An indicator of the tail of a reflected Brownian motion with the share p has a mean over a time T. Its variance is
    p (1 - p) - p**2 log(1 / p) times the relaxation time over T, by the Poisson equation (Asmussen and Glynn 2007,
    "Stochastic Simulation", section IV.6). The share of a short measurement varies less.

    Args:
        allowed: Share of the requests over the quantile.
        request_rate: Requests per second.
        memory_seconds: See ``relaxation_seconds``.
    """
    share = 1 - allowed * math.log(1 / allowed) / (1 - allowed)
    return np.maximum(1.0, np.asarray(request_rate) * share * memory_seconds)


def seen_share(window_seconds: float, memory_seconds: float) -> float:
    """Return the share of a slow variance that the differences of neighboring windows show, 0 to 1.

    It is half of the expected square of the difference of two window means, times the length of a window, over that
    of long windows: for a process whose autocorrelation falls exponentially with this memory.
    """
    if memory_seconds <= 0:
        return 1.0
    length = window_seconds / memory_seconds
    decayed = -math.expm1(-length) / length if length > 0 else 1.0
    return max(0.0, 1 - decayed - decayed**2 * length / 2)


def exponential_tail_ms(median_ms: float, quantile_ms: float, level: float) -> float:
    """Return the mean of the exponential distribution that the latencies above their median have.

    ``quantile_ms`` is their quantile at ``level``, which is above 0.5.
    """
    return max(0.0, quantile_ms - median_ms) / math.log(0.5 / (1 - level))
