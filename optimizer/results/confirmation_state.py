"""The plan of a confirmation, which is fixed before the first window, and the state of its tests.

A confirmation that continues later has to make the same decisions as an uninterrupted one. So the loads and their
predictions, the order of the candidates and the disturbance limit are recorded; the rest follows from the trials.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from objectives.load_sequence import (
    ERROR_SHARES,
    MARGIN,
    OTHER_ERROR_SHARES,
    OTHER_MARGIN,
    CandidateState,
    LoadJudgement,
    LoadSequence,
    choose_candidate,
)
from objectives.sequential import LOOKS
from objectives.verdict import pool_measurements
from optimizer.config.search_space import Problem
from optimizer.core.errors import BadInputError
from optimizer.core.trial import LoadPoint, Point, Trial, latest_points
from optimizer.results.confirmation_plan import (
    COMPARED_SERVERS,
    ConfirmationCandidate,
    LoadLadder,
    confirmation_candidate,
    confirmed_spreads,
    counted_server_windows,
    expected_throughput,
    finalists,
    judge_confirmations,
    judge_load,
    rival_ladder,
    server_windows,
)
from optimizer.simulator.speed_correction import fit_speed_correction

SHARES = (ERROR_SHARES, OTHER_ERROR_SHARES)  # of the error, for the candidates that are tested
SMALLEST_ERROR = 1e-9  # below it, rounding is all that is left of the error


@dataclass(frozen=True, slots=True)
class ConfirmationPlan:
    """The decisions that are fixed before the first window of a confirmation.

    Attributes:
        error: Error probability of all tests together.
        disturbance_limit: CPU share of other processes above which a window does not count.
        finalists: Trials of the candidates in the order in which they are tested.
        ladders: The loads that can be tested, by trial; those of a later finalist are added before its first window.
    """

    error: float
    disturbance_limit: float
    finalists: tuple[int, ...]
    ladders: Mapping[int, LoadLadder] = field(default_factory=dict)

    def ladder(self, point: Point) -> LoadLadder | None:
        """Return the loads of the candidate of ``point``; None if they were not predicted yet."""
        ladder = self.ladders.get(point.trial)
        if ladder is None:
            return None
        size = point.load.request_batch_size  # JSON does not keep whether it is a whole number
        return replace(ladder, loads=tuple(replace(load, request_batch_size=size) for load in ladder.loads))

    def best_points(self, points: Sequence[Point], problem: Problem) -> list[Point]:
        """Return the best of ``points`` for each finalist that can be deployed, in the order of testing."""
        best = [finalists([own for own in points if own.trial == number], problem, 1) for number in self.finalists]
        return [point for own in best for point in own]


_PLAN = TypeAdapter(ConfirmationPlan)


def plan_document(plan: ConfirmationPlan) -> dict[str, Any]:
    """Return ``plan`` for run.json."""
    document: dict[str, Any] = _PLAN.dump_python(plan, mode="json")
    return document


def read_plan_document(document: object) -> ConfirmationPlan:
    """Return what ``plan_document`` has written. Raises ValueError with one line for anything else."""
    try:
        plan = _PLAN.validate_python(document)
    except ValidationError as error:
        fault = error.errors()[0]
        raise ValueError(".".join(map(str, ("confirmation_plan", *fault["loc"]))) + f": {fault['msg']}") from None
    for number, ladder in plan.ladders.items():
        figures = (*ladder.predicted, *ladder.throughput)
        if not ladder.loads or len(figures) != 2 * len(ladder.loads) or not all(map(math.isfinite, figures)):
            raise ValueError(f"confirmation_plan.ladders.{number}: not a prediction for each load")
        if ladder.highest_first is not None and not 0 <= ladder.highest_first < len(ladder.loads):
            raise ValueError(f"confirmation_plan.ladders.{number}: highest_first is not one of the loads")
    if not 0 < plan.error < 1:
        raise ValueError(f"confirmation_plan.error: {plan.error:g} is not between 0 and 1")
    return plan


def errors_by_load(trial: Trial) -> dict[LoadPoint, float]:
    """Return the error of the test of each tested load of ``trial``, in the order of testing."""
    return {again.load: again.error for again in trial.confirmations if again.error}


def begun_error(trials: Sequence[Trial]) -> float:
    """Return the error probability of all tests that were begun. A load that inherits an error adds nothing."""
    return sum(sum(set(errors_by_load(trial).values())) for trial in trials)


def error_shares(plan: ConfirmationPlan, trials: Sequence[Trial], number: int) -> tuple[float, ...] | None:
    """Return the shares of the error for the tests of finalist ``number``; None if other finalists use them all.

    They are those of its earlier tests, otherwise the first ones that are free. The tests of a candidate that can no
    longer be deployed do not count.
    """
    first = {
        trial.number: next(iter(errors.values()))
        for trial in trials
        if trial.number in plan.finalists and (errors := errors_by_load(trial))
    }
    for shares in SHARES:
        users = [own for own, error in first.items() if math.isclose(error, plan.error * shares[0])]
        if number in users or (number not in first and not users):
            return shares
    return SHARES[0] if number in first else None  # its confirmations do not follow the plan: CandidateTests says so


def without_lost_end(trial: Trial) -> Trial:
    """Return ``trial`` without a lost measurement at the end of its confirmations, which is repeated."""
    kept = trial.confirmations
    while kept and kept[-1].is_lost:
        kept = kept[:-1]
    return replace(trial, confirmations=kept)


@dataclass
class CandidateTests:
    """The tests of one candidate at the loads of its ladder, judged from the confirmations of ``trials``.

    ``trials`` are all trials of the run; confirmations may be added while the tests run. ``sequence`` continues where
    these confirmations end.
    """

    problem: Problem
    plan: ConfirmationPlan
    trials: list[Trial]
    point: Point
    ladder: LoadLadder
    shares: tuple[float, ...]
    sequence: LoadSequence = field(init=False)

    def __post_init__(self) -> None:
        """Raise BadInputError if the trial's confirmations do not belong to the plan."""
        self.sequence = LoadSequence(
            self.ladder.predicted,
            self.ladder.throughput,
            self.plan.error,
            self.shares,
            MARGIN if self.shares == ERROR_SHARES else OTHER_MARGIN,
            self.ladder.highest_first,
        )
        try:
            self.sequence.resume(
                [(self.ladder.loads.index(load), error) for load, error in errors_by_load(self.trial).items()]
            )
        except ValueError:
            raise BadInputError(
                f"the confirmations of trial {self.point.trial} do not follow the plan in run.json; "
                "`tune verify --fresh` makes a separate test"
            ) from None

    @property
    def trial(self) -> Trial:
        """The tested trial, with its confirmations so far."""
        return next(trial for trial in self.trials if trial.number == self.point.trial)

    def planned(self, load: int) -> ConfirmationCandidate:
        """Return the plan of the measurements on each server at this load."""
        return confirmation_candidate(
            self.point,
            self.ladder.loads[load],
            self.problem.request_times,
            self.sequence.current_error,
            self.problem.sla,
        )

    def servers(self, load: int) -> int:
        """Return the number of servers that were measured to test this load."""
        place = self.ladder.loads[load]
        return len(server_windows(self.trial, place)) if place in errors_by_load(self.trial) else 0

    def judge(self, load: int, error: float, most_servers: int) -> LoadJudgement:
        """Return the verdict on this load."""
        place = self.ladder.loads[load]
        spreads = confirmed_spreads(self.trials, self.problem, counted_server_windows(self.trial, place))
        judged = judge_load(self.trial, place, self.problem, spreads, error, most_servers)
        return LoadJudgement(judged.verdict, judged.is_promising, judged.excess)

    def is_worth_testing(self, load: int) -> bool:
        """Return whether this load is next after a decided test: always, if no other candidate competes."""
        return True

    def throughput(self, load: int) -> float:
        """Return the throughput at this load: the predicted one, corrected by the measurement at a tested load.

        That is this load if it was tested, otherwise the one that passed, otherwise the last one.
        """
        predicted = self.ladder.throughput
        tested = [self.ladder.loads.index(own) for own in errors_by_load(self.trial)]
        if not tested:
            return predicted[load]
        reference = next((own for own in (load, self.sequence.passed) if own in tested), tested[-1])
        windows = [window for own in server_windows(self.trial, self.ladder.loads[reference]) for window in own]
        measured = pool_measurements(windows).throughput_infer_per_sec or 0.0
        return measured * predicted[load] / predicted[reference]


