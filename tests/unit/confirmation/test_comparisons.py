"""Tests of the loads and windows of a confirmation, and of comparisons on a server with random latencies."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from objectives.intervals import ObjectiveGain
from objectives.load_sequence import MARGIN
from objectives.metrics import METRICS, Measurement
from objectives.model_stats import to_text
from objectives.sequential import LOOKS
from objectives.sla import DEFAULT_CONFIDENCE, Sla
from objectives.verdict import needed_requests
from optimizer.config.problem import ModelKind, Problem
from optimizer.config.search_space import SearchSpace
from optimizer.confirmation.load_predictions import COMPARED_LOADS, LoadPredictions, predict_loads
from optimizer.confirmation.plan import compared_points
from optimizer.confirmation.server_plan import COMPARED_SERVERS, MAX_WINDOW_SECONDS, WINDOWS, plan_server
from optimizer.confirmation.verdicts import judge_confirmations
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.trial import ConfirmationWindow, LoadPoint, Point, Trial, latest_points
from optimizer.results import outcome_values, result_document, summary
from optimizer.results.recommendation import Outcome, assess
from optimizer.simulator.speed_correction import at_other_speed
from tests.conftest import known_problem, measurement, not_none
from tests.curve_model import CurveModel
from tests.random_server import (
    BASELINE,
    BOUND_MS,
    FAST,
    FASTER,
    LOADS,
    SERVED,
    RandomServer,
    confirm,
    searched,
)

# a server whose latency rises steeply above 16 requests in flight
STEEP = CurveModel(lambda load: 50.0 * min(load, 16), lambda load: 0.01 * (1 + max(0, load - 16) / 2))
POINT = Point(0, Candidate(16, True), LoadPoint(1, 8), measurement(800.0, 10.0))
GOODPUT = replace(known_problem(), objectives=(METRICS["goodput"],))
ERRORS = replace(known_problem(), sla=Sla.from_bounds({"p95": 20.0, "error-rate": 0.1}))


class LoadRecordingServer(RandomServer):
    """Records the loads on fresh servers."""

    def __init__(self, slow: dict[Candidate, tuple[float, ...]] | None = None) -> None:
        super().__init__(slow)
        self.loads: dict[Candidate, list[int]] = {}

    def measure_windows(self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int) -> list[Measurement]:
        loads = self.loads.setdefault(endpoint.candidate, [])
        if load.concurrency not in loads:
            loads.append(load.concurrency)
        return super().measure_windows(endpoint, load, seconds, count)


@pytest.mark.parametrize(
    ("searched_load", "slow"),
    [
        (1, 1.0),  # the search tried a far too low load
        (11, 1.0),
        (11, 1.3),  # fresh servers are slower than that of the search
        (11, 0.6),
    ],
)
def test_a_comparison_is_made_at_its_own_highest_safe_load(
    searched_load: int, slow: float, problem: Problem, tmp_path: Path
) -> None:
    """The p95 of the drawn latencies is 1.44 times their mean."""
    server = LoadRecordingServer({FAST: (slow,)})
    trials = confirm(server, searched(server, {**LOADS, FAST: searched_load}), problem, tmp_path)
    outcome = assess(trials, problem, BASELINE, FAST)
    dynamic_batching = not_none(outcome.dynamic_batching)
    point, gain = dynamic_batching.point, dynamic_batching.gain
    assert point is not None
    highest = BOUND_MS / 1.44 / slow * SERVED[FAST] / 1000
    assert 0.75 * highest < point.load.concurrency < 1.02 * highest
    assert point.measurement.latency_p95_ms <= BOUND_MS  # type: ignore[operator]
    assert len(server.loads[FAST]) <= COMPARED_LOADS
    assert gain is not None
    assert not_none(gain.ratio).estimate == pytest.approx(1.2, rel=0.01)


def test_with_a_latency_objective_all_are_confirmed_at_their_loads_in_the_search(
    problem: Problem, tmp_path: Path
) -> None:
    """A higher load that meets the bound would have a higher latency."""
    server = LoadRecordingServer()
    problem = replace(problem, objectives=(METRICS["latency-p95"],))
    trials = confirm(server, searched(server, dict.fromkeys(LOADS, 1)), problem, tmp_path)
    assert server.loads == {FASTER: [1], BASELINE: [1], FAST: [1]}
    outcome = assess(trials, problem, BASELINE, FAST)
    gain = not_none(outcome.baseline.gain)
    ratio = not_none(gain.ratio)
    values = [
        point.measurement.latency_p95_ms
        for point in (not_none(outcome.recommended), not_none(outcome.baseline.point))
    ]
    assert [gain.value, gain.compared_value] == values
    assert ratio.estimate == pytest.approx(gain.compared_value / gain.value, rel=0.01)
    assert ratio.interval.low < SERVED[FASTER] / SERVED[BASELINE] < ratio.interval.high
    rows = {name: cells for name, *cells in outcome_values.comparisons(outcome, problem)}
    assert rows["current (baseline)"][-1] == "p95 3.89x lower (3.59 to 4.21)"
    assert outcome_values.compared_loads(problem) == "Each at the lowest load, because latency rises with it."
    assert "p95 1.20 ± 0.06 ms" in summary.answer(outcome, replace(problem, sla=Sla())), "the objective has no bound"
    document = result_document.document(outcome, wall_seconds=1, results_dir="r")
    assert document["objective"] == {"metric": "latency-p95", "better": "lower"}
    assert document["speedup"] == ratio.estimate
    assert document["speedup_values"] == values
    assert document["speedup_text"] == rows["current (baseline)"][-1]


@pytest.mark.parametrize(
    ("objectives", "sla", "load"),
    [
        (("throughput",), {"p95": 20.0}, "its highest load that met the SLA"),
        (("throughput",), {}, "its best load"),
        (("latency-p95", "throughput"), {}, "the load with its best p95 in the search"),
        (("memory",), {"throughput": 400.0}, "the lowest load that served 400 infer/s in the search"),
    ],
)
def test_the_load_of_comparisons_follows_from_the_objectives(
    objectives: tuple[str, ...], sla: dict[str, float], load: str, problem: Problem
) -> None:
    chosen = replace(problem, objectives=tuple(METRICS[name] for name in objectives), sla=Sla.from_bounds(sla))
    assert outcome_values.compared_loads(chosen) == f"Each at {load}."


def test_an_objective_whose_ratios_have_no_meaning_has_both_values(problem: Problem, tmp_path: Path) -> None:
    server = RandomServer()
    trials = confirm(server, searched(server, LOADS), problem, tmp_path)
    scores = {BASELINE: 0.9, FAST: 0.9, FASTER: 0.93}
    scored = [
        replace(
            trial,
            confirmations=tuple(
                replace(window, measurement=replace(window.measurement, score=scores[trial.candidate]))
                for window in trial.confirmations
            ),
        )
        for trial in trials
    ]
    outcome = assess(scored, replace(problem, objectives=(METRICS["score"],)), BASELINE, FAST)
    assert outcome.baseline.gain == ObjectiveGain("score", 0.93, 0.9, None)
    assert outcome.speedup is None
    assert outcome_values.gain_over(outcome, outcome.baseline) == "score 0.930 instead of 0.900"


def test_a_configuration_that_missed_the_sla_is_compared_at_its_closest_load(problem: Problem) -> None:
    trials = searched(RandomServer(), {FASTER: LOADS[FASTER]})
    far, close = (
        Point(1, BASELINE, LoadPoint(1, load), Measurement(300.0, latency_p95_ms=factor * BOUND_MS, stable=True))
        for load, factor in ((16, 3.0), (8, 1.5))
    )
    best, *_ = points = [*latest_points(trials), far, close]
    assert compared_points([best], (BASELINE, FAST), points, problem) == [close], "the other one was not measured"


@pytest.mark.parametrize(("objective", "chosen"), [("latency-p95", 1), ("throughput", 0), ("score", 1)])
def test_the_first_objective_decides_which_runner_up_is_nearly_as_good(
    objective: str, chosen: int, problem: Problem
) -> None:
    """The first of two candidates has the same execution settings as the best one. The second serves much less."""
    problem = replace(problem, objectives=(METRICS[objective],))
    candidates = FASTER, replace(FASTER, max_queue_delay_us=100), replace(FASTER, instance_count=3)
    best, *others = (
        Point(number, candidate, LoadPoint(1, 1), replace(measurement(served, 10.0), score=0.9))
        for number, (candidate, served) in enumerate(zip(candidates, (1000.0, 990.0, 500.0), strict=True))
    )
    assert compared_points([best, *others], (), [best, *others], problem) == [others[chosen]]


@pytest.mark.parametrize("objective", ["throughput", "latency-p95"])
def test_a_gain_that_clearly_differs_from_the_shown_values_is_explained(
    objective: str, problem: Problem, tmp_path: Path
) -> None:
    """The machine was half as fast while the baseline was measured, as the speed probe shows."""
    problem = replace(problem, objectives=(METRICS[objective],), sla=Sla(), cpu_count=2)
    server = RandomServer()
    trials = confirm(server, searched(server, dict.fromkeys(LOADS, 1)), problem, tmp_path)

    def slowed(window: ConfirmationWindow, slowness: float) -> ConfirmationWindow:
        slowness *= 1.0 + 0.3 * (window.server // 3 % 2)  # by which the effect of the speed is known
        slow = at_other_speed(window.measurement, 1 / slowness)
        return replace(window, measurement=replace(slow, speed_probe_ms=slowness))

    def outcome(baseline_slowness: float) -> Outcome:
        slowness = {BASELINE: baseline_slowness}
        windows = {
            trial: tuple(slowed(window, slowness.get(trial.candidate, 1.0)) for window in trial.confirmations)
            for trial in trials
        }
        changed = [replace(trial, confirmations=confirmations) for trial, confirmations in windows.items()]
        return assess(changed, problem, BASELINE, FAST)

    usual, disturbed = outcome(1.0), outcome(2.0)
    assert summary.GAIN_NOTE not in summary.evidence(usual)
    assert summary.evidence(disturbed) == f"{summary.evidence(usual)} {summary.GAIN_NOTE}"
    assert usual.speedup == pytest.approx(4.0, rel=0.1)
    assert disturbed.speedup == pytest.approx(4.0, rel=0.2)


def test_a_comparison_that_was_not_confirmed_has_no_gain(problem: Problem, tmp_path: Path) -> None:
    server = RandomServer(broken=(BASELINE,))
    outcome = assess(confirm(server, searched(server, LOADS), problem, tmp_path), problem, BASELINE, FAST)
    assert outcome.baseline.gain is None
    assert not_none(outcome.dynamic_batching).gain is not None


def test_a_comparison_that_misses_the_sla_on_fresh_servers_has_no_gain(problem: Problem) -> None:
    server, trials = RandomServer(), searched(RandomServer(), LOADS)
    for place, (candidate, load) in enumerate({BASELINE: 6, FAST: 9, FASTER: 10}.items()):
        server.deployed.append(candidate)
        for number in range(1, LOOKS[0] + 1):
            for window in server.measure_windows(Endpoint("", candidate), LoadPoint(1, load), 0.5, WINDOWS):
                confirmation = ConfirmationWindow(number, LoadPoint(1, load), window, 0.01 * (candidate == FASTER))
                trials[place] = trials[place].with_confirmation(confirmation)
    outcome = assess(trials, problem, BASELINE, FAST)
    assert outcome.confirmed is not None
    assert not_none(outcome.dynamic_batching).gain is not None
    assert outcome.baseline.gain is None
    assert not_none(outcome.baseline.point).load.concurrency == 6
    rows = {name: cells for name, *cells in outcome_values.comparisons(outcome, problem)}
    assert rows["current (baseline)"][-1] == f"not confirmed, misses p95 <= {BOUND_MS:g} ms on fresh servers"


class TestPredictedLoads:
    def point_at(self, concurrency: int, p95_ms: float) -> Point:
        measurement = Measurement(50.0 * concurrency, latency_p95_ms=p95_ms, stable=True)
        return Point(0, FAST, LoadPoint(1, concurrency), measurement)

    def test_all_loads_are_possible_for_a_comparison(self, problem: Problem) -> None:
        predictions = predict_loads(self.point_at(4, 1.0), [self.point_at(4, 1.0)], problem, None, every_load=True)
        loads = [load.concurrency for load in predictions.loads]
        assert (loads[0], loads[-1]) == (1, problem.max_concurrency)
        assert all(after <= max(before + 1, 1.12 * before) for before, after in pairwise(loads))

    def test_latency_is_interpolated_between_the_measured_loads(self, problem: Problem) -> None:
        points = [self.point_at(10, 10.0), self.point_at(20, 20.0)]
        predictions = predict_loads(points[1], points, problem, None)
        loads = [load.concurrency for load in predictions.loads]
        assert loads == sorted(set(loads))
        assert loads[0] == 6
        assert 20 in loads
        expected = [math.log(load / 20) for load in loads]
        assert predictions.log_latency_ratios == pytest.approx(expected, abs=0.05)

    def test_a_first_load_close_to_the_bound_is_lower_than_the_measured_one(self, problem: Problem) -> None:
        predictions = predict_loads(self.point_at(40, 19.9), [self.point_at(40, 19.9)], problem, None)
        start = max(load for load, log_ratio in enumerate(predictions.log_latency_ratios) if log_ratio <= -MARGIN)
        assert 31 <= predictions.loads[start].concurrency <= 36

    def test_a_model_predicts_the_latency_where_requests_begin_to_wait(self, problem: Problem) -> None:
        """Up to 16 requests run at once; the measured latency is 1.1 times the predicted one."""
        points = [self.point_at(8, 11.0), self.point_at(14, 11.0)]
        predictions = predict_loads(points[1], points, problem, STEEP)
        predicted = {
            load.concurrency: math.exp(log_ratio)
            for load, log_ratio in zip(predictions.loads, predictions.log_latency_ratios, strict=True)
        }
        assert predicted[16] == pytest.approx(11.0 / BOUND_MS)
        assert predicted[18] == pytest.approx(22.0 / BOUND_MS)
        assert max(predictions.throughput_infer_per_sec) == pytest.approx(50 * 16, rel=0.15)

    def test_errors_of_a_model_that_is_no_simulator_are_interpolated(self, problem: Problem) -> None:
        """The model is wrong about where requests begin to wait: at 8 instead of 16."""
        points = [self.point_at(8, 10.0), self.point_at(12, 40.0)]
        predictions = predict_loads(points[0], points, replace(problem, kind=ModelKind.STATEFUL), STEEP)
        predicted = {
            load.concurrency: log_ratio
            for load, log_ratio in zip(predictions.loads, predictions.log_latency_ratios, strict=True)
        }
        assert predicted[8] == pytest.approx(math.log(10.0 / BOUND_MS))
        assert 0 < predicted[11] < math.log(40.0 / BOUND_MS)

    def test_a_measurement_without_the_bounded_latency_does_not_count(self, problem: Problem) -> None:
        good, lost = self.point_at(8, 10.0), self.point_at(16, 10.0)
        lost = replace(lost, measurement=replace(lost.measurement, latency_p95_ms=None))
        for model in (None, STEEP):
            assert predict_loads(good, [good, lost], problem, model) == predict_loads(good, [good], problem, model)

    def test_only_allowed_loads_are_tested(self, problem: Problem) -> None:
        class Listed(SearchSpace):
            def allowed_concurrencies(self, candidate: Candidate) -> tuple[int, ...]:
                return 8, 16, 40, 64

        listed = replace(problem, space=Listed(max_batch_size=(1, 64), instance_count=(1, 2)))
        predictions = predict_loads(self.point_at(40, 19.9), [self.point_at(40, 19.9)], listed, None)
        assert [load.concurrency for load in predictions.loads] == [8, 16, 40, 64]

    def test_without_a_latency_bound_the_measured_load_is_kept(self, problem: Problem) -> None:
        point = self.point_at(40, 19.9)
        assert predict_loads(point, [point], replace(problem, sla=Sla()), None).loads == (point.load,)

    def test_request_rates_have_smaller_steps(self, problem: Problem) -> None:
        load = LoadPoint(1, request_rate=1000.0)
        point = Point(0, FAST, load, Measurement(1000.0, latency_p95_ms=10.0, stable=True))
        predictions = predict_loads(point, [point], problem, None)
        rates = [other.request_rate for other in predictions.loads]
        assert load in predictions.loads
        assert max(b / a for a, b in pairwise(rates)) < 1.04

    def test_latency_falls_with_the_capacity_that_a_lower_rate_leaves(self, problem: Problem) -> None:
        """It halves where twice the capacity is left, not at half of the rate."""
        best, capacity = LoadPoint(1, request_rate=900.0), 1000.0
        overload = Measurement(capacity, latency_p95_ms=500.0, overloaded=True)
        points = [
            Point(0, FAST, best, Measurement(900.0, latency_p95_ms=10.0, stable=True)),
            Point(0, FAST, LoadPoint(1, request_rate=2000.0), overload),
        ]
        predictions = predict_loads(points[0], points, replace(problem, open_loop=True), None)
        for load, predicted in zip(predictions.loads, predictions.log_latency_ratios, strict=True):
            if load <= best:
                expected_ms = 10 * (capacity - 900) / (capacity - load.request_rate)
                assert predicted == pytest.approx(math.log(expected_ms / BOUND_MS))


def test_predictions_are_shifted_by_the_difference_at_the_measured_load(problem: Problem) -> None:
    loads = tuple(LoadPoint(1, concurrency) for concurrency in (8, 16, 32))
    predictions = LoadPredictions(loads, (-0.6, -0.2, 0.2), (100.0, 150.0, 180.0), highest_first=1)
    measured = Measurement(135.0, latency_p95_ms=BOUND_MS * math.exp(-0.1), stable=True)
    point = Point(0, FAST, loads[1], measured)
    corrected = not_none(predictions.corrected(point, problem))
    assert corrected.log_latency_ratios == pytest.approx((-0.5, -0.1, 0.3))
    assert corrected.throughput_infer_per_sec == pytest.approx((90.0, 135.0, 162.0))
    assert corrected.corrected(point, problem) == corrected
    assert predictions.corrected(replace(point, load=LoadPoint(1, 12)), problem) is None, "it has no prediction"
    for unknown in (replace(measured, throughput_infer_per_sec=0.0), replace(measured, latency_p95_ms=None)):
        assert predictions.corrected(replace(point, measurement=unknown), problem) is None


@pytest.mark.parametrize(
    ("log_ratio", "following"),
    [(0.1, 8), (-0.1, None), (-2 * MARGIN + 0.02, None), (-2 * MARGIN - 0.02, 32)],
    ids=["over the bound", "close to it", "just close to it", "far inside it"],
)
def test_another_load_is_compared_only_if_the_last_one_missed_the_sla_or_was_far_inside_it(
    log_ratio: float, following: int | None, problem: Problem
) -> None:
    """Twice the margin that the first load is expected to have is far."""
    loads = tuple(LoadPoint(1, concurrency) for concurrency in (8, 16, 32))
    predictions = LoadPredictions(loads, (-0.5, -0.2, 0.0), (100.0, 200.0, 400.0))
    trial, server = Trial(0, FAST), RandomServer()
    mean_ms = BOUND_MS * math.exp(log_ratio)
    for number in range(1, COMPARED_SERVERS + 1):
        for _ in range(WINDOWS):
            window = server.measured(np.linspace(0.99, 1.0, 200) * mean_ms, 200.0)
            trial = trial.with_confirmation(ConfirmationWindow(number, loads[1], window))
    measured = judge_confirmations([trial], problem)
    load = predictions.next_compared_load(measured, problem)
    assert (None if load is None else load.concurrency) == following


def test_streams_need_time_before_and_after_their_windows() -> None:
    """The first window begins when the first requests have ended, and the last requests are awaited."""
    measurement = Measurement(2.0, latency_avg_ms=4000.0, responses_per_sec=30.0, stable=True)
    streamed = Point(0, FAST, LoadPoint(1, 8), measurement)
    batched = replace(streamed, measurement=replace(measurement, responses_per_sec=None))
    server_seconds = [plan_server(point, point.load, None).server_seconds for point in (batched, streamed)]
    assert server_seconds[1] - server_seconds[0] == pytest.approx(2 * 4.0)


def test_the_test_of_a_model_that_streams_begins_further_inside_the_bound(problem: Problem) -> None:
    stable = Measurement(50.0, latency_p95_ms=BOUND_MS, stable=True)
    batched = Point(0, FAST, LoadPoint(1, 40), stable)
    streamed = replace(batched, measurement=replace(stable, ttft_p50_ms=1.0))
    first_loads = [predict_loads(point, [point], problem, None).first_compared_load for point in (batched, streamed)]
    assert first_loads[1].concurrency < first_loads[0].concurrency


@pytest.mark.parametrize(("problem", "is_capped"), [(known_problem(), False), (GOODPUT, True), (ERRORS, True)])
def test_no_load_above_the_best_one_is_tested_if_only_measurements_show_its_limit(
    problem: Problem, is_capped: bool
) -> None:
    predictions = predict_loads(POINT, [POINT], problem, None)
    assert (predictions.loads[-1] == POINT.load) is is_capped
    assert predictions.loads[0].concurrency < POINT.load.concurrency


def test_windows_are_long_enough_for_a_high_percentile() -> None:
    default_plan = plan_server(POINT, POINT.load, None, sla=Sla.from_bounds({"p95": 20.0}))
    assert default_plan.window_seconds == plan_server(POINT, POINT.load, None).window_seconds == 0.5
    slow_point = replace(POINT, measurement=measurement(100.0, 10.0))
    (bound,) = high_percentile = Sla.from_bounds({"p99.9": 20.0})
    requests = (
        LOOKS[0] * WINDOWS * 100.0 * plan_server(slow_point, POINT.load, None, sla=high_percentile).window_seconds
    )
    assert requests == pytest.approx(needed_requests(bound, 1 - DEFAULT_CONFIDENCE))
    longest_plan = plan_server(slow_point, POINT.load, None, sla=Sla.from_bounds({"p99.99": 20.0}))
    assert longest_plan.window_seconds == MAX_WINDOW_SECONDS


def test_the_interval_of_a_latency_is_that_of_the_slowest_model_under_load(problem: Problem) -> None:
    """Only the values of each model have the quantiles above p99 that bound it."""
    load, random = LoadPoint(1, 8), np.random.default_rng(0)
    alone = pair = Trial(0, FAST)
    for server in range(1, LOOKS[0] + 1):
        for _ in range(WINDOWS):
            slow, fast = (
                RandomServer().measured(random.lognormal(math.log(ms), 0.3, 60), 1000.0) for ms in (9.0, 3.0)
            )
            both = replace(slow, latency_sketch="", by_model=to_text({"fast": fast, "slow": slow}))
            alone = alone.with_confirmation(ConfirmationWindow(server, load, slow, 0.01))
            pair = pair.with_confirmation(ConfirmationWindow(server, load, both, 0.01))
    (expected,), (confirmed,) = (judge_confirmations([trial], problem) for trial in (alone, pair))
    assert confirmed.latency_ms == expected.latency_ms
    assert confirmed.latency_ms.high < math.inf
