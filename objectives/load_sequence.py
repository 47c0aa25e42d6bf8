"""Which configuration is tested next, and at which load, such that all tests err with a fixed probability.

The loads are hypotheses "the SLA is missed at this load", each of which a PASS rejects. The error is split over them
before the first window by a graphical procedure (Bretz et al. 2009, "A graphical approach to sequentially rejective
multiple test procedures"): the first load gets half of it, each load that is tried after a failure a reserved share,
and a PASS hands its error on to a higher load. A second configuration has reserved shares as well. Which load
or configuration is next may depend on earlier measurements, because each load is tested on servers of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Protocol

import numpy as np

from objectives.sequential import LOOKS
from objectives.sla import Verdict
from objectives.verdict import SlaVerdict

ERROR_SHARES = (1 / 2, 1 / 4, 1 / 16)  # shares of the first load and of the loads that are tried after failures
OTHER_ERROR_SHARES = (1 / 8, 1 / 16)  # the same for a second candidate, see docs/verdict-method.md
MARGIN = 0.15  # log of latency by which the prediction of the first load is inside the bound, see first_load
OTHER_MARGIN = 0.22  # the same for a second candidate, whose test has less error and whose prediction fewer servers
PREDICTION_ERROR = 0.1  # standard deviation of the log of the measured latency over the predicted one
STEP_ERROR = 0.05  # the same after predictions were shifted to the latency of another load on fresh servers
MIN_LATENCY_STEP = 0.06  # log of latency by which a lower load must be better than one that failed
MIN_GAIN_FACTOR = 1.02  # a load is tested after a PASS if it is expected to serve at least this multiple
CLEAR_GAIN = 1.05  # another candidate is tested if it is expected to be worth at least this multiple


def first_load(predicted: Sequence[float], throughput: Sequence[float], margin: float) -> int:
    """Return the index of the load at which the tests of a configuration begin.

    It is the highest load whose prediction is below the bound by at least ``margin``, or a higher one with a larger
    product of predicted throughput and probability to pass.

    Args:
        predicted: The log of the predicted latency over its bound at each load, ascending; at least one.
        throughput: The predicted throughput at each load, in any unit.
        margin: Log of latency.
    """
    return _most_promising(range(len(predicted)), predicted, throughput, -margin, PREDICTION_ERROR)


def _most_promising(
    indices: Sequence[int],
    predicted: Sequence[float],
    throughput: Sequence[float],
    limit: float,
    error: float,
    passed: float = 0.0,
) -> int:
    """Return the index of the most promising load, which is tested next.

    It is the highest load whose prediction is at most ``limit``, or one above it for which the product of the gain
    and of the probability to pass is higher. Latency is not monotonic in the load, so a much higher load may miss the
    limit by little.

    Args:
        indices: The indices of the possible loads, ascending; at least one.
        predicted: The log of the predicted latency over its bound at each load.
        throughput: The predicted throughput at each load.
        limit: The prediction with which a load passes, unless its latency is more than one ``error`` higher.
        error: The standard deviation of the log of the latency over its prediction.
        passed: The throughput at the load that passed; 0 if none did.
    """
    inside = [index for index in indices if predicted[index] <= limit]
    lowest, excess = max(inside, default=indices[0]), NormalDist(0.0, error)
    return max(
        (index for index in indices if index >= lowest),
        key=lambda index: (throughput[index] - passed) * excess.cdf(limit + error - predicted[index]),
    )


class LoadResults(Protocol):
    """The measurements of one configuration on fresh servers, at ascending loads that are named by their index."""

    def servers(self, index: int) -> int:
        """Return the number of servers that were measured at this load."""
        ...

    def possible_servers(self) -> int:
        """Return how many more servers the time allows."""
        ...

    def judge(self, index: int, error: float, max_servers: int) -> SlaVerdict:
        """Return the verdict on this load, whose test errs with ``error`` and can have ``max_servers`` servers."""
        ...


@dataclass
class LoadSequence:
    """The tests of one configuration at ascending loads.

    Attributes:
        predicted: The log of the predicted latency over its bound at each load; below 0 if the bound is met.
        throughput: The predicted throughput at each load, in any unit.
        error: Error probability of all tests of the run together.
        shares: Share of the error for the first load and for each load that is tried after a failure.
        margin: Log of latency by which the prediction of the first load is inside the bound, see ``first_load``.
        highest_first: Index of the highest load that may be the first; None if all may be.
        chances: Returns the probability that a test passes, by the indices of loads and its error; None if it is
            unknown. If it is known, it decides which load is next.
        current: Index of the load that is tested; None if the sequence is over.
        passed: Index of the highest load that passed; None if none did.
    """

    predicted: Sequence[float]
    throughput: Sequence[float]
    error: float
    shares: tuple[float, ...] = ERROR_SHARES
    margin: float = MARGIN
    highest_first: int | None = None
    chances: Callable[[Sequence[int], float], Sequence[float] | None] = lambda *_: None
    current: int | None = field(init=False)
    passed: int | None = field(default=None, init=False)
    _failures: int = field(default=0, init=False)
    _failed: set[int] = field(default_factory=set, init=False)
    _low_throughput: float = field(default=0.0, init=False)  # predicted, of the last load that missed the bound on it

    def __post_init__(self) -> None:
        end = len(self.predicted) if self.highest_first is None else self.highest_first + 1
        self.current = first_load(self.predicted[:end], self.throughput, self.margin)

    @property
    def current_error(self) -> float:
        """The error probability of the test of the current load, over all its looks."""
        return self.error * self.shares[self._failures]

    def resume(self, tested: Sequence[tuple[int, float]]) -> None:
        """Restore the state after the tests of an earlier session. The last of them is not over.

        A test ended with a PASS if a higher load has inherited its error, and otherwise without one. If a higher load
        has a reserved share of the error, the throughput was too low.

        Args:
            tested: Index of the load and error of each test, in the order of testing; empty if there were none.

        Raises:
            ValueError: The tests are not those of this sequence.
        """
        for number, (index, error) in enumerate(tested):
            if number and self.current is not None:
                has_passed = math.isclose(error, self.current_error)  # the higher load has inherited the error
                indices = self._pass() if has_passed else self._fail(lacks_throughput=index > self.current)
                self.current = index if index in indices else None
            if self.current != index or not math.isclose(error, self.current_error):
                raise ValueError(f"the test of load {index} with error {error:g} is not one of this sequence")

    def next_load(self, results: LoadResults) -> int | None:
        """Return the index of the load that needs another server; None if none can pass in the time that is left.

        Tests that ``results`` decide are ended first. A load is given up between the planned looks as well, which
        errs on the safe side. Servers that were measured before, such as those of an interrupted run, count.
        """
        while self.current is not None:
            index, servers = self.current, results.servers(self.current)
            if servers:
                judged = results.judge(index, self.current_error, self._max_servers(index, servers, results))
                if judged.verdict is Verdict.PASS and servers in LOOKS:
                    self.finish_passed(judged.excess)
                elif judged.verdict is not Verdict.PASS and not judged.is_promising:
                    self.finish_failed(judged.excess, lacks_throughput=judged.lacks_throughput)
                if self.current != index:
                    continue
            look = next((look for look in LOOKS if look > servers), None)
            return index if look is not None and look - servers <= results.possible_servers() else None
        return None

    def finish_passed(self, excess: float) -> None:
        """End the test of the current load with a PASS.

        The most promising higher load is current, if the predictions are shifted by the measured difference. There is
        none if no load is expected to serve clearly more.
        """
        if self.current is None:
            raise ValueError("the sequence is over")
        limit = self.predicted[self.current] - excess
        self.current = self._next(self._pass(), limit)

    def finish_failed(self, excess: float, *, lacks_throughput: bool = False) -> None:
        """End the test of the current load without a PASS.

        The most promising lower load is current, if those are likely to pass whose predicted log of latency is lower
        by ``excess``. With ``lacks_throughput`` it is the most promising higher load, and none if the latency has to
        fall too. There is none if the error is spent, or if a load has passed that is expected to serve as much.
        """
        if self.current is None:
            raise ValueError("the sequence is over")
        if lacks_throughput and excess >= 0:
            self.current = None
            return
        least = excess if lacks_throughput else max(excess, MIN_LATENCY_STEP)
        limit = self.predicted[self.current] - least if math.isfinite(excess) else -math.inf
        self.current = self._next(self._fail(lacks_throughput=lacks_throughput), limit)

    def _max_servers(self, index: int, servers: int, results: LoadResults) -> int:
        """Return how many servers the test of the load at ``index`` may have.

        Before its first look, the time of a lower load is reserved, if one can follow. The first look counts even if
        the time is too short for it: a later session can continue the test, and a lower load would need more servers.
        """
        most = servers + results.possible_servers()
        if servers >= LOOKS[0]:
            return most
        if self._failures + 1 < len(self.shares) and self._worth_testing(index):
            most -= LOOKS[0]
        return max(LOOKS[0], most)

    def _pass(self) -> list[int]:
        """Count the current load as passed, and return the indices that may be next, ascending."""
        assert self.current is not None
        self.passed = self.current
        return self._worth_testing(len(self.predicted))

    def _fail(self, *, lacks_throughput: bool) -> list[int]:
        """Count the current load as failed, and return the indices that may be next, ascending."""
        assert self.current is not None
        if lacks_throughput:
            self._low_throughput = self.throughput[self.current]
        else:
            self._failed.add(self.current)
        if self._failures + 1 == len(self.shares):
            return []
        indices = self._worth_testing(len(self.predicted) if lacks_throughput else self.current)
        self._failures += bool(indices)
        return indices

    def _next(self, indices: Sequence[int], limit: float) -> int | None:
        """Return the most promising of ``indices``; None if there are none.

        It has the highest product of gain and ``chances``. If they are unknown, latencies are at most ``limit``.
        """
        if not indices:
            return None
        passed = 0.0 if self.passed is None else self.throughput[self.passed]
        chances = self.chances(indices, self.current_error)
        if chances is not None:
            gains = [self.throughput[index] - passed for index in indices]
            return indices[int(np.argmax(np.multiply(gains, chances)))]
        return _most_promising(indices, self.predicted, self.throughput, limit, STEP_ERROR, passed)

    def _worth_testing(self, end: int) -> list[int]:
        """Return the indices of the loads that are worth a test, ascending.

        They are above the load that passed, and below ``end`` and all loads that failed. They are expected to serve
        clearly more than the load that passed, and than the last one that missed the bound on the throughput.
        """
        start, served = 0, self._low_throughput
        if self.passed is not None:
            start, served = self.passed + 1, max(served, self.throughput[self.passed])
        indices = range(start, min([end, *self._failed]))
        return [index for index in indices if self.throughput[index] >= MIN_GAIN_FACTOR * served]


@dataclass(frozen=True, slots=True)
class CandidateState:
    """How far the tests of one configuration are.

    A load is worth its throughput or, with another objective, ``Metric.worth``.

    Attributes:
        passed: The worth of the highest load that passed; 0 if none did.
        expected: The expected worth of the load that is tested next; None if no further server can help.
        is_begun: Whether servers were measured to test that load.
    """

    passed: float
    expected: float | None
    is_begun: bool = False


def choose_candidate(states: Sequence[CandidateState]) -> int | None:
    """Return the index of the configuration that is tested next; None if no other test can improve the result.

    A begun test is finished first, and the first configuration is tested until one of its loads passes or none is
    left. After a PASS, a configuration qualifies if it is expected to be worth at least CLEAR_GAIN times as much as
    another one that has passed. If two qualify, the first is tested, unless the second is expected to be worth at
    least CLEAR_GAIN times as much.
    """
    chosen: int | None = None
    chosen_worth = 0.0
    has_passed = any(state.passed for state in states)
    for index, state in enumerate(states):
        if state.expected is None:
            continue
        if state.is_begun or not has_passed:
            return index
        passed = max((other.passed for other in (*states[:index], *states[index + 1 :])), default=0.0)
        if state.expected >= CLEAR_GAIN * max(passed, chosen_worth):
            chosen, chosen_worth = index, state.expected
    return chosen
