"""Tests of the confirmation and the recommendation after it, on a server with random latencies."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from objectives.intervals import order_statistic_levels
from objectives.latency_sketch import sketch_latencies
from objectives.load_sequence import OTHER_ERROR_SHARES, OTHER_MARGIN, LoadSequence
from objectives.metrics import METRICS, Measurement
from objectives.sequential import LOOKS
from objectives.sla import DEFAULT_CONFIDENCE, Constraint, Sla, Verdict
from optimizer.config.problem import Problem
from optimizer.confirmation.load_predictions import MAX_LOAD_FACTOR, LoadPredictions
from optimizer.confirmation.plan import ConfirmationPlan
from optimizer.confirmation.server_plan import (
    COMPARED_SERVERS,
    FEWER_WINDOWS,
    MIN_WINDOW_SECONDS,
    START_SECONDS,
    WINDOWS,
    estimate_start_seconds,
    plan_server,
)
from optimizer.confirmation.verdicts import ConfirmedLoad, judge_confirmations
from optimizer.core.budget import Budget
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import DeploymentError, MeasurementError, ServerCrashed
from optimizer.core.load_shapes import RequestTimes
from optimizer.core.resource_usage import CpuInterval, ResourceUsage
from optimizer.core.trial import ConfirmationWindow, LoadPoint, Point, Trial
from optimizer.measure.output_check import NoOutputCheck
from optimizer.results.recommendation import assess
from optimizer.results.summary import RemainingTests, next_step, undecided_cause
from optimizer.store.trials_table import TrialsTable
from tests.conftest import not_none
from tests.random_server import (
    BASELINE,
    BOUND_MS,
    COMPARISONS,
    FAST,
    FASTER,
    LOADS,
    SERVED,
    BestPointObserver,
    RandomServer,
    TimedServer,
    confirm,
    drawn_problem,
    make_confirmer,
    searched,
    with_measured,
)


def judged_loads(trials: list[Trial], problem: Problem) -> dict[tuple[Candidate, int], ConfirmedLoad]:
    """Return the confirmations with a test, by candidate and requests in flight."""
    confirmed = judge_confirmations(trials, problem)
    return {
        (confirmed_load.point.candidate, confirmed_load.point.load.concurrency): confirmed_load
        for confirmed_load in confirmed
        if confirmed_load.error
    }


def test_the_best_candidate_takes_turns_with_those_it_is_compared_with(problem: Problem, tmp_path: Path) -> None:
    server = RandomServer()
    trials = confirm(server, searched(server, LOADS), problem, tmp_path)
    assert server.deployed[: 3 * COMPARED_SERVERS] == COMPARED_SERVERS * [FASTER, BASELINE, FAST]
    outcome = assess(trials, problem, BASELINE, FAST)
    confirmed = not_none(outcome.confirmed)
    assert confirmed.judged.verdict is Verdict.PASS
    assert confirmed.servers >= LOOKS[0]
    assert confirmed.windows == confirmed.servers * WINDOWS
    assert outcome.recommended is confirmed.point
    assert outcome.recommended.candidate == FASTER
    assert confirmed.latency_ms.low <= outcome.recommended.measurement.latency_p95_ms  # type: ignore[operator]
    assert outcome.recommended.measurement.latency_p95_ms <= confirmed.latency_ms.high <= BOUND_MS  # type: ignore[operator]
    gain = not_none(outcome.baseline.gain)
    ratio = not_none(gain.ratio)
    assert outcome.speedup == ratio.estimate == pytest.approx(4, rel=0.01)
    assert ratio.interval.low < 4 < ratio.interval.high
    assert ratio.is_measurable
    compared_loads = [confirmed_load for confirmed_load in outcome.confirmed_loads if not confirmed_load.error]
    assert {confirmed_load.point.candidate for confirmed_load in compared_loads} == {FAST, BASELINE}
    assert all(confirmed_load.servers == COMPARED_SERVERS for confirmed_load in compared_loads)
    assert all("comparison only" in confirmed_load.judged.reason for confirmed_load in compared_loads)
    for confirmed_load in outcome.confirmed_loads:
        for interval in (confirmed_load.throughput, confirmed_load.latency_ms):
            assert -math.inf < interval.low <= interval.high < math.inf


def test_the_runner_up_has_other_execution_settings_if_it_serves_nearly_as_much(
    problem: Problem, tmp_path: Path
) -> None:
    more_instances = replace(FASTER, instance_count=3)
    other_batching = [replace(FASTER, max_queue_delay_us=delay) for delay in (100, 200)]
    served = {**SERVED, other_batching[0]: 1195.0, other_batching[1]: 1190.0}
    loads = {BASELINE: 3, FASTER: 13, **dict.fromkeys(other_batching, 13), more_instances: 9}

    def compared_candidates(throughput: float) -> set[Candidate]:
        server = RandomServer(served={**served, more_instances: throughput})
        path = tmp_path / f"{throughput:.0f}"
        path.mkdir()
        confirm(server, searched(server, loads), problem, path)
        return set(server.deployed[: 3 * COMPARED_SERVERS]) - {FASTER, BASELINE}

    assert compared_candidates(1100.0) == {more_instances}
    assert compared_candidates(900.0) == {other_batching[0]}


def test_after_a_disturbed_search_comparisons_wait_for_a_pass(problem: Problem, tmp_path: Path) -> None:
    server = RandomServer()
    confirm(server, with_measured(searched(server, LOADS), other_cpu_share=0.5), problem, tmp_path)
    assert server.deployed[: LOOKS[0]] == [FASTER] * LOOKS[0]
    assert set(server.deployed[LOOKS[0] :]) >= {BASELINE, FAST}


@pytest.mark.parametrize(("other_cpu_share", "tested"), [(0.5, 14), (0.0, round(3 * MAX_LOAD_FACTOR))])
def test_after_a_disturbed_search_the_best_load_may_be_far_above_the_measured_one(
    other_cpu_share: float, tested: int, problem: Problem, tmp_path: Path
) -> None:
    server = RandomServer()
    trials = with_measured(searched(server, {FASTER: 3}), other_cpu_share=other_cpu_share)
    confirmed = confirm(server, trials, problem, tmp_path)[0].confirmations
    assert {window.load.concurrency for window in confirmed} == {tested}


def test_a_candidate_that_met_the_bound_only_undisturbed_is_tested(problem: Problem, tmp_path: Path) -> None:
    def measured_at(p95_ms: float, share: float) -> Measurement:
        return Measurement(SERVED[FAST], latency_p95_ms=p95_ms, stable=True, other_cpu_share=share)

    measured = [(0.9 * BOUND_MS, 0.0), (2.0 * BOUND_MS, 0.5), (2.2 * BOUND_MS, 0.5)]
    loads = [(LoadPoint(1, load), measured_at(*values)) for load, values in enumerate(measured, 10)]
    server = RandomServer()
    confirm(server, [Trial(0, FAST, tuple(loads))], replace(problem, cpu_count=2), tmp_path)
    assert server.deployed[: LOOKS[0]] == [FAST] * LOOKS[0]


class LoadDependentServer(RandomServer):
    """A server whose latency and throughput rise with the load, by Little's law."""

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        mean_ms = 5 + 0.6 * load.concurrency
        served = 1000 * load.concurrency / mean_ms
        return self.measured(self.random.gamma(16, mean_ms / 16, size=int(served * (seconds or 2))), served)


