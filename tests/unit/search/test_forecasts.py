"""Forecasts of measurements: quantiles of mixtures, noise, and the speed of the machine."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from objectives.arrays import FloatArray
from objectives.sla import Sla
from optimizer.config.problem import Problem
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import Candidate
from optimizer.core.trial import LoadPoint, Trial
from optimizer.search.acquisition import mixture_quantiles
from optimizer.search.candidate_selector import CandidateSelector, fit_surrogate
from optimizer.search.gaussian_process import NOISE_SCALES, FantasyProcess, ResidualProcess
from optimizer.search.simulation_error import (
    MOMENT_NOISE,
    TAIL_NOISE,
    THROUGHPUT_NOISE,
    Residuals,
    SimulationErrorModel,
)
from optimizer.search.surrogate import SAMPLES
from optimizer.simulator.predicted_metrics import ModelErrors
from optimizer.simulator.speed_correction import fit_speed_correction
from tests.conftest import measure_known_server, measurement

ERRORS = ModelErrors(throughput=0.1, tail=0.1)
SPACE = SearchSpace((1, 8, 32), ("off", 0, 500), instance_count=(1, 2))
PROBLEM = Problem("m", SPACE, 1, 32, sla=Sla.from_bounds({"p95": 20.0}), cpu_count=2)
BATCHED = Candidate(32, True)
LEVELS = (0.5, 0.025, 0.975)
numbers = st.floats(-5, 5, allow_nan=False)
deviations = st.floats(1e-4, 3, allow_nan=False)


def trial(number: int, candidate: Candidate, *loads: int, probe_ms: float | None = None) -> Trial:
    measured = [
        (LoadPoint(1, load), replace(measure_known_server(candidate, load, 1), speed_probe_ms=probe_ms))
        for load in loads
    ]
    return Trial(number, candidate, tuple(measured))


BEFORE = [trial(0, Candidate(1), 4), trial(1, BATCHED, 4, 16)]


# -- mixtures -----------------------------------------------------------------------------------------------------


def test_one_component_has_the_quantiles_of_a_normal_distribution() -> None:
    quantiles = mixture_quantiles(np.ones(1), np.array([[2.0, -1.0]]), np.array([[0.5, 3.0]]), LEVELS)
    assert quantiles == pytest.approx(np.array([norm.ppf(level, [2.0, -1.0], [0.5, 3.0]) for level in LEVELS]))


def test_components_far_apart_share_the_quantiles() -> None:
    """The lower component has a probability of 0.3, and so all levels below 0.3."""
    means, spreads = np.array([[-100.0], [100.0]]), np.ones((2, 1))
    low, high = mixture_quantiles(np.array([0.3, 0.7]), means, spreads, [0.15, 0.65])[:, 0]
    assert low == pytest.approx(-100.0)
    assert high == pytest.approx(100.0)


@given(
    st.lists(st.tuples(st.floats(0.01, 1), numbers, deviations), min_size=1, max_size=6),
    st.lists(st.floats(0.001, 0.999), min_size=2, max_size=4),
)
def test_as_much_probability_as_the_level_is_below_a_quantile(
    components: list[tuple[float, float, float]], levels: list[float]
) -> None:
    weights, means, spreads = (np.array(column) for column in zip(*components, strict=True))
    probabilities = weights / weights.sum()
    quantiles = mixture_quantiles(probabilities, means[:, None], spreads[:, None], sorted(levels))[:, 0]
    below = [float(probabilities @ norm.cdf(quantile, means, spreads)) for quantile in quantiles]
    assert below == pytest.approx(sorted(levels), abs=1e-6)
    assert list(quantiles) == sorted(quantiles)


# -- forecasts of measurements ------------------------------------------------------------------------------------


def test_the_noise_of_a_new_deployment_and_measurement_widens_the_interval() -> None:
    """The interval without noise has the uncertainty of the mean. The noise of both processes adds to a latency."""
    surrogate, widths = fit_surrogate(PROBLEM, BEFORE), []
    for log_noise in ((0.0, 0.0), (0.3, 0.4)):
        quantiles = surrogate.measurement_quantiles([(BATCHED, 16)], LEVELS, log_noise=log_noise)
        widths.append([math.log(high / low) for _, low, high in (column[:, 0] for column in quantiles)])
    added = [math.sqrt(wide**2 - narrow**2) for narrow, wide in zip(*widths, strict=True)]
    exact = [2 * norm.ppf(0.975) * noise for noise in (0.3, 0.5)]  # of a normal distribution
    assert added == pytest.approx(exact, rel=0.01)


def test_the_noise_of_a_measurement_is_that_of_a_usual_one_at_the_estimated_scale() -> None:
    relative = np.array([1.5, 1.5, 4.0])
    values = np.array([[0.0, 0.0], [0.3, 0.5], [-0.3, -0.5]])  # at equal inputs, so all of it is noise
    correction = SimulationErrorModel(Residuals(np.zeros((3, 8)), values, [0, 1, 2], relative, np.zeros(3)), ERRORS)
    ((throughput, tail),) = correction.measurement_noise()
    assert correction.noise_scale == max(NOISE_SCALES)
    assert throughput == pytest.approx(correction.noise_scale * math.hypot(MOMENT_NOISE, 1.5 * THROUGHPUT_NOISE))
    assert tail == pytest.approx(max(NOISE_SCALES) * 1.5 * TAIL_NOISE)


def test_the_mean_and_the_deviation_of_samples_are_those_of_the_posterior() -> None:
    surrogate = fit_surrogate(PROBLEM, BEFORE)
    cells = [(Candidate(8, True), 2), (Candidate(8, True), 3), (BATCHED, 16), (Candidate(1, instance_count=2), 8)]
    for _, posterior in surrogate.weighted_posteriors:
        samples = posterior.samples(cells, 4000, np.random.default_rng(0))
        (expected,) = posterior.posteriors(cells)
        assert samples.mean(axis=0)[:, 0] == pytest.approx(expected.mean[:, 0])
        assert samples.mean(axis=0)[:, 1:] == pytest.approx(expected.log_latencies)
        assert samples[..., 0].std(axis=0) == pytest.approx(expected.std[:, 0], rel=0.1)
        at_loads = np.corrcoef(samples[:, 0, 0], samples[:, 1, 0])[0, 1]
        assert at_loads > 0.5, "errors at two loads of one configuration are alike"
    assert surrogate.samples(cells, 2).shape == (2 * SAMPLES, len(cells), 2)


def test_a_configuration_unlike_the_measured_ones_has_a_wider_interval() -> None:
    surrogate = fit_surrogate(PROBLEM, BEFORE)
    (_, low, high), (_, far_low, far_high) = (
        surrogate.measurement_quantiles([cell], LEVELS)[0][:, 0]
        for cell in ((BATCHED, 16), (Candidate(8, True, 500, instance_count=2), 32))
    )
    assert far_high / far_low > 1.5 * high / low


@pytest.mark.parametrize("fixed_ms", [4.0, 0.2])
def test_without_statistics_the_time_of_larger_batches_is_uncertain(fixed_ms: float) -> None:
    """The interval covers a server whose batches all take the same time, and one in proportion to their size."""

    def measured(candidate: Candidate, load: int, batch: int) -> Trial:
        rounds, batch_ms = load / batch, fixed_ms + (4.2 - fixed_ms) * batch
        return Trial(0, candidate, ((LoadPoint(1, load), measurement(1e3 * batch / batch_ms, batch_ms * rounds)),))

    before = [measured(Candidate(1), 1, 1), replace(measured(Candidate(1), 4, 1), number=1)]
    surrogate = fit_surrogate(PROBLEM, before)
    quantiles = surrogate.measurement_quantiles([(BATCHED, 32)], LEVELS)
    truth = measured(BATCHED, 32, 32).measurements[0][1]
    throughput, latency = (column[:, 0] for column in quantiles)
    assert throughput[1] <= (truth.throughput_infer_per_sec or 0) <= throughput[2]
    assert latency[1] <= (truth.latency_p95_ms or 0) / 1e3 <= latency[2]


def test_without_statistics_samples_promise_different_gains_where_nothing_was_measured() -> None:
    """The mean over one more sample differs each time, and is the same again with the same seed."""
    far = [(Candidate(32, True, instance_count=2), 32)]

    def means(seed: int) -> list[float]:
        surrogate = fit_surrogate(PROBLEM, BEFORE, seed)
        return [float(surrogate.improvements(far, samples)[0]) for samples in range(1, SAMPLES + 1)]

    first = means(0)
    assert len(set(first)) == SAMPLES
    assert max(first) > 1.1 * min(first)
    assert means(0) == first
    assert means(1) != first


def test_a_slow_machine_is_forecast_to_serve_less() -> None:
    """The machine is at its median speed in the first forecast, and slower by a fifth in the second."""
    trials = [trial(0, Candidate(1), 4, probe_ms=80.0), trial(1, Candidate(8, True), 8, probe_ms=100.0)]
    trials += [trial(2, BATCHED, 4, 16, probe_ms=110.0)]
    surrogate, slope = fit_surrogate(PROBLEM, trials), fit_speed_correction(trials, PROBLEM).slope
    assert slope > 0.2
    (usual, latency), (slow, slow_latency) = (
        surrogate.measurement_quantiles([(BATCHED, 16)], LEVELS, probe_ms) for probe_ms in (100.0, 120.0)
    )
    assert usual == pytest.approx(surrogate.measurement_quantiles([(BATCHED, 16)], LEVELS)[0])
    # the wider intervals of the samples move the median of their mixture a little
    assert slow[0, 0] == pytest.approx(usual[0, 0] / 1.2**slope, rel=0.01)
    assert slow_latency[0, 0] == pytest.approx(latency[0, 0] * 1.2**slope, rel=0.01)
    assert slow[2, 0] / slow[1, 0] > usual[2, 0] / usual[1, 0], "the slope is uncertain"


@pytest.mark.parametrize(("size", "load"), [(16, 16), (64, 64), (256, 200)])
def test_a_configuration_outside_the_space_has_a_forecast_for_batches_of_any_size(size: int, load: int) -> None:
    selector, candidate = CandidateSelector(PROBLEM), Candidate(size, True)
    selector.fit(BEFORE)
    made, measured = selector.forecast(candidate, load, None), measure_known_server(candidate, load, 1)
    assert made is not None
    assert measured.throughput_infer_per_sec is not None
    assert measured.latency_p95_ms is not None
    assert made.throughput_infer_per_sec_low < measured.throughput_infer_per_sec < made.throughput_infer_per_sec_high
    assert made.latency_ms_low < measured.latency_p95_ms < made.latency_ms_high


def test_a_selector_without_a_measurement_makes_no_forecast() -> None:
    selector = CandidateSelector(PROBLEM)
    selector.fit([Trial(0, Candidate(1), status="failed", reason="out of memory")])
    assert selector.forecast(BATCHED, 16, None) is None
    selector.fit(BEFORE)
    made = selector.forecast(BATCHED, 16, None)
    assert made is not None
    assert made.latency == "latency-p95"
    assert made.throughput_infer_per_sec == pytest.approx(
        measure_known_server(BATCHED, 16, 1).throughput_infer_per_sec, rel=0.1
    )


def test_a_cell_that_is_being_measured_counts_as_measured_with_its_prediction() -> None:
    def kernel(a: FloatArray, b: FloatArray) -> FloatArray:
        return np.asarray(0.04 * np.exp(-(np.subtract.outer(a[:, 0], b[:, 0]) ** 2)))

    inputs, cells, running = (np.array(values)[:, None] for values in ([0.0, 1.0, 2.0], [0.5, 3.0, 9.0], [3.1, 1.4]))
    process = ResidualProcess(kernel, inputs, 0.01 * np.eye(3), np.array([0.1, 0.2, -0.1]))
    mean, deviation = FantasyProcess(process, running, 0.01 * np.eye(2)).predict(cells)
    covariance = process.covariance(running, running) + process.noise_scale**2 * 0.01 * np.eye(2)
    cross = process.covariance(cells, running)
    usual_mean, usual_deviation = process.predict(cells)
    assert mean == pytest.approx(usual_mean)
    assert deviation**2 == pytest.approx(usual_deviation**2 - np.diag(cross @ np.linalg.solve(covariance, cross.T)))
