"""Overheads recovered from measurements of simulated servers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from objectives.metrics import Measurement
from objectives.sla import Sla
from optimizer.config.ort_settings import INTRA_OP_THREADS, SPINNING
from optimizer.config.problem import Problem
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import SERVER_PROCESSES, Candidate, FieldValue
from optimizer.core.trial import LoadPoint, Point
from optimizer.simulator.calibration import observe_point
from optimizer.simulator.dynamic_batching_model import DynamicBatchingModel, fit
from optimizer.simulator.fitted_parameters import (
    INTRA_OP_THREAD_COUNT,
    ExecutionSettings,
    FittedOverheads,
    estimate_network_s,
    execution_settings,
    longest_gap_s,
    occupancy,
    relative_duration,
)
from optimizer.simulator.scenario import ClosedLoopLoad, MeasurementInterval, Overheads
from optimizer.simulator.simulate import exponential_gaps, lognormal_jitter
from tests.simulated_results import measurement_of
from tests.simulation import linear_times, simulate

SPACE = SearchSpace((8, 32), (0, 500), ("none",), (1, 2))
PROBLEM = Problem("m", SPACE, 1, 32, sla=Sla.from_bounds({"p95": 20.0}))
LOADS = (4, 8, 16, 32)
INTERVAL = MeasurementInterval(warm_up_requests=500, requests=8000)


def served(candidate: Candidate, load: int, network_s: float, gap_s: float, wake_s: float, seed: int) -> Point:
    """Return the measurement of a simulated server with 1 ms + 0.05 ms a sample."""
    service = linear_times(1e-3, 5e-5, candidate.max_batch_size, candidate.instance_count, contention=0.5)
    overheads = Overheads(network_s / 2, network_s / 2, wake_s=wake_s, dispatch_s=wake_s)
    jitter, gaps = lognormal_jitter(0.1, seed), exponential_gaps(gap_s, seed)
    s = simulate(candidate, ClosedLoopLoad(load), service, overheads, jitter=jitter, gaps_s=gaps, interval=INTERVAL)
    return Point(candidate.instance_count, candidate, LoadPoint(1, load), measurement_of(s, candidate))


@pytest.mark.parametrize(("gap_s", "wake_s"), [(1e-4, 2e-5), (1e-6, 1e-4)])
def test_gaps_and_wake_ups_are_fitted_from_measurements(gap_s: float, wake_s: float) -> None:
    """The predictions of candidates that were not measured are correct."""
    measured_points = [
        served(candidate, load, 2e-4, gap_s, wake_s, seed=7)
        for candidate in (Candidate(8, True), Candidate(32, True))
        for load in LOADS
    ]
    model = fit(measured_points, PROBLEM, "latency-p95")
    unmeasured_cells = [(Candidate(8, True, 500), load) for load in LOADS] + [(Candidate(8), load) for load in LOADS]
    for (candidate, load), predicted in zip(unmeasured_cells, model.simulate(unmeasured_cells), strict=True):
        truth = served(candidate, load, 2e-4, gap_s, wake_s, seed=8).measurement
        assert predicted.throughput_infer_per_sec == pytest.approx(truth.throughput_infer_per_sec, rel=0.1)
        assert 1e3 * predicted.latency_p95_s == pytest.approx(truth.latency_p95_ms, rel=0.15)


def way(load: int, way_ms: float) -> Point:
    measured = Measurement(1e3 * load / (way_ms + 6.0), queue_ms=1.0, compute_infer_ms=5.0)
    return Point(0, Candidate(8, True), LoadPoint(1, load), measured)


def test_the_way_is_that_of_requests_that_do_not_wait_for_each_other() -> None:
    assert estimate_network_s([way(4, 0.9), way(8, 1.3), way(32, 3.7)]) == pytest.approx(1e-3, rel=0.1)
    assert estimate_network_s([way(4, 0.9)]) == pytest.approx(0.9e-3)
    assert estimate_network_s([way(4, 0.9), way(8, 1.3), way(32, 3.7)], 0.5) == pytest.approx(1.3e-3)


def test_the_network_time_is_unknown_without_latencies() -> None:
    assert estimate_network_s([Point(0, Candidate(8), LoadPoint(1, 4), Measurement(100.0))]) is None


def test_a_gap_leaves_room_for_the_highest_rate() -> None:
    quick = Point(0, Candidate(8), LoadPoint(2, 4), Measurement(20_000.0))
    assert longest_gap_s([quick, quick]) == pytest.approx(0.95e-4)


def test_idle_threads_that_do_not_spin_take_no_cores() -> None:
    choices: dict[str, tuple[FieldValue, ...]] = {INTRA_OP_THREADS: ("1", "2"), SPINNING: ("1", "0")}
    problem = Problem("m", SearchSpace((8,), instance_count=(2,), fields=choices), 1, 64, cpu_count=2)

    def duration(spins: str) -> float:
        return relative_duration(ExecutionSettings(2, ((INTRA_OP_THREADS, "2"), (SPINNING, spins))), 1.0, problem)

    assert duration("0") < duration("1")
    assert duration("0") == relative_duration(
        ExecutionSettings(1, ((INTRA_OP_THREADS, "2"), (SPINNING, "1"))), 1.0, problem
    )


def with_processes(count: int, instances: int = 1) -> Candidate:
    return Candidate(8, True, instance_count=instances, fields=((SERVER_PROCESSES, count),))


def test_each_of_several_server_processes_gets_its_share_of_the_load() -> None:
    """Two servers that do not slow each other serve twice as much with twice the load, at the same latency."""
    times = linear_times(1e-3, 5e-5, 8, 1)
    model = DynamicBatchingModel(lambda _: times, 1, FittedOverheads(2e-4))
    one_process, two_processes, odd_load = model.simulate(
        [(with_processes(1), 8), (with_processes(2), 16), (with_processes(2), 15)]
    )
    assert two_processes.throughput_infer_per_sec == pytest.approx(2 * one_process.throughput_infer_per_sec)
    assert two_processes.latency_p95_s == one_process.latency_p95_s
    assert odd_load.throughput_infer_per_sec == pytest.approx(15 / 16 * two_processes.throughput_infer_per_sec)
    (measured,) = model.measure([(with_processes(2), 16)])
    assert measured.mean_batch_size == pytest.approx(one_process.mean_batch_size, rel=1e-5)


def test_candidates_that_differ_in_another_model_alone_are_simulated_once() -> None:
    """Only settings with equal service times and an equal batcher have the result of another candidate."""
    fast, slow = linear_times(1e-3, 5e-5, 8, 1), linear_times(2e-3, 5e-5, 8, 1)
    model = DynamicBatchingModel(
        lambda settings: replace(slow if settings[1] == (("post/count", 3),) else fast), 1, FittedOverheads(2e-4)
    )
    limit = "dynamic_batching.default_queue_policy.max_queue_size"
    first, same, slower, queued, more_loaded = model.simulate(
        [
            (Candidate(8, True, fields=(("post/count", 1),)), 8),
            (Candidate(8, True, fields=(("post/count", 2),)), 8),
            (Candidate(8, True, fields=(("post/count", 3),)), 8),
            (Candidate(8, True, fields=((limit, 4), ("post/count", 1))), 8),
            (Candidate(8, True, fields=(("post/count", 1),)), 9),
        ]
    )
    assert first is same
    assert first.latency_avg_s < slower.latency_avg_s
    assert first.throughput_infer_per_sec != queued.throughput_infer_per_sec, "a queue with a limit has no prefetch"
    assert first.throughput_infer_per_sec < more_loaded.throughput_infer_per_sec


def test_statistics_of_several_server_processes_are_those_of_one_for_longer() -> None:
    measured = Measurement(2000.0, batch_stats="4:1000:2000000000")
    one_process, two_processes = (
        observe_point(Point(0, with_processes(count), LoadPoint(1, 8 * count), measured)) for count in (1, 2)
    )
    assert one_process
    assert two_processes
    assert (two_processes.concurrency, two_processes.wall_s, two_processes.busy) == (
        one_process.concurrency,
        2 * one_process.wall_s,
        one_process.busy,
    )


@pytest.mark.parametrize("cpu_count", [4, None])
def test_server_processes_slow_each_other_as_instances_do(cpu_count: int | None) -> None:
    problem = replace(PROBLEM, cpu_count=cpu_count)
    alone, processes, instances = (
        relative_duration(execution_settings(candidate), candidate.instances, problem)
        for candidate in (with_processes(1), with_processes(2), with_processes(1, instances=2))
    )
    assert alone < processes == instances
    threads = replace(PROBLEM, space=replace(SPACE, fields={INTRA_OP_THREAD_COUNT: ("0", "1")}), cpu_count=4)
    assert occupancy(execution_settings(with_processes(2)), 1, threads).threads == 2, "the cores are divided"