@pytest.mark.parametrize("predicted_gain", [1.0, 1.06])
def test_no_load_below_the_bound_on_the_throughput_is_tested(
    predicted_gain: float, problem: Problem, tmp_path: Path
) -> None:
    """The bound on p95 alone would begin the test at a load that serves 952/s. The search may see more."""
    problem = replace(problem, sla=Sla.from_bounds({"p95": BOUND_MS, "throughput": 960.0}))
    server = LoadDependentServer()
    loads = [LoadPoint(1, concurrency) for concurrency in (8, 11, 13, 14, 16)]
    measurements = [(load, server.measure(Endpoint("", FASTER), load)) for load in loads]
    measurements = [
        (
            load,
            replace(measured, throughput_infer_per_sec=predicted_gain * (measured.throughput_infer_per_sec or 0.0)),
        )
        for load, measured in measurements
    ]
    trials = confirm(server, [Trial(0, FASTER, tuple(measurements))], problem, tmp_path, seconds=6000)
    judged = judged_loads(trials, problem)
    assert all(load > 11 for _, load in judged)
    outcome = assess(trials, problem, FASTER, FASTER)
    confirmed = not_none(outcome.confirmed)
    assert confirmed.judged.verdict is Verdict.PASS, confirmed.judged.reason
    assert confirmed.point.throughput_infer_per_sec >= 960


def test_the_errors_of_all_tests_are_at_most_that_of_the_run(problem: Problem, tmp_path: Path) -> None:
    server = RandomServer(slow={FASTER: (3.0,), FAST: (3.0,)})
    trials = confirm(server, searched(server, LOADS), problem, tmp_path)
    inherited_once = {
        (tested_load.point.trial, tested_load.error) for tested_load in judged_loads(trials, problem).values()
    }
    assert len(inherited_once) > 1
    assert sum(error for _, error in inherited_once) <= 1 - problem.confidence + 1e-12


def test_a_higher_load_that_serves_no_more_is_not_tested(problem: Problem, tmp_path: Path) -> None:
    server = RandomServer()
    trials = confirm(server, searched(server, {BASELINE: 3, FASTER: 8}), problem, tmp_path, seconds=6000)
    ((_, load),) = judged_loads(trials, problem)
    assert 8 < load < LOADS[FASTER]


def test_the_best_so_far_is_shown_during_confirmation(problem: Problem, tmp_path: Path) -> None:
    server, observer = RandomServer(), BestPointObserver()
    confirmer = make_confirmer(server, searched(server, LOADS), problem, tmp_path, Budget(600), observer=observer)
    trials = confirmer.run(COMPARISONS)
    assert {point.candidate if point else None for point in observer.best_points} == {FASTER}
    best = not_none(assess(trials, problem, BASELINE, FAST).best_so_far)
    assert observer.best_points[-1] == best, "an interrupted run shows the same, not what the search measured"
    assert best.measurement not in [measured for _, measured in trials[best.trial].measurements]


def test_the_runner_up_is_tested_if_no_load_of_the_best_candidate_passes(problem: Problem, tmp_path: Path) -> None:
    server = RandomServer(slow={FASTER: (9.0,)})
    outcome = assess(confirm(server, searched(server, LOADS), problem, tmp_path), problem, BASELINE, FAST)
    assert not_none(outcome.recommended).candidate == FAST
    assert not_none(outcome.confirmed).judged.verdict is Verdict.PASS


@pytest.mark.parametrize("is_bounded", [True, False])
def test_a_runner_up_that_serves_clearly_more_on_fresh_servers_is_tested_too(
    is_bounded: bool, problem: Problem, tmp_path: Path
) -> None:
    """The search has chosen the luckier one of two noisy measurements."""
    if not is_bounded:
        problem = replace(problem, sla=Sla())
    server = RandomServer(served={**SERVED, FAST: 1500.0})
    trials = confirm(server, searched(RandomServer(), LOADS), problem, tmp_path)
    assert {candidate for candidate, _ in judged_loads(trials, problem)} == {FASTER, FAST}
    outcome = assess(trials, problem, BASELINE, FAST)
    assert not_none(outcome.recommended).candidate == FAST
    confirmed = not_none(outcome.confirmed)
    assert confirmed.judged.verdict is Verdict.PASS
    assert confirmed.error == pytest.approx((1 - problem.confidence) * OTHER_ERROR_SHARES[0])
    assert confirmed.servers in LOOKS, "the servers by which it was chosen do not count"


