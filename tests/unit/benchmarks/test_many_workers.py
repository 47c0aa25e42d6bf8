"""A small run of ``benchmarks/many_workers.py`` (one search by several workers)."""

from __future__ import annotations

import pytest

from lib.simulated_stack import SimulatedStack
from lib.simulated_tables import hidden_server
from many_workers import WorkerSearch, best_of, searched

SPACE = "small"


@pytest.fixture(scope="module")
def stack() -> SimulatedStack:
    return SimulatedStack(hidden_server("threads"))


@pytest.fixture(scope="module")
def best(stack: SimulatedStack) -> float:
    return best_of(stack.server, SPACE)


def test_several_workers_find_the_same_best_and_repeat_no_trial(stack: SimulatedStack, best: float) -> None:
    together = searched(WorkerSearch(SPACE, "threads", 0, 4, "together", most=9), stack, best)
    assert together.trials == len(together.regrets) == 9
    assert together.duplicates == 0
    assert 0 <= min(together.regrets) == together.regret <= 0.1
    assert 0 <= together.searching + together.waiting < 1
