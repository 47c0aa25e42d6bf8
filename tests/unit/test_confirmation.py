"""What is confirmed, and what is recommended after it, on a server whose latencies are drawn at random."""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from objectives.confidence import Verdict
from objectives.metrics import METRICS, Measurement
from objectives.sla import Constraint
from optimizer.budget import Budget
from optimizer.confirm.confirmer import Confirmer
from optimizer.confirm.plan import (
    FEWER_WINDOWS,
    FINALISTS,
    SERVERS,
    WINDOWS,
    all_confirmed,
    confirmed,
    plan,
    safe_load,
)
from optimizer.errors import MeasurementError, ServerCrashed
from optimizer.interfaces import Endpoint, Samples
from optimizer.measuring import Measuring
from optimizer.outcome import assess
from optimizer.problem import Problem
from optimizer.report.live import QuietWatcher
from optimizer.store.trials_table import TrialsTable
from optimizer.trial import Candidate, Confirmation, LoadPoint, Point, Trial
from tests.drawn_server import BASELINE, BOUND_MS, FAST, FASTER, LOADS, Drawing, drawn_problem, searched


@pytest.fixture
def problem() -> Problem:
    return drawn_problem()


def confirm(server: Drawing, trials: list[Trial], problem: Problem, path: Path, seconds: float = 600) -> list[Trial]:
    table = TrialsTable(path / "trials.csv", "drawn", {})
    for trial in trials:
        for load, measurement in trial.measurements:
            table.append(trial, load, measurement)
    measuring = Measuring(server, server, table, QuietWatcher())
    found = Confirmer(problem, server, measuring, Budget(seconds), table.read()).run(BASELINE)
    assert table.read() == found, "all of it is in the table"
    return found


def test_finalists_and_baseline_take_turns_on_fresh_servers(problem: Problem, tmp_path: Path) -> None:
    server = Drawing()
    trials = confirm(server, searched(server, LOADS), problem, tmp_path)
    assert server.deployed == SERVERS * [FASTER, FAST, BASELINE]
    outcome = assess(trials, problem, BASELINE, FAST)
    assert outcome.confirmed is not None
    assert outcome.confirmed.judged.verdict is Verdict.PASS
    assert outcome.confirmed.servers == SERVERS
    assert outcome.confirmed.windows == SERVERS * WINDOWS
    assert outcome.recommended is outcome.confirmed.point
    assert outcome.recommended.candidate == FASTER
    assert outcome.confirmed.latency_ms.low <= outcome.recommended.measurement.latency_p95_ms  # type: ignore[operator]
    assert outcome.recommended.measurement.latency_p95_ms <= outcome.confirmed.latency_ms.high <= BOUND_MS  # type: ignore[operator]
    assert outcome.speedup == pytest.approx(4, rel=0.01)


def test_the_best_so_far_stays_in_sight_while_it_is_confirmed(problem: Problem, tmp_path: Path) -> None:
    class Seeing(QuietWatcher):
        seen: list[Point | None] = []  # noqa: RUF012

        def trial_finished(self, trial: Trial, best: Point | None) -> None:
            self.seen.append(best)

    server, watcher = Drawing(), Seeing()
    measuring = Measuring(server, server, TrialsTable(tmp_path / "trials.csv", "drawn", {}), watcher)
    Confirmer(problem, server, measuring, Budget(600), searched(server, LOADS)).run(BASELINE)
    assert {point.candidate if point else None for point in watcher.seen} == {FASTER}


def test_a_winner_that_does_not_hold_on_fresh_servers_is_not_recommended(problem: Problem, tmp_path: Path) -> None:
    server = Drawing(slow={FASTER: (2.0,)})
    outcome = assess(confirm(server, searched(server, LOADS), problem, tmp_path), problem, BASELINE, FAST)
    assert outcome.recommended is not None
    assert outcome.recommended.candidate == FAST
    assert outcome.confirmed is not None
    assert outcome.confirmed.judged.verdict is Verdict.PASS


def test_where_none_holds_a_lower_load_is_tried(problem: Problem, tmp_path: Path) -> None:
    server = Drawing(slow={FASTER: (1.5,), FAST: (1.6,)})
    outcome = assess(confirm(server, searched(server, LOADS), problem, tmp_path), problem, BASELINE, FAST)
    assert outcome.confirmed is not None
    assert outcome.confirmed.judged.verdict is Verdict.PASS
    assert outcome.confirmed.point.candidate == FASTER
    assert outcome.confirmed.point.load.concurrency < LOADS[FASTER]