def test_a_runner_up_with_a_clearly_better_objective_is_tested_although_it_serves_less(
    problem: Problem, tmp_path: Path
) -> None:
    problem = replace(problem, objectives=(METRICS["latency-p95"],))
    server = RandomServer(slow={FASTER: (1.5,)})
    trials = confirm(server, searched(RandomServer(), dict.fromkeys(LOADS, 1)), problem, tmp_path)
    assert {candidate for candidate, _ in judged_loads(trials, problem)} == {FASTER, FAST}
    recommended = not_none(assess(trials, problem, BASELINE, FAST).recommended)
    assert recommended.candidate == FAST
    assert recommended.throughput_infer_per_sec < SERVED[FASTER]


def test_a_runner_up_that_serves_more_is_not_tested_for_a_worse_objective(problem: Problem, tmp_path: Path) -> None:
    problem = replace(problem, objectives=(METRICS["latency-p95"],))
    server = RandomServer(served={**SERVED, FAST: 3000.0}, slow={FAST: (4.0,)})
    trials = confirm(server, searched(RandomServer(), dict.fromkeys(LOADS, 1)), problem, tmp_path)
    assert {candidate for candidate, _ in judged_loads(trials, problem)} == {FASTER}


def test_the_test_of_a_compared_candidate_begins_near_the_load_of_its_comparison(problem: Problem) -> None:
    """It may get to higher loads after a PASS."""
    server, trial = RandomServer(), Trial(1, FASTER)
    for number in range(1, COMPARED_SERVERS + 1):
        server.deployed.append(FASTER)
        for window in server.measure_windows(Endpoint("", FASTER), LoadPoint(1, 4), 0.5, WINDOWS):
            trial = trial.with_confirmation(ConfirmationWindow(number, LoadPoint(1, 4), window))
    (measured,) = judge_confirmations([trial], problem)
    loads = [LoadPoint(1, concurrency) for concurrency in (2, 4, 6, 8, 10)]
    predictions = LoadPredictions(
        tuple(loads), (-3.0, -2.5, -2.49, -2.48, -2.47), (200.0, 400.0, 600.0, 800.0, 1000.0)
    )
    corrected = not_none(predictions.for_rival(measured.point, problem))
    sequence = LoadSequence(
        corrected.log_latency_ratios,
        corrected.throughput_infer_per_sec,
        0.01,
        OTHER_ERROR_SHARES,
        OTHER_MARGIN,
        corrected.highest_first,
    )
    assert sequence.current == loads.index(LoadPoint(1, 6))
    sequence.finish_passed(excess=-1.0)
    assert sequence.current == loads.index(LoadPoint(1, 10))


def test_a_lower_load_is_tested_if_the_first_one_does_not_pass(problem: Problem, tmp_path: Path) -> None:
    server = RandomServer(slow={FASTER: (1.5,)})
    trials = confirm(server, searched(server, LOADS), problem, tmp_path)
    tested_loads = [load for candidate, load in judged_loads(trials, problem) if candidate == FASTER]
    assert tested_loads[1] < tested_loads[0]
    outcome = assess(trials, problem, BASELINE, FAST)
    confirmed = not_none(outcome.confirmed)
    assert confirmed.judged.verdict is Verdict.PASS
    assert confirmed.point.candidate == FASTER
    passed = [
        load
        for (_, load), tested_load in judged_loads(trials, problem).items()
        if tested_load.judged.verdict is Verdict.PASS
    ]
    assert confirmed.point.load.concurrency in passed


class BiasedLoadGenerator(RandomServer):
    """A second load generator, whose latencies are ``latency_ratio`` times those of the server."""

    def __init__(self, server: RandomServer, latency_ratio: float, crashes: bool = False) -> None:
        super().__init__()
        self.deployed, self.slow, self.crashes = server.deployed, {FASTER: (latency_ratio,)}, crashes
        self.loads = list[LoadPoint]()

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        if self.crashes:
            raise ServerCrashed("tritonserver died (SIGKILL) while measuring")
        self.loads.append(load)
        return super().measure(endpoint, load, seconds)


def cross_checked(
    perf_analyzer: BiasedLoadGenerator, server: RandomServer, problem: Problem, path: Path
) -> list[Trial]:
    searched_trials = searched(server, LOADS)
    confirmer = make_confirmer(server, searched_trials, problem, path, Budget(600), cross_checking=perf_analyzer)
    trials = confirmer.run(COMPARISONS)
    stored = TrialsTable(path / "trials.csv", "drawn", {}).read()
    assert [trial.cross_checks for trial in stored] == [trial.cross_checks for trial in trials if trial.confirmations]
    return trials


def test_perf_analyzer_measures_each_server_of_the_tested_configuration(problem: Problem, tmp_path: Path) -> None:
    server = RandomServer()
    perf_analyzer = BiasedLoadGenerator(server, 1.0)
    trials = cross_checked(perf_analyzer, server, problem, tmp_path)
    outcome = assess(trials, problem, BASELINE, FAST)
    confirmed = not_none(outcome.confirmed)
    assert confirmed.judged.verdict is Verdict.PASS
    agreement = not_none(confirmed.agreement)
    assert (agreement.pairs, agreement.disagreement) == (confirmed.servers, "")
    assert {ratio.metric for ratio in agreement.ratios} == {"throughput", "latency-p95"}
    assert confirmed.windows == confirmed.servers * WINDOWS, "no window of the verdict"
    assert len(perf_analyzer.loads) == server.deployed.count(FASTER)
    assert all(
        confirmed_load.agreement is None
        for confirmed_load in outcome.confirmed_loads
        if confirmed_load.point.candidate != FASTER
    )
    assert sum(len(trial.measurements) for trial in trials) == len(LOADS), "no measurement of the search"


