"""Service times recovered from statistics with known truth."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objectives.batch_stats import BatchStatistic
from optimizer.core.candidate import Candidate
from optimizer.simulator.calibration import Observation, service_times
from optimizer.simulator.scenario import ClosedLoopLoad, Overheads
from tests.simulation import linear_times, observed_deployment, simulate

MS = 1e-3


def seen(
    seconds: Callable[[int], float], sizes: list[int], *, executions: int = 50, instances: int = 1
) -> Observation:
    """Return statistics with all instances busy all the time."""
    batches = tuple(BatchStatistic(b, executions, round(1e9 * executions * seconds(b))) for b in sizes)
    wall = sum(b.compute_ns for b in batches) / 1e9 / instances
    return Observation(instances, 1000, wall, batches)


def test_a_fitted_line_extrapolates_to_unmeasured_sizes() -> None:
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


def test_steps_are_kept_if_many_executions_show_them() -> None:
    def stairs(b: int) -> float:
        return 1 * MS * (1 + (b - 1) // 8)

    dense = service_times([seen(stairs, list(range(1, 33)), executions=1000)], 32, 1).seconds[:, 0]
    assert dense == pytest.approx([stairs(b) for b in range(1, 33)], rel=0.05)
    single = service_times([seen(stairs, list(range(1, 33)), executions=1)], 32, 1).seconds[:, 0]
    assert abs(single[8] - single[7]) < 0.5 * MS


def test_a_wild_mean_of_few_executions_bends_little() -> None:
    line = seen(lambda b: 2 * MS + 0.1 * MS * b, [1, 2, 8, 16, 32], executions=1000)
    wild = Observation(1, 1000, 0.02, (BatchStatistic(4, 1, round(20e-3 * 1e9)),))
    times = service_times([line, wild], 32, 1).seconds[:, 0]
    truth = 2 * MS + 0.1 * MS * np.arange(1, 33)
    assert times[3] < 2.5 * truth[3]
    assert times[[0, 15, 31]] == pytest.approx(truth[[0, 15, 31]], rel=0.1)


@pytest.mark.parametrize("sizes", [[1, 8, 32], [8]])
def test_contention_is_taken_from_the_numbers_of_instances_seen(sizes: list[int]) -> None:
    """On two processors up to two instances do not slow each other. Four instances are observed at one size only."""

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


def test_unmeasured_contention_is_the_given_one() -> None:
    alone = seen(lambda b: 1 * MS, [1, 2])
    assert service_times([alone], 2, 3, contention=0.2).seconds[0] == pytest.approx([1 * MS, 1.2 * MS, 1.4 * MS])
    pair = seen(lambda b: 1.2 * MS, [1, 2], instances=2)
    assert service_times([pair], 2, 3, contention=0.2).seconds[0] == pytest.approx([1 * MS, 1.2 * MS, 1.4 * MS])


def test_clients_bound_how_many_instances_are_busy() -> None:
    batches = (BatchStatistic(1, 100, 10**9),)
    assert Observation(4, 1, 1.0, batches).busy == 1
    assert Observation(4, 2, 1.0, batches).busy == pytest.approx(1.5)
    assert Observation(4, 8, 0.25, batches).busy == 4
    eights = (BatchStatistic(8, 100, 10**9),)
    assert Observation(4, 8, 0.5, eights).busy == 1  # all clients wait for one batch
    assert Observation(4, 2, 0.5, eights, request_batch_size=8).busy == 2


def test_with_one_measured_size_half_the_time_is_fixed_and_half_per_sample() -> None:
    times = service_times([seen(lambda b: 4 * MS, [4])], 8, 1).seconds[:, 0]
    assert times[[3, 7]] == pytest.approx([4 * MS, 6 * MS])


def test_nothing_executed_is_no_calibration() -> None:
    with pytest.raises(ValueError, match="no executions"):
        service_times([Observation(1, 1, 1.0, ())], 8, 1)


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
    observations = [Observation(n, 64, 1.0, (BatchStatistic(b, count, ns),)) for n, b, count, ns in raw]
    times = service_times(observations, 80, instances).seconds
    assert times.shape == (80, instances)
    assert np.isfinite(times).all()
    assert (times > 0).all()
    assert (np.diff(times, axis=0) >= -1e-12).all()
    assert (np.diff(times, axis=1) >= -1e-12).all()


def test_a_few_loads_on_three_deployments_tell_the_rest() -> None:
    """Predict throughput and latency of other configurations from 1, 2 and 4 instances under a few loads."""
    truth = linear_times(2 * MS, 0.25 * MS, 32, 6, contention=0.35)
    over = Overheads(0.1 * MS, 0.1 * MS, 0.02 * MS, 0, 0.05 * MS, 0.05 * MS, 0.02 * MS)
    observations = [
        observed_deployment(truth, Candidate(32, True, 0, (), instances), concurrency, over)
        for instances in (1, 2, 4)
        for concurrency in (1, 4, 16, 64, 128)
    ]
    result = service_times(observations, 32, 6)
    assert result.seconds[:, :4] == pytest.approx(truth.seconds[:, :4], rel=0.12)
    for candidate in (
        Candidate(16, True, 1000, (8,), 3),
        Candidate(8, True, 0, (), 2),
        Candidate(1, instance_count=3),
    ):
        for concurrency in (2, 12, 48):
            predicted, simulated_truth = (
                simulate(candidate, ClosedLoopLoad(concurrency), times, over) for times in (result, truth)
            )
            assert predicted.throughput_infer_per_sec == pytest.approx(
                simulated_truth.throughput_infer_per_sec, rel=0.1
            )
            assert predicted.latency_p95_s == pytest.approx(simulated_truth.latency_p95_s, rel=0.15)
