"""How requests come to a fleet, and which of them a load balancer gives to one of its replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]
Balancer: TypeAlias = Literal["round-robin", "random", "least-outstanding"]
BALANCERS: tuple[Balancer, ...] = ("round-robin", "random", "least-outstanding")
SPLIT = {
    "round-robin": "each replica gets every n-th request, which comes more evenly than at random",
    "random": "each request goes to any replica: what is random stays so",
    "least-outstanding": "each goes where fewest are unanswered; planned as random, which is no better",
}


class Traffic(Protocol):
    @property
    def is_steady(self) -> bool:
        """Whether a rate that cannot be served shows in a queue that only grows."""
        ...

    def of_replica(self, rate: float, replicas: int, balancer: Balancer, requests: int, seed: int) -> Array:
        """Ascending times in seconds at which one of ``replicas`` gets about ``requests`` of them; the fleet gets
        ``rate`` requests a second."""
        ...


@dataclass(frozen=True, slots=True)
class Poisson:
    """Requests that know nothing of each other."""

    is_steady = True

    def of_replica(self, rate: float, replicas: int, balancer: Balancer, requests: int, seed: int) -> Array:
        """Thinned at random it is a Poisson process again; every n-th request of one comes after n of its gaps."""
        rng = np.random.default_rng(seed)
        if balancer == "round-robin":
            return np.cumsum(rng.gamma(replicas, 1 / rate, requests))
        return np.cumsum(rng.exponential(replicas / rate, requests))


@dataclass(frozen=True, slots=True)
class Constant:
    """A request every 1 / rate seconds."""

    is_steady = True

    def of_replica(self, rate: float, replicas: int, balancer: Balancer, requests: int, seed: int) -> Array:
        if balancer == "round-robin":
            return np.arange(1, requests + 1, dtype=np.float64) * (replicas / rate)
        gaps = np.random.default_rng(seed).geometric(1 / replicas, requests)
        return np.asarray(np.cumsum(gaps) / rate, np.float64)


@dataclass(frozen=True, eq=False)
class Recorded:
    """A recording, stretched in time to the wanted rate. ``intervals_s`` lie between its requests."""

    intervals_s: Array
    is_steady = False

    @property
    def rate(self) -> float:
        """Requests a second as they were recorded."""
        return float(1 / self.intervals_s.mean())

    def of_replica(self, rate: float, replicas: int, balancer: Balancer, requests: int, seed: int) -> Array:
        """The shares of as many replicas as it takes for ``requests``, one after another: all where the recording has
        no more. Each is a whole recording long, so that all that happens in it is seen."""
        times = np.cumsum(self.intervals_s) * (self.rate / rate)
        length, count = float(times[-1]), len(times)
        rng = np.random.default_rng(seed)
        owner = np.arange(count) % replicas if balancer == "round-robin" else rng.integers(replicas, size=count)
        shown = min(replicas, max(1, -(-requests * replicas // count)))
        # a recording's length apart at least: what one replica has queued is no matter of the next
        shares = [times[owner == k] + 2 * k * length for k in range(shown)]
        return np.concatenate(shares)
