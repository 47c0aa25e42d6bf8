"""The probability that a test at a request rate passes, from all measurements of one configuration at request rates.

A latency quantile is taken as a * (1 - f + f / h). Here h is the share of the capacity that is left at the rate. f is
the part of the latency of an idle server that grows with the queue. For a load whose rate changes, ``PeriodicQueue``
has the growth instead of 1 / h. A short measurement near the capacity says little about either, and is often too
good. So the capacity and f have a posterior distribution on a grid, and log(a) is normal for each of them. The chance
of a test is the mean over this distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from objectives.arrays import FloatArray
from objectives.confidence import PRIOR_SHARE_STD, SEEN_MARGIN, UNSEEN_GAP_ERROR, probit_density
from objectives.periodic_queue import LoadPeriod, periodic_queue
from objectives.queue_memory import headroom, queue_overdispersion, relaxation_seconds, seen_share
from objectives.sequential import look_error
from objectives.server_spread import ServerSpread
from objectives.verdict import SLOPE_LEVELS

# The grid, of shape [capacities, waits, 1]: the capacity over the highest rate that was answered, and f.
LOWEST_CAPACITY, HIGHEST_CAPACITY, CAPACITIES = 0.93, 2.5, 45
WAITS = np.array([0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.55, 0.7, 0.85, 1.0])[None, :, None]
CAPACITY_STD = 0.07  # standard deviation of the log of the rate that an overloaded server answers
SPEED_STD = 0.03  # standard deviation of the log of the speed of servers
TAIL_SHARES = 0.05, 0.34  # range of ``RateMeasurement.tail_share``; that of an exponential p95 is 0.33
MAX_PEAK = 4.0  # over the mean rate: the capacity is at most this multiple above HIGHEST_CAPACITY
RATE_CHANGE = 1.01  # factor on the rate, for the slope of the growth
MIN_SEEN = 1e-9  # of the memory of the queue that neighboring periods show: no division by 0
FIT_STEPS = 3  # the variance of a measurement depends on the latency that is fitted


@dataclass(frozen=True, slots=True)
class RateMeasurement:
    """The measurement of a configuration at one request rate.

    Attributes:
        request_rate: Requests per second.
        answered_rate: Requests per second that were answered.
        requests: Number of requests that were answered.
        latency_ms: The latency quantile; None if the server was overloaded.
        tail_share: The mean of the exponential tail of the latencies over the quantile.
    """

    request_rate: float
    answered_rate: float
    requests: int
    latency_ms: float | None = None
    tail_share: float = 0.0


@dataclass(frozen=True, slots=True)
class PlannedTest:
    """A test at any rate.

    Attributes:
        servers: The number of fresh servers at its look, one of LOOKS.
        server_seconds: The duration of the windows on each of them.
        error: Error probability of the test.
    """

    servers: int
    server_seconds: float
    error: float


class QueueForecast:
    """The posterior distribution of a configuration's latency quantile at request rates.

    Args:
        measured: The measurements; at least one of them has a latency.
        allowed: The share of requests over the quantile.
        queues: The number of equal queues that share the requests: one for each server process.
        period: The load if its rate changes; None if it is constant.
    """

    def __init__(
        self, measured: Sequence[RateMeasurement], allowed: float, queues: int = 1, period: LoadPeriod | None = None
    ) -> None:
        self._allowed, self._queues, self._period = allowed, queues, period
        self._queue = periodic_queue(period, allowed) if period else None
        self._answered = max(min(one.request_rate, one.answered_rate) for one in measured)
        highest = HIGHEST_CAPACITY * (min(period.peak, MAX_PEAK) if period else 1.0)
        self._capacities = self._answered * np.geomspace(LOWEST_CAPACITY, highest, CAPACITIES)[:, None, None]
        served = [one for one in measured if one.latency_ms]
        self._tail_share = float(np.clip(np.median([one.tail_share for one in served]), *TAIL_SHARES))
        log_density = np.zeros((CAPACITIES, WAITS.shape[1]))
        for one in measured:
            if not one.latency_ms:
                variance = CAPACITY_STD**2 + 1 / max(one.requests, 1)
                log_density -= np.square(np.log(one.answered_rate / self._capacities[..., 0])) / (2 * variance)
        rates = np.array([one.request_rate for one in served])
        requests = np.array([float(one.requests) for one in served])
        log_latencies = np.log([one.latency_ms or math.nan for one in served])
        self._level = np.full((1, 1, 1), log_latencies.min())  # log(a), which scales the period in ``_log_shape``
        self._level = (log_latencies - self._log_shape(rates)).mean(axis=2, keepdims=True)
        for _ in range(FIT_STEPS):
            levels = log_latencies - self._log_shape(rates)
            weights = 1 / self._measurement_variance(rates, requests)
            self._level_variance = 1 / weights.sum(axis=2, keepdims=True)
            self._level = (weights * levels).sum(axis=2, keepdims=True) * self._level_variance
        log_density += 0.5 * np.log(self._level_variance[..., 0])
        log_density -= 0.5 * (weights * (levels - self._level) ** 2 - np.log(weights)).sum(axis=2)
        density = np.exp(log_density - log_density.max())
        self._density = density / density.sum()

    def log_latency_ms(self, rates: FloatArray) -> FloatArray:
        """Return the expected log of the latency quantile in ms at each of ``rates``."""
        return self._mean(self._level + self._log_shape(rates))

    def chances(self, rates: FloatArray, bound_ms: float, test: PlannedTest, spread: ServerSpread) -> FloatArray:
        """Return the probability that ``test`` passes at each of ``rates``. ``spread`` is that of log latency.

        It passes if the latencies are far enough inside the bound and if enough requests are independent, see
        ``judge_share``. The memory of the queue is that which the verdict counts: by the highest answered rate.
        """
        from scipy import special

        log_latency_ms = self._level + self._log_shape(rates)
        overdispersion = self._overdispersion(rates, self._answered, log_latency_ms)
        requests = np.maximum(1.0, rates * test.server_seconds) / overdispersion
        degrees_of_freedom = spread.degrees_of_freedom + test.servers - 1
        density, binomial = probit_density(self._allowed), self._allowed * (1 - self._allowed)

        variance = (binomial / requests / density**2 + self._slope**2 * spread.variance) / test.servers
        level = look_error(test.error, test.servers)
        inside = self._slope * (math.log(bound_ms) - log_latency_ms)
        missing = -float(special.stdtrit(degrees_of_freedom, level)) * np.sqrt(variance) - inside
        unknown = self._level_variance + self._speed_variance(rates) / test.servers
        is_inside = special.ndtr(-missing / np.sqrt(variance + self._slope**2 * unknown))

        by_count = test.servers * binomial / (binomial / requests + (PRIOR_SHARE_STD * self._allowed) ** 2)
        hits = by_count * np.minimum(0.5, special.ndtr(special.ndtri(self._allowed) - inside))
        gap_error = float(special.ndtr(special.stdtrit(degrees_of_freedom, UNSEEN_GAP_ERROR)))
        is_counted = special.betainc(hits + 1, by_count - hits, self._allowed) >= 1 - gap_error
        return self._mean(is_inside * is_counted)

    @property
    def _slope(self) -> float:
        """The rise of the normal quantile of the share over a bound with the log of latency, as in verdicts."""
        from scipy import special

        step = self._tail_share * math.log(SLOPE_LEVELS)  # of the exponential tail, over the quantile
        levels = special.ndtri([self._allowed * SLOPE_LEVELS, self._allowed / SLOPE_LEVELS])
        return float(levels[0] - levels[1]) / math.log((1 + step) / (1 - step))

    def _mean(self, values: FloatArray) -> FloatArray:
        """Return the mean of ``values`` [capacities, waits, rates] over the posterior distribution."""
        mean: FloatArray = np.tensordot(self._density, values, 2)
        return mean

    def _wait(self, rates: FloatArray) -> FloatArray:
        """Return the part of the latency over a that is due to the queue."""
        if self._queue is None:
            return WAITS / headroom(rates, self._capacities)
        wait: FloatArray = WAITS * np.exp(self._queue.log_growth(*self._scaled(rates)))
        return wait

    def _wait_slope(self, rates: FloatArray) -> FloatArray:
        """Return by how much the log of the wait rises with the log of the rate."""
        if self._queue is None:
            return 1 / headroom(rates, self._capacities) - 1
        return np.log(self._wait(RATE_CHANGE * rates) / self._wait(rates)) / math.log(RATE_CHANGE)

    def _scaled(self, rates: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return ``rates`` over the capacity, and the length of the period as in LENGTHS."""
        assert self._period is not None
        idle_seconds = WAITS * np.exp(self._level) / 1e3 / math.log(1 / self._allowed)
        return rates / self._capacities, self._period.seconds_at(rates) / idle_seconds

    def _log_shape(self, rates: FloatArray) -> FloatArray:
        """Return the log of the latency over a."""
        return np.log(1 - WAITS + self._wait(rates))

    def _overdispersion(
        self, rates: FloatArray, capacities: FloatArray | float, log_latency_ms: FloatArray
    ) -> FloatArray:
        """Return how much more the share over the quantile varies than that of independent requests would.

        That of a constant rate is the one of the memory of the queue. That of another one is the one of the
        differences of neighboring periods, or that of the memory as far as these may hide it, as in verdicts.
        """
        left, per_queue = headroom(rates, capacities), rates / self._queues
        if self._queue is None or self._period is None:
            memory_seconds = relaxation_seconds(self._tail_share * np.exp(log_latency_ms), left)
            return queue_overdispersion(self._allowed, per_queue, memory_seconds)
        uses, lengths = self._scaled(rates)
        period_seconds = self._period.seconds_at(rates)
        neighbors = 1 + period_seconds * per_queue * self._queue.variance(uses, lengths)
        memory_seconds = relaxation_seconds(1e3 * period_seconds / lengths / left, left)
        hidden = SEEN_MARGIN * neighbors / np.maximum(seen_share(period_seconds, memory_seconds), MIN_SEEN)
        by_memory = queue_overdispersion(self._allowed, per_queue, memory_seconds)
        return np.maximum(neighbors, np.minimum(by_memory, hidden))

    def _measurement_variance(self, rates: FloatArray, requests: FloatArray) -> FloatArray:
        """Return the variance of the log of a measured quantile."""
        overdispersion = self._overdispersion(rates, self._capacities, self._level + self._log_shape(rates))
        share_variance = self._allowed * (1 - self._allowed) * np.minimum(1.0, overdispersion / requests)
        return share_variance / (probit_density(self._allowed) * self._slope) ** 2 + self._speed_variance(rates)

    def _speed_variance(self, rates: FloatArray) -> FloatArray:
        """Return the variance of log latency by the speed of a server, which changes its capacity as well."""
        wait = self._wait(rates)
        in_queue = wait / (1 - WAITS + wait)
        return np.square(SPEED_STD * (1 + in_queue * self._wait_slope(rates)))