@dataclass(frozen=True, slots=True)
class NextTest:
    """The candidate of ``point``, whose test needs more servers at ``load``; None if its loads were not predicted."""

    point: Point
    load: int | None


@dataclass
class _WithoutServers(CandidateTests):
    """Measures nothing: ``wanted`` is the load whose next look needs more servers, at most ``possible``."""

    possible: int
    wanted: int | None = field(default=None, init=False)

    def possible_servers(self) -> int:
        return self.possible

    def deploy(self, load: int) -> bool:
        self.wanted = load
        return False

    def state(self) -> CandidateState:
        """Return how far the tests are, after ``sequence`` was run."""
        passed = 0.0 if self.sequence.passed is None else self.throughput(self.sequence.passed)
        if self.wanted is None:
            return CandidateState(passed, None)
        return CandidateState(passed, self.throughput(self.wanted), is_begun=self.servers(self.wanted) > 0)


def next_test(
    plan: ConfirmationPlan,
    trials: Sequence[Trial],
    best: Sequence[Point],
    problem: Problem,
    possible_servers: Callable[[Point], int] = lambda _: LOOKS[-1],
) -> NextTest | None:
    """Return which finalist is tested next; None if no further server can change a verdict.

    The first one that can be deployed is tested, and one other, a rival: the one that is expected to serve the most
    by its fresh servers. ``choose_candidate`` says which of the two is next.

    Args:
        plan: The plan of the confirmation.
        trials: All trials of the run.
        best: The best point of each finalist, in the order of testing.
        problem: The search problem.
        possible_servers: Returns how many servers of a candidate the time allows.
    """
    by_number = {trial.number: trial for trial in trials}
    deployable = [point for point in best if by_number[point.trial].status != "failed"]
    compared = _compared_ladders(plan, trials, problem)
    tests, states = list[NextTest](), list[CandidateState]()
    for point in (*deployable[:1], *_rival(deployable[1:], by_number, compared)):
        shares = error_shares(plan, trials, point.trial)
        ladder = compared.get(point.trial) or plan.ladder(point)
        if shares is None:
            continue
        if ladder is None:
            tests.append(NextTest(point, None))
            states.append(CandidateState(passed=0.0, expected=0.0))
            continue
        own = _WithoutServers(problem, plan, list(trials), point, ladder, shares, possible_servers(point))
        own.sequence.run(own)
        tests.append(NextTest(point, own.wanted))
        states.append(own.state())
        if own.wanted is None and not errors_by_load(own.trial):
            break  # there is no time for it, nor for the other
    chosen = choose_candidate(states)
    return None if chosen is None else tests[chosen]


