"""Whether a recommendation still holds, on a server that is what it was or has become another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from objectives.confidence import Verdict
from optimizer.budget import Budget
from optimizer.confirm.confirmer import Confirmer
from optimizer.confirm.verification import Verified, entrants, verify
from optimizer.measuring import Measuring
from optimizer.outcome import assess
from optimizer.problem import Problem
from optimizer.report.live import QuietWatcher
from optimizer.store.trials_table import TrialsTable
from optimizer.trial import Candidate
from tests.drawn_server import BASELINE, FAST, FASTER, LOADS, Drawing, drawn_problem, searched


@pytest.fixture
def problem() -> Problem:
    return drawn_problem()


def verified(path: Path, problem: Problem, **server: object) -> Verified:
    before = searched(Drawing(), LOADS)
    outcome = assess(before, problem, BASELINE, FAST)
    wanted = entrants(outcome, before, problem)
    assert [one.candidate for one in wanted] == [FASTER, FAST, BASELINE]
    now = Drawing(**server)  # type: ignore[arg-type]
    measuring = Measuring(now, now, TrialsTable(path / "trials.csv", "drawn", {}), QuietWatcher())
    confirmer = Confirmer(problem, now, measuring, Budget(600), before)
    confirmer.measure(wanted)
    return verify(confirmer.trials, wanted, problem)


def test_on_the_same_server_it_holds(problem: Problem, tmp_path: Path) -> None:
    found = verified(tmp_path, problem)
    assert found.holds
    assert found.reason == ""
    assert [one.judged.verdict for one in found.found] == 3 * [Verdict.PASS]


def test_a_winner_that_misses_its_bound_does_not_hold(problem: Problem, tmp_path: Path) -> None:
    found = verified(tmp_path, problem, slow={FASTER: (1.6,)})
    assert not found.holds
    assert not found.verdict_holds
    assert "p95 <= 20 ms: misses" in found.reason


def test_a_runner_up_that_serves_more_breaks_the_ranking(problem: Problem, tmp_path: Path) -> None:
    found = verified(tmp_path, problem, served={BASELINE: 300.0, FAST: 1500.0, FASTER: 1200.0})
    assert found.verdict_holds
    assert not found.ranking_holds
    assert found.reason == "trial 1 now serves more within the bounds"


@pytest.mark.parametrize("broken", [FASTER, FAST])
def test_what_can_no_longer_be_deployed_is_told(problem: Problem, tmp_path: Path, broken: Candidate) -> None:
    found = verified(tmp_path, problem, broken=(broken,))
    assert found.failed == ((broken, "config.pbtxt does not load"),)
    assert found.holds == (broken == FAST)


def test_a_run_that_recommends_nothing_has_nothing_to_verify(problem: Problem) -> None:
    trials = [replace(trial, measurements=()) for trial in searched(Drawing(), LOADS)]
    assert entrants(assess(trials, problem, BASELINE, FAST), trials, problem) == []
