"""Tests of the simulated autoscaler on fleets of a known server."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from objectives.arrays import FloatArray
from objectives.sla import Sla
from optimizer.core.candidate import SERVER_PROCESSES, Candidate
from optimizer.core.trial import LoadPoint
from optimizer.plan.autoscaler import (
    MAX_STEPS,
    STEP_SECONDS,
    Autoscaler,
    AutoscalerTest,
    day_rates,
    recorded_rates,
    simulate_autoscaler,
)
from optimizer.plan.fleet import Fleet
from optimizer.plan.replica import Replica
from optimizer.plan.slowness import Slowdown, estimate_slowness
from optimizer.plan.traffic import Day, PoissonTraffic, RecordedTraffic
from optimizer.simulator.dynamic_batching_model import DynamicBatchingModel
from optimizer.simulator.fitted_parameters import FittedOverheads
from optimizer.simulator.scenario import ServiceTimes

CAPACITY = 100.0  # requests per second of a replica
MEASURED = LoadPoint(1, request_rate=90.0)  # the load of a replica that the target is a share of
BOUNDS_MS = {"p95": 60.0}
USUAL = Slowdown()
DEPLOY_SECONDS = 2.3
HOUR = 3600 // STEP_SECONDS


def outcome(
    autoscaler: Autoscaler,
    rates: FloatArray,
    measured: LoadPoint = MEASURED,
    *,
    bounds_ms: Mapping[str, float] = BOUNDS_MS,
    processes: int = 1,
    repeats: bool = False,
    slowdown: Slowdown = USUAL,
) -> AutoscalerTest:
    times = ServiceTimes(np.array([[1 / CAPACITY]]))
    model = DynamicBatchingModel(lambda _: times, 1, FittedOverheads(0.0, gap_s=0.0, wake_s=0.0, jitter=0.0))
    candidate = Candidate(1, fields=((SERVER_PROCESSES, processes),))
    replica = Replica(candidate, model, 1, Sla.from_bounds(bounds_ms), estimate_slowness([0.0] * 8))
    fleet = Fleet(replica, PoissonTraffic(), "random")
    return simulate_autoscaler(autoscaler, fleet, slowdown, rates, measured, DEPLOY_SECONDS, repeats=repeats)


def jump(low: float, high: float) -> FloatArray:
    """Return ten minutes at a low rate, then twenty at a high one."""
    return np.array([low] * (HOUR // 6) + [high] * (HOUR // 3))


def test_a_constant_rate_keeps_the_replicas_that_the_target_needs() -> None:
    result = outcome(Autoscaler(target_utilization=0.7), np.full(HOUR, 500.0))
    assert result.target == 63
    assert result.mean_replicas == result.most_replicas == pytest.approx(8, abs=1)  # 500 / 63, within the tolerance
    assert (result.too_few_seconds, result.seconds) == (0.0, 3600.0)
    assert result.over_bound_share < 0.05


def test_the_target_of_a_small_load_is_below_it() -> None:
    result = outcome(Autoscaler(target_utilization=0.7), np.full(HOUR // 12, 50.0), LoadPoint(1, request_rate=1.3))
    assert result.target == 0.91


def test_too_few_replicas_last_until_new_ones_have_started() -> None:
    slow, fast = (outcome(Autoscaler(max_replicas=20, start_s=start), jump(100, 800)) for start in (120.0, 10.0))
    assert fast.start_s == 10.0
    assert 10 < fast.too_few_seconds < slow.too_few_seconds
    assert slow.too_few_seconds >= 120
    assert 0.0 < fast.over_bound_share < slow.over_bound_share < 1.0


def test_the_measured_deployment_and_a_probe_are_the_start_without_an_option() -> None:
    assert outcome(Autoscaler(), np.full(12, 50.0)).start_s == 3.0 + 5.0


def test_every_bound_counts() -> None:
    """The p99 is missed at a lower load than the p95, so that replicas are too few for longer."""
    rates = jump(100, 800)
    single_bound, both_bounds = (
        outcome(Autoscaler(max_replicas=20), rates, bounds_ms={"p95": 60.0, **more}) for more in ({}, {"p99": 65.0})
    )
    assert both_bounds.too_few_seconds > single_bound.too_few_seconds
    assert both_bounds.over_bound_share == single_bound.over_bound_share, "the shortest bound is the same"


def test_each_server_process_is_a_pod() -> None:
    """Two processes serve 200 requests per second, and the emitted autoscaler adds or removes single ones."""
    both, rates = LoadPoint(1, request_rate=180.0), np.full(HOUR, 500.0)
    pair = outcome(Autoscaler(max_replicas=20), rates, both, processes=2)
    single = outcome(Autoscaler(min_replicas=2, max_replicas=40), rates)
    assert (pair.pods_per_replica, pair.target, single.target) == (2, 63, 63)
    assert (2 * pair.mean_replicas, pair.over_bound_share) == (single.mean_replicas, single.over_bound_share)
    odd = outcome(Autoscaler(), np.full(HOUR, 280.0), both, processes=2)
    assert (2 * odd.most_replicas) % 2 == 1, "five pods"
    limited = outcome(Autoscaler(max_replicas=2), jump(100, 800), both, processes=2)
    assert limited.most_replicas == 2


def test_an_old_metric_reacts_later() -> None:
    new, old = (outcome(Autoscaler(metric_delay_s=delay), jump(100, 500)) for delay in (15.0, 240.0))
    assert new.too_few_seconds + 200 <= old.too_few_seconds


def test_the_cool_down_keeps_replicas() -> None:
    rates = np.array(([100.0] * (HOUR // 12) + [500.0] * (HOUR // 12)) * 6)
    short, long = (outcome(Autoscaler(cool_down_s=cool_down), rates) for cool_down in (15.0, 900.0))
    assert long.mean_replicas > short.mean_replicas + 1
    assert long.too_few_seconds < short.too_few_seconds


def test_a_maximum_below_the_need_is_too_few_all_the_time() -> None:
    result = outcome(Autoscaler(max_replicas=4), np.full(HOUR, 500.0))
    assert result.most_replicas == 4
    assert result.too_few_seconds == result.seconds
    assert result.over_bound_share == 1.0


def test_the_minimum_is_kept_without_traffic() -> None:
    result = outcome(Autoscaler(min_replicas=3), np.full(HOUR, 1.0))
    assert result.mean_replicas == 3


def test_a_target_in_flight_follows_the_latency() -> None:
    """An M/D/1 queue at half of its capacity has 0.75 requests in the system (Pollaczek-Khinchine)."""
    result = outcome(Autoscaler(target_utilization=1.0), np.full(HOUR, 400.0), LoadPoint(1, 1))
    in_flight = 400 / result.mean_replicas / CAPACITY
    in_flight += in_flight**2 / (2 * (1 - in_flight))
    assert in_flight == pytest.approx(1.0, rel=0.15)  # the tolerance of the autoscaler is 10 %


@pytest.mark.parametrize(("high_steps", "replicas"), [(0, 1), (1, 5), (4, 10), (7, 20)])
def test_the_replicas_are_at_most_doubled_or_four_more_every_15_seconds(high_steps: int, replicas: int) -> None:
    """A queue of thousands of requests would need hundreds of replicas."""
    autoscaler = Autoscaler(max_replicas=1000, metric_delay_s=0.0, start_s=60.0)
    result = outcome(autoscaler, np.array([50.0] * 3 + [1000.0] * high_steps), LoadPoint(1, 1))
    assert result.most_replicas == replicas


def test_replicas_that_start_count_as_in_kubernetes() -> None:
    """The replicas of each step are derived by hand from the formulas of the HorizontalPodAutoscaler.

    Four ready replicas serve at most 400 requests per second. The metric is the mean of the last twelve steps. At 350
    (after ten steps of the high rate) 350 / 63 needs six replicas. At 400 the ratio of 400 / (6 * 63) is within the
    tolerance. When the metric has fallen to 150 (after ten steps of the low rate), the two that start are assumed to
    serve the target: 150 / 63 + 2 needs five. At 100, three would be enough, and four are the minimum.
    """
    autoscaler = Autoscaler(min_replicas=4, metric_delay_s=0.0, cool_down_s=0.0, start_s=1800.0)
    rates = np.array([100.0] * 3 + [1000.0] * 15 + [100.0] * 15)
    result = outcome(autoscaler, rates)
    assert result.most_replicas == 6
    assert result.mean_replicas * len(rates) == pytest.approx(4 * (3 + 9) + 6 * (6 + 9) + 5 * 3 + 4 * 3)


def test_a_queue_delays_requests_until_it_has_been_served() -> None:
    """At 120 requests per second the queue grows by one second of work in each step. At 50 it shrinks by 2.5 s.

    Because of the queue, the requests of six steps miss the bound. In the first of these, the wait alone does not.
    """
    rates = np.array([50.0] * 3 + [120.0] * 8 + [50.0] * 5)
    result = outcome(Autoscaler(max_replicas=1), rates, bounds_ms={"p95": 4100.0})
    assert result.too_few_seconds == 6 * STEP_SECONDS
    assert result.over_bound_share == pytest.approx((4 * 120 + 50) / rates.sum(), rel=1e-3)


@pytest.mark.parametrize("start_s", [13.5, 15.0])  # three steps
def test_the_queue_of_a_replica_is_not_divided_among_new_ones(start_s: float) -> None:
    """The second replica is ready after nine steps of the high rate, and the queue of the first is then 22.5 s long.

    With half of the rate each, it shrinks by 1.25 s in each step, so the bound is missed in 9 + 17 steps.
    """
    autoscaler = Autoscaler(max_replicas=2, metric_delay_s=0.0, start_s=start_s)
    result = outcome(autoscaler, np.array([50.0] * 3 + [150.0] * 40), bounds_ms={"p95": 300.0})
    assert result.too_few_seconds == (9 + 17) * STEP_SECONDS


@pytest.mark.parametrize("share", [0.6, 0.3, 0.07, 0.02])
def test_the_share_over_the_bound_is_that_of_the_queue(share: float) -> None:
    """Constant service times and random arrivals are an M/D/1 queue, which Lindley's recursion describes."""
    gaps_s, service_s = np.random.default_rng(5).exponential(1 / 80, 200_000), 1 / CAPACITY
    waits_s = [0.0]
    for gap_s in gaps_s.tolist():
        waits_s.append(max(0.0, waits_s[-1] + service_s - gap_s))
    bound_ms = 1e3 * (float(np.quantile(waits_s, 1 - share)) + service_s)
    one_replica, rates = Autoscaler(max_replicas=1), np.full(12, 80.0)
    result = outcome(one_replica, rates, bounds_ms={"p95": bound_ms})
    assert result.over_bound_share == pytest.approx(share, rel=0.2)
    slow = outcome(one_replica, rates, bounds_ms={"p95": 1.5 * bound_ms}, slowdown=Slowdown(latency_factor=1.5))
    assert slow.over_bound_share == pytest.approx(result.over_bound_share)


