"""Traffic, load balancers, what is believed of a replica, fleets of known servers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from objectives.sla import Constraint
from optimizer.batcher.simulator import ServiceTimes
from optimizer.errors import BadInputError
from optimizer.planning.belief import Belief, Pace, belief
from optimizer.planning.cost import costs, power
from optimizer.planning.day import Day
from optimizer.planning.fleet import Fleet
from optimizer.planning.replica import Replica
from optimizer.planning.sizing import carried, sized
from optimizer.planning.traffic import BALANCERS, Balancer, Constant, Poisson, Recorded, Traffic
from optimizer.search.server_model import ServerModel
from optimizer.search.surroundings import Surroundings
from optimizer.trial import Candidate

SERVICE_MS = 10.0  # of one request after the other: 100 a second


def server(bound_ms: float, known: Belief | None = None, request_batch_size: float = 1) -> Replica:
    """Without any latency but the computation."""
    times = ServiceTimes(np.array([[SERVICE_MS / 1e3]]))
    model = ServerModel(lambda _: times, 1, Surroundings(0.0, gap_s=0.0, hop_s=0.0, jitter=0.0))
    bound = Constraint("latency-p95", bound_ms)
    return Replica(Candidate(1), model, request_batch_size, (bound,), known or belief([0.0] * 8))


def fleet(
    bound_ms: float, traffic: Traffic, balancer: Balancer = "round-robin", known: Belief | None = None
) -> Fleet:
    return Fleet(server(bound_ms, known), traffic, balancer, requests=20_000)


def gaps_of(traffic: Traffic, replicas: int, balancer: Balancer) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.diff(traffic.of_replica(1000.0, replicas, balancer, 20_000, seed=3))


@pytest.mark.parametrize("balancer", BALANCERS)
@pytest.mark.parametrize(
    "traffic", [Poisson(), Constant(), Recorded(np.full(100_000, 0.25))], ids=["poisson", "constant", "recorded"]
)
def test_every_replica_gets_its_share(traffic: Traffic, balancer: Balancer) -> None:
    assert gaps_of(traffic, 4, balancer).mean() == pytest.approx(4e-3, rel=0.03)


def test_poisson_stays_poisson_when_thinned_and_is_smoother_round_robin() -> None:
    def variation(balancer: Balancer) -> float:
        gaps = gaps_of(Poisson(), 9, balancer)
        return float(gaps.std() / gaps.mean())

    assert variation("random") == pytest.approx(1.0, rel=0.03)
    assert variation("round-robin") == pytest.approx(1 / 3, rel=0.03)
    assert variation("least-outstanding") == variation("random")


def test_a_constant_rate_stays_constant_round_robin_only() -> None:
    assert gaps_of(Constant(), 5, "round-robin").std() == pytest.approx(0.0, abs=1e-9)
    assert gaps_of(Constant(), 5, "random").std() > 1e-3


def test_a_recording_is_seen_whole_by_each_replica() -> None:
    recorded = Recorded(np.array([0.001] * 900 + [1.0]))
    times = recorded.of_replica(recorded.rate, 3, "round-robin", 10_000, seed=0)
    assert len(times) == 901
    assert (np.diff(times) > 0).all()


def test_the_smallest_fleet_of_a_known_server() -> None:
    """At a constant rate a request waits for nobody until all 100 a second of each are used."""
    constant = fleet(10.5, Constant())
    assert constant.smallest(950.0, Pace()) == 10
    assert constant.smallest(950.0, Pace(slowness=0.9)) == 9
    assert constant.smallest(950.0, Pace(lateness=1.1)) is None
    assert constant.smallest(0.5, Pace()) == 1


def test_randomness_takes_more_replicas_and_the_less_of_it_the_fewer() -> None:
    poisson = fleet(30.0, Poisson(), "random").smallest(2000.0, Pace())
    smoother = fleet(30.0, Poisson(), "round-robin").smallest(2000.0, Pace())
    assert poisson is not None
    assert smoother is not None
    assert 20 <= smoother < poisson
    assert poisson == pytest.approx(2000 / md1_rate(30.0), abs=1.5)


def md1_rate(bound_ms: float) -> float:
    """The highest rate at which 95 % wait for less than the bound, from the waiting times of an M/D/1 queue."""
    rng = np.random.default_rng(5)
    for rate in np.arange(99.0, 1.0, -1.0):
        waits, wait = [], 0.0
        for gap in rng.exponential(1e3 / rate, 20_000):
            waits.append(wait)
            wait = max(0.0, wait + SERVICE_MS - gap)
        if np.quantile(waits, 0.95) + SERVICE_MS <= bound_ms:
            return float(rate)
    return 0.0


def test_the_highest_rate_is_the_inverse() -> None:
    for balancer in BALANCERS:
        some = fleet(30.0, Poisson(), balancer)
        rate = some.highest_rate(7, Pace())
        assert some.smallest(0.98 * rate, Pace()) in (6, 7)
        assert some.smallest(1.05 * rate, Pace()) == 8


def test_no_number_of_replicas_is_quicker_than_one_request_alone() -> None:
    assert fleet(9.0, Poisson()).smallest(100.0, Pace()) is None
    assert fleet(9.0, Poisson()).highest_rate(5, Pace()) == 0.0


def test_a_rate_that_nobody_means_is_refused() -> None:
    with pytest.raises(BadInputError, match="is the rate as it is meant"):
        fleet(30.0, Poisson()).smallest(1e12, Pace())


def test_what_is_not_known_is_counted_in() -> None:
    sure, unsure = belief([0.0] * 200), belief([-0.08, 0.08, 0.0])
    known = sized(fleet(30.0, Poisson(), known=sure), 2000.0)
    unknown = sized(fleet(30.0, Poisson(), known=unsure), 2000.0)
    assert known is not None
    assert unknown is not None
    assert unknown.low <= known.low <= known.likely <= known.safe <= unknown.safe
    assert known.likely == unknown.likely
    assert unknown.safe - unknown.low > known.safe - known.low
    rates = carried(fleet(30.0, Poisson(), known=unsure), 10)
    assert rates.safe < rates.likely < rates.high


def test_a_mix_of_sizes_comes_in_whole_requests() -> None:
    """Two samples a request: half as many requests a second."""
    one = server(60.0, request_batch_size=2)
    assert one.capacity(1.0) == pytest.approx(50.0, rel=0.01)
    found = Fleet(one, Constant(), "round-robin", requests=4000).at(40.0, 1, Pace())
    assert found.latency_p95_s == pytest.approx(2 * SERVICE_MS / 1e3, rel=0.01)


# -- belief -----------------------------------------------------------------------------------------------------


def test_slower_deployments_are_believed_and_more_of_them_the_more() -> None:
    few, many = belief([0.1] * 3), belief([0.1] * 50)
    assert few.pace(0.5).slowness == pytest.approx(math.exp(0.1))
    assert few.pace(0.5).lateness == 1.0
    assert few.pace(0.999).slowness > many.pace(0.999).slowness > math.exp(0.1)
    assert few.pace(0.999).lateness > 1 > few.pace(0.001).lateness


@pytest.mark.parametrize("deviation", [0.03, 0.06, 0.10])
def test_the_mean_is_below_its_bound_about_as_often_as_is_said(deviation: float) -> None:
    rng = np.random.default_rng(1)
    runs = rng.normal(0, deviation, (500, 8))
    error = rng.normal(0, 0.0125, 500)
    paces = [belief(run.tolist()).pace(0.975).slowness for run in runs]
    above = np.mean([pace >= math.exp(own) for pace, own in zip(paces, error, strict=True)])
    assert 0.94 <= above <= 0.999


# -- a day, cost and power --------------------------------------------------------------------------------------


def test_a_day_has_its_peak_and_its_mean() -> None:
    day = Day(1.8)
    hours = [day.busiest(hour) for hour in range(24)]
    assert max(hours) == pytest.approx(1.8)
    assert min(hours) > 0.2
    assert Day().busiest(3) == 1.0


def test_what_a_fleet_costs() -> None:
    cost = costs(2.5, 4, 1000.0, by_hour=[2] * 12 + [4] * 12)
    assert cost.per_hour == 10.0
    assert cost.per_month == 7300.0
    assert cost.per_million == pytest.approx(10.0 / 3.6)
    assert cost.scaled_per_hour == 7.5
    assert power(200.0, 4, 1000.0).joules_per_1000 == 800.0
    assert power(None, 4, 1000.0).watts is None


# -- least-outstanding ------------------------------------------------------------------------------------------


@dataclass
class Queue:
    """A server that takes up to ``limit`` waiting requests at once, 5 ms and 1 ms each."""

    limit: int
    free_at: float = 0.0
    ends: tuple[float, ...] = ()
    waiting: tuple[float, ...] = ()

    def until(self, now: float) -> list[float]:
        """Serve up to ``now``; the latencies of what was begun."""
        latencies: list[float] = []
        while self.waiting and max(self.free_at, self.waiting[0]) <= now:
            begin = max(self.free_at, self.waiting[0])
            batch = [sent for sent in self.waiting[: self.limit] if sent <= begin]
            self.waiting = self.waiting[len(batch) :]
            self.free_at = begin + 5.0 + len(batch)
            latencies += [self.free_at - sent for sent in batch]
            self.ends += (self.free_at,) * len(batch)
        self.ends = tuple(end for end in self.ends if end > now)
        return latencies


def p95_ms(chosen: str, sent: Sequence[float]) -> float:
    queues, latencies = [Queue(8) for _ in range(4)], list[float]()
    anywhere = np.random.default_rng(4).integers(4, size=len(sent))
    for number, now in enumerate(sent):
        latencies += [latency for queue in queues for latency in queue.until(now)]
        unanswered = [len(queue.ends) + len(queue.waiting) for queue in queues]
        queue = queues[anywhere[number] if chosen == "random" else unanswered.index(min(unanswered))]
        queue.waiting += (now,)
    return float(np.quantile(latencies, 0.95))


@pytest.mark.parametrize("rate", [0.8, 1.6, 2.2])
def test_where_fewest_are_unanswered_is_no_worse_than_anywhere(rate: float) -> None:
    """What planning one as the other rests on: queues of their own, to which ``rate`` requests come a millisecond.

    Than round-robin it can be worse: batches that begin together end together, and what follows goes to few."""
    sent = np.cumsum(np.random.default_rng(2).exponential(1 / rate, 4000)).tolist()
    assert p95_ms("least-outstanding", sent) < p95_ms("random", sent)
