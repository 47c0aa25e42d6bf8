"""Service times and overheads recovered from statistics of which the truth is known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objectives.metrics import Measurement
from optimizer.batcher.calibration import (
    BatchStatistics,
    Observation,
    overheads,
    relative_std,
    release_time_s,
    service_times,
)
from optimizer.batcher.simulator import (
    ClosedLoop,
    Job,
    Overheads,
    ServiceTimes,
    Window,
    lognormal_jitter,
    simulate,
    trace,
)
from optimizer.trial import Candidate

MS = 1e-3


def seen(
    seconds: Callable[[int], float], sizes: list[int], *, executions: int = 50, instances: int = 1
) -> Observation:
    """All instances busy all the time."""
    batches = tuple(BatchStatistics(b, executions, round(1e9 * executions * seconds(b))) for b in sizes)
    wall = sum(b.compute_ns for b in batches) / 1e9 / instances
    return Observation(instances, 1000, wall, batches)


def test_a_line_is_found_and_goes_on_to_sizes_never_seen() -> None:
    times = service_times([seen(lambda b: 2 * MS + 0.1 * MS * b, [1, 4, 16])], 64, 1)
    assert times.seconds[:, 0] == pytest.approx(2 * MS + 0.1 * MS * np.arange(1, 65), rel=1e-3)
    coarse = service_times([seen(lambda b: 2 * MS + 0.1 * MS * b, [8, 32])], 64, 1, step=8)
    assert coarse.step == 8
    assert coarse.seconds[:, 0] == pytest.approx(2 * MS + 0.1 * MS * np.arange(8, 65, 8), rel=1e-3)


def test_neither_part_is_negative() -> None:
    falling = service_times([seen(lambda b: 5 * MS - 0.1 * MS * b, [1, 8])], 64, 1).seconds[:, 0]
    assert (np.diff(falling) >= 0).all()
    assert falling[-1] < 5 * MS
    steep = service_times([seen(lambda b: 0.1 * MS * b**1.2, [1, 8, 64])], 128, 1).seconds[:, 0]
    assert (steep > 0).all()
    assert (np.diff(steep) >= 0).all()


def test_steps_are_kept_where_many_executions_show_them() -> None:
    def stairs(b: int) -> float:
        return 1 * MS * (1 + (b - 1) // 8)

    dense = service_times([seen(stairs, list(range(1, 33)), executions=1000)], 32, 1).seconds[:, 0]
    assert dense == pytest.approx([stairs(b) for b in range(1, 33)], rel=0.05)
    single = service_times([seen(stairs, list(range(1, 33)), executions=1)], 32, 1).seconds[:, 0]
    assert abs(single[8] - single[7]) < 0.5 * MS


def test_a_wild_mean_of_few_executions_bends_little() -> None:
    line = seen(lambda b: 2 * MS + 0.1 * MS * b, [1, 2, 8, 16, 32], executions=1000)
    wild = Observation(1, 1000, 0.02, (BatchStatistics(4, 1, round(20e-3 * 1e9)),))
    times = service_times([line, wild], 32, 1).seconds[:, 0]
    truth = 2 * MS + 0.1 * MS * np.arange(1, 33)
    assert times[3] < 2.5 * truth[3]
    assert times[[0, 15, 31]] == pytest.approx(truth[[0, 15, 31]], rel=0.1)


@pytest.mark.parametrize("sizes", [[1, 8, 32], [8]])
def test_contention_is_taken_from_the_numbers_of_instances_seen(sizes: list[int]) -> None:
    """Two processors: up to two instances do not slow each other. Four seen at one size only will do."""

    def seconds(b: int, busy: int) -> float:
        return (1 * MS + 0.2 * MS * b) * max(1, busy / 2)

    observations = [
        seen(lambda b: seconds(b, 1), [1, 8, 32]),
        seen(lambda b: seconds(b, 2), [1, 8, 32], instances=2),
        seen(lambda b: seconds(b, 4), sizes, instances=4),
    ]
    times = service_times(observations, 32, 6)
    expected = np.array([[seconds(b, k) for k in range(1, 7)] for b in range(1, 33)])
    assert times.seconds == pytest.approx(expected, rel=0.02)


def test_contention_never_seen_is_as_told() -> None:
    alone = seen(lambda b: 1 * MS, [1, 2])
    assert service_times([alone], 2, 3, contention=0.2).seconds[0] == pytest.approx([1 * MS, 1.2 * MS, 1.4 * MS])
    pair = seen(lambda b: 1.2 * MS, [1, 2], instances=2)
    assert service_times([pair], 2, 3, contention=0.2).seconds[0] == pytest.approx([1 * MS, 1.2 * MS, 1.4 * MS])


def test_clients_bound_how_many_instances_are_busy() -> None:
    batches = (BatchStatistics(1, 100, 10**9),)
    assert Observation(4, 1, 1.0, batches).busy == 1
    assert Observation(4, 2, 1.0, batches).busy == pytest.approx(1.5)
    assert Observation(4, 8, 0.25, batches).busy == 4
    eights = (BatchStatistics(8, 100, 10**9),)
    assert Observation(4, 8, 0.5, eights).busy == 1  # all clients wait for one batch
    assert Observation(4, 2, 0.5, eights, request_batch_size=8).busy == 2


def test_one_size_seen_is_half_fixed_and_half_by_the_sample() -> None:
    times = service_times([seen(lambda b: 4 * MS, [4])], 8, 1).seconds[:, 0]
    assert times[[3, 7]] == pytest.approx([4 * MS, 6 * MS])


def test_nothing_executed_is_no_calibration() -> None:
    with pytest.raises(ValueError, match="no executions"):
        service_times([Observation(1, 1, 1.0, ())], 8, 1)
    with pytest.raises(ValueError, match="no executions"):
        release_time_s(Observation(1, 1, 1.0, ()))


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 64), st.integers(1, 100), st.integers(1, 10**8)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 6),
)
def test_whatever_was_seen_the_times_are_positive_and_rise(
    raw: list[tuple[int, int, int, int]], instances: int
) -> None:
    observations = [Observation(n, 64, 1.0, (BatchStatistics(b, count, ns),)) for n, b, count, ns in raw]
    times = service_times(observations, 80, instances).seconds
    assert times.shape == (80, instances)
    assert np.isfinite(times).all()
    assert (times > 0).all()
    assert (np.diff(times, axis=0) >= -1e-12).all()
    assert (np.diff(times, axis=1) >= -1e-12).all()


@pytest.mark.parametrize("candidate", [Candidate(1), Candidate(8, True), Candidate(8, True, 2000, (4, 8))])
def test_overheads_are_recovered_from_a_single_client(candidate: Candidate) -> None:
    batched = candidate.dynamic_batching
    given_ = Overheads(0.1 * MS, 0.1 * MS, 0.03 * MS, 0, 0.05 * MS if batched else 0, 0.05 * MS)
    result = simulate(candidate, ClosedLoop(1), ServiceTimes.linear(3 * MS, 0, 8), given_)
    measured = Measurement(
        throughput_infer_per_sec=result.throughput_infer_per_s,
        latency_avg_ms=1e3 * result.latency_avg_s,
        queue_ms=1e3 * result.queue_avg_s,
        compute_input_ms=0.5,
        compute_infer_ms=2.0,
        compute_output_ms=0.5,
    )
    found = overheads(candidate, 1, measured)
    for name in ("send_s", "receive_s", "client_s", "dispatch_s"):
        assert getattr(found, name) == pytest.approx(getattr(given_, name), abs=1e-6), name
    with pytest.raises(ValueError, match="unknown"):
        overheads(candidate, 1, Measurement())


def test_the_spread_of_service_times_is_seen_in_a_single_client_s_latencies() -> None:
    result = simulate(
        Candidate(1),
        ClosedLoop(1),
        ServiceTimes.linear(3 * MS, 0, 1),
        jitter=lognormal_jitter(0.2),
        window=Window(0, 4000),
    )
    measured = Measurement(
        latency_p50_ms=1e3 * result.latency_p50_s, latency_p95_ms=1e3 * result.latency_p95_s, compute_infer_ms=3.0
    )
    assert relative_std(measured) == pytest.approx(0.2, rel=0.05)
    with pytest.raises(ValueError, match="unknown"):
        relative_std(Measurement())


def observed(truth: ServiceTimes, candidate: Candidate, concurrency: int, over: Overheads) -> Observation:
    """The statistics of a simulated deployment."""
    log = trace(
        Job(candidate, ClosedLoop(concurrency), truth, over), jitter=lognormal_jitter(0.05), window=Window(0, 3000)
    )
    done = ~np.isnan(log.end_s)
    lasted, sizes = (log.end_s - log.start_s)[done], log.requests[done]
    batches = tuple(
        BatchStatistics(int(b), int((sizes == b).sum()), round(1e9 * float(lasted[sizes == b].sum())))
        for b in np.unique(sizes)
    )
    return Observation(candidate.instance_count, concurrency, float(np.nanmax(log.end_s)), batches)


def test_a_few_loads_on_three_deployments_tell_the_rest() -> None:
    """From 1, 2 and 4 instances under a few loads to the throughput and latency of other configurations."""
    truth = ServiceTimes.linear(2 * MS, 0.25 * MS, 32, 6, contention=0.35)
    over = Overheads(0.1 * MS, 0.1 * MS, 0.02 * MS, 0, 0.05 * MS, 0.05 * MS, 0.02 * MS)
    observations = [
        observed(truth, Candidate(32, True, 0, (), instances), concurrency, over)
        for instances in (1, 2, 4)
        for concurrency in (1, 4, 16, 64, 128)
    ]
    found = service_times(observations, 32, 6)
    assert found.seconds[:, :4] == pytest.approx(truth.seconds[:, :4], rel=0.12)
    for candidate in (
        Candidate(16, True, 1000, (8,), 3),
        Candidate(8, True, 0, (), 2),
        Candidate(1, instance_count=3),
    ):
        for concurrency in (2, 12, 48):
            one, other = (simulate(candidate, ClosedLoop(concurrency), times, over) for times in (found, truth))
            assert one.throughput_infer_per_s == pytest.approx(other.throughput_infer_per_s, rel=0.1)
            assert one.latency_p95_s == pytest.approx(other.latency_p95_s, rel=0.15)


def test_the_time_between_executions_is_told_by_a_saturating_load() -> None:
    over = Overheads(release_s=0.2 * MS)
    truth = ServiceTimes.linear(2 * MS, 0.25 * MS, 8, 2)
    assert release_time_s(observed(truth, Candidate(8, True, 0, (), 2), 64, over)) == pytest.approx(0.2 * MS, rel=0.1)
