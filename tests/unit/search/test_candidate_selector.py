"""The search guided by simulation: its parts, and complete searches on simulated servers."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import optuna
import pytest

from objectives.batch_stats import BatchStatistic
from objectives.metrics import Forecast, Measurement
from objectives.sla import Sla
from optimizer.config.problem import Problem
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import Candidate
from optimizer.core.trial import LoadPoint, Point, Trial
from optimizer.search.candidate_selector import SHORTLIST, CandidateSelector, Decision, fit_surrogate
from optimizer.search.candidate_tracker import CandidateTracker
from optimizer.search.optuna_encoding import finished_trials, trial_from_attributes
from optimizer.search.simulated import minimum_gain_factor
from optimizer.search.simulation_error import SPEED_ERROR, Residuals, SimulationErrorModel, features, relative_noise
from optimizer.simulator.calibration import Observation, observe_point
from optimizer.simulator.dynamic_batching_model import fit
from optimizer.simulator.fitted_parameters import (
    ExecutionSettings,
    execution_settings,
    fit_service_times,
    relative_duration,
    with_fitted_slowdown,
)
from optimizer.simulator.predicted_metrics import ModelErrors, binding_latency
from optimizer.simulator.scenario import ClosedLoopLoad, Overheads
from optimizer.simulator.simulate import lognormal_jitter
from tests import simulated_results
from tests.simulation import linear_times, simulate

ERRORS = ModelErrors(throughput=0.1, tail=0.1)
THREADS = "parameters.intra_op_thread_count.string_value"
SPACE = SearchSpace((1, 8, 32), ("off", 0, 500, 2000), ("none", "max/2"), (1, 2, 3))
LOADS = (1, 4, 8, 16, 32)


def problem(space: SearchSpace = SPACE, p95_ms: float = 20.0) -> Problem:
    return Problem("m", space, space.request_batch_size, 32, sla=Sla.from_bounds({"p95": p95_ms}))


def served(candidate: Candidate, concurrency: int, *, counted: bool = True) -> Measurement:
    """Return the measurement of a simulated server with 3 ms + 0.3 ms a sample and a contention of 0.5."""
    service = linear_times(3e-3, 3e-4, max(candidate.max_batch_size, 1), 8, contention=0.5)
    overheads = Overheads(2e-4, 2e-4, 0.0, 5e-5)
    s = simulate(candidate, ClosedLoopLoad(concurrency), service, overheads, jitter=lognormal_jitter(0.1))
    if counted:
        return simulated_results.measurement_of(s, candidate)
    return Measurement(s.throughput_infer_per_sec, latency_p95_ms=s.latency_p95_s * 1e3, requests=500, stable=True)


def trial(number: int, candidate: Candidate, *loads: int, counted: bool = True) -> Trial:
    return Trial(
        number,
        candidate,
        tuple((LoadPoint(1, c), served(candidate, c, counted=counted)) for c in loads),
    )


BASELINES = (trial(0, Candidate(1), 4), trial(1, Candidate(32, True), 4, 16))


# -- statistics ---------------------------------------------------------------------------------------------------


def test_without_batch_statistics_all_executions_have_the_mean_size() -> None:
    measurement = Measurement(
        100.0, compute_infer_ms=5.0, compute_input_ms=0.5, compute_output_ms=0.5, mean_batch_size=3.8, requests=50
    )
    seen = observe_point(Point(0, Candidate(8, True), LoadPoint(2, 6), measurement))
    assert seen is not None
    assert seen.wall_s == pytest.approx(26 * 4 / 100)
    assert seen.batches == (BatchStatistic(4, 26, 26 * 6_000_000),)


def test_a_measurement_without_the_servers_part_is_no_observation() -> None:
    assert observe_point(Point(0, Candidate(1), LoadPoint(1, 1), Measurement(10.0, requests=10))) is None
    assert observe_point(Point(0, Candidate(1), LoadPoint(1, 1), Measurement(reason="gone"))) is None


# -- service times ------------------------------------------------------------------------------------------------


def observed(instances: int, seconds: float, size: int = 8, executions: int = 100) -> Observation:
    wall_s = seconds * executions / instances
    batch = BatchStatistic(size, executions, round(seconds * executions * 1e9))
    return Observation(instances, 64, wall_s, (batch,))


def test_a_group_that_was_measured_has_its_own_speed() -> None:
    groups = {
        ExecutionSettings(1): [observed(1, 0.010, 4), observed(1, 0.014, 8)],
        ExecutionSettings(2): [observed(2, 0.050)],
    }
    service_times = fit_service_times(groups, problem(), 8)
    alone = service_times.times(ExecutionSettings(1)).seconds
    assert alone[3, 0] == pytest.approx(0.010, rel=0.05)
    assert alone[7, 0] == pytest.approx(0.014, rel=0.05)
    assert service_times.times(ExecutionSettings(2)).seconds[7, 1] == pytest.approx(0.050, rel=0.05)


def test_a_group_never_measured_takes_the_nearest() -> None:
    service_times = fit_service_times(
        {ExecutionSettings(2): [observed(2, 0.050)], ExecutionSettings(8): [observed(8, 0.080)]}, problem(), 8
    )
    two_instances, three_instances = (
        service_times.times(ExecutionSettings(2)).seconds,
        service_times.times(ExecutionSettings(3)).seconds,
    )
    assert three_instances[7, :2] == pytest.approx(two_instances[7])
    assert three_instances[7, 2] > three_instances[7, 1]


@pytest.mark.parametrize(("slower", "share"), [(1.0, 0.0), (1.25 / 1.05, 1.0)])
def test_the_slowdown_by_busy_instances_is_fitted(slower: float, share: float) -> None:
    """The mean numbers of busy instances are 1.5 and 1.1, and ``slower`` is the ratio of the batch times."""
    groups = {
        ExecutionSettings(2): [
            replace(observed(2, seconds), wall_s=idle * observed(2, seconds).wall_s)
            for seconds, idle in ((0.010 * slower, 2.0), (0.010, 10.0))
        ]
    }
    fitted = with_fitted_slowdown(fit_service_times(groups, problem(), 8), groups)
    alone, both = fitted.times(ExecutionSettings(2)).seconds[7]
    assert both / alone == pytest.approx(1 + 0.5 * share)


def test_fields_of_the_batcher_make_no_group() -> None:
    fields = (("dynamic_batching.preserve_ordering", True), (THREADS, "2"))
    assert execution_settings(Candidate(8, True, instance_count=3, fields=fields)) == ExecutionSettings(
        3, ((THREADS, "2"),)
    )


@pytest.mark.parametrize("counted", [True, False])
def test_more_threads_than_cores_slow_each_other_down(counted: bool) -> None:
    """The number of cores is known, or derived from the space."""
    space = SearchSpace((8,), (0,), instance_count=(1, 2, 3), fields={THREADS: ("1", "2")})
    problem_of_cpus = replace(problem(space), cpu_count=2 if counted else None)
    one_thread, two_threads = (((THREADS, threads),) for threads in ("1", "2"))
    service_times = fit_service_times({ExecutionSettings(1, one_thread): [observed(1, 0.010)]}, problem_of_cpus, 8)

    def seconds(instances: int, fields: tuple[tuple[str, str], ...]) -> float:
        return float(service_times.times(ExecutionSettings(instances, fields)).seconds[7, instances - 1])

    assert seconds(1, one_thread) == pytest.approx(0.010)
    assert seconds(1, two_threads) < seconds(1, one_thread) < seconds(2, one_thread) < seconds(3, one_thread)
    assert seconds(2, two_threads) > 2 * seconds(1, two_threads)


def test_the_effect_of_unmeasured_thread_counts_stays_unknown() -> None:
    single = problem(SearchSpace((8,), (0,), instance_count=(1, 2), fields={THREADS: ("1",)}))
    assert relative_duration(ExecutionSettings(2, ((THREADS, "1"),)), 2, single) == relative_duration(
        ExecutionSettings(2), 2, problem()
    )
    many = replace(single, cpu_count=16)
    assert relative_duration(ExecutionSettings(1, ((THREADS, "0"),)), 1, many) == relative_duration(
        ExecutionSettings(1, ((THREADS, "16"),)), 1, many
    )
    assert math.isfinite(relative_duration(ExecutionSettings(2, ((THREADS, "inf"),)), 2, many))


# -- correction ---------------------------------------------------------------------------------------------------


def test_the_correction_is_the_measured_one_and_vanishes_far_away() -> None:
    inputs = np.array([[0.0] * 8, [0.0] * 7 + [0.1]])
    correction = SimulationErrorModel(
        Residuals(inputs, np.array([[0.3, 0.1], [0.3, 0.1]]), [0, 0], np.ones(2), np.zeros(2)), ERRORS
    )
    ((mean, deviation),) = correction.predict(np.array([[0.0] * 8, [50.0] * 8]))
    assert mean[0] == pytest.approx([0.3, 0.1], abs=0.05)
    assert mean[1] == pytest.approx([0.0, 0.0], abs=1e-6)
    assert deviation[1] == pytest.approx([math.hypot(SPEED_ERROR, 0.1), 0.1])
    assert (deviation[0] < 0.7 * deviation[1]).all()


def test_repeating_a_measurement_in_the_same_deployment_teaches_less_than_in_another() -> None:
    inputs, residuals = np.zeros((4, 8)), np.zeros((4, 2))
    same, apart = (
        SimulationErrorModel(Residuals(inputs, residuals, numbers, np.ones(4), np.zeros(4)), ERRORS)
        for numbers in ([0] * 4, [0, 1, 2, 3])
    )
    assert same.predict(inputs[:1])[0][1][0, 0] > 1.5 * apart.predict(inputs[:1])[0][1][0, 0]


def test_few_requests_and_windows_that_disagree_are_noise() -> None:
    point = Point(0, Candidate(1), LoadPoint(1, 1), Measurement(1.0, requests=500, stable=True))
    assert relative_noise(point) == 1
    assert relative_noise(replace(point, measurement=replace(point.measurement, requests=50))) > 3
    assert relative_noise(replace(point, measurement=replace(point.measurement, stable=False))) == 3


def test_a_disturbance_is_noise_in_proportion_to_the_cpus_that_others_took() -> None:
    def noise(share: float | None, *, stable: bool = True) -> float:
        measurement = Measurement(1.0, requests=500, stable=stable, other_cpu_share=share)
        return relative_noise(Point(0, Candidate(1), LoadPoint(1, 1), measurement))

    assert noise(None) == noise(0.0) == noise(0.1) == 1
    assert 1 < noise(0.2) < noise(0.46) < noise(0.46, stable=False)


def test_the_error_of_the_speed_correction_is_shared_by_points_of_the_same_speed() -> None:
    inputs, values = np.zeros((3, 8)), np.array([[0.2, 0.0], [0.2, 0.0], [0.2, 0.0]])

    def deviation(*speed_error: float) -> float:
        residuals = Residuals(inputs, values, [0, 1, 2], np.ones(3), np.array(speed_error))
        return float(SimulationErrorModel(residuals, ERRORS).predict(inputs[:1])[0][1][0, 0])

    assert deviation(0.2, 0.2, 0.2) > 2 * deviation(0.0, 0.0, 0.0)
    assert deviation(0.2, -0.2, 0.0) < deviation(0.2, 0.2, 0.2) / 2, "opposite speeds cancel"


def test_every_setting_is_a_feature() -> None:
    space = SearchSpace((8, 32), (0, 500), ("none", "max/2"), (1, 2), {THREADS: ("1", "2")})
    cells = [(candidate, load) for candidate in space.candidates() for load in (4, 8)]
    alike = simulate(Candidate(8), ClosedLoopLoad(4), linear_times(1e-3, 1e-4, 8))
    assert len({tuple(features(space, *cell, alike)) for cell in cells}) == len(cells)


def test_the_behaviour_of_the_batcher_is_a_feature() -> None:
    service = linear_times(1e-3, 1e-4, 8)
    batched = simulate(Candidate(8, True), ClosedLoopLoad(8), service)
    single = simulate(Candidate(8), ClosedLoopLoad(8), service)
    batched_features, single_features = (features(SPACE, Candidate(8), 8, result) for result in (batched, single))
    assert batched_features != single_features


# -- the selector -------------------------------------------------------------------------------------------------


def decide(*trials: Trial, p95_ms: float = 20.0) -> Decision:
    decision = CandidateSelector(problem(p95_ms=p95_ms)).decide(trials, {t.candidate for t in trials})
    assert decision is not None
    return decision


def best_of_all(p95_ms: float) -> float:
    cells = [(candidate, load) for candidate in SPACE.candidates() for load in LOADS]
    figures = [served(*cell) for cell in cells]
    return max(m.throughput_infer_per_sec or 0 for m in figures if (m.latency_p95_ms or 0) <= p95_ms)


@pytest.mark.parametrize("counted", [True, False])
def test_a_few_deployments_find_the_best_and_further_ones_gain_little(counted: bool) -> None:
    trials = [
        trial(t.number, t.candidate, *(load.concurrency for load, _ in t.measurements), counted=counted)
        for t in BASELINES
    ]
    guide, gains = CandidateSelector(problem()), list[float]()
    for number in range(2, 7):
        decision = guide.decide(trials, {t.candidate for t in trials})
        assert decision is not None
        trials.append(trial(number, decision.candidate, decision.load, counted=counted))
        gains.append(decision.gain)
    result = [m for t in trials[:-1] for _, m in t.measurements if (m.latency_p95_ms or 0) <= 20]
    assert max(m.throughput_infer_per_sec or 0 for m in result) >= 0.95 * best_of_all(20)
    assert 0 <= gains[-1] < min(0.05, gains[0] / 2)


def test_while_nothing_meets_the_bound_the_gain_is_without_limit() -> None:
    assert decide(*BASELINES, p95_ms=4.0).gain == math.inf


def test_a_group_whose_deployments_fail_is_left_alone() -> None:
    trials = list(BASELINES)
    for number in range(2, 12):
        candidate = decide(*trials).candidate
        if candidate.instance_count != 3:
            break
        trials.append(Trial(number, candidate, status="failed", reason="no memory"))
    assert len(trials) <= 5, "three failures of three instances say enough"


def test_a_baseline_from_outside_the_space_is_simulated_too() -> None:
    outside = trial(0, Candidate(64, True), 4, 32), trial(1, Candidate(64), 4)
    assert decide(*outside).candidate in SPACE.candidates()


def test_the_tighter_of_two_latency_bounds_decides() -> None:
    sla = Sla.from_bounds({"p50": 500.0, "p95": 20.0})
    points = [Point(t.number, t.candidate, load, m) for t in BASELINES for load, m in t.measurements]
    points = [replace(p, measurement=replace(p.measurement, latency_p50_ms=5.0)) for p in points]
    assert binding_latency(replace(problem(), sla=sla), points) == "latency-p95"
    assert binding_latency(replace(problem(), sla=Sla.from_bounds({"p50": 500.0})), points) == "latency-p50"
    assert binding_latency(replace(problem(), sla=Sla()), points) == "latency-p95"


def test_a_resumed_search_decides_as_the_one_that_was_never_interrupted() -> None:
    wide = problem(
        SearchSpace((1, 2, 4, 8, 16, 32, 64), ("off", 0, 100, 500, 2000), ("none", "max/2"), tuple(range(1, 9)))
    )
    assert len(wide.space) > SHORTLIST
    trials, going_on = list(BASELINES), CandidateSelector(wide)
    first = going_on.decide(trials, {t.candidate for t in trials})
    assert first is not None
    trials.append(trial(2, first.candidate, min(first.load, 32)))
    second = going_on.decide(trials, {t.candidate for t in trials})  # it reuses the state of the first one
    assert second == CandidateSelector(wide).decide(trials, {t.candidate for t in trials})


def test_nothing_measured_and_nothing_left_are_no_faults() -> None:
    assert decide().gain == math.inf
    assert CandidateSelector(problem()).decide(BASELINES, set(SPACE.candidates())) is None
    failed = Trial(0, SPACE.candidates()[0], status="failed", reason="no memory")
    assert decide(failed).candidate != failed.candidate


def test_the_seed_is_that_of_the_simulations() -> None:
    points = [Point(t.number, t.candidate, load, m) for t in BASELINES for load, m in t.measurements]
    model, model_of_other_seed = (fit(points, problem(), "latency-p95", seed) for seed in (1, 2))
    cell = [(Candidate(8, True, 500), 7)]
    assert model.simulate(cell) == fit(points, problem(), "latency-p95", 1).simulate(cell)
    assert model.simulate(cell) != model_of_other_seed.simulate(cell)


def slowed(trial_of_study: Trial, factor: float, *, probed: bool = True) -> Trial:
    """Return the trial on a machine on which everything takes ``factor`` times as long."""
    measurements = []
    for load, m in trial_of_study.measurements:
        throughput, p95_ms = (m.throughput_infer_per_sec or 0) / factor, (m.latency_p95_ms or 0) * factor
        slow = replace(m, throughput_infer_per_sec=throughput, latency_p95_ms=p95_ms)
        measurements.append((load, replace(slow, speed_probe_ms=80 * factor if probed else None)))
    return replace(trial_of_study, measurements=tuple(measurements))


def test_a_change_of_speed_that_the_probe_shows_changes_no_prediction() -> None:
    candidate, on_cpus = Candidate(8, True, 500), replace(problem(), cpu_count=2)
    fast = *(Candidate(size, True) for size in (32, 16, 4)), *(Candidate(size) for size in (8, 32, 16, 4))
    slow = candidate, Candidate(8, True), Candidate(16, True, 500)
    trials = [trial(n, c, 4, 16, counted=False) for n, c in enumerate((*fast, *slow))]

    def predicted(factor: float, *, probed: bool = True) -> float:
        factors = [1.0] * len(fast) + [factor] * len(slow)
        slowed_trials = [
            slowed(trial_of_study, slowness, probed=probed)
            for trial_of_study, slowness in zip(trials, factors, strict=True)
        ]
        return float(fit_surrogate(on_cpus, slowed_trials).forecast([(candidate, 16)])[0][0])

    assert predicted(1.5) == pytest.approx(predicted(1.0), rel=0.12)
    assert predicted(1.5, probed=False) < 0.82 * predicted(1.0)


# -- as an Optuna sampler -------------------------------------------------------------------------------------------


def test_trials_come_back_from_the_study_as_they_were() -> None:
    study = optuna.create_study(direction="maximize")
    tracker = CandidateTracker(problem(), study)
    forecast = Forecast(100.0, 90.5, 110.25, 10.0, 8.0, 12.0, "latency-p95")
    load, measured = BASELINES[1].measurements[0]
    trials = [BASELINES[0], replace(BASELINES[1], measurements=((load, replace(measured, forecast=forecast)),))]
    for finished_trial in trials:
        tracker.record(finished_trial)
    refused_trial = Trial(2, Candidate(64), status="failed", reason="refused", lacks_gpu_memory=True)
    tracker.record(refused_trial)
    assert finished_trials(study) == [*trials, refused_trial]
    assert trial_from_attributes(json.loads(json.dumps(study.trials[1].user_attrs))) == trials[1]


def test_a_second_trial_of_a_candidate_is_stored_once() -> None:
    tracker = CandidateTracker(problem(), optuna.create_study(direction="maximize"))
    control = replace(BASELINES[0], number=2)
    for finished_trial in (*BASELINES, control, *BASELINES, control):
        tracker.record(finished_trial)
    assert finished_trials(tracker.study) == [*BASELINES, control]


@pytest.mark.parametrize(
    ("noise", "deployments", "expected"),
    [(1, 2, 1), (1, 6, 1), (1, 12, 4), (0.01, 6, 0.25), (2, 5, 0), (9, 6, 1.5), (9, 9, 3.375)],
)
def test_the_minimum_gain_of_another_deployment(noise: float, deployments: int, expected: float) -> None:
    assert minimum_gain_factor(noise, deployments) == expected
