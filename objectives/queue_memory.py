"""How alike the latencies of successive requests are at a request rate: the queue changes its length slowly.

Near the capacity of a server the length of the queue changes more slowly than a window takes. So the windows of a
fresh server are alike, their differences show only the fast part of the variance, and few servers see one of the rare
long queues. In heavy traffic any queue is a reflected Brownian motion (Kingman 1962, "On queues in heavy traffic"),
whose memory follows from its tail and the capacity that is left. If the rate changes within a period, the tail shows
the peaks as well. The memory from period to period is then that of the same queue at a constant rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from objectives.arrays import FloatArray
from objectives.periodic_queue import LoadPeriod, periodic_queue

# Share of the capacity that is left at least, by the error of the measured capacity. A rate above all that were
# answered has no smaller share.
MIN_HEADROOM = 0.02
MIN_TAIL_LEVEL = 0.9  # lowest level of the quantile that shows the tail of the latencies
MIN_MEMORY_SECONDS, MIN_LENGTH = 1e-9, 1e-6  # of a queue, and of a window over the memory: no division by 0
TAIL_STEPS = 30  # steps to the mean latency of an idle server from the tail of a load whose rate changes


@dataclass(frozen=True, slots=True)
class QueuedLoad:
    """A request rate at one server and the highest one that it can answer, in requests per second.

    ``period`` is the load if its rate changes, with a length of ``period_seconds``; None for a constant rate.
    """

    request_rate: float
    capacity: float
    period: LoadPeriod | None = None
    period_seconds: float = 0.0

    @property
    def headroom(self) -> float:
        """The share of the capacity that is left."""
        return float(headroom(self.request_rate, self.capacity)) if self.capacity else MIN_HEADROOM

    def part(self, share: float) -> QueuedLoad:
        """Return this share of the load with the same headroom: that of one of several servers or models."""
        return replace(self, request_rate=share * self.request_rate, capacity=share * self.capacity)

    def constant_tail_ms(self, tail_ms: float, level: float) -> float:
        """Return the tail of the same queue at a constant rate, from ``tail_ms``, that of the quantile at ``level``.

        Of several mean latencies of an idle server that explain this tail, as in an overload, the longest one counts.
        """
        if self.period is None or tail_ms <= 0:
            return tail_ms
        queue, idle_ms = periodic_queue(self.period, 1 - level), tail_ms
        for _ in range(TAIL_STEPS):
            length = np.array([1e3 * self.period_seconds / idle_ms])
            idle_ms = tail_ms / math.exp(queue.log_growth(np.array([1 - self.headroom]), length)[0])
        return idle_ms / self.headroom

    def memory_seconds(self, tail_ms: float) -> float:
        """Return ``relaxation_seconds`` of the queue."""
        return float(relaxation_seconds(tail_ms, self.headroom))

    def overdispersion(self, allowed: float, tail_ms: float) -> float:
        """Return ``queue_overdispersion`` of this load. ``tail_ms`` is that of ``relaxation_seconds``.

        If the rate changes, it is at least that of independent periods with such a queue. A few periods often show
        less, because most of the slow requests are in few of them.
        """
        by_memory = float(queue_overdispersion(allowed, self.request_rate, self.memory_seconds(tail_ms)))
        if self.period is None or tail_ms <= 0:
            return by_memory
        length = np.array([1e3 * self.period_seconds / (tail_ms * self.headroom)])
        variance = periodic_queue(self.period, allowed).variance(np.array([1 - self.headroom]), length)[0]
        return max(by_memory, 1 + self.request_rate * self.period_seconds * float(variance))


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


def mean_overdispersion(request_rate: FloatArray | float, memory_seconds: FloatArray | float) -> FloatArray:
    """Return how much more a mean latency varies than that of independent requests would.

    The variance of the mean of a reflected Brownian motion over a time T is its variance times the relaxation time
    over T (Whitt 1989, "Planning queueing simulations"). The arguments are those of ``queue_overdispersion``.
    """
    return np.maximum(1.0, np.asarray(request_rate) * memory_seconds)


def seen_share(window_seconds: FloatArray | float, memory_seconds: FloatArray | float) -> FloatArray:
    """Return the share of a slow variance that the differences of neighboring windows show, 0 to 1.

    It is half of the expected square of the difference of two window means, times the length of a window, over that
    of long windows: for a process whose autocorrelation falls exponentially with this memory.
    """
    length = np.maximum(np.asarray(window_seconds) / np.maximum(memory_seconds, MIN_MEMORY_SECONDS), MIN_LENGTH)
    decayed = -np.expm1(-length) / length
    return np.maximum(0.0, 1 - decayed - decayed**2 * length / 2)


def exponential_tail_ms(median_ms: float, quantile_ms: float, level: float) -> float:
    """Return the mean of the exponential distribution that the latencies above their median have.

    ``quantile_ms`` is their quantile at ``level``, which is above 0.5.
    """
    return max(0.0, quantile_ms - median_ms) / math.log(0.5 / (1 - level))