def test_a_clearly_higher_latency_of_perf_analyzer_is_no_pass(problem: Problem, tmp_path: Path) -> None:
    problem, server = replace(problem, client_shares_cpus=True), RandomServer()
    trials = cross_checked(BiasedLoadGenerator(server, 1.6), server, problem, tmp_path)
    contradicted = [
        confirmed_load
        for confirmed_load in judged_loads(trials, problem).values()
        if confirmed_load.agreement and confirmed_load.agreement.contradicts_pass
    ]
    assert contradicted
    for confirmed_load in contradicted:
        assert confirmed_load.judged.verdict is Verdict.UNDECIDED
        assert re.fullmatch(
            r"perf_analyzer measured \d\d % more p95 latency than tune's own client: 2\d.* ms \(allowed: 20\)",
            confirmed_load.judged.reason,
        )
    confirmed = not_none(assess(trials, problem, BASELINE, FAST).confirmed)
    assert confirmed.judged.verdict is Verdict.PASS, "at a lower load, where perf_analyzer meets the bound too"
    assert confirmed.point.load < contradicted[0].point.load
    agreement = not_none(confirmed.agreement)
    assert "more p95 latency" in agreement.disagreement
    assert agreement.ratios[1].value < BOUND_MS


def test_a_crash_under_perf_analyzer_is_no_pass_and_keeps_the_windows(problem: Problem, tmp_path: Path) -> None:
    server = RandomServer()
    trials = cross_checked(BiasedLoadGenerator(server, 1.0, crashes=True), server, problem, tmp_path)
    outcome = assess(trials, problem, BASELINE, FAST)
    confirmed = not_none(outcome.confirmed)
    assert confirmed.judged.verdict is Verdict.UNDECIDED
    cause = "a fresh server crashed under this load: tritonserver died (SIGKILL) while measuring"
    assert (confirmed.judged.reason, undecided_cause(outcome)) == (cause, cause)
    step = next_step(outcome, "r", "tune known", tests=RemainingTests(is_complete=True))
    assert step.advice == "find the cause of the crash in r/logs, then make a separate test"
    assert step.command == "tune verify --fresh r"
    loads = [crash.load for trial in trials for crash in trial.crashes if trial.candidate == FASTER]
    assert confirmed.point.load in loads
    assert len(outcome.crashes) == len(loads) - loads.count(confirmed.point.load), "at the other tested loads"
    assert confirmed.windows == confirmed.servers * WINDOWS
    agreement = not_none(confirmed.agreement)
    assert (agreement.pairs, agreement.servers) == (0, confirmed.servers)
    assert "died (SIGKILL)" in agreement.reason


def test_the_latency_of_a_pass_is_not_shown_as_possibly_over_the_bound(problem: Problem) -> None:
    """Few effective requests do not bound the quantile by order statistics, and one fresh server may be slower.

    The test has bounded the quantile of all requests.
    """
    random, load, trial = np.random.default_rng(1), LoadPoint(1, 13), Trial(1, FASTER)
    for number, slowness in enumerate((1.0, 1.3, 0.75, 1.1), 1):  # servers that differ are worth few requests
        for _ in range(WINDOWS):
            drawn = RandomServer().measured(random.gamma(16, 0.5 * slowness, size=600), served=1200.0)
            trial = trial.with_confirmation(ConfirmationWindow(number, load, drawn, 0.01))
    (confirmed,) = judge_confirmations([trial], problem)
    assert confirmed.judged.verdict is Verdict.PASS
    assert order_statistic_levels(confirmed.judged.effective_requests, 0.95, DEFAULT_CONFIDENCE)[1] == math.inf
    assert confirmed.latency_ms.low < (confirmed.point.measurement.latency_p95_ms or math.nan)
    assert confirmed.latency_ms.high == BOUND_MS


def test_the_speed_is_probed_beside_each_fresh_server(problem: Problem, tmp_path: Path) -> None:
    server = RandomServer()
    probes = itertools.cycle([0.02, 0.02, 0.03, 0.03])  # the faster of two counts, before and after each load
    trials = confirm(server, searched(server, LOADS), problem, tmp_path, speed_probe=probes.__next__)
    windows = [window.measurement for trial in trials for window in trial.confirmations]
    assert {window.speed_probe_ms for window in windows} == {round(1000 * math.sqrt(0.02 * 0.03), 3)}


def test_an_unstable_candidate_is_confirmed_if_none_is_stable(problem: Problem, tmp_path: Path) -> None:
    server = RandomServer()
    measured = with_measured(searched(server, {BASELINE: 3, FASTER: 13}), stable=False)
    outcome = assess(confirm(server, measured, problem, tmp_path), problem, BASELINE, FAST)
    assert not_none(outcome.recommended).candidate == FASTER
    assert not_none(outcome.confirmed).judged.verdict is Verdict.PASS


class LossyServer(RandomServer):
    """Loses each measurement of ``never_measured``, or without one the first measurement on each fresh server."""

    def __init__(self, never_measured: Candidate | None = None) -> None:
        super().__init__()
        self.never_measured, self.lost_on = never_measured, set[int]()

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        is_first_on_server = self.never_measured is None and len(self.deployed) not in self.lost_on
        if seconds is not None and (is_first_on_server or endpoint.candidate == self.never_measured):
            self.lost_on.add(len(self.deployed))
            raise MeasurementError("the load generator cannot keep up")
        return super().measure(endpoint, load, seconds)


def test_a_lost_measurement_is_repeated(problem: Problem, tmp_path: Path) -> None:
    server = LossyServer()
    outcome = assess(confirm(server, searched(server, LOADS), problem, tmp_path), problem, BASELINE, FAST)
    confirmed = not_none(outcome.confirmed)
    assert confirmed.judged.verdict is Verdict.PASS
    assert confirmed.windows == confirmed.servers * WINDOWS
    assert "cannot keep up" in (tmp_path / "trials.csv").read_text(), "nothing that happened is lost"