def test_servers_that_disagree_leave_it_undecided(problem: Problem, tmp_path: Path) -> None:
    server = Drawing(slow={FASTER: (1.0, 1.0, 1.25)})
    trials = confirm(server, searched(server, {BASELINE: 3, FASTER: 13}), problem, tmp_path)
    (found,) = [one for one in all_confirmed(trials, problem) if one.point.load.concurrency == 13]
    assert found.judged.verdict is Verdict.UNDECIDED
    assert "drift" in found.judged.reason


def test_where_it_fails_for_certain_its_load_is_lowered_twice(problem: Problem, tmp_path: Path) -> None:
    server = Drawing(slow={FASTER: (1.8,)})
    trials = confirm(server, searched(server, {BASELINE: 64, FASTER: LOADS[FASTER]}), problem, tmp_path)
    loads = sorted({one.load.concurrency for one in trials[1].confirmations}, reverse=True)
    assert len(loads) == 3
    assert loads[0] > loads[1] > loads[2]


def test_what_served_less_before_it_failed_is_recommended_unconfirmed(problem: Problem, tmp_path: Path) -> None:
    server = Drawing(slow={FASTER: (5.0,)})
    (baseline, trial) = searched(server, {BASELINE: 64, FASTER: LOADS[FASTER]})
    low = LoadPoint(1, 2)
    trial = replace(trial, measurements=((low, server.measure(Endpoint("", FAST), low)), *trial.measurements))
    outcome = assess(confirm(server, [baseline, trial], problem, tmp_path), problem, BASELINE, FAST)
    assert outcome.recommended is not None
    assert outcome.recommended.load == low
    assert outcome.confirmed is None


def test_what_served_less_before_it_missed_is_recommended_where_the_verdict_is_open_too(problem: Problem) -> None:
    server = Drawing(slow={FASTER: (1.0, 1.0, 1.9)})
    (baseline, trial) = searched(server, {BASELINE: 3, FASTER: 13})
    low = LoadPoint(1, 12)
    trial = replace(trial, measurements=((low, server.measure(Endpoint("", FASTER), low)), *trial.measurements))
    for number in range(1, SERVERS + 1):
        server.deployed = [FASTER] * number
        for _ in range(WINDOWS):
            window = server.measure(Endpoint("", FASTER), LoadPoint(1, 13), 1.0)
            trial = trial.confirmed_by(Confirmation(number, LoadPoint(1, 13), window))
    (found,) = all_confirmed([baseline, trial], problem)
    assert found.judged.verdict is Verdict.UNDECIDED
    assert found.point.measurement.latency_p95_ms > BOUND_MS  # type: ignore[operator]
    recommended = assess([baseline, trial], problem, BASELINE, FAST).recommended
    assert recommended is not None
    assert (recommended.candidate, recommended.load) == (FASTER, low)


def test_where_time_is_short_a_lower_load_is_tried_in_fewer_windows(problem: Problem, tmp_path: Path) -> None:
    class Timed(Drawing):
        now = 0.0

        def windows(self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int) -> list[Measurement]:
            self.now += seconds
            return super().windows(endpoint, load, seconds, count)

    server = Timed(slow={FASTER: (1.8,)})
    measured = searched(server, {BASELINE: 64, FASTER: LOADS[FASTER]})
    (first, *_) = plan(measured, problem, BASELINE, 1e6)
    budget = Budget(1.2 * first.total_seconds, clock=lambda: server.now)
    table = TrialsTable(tmp_path / "trials.csv", "drawn", {})
    Confirmer(problem, server, Measuring(server, server, table, QuietWatcher()), budget, measured).run(BASELINE)
    windows = Counter(one.load for one in measured[1].confirmations)
    assert list(windows.values())[:2] == [SERVERS * WINDOWS, SERVERS * FEWER_WINDOWS]


def test_where_nothing_holds_on_fresh_servers_that_is_said(problem: Problem, tmp_path: Path) -> None:
    server = Drawing(slow={BASELINE: (9.0,)})
    outcome = assess(confirm(server, searched(server, {BASELINE: 3}), problem, tmp_path), problem, BASELINE, FAST)
    assert outcome.recommended is None
    assert re.match(
        r"p95 was 1\d(\.\d)? ms while searching, but missed the bound on fresh servers", outcome.holds_back
    )


