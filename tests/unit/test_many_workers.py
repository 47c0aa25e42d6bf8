"""Several workers, one search: the simulation in ``benchmarks/many_workers.py``, small, and what it rests on."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import storage_speed
from made_up_stack import Stack
from many_workers import Job, best_of, searched
from simulated_tables import hidden_server

from optimizer.search.believer import Believer
from optimizer.search.process import Array, Process

SPACE = "small"


@pytest.fixture(scope="module")
def stack() -> Stack:
    return Stack(hidden_server("threads"))


@pytest.fixture(scope="module")
def best(stack: Stack) -> float:
    return best_of(stack.server, SPACE)


def test_several_workers_find_what_one_does_and_try_nothing_twice(stack: Stack, best: float) -> None:
    together = searched(Job(SPACE, "threads", 0, 4, "together", most=9), stack, best)
    assert together.trials == len(together.regrets) == 9
    assert together.duplicates == 0
    assert 0 <= min(together.regrets) == together.regret <= 0.1
    assert 0 <= together.searching + together.waiting < 1


def test_one_by_one_ends_with_the_best(stack: Stack, best: float) -> None:
    alone = searched(Job(SPACE, "threads", 0, 1, "one by one", most=20), stack, best)
    assert alone.trials < 20
    assert alone.regret == alone.regret_after(20) == 0
    assert alone.waiting == 0


def test_the_heedless_repeat_nothing_either(stack: Stack, best: float) -> None:
    heedless = searched(Job(SPACE, "threads", 0, 4, "heedless", most=7), stack, best)
    assert (heedless.trials, heedless.duplicates) == (7, 0)


def test_a_believer_is_a_process_that_measured_what_it_predicts() -> None:
    def kernel(a: Array, b: Array) -> Array:
        return np.asarray(0.04 * np.exp(-(np.subtract.outer(a[:, 0], b[:, 0]) ** 2)))

    inputs, cells, running = (np.array(values)[:, None] for values in ([0.0, 1.0, 2.0], [0.5, 3.0, 9.0], [3.1, 1.4]))
    learned = np.array([0.1, 0.2, -0.1])
    one = Process(kernel, inputs, 0.01 * np.eye(3), learned)
    scale = one.noise_scale**2 * 0.01
    mean, deviation = Believer(one, running, 0.01 * np.eye(2)).predict(cells)
    covariance = one.covariance(running, running) + scale * np.eye(2)
    cross = one.covariance(cells, running)
    assert mean == pytest.approx(one.predict(cells)[0])
    shrunk = one.predict(cells)[1] ** 2 - np.diag(cross @ np.linalg.solve(covariance, cross.T))
    assert deviation**2 == pytest.approx(shrunk)


def test_the_speed_of_a_storage_is_measured(tmp_path: Path) -> None:
    storage = str(tmp_path / "study.journal")
    known = storage_speed.filled(storage, "study", 5)
    turns = storage_speed.measured(storage, "study", known, workers=2, seconds=0.5)
    assert turns
    assert all(turn.claim_s > 0 and turn.record_s > 0 for turn in turns)
