"""What a study tries next while other trials of it run: nothing twice, nothing alike, and when to wait."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from objectives.metrics import Measurement
from objectives.sla import Constraint
from optimizer.budget import Budget
from optimizer.course import Course
from optimizer.errors import ServerFault
from optimizer.problem import Problem
from optimizer.search import make_searcher
from optimizer.search.guide import Guide
from optimizer.space import Space
from optimizer.stopwatch import Stopwatch
from optimizer.trial import Candidate, LoadPoint, Trial

BASELINE, PLAIN = Candidate(1), Candidate(32, dynamic_batching=True)
COMPARISONS = (("baseline", BASELINE), ("dynamic_batching", PLAIN))
SPACE = Space((1, 2, 4, 8, 16, 32), ("off", 0, 100, 500, 2000), ("none", "max/2"), (1, 2, 3, 4))
PROBLEM = Problem("m", SPACE, 1, 64, constraints=(Constraint("latency-p95", 20.0),))


def course(search: str = "simulated", problem: Problem = PROBLEM, max_trials: int | None = None) -> Course:
    searcher = make_searcher(search, problem, 0)
    return Course(problem, searcher, Budget(math.inf, max_trials), Stopwatch(), COMPARISONS)


def measured(trial: Trial) -> Trial:
    """At two loads, by a made-up server."""
    of = trial.candidate
    speed = 200.0 * of.instance_count**0.5 * (of.max_batch_size**0.4 if of.dynamic_batching else 1.0)
    found = []
    for concurrency in (4, 16):
        throughput = speed * min(1.0, concurrency / 8)
        p95_ms = 1.3e3 * concurrency / throughput + of.max_queue_delay_us / 1e3
        load = LoadPoint(1, concurrency)
        found.append((load, Measurement(throughput, latency_p95_ms=p95_ms, requests=500, stable=True)))
    return replace(trial, measurements=tuple(found))


def begun(of: Course, count: int, running: Sequence[Trial] = ()) -> list[Trial]:
    """With those that run already, as many as are handed out."""
    found = list(running)
    while len(found) < count and (following := of.next(found)) is not None:
        found.append(following[1])
    return found


def gain_beside(running: Sequence[tuple[Candidate, int]]) -> float:
    trials = [measured(Trial(0, BASELINE)), measured(Trial(1, PLAIN))]
    tried = {BASELINE, PLAIN, *(candidate for candidate, _ in running)}
    decision = Guide(PROBLEM).decide(trials, tried, running)
    assert decision is not None
    return decision.gain


@pytest.mark.parametrize("search", ["simulated", "tpe", "random", "grid", "nsga2"])
def test_what_runs_at_once_is_no_candidate_twice(search: str) -> None:
    study = course(search)
    running = begun(study, 12)
    assert [trial.number for trial in running] == list(range(12))
    assert len({trial.candidate for trial in running}) == 12
    study.finished(measured(running.pop(3)))  # a later one may end first
    after = begun(study, 12, running)
    assert after[-1].number == 12
    assert len({trial.candidate for trial in after}) == 12


def test_before_anything_is_measured_those_that_run_are_far_apart() -> None:
    searched = [trial.candidate for trial in begun(course(), 8)[2:]]
    assert len({one.instance_count for one in searched}) >= 3
    assert len({one.max_batch_size for one in searched}) >= 3


def test_what_runs_promises_less_to_what_is_like_it() -> None:
    trials = [measured(Trial(0, BASELINE)), measured(Trial(1, PLAIN))]
    first = Guide(PROBLEM).decide(trials, {BASELINE, PLAIN})
    assert first is not None
    assert first.gain > 0.2
    assert gain_beside([(first.candidate, first.load)]) < 0.7 * first.gain
    assert gain_beside([]) == first.gain


def test_where_nothing_more_is_worth_it_one_waits_for_those_that_run() -> None:
    small = replace(PROBLEM, space=Space((1, 32), ("off", 0), ("none",), (1,)))
    study = course("grid", small)
    running = begun(study, 99)
    assert len(running) == len(small.space)
    assert study.next(running) is None
    assert not study.satisfied, "one of them may show something"
    for trial in running:
        study.finished(measured(trial))
    assert study.next() is None
    assert study.satisfied


def test_those_that_run_count_among_the_most_trials() -> None:
    study = course("random", max_trials=5)
    assert len(begun(study, 99)) == 5


def test_the_end_comes_where_nothing_can_be_deployed_but_not_for_what_an_earlier_session_saw() -> None:
    failed = [Trial(n, one, status="failed", reason="no memory") for n, one in enumerate(SPACE.candidates()[:4])]
    again = course("random")
    again.resume(failed[:3])
    assert again.next() is not None
    with pytest.raises(ServerFault, match="no configuration can be deployed: no memory"):
        again.finished(failed[3])