def test_a_day_follows_an_equal_day() -> None:
    rates = day_rates(300.0, Day(1.5))
    assert rates.mean() == pytest.approx(300.0, rel=1e-3)
    assert rates.max() == pytest.approx(450.0, rel=1e-3)
    assert rates.argmax() == 6 * HOUR
    result = outcome(Autoscaler(), rates, repeats=True)
    assert result.seconds == 24 * 3600
    assert result.too_few_seconds == 0.0
    assert 300 / 90 < result.mean_replicas < 450 / 90 / 0.7 + 1
    after_an_equal_day, settled = (
        outcome(Autoscaler(), jump(100, 500), repeats=repeats) for repeats in (True, False)
    )
    assert after_an_equal_day.mean_replicas > settled.mean_replicas + 0.5, (
        "replicas of the last evening remain at first"
    )


def test_a_recording_has_its_rates() -> None:
    gaps = np.array([0.01] * 6000 + [0.005] * 12_000)  # a minute at 100/s, a minute at 200/s
    recorded = RecordedTraffic(gaps)
    rates = recorded_rates(recorded, recorded.rate)
    assert len(rates) * STEP_SECONDS == pytest.approx(120, abs=STEP_SECONDS)
    assert rates[2] == pytest.approx(100, rel=0.02)
    assert rates[-3] == pytest.approx(200, rel=0.02)
    twice = recorded_rates(recorded, 2 * recorded.rate)
    assert len(twice) == pytest.approx(len(rates) / 2, abs=1)
    assert recorded_rates(RecordedTraffic(np.full(100, 1e-3)), 1000.0).tolist() == [1000.0]
    assert len(recorded_rates(recorded, 1e-4)) == MAX_STEPS
