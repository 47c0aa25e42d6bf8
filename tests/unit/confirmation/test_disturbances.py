"""Tests of the correction of a search for the CPU time that other programs took."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import multivariate_t

from objectives.latency_sketch import sketch_latencies
from objectives.metrics import Measurement
from objectives.sla import Sla
from optimizer.config.problem import Problem
from optimizer.confirmation.disturbances import (
    POINT_NOISE,
    PRIOR_POINTS,
    DisturbanceCorrection,
    fit_disturbance_correction,
)
from optimizer.confirmation.machine_states import (
    LATENCY_SLOPE,
    SLOPE_FACTORS,
    TAIL,
    THROUGHPUT_SLOPE,
    disturbance_limit,
    was_search_disturbed,
)
from optimizer.confirmation.plan import correct_search_points, plan_tests
from optimizer.core.trial import LoadPoint, Point, Trial, latest_points
from tests.curve_model import CurveModel
from tests.random_server import BOUND_MS, FAST, FASTER, drawn_problem, with_measured

PROBLEM = replace(drawn_problem(), cpu_count=2)
HALF_SHARE = 0.5  # CPU share of other processes
SERVED = 100.0  # requests per second for each request in flight
LATENCY_MS = 10.0


def trial(*shares: float | None, p95_ms: float = LATENCY_MS) -> Trial:
    """Return a trial with a measurement for each CPU share of other processes."""
    return Trial(
        0,
        FAST,
        tuple(
            (
                LoadPoint(1, load),
                Measurement(
                    SERVED * load, latency_p95_ms=p95_ms, stable=True, measure_seconds=1.0, other_cpu_share=share
                ),
            )
            for load, share in enumerate(shares, 1)
        ),
    )


def fitted(*trials: Trial, problem: Problem = PROBLEM) -> DisturbanceCorrection:
    """Return the correction without a performance model, which has the slopes of the prior."""
    return fit_disturbance_correction(latest_points(trials), trials, problem, lambda points: None)


@pytest.mark.parametrize(("shares", "limit"), [((None,), 0.1), ((0.0, 0.2, 0.2), 0.3)])
def test_the_limit_of_disturbances_follows_what_was_usual_in_the_search(
    shares: Sequence[float | None], limit: float
) -> None:
    assert disturbance_limit([trial(*shares)]) == pytest.approx(limit)
    (other_worker,) = with_measured([trial(*(9 * [0.9]))], measure_seconds=None)
    assert disturbance_limit([trial(*shares), other_worker]) == pytest.approx(limit), "it is another machine"


def test_each_node_of_a_cluster_has_its_own_limit() -> None:
    (shared,) = with_measured([trial(0.3, 0.4, 0.4)], node="shared")
    (quiet,) = with_measured([trial(0.0, 0.0, 0.02)], node="quiet")
    trials = [shared, quiet]
    assert disturbance_limit(trials, "shared") == pytest.approx(0.5)
    assert disturbance_limit(trials, "quiet") == pytest.approx(0.1)
    assert disturbance_limit(trials, "new") == pytest.approx(0.1 + 0.16), "the median of all nodes"


@pytest.mark.parametrize("shares", [(), (None, None), (0.0, 0.05, 0.09), (0.0, 0.0, 0.0, 0.0, HALF_SHARE)])
def test_a_search_that_was_seldom_disturbed_is_not_corrected(shares: Sequence[float | None]) -> None:
    assert not was_search_disturbed([trial(*shares)])
    correction = fitted(trial(*shares))
    assert correction == DisturbanceCorrection()
    points = latest_points([trial(*shares)])
    assert correction.slow_points(correction.correct_points(points)) == points


def test_a_machine_that_is_always_shared_is_in_its_usual_state() -> None:
    correction = fitted(trial(HALF_SHARE, HALF_SHARE, HALF_SHARE))
    assert correction.expected_slowdown == pytest.approx(0.0)
    points = latest_points([trial(HALF_SHARE, HALF_SHARE, HALF_SHARE)])
    assert correction.correct_points(points) == points


@pytest.mark.parametrize("disturbed", [3, 4])
def test_the_expected_slowdown_is_that_of_the_percentile_over_all_requests(disturbed: int) -> None:
    """The tail of the drawn latencies falls as the docstring says. The slow state serves fewer requests."""
    quiet = 10 - disturbed
    correction = fitted(trial(*[0.0] * quiet, *[HALF_SHARE] * disturbed))
    random = np.random.default_rng(7)
    of_usual = np.exp(TAIL * random.standard_exponential(200_000 * quiet))
    served = round(200_000 * disturbed / 2**THROUGHPUT_SLOPE)
    of_slow = 2**LATENCY_SLOPE * np.exp(TAIL * random.standard_exponential(served))
    expected = math.log(np.quantile(np.append(of_usual, of_slow), 0.99) / np.quantile(of_usual, 0.99))
    assert correction.expected_slowdown == pytest.approx(expected, abs=0.01)


def test_percentiles_rise_to_what_is_expected_over_all_states() -> None:
    sketch = sketch_latencies(np.full(100, LATENCY_MS))
    correction = fitted(trial(0.0, 0.0, HALF_SHARE))
    expected = math.exp(correction.expected_slowdown)
    point = latest_points([trial(0.0)])[0]
    point = replace(point, measurement=replace(point.measurement, latency_avg_ms=5.0, latency_sketch=sketch))
    slow = correction.slow_points([point])[0].measurement
    assert slow.latency_p95_ms == pytest.approx(LATENCY_MS * expected)
    assert slow.latency_avg_ms == 5.0, "bursts change the average by less"
    share = Sla.from_bounds({"p97": 20.0}).share_of_bound
    assert share(slow) == pytest.approx(expected * share(point.measurement), rel=0.03)


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0, 1.5])
def test_slopes_are_fitted_and_measurements_corrected_by_them(factor: float) -> None:
    """Deployments differ by small factors that are no effect of other processes."""
    latency_slope, throughput_slope = factor * LATENCY_SLOPE, factor * THROUGHPUT_SLOPE

    def disturbed(point: Point) -> Point:
        measured, speed = point.measurement, math.exp(0.02 * point.trial)
        cpu_share_left = 1 - (measured.other_cpu_share or 0.0)
        latency_ms = LATENCY_MS / speed / cpu_share_left**latency_slope
        served = SERVED * point.load.concurrency * speed * cpu_share_left**throughput_slope
        return replace(
            point,
            measurement=replace(
                measured,
                throughput_infer_per_sec=served,
                latency_p95_ms=latency_ms,
                latency_avg_ms=latency_ms,
                latency_sketch=sketch_latencies(np.full(100, latency_ms)),
            ),
        )

    def fit(points: Sequence[Point]) -> CurveModel:
        """Return the model with the mean performance of ``points``."""
        latency_ms = np.mean([point.measurement.latency_p95_ms or 0.0 for point in points])
        served = np.mean([point.throughput_infer_per_sec / point.load.concurrency for point in points])
        return CurveModel(lambda load: float(served) * load, lambda load: float(latency_ms) / 1e3)

    trials = [replace(trial(*[0.0, HALF_SHARE, 0.9] * 5), number=number) for number in range(8)]
    points = [disturbed(point) for point in latest_points(trials)]
    correction = fit_disturbance_correction(points, trials, PROBLEM, fit)
    assert correction.latency_slope == pytest.approx(latency_slope, abs=0.02)
    assert correction.throughput_slope == pytest.approx(throughput_slope, abs=0.02)
    median_share = HALF_SHARE
    median_measurements = {
        point.trial: point.measurement for point in points if point.measurement.other_cpu_share == median_share
    }
    for point in correction.correct_points(points):
        expected, corrected = median_measurements[point.trial], point.measurement
        served = corrected.throughput_infer_per_sec or 0.0
        assert served / point.load.concurrency == pytest.approx(
            SERVED * math.exp(0.02 * point.trial) * HALF_SHARE**throughput_slope, rel=0.05
        )
        assert corrected.latency_p95_ms == pytest.approx(expected.latency_p95_ms, rel=0.05)
        share = Sla.from_bounds({"p97": 20.0}).share_of_bound
        assert share(corrected) == pytest.approx(share(expected), rel=0.08)


def test_the_factor_on_the_slopes_is_a_posterior_mean() -> None:
    """The errors of a metric follow a multivariate t distribution: their variance has an inverse gamma prior."""
    random = np.random.default_rng(11)
    shares = [0.1, 0.2, 0.3, 0.45, 0.6]
    log_falls = -np.log((1 - np.array(shares)) / (1 - np.median(shares)))
    errors = np.stack([0.6 * LATENCY_SLOPE * log_falls, -0.9 * THROUGHPUT_SLOPE * log_falls], axis=1)
    errors += random.normal(0.0, [0.2, 0.05], errors.shape)
    measured = trial(*shares)
    measured = replace(
        measured,
        measurements=tuple(
            (
                load,
                replace(
                    measurement,
                    latency_p95_ms=LATENCY_MS * math.exp(latency_error),
                    throughput_infer_per_sec=SERVED * load.concurrency * math.exp(throughput_error),
                ),
            )
            for (load, measurement), (latency_error, throughput_error) in zip(
                measured.measurements, errors, strict=True
            )
        ),
    )
    model = CurveModel(lambda load: SERVED * load, lambda load: LATENCY_MS / 1e3)
    correction = fit_disturbance_correction(latest_points([measured]), [measured], PROBLEM, lambda points: model)
    covariance = POINT_NOISE**2 * np.eye(len(shares))
    log_likelihoods = [
        sum(
            multivariate_t.logpdf(errors[:, metric] - factor * slope * log_falls, shape=covariance, df=PRIOR_POINTS)
            for metric, slope in enumerate((LATENCY_SLOPE, -THROUGHPUT_SLOPE))
        )
        for factor in SLOPE_FACTORS
    ]
    expected = np.average(SLOPE_FACTORS, weights=np.exp(log_likelihoods))
    assert correction.latency_slope == pytest.approx(expected * LATENCY_SLOPE)
    assert correction.throughput_slope == pytest.approx(expected * THROUGHPUT_SLOPE)


def test_programs_that_take_the_time_that_the_server_leaves_idle_are_no_disturbance() -> None:
    """A configuration with more instances uses more CPU time, so that others get less of it."""
    first_trial, second_trial = trial(0.9, 0.8, 0.7), replace(trial(0.4, 0.3, 0.2), number=1, candidate=FASTER)
    points = latest_points([first_trial, second_trial])
    as_measured = CurveModel(lambda load: SERVED * load, lambda load: LATENCY_MS / 1e3)
    correction = fit_disturbance_correction(points, [first_trial, second_trial], PROBLEM, lambda points: as_measured)
    assert correction.latency_slope is not None
    assert correction.latency_slope < 0.1 * LATENCY_SLOPE
    assert correction.expected_slowdown < 0.1
    unmet = replace(PROBLEM, sla=Sla.from_bounds({"p95": 0.1 * LATENCY_MS}))
    _, slope_only = correct_search_points([first_trial, second_trial], unmet, lambda points: as_measured)
    assert slope_only.latency_slope == pytest.approx(correction.latency_slope), "although no point meets the SLA"
    assert slope_only.correct_points(points) == slope_only.slow_points(points) == points


def test_the_points_of_a_disturbed_search_are_corrected_if_one_meets_the_sla_then() -> None:
    trials = [trial(0.0, 0.0, HALF_SHARE)]
    measured, expected = latest_points(trials), fitted(*trials)
    points, correction = correct_search_points(trials, PROBLEM, lambda points: None)
    assert points == expected.correct_points(measured) != measured
    assert correction == expected
    assert correction.expected_slowdown > 0
    bounded = replace(PROBLEM, sla=Sla.from_bounds({"p95": 0.1 * LATENCY_MS}))
    points, correction = correct_search_points(trials, bounded, lambda points: None)
    assert points == measured
    assert correction == DisturbanceCorrection(latency_slope=expected.latency_slope)


def test_a_server_on_a_gpu_is_not_expected_to_be_slower() -> None:
    assert fitted(trial(0.0, 0.0, HALF_SHARE)).expected_slowdown > 0
    assert fitted(trial(0.0, 0.0, HALF_SHARE), problem=replace(PROBLEM, cpu_count=None)) == DisturbanceCorrection()


def test_latencies_at_request_rates_are_not_corrected() -> None:
    correction = fitted(trial(0.0, 0.0, HALF_SHARE), problem=replace(PROBLEM, open_loop=True))
    mean = (2 + math.exp(LATENCY_SLOPE * math.log(2) / TAIL)) / 3  # a request rate is served in each state
    assert correction.expected_slowdown == pytest.approx(TAIL * math.log(mean))
    points = latest_points([trial(0.0, 0.0, HALF_SHARE)])
    assert correction.correct_points(points) == points


def test_candidates_are_ranked_with_the_latency_that_is_expected() -> None:
    faster = replace(trial(0.0, 0.0, 0.0, p95_ms=0.9 * BOUND_MS), candidate=FASTER)
    safer = replace(trial(0.0, 0.0, p95_ms=0.3 * BOUND_MS), number=1)
    over = replace(trial(HALF_SHARE, HALF_SHARE, p95_ms=8 * BOUND_MS), number=2)
    for trials, ranked in (([faster, safer], (0, 1)), ([faster, safer, over], (1, 0))):
        points, correction = latest_points(trials), fitted(*trials)
        corrected = correction.correct_points(points)
        assert plan_tests(None, trials, corrected, PROBLEM, correction).finalists == ranked


def test_candidates_that_would_all_miss_the_bound_are_ranked_as_measured() -> None:
    trials = [trial(0.0, 0.0, p95_ms=0.9 * BOUND_MS), replace(trial(HALF_SHARE, p95_ms=8 * BOUND_MS), number=1)]
    correction = fitted(*trials)
    corrected = correction.correct_points(latest_points(trials))
    assert plan_tests(None, trials, corrected, PROBLEM, correction).finalists == (0,)
