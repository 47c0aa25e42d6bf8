"""A small run of ``benchmarks/many_workers.py`` (one search by several workers), and its components."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from objectives.arrays import FloatArray

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import storage_speed
from made_up_stack import SimulatedStack
from many_workers import WorkerSearch, best_of, searched
from simulated_tables import hidden_server

from optimizer.search.gaussian_process import FantasyProcess, ResidualProcess

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


def test_a_single_worker_ends_with_the_best_candidate(stack: SimulatedStack, best: float) -> None:
    alone = searched(WorkerSearch(SPACE, "threads", 0, 1, "one by one", most=20), stack, best)
    assert alone.trials < 20
    assert alone.regret == alone.regret_after(20) == 0
    assert alone.waiting == 0


def test_the_heedless_repeat_nothing_either(stack: SimulatedStack, best: float) -> None:
    heedless = searched(WorkerSearch(SPACE, "threads", 0, 4, "heedless", most=7), stack, best)
    assert (heedless.trials, heedless.duplicates) == (7, 0)


def test_a_believer_is_a_process_that_measured_what_it_predicts() -> None:
    def kernel(a: FloatArray, b: FloatArray) -> FloatArray:
        return np.asarray(0.04 * np.exp(-(np.subtract.outer(a[:, 0], b[:, 0]) ** 2)))

    inputs, cells, running = (np.array(values)[:, None] for values in ([0.0, 1.0, 2.0], [0.5, 3.0, 9.0], [3.1, 1.4]))
    learned = np.array([0.1, 0.2, -0.1])
    one = ResidualProcess(kernel, inputs, 0.01 * np.eye(3), learned)
    scale = one.noise_scale**2 * 0.01
    mean, deviation = FantasyProcess(one, running, 0.01 * np.eye(2)).predict(cells)
    covariance = one.covariance(running, running) + scale * np.eye(2)
    cross = one.covariance(cells, running)
    assert mean == pytest.approx(one.predict(cells)[0])
    shrunk = one.predict(cells)[1] ** 2 - np.diag(cross @ np.linalg.solve(covariance, cross.T))
    assert deviation**2 == pytest.approx(shrunk)


def test_the_speed_of_a_storage_is_measured(tmp_path: Path) -> None:
    storage = str(tmp_path / "study.journal")
    known = storage_speed.filled(storage, "study", 5)
    turns = storage_speed.measured(storage, "study", known, workers=2, seconds=1.0)
    assert turns
    assert all(turn.claim_s > 0 and turn.record_s > 0 for turn in turns)
