"""The correction of measurements for the speed of the machine, and the weight of disturbed ones."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from objectives.metrics import Measurement
from objectives.sla import Sla
from optimizer.config.problem import Problem
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import Candidate
from optimizer.core.trial import LoadPoint, Point, Trial, latest_points
from optimizer.simulator.speed_correction import (
    SLOPE_STD,
    SpeedCorrection,
    disturbance_noise,
    fit_speed_correction,
    is_comparable,
    probe_reliability,
)

BASELINE, OTHER = Candidate(1), Candidate(8, True)
PROBE_MS, SLOWER = 80.0, 1.5


def problem(cpu_count: int | None = 2, *, open_loop: bool = False) -> Problem:
    space = SearchSpace((1, 8), ("off", 0))
    sla = Sla.from_bounds({"p95": 20.0})
    return Problem("m", space, 1, 32, sla=sla, cpu_count=cpu_count, open_loop=open_loop)


def measured(throughput: float, slowness: float = 1.0, slope: float = 1.0, **fields: float | None) -> Measurement:
    """Return a measurement on a machine of this slowness, which slows the model by its power ``slope``."""
    factor = slowness**slope
    values = {"latency_p95_ms": 10.0 * factor, "speed_probe_ms": PROBE_MS * slowness, "stable": True, **fields}
    return Measurement(throughput / factor, **values)


def trial(number: int, candidate: Candidate, *measurements: Measurement) -> Trial:
    return Trial(number, candidate, tuple((LoadPoint(1, 4 + i), m) for i, m in enumerate(measurements)))


def drifted(slope: float, deployments: int = 2) -> list[Trial]:
    """Return trials of one candidate: the first half on a fast machine, the others on a slow one."""
    return [trial(i, BASELINE, measured(100.0, SLOWER ** (2 * i // deployments), slope)) for i in range(deployments)]


def at_different_loads(trials: list[Trial]) -> list[Trial]:
    """Return the trials with a load of its own for each, so that none repeats another."""
    return [
        replace(
            trial_of_study,
            measurements=tuple((LoadPoint(1, trial_of_study.number + 1), m) for _, m in trial_of_study.measurements),
        )
        for trial_of_study in trials
    ]


def test_without_a_probe_measurements_stay_the_same_objects() -> None:
    trials = [trial(i, BASELINE, measured(100.0, speed_probe_ms=None, other_cpu_share=0.0)) for i in range(3)]
    correction = fit_speed_correction(trials, problem())
    assert correction == SpeedCorrection()
    points = latest_points(trials)
    assert all(
        corrected_point.measurement is point.measurement
        for corrected_point, point in zip(correction.correct_points(points), points, strict=True)
    )


def test_equal_speeds_need_no_correction() -> None:
    correction = fit_speed_correction(drifted(0.0, 1) * 1 + [trial(1, OTHER, measured(300.0))], problem())
    assert correction.correct(measured(100.0)) == measured(100.0)


def test_a_single_probe_is_no_reference() -> None:
    assert fit_speed_correction(drifted(1.0, 1), problem()) == SpeedCorrection()


def test_request_rates_are_not_corrected() -> None:
    assert fit_speed_correction(drifted(1.0), problem(open_loop=True)) == SpeedCorrection()


def test_noise_of_the_probe_alone_corrects_nothing() -> None:
    trials = [trial(i, BASELINE, measured(100.0, slowness, 0.0)) for i, slowness in enumerate((0.99, 1.0, 1.02))]
    assert fit_speed_correction(trials, problem()).slope == 0


@pytest.mark.parametrize(("cpu_count", "prior"), [(2, 1.0), (None, 0.0)])
def test_without_repeated_measurements_the_prior_decides(cpu_count: int | None, prior: float) -> None:
    trials = at_different_loads(drifted(1.0, 16))
    correction = fit_speed_correction(trials, problem(cpu_count))
    assert correction.slope == pytest.approx(prior, abs=0.15)
    assert correction.error == pytest.approx(SLOPE_STD, rel=0.15)


@pytest.mark.parametrize("slope", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("cpu_count", [2, None])
def test_repeated_measurements_determine_the_slope(slope: float, cpu_count: int | None) -> None:
    of_one_pair, of_many_pairs = (fit_speed_correction(drifted(slope, count), problem(cpu_count)) for count in (2, 8))
    assert of_many_pairs.slope == pytest.approx(slope, abs=0.08)
    assert of_many_pairs.error < of_one_pair.error < SLOPE_STD
    assert slope / 2 <= of_one_pair.slope <= slope, "one pair weighs more than the prior"


def test_different_candidates_and_loads_say_nothing_about_the_slope() -> None:
    repeated = drifted(0.0, 8)
    assert fit_speed_correction(repeated, problem()).slope < 0.1
    assert fit_speed_correction(at_different_loads(repeated), problem()).slope > 0.5


def test_a_probe_that_changes_at_each_deployment_corrects_little() -> None:
    """The probes of a real search, in which the throughput did not follow them."""
    probes_ms = (10.1, 10.0, 9.4, 9.2, 15.4, 9.6, 17.0, 16.1, 15.8)
    trials = [trial(i, BASELINE, measured(100.0, probe / PROBE_MS, 0.0)) for i, probe in enumerate(probes_ms)]
    trials = at_different_loads(trials)
    assert fit_speed_correction(trials, problem()).slope < 0.4


@pytest.mark.parametrize(
    ("probes_ms", "reliability"),
    [
        ([10.0], 0.0),
        ([10.0, 10.0, 10.0], 0.0),
        ([10.0, 15.0] * 8, 0.0),
        ([10.0] * 8 + [15.0] * 8, 0.875),
        ([10.0, 10.1, 9.9, 10.2, 10.0], 0.0),
    ],
)
def test_only_a_speed_that_lasts_is_reliable(probes_ms: list[float], reliability: float) -> None:
    assert probe_reliability(probes_ms) == pytest.approx(reliability, abs=0.01)


def test_all_times_are_those_of_the_reference_speed() -> None:
    correction = SpeedCorrection(PROBE_MS, 1.0)
    slow = measured(100.0, SLOWER, queue_ms=3.0, compute_infer_ms=6.0)
    slow = replace(slow, batch_stats="4:10:3000000 8:2:900000", requests=500, measure_seconds=1.4)
    slow = replace(slow, output_tokens_per_sec=1600.0, responses_per_sec=800.0, ttft_p95_ms=9.0, itl_p95_ms=6.0)
    corrected = correction.correct(slow)
    assert corrected.throughput_infer_per_sec == pytest.approx(100.0)
    assert (corrected.output_tokens_per_sec, corrected.responses_per_sec) == pytest.approx((2400.0, 1200.0))
    assert (corrected.ttft_p95_ms, corrected.itl_p95_ms) == pytest.approx((6.0, 4.0))
    assert corrected.latency_p95_ms == pytest.approx(10.0)
    assert corrected.queue_ms == pytest.approx(2.0)
    assert corrected.compute_infer_ms == pytest.approx(4.0)
    assert corrected.batch_stats == "4:10:2000000 8:2:600000"
    assert (corrected.requests, corrected.measure_seconds) == (500, 1.4)
    assert corrected.speed_probe_ms == slow.speed_probe_ms
    assert correction.correct(Measurement(reason="timed out", speed_probe_ms=120.0)).throughput_infer_per_sec is None


def test_the_error_of_a_correction_grows_with_it_and_has_its_sign() -> None:
    correction = SpeedCorrection(PROBE_MS, 1.0, 0.2)
    assert correction.error_of(measured(1.0)) == 0
    assert correction.error_of(measured(1.0, SLOWER)) == pytest.approx(0.2 * math.log(SLOWER))
    assert correction.error_of(measured(1.0, 1 / SLOWER)) == pytest.approx(-0.2 * math.log(SLOWER))


def test_the_best_point_is_the_one_that_is_best_at_the_same_speed() -> None:
    trials = [
        trial(0, BASELINE, measured(100.0)),
        trial(1, OTHER, measured(130.0, SLOWER)),
        trial(2, BASELINE, measured(100.0, SLOWER)),
    ]
    points = latest_points(trials)
    raw = problem().best_point(points)
    best = fit_speed_correction(trials, problem()).best_point(points, problem())
    assert raw is not None
    assert best is not None
    assert (raw.candidate, best.candidate) == (BASELINE, OTHER)
    assert best in points, "points are returned as measured"


def test_a_bound_is_judged_at_the_reference_speed() -> None:
    slow = Point(0, OTHER, LoadPoint(1, 4), measured(100.0, SLOWER, latency_p95_ms=24.0))
    assert problem().best_point([slow]) is None
    assert SpeedCorrection(PROBE_MS, 1.0).best_point([slow], problem()) == slow


@pytest.mark.parametrize(
    ("values", "comparable"),
    [
        ({}, True),
        ({"stable": False}, False),
        ({"stable": False, "other_cpu_share": 0.05}, False),
        ({"stable": False, "other_cpu_share": 0.46}, True),
        ({"stable": False, "other_cpu_share": 0.46, "overloaded": True}, False),
        ({"stable": False, "other_cpu_share": 0.46, "throughput_infer_per_sec": None}, False),
    ],
)
def test_an_unstable_measurement_counts_if_a_disturbance_explains_it(
    values: dict[str, float], comparable: bool
) -> None:
    assert is_comparable(replace(measured(100.0), **values)) is comparable  # type: ignore[arg-type]


def test_a_disturbed_measurement_has_less_weight_but_some() -> None:
    def points(disturbed: float) -> list[Point]:
        quiet, noisy = measured(100.0), measured(disturbed, other_cpu_share=0.46, stable=False)
        return [Point(0, BASELINE, LoadPoint(1, 4), quiet), Point(1, OTHER, LoadPoint(1, 4), noisy)]

    def best(points: list[Point]) -> Point | None:
        return SpeedCorrection().best_point(points, problem())

    noise = disturbance_noise(points(1.0)[1].measurement)
    assert noise == pytest.approx(0.092)
    assert best(points(105.0)) == points(105.0)[0]
    assert best(points(115.0)) == points(115.0)[1]
    assert best(points(90.0)[1:]) == points(90.0)[1], "it is better than nothing"
