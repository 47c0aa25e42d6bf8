"""Tests for the scheduler with several trials running at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from objectives.metrics import METRICS, Measurement
from objectives.sla import Sla
from optimizer.config.problem import ConcurrentModel, ModelKind, Problem
from optimizer.config.search_space import SearchSpace
from optimizer.core.budget import Budget
from optimizer.core.candidate import Candidate
from optimizer.core.errors import ServerFault
from optimizer.core.stopwatch import Stopwatch
from optimizer.core.trial import LoadPoint, Trial, TrialRole
from optimizer.measure.load_search import first_rate
from optimizer.search import make_searcher
from optimizer.search.candidate_selector import CandidateSelector
from optimizer.study.scheduler import MAX_COMPARED_LOADS, MAX_LOADS, MAX_REFINED_SHARE, OtherWorkers, Scheduler

BASELINE, PLAIN = Candidate(1), Candidate(32, dynamic_batching=True)
COMPARISONS: list[tuple[TrialRole, Candidate]] = [("baseline", BASELINE), ("dynamic_batching", PLAIN)]
SPACE = SearchSpace((1, 2, 4, 8, 16, 32), ("off", 0, 100, 500, 2000), ("none", "max/2"), (1, 2, 3, 4))
PROBLEM = Problem("m", SPACE, 1, 64, sla=Sla.from_bounds({"p95": 20.0}))


def make_scheduler(search: str = "simulated", problem: Problem = PROBLEM, max_trials: int | None = None) -> Scheduler:
    searcher = make_searcher(search, problem, 0)
    return Scheduler(problem, searcher, Budget(math.inf, max_trials), Stopwatch(), COMPARISONS)


def measured(trial: Trial) -> Trial:
    """Return ``trial`` measured at two loads of an invented server."""
    candidate = trial.candidate
    batching = candidate.max_batch_size**0.4 if candidate.dynamic_batching else 1.0
    speed = 200.0 * candidate.instance_count**0.5 * batching
    measurements = []
    for concurrency in (4, 16):
        throughput = speed * min(1.0, concurrency / 8)
        p95_ms = 1.3e3 * concurrency / throughput + candidate.max_queue_delay_us / 1e3
        load = LoadPoint(1, concurrency)
        figures = Measurement(throughput, latency_p95_ms=p95_ms, output_tokens_per_sec=32 * throughput)
        measurements.append((load, replace(figures, requests=500, stable=True)))
    return replace(trial, measurements=tuple(measurements))


def start_trials(scheduler: Scheduler, count: int, running: Sequence[Trial] = ()) -> list[Trial]:
    """Return up to ``count`` running trials, including those that run already."""
    trials = list(running)
    while len(trials) < count and (scheduled := scheduler.next(trials)) is not None:
        trials.append(scheduled[1])
    return trials


@pytest.mark.parametrize("search", ["simulated", "tpe", "random", "grid", "nsga2"])
def test_no_candidate_runs_twice_at_once(search: str) -> None:
    scheduler = make_scheduler(search)
    running = start_trials(scheduler, 12)
    assert [trial.number for trial in running] == list(range(12))
    assert len({trial.candidate for trial in running}) == 12
    scheduler.record_finished(measured(running.pop(3)))  # a later one may end first
    after = start_trials(scheduler, 12, running)
    assert after[-1].number == 12
    assert len({trial.candidate for trial in after}) == 12


def test_the_first_parallel_candidates_are_far_apart() -> None:
    searched = [trial.candidate for trial in start_trials(make_scheduler(), 8)[2:]]
    assert len({candidate.instance_count for candidate in searched}) >= 3
    assert len({candidate.max_batch_size for candidate in searched}) >= 3


def test_running_trials_lower_the_expected_gain_of_similar_candidates() -> None:
    trials = [measured(Trial(0, BASELINE)), measured(Trial(1, PLAIN))]
    first = CandidateSelector(PROBLEM).decide(trials, {BASELINE, PLAIN})
    assert first is not None
    assert first.gain > 0.2
    running = [(first.candidate, first.load)]
    second = CandidateSelector(PROBLEM).decide(trials, {BASELINE, PLAIN, first.candidate}, running)
    assert second is not None
    assert second.gain < 0.7 * first.gain


def test_the_search_waits_for_running_trials_before_it_ends() -> None:
    small = replace(PROBLEM, space=SearchSpace((1, 32), ("off", 0), ("none",), (1,)))
    scheduler = make_scheduler("grid", small)
    running = start_trials(scheduler, 99)
    assert len(running) == len(small.space)
    assert scheduler.next(running) is None
    assert [scheduler.search_ended] == ["budget"], "a running trial may change the answer"
    for trial in running:
        scheduler.record_finished(measured(trial))
    assert scheduler.next() is None
    assert [scheduler.search_ended] == ["exhausted"]


OUTSIDE: list[tuple[TrialRole, Candidate]] = [
    ("baseline", Candidate(64)),
    ("dynamic_batching", Candidate(64, dynamic_batching=True)),
]


@pytest.mark.parametrize(("max_trials", "ended"), [(4, "budget"), (None, "exhausted")])
def test_configurations_outside_the_space_do_not_exhaust_it(max_trials: int | None, ended: str) -> None:
    small = replace(PROBLEM, space=SearchSpace((8, 32), (0,), ("none",), (1, 2)))
    searcher, budget = make_searcher("grid", small, 0), Budget(math.inf, max_trials)
    scheduler = Scheduler(small, searcher, budget, Stopwatch(), OUTSIDE)
    while (scheduled := scheduler.next()) is not None:
        scheduler.record_finished(measured(scheduled[1]))
    assert len(scheduler.trials) == (max_trials or len(OUTSIDE) + len(small.space))
    assert [scheduler.search_ended] == [ended]


class StoredTrials(OtherWorkers):
    """Other workers that have finished ``stored``."""

    def __init__(self, stored: Sequence[Candidate]) -> None:
        self.stored = stored

    def trials(self) -> list[Trial]:
        return [measured(Trial(number, candidate)) for number, candidate in enumerate(self.stored)]


def test_other_workers_exhaust_the_space_with_different_configurations() -> None:
    first, second = SPACE.candidates()[:2]
    small = replace(PROBLEM, space=SearchSpace((8, 32), (0,), ("none",), (1,)))
    candidates = small.space.candidates()
    for stored, ended in (
        ([candidates[0]] * len(candidates), "budget"),  # a trial that was repeated
        ([first, second, Candidate(64), candidates[0]], "budget"),
        (candidates, "exhausted"),
    ):
        searcher = make_searcher("random", small, 0)
        stored_trials = StoredTrials(stored)
        assert Scheduler(small, searcher, Budget(0), Stopwatch(), OUTSIDE, stored_trials).search_ended == ended


@pytest.mark.parametrize(("count", "tried"), [(1, "one was"), (2, "2 were")])
def test_a_search_in_which_nothing_could_be_deployed_is_no_missed_sla(count: int, tried: str) -> None:
    scheduler = make_scheduler("random", max_trials=count)
    running = start_trials(scheduler, count)
    while running:
        assert scheduler.next(running) is None
        failed = replace(running.pop(0), status="failed", reason="loading took longer than 20 s")
        scheduler.record_finished(failed)
    with pytest.raises(ServerFault, match="no configuration can be deployed: loading took longer than 20 s") as error:
        scheduler.next()
    assert str(error.value).endswith(f"; only {tried} tried, and a larger --budget or --max-trials tries others")


def test_running_trials_count_towards_max_trials() -> None:
    scheduler = make_scheduler("random", max_trials=5)
    assert len(start_trials(scheduler, 99)) == 5


def test_only_failures_of_this_session_end_the_search() -> None:
    failed = [
        Trial(n, candidate, status="failed", reason="no memory") for n, candidate in enumerate(SPACE.candidates()[:4])
    ]
    resumed = make_scheduler("random")
    resumed.resume(failed[:3])
    assert resumed.next() is not None
    with pytest.raises(ServerFault, match=r"no configuration can be deployed: no memory$"):
        resumed.record_finished(failed[3])


@pytest.mark.parametrize("open_loop", [False, True])
def test_the_load_search_seeks_the_highest_load_for_requests_and_for_tokens(*, open_loop: bool) -> None:
    """Tokens per second are proportional to requests per second, so both objectives have the same load search."""
    rules = []
    for name in ("throughput", "output-throughput"):
        problem = replace(PROBLEM, objectives=(METRICS[name],), kind=ModelKind.STREAMING, open_loop=open_loop)
        scheduler = make_scheduler("random", problem)
        for number in range(2):
            scheduler.record_finished(measured(Trial(number, COMPARISONS[number][1])))
        candidate = Candidate(8, dynamic_batching=True)
        rules.append(scheduler.rules(candidate))
    assert rules[0] == rules[1]
    assert not rules[0].finds_lowest_load


def test_load_searches_at_low_rates_take_a_limited_share_of_the_time() -> None:
    problem = replace(PROBLEM, open_loop=True)
    scheduler = Scheduler(problem, make_searcher("random", problem, 0), Budget(200.0), Stopwatch(), COMPARISONS)
    trial = measured(Trial(0, COMPARISONS[0][1]))
    (_, measurement), *_ = trial.measurements
    slow = (LoadPoint(1, request_rate=5.0), replace(measurement, latency_p95_ms=1.0))
    scheduler.record_finished(replace(trial, measurements=(slow,)))
    rules = scheduler.rules(Candidate(8, dynamic_batching=True))
    assert rules.max_seconds == MAX_REFINED_SHARE * 200
    assert rules.first_load == first_rate(5.0) > 5


def test_the_first_rate_of_a_run_is_left_to_its_warm_up() -> None:
    problem = replace(PROBLEM, open_loop=True, concurrent=(ConcurrentModel("other", 0.5, Candidate(8)),))
    rules = make_scheduler("random", problem).rules(COMPARISONS[0][1])
    assert (rules.first_load, rules.other_shares) == (0, {"other": 0.5})


def test_the_load_search_for_goodput_compares_goodput_and_keeps_the_bounds_on_requests() -> None:
    sla = Sla.from_bounds({"p95": 20.0, "error-rate": 0.1, "throughput": 5.0})
    scheduler = make_scheduler("random", replace(PROBLEM, objectives=(METRICS["goodput"],), sla=sla))
    for number in range(2):
        trial = measured(Trial(number, COMPARISONS[number][1]))
        measurements = tuple(
            (load, replace(measurement, rejected_requests=0, goodput_infer_per_sec=70.0, requests=100))
            for load, measurement in trial.measurements
        )
        scheduler.record_finished(replace(trial, measurements=measurements))
    rules = scheduler.rules(Candidate(8, dynamic_batching=True))
    assert rules.goal is METRICS["goodput"]
    assert rules.to_beat == 70.0
    assert not rules.finds_lowest_load
    assert rules.sla == Sla.from_bounds({"p95": 20.0, "error-rate": 0.1})


def test_only_comparisons_are_measured_although_they_serve_less() -> None:
    scheduler = make_scheduler()
    best = measured(Trial(0, Candidate(32, dynamic_batching=True, instance_count=4)))
    scheduler.record_finished(best)
    throughput = best.measurements[-1][1].throughput_infer_per_sec
    for candidate, to_beat in ((BASELINE, None), (PLAIN, None), (Candidate(8, dynamic_batching=True), throughput)):
        rules = scheduler.rules(candidate)
        assert rules.to_beat == to_beat
        assert rules.max_loads == (MAX_COMPARED_LOADS if to_beat is None else MAX_LOADS)
