"""Tests of the service times of batch sizes that no measurement formed."""

from __future__ import annotations

import numpy as np
import pytest

from objectives.batch_stats import BatchStatistic
from optimizer.plan.replica import FIXED_SHARE, PlausibleTimes, plausible_times
from optimizer.simulator.calibration import Observation, service_times

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
