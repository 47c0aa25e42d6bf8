"""The line before the first measurement, and the notes on a run's measurements and recommendation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import cast

import pytest

from objectives.metrics import METRICS, Measurement
from objectives.sequential import LOOKS
from objectives.sla import Sla, Verdict
from optimizer.config.problem import Problem
from optimizer.confirmation.confirmer import Confirmer
from optimizer.confirmation.plan import ConfirmationPlan
from optimizer.confirmation.server_plan import (
    CROSS_CHECK_START_SECONDS,
    CROSS_CHECK_WINDOWS,
    MIN_WINDOW_SECONDS,
    START_SECONDS,
    WINDOWS,
)
from optimizer.core.budget import Budget, RunMode
from optimizer.core.endpoint import Endpoint
from optimizer.core.notes import (
    ConfirmationComplete,
    ConfirmationLeftOut,
    DisturbedWindowsCounted,
    DisturbedWindowsLeftOut,
    HighestConcurrency,
    LessThanInSearch,
    NextVerdictNeeds,
    Note,
    SpeedVaried,
    UntestedServedMore,
    UsualStatesJudged,
    present,
)
from optimizer.core.trial import ConfirmationWindow, LoadPoint, Trial
from optimizer.measure.measurer import Measurer
from optimizer.options.option_reader import run_options
from optimizer.results.formatting import bounds
from optimizer.results.progress_observers import QuietObserver
from optimizer.results.recommendation import assess
from optimizer.results.summary import UNKNOWN_TESTS, RemainingTests
from optimizer.store.trials_table import TrialsTable
from optimizer.study.run_messages import (
    note_on_tests,
    notes_on_measurements,
    notes_on_outcome,
    notes_on_throughput,
    start_line,
)
from optimizer.study.run_record import RunRecord
from optimizer.study.study import StudyResult
from optimizer.study.task import Task
from tests.random_server import (
    BASELINE,
    BOUND_MS,
    COMPARISONS,
    FAST,
    FASTER,
    LOADS,
    RandomServer,
    drawn_problem,
    searched,
)

REQUESTS = Path(__file__).parents[2] / "data" / "requests.json"
FOLDER = Path("results/drawn/1")


@pytest.mark.parametrize(
    ("values", "server"),
    [
        ({}, "the embedded server"),
        ({"target": "local", "tritonserver": "tritonserver"}, "the tritonserver of this machine"),
        ({"target": "remote", "url": "grpcs://triton:8001"}, "the server at triton:8001"),
        ({"cluster": "auto"}, "embedded servers of a cluster"),
    ],
)
def test_the_line_names_the_server(values: dict[str, object], server: str) -> None:
    problem = drawn_problem()
    line = start_line(RunMode.SEARCH_AND_CONFIRM, 0.0, problem, run_options("drawn", values), 180.0, FOLDER)
    assert line == (
        f"tuning drawn on {server}, for at most 3 min: highest throughput within {bounds(problem.sla)}; "
        "results in results/drawn/1"
    )


def test_the_line_has_the_limit_of_trials_and_all_objectives() -> None:
    problem = replace(drawn_problem(), objectives=(METRICS["memory"], METRICS["throughput"]), sla=Sla(()))
    options, goal = run_options("drawn", {"max-trials": 5}), "lowest memory, then highest throughput, without a bound"
    assert start_line(RunMode.SEARCH, 12.0, problem, options, 61.0, FOLDER) == (
        "continuing drawn on the embedded server, for at most 1 min 1 s and 5 trials: "
        f"{goal}; results in results/drawn/1"
    )
    assert start_line(RunMode.CONFIRM, 12.0, problem, options, 61.0, FOLDER) == (
        "testing the recommendation for drawn on the embedded server, for at most 1 min 1 s: "
        "no bound; results in results/drawn/1"
    ), "a test has no trials"


@pytest.mark.parametrize(
    ("mode", "spent_seconds", "action"),
    [
        (RunMode.SEARCH, 0.0, "tuning"),  # of a batch, whose folder exists before
        (RunMode.SEARCH, 12.0, "continuing"),
        (RunMode.SEARCH_AND_CONFIRM, 12.0, "continuing"),
        (RunMode.CONFIRM, 12.0, "testing the recommendation for"),
    ],
)
def test_only_a_run_with_measurements_is_continued(mode: RunMode, spent_seconds: float, action: str) -> None:
    line = start_line(mode, spent_seconds, drawn_problem(), run_options("drawn", {}), 61.0, FOLDER)
    assert line.startswith(f"{action} drawn on the embedded server")


def outcome_notes(trials: list[Trial], problem: Problem) -> list[Note]:
    """Return the notes on the recommendation of a run on a server of the user, whose log tune does not read."""
    task = cast("Task", SimpleNamespace(problem=problem))
    options = run_options("drawn", {"target": "local", "tritonserver": "tritonserver"})
    return list(present(notes_on_outcome(assess(trials, problem, BASELINE, FAST), trials, task, options)))


@pytest.mark.parametrize(
    ("concurrency", "allowed", "noted"),
    [
        (8, 8, HighestConcurrency(8)),
        (8, 16, None),
        (15, 15, None),  # 18 of 20 ms: the bound limits it as well
    ],
)
def test_a_load_that_only_the_profile_limits_is_noted(
    concurrency: int, allowed: int, noted: HighestConcurrency | None
) -> None:
    problem = replace(drawn_problem(), max_concurrency=allowed)
    assert outcome_notes(searched(RandomServer(), {FASTER: concurrency}), problem) == ([noted] if noted else [])


@pytest.mark.parametrize(("factor", "is_noted"), [(1.3, False), (2.0, True)])
def test_a_search_that_measured_much_more_is_noted(factor: float, is_noted: bool) -> None:
    problem, load = drawn_problem(), LoadPoint(1, 8)
    windows = [
        ConfirmationWindow(server, load, window, 0.01)
        for server in range(1, LOOKS[0] + 1)
        for window in RandomServer().measure_windows(Endpoint("", FASTER), load, 0.5, 8)
    ]
    measured = factor * (windows[0].measurement.throughput_infer_per_sec or 0.0)
    searched = Measurement(measured, latency_p95_ms=12.0, stable=True)
    trial = Trial(1, FASTER, ((load, searched),), confirmations=tuple(windows))
    outcome = assess([trial], problem, BASELINE, FAST)
    assert outcome.confirmed is not None
    assert outcome.recommended is not None
    assert outcome.confirmed.judged.verdict is Verdict.PASS
    served = outcome.recommended.throughput_infer_per_sec
    expected: list[Note] = [LessThanInSearch(measured, served)] if is_noted else []
    assert outcome_notes([trial], problem) == expected
    untested = Trial(2, FAST, ((load, searched),))
    expected += [UntestedServedMore(2, measured)] if is_noted else []
    assert outcome_notes([trial, untested], problem) == expected
    by_latency = replace(problem, objectives=(METRICS["latency-p95"],))
    assert notes_on_throughput(outcome, [trial, untested], by_latency) == (), "a high throughput is not sought"


@pytest.mark.parametrize(
    ("disturbed", "slow_concurrency", "expected"),
    [
        (0, 30, None),
        (1, 30, DisturbedWindowsLeftOut),
        (1, 8, None),  # the bound is met with the disturbed windows too
        (2, 8, DisturbedWindowsCounted),
    ],
)
def test_a_pass_next_to_other_programs_is_noted(
    disturbed: int, slow_concurrency: int, expected: type[Note] | None
) -> None:
    """A quarter or an eighth of the windows of each server is disturbed."""
    problem, load, server = drawn_problem(), LoadPoint(1, 8), RandomServer()
    windows = []
    for number in range(1, LOOKS[0] + 1):
        quiet = server.measure_windows(Endpoint("", FASTER), load, 0.5, 8 - disturbed)
        slow = server.measure_windows(Endpoint("", FASTER), LoadPoint(1, slow_concurrency), 0.5, disturbed)
        measured = [*quiet, *(replace(window, stable=False) for window in slow)]
        windows += [ConfirmationWindow(number, load, window, 0.01) for window in measured]
    trial = Trial(1, FASTER, ((load, windows[0].measurement),), confirmations=tuple(windows))
    notes = outcome_notes([trial], problem)
    assert [type(note) for note in notes] == ([expected] if expected else [])
    if notes and isinstance(notes[0], DisturbedWindowsLeftOut):
        assert notes[0].disturbed_share == 1 / 8
        (missed,) = notes[0].missed
        assert missed.startswith("p95 ")
        assert float(missed.split()[1]) > BOUND_MS


@pytest.mark.parametrize(("shares", "is_noted"), [((0.0, 0.0, 0.5), True), ((0.0, 0.0, 0.0), False)])
def test_a_verdict_on_the_usual_states_is_noted(shares: tuple[float, ...], is_noted: bool) -> None:
    problem, load, server = replace(drawn_problem(), cpu_count=2), LoadPoint(1, 3), RandomServer()
    measured = server.measure(Endpoint("", FASTER), load)
    search = tuple((load, replace(measured, measure_seconds=9.0, other_cpu_share=share)) for share in shares)
    windows = tuple(ConfirmationWindow(number, load, measured, 0.01, 1.5) for number in range(1, LOOKS[0] + 1))
    trial = Trial(1, FASTER, search, confirmations=windows)
    notes = outcome_notes([trial], problem)
    assert [type(note) for note in notes] == ([UsualStatesJudged] if is_noted else [])
    for note in notes:
        assert isinstance(note, UsualStatesJudged)
        assert "so latencies are judged as " in str(note)
        assert note.latency_rise > 0


def test_the_speed_is_compared_over_all_sessions() -> None:
    load = LoadPoint(1, 4)
    first, second = Measurement(100.0, speed_probe_ms=20.0), Measurement(60.0, speed_probe_ms=32.0)
    trial = Trial(0, FAST, ((load, first),), confirmations=(ConfirmationWindow(1, load, second, 0.01),))
    assert SpeedVaried(1.6) in notes_on_measurements([trial])


def confirming_record(
    problem: Problem, plan: ConfirmationPlan | None, values: Mapping[str, object] = MappingProxyType({})
) -> SimpleNamespace:
    """Return the part of a record that the notes on the tests read, of a run with this plan and these options."""
    source = SimpleNamespace(concurrent=(), is_streaming=False)
    return SimpleNamespace(
        environment=SimpleNamespace(options=run_options("drawn", {n: v for n, v in values.items() if v})),
        task=SimpleNamespace(problem=problem, source=source, sequence_length=None, input_data=REQUESTS),
        search_ended="budget",
        confirmation_plan=lambda: plan,
        remaining_tests=UNKNOWN_TESTS,
    )


@pytest.mark.parametrize(
    ("protocol", "cross_check_seconds"),
    [
        ("grpc", CROSS_CHECK_START_SECONDS + CROSS_CHECK_WINDOWS * MIN_WINDOW_SECONDS),
        ("http", 0.0),  # perf_analyzer itself measures the windows
    ],
)
def test_the_time_of_the_next_verdict_includes_the_check_by_perf_analyzer(
    protocol: str, cross_check_seconds: float, tmp_path: Path
) -> None:
    problem, server, plans = drawn_problem(), RandomServer(), list[ConfirmationPlan]()
    measurer = Measurer(server, server, TrialsTable(tmp_path / "trials.csv", "drawn", {}), QuietObserver())
    confirmer = Confirmer(problem, server, measurer, Budget(0.0), searched(server, LOADS), store_plan=plans.append)
    trials = confirmer.run(COMPARISONS)
    record = confirming_record(problem, plans[-1], {"protocol": protocol})
    outcome = assess(trials, problem, *COMPARISONS)
    assert outcome.verdict is Verdict.UNDECIDED
    server_seconds = START_SECONDS + WINDOWS * MIN_WINDOW_SECONDS + cross_check_seconds
    needed_seconds = LOOKS[0] * server_seconds
    for seconds_left, only_confirms in ((-1.0, False), (0.0, True), (needed_seconds, False)):
        result = StudyResult(trials, "budget", seconds_left=seconds_left)
        note = note_on_tests(result, cast("RunRecord", record), outcome, only_confirms=only_confirms)
        assert note == NextVerdictNeeds(LOOKS[0], needed_seconds, seconds_left)
        assert record.remaining_tests == RemainingTests(verdict_seconds=needed_seconds)


def test_only_a_verdict_that_needs_them_has_a_note_on_the_tests_that_are_left(tmp_path: Path) -> None:
    """After a PASS, only ``tune verify`` says whether another load can be tested."""
    problem, server, plans = drawn_problem(), RandomServer(), list[ConfirmationPlan]()
    measurer = Measurer(server, server, TrialsTable(tmp_path / "trials.csv", "drawn", {}), QuietObserver())
    confirmer = Confirmer(problem, server, measurer, Budget(1e6), searched(server, LOADS), store_plan=plans.append)
    result = StudyResult(confirmer.run(COMPARISONS), "converged", seconds_left=1.0)
    passed = assess(result.trials, problem, *COMPARISONS)
    assert passed.verdict is Verdict.PASS
    record = cast("RunRecord", confirming_record(problem, plans[-1]))
    assert note_on_tests(result, record, passed, only_confirms=False) is None
    assert record.remaining_tests == RemainingTests(is_complete=True)
    assert note_on_tests(result, record, passed, only_confirms=True) == ConfirmationComplete()


@pytest.mark.parametrize("no_confirmation", [False, True])
def test_a_recommendation_that_no_confirmation_left_untested_has_a_note(no_confirmation: bool) -> None:
    problem, trials = drawn_problem(), searched(RandomServer(), LOADS)
    record = cast("RunRecord", confirming_record(problem, None, {"no-confirmation": no_confirmation}))
    result, outcome = StudyResult(trials, "converged"), assess(trials, problem, *COMPARISONS)
    note = note_on_tests(result, record, outcome, only_confirms=False)
    assert note == (ConfirmationLeftOut() if no_confirmation else None)
    assert record.remaining_tests == UNKNOWN_TESTS
    tight = replace(problem, sla=Sla.from_bounds({"p95": 0.1}))
    failed = assess(trials, tight, *COMPARISONS)
    assert note_on_tests(result, record, failed, only_confirms=False) is None
