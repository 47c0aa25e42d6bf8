"""A candidate that narrowly missed the bound is deployed again, because deployments differ."""

from __future__ import annotations

import socket
from dataclasses import replace

import optuna
import pytest

from objectives.metrics import Measurement
from objectives.sla import Sla
from optimizer.config.problem import Problem
from optimizer.config.search_space import SearchSpace
from optimizer.core.budget import Budget
from optimizer.core.candidate import Candidate
from optimizer.core.stopwatch import Stopwatch
from optimizer.core.trial import LoadPoint, Trial
from optimizer.search import make_searcher
from optimizer.search.candidate_selector import CandidateSelector
from optimizer.search.candidate_tracker import MAX_DEPLOYMENTS, WORKER, CandidateTracker, StudyWorkers
from optimizer.search.optuna_encoding import CANDIDATE, candidate_to_json
from optimizer.search.optuna_samplers import sampler_for
from optimizer.store.optuna_study import open_study
from optimizer.study.scheduler import Scheduler

SPACE = SearchSpace((1, 16), ("off", 0), ("none",), (1,))
SLOW, FAST = Candidate(1), Candidate(16, dynamic_batching=True)
PROBLEM = Problem("m", SPACE, 1, 16, sla=Sla.from_bounds({"p95": 20.0}))


def trial(number: int, candidate: Candidate, throughput: float, p95_ms: float) -> Trial:
    measurement = Measurement(throughput, latency_p95_ms=p95_ms, requests=500, stable=True)
    return Trial(number, candidate, ((LoadPoint(1, 16), measurement),))


FEASIBLE, MISSED = trial(0, SLOW, 1000.0, 17.0), trial(1, FAST, 1500.0, 20.3)


def chosen(*trials: Trial, repeatable: frozenset[Candidate] = frozenset({SLOW, FAST})) -> Candidate | None:
    decision = CandidateSelector(PROBLEM).decide(trials, {SLOW, FAST}, (), repeatable)
    return decision.candidate if decision else None


def test_a_candidate_that_narrowly_missed_the_bound_is_chosen_again() -> None:
    decision = CandidateSelector(PROBLEM).decide((FEASIBLE, MISSED), {SLOW, FAST}, (), frozenset({SLOW, FAST}))
    assert decision is not None
    assert decision.candidate == FAST
    assert 12 <= decision.load <= 16
    assert decision.gain > 0.05


def test_a_repeat_that_is_much_slower_lowers_the_gain() -> None:
    def gain(*trials: Trial) -> float:
        decision = CandidateSelector(PROBLEM).decide(trials, {SLOW, FAST}, (), frozenset({FAST}))
        assert decision is not None
        return decision.gain

    assert gain(FEASIBLE, MISSED, trial(2, FAST, 900.0, 40.0)) < gain(FEASIBLE, MISSED)


def test_a_candidate_that_met_the_bound_at_the_highest_load_is_not_repeated() -> None:
    """Although it may have met the bound by chance: the confirmation tests it anyway."""
    decision = CandidateSelector(PROBLEM).decide(
        (FEASIBLE, trial(1, FAST, 1500.0, 19.0)), {SLOW, FAST}, (), frozenset({SLOW, FAST})
    )
    assert decision is not None
    assert decision.gain < 0.02


def test_nothing_is_repeated_while_nothing_is_feasible() -> None:
    assert chosen(MISSED) is None
    assert chosen(FEASIBLE, MISSED, repeatable=frozenset()) is None


def tracker(problem: Problem = PROBLEM, *, are_many: bool = False) -> CandidateTracker:
    workers = StudyWorkers()
    workers.are_many = are_many
    return CandidateTracker(problem, open_study(None, "tritune", problem, sampler_for("random", 0)), workers)


def test_a_candidate_is_repeatable_until_it_was_deployed_often() -> None:
    often = [replace(MISSED, number=number) for number in range(MAX_DEPLOYMENTS)]
    assert tracker().repeatable(often[:-1]) == {FAST}
    assert tracker().repeatable(often) == set()


@pytest.mark.parametrize("worker", ["another-host:17", f"{socket.gethostname()}:1"])
def test_a_candidate_that_a_killed_session_was_deploying_is_free_again(worker: str) -> None:
    """The session had another host name, as in a new container, or its process id is in use again."""
    study = open_study(None, "tritune", PROBLEM, sampler_for("random", 0))
    attributes = {CANDIDATE: candidate_to_json(FAST), WORKER: worker}
    study.add_trial(optuna.trial.create_trial(state=optuna.trial.TrialState.RUNNING, user_attrs=attributes))
    resumed = CandidateTracker(PROBLEM, study)
    assert resumed.tried() == set()
    assert resumed.start(FAST)
    assert resumed.tried() == {FAST}


@pytest.mark.parametrize(
    "ended",
    [
        Trial(1, FAST, status="failed", reason="out of memory"),
        Trial(1, FAST, ((LoadPoint(1, 16), Measurement(reason="timed out")),)),
        Trial(1, FAST),
    ],
)
def test_a_candidate_without_a_result_is_not_repeatable(ended: Trial) -> None:
    assert tracker().repeatable([FEASIBLE, ended]) == {SLOW}


def test_nothing_is_repeatable_if_other_workers_may_join() -> None:
    assert tracker(are_many=True).repeatable([FEASIBLE, MISSED]) == set()


def test_a_repeat_is_stored_as_a_second_trial() -> None:
    candidate_tracker = tracker()
    for finished_trial in (FEASIBLE, MISSED):
        candidate_tracker.record(finished_trial)
    assert not candidate_tracker.start(FAST, 16), "it was tried"
    assert candidate_tracker.start(FAST, 16, again=True)
    assert candidate_tracker.repeatable([FEASIBLE, MISSED]) == {SLOW}, "it runs"
    candidate_tracker.record(replace(MISSED, number=2))
    assert [t.user_attrs["trial"] for t in candidate_tracker.study.trials if "trial" in t.user_attrs] == [0, 1, 2]


def after_comparisons(budget: Budget) -> Scheduler:
    """Return a scheduler whose first two trials, the comparisons, are finished."""
    searcher = make_searcher("simulated", PROBLEM, 0)
    scheduler = Scheduler(PROBLEM, searcher, budget, Stopwatch(), (("baseline", SLOW), ("dynamic_batching", FAST)))
    for finished_trial in (FEASIBLE, MISSED):
        scheduled = scheduler.next()
        assert scheduled is not None
        scheduler.record_finished(
            replace(finished_trial, number=scheduled[1].number, candidate=scheduled[1].candidate)
        )
    return scheduler


def test_the_scheduler_names_a_repeat_and_measures_it_at_the_expected_load() -> None:
    scheduler = after_comparisons(Budget(1e9))
    scheduled = scheduler.next()
    assert scheduled is not None
    role, repeat = scheduled
    assert (role, repeat.number, repeat.candidate) == ("repeat", 2, FAST)
    rules = scheduler.rules(repeat.candidate)
    assert 12 <= rules.first_load <= 16
    assert rules.only_concurrencies == ()


def test_repeats_count_as_trials_of_the_limit() -> None:
    assert after_comparisons(Budget(1e9, 2)).next() is None