def test_repeatedly_lost_measurements_give_an_undecided_verdict(problem: Problem, tmp_path: Path) -> None:
    server = LossyServer(never_measured=FASTER)
    trials = confirm(server, searched(server, LOADS), problem, tmp_path)
    confirmed = [
        confirmed_load
        for confirmed_load in judge_confirmations(trials, problem)
        if confirmed_load.point.candidate == FASTER
    ]
    assert {confirmed_load.judged.verdict for confirmed_load in confirmed} == {Verdict.UNDECIDED}
    assert {confirmed_load.judged.reason for confirmed_load in confirmed} == {
        "a measurement was lost: the load generator cannot keep up"
    }
    outcome = assess(trials, problem, BASELINE, FAST)
    assert not_none(outcome.recommended).candidate == FAST


class CrashingServer(RandomServer):
    """A server that dies while fresh servers of ``candidate`` are measured, ``left`` times."""

    def __init__(self, candidate: Candidate, left: int) -> None:
        super().__init__()
        self.candidate, self.left = candidate, left

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        if seconds is not None and endpoint.candidate == self.candidate and self.left:
            self.left -= 1
            raise ServerCrashed("tritonserver died (SIGKILL) while measuring")
        return super().measure(endpoint, load, seconds)


def test_a_comparison_continues_after_a_crash(problem: Problem, tmp_path: Path) -> None:
    """No verdict depends on it, so its server is started again."""
    server = CrashingServer(BASELINE, left=1)
    trials = confirm(server, searched(server, LOADS), problem, tmp_path)
    assert not server.left
    outcome = assess(trials, problem, BASELINE, FAST)
    assert outcome.crashes == ()
    (compared,) = (entry for entry in outcome.confirmed_loads if entry.point.candidate == BASELINE)
    assert (compared.servers, compared.has_lost) == (COMPARED_SERVERS, False)
    assert outcome.baseline.gain is not None


def test_a_load_passes_only_without_a_crash_in_its_test(problem: Problem, tmp_path: Path) -> None:
    server = CrashingServer(FASTER, left=2)
    trials = confirm(server, searched(server, LOADS), problem, tmp_path)
    assert all(measurement.throughput_infer_per_sec for trial in trials for _, measurement in trial.measurements)
    outcome = assess(trials, problem, BASELINE, FAST)
    crashed, *passed_loads = (
        confirmed_load for confirmed_load in outcome.confirmed_loads if confirmed_load.point.candidate == FASTER
    )
    assert (crashed.judged.verdict, crashed.crash) == (Verdict.UNDECIDED, outcome.crashes[0])
    assert crashed.servers == COMPARED_SERVERS, "no more, because they cannot change its verdict"
    assert outcome.confirmed in passed_loads
    assert outcome.confirmed.judged.verdict is Verdict.PASS
    assert outcome.crashes == 2 * ("tritonserver died (SIGKILL) while measuring",)
    resumed = TrialsTable(tmp_path / "trials.csv", problem.model, problem.space.fields).read()
    assert assess(resumed, problem, BASELINE, FAST).crashes == outcome.crashes
    step = next_step(outcome, "r", "tune known")
    assert step.advice == "find the cause of the crashes in r/logs before you deploy it"


class OverloadedServer(LoadDependentServer):
    """A fresh server crashes above ``max_concurrency`` requests in flight."""

    def __init__(self, max_concurrency: int) -> None:
        super().__init__()
        self.max_concurrency = max_concurrency

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        if seconds is not None and load.concurrency > self.max_concurrency:
            raise ServerCrashed("tritonserver died (SIGKILL) while measuring")
        return super().measure(endpoint, load, seconds)


class ServerOnceOutOfMemory(LoadDependentServer):
    """A server that cannot be deployed once, after ``LOOKS[0]`` fresh servers."""

    is_left = True

    @contextlib.contextmanager
    def deploy(self, candidate: Candidate, *, fresh: bool = False) -> Iterator[Endpoint]:
        if fresh and len(self.deployed) > LOOKS[0] and self.is_left:
            self.is_left = False
            raise DeploymentError("failed to load: CUDA out of memory", lacks_gpu_memory=True)
        with super().deploy(candidate, fresh=fresh) as endpoint:
            yield endpoint


def cautious_search(server: LoadDependentServer) -> list[Trial]:
    """Return a search that measured higher latencies than fresh servers have, so that a higher load is tested too."""
    loads = [LoadPoint(1, concurrency) for concurrency in (4, 6, 8)]
    measurements = [(load, LoadDependentServer.measure(server, Endpoint("", FASTER), load)) for load in loads]
    slower = [
        (load, replace(measured, latency_p95_ms=1.25 * (measured.latency_p95_ms or 0.0)))
        for load, measured in measurements
    ]
    return [Trial(0, FASTER, tuple(slower))]


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        (OverloadedServer(9), "a fresh server crashed under this load"),
        (ServerOnceOutOfMemory(), "a measurement was lost: failed"),
    ],
)
def test_a_pass_is_kept_if_a_later_server_of_a_higher_load_fails(
    server: LoadDependentServer, reason: str, problem: Problem, tmp_path: Path
) -> None:
    trials = confirm(server, cautious_search(server), problem, tmp_path, seconds=6000)
    lower, failed, *_ = assess(trials, problem, FASTER, FASTER).confirmed_loads
    assert lower.judged.verdict is Verdict.PASS
    assert failed.point.load > lower.point.load
    assert failed.judged.verdict is Verdict.UNDECIDED
    assert failed.judged.reason.startswith(reason)
    outcome = assess(trials, problem, FASTER, FASTER)
    assert outcome.verdict is Verdict.PASS
    assert len(outcome.crashes) == isinstance(server, OverloadedServer), "a crash is not repeated"


def test_wrong_outputs_of_a_later_server_fail_the_candidate(problem: Problem, tmp_path: Path) -> None:
    class WrongLaterOutputs(NoOutputCheck):
        checked = 0

        def check(self, endpoint: Endpoint) -> None:
            self.checked += 1
            if self.checked > LOOKS[0]:
                raise DeploymentError("outputs differ from those of the unbatched baseline")
            super().check(endpoint)

    server = LoadDependentServer()
    confirmer = make_confirmer(
        server, cautious_search(server), problem, tmp_path, Budget(6000), output_check=WrongLaterOutputs()
    )
    (trial,) = confirmer.run(COMPARISONS)
    assert (trial.status, trial.confirmations) == ("failed", ())