def _rival(
    others: Sequence[Point], by_number: Mapping[int, Trial], compared: Mapping[int, LoadLadder]
) -> Sequence[Point]:
    """Return the one of ``others`` that is tested, or may be; empty if there are none."""
    tested = [point for point in others if errors_by_load(by_number[point.trial])]
    expected = {number: expected_throughput(ladder) for number, ladder in compared.items()}
    rival = max(tested or others, key=lambda point: expected.get(point.trial, 0.0), default=None)
    return [] if rival is None else [rival]


def _compared_ladders(plan: ConfirmationPlan, trials: Sequence[Trial], problem: Problem) -> dict[int, LoadLadder]:
    """Return the loads of each finalist that was compared on enough fresh servers and not tested, as corrected."""
    judged = {entry.point.trial: entry for entry in judge_confirmations(trials, problem)}  # the last load of each
    compared = dict[int, LoadLadder]()
    for number, entry in judged.items():
        ladder = plan.ladder(entry.point) if number in plan.finalists else None
        if ladder is None or entry.error or entry.servers < COMPARED_SERVERS:
            continue
        corrected = rival_ladder(ladder, entry, problem)
        if corrected is not None:
            compared[number] = corrected
    return compared


@dataclass(frozen=True, slots=True)
class NextLook:
    """The servers that the next verdict of a confirmation needs, and the estimated time that they take."""

    servers: int
    seconds: float


def next_look_of(plan: ConfirmationPlan, trials: Sequence[Trial], problem: Problem) -> NextLook | None:
    """Return the servers that the next verdict needs; None if no further server can change a verdict."""
    trials = [without_lost_end(trial) for trial in trials]
    points = fit_speed_correction(trials, problem).correct_points(latest_points(trials))
    test = next_test(plan, trials, plan.best_points(points, problem), problem)
    if test is None:
        return None
    ladder = plan.ladder(test.point)
    load = test.point.load if ladder is None or test.load is None else ladder.loads[test.load]
    tested = next(trial for trial in trials if trial.number == test.point.trial)
    measured = len(server_windows(tested, load)) if load in errors_by_load(tested) else 0
    missing = next(look for look in LOOKS if look > measured) - measured
    planned = confirmation_candidate(test.point, load, problem.request_times, sla=problem.sla)
    return NextLook(missing, missing * planned.server_seconds)
