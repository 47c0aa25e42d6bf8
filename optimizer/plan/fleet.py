"""A fleet of equal replicas behind a load balancer: latency at a rate, number of replicas, highest rate, and cost."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from optimizer.core.errors import BadInputError
from optimizer.plan.replica import Replica
from optimizer.plan.slowness import EXPECTED, SAFE, TOO_LOW, Slowdown
from optimizer.plan.traffic import Balancer, RecordedTraffic, Traffic
from optimizer.simulator.scenario import SimulationResult

MAX_REPLICAS = 100_000
ARRIVAL_SEED = 1
REQUESTS, MIN_REQUESTS, MAX_REQUESTS = 40_000, 1000, 400_000  # per replica in a simulation
MAX_SIMULATED_SECONDS = 1e7  # the duration of a simulation is proportional to the simulated time
MIN_DURATION_IN_BOUNDS = 50  # a queue needs time to fill: a simulation lasts at least as many times the bound
MAX_REPLICA_FACTOR = 8.0  # multiple of the replicas that the throughput needs; if these miss the bound, more do too
STEP = 1.08  # growth of the number of replicas while the bounds are missed
RATE_STEP, MIN_RATE_SHARE, PRECISION = 0.9, 0.02, 0.002  # steps and limits of a rate, as shares of the capacity
HOURS_A_MONTH = 730.0  # a twelfth of a year
SECONDS_AN_HOUR = 3600.0


@dataclass(frozen=True, eq=False)
class Fleet:
    """Replicas that share ``traffic``. A simulation has ``requests`` per replica."""

    replica: Replica
    traffic: Traffic
    balancer: Balancer
    requests: int = REQUESTS

    def simulate(self, rate: float, replicas: int, slowdown: Slowdown) -> SimulationResult:
        """Return how each of ``replicas`` behaves while the fleet gets ``rate`` requests per second."""
        requests = self._request_count(rate, replicas)
        arrivals_s = self.traffic.replica_arrivals_s(rate, replicas, self.balancer, requests, ARRIVAL_SEED)
        # a replica that gets a request every few hours is idle in between, and also if they come more often
        if arrivals_s[-1] > 2 * MAX_SIMULATED_SECONDS:
            arrivals_s = arrivals_s * (MAX_SIMULATED_SECONDS / arrivals_s[-1])
        return self.replica.serve(arrivals_s, slowdown)

    def busy_share(self, simulated: SimulationResult, rate: float, replicas: int) -> float:
        """Return the share of time in which the instances of a ``simulated`` replica compute, 0 to 1."""
        if not isinstance(self.traffic, RecordedTraffic):
            return simulated.utilization
        requests, measured_s = self._request_count(rate, replicas), simulated.duration_s
        between_s = self.traffic.between_shares_s(rate, replicas, requests, measured_s)
        return min(1.0, simulated.utilization * measured_s / (measured_s - between_s))

    def _request_count(self, rate: float, replicas: int) -> int:
        longest_s = max(bound.bound for bound in self.replica.sla) / 1e3
        needed = max(self.requests, round(MIN_DURATION_IN_BOUNDS * longest_s * rate / replicas))
        possible = max(MIN_REQUESTS, round(MAX_SIMULATED_SECONDS * rate / replicas))
        return min(needed, possible, MAX_REQUESTS)

    def meets(self, rate: float, replicas: int, slowdown: Slowdown) -> bool:
        """Return True if ``replicas`` meet the bounds at ``rate``."""
        return self.accepts(self.simulate(rate, replicas, slowdown), slowdown)

    def accepts(self, simulated: SimulationResult, slowdown: Slowdown) -> bool:
        """Return True if the ``simulated`` behaviour meets the bounds."""
        return self.replica.meets(simulated, slowdown.latency_factor) and not (
            simulated.overloaded and self.traffic.is_steady
        )

    def meets_at_quantile(self, rate: float, replicas: int, probability: float) -> bool:
        """Return True if ``replicas`` meet the bounds at ``rate`` in each scenario of this probability."""
        scenarios = self.replica.slowness_estimate.scenarios(probability)
        return all(self.meets(rate, replicas, slowdown) for slowdown in scenarios)

    def fewest_replicas_at_quantile(
        self, rate: float, probability: float, sufficient: int | None = None
    ) -> int | None:
        """Return the fewest replicas that meet the bounds at ``rate`` with this probability; None if no number does.

        ``sufficient`` and BadInputError are those of ``fewest_replicas``.
        """
        counts = [
            self.fewest_replicas(rate, slowdown, sufficient)
            for slowdown in self.replica.slowness_estimate.scenarios(probability)
        ]
        sufficient_counts = [count for count in counts if count is not None]
        if probability > EXPECTED:
            return max(sufficient_counts) if len(sufficient_counts) == len(counts) else None
        return min(sufficient_counts, default=None)

    def highest_rate_at_quantile(self, replicas: int, probability: float) -> float:
        """Return the highest rate at which ``replicas`` meet the bounds with this probability of the slowness."""
        scenarios = self.replica.slowness_estimate.scenarios(probability)
        rates = [self.highest_rate(replicas, slowdown) for slowdown in scenarios]
        return min(rates) if probability > EXPECTED else max(rates)

    def fewest_replicas(self, rate: float, slowdown: Slowdown, sufficient: int | None = None) -> int | None:
        """Return the fewest replicas that meet the bounds at ``rate`` requests per second; None if no number does.

        ``sufficient`` replicas are known to meet them. Raises BadInputError if more than MAX_REPLICAS are needed.
        """
        needed = rate / self.replica.capacity(slowdown)
        if needed > MAX_REPLICAS:
            raise too_many_replicas(rate)
        if not self.traffic.is_steady:
            needed *= 0.5  # so few requests of a recording's peaks may be over the bound that it permits them
        highest = max(4, math.ceil(MAX_REPLICA_FACTOR * needed))
        failed = max(0, math.ceil(needed) - 1)
        for count in _upwards(failed + 1, highest) if sufficient is None else [sufficient]:
            if self.meets(rate, count, slowdown):
                fewer = range(min(failed + 1, count), count)
                return fewer.start + bisect_left(fewer, True, key=lambda number: self.meets(rate, number, slowdown))
            failed = count
        return None

    def highest_rate(self, replicas: int, slowdown: Slowdown) -> float:
        """Return the highest rate, in requests per second, at which ``replicas`` meet the bounds; 0 without any."""
        capacity = replicas * self.replica.capacity(slowdown)
        high = capacity * (1.0 if self.traffic.is_steady else 2.0)
        low = high
        while not self.meets(low, replicas, slowdown):
            high, low = low, low * RATE_STEP
            if low < MIN_RATE_SHARE * capacity:
                return 0.0
        while high - low > PRECISION * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self.meets(middle, replicas, slowdown) else (low, middle)
        return low


def too_many_replicas(rate: float) -> BadInputError:
    """Return the error that ``rate`` requests per second need more than MAX_REPLICAS."""
    return BadInputError(f"--rate: {rate:,.6g} requests/s need more than {MAX_REPLICAS:,} replicas; check the unit")


def _upwards(first: int, last: int) -> Iterator[int]:
    """Yield numbers from ``first`` to ``last`` in growing steps, beginning with steps of one."""
    count = first
    while count <= last:
        yield count
        count = max(count + 1, math.floor(count * STEP))


@dataclass(frozen=True, slots=True)
class ReplicaCount:
    """Replicas at three quantiles of the slowness.

    ``safe`` is too few in one plan of 100; it is the number to deploy. ``likely`` is too few in one of two, ``low``
    is enough in one of 40.
    """

    low: int
    likely: int
    safe: int


@dataclass(frozen=True, slots=True)
class RateEstimate:
    """Requests per second of the fleet at three quantiles of the slowness.

    ``safe`` is served in 99 of 100 plans, ``likely`` in one of two, ``high`` in one of 40.
    """

    safe: float
    likely: float
    high: float


def estimate_replicas(fleet: Fleet, rate: float) -> ReplicaCount | None:
    """Return the replicas for ``rate`` requests per second; None if no number meets the bounds safely."""
    counts: list[int] = []
    for probability in (SAFE, EXPECTED, TOO_LOW):
        fewest = fleet.fewest_replicas_at_quantile(rate, probability, counts[-1] if counts else None)
        if fewest is None and not counts:
            return None
        counts.append(fewest or counts[-1])
    safe, likely, low = counts
    return ReplicaCount(low, likely, safe)


def estimate_rate(fleet: Fleet, replicas: int) -> RateEstimate:
    """Return the highest rate of ``replicas``."""
    safe, likely, high = (fleet.highest_rate_at_quantile(replicas, p) for p in (SAFE, EXPECTED, TOO_LOW))
    return RateEstimate(safe, likely, high)


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost in the currency of the given price per hour.

    ``per_million`` inferences is None if the replicas cannot serve the rate. ``scaled_per_hour`` and
    ``scaled_per_million`` are the cost if the number of replicas follows the hours of a day.
    """

    per_hour: float
    per_month: float
    per_million: float | None
    scaled_per_hour: float | None = None
    scaled_per_million: float | None = None