def test_where_no_measurement_was_stable_fresh_servers_decide(problem: Problem, tmp_path: Path) -> None:
    server = Drawing()
    measured = [
        replace(trial, measurements=tuple((at, replace(m, stable=False)) for at, m in trial.measurements))
        for trial in searched(server, {BASELINE: 3, FASTER: 13})
    ]
    outcome = assess(confirm(server, measured, problem, tmp_path), problem, BASELINE, FAST)
    assert outcome.recommended is not None
    assert outcome.recommended.candidate == FASTER
    assert outcome.confirmed is not None
    assert outcome.confirmed.judged.verdict is Verdict.PASS


class Losing(Drawing):
    """Gives no figures for ``never``; where that is None, not for the first confirmation on each server."""

    def __init__(self, never: Candidate | None = None) -> None:
        super().__init__()
        self.never, self.lost_on = never, set[int]()

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        first = self.never is None and len(self.deployed) not in self.lost_on
        if seconds is not None and (first or endpoint.candidate == self.never):
            self.lost_on.add(len(self.deployed))
            raise MeasurementError("the load generator cannot keep up")
        return super().measure(endpoint, load, seconds)


def test_a_measurement_that_is_lost_is_made_again(problem: Problem, tmp_path: Path) -> None:
    server = Losing()
    outcome = assess(confirm(server, searched(server, LOADS), problem, tmp_path), problem, BASELINE, FAST)
    assert outcome.confirmed is not None
    assert outcome.confirmed.judged.verdict is Verdict.PASS
    assert outcome.confirmed.windows == SERVERS * WINDOWS
    assert "cannot keep up" in (tmp_path / "trials.csv").read_text(), "nothing that happened is lost"


def test_what_is_lost_again_and_again_leaves_it_undecided_and_says_why(problem: Problem, tmp_path: Path) -> None:
    server = Losing(never=FASTER)
    trials = confirm(server, searched(server, LOADS), problem, tmp_path)
    (found,) = [one for one in all_confirmed(trials, problem) if one.point.candidate == FASTER]
    assert found.judged.verdict is Verdict.UNDECIDED
    assert found.judged.reason == "a measurement was lost: the load generator cannot keep up"
    outcome = assess(trials, problem, BASELINE, FAST)
    assert outcome.recommended is not None
    assert outcome.recommended.candidate == FAST


def test_a_crash_while_it_is_confirmed_leaves_what_the_search_measured(problem: Problem, tmp_path: Path) -> None:
    class Crashing(Drawing):
        left = 2

        def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
            if seconds is not None and endpoint.candidate == FASTER and self.left:
                self.left -= 1
                raise ServerCrashed("tritonserver died (SIGKILL) while measuring")
            return super().measure(endpoint, load, seconds)

    server = Crashing()
    trials = confirm(server, searched(server, LOADS), problem, tmp_path)
    assert all(measurement.throughput_infer_per_sec for trial in trials for _, measurement in trial.measurements)
    outcome = assess(trials, problem, BASELINE, FAST)
    assert outcome.confirmed is not None
    assert outcome.confirmed.judged.verdict is Verdict.PASS


def test_what_is_open_is_recommended_before_what_was_never_confirmed(problem: Problem, tmp_path: Path) -> None:
    other = Candidate(64, True, 500, instance_count=2)
    served = {BASELINE: 300.0, FAST: 1100.0, FASTER: 1200.0, other: 1050.0}
    server = Drawing(slow={BASELINE: (3.0,), FASTER: (2.0,), FAST: (1.0, 1.0, 1.3)}, served=served)
    before = searched(server, {**LOADS, other: 11})
    measuring = Measuring(server, server, TrialsTable(tmp_path / "trials.csv", "drawn", {}), QuietWatcher())
    confirmer = Confirmer(problem, server, measuring, Budget(600), before)
    confirmer.measure(plan(before, problem, BASELINE, 600))
    outcome = assess(confirmer.trials, problem, BASELINE, FAST)
    verdicts = {one.point.candidate: one.judged.verdict for one in outcome.again}
    assert (verdicts[FASTER], verdicts[FAST]) == (Verdict.FAIL, Verdict.UNDECIDED)
    assert outcome.recommended is not None
    assert outcome.recommended.candidate == FAST


