"""A fleet of equal replicas behind a load balancer: what it gives at a rate, how many it takes, what it can take."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from optimizer.batcher.simulator import Simulated
from optimizer.errors import BadInputError
from optimizer.planning.belief import Pace
from optimizer.planning.replica import Replica
from optimizer.planning.traffic import Balancer, Traffic

MOST_REPLICAS = 100_000
REQUESTS, MOST_REQUESTS = 40_000, 400_000  # of a replica in a simulation
BOUNDS_LONG = 50  # and as many as come within so many times the bound: a queue needs time to fill
MOST_TIMES = 8.0  # as many replicas as the throughput alone takes: if these are late, so are any number
STEP = 1.08  # of the count, while none that meets the bounds has been found
RATE_STEP, LEAST_SHARE, PRECISION = 0.9, 0.02, 0.002  # of the rate, as a share of the most that can be served


@dataclass(frozen=True, eq=False)
class Fleet:
    """``seed`` is that of the arrivals."""

    replica: Replica
    traffic: Traffic
    balancer: Balancer
    seed: int = 1
    requests: int = REQUESTS

    def at(self, rate: float, replicas: int, pace: Pace) -> Simulated:
        """What each of ``replicas`` gives while all together get ``rate`` requests a second."""
        longest_s = max(bound.bound for bound in self.replica.bounds) / 1e3
        wanted = min(max(self.requests, round(BOUNDS_LONG * longest_s * rate / replicas)), MOST_REQUESTS)
        arrivals_s = self.traffic.of_replica(rate, replicas, self.balancer, wanted, self.seed)
        return self.replica.serve(arrivals_s, pace.slowness)

    def meets(self, rate: float, replicas: int, pace: Pace) -> bool:
        return self.accepts(self.at(rate, replicas, pace), pace)

    def accepts(self, found: Simulated, pace: Pace) -> bool:
        """Whether what ``at`` gave at ``pace`` meets the bounds."""
        return self.replica.meets(found, pace.lateness) and not (found.overloaded and self.traffic.is_steady)

    def smallest(self, rate: float, pace: Pace, enough: int | None = None) -> int | None:
        """The fewest replicas that meet the bounds at ``rate`` requests a second; None where no number does.
        ``enough`` are known to, at a slower pace.

        Raises BadInputError where that is more than MOST_REPLICAS.
        """
        least = rate / self.replica.capacity(pace.slowness)
        if least > MOST_REPLICAS:
            raise BadInputError(
                f"{rate:,.6g} requests/s take more than {MOST_REPLICAS:,} replicas: is the rate as it is meant?"
            )
        if not self.traffic.is_steady:
            least *= 0.5  # what a recording's peaks leave late may be as little as is allowed
        most = max(4, math.ceil(MOST_TIMES * least))
        failed = max(0, math.ceil(least) - 1)
        for count in _upwards(failed + 1, most) if enough is None else [enough]:
            if self.meets(rate, count, pace):
                return bisected(failed, count, lambda one: self.meets(rate, one, pace))
            failed = count
        return None

    def highest_rate(self, replicas: int, pace: Pace) -> float:
        """The most requests a second at which ``replicas`` meet the bounds; 0 where there is no such rate."""
        most = replicas * self.replica.capacity(pace.slowness)
        high = most * (1.0 if self.traffic.is_steady else 2.0)
        low = high
        while not self.meets(low, replicas, pace):
            high, low = low, low * RATE_STEP
            if low < LEAST_SHARE * most:
                return 0.0
        while high - low > PRECISION * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self.meets(middle, replicas, pace) else (low, middle)
        return low


def _upwards(first: int, most: int) -> Iterator[int]:
    """Every count at first, then in growing steps."""
    count = first
    while count <= most:
        yield count
        count = max(count + 1, math.floor(count * STEP))


def bisected(failed: int, met: int, meets: Callable[[int], bool]) -> int:
    while met - failed > 1:
        middle = (failed + met) // 2
        failed, met = (failed, middle) if meets(middle) else (middle, met)
    return met
