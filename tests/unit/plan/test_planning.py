"""Tests of traffic, load balancers, the estimate of slowness, and fleets of known servers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from scipy import stats

from objectives.metrics import Measurement
from objectives.sla import Sla
from optimizer.core.candidate import Candidate
from optimizer.core.errors import BadInputError
from optimizer.core.trial import ConfirmationWindow, LoadPoint, Trial
from optimizer.measure.load_client.arrivals import PoissonArrivals
from optimizer.plan.evidence import collect_evidence
from optimizer.plan.fleet import Cost, Fleet, Power, compute_costs, compute_power, estimate_rate, estimate_replicas
from optimizer.plan.replica import PlausibleTimes, Replica
from optimizer.plan.slowness import (
    EXPECTED,
    PRIOR_DEVIATION,
    PRIOR_DEVIATION_FACTOR,
    PRIOR_ERRORS,
    SAFE,
    TOO_LOW,
    ForecastErrors,
    Slowdown,
    SlownessEstimate,
    estimate_slowness,
    forecast_errors,
)
from optimizer.plan.traffic import BALANCERS, Balancer, ConstantTraffic, Day, PoissonTraffic, RecordedTraffic, Traffic
from optimizer.simulator.dynamic_batching_model import DynamicBatchingModel
from optimizer.simulator.fitted_parameters import FittedOverheads
from optimizer.simulator.scenario import ServiceTimes
from tests.conftest import known_problem

SERVICE_MS = 10.0  # of one request after the other: 100 a second


def server(bound_ms: float, slowness: SlownessEstimate | None = None, request_batch_size: float = 1) -> Replica:
    """Return a replica whose only latency is the computation."""
    times = ServiceTimes(np.array([[SERVICE_MS / 1e3]]))
    model = DynamicBatchingModel(lambda _: times, 1, FittedOverheads(0.0, gap_s=0.0, wake_s=0.0, jitter=0.0))
    sla = Sla.from_bounds({"p95": bound_ms})
    return Replica(Candidate(1), model, request_batch_size, sla, slowness or estimate_slowness([0.0] * 8))


def fleet(
    bound_ms: float, traffic: Traffic, balancer: Balancer = "round-robin", slowness: SlownessEstimate | None = None
) -> Fleet:
    return Fleet(server(bound_ms, slowness), traffic, balancer, requests=20_000)


def gaps_of(traffic: Traffic, replicas: int, balancer: Balancer) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.diff(traffic.replica_arrivals_s(1000.0, replicas, balancer, 20_000, seed=3))


@pytest.mark.parametrize("balancer", BALANCERS)
@pytest.mark.parametrize(
    "traffic",
    [PoissonTraffic(), ConstantTraffic(), RecordedTraffic(np.full(100_000, 0.25))],
    ids=["poisson", "constant", "recorded"],
)
def test_every_replica_gets_its_share(traffic: Traffic, balancer: Balancer) -> None:
    assert gaps_of(traffic, 4, balancer).mean() == pytest.approx(4e-3, rel=0.03)


@pytest.mark.parametrize(
    "traffic",
    [PoissonTraffic(), RecordedTraffic(np.random.default_rng(1).exponential(0.25, 9 * 20_000))],
    ids=["poisson", "recorded"],
)
def test_poisson_stays_poisson_when_thinned_and_is_smoother_round_robin(traffic: Traffic) -> None:
    def variation(balancer: Balancer) -> float:
        gaps = gaps_of(traffic, 9, balancer)
        return float(gaps.std() / gaps.mean())

    assert variation("random") == pytest.approx(1.0, rel=0.03)
    assert variation("round-robin") == pytest.approx(1 / 3, rel=0.03)
    assert variation("least-outstanding") == variation("random")


def test_a_constant_rate_stays_constant_round_robin_only() -> None:
    assert gaps_of(ConstantTraffic(), 5, "round-robin").std() == pytest.approx(0.0, abs=1e-9)
    assert gaps_of(ConstantTraffic(), 5, "random").std() > 1e-3
    arrivals_s = ConstantTraffic().replica_arrivals_s(10.0, 2, "round-robin", 3, seed=0)
    assert arrivals_s == pytest.approx([0.2, 0.4, 0.6])


def test_each_replica_gets_the_whole_recording() -> None:
    recorded = RecordedTraffic(np.array([0.001] * 900 + [1.0]))
    times = recorded.replica_arrivals_s(recorded.rate, 3, "round-robin", 10_000, seed=0)
    assert len(times) == 901
    assert (np.diff(times) > 0).all()


@pytest.mark.parametrize("replicas", [1, 4, 20])  # the warm-up ends within the first, and within the third share
def test_the_busy_share_leaves_out_the_time_between_the_shares_of_a_recording(replicas: int) -> None:
    gaps = np.random.default_rng(0).exponential(1e-3, 20_000)
    for traffic in (PoissonTraffic(), RecordedTraffic(gaps)):
        some, rate = fleet(30.0, traffic, "random"), 80.0 * replicas
        busy = some.busy_share(some.simulate(rate, replicas, Slowdown()), rate, replicas)
        assert busy == pytest.approx(0.8, abs=0.01)


def test_the_smallest_fleet_has_the_capacity_of_the_rate() -> None:
    """No request waits at a constant rate until each replica gets 100 requests per second."""
    constant = fleet(10.5, ConstantTraffic())
    assert constant.fewest_replicas(950.0, Slowdown()) == 10
    assert constant.fewest_replicas(950.0, Slowdown(slowness=0.9)) == 9
    assert constant.fewest_replicas(950.0, Slowdown(latency_factor=1.1)) is None
    assert constant.fewest_replicas(0.5, Slowdown()) == 1


def test_more_random_traffic_needs_more_replicas() -> None:
    poisson = fleet(30.0, PoissonTraffic(), "random").fewest_replicas(2000.0, Slowdown())
    smoother = fleet(30.0, PoissonTraffic(), "round-robin").fewest_replicas(2000.0, Slowdown())
    assert poisson is not None
    assert smoother is not None
    assert 20 <= smoother < poisson
    assert poisson == pytest.approx(2000 / md1_rate(30.0), abs=1.5)


def md1_rate(bound_ms: float) -> float:
    """Return the highest rate at which 95 % wait less than the bound in an M/D/1 queue."""
    rng = np.random.default_rng(5)
    for rate in np.arange(99.0, 1.0, -1.0):
        waits, wait = [], 0.0
        for gap in rng.exponential(1e3 / rate, 20_000):
            waits.append(wait)
            wait = max(0.0, wait + SERVICE_MS - gap)
        if np.quantile(waits, 0.95) + SERVICE_MS <= bound_ms:
            return float(rate)
    return 0.0


def test_the_highest_rate_is_the_inverse_of_the_fewest_replicas() -> None:
    for balancer in BALANCERS:
        some = fleet(30.0, PoissonTraffic(), balancer)
        rate = some.highest_rate(7, Slowdown())
        assert some.fewest_replicas(0.98 * rate, Slowdown()) in (6, 7)
        assert some.fewest_replicas(1.05 * rate, Slowdown()) == 8


def test_no_fleet_is_faster_than_a_single_request() -> None:
    assert fleet(9.0, PoissonTraffic()).fewest_replicas(100.0, Slowdown()) is None
    assert fleet(9.0, PoissonTraffic()).highest_rate(5, Slowdown()) == 0.0


def test_an_absurd_rate_is_refused() -> None:
    with pytest.raises(BadInputError, match="check the unit"):
        fleet(30.0, PoissonTraffic()).fewest_replicas(1e12, Slowdown())


@pytest.mark.parametrize("traffic", [PoissonTraffic(), RecordedTraffic(np.full(100_000, 0.25))])
def test_one_replica_serves_a_request_in_many_years(traffic: Traffic) -> None:
    """The duration of a simulation is limited, because the simulator counts 64-bit nanoseconds."""
    assert fleet(30.0, traffic).fewest_replicas(1e-10, Slowdown()) == 1


def test_uncertainty_needs_more_replicas() -> None:
    sure, unsure = estimate_slowness([0.0] * 200), estimate_slowness([-0.08, 0.08, 0.0])
    sure_count = estimate_replicas(fleet(30.0, PoissonTraffic(), slowness=sure), 2000.0)
    unsure_count = estimate_replicas(fleet(30.0, PoissonTraffic(), slowness=unsure), 2000.0)
    assert sure_count is not None
    assert unsure_count is not None
    assert unsure_count.low <= sure_count.low <= sure_count.likely <= sure_count.safe <= unsure_count.safe
    assert sure_count.likely == unsure_count.likely
    assert unsure_count.safe - unsure_count.low > sure_count.safe - sure_count.low
    rates = estimate_rate(fleet(30.0, PoissonTraffic(), slowness=unsure), 10)
    assert rates.safe < rates.likely < rates.high


def test_requests_of_several_samples_arrive_whole() -> None:
    """Requests of two samples are served at half the rate."""
    replica = server(60.0, request_batch_size=2)
    assert replica.capacity(Slowdown()) == pytest.approx(50.0, rel=0.01)
    result = Fleet(replica, ConstantTraffic(), "round-robin", requests=4000).simulate(40.0, 1, Slowdown())
    assert result.latency_p95_s == pytest.approx(2 * SERVICE_MS / 1e3, rel=0.01)


# -- slowness estimate ------------------------------------------------------------------------------------------


def test_more_slow_deployments_raise_the_estimate() -> None:
    few, many = estimate_slowness([0.1] * 3), estimate_slowness([0.1] * 50)
    assert few.quantile(0.5).slowness == pytest.approx(math.exp(0.1))
    assert few.quantile(0.5).latency_factor == 1.0
    assert few.quantile(0.999).slowness > many.quantile(0.999).slowness > math.exp(0.1)
    assert few.quantile(0.999).latency_factor > 1 > few.quantile(0.001).latency_factor


def test_further_deployments_narrow_the_estimate() -> None:
    few = estimate_slowness([-0.06, 0.0, 0.06])
    more = few.with_more(60)
    assert more.quantile(0.5) == few.quantile(0.5)
    assert few.quantile(0.01).slowness < more.quantile(0.01).slowness
    assert more.quantile(0.99).slowness < few.quantile(0.99).slowness
    assert few.with_more(0).quantile(0.99).slowness == pytest.approx(few.quantile(0.99).slowness)


@pytest.mark.parametrize(
    "observed", [(-0.2, 0.0, 0.15), (0.01, -0.01, 0.02, 0.0, -0.02, 0.0)], ids=["wide", "narrow"]
)
def test_the_estimate_is_the_posterior_of_normal_observations(observed: tuple[float, ...]) -> None:
    """The mean has a flat prior, the deviation a log-normal one. The errors of the simulator are independent."""
    random, forecast = np.random.default_rng(2), ForecastErrors(throughput=0.02, latency=0.08)
    deviations = PRIOR_DEVIATION * PRIOR_DEVIATION_FACTOR ** np.linspace(-3, 3, 121)
    means = np.linspace(-1.0, 1.0, 2001)
    log_densities = stats.lognorm.logpdf(deviations, math.log(PRIOR_DEVIATION_FACTOR), scale=PRIOR_DEVIATION)
    log_densities += np.log(deviations)  # the deviations are equidistant in their logarithm
    log_densities = log_densities[:, None] + sum(
        stats.norm.logpdf(value, means, deviations[:, None]) for value in observed
    )
    density = np.exp(log_densities - log_densities.max()).sum(axis=0)
    drawn = random.choice(means, 400_000, p=density / density.sum())
    drawn += random.uniform(-0.0005, 0.0005, len(drawn)) + random.normal(0.0, forecast.throughput, len(drawn))
    drawn_latency = drawn + random.normal(0.0, forecast.latency, len(drawn))
    estimate = estimate_slowness(observed, forecast)
    for probability in (TOO_LOW, EXPECTED, SAFE):
        slowdown = estimate.quantile(probability)
        log_latency = math.log(slowdown.slowness * slowdown.latency_factor)
        assert math.log(slowdown.slowness) == pytest.approx(np.quantile(drawn, probability), abs=2e-3)
        assert log_latency == pytest.approx(np.quantile(drawn_latency, probability), abs=2e-3)


def test_further_deployments_are_expected_to_differ_as_much_as_those_before() -> None:
    few, repeats = np.array([-0.2, 0.0, 0.2]), 21
    same_variance = np.tile(few, repeats) * math.sqrt((len(few) * repeats - 1) / (repeats * (len(few) - 1)))
    further = estimate_slowness(few.tolist()).with_more(len(few) * (repeats - 1))
    expected = estimate_slowness(same_variance.tolist())
    for probability in (TOO_LOW, SAFE):
        assert further.quantile(probability).slowness == pytest.approx(expected.quantile(probability).slowness)


def test_evidence_has_each_server_with_these_instances_at_each_load_without_overload() -> None:
    candidate = Candidate(16, True, instance_count=1)

    def measured(throughput: float, *, overloaded: bool = False) -> Measurement:
        return Measurement(throughput, latency_avg_ms=10.0, stable=True, overloaded=overloaded)

    low, high = LoadPoint(1, 4), LoadPoint(1, 8)
    windows = [(1, low, 110.0), (1, low, 130.0), (2, low, 90.0), (2, high, 210.0)]
    trial = Trial(
        0,
        candidate,
        ((low, measured(100.0)), (high, measured(200.0, overloaded=True))),
        confirmations=tuple(ConfirmationWindow(server, load, measured(rate)) for server, load, rate in windows),
    )
    other_batching = Trial(1, replace(candidate, max_queue_delay_us=1000), ((low, measured(105.0)),))
    other_instances = Trial(2, replace(candidate, instance_count=2), ((low, measured(180.0)),))
    evidence = collect_evidence(
        candidate, known_problem(), [[trial, other_instances], [other_batching]], PoissonArrivals()
    )
    rates = [[(point.load, point.throughput_infer_per_sec) for point in server] for server in evidence.deployments]
    assert rates == [[(low, 100.0)], [(low, 120.0)], [(low, 90.0), (high, 210.0)], [(low, 105.0)]]


def test_measured_errors_of_the_simulator_replace_the_usual_ones() -> None:
    exact, wrong = forecast_errors([0.0] * 6, [0.0] * 6), forecast_errors([0.1, -0.1] * 3, [0.2, -0.2] * 3)
    assert exact.throughput < PRIOR_ERRORS.throughput < wrong.throughput < 0.1
    assert exact.latency < PRIOR_ERRORS.latency < wrong.latency < 0.2
    none = forecast_errors([], [])
    assert (none.throughput, none.latency) == pytest.approx((PRIOR_ERRORS.throughput, PRIOR_ERRORS.latency))
    safe = [estimate_slowness([0.0] * 8, errors).quantile(0.99) for errors in (exact, wrong)]
    assert safe[0].slowness < safe[1].slowness
    assert safe[0].latency_factor < safe[1].latency_factor


def test_a_safe_plan_allows_for_slow_unmeasured_sizes_but_not_for_all_at_once() -> None:
    estimate = estimate_slowness([0.0] * 8)
    slow, unmeasured = estimate.scenarios(SAFE)
    assert slow == estimate.quantile(SAFE)
    assert slow.unmeasured == 0.0 < unmeasured.unmeasured
    assert 1 < unmeasured.slowness < slow.slowness
    fast, short = estimate.scenarios(TOO_LOW)
    assert fast.slowness < short.slowness < 1
    assert short.unmeasured == -unmeasured.unmeasured
    assert estimate.scenarios(EXPECTED) == (Slowdown(),)


def test_a_plan_takes_the_worse_scenario_of_unmeasured_sizes() -> None:
    expected = np.array([[SERVICE_MS / 1e3]])
    plain = server(30.0)
    uncertain = replace(plain, times=PlausibleTimes(0.5 * expected, expected, 1.6 * expected, 1))
    fleets = [Fleet(replica, PoissonTraffic(), "random", requests=20_000) for replica in (plain, uncertain)]
    plain_count, uncertain_count = (estimate_replicas(fleet, 2000.0) for fleet in fleets)
    assert plain_count is not None
    assert uncertain_count is not None
    assert plain_count.likely == uncertain_count.likely
    assert uncertain_count.low < plain_count.low <= plain_count.safe < uncertain_count.safe
    assert uncertain_count.safe >= 1.2 * plain_count.likely
    fleet, slowdown = fleets[1], uncertain.slowness_estimate.quantile(SAFE)
    assert fleet.highest_rate_at_quantile(8, SAFE) < 0.9 * fleet.highest_rate(8, slowdown)


@pytest.mark.parametrize("deviation", [0.03, 0.06, 0.10])
def test_quantiles_cover_the_true_slowness(deviation: float) -> None:
    rng = np.random.default_rng(1)
    runs = rng.normal(0, deviation, (500, 8))
    error = rng.normal(0, 0.0125, 500)
    slownesses = [estimate_slowness(run.tolist()).quantile(0.975).slowness for run in runs]
    above = np.mean(
        [slowness >= math.exp(log_slowness) for slowness, log_slowness in zip(slownesses, error, strict=True)]
    )
    assert 0.94 <= above <= 0.999


# -- a day, cost and power --------------------------------------------------------------------------------------


def test_the_rate_of_an_hour_is_its_highest_one() -> None:
    day = Day(1.8)
    for hour in range(24):
        rates = 1 + 0.8 * np.sin(2 * math.pi * np.linspace(hour, hour + 1, 61) / 24)
        assert day.hourly_peak(hour) == pytest.approx(rates.max())
    assert Day().hourly_peak(3) == 1.0


def test_cost_and_power_are_those_of_all_replicas() -> None:
    cost = compute_costs(2.5, 4, 1000.0, by_hour=[2] * 12 + [4] * 12)
    assert cost.per_hour == 10.0
    assert cost.per_month == 7300.0
    assert cost.per_million == pytest.approx(10.0 / 3.6)
    assert cost.scaled_per_hour == 7.5
    assert compute_power(200.0, 4, 1000.0).joules_per_1000 == 800.0
    assert compute_costs(2.5, 4, None, [1, 3]) == Cost(10.0, 7300.0, None), "a rate that is not served"
    assert compute_power(200.0, 4, None) == Power(800.0, None)
    assert compute_power(None, 4, 1000.0).watts is None


# -- least-outstanding ------------------------------------------------------------------------------------------


@dataclass
class Queue:
    """A server with batches of up to ``limit`` requests, which take 5 ms plus 1 ms per request."""

    limit: int
    free_at: float = 0.0
    ends: tuple[float, ...] = ()
    waiting: tuple[float, ...] = ()

    def until(self, now: float) -> list[float]:
        """Serve until ``now``; return the latencies of the started requests."""
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
def test_least_outstanding_is_no_worse_than_random(rate: float) -> None:
    """This justifies planning least-outstanding as random. ``rate`` is in requests per millisecond.

    It can be worse than round-robin: batches that start together end together."""
    sent = np.cumsum(np.random.default_rng(2).exponential(1 / rate, 4000)).tolist()
    assert p95_ms("least-outstanding", sent) < p95_ms("random", sent)
