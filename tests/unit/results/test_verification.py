"""Tests of whether a recommendation still holds, on an unchanged or a changed server."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from objectives.metrics import METRICS, Measurement
from objectives.queue_memory import QueuedLoad
from objectives.sequential import LOOKS
from objectives.sla import Sla, Verdict
from optimizer.config.problem import Problem
from optimizer.confirmation.confirmer import Confirmer
from optimizer.confirmation.server_plan import COMPARED_SERVERS
from optimizer.confirmation.verdicts import judge_confirmations, queued_load
from optimizer.core.budget import Budget
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.load_shapes import RequestTimes
from optimizer.core.trial import ConfirmationWindow, Crash, LoadPoint, Point, Trial
from optimizer.measure.measurer import Measurer
from optimizer.results.progress_observers import QuietObserver
from optimizer.results.recommendation import assess
from optimizer.results.verification import (
    Repetition,
    Verification,
    VerificationResult,
    judge_verification,
    print_verification,
    verification_candidates,
)
from optimizer.store.run_folder import RunFolder
from optimizer.store.trials_table import TrialsTable
from tests.conftest import measurement
from tests.random_server import (
    BASELINE,
    FAST,
    FASTER,
    LOADS,
    SERVED,
    BestPointObserver,
    RandomServer,
    confirm,
    drawn_problem,
    searched,
    with_measured,
)


@pytest.fixture
def problem() -> Problem:
    return drawn_problem()


def with_recommendation(problem: Problem, trials: Sequence[Trial] = ()) -> tuple[list[Trial], Point]:
    """Return ``trials``, by default those of a search, with their recommendation."""
    trials = list(trials) or searched(RandomServer(), LOADS)
    recommended = assess(trials, problem, BASELINE, FAST).recommended
    assert recommended is not None
    return trials, recommended


def verified(
    path: Path, problem: Problem, budget_seconds: float = 600, before: Sequence[Trial] = (), **server: Any
) -> Verification:
    before, recommended = with_recommendation(problem, before)
    candidates = verification_candidates(recommended, before, problem, is_cross_checked=False)
    assert [candidate.candidate for candidate in candidates] == [FASTER, FAST, BASELINE]
    now = RandomServer(**server)
    measuring = Measurer(now, now, TrialsTable(path / "trials.csv", "drawn", {}), QuietObserver())
    trials = Confirmer(problem, now, measuring, Budget(budget_seconds), before).test_recommendation(
        recommended, candidates[1:]
    )
    return judge_verification(trials, candidates, problem)


def test_perf_analyzer_checks_the_recommendation_only(problem: Problem) -> None:
    trials, recommended = with_recommendation(problem)
    checked = verification_candidates(recommended, trials, problem, is_cross_checked=True)
    tested, *runners_up = verification_candidates(recommended, trials, problem, is_cross_checked=False)
    assert checked == [replace(tested, is_cross_checked=True), *runners_up]
    assert checked[0].server_seconds > tested.server_seconds


def test_a_recommendation_holds_on_the_same_server(problem: Problem, tmp_path: Path) -> None:
    verification = verified(tmp_path, problem)
    assert verification.holds
    assert verification.reason == ""
    errors = [confirmed.error for confirmed in verification.measured]
    assert errors == pytest.approx([1 - problem.confidence, 0.0, 0.0]), "the test has the whole error of a run"
    verdicts = [confirmed.judged.verdict for confirmed in verification.measured]
    assert verdicts == [Verdict.PASS, Verdict.UNDECIDED, Verdict.UNDECIDED], "the runners-up are not tested"


def test_the_usual_states_of_the_run_do_not_count(problem: Problem, tmp_path: Path) -> None:
    """Other programs disturbed the search, but not the servers of the verification."""
    problem, searched_trials = replace(problem, cpu_count=2), searched(RandomServer(), LOADS)
    before = [
        with_measured([trial], measure_seconds=10.0, other_cpu_share=0.5 * (trial.candidate == BASELINE))[0]
        for trial in searched_trials
    ]
    verification = verified(tmp_path, problem, before=before)
    assert verification.holds
    assert all(confirmed.judged.latency_rise == 0 for confirmed in verification.measured)


def test_a_crash_in_the_test_of_the_run_does_not_count(problem: Problem, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    server = RandomServer()
    before = confirm(server, searched(server, LOADS), problem, tmp_path / "run")
    confirmed = assess(before, problem, BASELINE, FAST).confirmed
    assert confirmed is not None
    crash = Crash("tritonserver died (SIGKILL) while measuring", confirmed.point.load, confirmed.error)
    before = [
        replace(trial, crashes=(crash,)) if trial.number == confirmed.point.trial else trial for trial in before
    ]
    assert assess(before, problem, BASELINE, FAST).verdict is Verdict.UNDECIDED
    verification = verified(tmp_path, problem, before=before)
    assert verification.holds, verification.reason
    assert verification.measured[0].servers == LOOKS[0], "windows of the run do not count"


def test_a_recommendation_that_misses_its_bound_does_not_hold(problem: Problem, tmp_path: Path) -> None:
    verification = verified(tmp_path, problem, slow={FASTER: (1.6,)})
    assert not verification.holds
    assert not verification.verdict_holds
    assert verification.verdict is Verdict.FAIL
    assert re.fullmatch(
        rf"the test ended after 2 of at least {LOOKS[0]} fresh servers, and p95 <= 20 ms \(\d\d\.\d ms from \d+ "
        r"effective requests\) was not likely to pass in the time that was left",
        verification.reason,
    ), verification.reason
    assert next_steps(verification, problem) == SEARCH


class RateServer(RandomServer):
    """A server that answers up to ``capacity`` requests per second, with latencies of about 5 ms below it.

    A server that was not warmed up answers half as many.
    """

    def __init__(self, capacity: float) -> None:
        super().__init__()
        self.capacity = capacity
        self.is_warm = True

    @contextlib.contextmanager
    def deploy(self, candidate: Candidate, *, fresh: bool = False) -> Iterator[Endpoint]:
        with super().deploy(candidate, fresh=fresh) as endpoint:
            self.is_warm = False
            yield endpoint

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> None:
        self.is_warm = True

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        capacity = self.capacity if self.is_warm else self.capacity / 2
        served = min(load.request_rate, capacity)
        measured = self.measured(self.random.gamma(4, 1.25, size=int(served * (seconds or 2))), served)
        return replace(measured, overloaded=load.request_rate > capacity)


def test_the_capacity_is_that_of_the_machine_that_is_tested(problem: Problem, tmp_path: Path) -> None:
    """Near it fewer of the same requests are independent. That of the machine of the search is 2,000 requests/s."""
    problem = replace(problem, open_loop=True, request_times=RequestTimes())
    search, load = RateServer(2000.0), LoadPoint(1, request_rate=500.0)
    rates = (load, LoadPoint(1, request_rate=3000.0))
    measured = tuple((rate, search.measure(Endpoint("", FASTER), rate)) for rate in rates)
    effective = []
    for capacity in (900.0, 503.0):
        now = RateServer(capacity)
        measuring = Measurer(now, now, TrialsTable(tmp_path / f"{capacity}.csv", "drawn", {}), QuietObserver())
        confirmer = Confirmer(problem, now, measuring, Budget(600), [Trial(0, FASTER, measured)])
        trials = confirmer.test_recommendation(Point(0, FASTER, *measured[0]), [])
        assert queued_load(trials, trials[0], load, problem) == QueuedLoad(500.0, capacity)
        effective.append(judge_confirmations(trials, problem)[0].judged.effective_requests)
    assert 0 < 2 * effective[1] < effective[0]


def test_the_best_so_far_is_one_that_is_measured_now(problem: Problem, tmp_path: Path) -> None:
    """The recommendation misses its bound now, so a runner-up is the best, and before it nothing is."""
    before, recommended = with_recommendation(problem)
    candidates = verification_candidates(recommended, before, problem, is_cross_checked=False)
    now, observer = RandomServer(slow={FASTER: (9.0,)}), BestPointObserver()
    measuring = Measurer(now, now, TrialsTable(tmp_path / "trials.csv", "drawn", {}), observer)
    Confirmer(problem, now, measuring, Budget(600), before).test_recommendation(recommended, candidates[1:])
    first, second, *_ = observer.best_points
    assert first is None
    assert second is not None
    assert second.candidate == FAST
    searched_before = [measured for trial in before for _, measured in trial.measurements]
    assert not any(point.measurement in searched_before for point in observer.best_points if point)


def test_a_test_that_the_time_ends_is_undecided(problem: Problem, tmp_path: Path) -> None:
    before, recommended = with_recommendation(problem)
    now = RandomServer()
    measuring = Measurer(now, now, TrialsTable(tmp_path / "trials.csv", "drawn", {}), QuietObserver())
    candidates = verification_candidates(recommended, before, problem, is_cross_checked=False)[:1]
    confirmer = Confirmer(problem, now, measuring, Budget(600), before)
    assert confirmer.measure(candidates[0])
    verification = judge_verification(confirmer.trials, candidates, problem)
    assert not verification.holds
    assert verification.verdict is Verdict.UNDECIDED
    assert verification.reason == f"the time ended after 1 of at least {LOOKS[0]} fresh servers"


def test_a_runner_up_that_serves_more_breaks_the_ranking(problem: Problem, tmp_path: Path) -> None:
    verification = verified(tmp_path, problem, served={BASELINE: 300.0, FAST: 1500.0, FASTER: 1200.0})
    assert verification.verdict_holds
    assert not verification.ranking_holds
    assert verification.reason == "trial 1 now has more throughput within the SLA"
    assert verification.verdict is Verdict.FAIL
    assert next_steps(verification, problem) == SEARCH


@pytest.mark.parametrize(("served", "holds"), [(1300.0, True), (1340.0, False)])
def test_the_comparisons_with_the_runners_up_share_the_error(
    problem: Problem, tmp_path: Path, served: float, holds: bool
) -> None:
    """The interval of a single comparison would begin at 1.003 times the recommendation, at 1,300 requests/s."""
    verification = verified(tmp_path, problem, served={BASELINE: 300.0, FAST: served, FASTER: 1200.0})
    assert verification.ranking_holds is holds


def test_a_runner_up_with_a_better_first_objective_breaks_the_ranking(problem: Problem, tmp_path: Path) -> None:
    """All are measured with one request in flight, and the runner-up serves less."""
    problem = replace(problem, objectives=(METRICS["latency-p95"],))
    before = searched(RandomServer(), dict.fromkeys(LOADS, 1))
    verification = verified(tmp_path, problem, before=before, slow={FASTER: (1.5,)})
    assert verification.verdict_holds
    assert not verification.ranking_holds
    assert verification.reason == "trial 1 now has a lower p95 within the SLA"
    (tmp_path / "more").mkdir()
    served = {**SERVED, FAST: 2400.0}
    assert verified(tmp_path / "more", problem, before=before, served=served, slow={FAST: (3.0,)}).ranking_holds


def test_a_budget_that_is_too_short_for_a_server_is_the_reason(problem: Problem, tmp_path: Path) -> None:
    verification = verified(tmp_path, problem, budget_seconds=0)
    assert not verification.measured
    assert verification.verdict is Verdict.UNDECIDED
    assert "could not be measured: the time ended before its first fresh server" in verification.reason
    assert dict(verification.failed)[BASELINE] == "the time ended before its first fresh server was measured"
    assert next_steps(verification, problem) == LONGER


REPETITION = Repetition("tune verify --fresh r/1", "tune verify --fresh --budget 60s r/1", "tune --warm-start r/1 m")


def stored(verification: Verification, problem: Problem) -> VerificationResult:
    run, folder = RunFolder(Path("r/1")), RunFolder(Path("r/1/verify/2"))
    return VerificationResult(verification, with_recommendation(problem)[1], problem, run, folder, REPETITION)


def test_the_ranking_is_not_decided_without_the_runners_up(problem: Problem, tmp_path: Path) -> None:
    before, recommended = with_recommendation(problem)
    now = RandomServer()
    measuring = Measurer(now, now, TrialsTable(tmp_path / "trials.csv", "drawn", {}), QuietObserver())
    candidates = verification_candidates(recommended, before, problem, is_cross_checked=False)
    trials = Confirmer(problem, now, measuring, Budget(600), before).test_recommendation(recommended, [])
    verification = judge_verification(trials, candidates, problem)
    assert verification.verdict_holds
    assert verification.ranking_holds is None
    assert verification.verdict is Verdict.UNDECIDED
    assert verification.reason == "; ".join(f"the time ended before trial {n} was measured" for n in (1, 0))
    text = io.StringIO()
    print_verification(Console(file=text, width=80), stored(verification, problem))
    lines = text.getvalue().splitlines()
    assert lines[-4:] == [
        "next          deploy it:",
        "              tune emit r/1",
        "              or repeat the test, with time for the other configurations:",
        f"              {REPETITION.longer_command}",
    ]
    assert "verdict       holds, the ranking of the configurations is not decided" in lines
    assert any(line.startswith("cause         the time ended") for line in lines)
    assert max(map(len, lines)) <= 80, "no word is broken at the end of a line"


def test_time_that_the_test_leaves_is_used_for_the_runners_up(problem: Problem, tmp_path: Path) -> None:
    """The time seems too short at first, but these measurements take none."""
    trials, recommended = with_recommendation(problem)
    tested, *_ = verification_candidates(recommended, trials, problem, is_cross_checked=False)
    verification = verified(tmp_path, problem, budget_seconds=tested.reserved_seconds(LOOKS[0]))
    assert [candidate.servers for candidate in verification.measured] == [
        LOOKS[0],
        COMPARED_SERVERS,
        COMPARED_SERVERS,
    ]
    assert verification.ranking_holds


@pytest.mark.parametrize("broken", [FASTER, FAST])
def test_a_candidate_that_cannot_be_deployed_is_reported(problem: Problem, tmp_path: Path, broken: Candidate) -> None:
    verification = verified(tmp_path, problem, broken=(broken,))
    assert verification.failed == ((broken, "config.pbtxt does not load"),)
    assert verification.holds == (broken == FAST)
    assert verification.verdict is (Verdict.PASS if broken == FAST else Verdict.FAIL)
    text = io.StringIO()
    print_verification(Console(file=text, width=80), stored(verification, problem))
    assert ("recommended, trial " in text.getvalue()) == ("  was  " in text.getvalue()) == (broken == FAST)
    advice = "remove the cause (see r/1/verify/2/logs), then repeat the test:"
    assert (next_steps(verification, problem) == [advice, REPETITION.command]) is (broken == FASTER)


def test_other_configurations_do_not_take_the_time_that_the_recommendation_lacks(
    problem: Problem, tmp_path: Path
) -> None:
    verification = verified(tmp_path, problem, budget_seconds=12)  # enough for two servers, but not for a test
    assert verification.verdict is Verdict.UNDECIDED
    assert not verification.measured


def next_steps(verification: Verification, problem: Problem) -> list[str]:
    """Return the lines of the next step that the terminal shows, and check that of verify.json."""
    text, result = io.StringIO(), stored(verification, problem)
    print_verification(Console(file=text, width=120), result)
    lines = [line[14:] for line in text.getvalue().partition("next  ")[2].splitlines()]
    assert result.document()["next_command"] == lines[1]
    return [text.getvalue().partition("next  ")[2].splitlines()[0].strip(), *lines[1:]]


SEARCH = ["search again on this server:", REPETITION.search_command]
LONGER = ["repeat the test with a larger --budget:", REPETITION.longer_command]
LONGER_AND_QUIET = ["stop other programs on this machine, then repeat the test:", REPETITION.longer_command]


def judged(problem: Problem, *servers: Measurement, crash: str = "") -> Verification:
    """Return the verification of a recommendation alone, with 8 windows like these on each fresh server."""
    before, recommended = with_recommendation(problem)
    plan = verification_candidates(recommended, before, problem, is_cross_checked=False)[0]
    windows = tuple(
        ConfirmationWindow(number, plan.load, window, plan.error)
        for number, window in enumerate(servers, start=1)
        for _ in range(8)
    )
    crashes = (Crash(crash, plan.load, plan.error),) if crash else ()
    trials = [
        replace(trial, confirmations=windows, crashes=crashes) if trial.number == plan.trial else trial
        for trial in before
    ]
    return judge_verification(trials, [plan], problem)


@pytest.mark.parametrize(
    ("latencies_ms", "stable", "cause", "step"),
    [
        ([], True, "the time ended before its first fresh server was measured", LONGER),
        ([10.0] * 2, True, "the time ended after 2 of at least 4 fresh servers", LONGER),
        ([19.0, 21.5], True, "the test ended after 2 of at least 4 fresh servers, and p95 <= 20 ms (", LONGER),
        ([19.5] * LOOKS[0], True, " % of the requests are slower than 20 ms, and 5 % may be", LONGER),
        ([20.2] * LOOKS[0], True, " % of the requests are slower than 20 ms, and 5 % may be", SEARCH),
        ([19.5] * LOOKS[0], False, "other programs disturbed 100 % of the windows", LONGER_AND_QUIET),
        ([19.95] * LOOKS[-1], True, " % of the requests are slower than 20 ms, and 5 % may be", SEARCH),
        ([19.95] * LOOKS[-1], False, "other programs disturbed 100 % of the windows", LONGER_AND_QUIET),
    ],
    ids=[
        "no server",
        "two servers",
        "given up",
        "share near the limit",
        "just over",
        "disturbed",
        "all servers",
        "all disturbed",
    ],
)
def test_an_undecided_test_has_its_cause_and_a_next_step(
    latencies_ms: list[float], stable: bool, cause: str, step: list[str], problem: Problem
) -> None:
    verification = judged(problem, *(measurement(1000.0, p95_ms, stable=stable) for p95_ms in latencies_ms))
    assert verification.verdict is Verdict.UNDECIDED
    assert cause in verification.reason
    assert next_steps(verification, problem) == step


@pytest.mark.parametrize(("infer_per_sec", "verdict"), [(500.0, Verdict.FAIL), (990.0, Verdict.UNDECIDED)])
def test_the_interval_of_the_throughput_shows_whether_a_short_test_may_pass(
    infer_per_sec: float, verdict: Verdict, problem: Problem
) -> None:
    bounded = replace(problem, sla=Sla.from_bounds({"p95": 20.0, "throughput": 1000.0}))
    assert judged(bounded, *[measurement(infer_per_sec, 10.0)] * 2).verdict is verdict


def test_the_cause_of_a_crash_is_found_before_the_test_is_repeated(problem: Problem) -> None:
    verification = judged(problem, *[measurement(1000.0, 10.0)] * LOOKS[0], crash="tritonserver died (SIGKILL)")
    assert verification.verdict is Verdict.UNDECIDED
    assert verification.reason == "a fresh server crashed under this load: tritonserver died (SIGKILL)"
    advice = "find the cause in r/1/verify/2/logs, then repeat the test:"
    assert next_steps(verification, problem) == [advice, REPETITION.command]


@pytest.mark.parametrize("slow", [False, True])
def test_the_next_step_after_a_test_that_passed_is_to_deploy(slow: bool, problem: Problem, tmp_path: Path) -> None:
    verification = verified(tmp_path, problem, slow={FASTER: (1.6,)} if slow else {})
    text = io.StringIO()
    print_verification(Console(file=text, width=80), stored(verification, problem))
    assert ("next          deploy it:\n              tune emit r/1\n" in text.getvalue()) is not slow
    assert f"the recommendation {'does not hold' if slow else 'holds'}" in text.getvalue()


def test_a_test_that_measured_nothing_is_shown_as_undecided(problem: Problem, tmp_path: Path) -> None:
    verification = verified(tmp_path, problem, budget_seconds=0)
    text = io.StringIO()
    print_verification(Console(file=text, width=80), stored(verification, problem))
    assert "the recommendation is UNDECIDED" in text.getvalue()
    assert "does not hold" not in text.getvalue()
    assert stored(verification, problem).document()["verdict"] == "UNDECIDED"
