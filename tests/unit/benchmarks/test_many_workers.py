"""A small run of ``benchmarks/many_workers.py`` (one search by several workers), and its components."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from made_up_stack import SimulatedStack
from many_workers import WorkerSearch, best_of, searched
from simulated_tables import hidden_server

SPACE = "small"


@pytest.fixture(scope="module")
def stack() -> SimulatedStack:
    return SimulatedStack(hidden_server("threads"))


@pytest.fixture(scope="module")
def best(stack: SimulatedStack) -> float:
    return best_of(stack.server, SPACE)


def test_the_heedless_repeat_nothing_either(stack: SimulatedStack, best: float) -> None:
    heedless = searched(WorkerSearch(SPACE, "threads", 0, 4, "heedless", most=7), stack, best)
    assert (heedless.trials, heedless.duplicates) == (7, 0)
