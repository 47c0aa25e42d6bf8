"""Samples of a server without statistics agree with the measurements, and vary in other configurations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from objectives.arrays import FloatArray
from objectives.metrics import Measurement
from optimizer.config.problem import Problem
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import Candidate
from optimizer.core.trial import LoadPoint, Point
from optimizer.simulator.black_box_fit import DEVIATIONS, THROUGHPUT_ERROR, sample_parameters
from optimizer.simulator.dynamic_batching_model import DynamicBatchingModel, fit, sample_models
from optimizer.simulator.fitted_parameters import INTRA_OP_THREAD_COUNT, ExecutionSettings, FittedOverheads
from optimizer.simulator.predicted_metrics import ConfigurationLoad
from optimizer.simulator.scenario import ServiceTimes

LATENCY = "latency-p95"
PROBLEM = Problem("m", SearchSpace((1, 16), ("off", 0), ("none",), (1, 2, 4)), 1, 32)
SINGLE, BATCHED, FOUR = Candidate(1), Candidate(16, True), Candidate(16, True, instance_count=4)
COUNT = 40


def server(fixed_s: float, per_sample_s: float, contention: float = 0.3) -> DynamicBatchingModel:
    """Return a server whose batches of b samples take ``fixed_s + per_sample_s * b``."""

    def times(settings: ExecutionSettings) -> ServiceTimes:
        alone = fixed_s + per_sample_s * np.arange(1, 17)
        return ServiceTimes(np.outer(alone, 1 + contention * np.arange(settings.instances)))

    return DynamicBatchingModel(times, 1, FittedOverheads(2e-4), seed=7)


SERVER = server(4e-3, 1e-3)


def points(truth: DynamicBatchingModel, cells: Sequence[ConfigurationLoad]) -> list[Point]:
    """Return measurements of throughput and latency alone."""
    return [
        Point(
            number,
            candidate,
            LoadPoint(1, load),
            Measurement(
                throughput_infer_per_sec=result.throughput_infer_per_sec,
                latency_p95_ms=1e3 * result.latency_p95_s,
                stable=True,
            ),
        )
        for number, ((candidate, load), result) in enumerate(zip(cells, truth.simulate(cells), strict=True))
    ]


def samples(measured: Sequence[Point], seed: int = 0, count: int = COUNT) -> list[DynamicBatchingModel]:
    return sample_models(fit(measured, PROBLEM, LATENCY, seed), measured, PROBLEM, LATENCY, count)


def throughputs(models: Sequence[DynamicBatchingModel], cell: ConfigurationLoad) -> FloatArray:
    return np.array([model.simulate([cell])[0].throughput_infer_per_sec for model in models])


SMALL = [(SINGLE, 1), (SINGLE, 4)]
MANY = [*SMALL, (BATCHED, 4), (BATCHED, 8), (BATCHED, 32), (FOUR, 8), (FOUR, 32)]


@pytest.mark.parametrize("cells", [SMALL, MANY])
def test_samples_agree_with_the_measured_points(cells: Sequence[ConfigurationLoad]) -> None:
    models = samples(points(SERVER, cells))
    for cell, result in zip(cells, SERVER.simulate(cells), strict=True):
        ratios = throughputs(models, cell) / result.throughput_infer_per_sec
        assert np.median(ratios) == pytest.approx(1.0, abs=0.15)
        assert np.std(np.log(ratios)) < 0.3


def test_a_batch_size_never_measured_may_take_any_time_between_constant_and_proportional() -> None:
    """The throughput of batches of 16 is that of single requests, or several times as much."""
    models = samples(points(SERVER, SMALL))
    gain = throughputs(models, (BATCHED, 32)) / throughputs(models, (SINGLE, 4))
    low, high = np.quantile(gain, [0.1, 0.9])
    assert low < 1.5
    assert high > 3


def test_instances_never_measured_may_share_the_device() -> None:
    models = samples(points(SERVER, [(SINGLE, 4), (BATCHED, 4), (BATCHED, 32)]))
    gain = throughputs(models, (FOUR, 32)) / throughputs(models, (BATCHED, 32))
    assert np.quantile(gain, 0.9) / np.quantile(gain, 0.1) > 1.8


def test_threads_that_exceed_the_cores_slow_all_samples_down() -> None:
    """Only one thread was measured. Two instances of four threads have two cores."""
    problem = replace(PROBLEM, space=replace(PROBLEM.space, fields={INTRA_OP_THREAD_COUNT: ("1", "4")}), cpu_count=2)
    one_thread, four_threads = (
        Candidate(16, True, instance_count=2, fields=((INTRA_OP_THREAD_COUNT, count),)) for count in "14"
    )
    measured = points(SERVER, [(one_thread, 4), (one_thread, 32)])
    models = sample_models(fit(measured, problem, LATENCY), measured, problem, LATENCY, COUNT)
    assert (throughputs(models, (four_threads, 32)) < throughputs(models, (one_thread, 32))).all()


def test_further_measurements_narrow_the_samples() -> None:
    spreads = [np.std(np.log(throughputs(samples(points(SERVER, cells)), (BATCHED, 16)))) for cells in (SMALL, MANY)]
    assert spreads[1] < 0.6 * spreads[0]


def test_a_seed_gives_the_same_samples() -> None:
    measured = points(SERVER, SMALL)
    first_samples, repeated_samples, samples_of_other_seed = (
        throughputs(samples(measured, seed, 3), (BATCHED, 16)) for seed in (0, 0, 1)
    )
    assert first_samples.tolist() == repeated_samples.tolist()
    assert first_samples.tolist() != samples_of_other_seed.tolist()
    assert len(set(first_samples.tolist())) == 3


def test_intervals_cover_servers_of_many_kinds() -> None:
    """The true throughput of large batches is within 80 % intervals for about 80 % of simulated servers."""
    rng, inside = np.random.default_rng(1), []
    for _ in range(20):
        share, level = rng.uniform(), 10 ** rng.uniform(-3, -2)
        truth = server(level * share, level * (1 - share), rng.uniform(0.1, 1))
        low, high = np.quantile(throughputs(samples(points(truth, SMALL), count=20), (FOUR, 32)), [0.1, 0.9])
        inside.append(low <= throughputs([truth], (FOUR, 32))[0] <= high)
    assert np.mean(inside) >= 0.6


def test_samples_of_a_linear_simulation_have_the_exact_posterior() -> None:
    """One measured quantity, the first parameter: its variance is that of a product of two normal densities."""
    simulated = np.array([[1.0, -1.0]])  # the tail ratio does not depend on the parameters
    medians = np.arange(5.0)
    vectors = sample_parameters(
        lambda vector: vector[0] * simulated, simulated, [(1, ())], np.array([1.0, 1, 2, 3, 4]), medians, 2000, 0
    )
    prior, error = DEVIATIONS[0] ** 2, THROUGHPUT_ERROR**2 + 0.15**2
    first = np.array(vectors)[:, 0]
    assert first.mean() == pytest.approx(prior / (prior + error), abs=0.02)
    assert first.var() == pytest.approx(prior * error / (prior + error), rel=0.1)
    assert np.std(np.array(vectors)[:, 1:], axis=0) == pytest.approx(DEVIATIONS[1:], rel=0.1)


def test_eight_samples_take_few_simulations() -> None:
    calls = []

    def simulate(vector: FloatArray) -> FloatArray:
        calls.append(vector)
        return np.array([[-vector[0], np.logaddexp(vector[0], vector[3])]])

    medians = np.zeros(5)
    sample_parameters(simulate, simulate(medians), [(1, ())], medians, medians, 8, 0)
    assert len(calls) <= 60


def test_a_repeated_cell_has_the_performance_of_a_single_one() -> None:
    first, other, again = SERVER.simulate([(FOUR, 8), (SINGLE, 1), (FOUR, 8)])
    assert [first, other] == [*SERVER.simulate([(FOUR, 8)]), *SERVER.simulate([(SINGLE, 1)])]
    assert first == again != other