@dataclass(frozen=True, slots=True)
class Power:
    """Power of all GPUs at the measured load, an upper estimate for lower loads; None if unknown."""

    watts: float | None
    joules_per_1000: float | None


def compute_costs(replica_hour: float, replicas: int, inferences_per_s: float | None, by_hour: Sequence[int]) -> Cost:
    """Return the cost of ``replicas``.

    ``inferences_per_s`` is the average over a day; None if the replicas cannot serve it. ``by_hour`` holds the
    replicas in each hour; empty if constant.
    """
    hour = replica_hour * replicas
    if inferences_per_s is None:
        return Cost(hour, HOURS_A_MONTH * hour, None)
    millions = inferences_per_s * SECONDS_AN_HOUR / 1e6
    scaled = replica_hour * sum(by_hour) / len(by_hour) if by_hour else None
    return Cost(hour, HOURS_A_MONTH * hour, hour / millions, scaled, None if scaled is None else scaled / millions)


def compute_power(replica_watts: float | None, replicas: int, inferences_per_s: float | None) -> Power:
    """Return the power of ``replicas`` and their energy per 1,000 inferences; None if they cannot serve the rate."""
    if replica_watts is None:
        return Power(None, None)
    watts = replica_watts * replicas
    return Power(watts, None if inferences_per_s is None else 1000 * watts / inferences_per_s)
