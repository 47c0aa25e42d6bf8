"""Tests of a replica: its fit to deployments that differ in speed, and the times of sizes not measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from objectives.batch_stats import BatchStatistic
from objectives.sla import Sla
from optimizer.config.problem import Problem
from optimizer.config.queue_policy import MAX_QUEUE_SIZE
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import INSTANCE_GPUS, SERVER_PROCESSES, Candidate
from optimizer.core.trial import LoadPoint, Trial
from optimizer.measure.load_client.arrivals import PoissonArrivals
from optimizer.plan.evidence import collect_evidence
from optimizer.plan.replica import FIXED_SHARE, PlausibleTimes, Replica, fit_replica, plausible_times
from optimizer.plan.slowness import Slowdown
from optimizer.simulator.calibration import Observation, service_times
from optimizer.simulator.dynamic_batching_model import DynamicBatchingModel
from optimizer.simulator.fitted_parameters import FittedOverheads
from optimizer.simulator.scenario import ServiceTimes

CANDIDATE = Candidate(16, dynamic_batching=True)
SLA = Sla.from_bounds({"p95": 20.0})
PROBLEM = Problem("known", SearchSpace((16,), (0,), ("none",), (1,)), 1, 64, sla=SLA)
FIXED_MS, PER_SAMPLE_MS = 2.0, 0.25
SIZES = np.arange(1, 17, dtype=np.float64)


def measured(number: int, slowness: float, loads: Sequence[int], *, faster: float = 1.0) -> Trial:
    """Return the measurements of a deployment; the last one has ``faster`` times the throughput of the simulation."""
    alone = slowness * (FIXED_MS + PER_SAMPLE_MS * SIZES) / 1e3
    times = ServiceTimes(np.asarray(alone[:, np.newaxis], np.float64))
    model = DynamicBatchingModel(
        lambda _: times, 1, FittedOverheads(2e-4, gap_s=1e-6, wake_s=2e-5, jitter=0.1), seed=number
    )
    results = model.measure([(CANDIDATE, load) for load in loads])
    last = results[-1]
    assert last.throughput_infer_per_sec is not None
    results[-1] = replace(last, throughput_infer_per_sec=faster * last.throughput_infer_per_sec)
    points = tuple((LoadPoint(1, load), result) for load, result in zip(loads, results, strict=True))
    return Trial(number, CANDIDATE, points)


def fitted(*trials: Trial) -> Replica:
    return fit_replica(collect_evidence(CANDIDATE, PROBLEM, [trials], PoissonArrivals()), SLA)


def test_the_error_of_the_forecasts_is_that_of_the_run() -> None:
    loads = (2, 6, 16, 32)
    exact = fitted(*(measured(number, 1.0, loads) for number in range(3)))
    wrong = fitted(*(measured(number, 1.0, loads, faster=1.3) for number in range(3)))
    errors, larger = exact.slowness_estimate.forecast, wrong.slowness_estimate.forecast
    assert errors.throughput < 0.02
    assert larger.throughput > 3 * errors.throughput
    assert exact.slowness_estimate.quantile(0.99).slowness < wrong.slowness_estimate.quantile(0.99).slowness


def test_the_spread_of_the_deployments_is_that_of_the_run() -> None:
    equal, different = (
        fitted(*(measured(number, math.exp(sign * deviation), (6, 16)) for number, sign in enumerate([-1, 1] * 3)))
        for deviation in (0.0, 0.12)
    )
    assert different.slowness_estimate.squares == pytest.approx(6 * 0.12**2, rel=0.2)
    assert equal.slowness_estimate.squares < 0.002
    assert equal.slowness_estimate.quantile(0.99).slowness < different.slowness_estimate.quantile(0.99).slowness


def test_forecast_latencies_are_those_that_were_measured_and_each_bound_counts() -> None:
    trials = [measured(number, 1.0, (6, 16)) for number in range(3)]
    replica = fitted(*trials)
    simulated = replica.serve_closed_loop(16, Slowdown())
    p95_ms, p99_ms = (replica.latency_ms(simulated, f"latency-{name}") for name in ("p95", "p99"))
    assert p95_ms == pytest.approx(trials[0].measurements[1][1].latency_p95_ms, rel=0.1)
    slower = replace(replica, latency_ratio=1.3 * replica.latency_ratio)
    assert slower.latency_ms(simulated, "latency-p95", 1.1) == pytest.approx(1.3 * 1.1 * p95_ms)
    for p95_share, p99_share in ((1.01, 1.01), (1.01, 0.99), (0.99, 1.01)):
        bounded = replace(replica, sla=Sla.from_bounds({"p95": p95_share * p95_ms, "p99": p99_share * p99_ms}))
        assert bounded.meets(simulated) is (min(p95_share, p99_share) > 1)
        assert not bounded.meets(simulated, latency_factor=1.02)


def test_small_batches_of_a_slow_deployment_take_the_usual_time() -> None:
    """Only the slow deployment measured a low load; its service times are brought to the usual speed."""
    slow = measured(0, 1.3, (1, 16))
    usual = [measured(number, 1.0, (16,)) for number in range(1, 7)]
    replica = fitted(slow, *usual)
    assert replica.times is not None
    single_ms = 1e3 * replica.times.at(0.0).seconds[0, 0] * math.exp(replica.slowness_estimate.mean)
    assert single_ms == pytest.approx(1.3 ** (1 / 7) * (FIXED_MS + PER_SAMPLE_MS), rel=0.1)


def test_the_safe_plan_expects_the_longest_times_of_unmeasured_sizes() -> None:
    replica = fitted(*(measured(number, 1.0, (12, 16)) for number in range(3)))
    arrivals_s = np.cumsum(np.random.default_rng(0).exponential(1 / 1500, 20_000))
    slow, expected, fast = (
        replica.serve(arrivals_s, Slowdown(unmeasured=position)).latency_p95_s for position in (1.0, 0.0, -1.0)
    )
    assert fast < expected < slow


def test_a_replica_of_two_server_processes_handles_twice_the_load() -> None:
    trials = [measured(number, 1.0, (6, 16)) for number in range(3)]
    two = replace(CANDIDATE, fields=((SERVER_PROCESSES, 2),))
    doubled = [
        replace(
            trial,
            candidate=two,
            measurements=tuple(
                (
                    replace(load, concurrency=2 * load.concurrency),
                    replace(measurement, throughput_infer_per_sec=2 * (measurement.throughput_infer_per_sec or 0.0)),
                )
                for load, measurement in trial.measurements
            ),
        )
        for trial in trials
    ]
    single, pair = fitted(*trials), fit_replica(collect_evidence(two, PROBLEM, [doubled], PoissonArrivals()), SLA)
    assert pair.capacity(Slowdown()) == pytest.approx(2 * single.capacity(Slowdown()), rel=0.05)
    arrivals_s = np.cumsum(np.random.default_rng(0).exponential(1 / 1500, 20_000))
    assert pair.serve(arrivals_s / 2, Slowdown()).latency_p95_s == pytest.approx(
        single.serve(arrivals_s, Slowdown()).latency_p95_s, rel=0.2
    )


def test_a_replica_has_the_instances_of_all_its_gpus() -> None:
    """instance_count counts the instances of each GPU, and the simulator needs times for all of them."""
    two = replace(CANDIDATE, fields=((INSTANCE_GPUS, "0,1"),))
    trials = [measured(number, 1.0, (6, 16)) for number in range(3)]
    moved = [replace(trial, candidate=two) for trial in trials]
    pair = fit_replica(collect_evidence(two, PROBLEM, [moved], PoissonArrivals()), SLA)
    assert pair.times is not None
    assert pair.times.expected.shape[1] == two.instances == 2
    assert pair.saturating_concurrency == 2 * fitted(*trials).saturating_concurrency


def test_refusals_of_the_queue_limit_the_rate() -> None:
    """Both servers have the same times. The queue of config.pbtxt holds two requests on one of them."""
    sla = Sla.from_bounds({"p95": 20.0, "error-rate": 1.0})
    trials = [measured(number, 1.0, (6, 16)) for number in range(3)]
    arrivals_s = np.cumsum(np.random.default_rng(0).exponential(1 / 1500, 20_000))
    rejected = []
    for limit in (2, 1000):
        problem = replace(PROBLEM, sla=sla, queue=((MAX_QUEUE_SIZE, limit),))
        limited = fit_replica(collect_evidence(CANDIDATE, problem, [trials], PoissonArrivals()), SLA)
        served = limited.serve(arrivals_s, Slowdown())
        rejected.append(served.rejected_share)
        assert limited.meets(served) is (limit == 1000)
    assert rejected[0] > 0.05
    assert rejected[1] < 0.005
    assert fit_replica(collect_evidence(CANDIDATE, PROBLEM, [trials], PoissonArrivals()), SLA).refusals is None


def test_each_request_goes_to_one_server_process() -> None:
    """Two processes share requests of four samples: each serves every second request, not every second sample."""
    single = replace(fitted(measured(0, 1.0, (6, 16))), request_batch_size=4.0)
    pair = replace(single, candidate=replace(CANDIDATE, fields=((SERVER_PROCESSES, 2),)))
    arrivals_s = np.linspace(0.0, 0.5, 6)
    single_result, pair_result = single.serve(arrivals_s[::2], Slowdown()), pair.serve(arrivals_s, Slowdown())
    assert (pair_result.mean_batch_size, pair_result.latency_p95_s) == (
        single_result.mean_batch_size,
        single_result.latency_p95_s,
    )
    assert pair_result.requests == 2 * single_result.requests


MS = 1_000_000


def times(*measured: tuple[int, float], executions: int = 100, largest: int = 64) -> PlausibleTimes:
    """Return the times of batches of 4, 8, ... samples, from (batch size, milliseconds)."""
    batches = tuple(BatchStatistic(size, executions, round(executions * ms * MS)) for size, ms in measured)
    observed = [Observation(1, 16, 1.0, batches, 4)]
    return plausible_times(service_times(observed, largest, 1, step=4), observed)


def milliseconds(some: PlausibleTimes, position: float, size: int) -> float:
    return 1e3 * float(some.at(position).seconds[size // 4 - 1, 0])


@pytest.mark.parametrize("position", [-1, -0.3, 0, 0.5, 1])
def test_measured_sizes_are_known(position: float) -> None:
    some = times((16, 4.0), (32, 6.0))
    fitted = [milliseconds(some, 0, size) for size in (16, 32)]
    assert [milliseconds(some, position, size) for size in (16, 32)] == fitted
    assert fitted == pytest.approx([4.0, 6.0], rel=0.05)


def test_a_size_between_two_measured_ones_takes_a_time_between_theirs() -> None:
    some = times((16, 4.0), (32, 6.0))
    low, high = (milliseconds(some, 0, size) for size in (16, 32))
    for size in (20, 24, 28):
        assert milliseconds(some, -1, size) == low
        assert milliseconds(some, 1, size) == high
        assert low < milliseconds(some, 0, size) < high


def test_smaller_sizes_take_at_most_the_smallest_measured_time_and_at_least_their_share() -> None:
    some = times((16, 4.0), (32, 9.0))  # the line through both would begin below zero
    smallest = milliseconds(some, 0, 16)
    assert milliseconds(some, 1, 4) == smallest
    assert milliseconds(some, -1, 4) == pytest.approx(smallest / 4)
    assert milliseconds(some, 0, 4) == pytest.approx((FIXED_SHARE + (1 - FIXED_SHARE) / 4) * smallest)


def test_larger_sizes_take_at_most_as_long_per_sample() -> None:
    some = times((16, 4.0), (32, 6.0))
    largest = milliseconds(some, 0, 32)
    assert milliseconds(some, 1, 64) == pytest.approx(2 * largest)
    assert milliseconds(some, -1, 64) == largest
    assert largest < milliseconds(some, 0, 64) < 2 * largest


def test_times_never_decrease_with_the_size() -> None:
    some = times((8, 4.0), (20, 4.5), (44, 9.0))
    for position in (-1.0, -0.5, 0.0, 0.7, 1.0):
        assert (np.diff(some.at(position).seconds[:, 0]) >= -1e-12).all()


def test_a_size_of_few_executions_is_not_known() -> None:
    batches = (BatchStatistic(16, 1, 4 * MS), BatchStatistic(32, 500, 500 * 6 * MS))
    observed = [Observation(1, 16, 1.0, batches, 4)]
    some = plausible_times(service_times(observed, 32, 1, step=4), observed)
    assert milliseconds(some, -1, 16) < milliseconds(some, 0, 16) < milliseconds(some, 1, 16)
