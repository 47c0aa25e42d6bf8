"""What measurements say of a simulation: where it was right, and by how much it was wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optimizer.problem import Problem
from optimizer.search.correction import Residuals, features, noise_of
from optimizer.search.figures import Array, Cell, log_figures, log_simulated, with_tails
from optimizer.search.server_model import ServerModel
from optimizer.trial import Point


@dataclass(frozen=True, eq=False)
class Learned:
    """``cells`` [points]; ``simulated`` [points, 2]: log throughput and log tail. ``longer_tail`` [2] is in all of
    them alike, and not in the residuals."""

    cells: list[Cell]
    simulated: Array
    residuals: Residuals
    longer_tail: Array


def learned(model: ServerModel, points: Sequence[Point], problem: Problem, latency: str, threads: int = 1) -> Learned:
    """What ``model`` gets wrong of ``points``, which know ``latency``."""
    space, batch = problem.space, problem.space.request_batch_size
    cells = [(space.canonical(point.candidate), point.load.concurrency) for point in points]
    found = model.simulate(cells, threads)
    simulated = with_tails(np.array([log_simulated(one, latency) for one in found]), cells, batch)
    wrong = with_tails(np.array([log_figures(point, latency) for point in points]), cells, batch) - simulated
    # arrivals at random have a longer tail than the closed loop that is simulated, whatever the candidate
    longer_tail = np.array([0.0, float(np.median(wrong[:, 1])) if problem.open_loop else 0.0])
    residuals = Residuals(
        np.array([features(space, *cell, one) for cell, one in zip(cells, found, strict=True)]),
        wrong - longer_tail,
        [point.trial for point in points],
        np.array([noise_of(point) for point in points]),
    )
    return Learned(cells, simulated, residuals, longer_tail)
