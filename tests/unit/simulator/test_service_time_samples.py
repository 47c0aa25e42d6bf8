"""Samples of service times agree with the statistics, and vary without them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from objectives.arrays import FloatArray
from objectives.batch_stats import BatchStatistic
from optimizer.config.problem import Problem
from optimizer.config.search_space import SearchSpace
from optimizer.simulator.calibration import Observation
from optimizer.simulator.fitted_parameters import INTRA_OP_THREAD_COUNT, ExecutionSettings, GroupServiceTimes
from optimizer.simulator.service_time_samples import sample_service_times

PROBLEM = Problem("m", SearchSpace((16,), (0,), ("none",), (1, 2, 4)), 1, 32, cpu_count=16)
ALONE = ExecutionSettings(1)
COUNT = 200


def linear(size: int) -> float:
    return 4e-3 + 1e-3 * size


def observed(sizes: Sequence[int], seconds: Callable[[int], float] = linear, instances: int = 1) -> Observation:
    """Return the statistics of a server that was always busy."""
    batches = tuple(BatchStatistic(size, 100, round(100 * seconds(size) * 1e9)) for size in sizes)
    wall_s = sum(batch.compute_ns for batch in batches) / 1e9 / instances
    return Observation(instances, 64, wall_s, batches)


def samples(
    groups: dict[ExecutionSettings, list[Observation]], problem: Problem = PROBLEM, seed: int = 0
) -> list[GroupServiceTimes]:
    return sample_service_times(groups, problem, 16, COUNT, seed)


def seconds(result: Sequence[GroupServiceTimes], size: int, settings: ExecutionSettings = ALONE) -> FloatArray:
    """Return the time [samples] of a batch of ``size`` while all instances are busy."""
    return np.array([sample.times(settings).seconds[size - 1, settings.instances - 1] for sample in result])


def test_a_batch_size_never_seen_may_take_any_time_between_constant_and_proportional() -> None:
    ratio = seconds(samples({ALONE: [observed([1])]}), 8) / linear(1)
    low, high = np.quantile(ratio, [0.1, 0.9])
    assert low < 2
    assert high > 5


def test_sizes_seen_on_both_sides_leave_little_doubt() -> None:
    times = seconds(samples({ALONE: [observed([1, 2, 4, 16])]}), 8)
    low, median, high = np.quantile(times, [0.1, 0.5, 0.9])
    assert median == pytest.approx(linear(8), rel=0.1)
    assert high / low < 1.4


@pytest.mark.parametrize("size", [1, 4, 16])
def test_measured_times_are_met(size: int) -> None:
    times = seconds(samples({ALONE: [observed([1, 4, 16])]}), size)
    assert np.median(times) == pytest.approx(linear(size), rel=0.05)
    assert np.std(np.log(times)) < 0.1


@pytest.mark.parametrize("tile", [5, 6, 7])
def test_a_step_between_two_powers_of_two_is_met_where_it_was_measured(tile: int) -> None:
    """The sizes on both sides of the step were measured. The larger one takes about twice as long."""

    def in_tiles(size: int) -> float:
        return 1e-4 + 1e-3 * math.ceil(size / tile)

    result = samples({ALONE: [observed(range(1, 9), in_tiles)]})
    for size in (tile, tile + 1):
        assert np.median(seconds(result, size)) == pytest.approx(in_tiles(size), rel=0.12)


def test_one_step_makes_unmeasured_sizes_more_uncertain() -> None:
    def with_step(size: int) -> float:
        return linear(size) * (2 if size > 6 else 1)

    smooth, stepped = (
        seconds(samples({ALONE: [observed([1, 2, 4, 6, 7, 8], times)]}), 16) for times in (linear, with_step)
    )
    assert np.std(np.log(stepped)) > 1.5 * np.std(np.log(smooth))


def test_times_never_decrease_with_the_batch_size() -> None:
    drawn = samples({ALONE: [observed([1, 2])]})
    assert len(drawn) > 1
    for sample in drawn:
        assert (np.diff(sample.times(ALONE).seconds[:, 0]) >= 0).all()


def test_a_seed_gives_the_same_samples() -> None:
    groups = {ALONE: [observed([1, 2])]}
    assert seconds(samples(groups), 8).tolist() == seconds(samples(groups), 8).tolist()
    assert seconds(samples(groups), 8).tolist() != seconds(samples(groups, seed=1), 8).tolist()


def test_contention_between_two_instances_tells_about_four() -> None:
    """Instances that do not slow each other down at two do so hardly at four."""
    problem = replace(PROBLEM, cpu_count=None)
    with_one_instance = seconds(samples({ALONE: [observed([1, 8])]}, problem), 8, ExecutionSettings(4))
    both_samples = samples(
        {ALONE: [observed([1, 8])], ExecutionSettings(2): [observed([1, 8], instances=2)]}, problem
    )
    with_two_instances = seconds(both_samples, 8, ExecutionSettings(4))
    assert np.median(with_two_instances) < np.median(with_one_instance)
    assert np.median(with_two_instances) / linear(8) == pytest.approx(1.2, abs=0.3)


def test_cores_that_are_only_guessed_may_suffice_for_more_threads() -> None:
    space = replace(PROBLEM.space, fields={INTRA_OP_THREAD_COUNT: ("1", "2")})
    two_threads = ExecutionSettings(2, ((INTRA_OP_THREAD_COUNT, "2"),))
    groups = {ExecutionSettings(1, ((INTRA_OP_THREAD_COUNT, "1"),)): [observed([1, 8])]}
    guessed = seconds(samples(groups, replace(PROBLEM, space=space, cpu_count=None)), 8, two_threads)
    two_cores = seconds(samples(groups, replace(PROBLEM, space=space, cpu_count=2)), 8, two_threads)
    assert np.quantile(guessed, 0.2) < linear(8)
    assert np.quantile(two_cores, 0.2) > linear(8)


def test_threads_that_are_not_set_are_one_for_each_core() -> None:
    """The baseline does not set ONNX Runtime's parameter, which the space offers."""
    offered = replace(PROBLEM, space=replace(PROBLEM.space, fields={INTRA_OP_THREAD_COUNT: ("1", "2")}), cpu_count=2)
    one_thread, two_threads = (ExecutionSettings(1, ((INTRA_OP_THREAD_COUNT, threads),)) for threads in ("1", "2"))
    from_default = samples({ALONE: [observed([1, 8])]}, offered)
    assert np.array_equal(seconds(from_default, 8, two_threads), seconds(from_default, 8, ALONE))
    assert np.median(seconds(from_default, 8, one_thread)) > np.median(seconds(from_default, 8, ALONE))


def test_intervals_cover_servers_of_many_kinds() -> None:
    """The true time of a batch of 16 lies within 80 % intervals for about 80 % of simulated servers."""
    rng = np.random.default_rng(1)
    inside = []
    for _ in range(60):
        fixed, power, level = rng.uniform(), rng.uniform(0.7, 1.15), 10 ** rng.uniform(-4, -1)

        def truth(size: int, fixed: float = fixed, power: float = power, level: float = level) -> float:
            return level * float(fixed + (1 - fixed) * size**power)

        times = seconds(samples({ALONE: [observed([1, 2], truth)]}, seed=1), 16)
        low, high = np.quantile(times, [0.1, 0.9])
        inside.append(low <= truth(16) <= high)
    assert 0.65 <= np.mean(inside) <= 0.98