@pytest.mark.parametrize(("rise_ms", "verdict"), [(0.0, Verdict.PASS), (0.5, Verdict.UNDECIDED)])
def test_a_queue_that_grows_on_each_server_is_no_pass(rise_ms: float, verdict: Verdict, problem: Problem) -> None:
    load, server = LoadPoint(1, request_rate=1000.0), Drawing()
    confirmations = []
    for number in range(1, SERVERS + 1):
        for window in range(WINDOWS):
            seen = server.measure(Endpoint("", FAST), LoadPoint(1, 6), 2.0)
            later_ms = rise_ms * window + (seen.latency_avg_ms or 0)
            confirmations.append(Confirmation(number, load, replace(seen, latency_avg_ms=later_ms)))
    found = confirmed(Trial(0, FAST, confirmations=tuple(confirmations)), load, problem)
    assert found is not None
    assert found.judged.verdict is verdict
    assert ("more than it can serve" in found.judged.reason) is (rise_ms > 0)


@pytest.mark.parametrize(("servers", "verdict"), [(SERVERS, Verdict.FAIL), (SERVERS - 1, Verdict.UNDECIDED)])
def test_an_overload_on_every_fresh_server_is_a_fail(servers: int, verdict: Verdict, problem: Problem) -> None:
    load = LoadPoint(1, request_rate=1000.0)
    overload = Measurement(400.0, latency_p95_ms=500.0, requests=400, reason="overloaded: 99 requests unanswered")
    confirmations = [Confirmation(server, load, overload) for server in range(1, servers + 1)]
    found = confirmed(Trial(0, FAST, confirmations=tuple(confirmations)), load, problem)
    assert found is not None
    assert found.judged.verdict is verdict
    assert "overloaded: 99 requests unanswered" in found.judged.reason


@pytest.mark.parametrize("loads", [{BASELINE: 3, FASTER: 13}, {BASELINE: 3}])
def test_what_a_disturbed_machine_leaves_open_is_recommended(
    loads: dict[Candidate, int], problem: Problem, tmp_path: Path
) -> None:
    class Disturbed(Drawing):
        @contextlib.contextmanager
        def record(self, endpoint: Endpoint) -> Iterator[Samples]:
            yield Samples(other_cpu_share=0.5)

    server = Disturbed()
    outcome = assess(confirm(server, searched(server, loads), problem, tmp_path), problem, BASELINE, FAST)
    assert outcome.recommended is not None
    assert outcome.recommended.candidate == max(loads, key=lambda candidate: loads[candidate])
    assert outcome.confirmed is not None
    assert outcome.confirmed.judged.verdict is Verdict.UNDECIDED
    assert "took 50 % of the CPUs" in outcome.confirmed.judged.reason


def test_what_cannot_be_deployed_as_written_gives_way_to_the_next(problem: Problem, tmp_path: Path) -> None:
    server = Drawing(broken=(FAST, FASTER))
    trials = confirm(server, searched(server, LOADS), problem, tmp_path)
    assert [trial.status for trial in trials] == ["ok", "failed", "failed"]
    outcome = assess(trials, problem, BASELINE, FAST)
    assert outcome.recommended is not None
    assert outcome.recommended.candidate == BASELINE


def test_where_all_that_was_planned_cannot_be_deployed_more_is_planned(problem: Problem, tmp_path: Path) -> None:
    other = Candidate(64, True, 500)
    server = Drawing(
        broken=(BASELINE, FAST, FASTER), served={BASELINE: 300.0, FAST: 1000.0, FASTER: 1200.0, other: 900.0}
    )
    trials = confirm(server, searched(server, {**LOADS, other: 10}), problem, tmp_path)
    assert [trial.status for trial in trials] == ["failed", "failed", "failed", "ok"]
    outcome = assess(trials, problem, BASELINE, FAST)
    assert outcome.confirmed is not None
    assert outcome.confirmed.judged.verdict is Verdict.PASS
    assert outcome.confirmed.point.candidate == other