@pytest.mark.parametrize(("is_measured_later", "verdict"), [(True, Verdict.PASS), (False, Verdict.UNDECIDED)])
def test_a_pass_does_not_depend_on_later_measurements(
    is_measured_later: bool, verdict: Verdict, problem: Problem
) -> None:
    """The servers of the other candidate differ by so much that a test with their variance between servers fails."""
    server, load, compared_servers = RandomServer(), LoadPoint(1, 12), 6

    def trial(number: int, candidate: Candidate, factors: Sequence[float], first_server: int, error: float) -> Trial:
        confirmations = []
        for fresh, factor in enumerate(factors, first_server):
            for _ in range(WINDOWS):
                latencies_ms = factor * server.random.gamma(16, load.concurrency / 16, size=500)
                window = server.measured(latencies_ms, SERVED[candidate])
                confirmations.append(ConfirmationWindow(fresh, load, window, error))
        return Trial(number, candidate, confirmations=tuple(confirmations))

    tested_first_server = 1 if is_measured_later else compared_servers + 1
    tested = trial(0, FAST, [1.0] * LOOKS[0], tested_first_server, 0.005)
    compared = trial(1, FASTER, [0.4, 1.6] * (compared_servers // 2), LOOKS[0] + 1 if is_measured_later else 1, 0.0)
    confirmed = {
        confirmed_load.point.candidate: confirmed_load
        for confirmed_load in judge_confirmations([tested, compared], problem)
    }
    assert confirmed[FAST].judged.verdict is verdict


@pytest.mark.parametrize("loads", [{BASELINE: 3, FASTER: 13}, {BASELINE: 3}])
def test_a_candidate_passes_on_a_machine_that_is_always_disturbed(
    loads: dict[Candidate, int], problem: Problem, tmp_path: Path
) -> None:
    class DisturbedMachine(RandomServer):
        @contextlib.contextmanager
        def record(self, endpoint: Endpoint) -> Iterator[ResourceUsage]:
            yield ResourceUsage(other_cpu_share=0.5)

    server = DisturbedMachine()
    outcome = assess(confirm(server, searched(server, loads), problem, tmp_path), problem, BASELINE, FAST)
    assert not_none(outcome.recommended).candidate == max(loads, key=lambda candidate: loads[candidate])
    confirmed = not_none(outcome.confirmed)
    assert confirmed.judged.verdict is Verdict.PASS
    assert confirmed.judged.disturbed_share == 1


def test_the_next_candidate_replaces_one_that_cannot_be_deployed_as_written(problem: Problem, tmp_path: Path) -> None:
    server = RandomServer(broken=(FAST, FASTER))
    trials = confirm(server, searched(server, LOADS), problem, tmp_path)
    assert [trial.status for trial in trials] == ["ok", "failed", "failed"]
    outcome = assess(trials, problem, BASELINE, FAST)
    assert not_none(outcome.recommended).candidate == BASELINE


def test_more_candidates_are_planned_if_none_can_be_deployed(problem: Problem, tmp_path: Path) -> None:
    longer_delay = Candidate(64, True, 500)
    server = RandomServer(
        broken=(BASELINE, FAST, FASTER), served={BASELINE: 300.0, FAST: 1000.0, FASTER: 1200.0, longer_delay: 900.0}
    )
    trials = confirm(server, searched(server, {**LOADS, longer_delay: 10}), problem, tmp_path)
    assert [trial.status for trial in trials] == ["failed", "failed", "failed", "ok"]
    outcome = assess(trials, problem, BASELINE, FAST)
    confirmed = not_none(outcome.confirmed)
    assert confirmed.judged.verdict is Verdict.PASS
    assert confirmed.point.candidate == longer_delay


def test_comparisons_come_after_the_test_if_time_is_short(problem: Problem, tmp_path: Path) -> None:
    server = RandomServer()
    measured = searched(server, LOADS)
    point = Point(2, FASTER, *measured[2].measurements[0])
    enough = (LOOKS[0] + 0.5) * plan_server(point, point.load, None).server_seconds
    confirm(server, measured, problem, tmp_path, seconds=enough)
    assert set(server.deployed[: LOOKS[0]]) == {FASTER}
    assert server.deployed[LOOKS[0] + COMPARED_SERVERS :], "the server takes less time than planned"


def test_the_runner_up_is_left_out_first_if_time_is_short(problem: Problem, tmp_path: Path) -> None:
    longer_delay = Candidate(64, True, 500)
    server = RandomServer(served={**SERVED, longer_delay: 1100.0})
    measured = searched(server, {**LOADS, longer_delay: 12})
    point = Point(2, FASTER, *measured[2].measurements[0])
    planned = plan_server(point, point.load, None)
    enough = planned.reserved_seconds(LOOKS[0]) + 2.5 * COMPARED_SERVERS * planned.server_seconds
    confirm(server, measured, problem, tmp_path, seconds=enough)
    assert server.deployed[: 3 * COMPARED_SERVERS] == COMPARED_SERVERS * [FASTER, BASELINE, FAST]


def test_the_test_begins_even_if_the_time_is_too_short_for_a_verdict(problem: Problem, tmp_path: Path) -> None:
    server = RandomServer()
    measured = searched(server, LOADS)
    planned = plan_server(Point(2, FASTER, *measured[2].measurements[0]), LoadPoint(1, 8), None)
    before, seconds = len(server.deployed), replace(planned, windows=FEWER_WINDOWS).server_seconds
    budget = Budget((LOOKS[0] - 1) * seconds, clock=lambda: seconds * (len(server.deployed) - before))
    trials = make_confirmer(server, measured, problem, tmp_path, budget).run(COMPARISONS)
    assert server.deployed[before:] == (LOOKS[0] - 1) * [FASTER]
    outcome = assess(trials, problem, BASELINE, FAST)
    assert undecided_cause(outcome) == f"the time ended after {LOOKS[0] - 1} of at least {LOOKS[0]} fresh servers"


def confirm_in_time(server: TimedServer, problem: Problem, path: Path, seconds: float) -> list[Trial]:
    confirmer = make_confirmer(server, searched(server, LOADS), problem, path, server.budget(seconds))
    return confirmer.run(COMPARISONS)


def test_a_short_budget_tests_a_lower_load_before_the_baseline(problem: Problem, tmp_path: Path) -> None:
    """The first load is given up after one server, so that four with fewer windows can decide about a second one."""
    server = TimedServer(slow={FASTER: (1.5,)})
    trials = confirm_in_time(server, problem, tmp_path, seconds=5 * START_SECONDS + 17.5)
    assert set(server.deployed) == {FASTER}, "no other configuration takes the time"
    first, second = judged_loads(trials, problem).values()
    assert (first.servers, first.windows) == (1, WINDOWS)
    assert second.servers == LOOKS[0]
    assert LOOKS[0] * FEWER_WINDOWS <= second.windows < LOOKS[0] * WINDOWS
    assert second.judged.verdict is Verdict.PASS


def test_servers_that_start_slowly_get_fewer_windows_and_keep_the_budget(problem: Problem, tmp_path: Path) -> None:
    server = TimedServer()
    server.start_seconds = 8.0
    seconds = LOOKS[0] * server.start_seconds + 0.5 * (WINDOWS + (LOOKS[0] - 1) * FEWER_WINDOWS)
    trials = confirm_in_time(server, problem, tmp_path, seconds=seconds)
    assert server.seconds <= seconds
    (tested,) = judged_loads(trials, problem).values()
    assert tested.judged.verdict is Verdict.PASS
    assert (tested.servers, tested.windows) == (LOOKS[0], WINDOWS + (LOOKS[0] - 1) * FEWER_WINDOWS)


def test_deployments_of_the_search_say_how_long_a_fresh_server_takes(problem: Problem, tmp_path: Path) -> None:
    server = TimedServer()
    trials = [replace(trial, deploy_seconds=30.0) for trial in searched(server, LOADS)]
    assert estimate_start_seconds(trials) == 30.0
    assert estimate_start_seconds([replace(trial, deploy_seconds=0.5) for trial in trials]) == START_SECONDS
    make_confirmer(server, trials, problem, tmp_path, server.budget(4 * 32.0)).run(COMPARISONS)
    assert server.deployed[: LOOKS[0]] == LOOKS[0] * [FASTER], "a comparison may take the time of the test"


@pytest.mark.parametrize(
    ("seconds", "share", "is_limited"), [(30, 0.0, True), (60, 0.0, False), (30, 0.5, False)], ids=str
)
def test_a_budget_for_one_load_begins_at_a_load_that_is_likelier_to_pass(
    seconds: float, share: float, is_limited: bool, problem: Problem, tmp_path: Path
) -> None:
    server, plans = TimedServer(), list[ConfirmationPlan]()
    trials = with_measured(searched(server, LOADS), other_cpu_share=share)
    confirmer = make_confirmer(server, trials, problem, tmp_path, server.budget(seconds))
    confirmer.store_plan = plans.append
    confirmer.run(COMPARISONS)
    predictions = plans[0].predictions[plans[0].finalists[0]]
    assert (predictions.highest_first is not None) is is_limited
    if predictions.highest_first is not None:
        assert (
            predictions.log_latency_ratios[predictions.highest_first]
            <= -OTHER_MARGIN
            < predictions.log_latency_ratios[predictions.highest_first + 1]
        )


def test_the_test_of_a_lower_load_begins_even_if_the_time_is_too_short(problem: Problem, tmp_path: Path) -> None:
    server = TimedServer(slow={FASTER: (1.5,)})
    trials = confirm_in_time(server, problem, tmp_path, seconds=4 * START_SECONDS + 8)
    assert set(server.deployed) == {FASTER}
    first, second = judged_loads(trials, problem).values()
    assert second.point.load < first.point.load
    assert 0 < second.servers < LOOKS[0]
    outcome = assess(trials, problem, BASELINE, FAST)
    assert outcome.recommended == second.point
    assert undecided_cause(outcome) == f"the time ended after {second.servers} of at least {LOOKS[0]} fresh servers"


def test_a_load_that_meets_the_bound_is_tested_until_the_time_ends(problem: Problem, tmp_path: Path) -> None:
    """Fresh servers take longer than expected, so that the time is too short for a verdict."""
    server = TimedServer()
    server.start_seconds = 8.0
    trials = confirm_in_time(server, problem, tmp_path, seconds=LOOKS[0] * (START_SECONDS + 4))
    (tested,) = judged_loads(trials, problem).values()
    assert tested.servers == 2
    outcome = assess(trials, problem, BASELINE, FAST)
    assert undecided_cause(outcome) == f"the time ended after 2 of at least {LOOKS[0]} fresh servers"


@pytest.mark.parametrize(("share", "verdict"), [(0.0, Verdict.FAIL), (0.9, Verdict.UNDECIDED)])
def test_tests_that_miss_the_bound_are_a_fail_on_a_quiet_machine_only(
    share: float, verdict: Verdict, problem: Problem, tmp_path: Path
) -> None:
    class SharedMachine(RandomServer):
        @contextlib.contextmanager
        def record(self, endpoint: Endpoint) -> Iterator[ResourceUsage]:
            yield ResourceUsage(other_cpu_share=share)

    server = SharedMachine(slow={FASTER: (9.0,)})
    trials = confirm(server, searched(server, {FASTER: LOADS[FASTER]}), problem, tmp_path)
    outcome = assess(trials, problem, BASELINE, FAST)
    assert outcome.recommended is None
    assert outcome.closest is not None
    assert outcome.verdict is verdict
    assert ("took more than" in undecided_cause(outcome)) is (verdict is Verdict.UNDECIDED)


def test_only_the_windows_during_a_disturbance_do_not_count(problem: Problem, tmp_path: Path) -> None:
    """Another program takes half of the CPUs during one window of each server, in which latencies double."""

    class BrieflySharedMachine(RandomServer):
        def measure_windows(
            self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int
        ) -> list[Measurement]:
            windows = super().measure_windows(endpoint, load, seconds, count - 1)
            slow = super().measure(endpoint, replace(load, concurrency=2 * load.concurrency), seconds)
            return [
                replace(window, begin_unix_seconds=number * seconds, end_unix_seconds=(number + 1) * seconds)
                for number, window in enumerate([slow, *windows])
            ]

        @contextlib.contextmanager
        def record(self, endpoint: Endpoint) -> Iterator[ResourceUsage]:
            seconds = MIN_WINDOW_SECONDS
            quiet = [CpuInterval(n * seconds, (n + 1) * seconds, 2 * seconds, 0.0) for n in range(1, WINDOWS)]
            yield ResourceUsage(cpu_intervals=[CpuInterval(0.0, seconds, 2 * seconds, seconds), *quiet])

    server = BrieflySharedMachine()
    trials = with_measured(searched(server, {FAST: LOADS[FAST]}), other_cpu_share=0.0)
    trials = confirm(server, trials, problem, tmp_path)
    windows = [window.measurement for trial in trials for window in trial.confirmations]
    assert {window.stable for window in windows} == {True, False}
    assert all(window.stable is (window.begin_unix_seconds != 0) for window in windows)
    assert all(window.disturbed is not window.stable for window in windows)
    confirmed = not_none(assess(trials, problem, BASELINE, FAST).confirmed)
    assert confirmed.judged.verdict is Verdict.PASS
    assert confirmed.judged.disturbed_share == 1 / WINDOWS


def test_a_spent_budget_confirms_nothing(problem: Problem, tmp_path: Path) -> None:
    server = RandomServer()
    trials = confirm(server, searched(server, LOADS), problem, tmp_path, seconds=1e-9)
    assert not any(trial.confirmations for trial in trials)
    outcome = assess(trials, problem, BASELINE, FAST)
    assert outcome.confirmed is None
    assert outcome.recommended is not None


def test_nothing_is_confirmed_if_nothing_meets_the_bound(problem: Problem, tmp_path: Path) -> None:
    server = RandomServer()
    confirm(server, searched(server, {BASELINE: 64, FAST: 64}), problem, tmp_path)
    assert server.deployed == []


def test_a_constraint_on_memory_is_part_of_the_verdict(problem: Problem, tmp_path: Path) -> None:
    class HeavyServer(RandomServer):
        @contextlib.contextmanager
        def record(self, endpoint: Endpoint) -> Iterator[ResourceUsage]:
            yield ResourceUsage(server_memory_bytes=2e9 if endpoint.candidate == FASTER and self.deployed else 1e9)

    server = HeavyServer()
    bounded = replace(problem, sla=Sla((*problem.sla, Constraint("memory", 1.5e9))))
    measured = with_measured(searched(server, LOADS), server_memory_bytes=1e9)
    outcome = assess(confirm(server, measured, bounded, tmp_path), bounded, BASELINE, FAST)
    assert not_none(outcome.recommended).candidate == FAST


@pytest.mark.parametrize(("rise_ms", "expected"), [(0.0, Verdict.PASS), (40.0, Verdict.UNDECIDED)])
def test_a_rising_time_to_first_response_shows_that_the_queue_grows(rise_ms: float, expected: Verdict) -> None:
    """Only the time to first response is bounded, and it stays within its bound."""
    load, problem = (
        LoadPoint(1, request_rate=50.0),
        replace(drawn_problem(), sla=Sla.from_bounds({"ttft-p95": 200.0})),
    )
    trial = Trial(1, FASTER)
    for server in range(1, LOOKS[0] + 1):
        for number in range(WINDOWS):
            mean_ms = 60.0 + rise_ms * number / WINDOWS
            times_ms = mean_ms * np.exp(np.random.default_rng([server, number]).normal(0, 0.1, 500))
            measured = Measurement(
                throughput_infer_per_sec=50.0,
                ttft_avg_ms=mean_ms,
                ttft_p50_ms=float(np.quantile(times_ms, 0.5)),
                ttft_p95_ms=float(np.quantile(times_ms, 0.95)),
                ttft_sketch=sketch_latencies(times_ms),
                requests=500,
                stable=True,
            )
            trial = trial.with_confirmation(ConfirmationWindow(server, load, measured, 0.01))
    (confirmed,) = judge_confirmations([trial], replace(problem, open_loop=True))
    assert confirmed.judged.verdict is expected
    assert ("time to first response rose" in confirmed.judged.reason) == (expected is Verdict.UNDECIDED)


@pytest.mark.parametrize(
    ("times", "seconds"),
    [
        (None, 0.5),
        (RequestTimes(), 0.5),
        (RequestTimes("spike:2s", period_seconds=2.0), 2.0),
        (RequestTimes("spike:0.2s", period_seconds=0.2), 0.6),
        (RequestTimes("spike:30s", period_seconds=30.0), 30.0),
        (RequestTimes("trace.csv", recorded_requests=3000), 3.0),
        (RequestTimes("trace.csv", recorded_requests=20_000), 0.5),
    ],
)
def test_a_window_has_whole_periods(times: RequestTimes | None, seconds: float) -> None:
    load = LoadPoint(1, request_rate=1000.0)
    point = Point(0, FAST, load, Measurement(1000.0))
    planned = plan_server(point, load, times)
    assert planned.window_seconds == pytest.approx(seconds)
    lead_in = min(times.period_at(1000.0), 2.0) if times else 0.0
    assert planned.server_seconds == pytest.approx(START_SECONDS + lead_in + WINDOWS * seconds)
