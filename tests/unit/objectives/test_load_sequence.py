"""Test which load, and which configuration, is tested next on fresh servers, and the error that each test spends."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectives.load_sequence import (
    ERROR_SHARES,
    MARGIN,
    OTHER_ERROR_SHARES,
    CandidateState,
    LoadSequence,
    choose_candidate,
    first_load,
)
from objectives.sequential import LOOKS
from objectives.sla import Verdict
from objectives.verdict import SlaVerdict

PREDICTED = (-0.6, -0.4, -0.2, -0.1, 0.05)  # log of the predicted latency over its bound


def sequence_of(predicted: tuple[float, ...] = PREDICTED, gain: float = 1.1) -> LoadSequence:
    """Return a sequence whose loads serve ``gain`` times as much as the one below."""
    return LoadSequence(predicted, [gain**load for load in range(len(predicted))], 0.01)


@dataclass
class ScriptedResults:
    """Give the verdicts of ``answer`` (load, number of servers) at planned looks, and record each deployed load."""

    answer: Callable[[int, int], SlaVerdict]
    possible: int = 100
    deployed: list[int] = field(default_factory=list)
    errors: list[tuple[int, float]] = field(default_factory=list)

    def measure(self, sequence: LoadSequence) -> None:
        """Measure servers until the sequence needs no other."""
        while (load := sequence.next_load(self)) is not None:
            self.deployed.append(load)
            self.possible -= 1

    def servers(self, load: int) -> int:
        return self.deployed.count(load)

    def possible_servers(self) -> int:
        return self.possible

    def judge(self, load: int, error: float, max_servers: int) -> SlaVerdict:
        if self.servers(load) not in LOOKS:
            return judged(Verdict.UNDECIDED, promising=True)
        if (load, error) not in self.errors:
            self.errors.append((load, error))
        return self.answer(load, self.servers(load))


def judged(verdict: Verdict, *, promising: bool = False, excess: float = 0.1) -> SlaVerdict:
    return SlaVerdict(verdict, "", is_promising=promising, excess=excess)


@pytest.mark.parametrize(
    ("predicted", "throughput", "chosen"),
    [
        # a little more does not make up for the risk
        ((-0.3, -0.2, -0.1, 0.0), (100, 106, 112, 118), 1),
        # with a queue delay, a much higher load misses the margin by little
        ((-0.3, -0.19, -0.05, -0.147, 0.0), (30, 46, 60, 78, 80), 3),
        ((-0.3, -0.19, -0.05, -0.147, 0.0), (30, 46, 60, 50, 52), 1),
        (PREDICTED, (1.0, 1.1, 1.21, 1.331, 1.4641), 2),  # the highest load that is inside the bound by the margin
        ((-0.1, 0.0, 0.1), (100, 106, 112), 0),
        ((1.0, 3.0, 20.0), (100, 200, 300), 0),
        ((-0.2,), (0.0,), 0),
    ],
)
def test_the_first_load_promises_the_most_from_the_margin_on(
    predicted: tuple[float, ...], throughput: tuple[float, ...], chosen: int
) -> None:
    assert first_load(predicted, throughput, MARGIN) == chosen
    assert LoadSequence(predicted, throughput, 0.01).current == chosen


def test_a_pass_hands_its_error_on_to_a_higher_load() -> None:
    tester = ScriptedResults(lambda load, _: judged(Verdict.PASS if load < 4 else Verdict.FAIL))
    sequence = sequence_of()
    tester.measure(sequence)
    assert tester.errors == [(2, 0.005), (3, 0.005), (4, 0.005)]
    assert sequence.passed == 3
    assert tester.deployed == [2] * LOOKS[0] + [3] * LOOKS[0] + [4] * LOOKS[0]


def test_after_a_pass_far_inside_the_bound_loads_that_would_pass_as_well_are_skipped() -> None:
    def answer(load: int, _: int) -> SlaVerdict:
        return judged(Verdict.FAIL, excess=0.1) if load == 4 else judged(Verdict.PASS, excess=-0.3)

    tester = ScriptedResults(answer)
    sequence = sequence_of()
    tester.measure(sequence)
    assert tester.errors == [(2, 0.005), (4, 0.005), (3, 0.0025)], "then one between them, with a reserved share"
    assert sequence.passed == 3


def test_after_a_pass_a_load_that_serves_hardly_more_is_skipped() -> None:
    tester = ScriptedResults(lambda *_: judged(Verdict.PASS))
    sequence = LoadSequence(PREDICTED, (100, 120, 140, 142, 150), 0.01)
    tester.measure(sequence)
    assert [load for load, _ in tester.errors] == [2, 4]
    saturated = LoadSequence(PREDICTED, (100, 120, 140, 141, 142), 0.01)
    tester.measure(saturated)
    assert saturated.passed == 2


@pytest.mark.parametrize(("excess", "then"), [(-0.04, 4), (0.0, 3), (0.2, 1)])
def test_after_a_pass_small_gains_are_skipped_for_a_likely_larger_one(excess: float, then: int) -> None:
    sequence = LoadSequence((-0.2, -0.19, -0.18, -0.14, -0.12), (100, 103, 106, 115, 120), 0.01, highest_first=0)
    sequence.finish_passed(excess)
    assert sequence.current == then


def test_known_chances_decide_about_the_next_load() -> None:
    """The predicted latencies do not matter then."""
    sequence = sequence_of(gain=1.2)
    sequence.chances = lambda indices, _: [{0: 0.9, 1: 0.5, 3: 0.8, 4: 0.5}[index] for index in indices]
    sequence.finish_failed(0.01)
    assert sequence.current == 0
    assert PREDICTED[1] < PREDICTED[2] - 0.01, "it would be next without them"
    after_pass = sequence_of(gain=1.2)
    after_pass.chances = sequence.chances
    after_pass.finish_passed(-0.3)
    assert after_pass.current == 4, "it adds more than twice as much, and passes as half of the tests"


def test_lower_loads_after_failures_spend_reserved_shares_of_the_error() -> None:
    tester = ScriptedResults(lambda *_: judged(Verdict.UNDECIDED, excess=0.0))
    sequence = sequence_of((-0.9, -0.8, -0.7, -0.6, -0.5))
    tester.measure(sequence)
    assert [error for _, error in tester.errors] == [0.005, 0.0025, 0.000625]
    assert [load for load, _ in tester.errors] == [4, 3, 2]
    assert sequence.passed is None
    of_both = sum(ERROR_SHARES) + sum(OTHER_ERROR_SHARES)
    assert of_both == pytest.approx(1), "with the runner-up, all of the error is spent"


def test_the_next_lower_load_is_predicted_to_be_faster_by_the_excess() -> None:
    tester = ScriptedResults(lambda load, _: judged(Verdict.FAIL if load == 2 else Verdict.PASS, excess=0.3))
    sequence = sequence_of()
    tester.measure(sequence)
    assert [load for load, _ in tester.errors] == [2, 0, 1], "a load that failed is not tested again"
    assert sequence.passed == 1


def test_after_a_throughput_that_is_too_low_a_higher_load_is_tested() -> None:
    def answer(load: int, _: int) -> SlaVerdict:
        if load < 3:
            return SlaVerdict(Verdict.FAIL, "", is_promising=False, excess=-0.1, lacks_throughput=True)
        return judged(Verdict.PASS if load == 3 else Verdict.FAIL, excess=0.05)

    tester = ScriptedResults(answer)
    sequence = sequence_of()
    tester.measure(sequence)
    assert tester.errors == [(2, 0.005), (3, 0.0025), (4, 0.0025)]
    assert sequence.passed == 3
    resumed = sequence_of()
    resumed.resume(tester.errors)
    assert resumed.current == 4
    with pytest.raises(ValueError, match="not one of this sequence"):
        sequence_of().resume([(2, 0.005), (3, 0.000625)])


def test_no_load_is_tested_after_a_throughput_that_is_too_low_and_a_latency_that_is_too_high() -> None:
    failed = SlaVerdict(Verdict.FAIL, "", is_promising=False, excess=0.1, lacks_throughput=True)
    tester = ScriptedResults(lambda *_: failed)
    tester.measure(sequence_of())
    assert [load for load, _ in tester.errors] == [2]
    saturated = ScriptedResults(lambda *_: replace(failed, excess=-0.1))
    saturated.measure(sequence_of(gain=1.005))
    assert len(saturated.errors) == 1, "higher loads serve hardly more"


def test_between_a_throughput_that_is_too_low_and_a_latency_that_is_too_high_a_load_is_tested() -> None:
    sequence = sequence_of()
    sequence.finish_failed(-0.3, lacks_throughput=True)
    assert sequence.current == 4
    sequence.finish_failed(0.1)
    assert sequence.current == 3
    sequence.finish_failed(-0.01, lacks_throughput=True)
    assert sequence.current is None


def test_an_undecided_load_is_measured_on_more_servers_while_it_is_promising() -> None:
    tester = ScriptedResults(
        lambda _, servers: judged(Verdict.PASS) if servers >= LOOKS[2] else judged(Verdict.UNDECIDED, promising=True)
    )
    sequence = sequence_of(PREDICTED[:3])
    tester.measure(sequence)
    assert tester.servers(2) == LOOKS[2]
    assert sequence.passed == 2


def test_the_sequence_ends_when_the_time_allows_no_further_look() -> None:
    tester = ScriptedResults(lambda *_: judged(Verdict.UNDECIDED, promising=True), possible=LOOKS[0] + 1)
    sequence = sequence_of()
    tester.measure(sequence)
    assert tester.servers(2) == LOOKS[0]
    assert (sequence.current, sequence.passed) == (2, None)


def test_before_the_first_look_the_time_of_a_lower_load_is_reserved() -> None:
    class Recording(ScriptedResults):
        def judge(self, load: int, error: float, max_servers: int) -> SlaVerdict:
            most.append((load, self.servers(load), max_servers))
            return super().judge(load, error, max_servers)

    most = list[tuple[int, int, int]]()
    tester = Recording(lambda load, _: judged(Verdict.UNDECIDED), possible=14)
    tester.measure(sequence_of((-0.6, -0.5, -0.4)))
    assert most[:4] == [(2, 1, 10), (2, 2, 10), (2, 3, 10), (2, 4, 14)]
    assert most[4:8] == [(1, 1, 6), (1, 2, 6), (1, 3, 6), (1, 4, 10)]
    assert most[8:] == [(0, 1, 6), (0, 2, 6), (0, 3, 6), (0, 4, 6)], "there is no lower load"
    of_three_loads = most.copy()
    most.clear()
    tester.possible, tester.deployed = 14, []
    tester.measure(sequence_of((-0.7, -0.6, -0.5, -0.4)))
    assert most == [(load + 1, *rest) for load, *rest in of_three_loads], "no error is left for a fourth load"


def test_a_load_is_not_given_up_because_the_time_ends_before_its_first_look() -> None:
    class InTime(ScriptedResults):
        def judge(self, load: int, error: float, max_servers: int) -> SlaVerdict:
            return judged(Verdict.UNDECIDED, promising=max_servers >= LOOKS[0])

    tester = InTime(lambda *_: judged(Verdict.PASS), possible=1, deployed=[2])
    sequence = sequence_of()
    assert sequence.next_load(tester) is None
    assert sequence.current == 2, "the servers that the time still allows, and a later session, continue its test"


def test_a_server_that_cannot_be_measured_changes_nothing() -> None:
    tester = ScriptedResults(lambda *_: judged(Verdict.PASS))
    sequence = sequence_of()
    assert sequence.next_load(tester) == sequence.next_load(tester) == 2
    assert sequence.passed is None


def test_a_finished_sequence_takes_no_verdict() -> None:
    sequence = sequence_of((-0.5,))
    sequence.finish_passed(0.0)
    assert (sequence.current, sequence.passed) == (None, 0)
    with pytest.raises(ValueError, match="over"):
        sequence.finish_failed(0.1)
    with pytest.raises(ValueError, match="over"):
        sequence.finish_passed(0.1)


def test_a_hopeless_load_is_given_up_before_the_first_look() -> None:
    class Hopeless(ScriptedResults):
        def judge(self, load: int, error: float, max_servers: int) -> SlaVerdict:
            if load == 2:
                return judged(Verdict.UNDECIDED, excess=0.1)
            return super().judge(load, error, max_servers)

    tester = Hopeless(lambda *_: judged(Verdict.PASS))
    sequence = sequence_of()
    tester.measure(sequence)
    assert tester.servers(2) == 1
    assert sequence.passed == 1


def test_servers_of_an_interrupted_run_count() -> None:
    tester = ScriptedResults(lambda *_: judged(Verdict.PASS), deployed=[2] * LOOKS[0])
    sequence = sequence_of(PREDICTED[:3])
    tester.measure(sequence)
    assert len(tester.deployed) == LOOKS[0]
    assert sequence.passed == 2


@dataclass
class RememberedResults:
    """A candidate whose verdicts follow from ``seed``. It keeps load and error of each server, as a table does.

    A session ends after ``left`` servers. ``is_in_time`` says whether a test knows that end, as it knows a budget.
    """

    seed: int
    left: int = 10_000
    is_in_time: bool = False
    rows: list[tuple[int, float]] = field(default_factory=list)
    sequence: LoadSequence = field(init=False)

    def run(self, predicted: tuple[float, ...]) -> int | None:
        """Continue the sequence, and return the highest load that passed."""
        self.sequence = sequence_of(predicted, 1 + self.seed % 4 / 100)
        self.sequence.resume(list(dict.fromkeys(self.rows)))
        while (load := self.sequence.next_load(self)) is not None and self.left:
            self.left -= 1
            self.rows.append((load, self.sequence.current_error))
        return self.sequence.passed

    def servers(self, load: int) -> int:
        return sum(tested_load == load for tested_load, _ in self.rows)

    def possible_servers(self) -> int:
        return self.left if self.is_in_time else 100

    def judge(self, load: int, error: float, max_servers: int) -> SlaVerdict:
        servers = self.servers(load)
        chance = random.Random(f"{self.seed} {load} {servers}")
        verdict = chance.choice([Verdict.PASS, Verdict.UNDECIDED, Verdict.UNDECIDED, Verdict.FAIL])
        if servers not in LOOKS:
            verdict = Verdict.UNDECIDED
        needed = chance.choice([look for look in LOOKS if look > servers] or [10**9])
        is_promising = verdict is Verdict.UNDECIDED and needed <= max_servers
        return judged(verdict, promising=is_promising, excess=chance.uniform(-0.1, 0.4))


predictions = st.lists(st.floats(-1, 0.5), min_size=1, max_size=12).map(tuple)


@given(predictions, st.integers(0, 10**6), st.lists(st.integers(0, 12), max_size=6))
def test_a_sequence_in_several_sessions_makes_the_same_decisions(
    predicted: tuple[float, ...], seed: int, sessions: list[int]
) -> None:
    at_once, in_parts = RememberedResults(seed), RememberedResults(seed)
    passed = at_once.run(predicted)
    for in_parts.left in sessions:
        in_parts.run(predicted)
    in_parts.left = 10_000
    assert in_parts.run(predicted) == passed
    assert in_parts.rows == at_once.rows
    assert in_parts.sequence == at_once.sequence


@given(predictions, st.integers(0, 10**6), st.lists(st.integers(0, 30), min_size=2, max_size=8))
def test_sessions_with_short_budgets_spend_no_more_error_than_one(
    predicted: tuple[float, ...], seed: int, sessions: list[int]
) -> None:
    tester = RememberedResults(seed, is_in_time=True)
    for tester.left in sessions:
        tester.run(predicted)
    errors = dict(tester.rows)
    assert len(set(tester.rows)) == len(errors), "each load has one test, with one error"
    assert sum(set(errors.values())) <= 0.01 * sum(ERROR_SHARES)
    for share in set(errors.values()):
        loads = [load for load, error in errors.items() if error == share]
        assert loads == sorted(loads), "a share is used once, or handed on to a higher load"
        assert all(tester.servers(load) in LOOKS for load in loads[:-1]), "after a PASS"


def test_a_load_given_up_for_lack_of_time_stays_given_up_once_a_lower_one_is_tested() -> None:
    class NeedingTime(RememberedResults):
        def judge(self, load: int, error: float, max_servers: int) -> SlaVerdict:
            return judged(Verdict.UNDECIDED, promising=max_servers >= (13 if load == 2 else 6), excess=0.3)

    tester = NeedingTime(1, left=8, is_in_time=True)
    tester.run(PREDICTED)
    assert set(tester.rows) == {(2, 0.005), (0, 0.0025)}
    measured, tester.left = tester.servers(2), 30
    tester.run(PREDICTED)
    assert tester.servers(2) == measured
    assert tester.servers(0) == LOOKS[-1]


@pytest.mark.parametrize(
    "tested",
    [
        [(1, 0.005)],  # not the first load
        [(2, 0.0025)],  # not its error
        [(2, 0.005), (3, 0.000625)],  # a higher load with neither the inherited error nor the next reserved share
        [(2, 0.005), (4, 0.005), (3, 0.005)],  # a lower load after a PASS, without a reserved share
        [(2, 0.005), (0, 0.0025), (2, 0.0025)],  # a load that has failed
        [(2, 0.005), (1, 0.005)],  # a lower load with the same error
        [(2, 0.005), (3, 0.005), (1, 0.0025)],  # a load below the one that passed
    ],
)
def test_tests_of_another_sequence_are_not_resumed(tested: list[tuple[int, float]]) -> None:
    with pytest.raises(ValueError, match="is not one of this sequence"):
        sequence_of().resume(tested)


# -- which configuration is next ----------------------------------------------------------------------------------


def next_of(*states: tuple[float, float | None]) -> int | None:
    """Return the choice among configurations of which each has a throughput that passed and an expected one."""
    return choose_candidate([CandidateState(passed, expected) for passed, expected in states])


def test_the_first_configuration_is_tested_until_one_has_passed() -> None:
    assert next_of((0, 100), (0, 200)) == 0
    assert next_of((0, None), (0, 50)) == 1
    assert next_of((0, 40), (0, None)) == 0
    assert next_of((0, None), (0, None)) is None
    assert next_of() is None


def test_after_a_pass_another_configuration_needs_a_clear_gain_over_it() -> None:
    assert next_of((100, None), (0, 104)) is None
    assert next_of((100, None), (0, 106)) == 1
    assert next_of((100, 102), (0, 104)) == 0, "its own next load needs none"
    assert next_of((100, 102), (0, 108)) == 1
    assert next_of((90, 104), (100, 102)) == 1
    assert next_of((90, 130), (100, 110)) == 0
    assert next_of((0, 40), (95, None)) is None


def test_a_begun_test_is_finished_first() -> None:
    first, other = CandidateState(0, 40, is_begun=True), CandidateState(0, 95)
    assert choose_candidate([first, other]) == 0
    assert choose_candidate([CandidateState(50, 60), CandidateState(0, 20, is_begun=True)]) == 1