def test_an_interrupted_confirmation_goes_on_where_it_stood(problem: Problem, tmp_path: Path) -> None:
    class Interrupting(Drawing):
        left = 20

        def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
            if seconds is not None:
                self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
            return super().measure(endpoint, load, seconds)

    cut = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        confirm(cut, searched(cut, LOADS), problem, tmp_path)
    server = Drawing()
    table = TrialsTable(tmp_path / "trials.csv", "drawn", {})
    before = sum(len(trial.confirmations) for trial in table.read())
    assert before == 19
    measuring = Measuring(server, server, table, QuietWatcher())
    trials = Confirmer(problem, server, measuring, Budget(600), table.read()).run(BASELINE)
    assert {len(trial.confirmations) for trial in trials} == {SERVERS * WINDOWS, SERVERS * WINDOWS // 2}
    assert assess(trials, problem, BASELINE, FAST).confirmed is not None


def test_with_little_time_the_best_alone_is_confirmed(problem: Problem) -> None:
    trials = searched(Drawing(), LOADS)
    assert len(plan(trials, problem, BASELINE, 1e6)) == FINALISTS + 1
    enough_for_two = sum(one.total_seconds for one in plan(trials, problem, BASELINE, 1e6)[1:])
    assert [one.candidate for one in plan(trials, problem, BASELINE, enough_for_two)] == [FASTER, BASELINE]
    (alone,) = plan(trials, problem, BASELINE, 1.0)
    assert alone.candidate == FASTER


def test_the_baseline_takes_no_longer_windows_than_the_finalists_but_enough_requests(problem: Problem) -> None:
    *finalists, baseline = plan(searched(Drawing(), LOADS), problem, BASELINE, 1e6)
    assert baseline.seconds == max(one.seconds for one in finalists)
    slow = Drawing(served={BASELINE: 30.0, FAST: 1000.0, FASTER: 1200.0})
    *_, baseline = plan(searched(slow, {**LOADS, BASELINE: 1}), replace(problem, constraints=()), BASELINE, 1e6)
    assert baseline.seconds == pytest.approx(50 / 30)


def test_a_spent_budget_confirms_nothing(problem: Problem, tmp_path: Path) -> None:
    server = Drawing()
    trials = confirm(server, searched(server, LOADS), problem, tmp_path, seconds=1e-9)
    assert not any(trial.confirmations for trial in trials)
    outcome = assess(trials, problem, BASELINE, FAST)
    assert outcome.confirmed is None
    assert outcome.recommended is not None


def test_nothing_is_confirmed_where_nothing_meets_the_bound(problem: Problem, tmp_path: Path) -> None:
    server = Drawing()
    trials = confirm(server, searched(server, {BASELINE: 64, FAST: 64}), problem, tmp_path)
    assert plan(trials, problem, BASELINE, 1e6) == []
    assert server.deployed == []


def test_a_load_close_to_the_bound_is_taken_back(problem: Problem) -> None:
    def at(p95_ms: float) -> Point:
        columns: Any = {"latency_p50_ms": p95_ms / 2, "latency_p90_ms": 0.9 * p95_ms, "latency_p99_ms": 1.2 * p95_ms}
        return Point(0, FAST, LoadPoint(1, 40), Measurement(1000.0, latency_p95_ms=p95_ms, stable=True, **columns))

    assert safe_load(at(10.0), problem) == LoadPoint(1, 40)
    close = safe_load(at(19.9), problem)
    assert 34 <= close.concurrency <= 38


def test_a_constraint_on_memory_is_part_of_the_verdict(problem: Problem, tmp_path: Path) -> None:
    class Heavy(Drawing):
        @contextlib.contextmanager
        def record(self, endpoint: Endpoint) -> Iterator[Samples]:
            yield Samples(server_memory_bytes=2e9 if endpoint.candidate == FASTER and self.deployed else 1e9)

    server = Heavy()
    bounded = replace(problem, constraints=(*problem.constraints, Constraint("memory", 1.5e9)))
    measured = [
        replace(t, measurements=tuple((n, replace(m, server_memory_bytes=1e9)) for n, m in t.measurements))
        for t in searched(server, LOADS)
    ]
    outcome = assess(confirm(server, measured, bounded, tmp_path), bounded, BASELINE, FAST)
    assert outcome.recommended is not None
    assert outcome.recommended.candidate == FAST


def test_intervals_are_finite_and_ordered(problem: Problem, tmp_path: Path) -> None:
    server = Drawing()
    for found in all_confirmed(confirm(server, searched(server, LOADS), problem, tmp_path), problem):
        for interval in (found.throughput, found.latency_ms):
            assert math.isfinite(interval.low)
            assert interval.low <= interval.high
        assert METRICS["throughput"].value(found.point.measurement) is not None
