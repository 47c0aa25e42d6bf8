"""What a study on another machine showed, and what of that is to be expected here."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from objectives.metrics import Measurement
from optimizer.problem import Problem
from optimizer.search.correction import Correction
from optimizer.search.figures import Array, Cell, is_known, log_simulated, with_tails
from optimizer.search.in_flight import in_flight
from optimizer.search.learned import learned
from optimizer.search.result import Result, result_of
from optimizer.search.server_model import ServerModel, fit
from optimizer.trial import Candidate, Point, Trial, latest_points

MOST_POINTS = 160  # that are learned from: the time of a decision grows with their square


@dataclass(frozen=True)
class Elsewhere:
    """``trials`` of the same model on a machine of ``cpu_count`` cores (None: not known), as the space here spells
    them. They are no trials of the study that learns from them."""

    trials: tuple[Trial, ...]
    cpu_count: int | None = None

    def best(self, problem: Problem) -> list[Candidate]:
        """Its configurations that lie in the space, the best within the bounds there first."""
        ranked: list[tuple[bool, float, Candidate]] = []
        for trial in self.trials:
            result = result_of(trial, problem)
            if isinstance(result, Result) and problem.space.values_of(trial.candidate) is not None:
                broken = max(result.constraints.values(), default=0.0)
                value = result.values[0] if problem.objectives[0].better == "lower" else -result.values[0]
                ranked.append((broken > 0, broken if broken > 0 else value, trial.candidate))
        return list(dict.fromkeys(candidate for *_, candidate in sorted(ranked, key=lambda entry: entry[:2])))

    def twin(self, problem: Problem, latency: str, seed: int) -> Twin | None:
        """None where nothing was measured that a simulation knows."""
        points = latest_points(self.trials)
        if any(not point.load.concurrency for point in points):
            points = in_flight(points, problem)
        points = [point for point in points if is_known(point, latency)]
        points = random.Random(seed).sample(points, min(len(points), MOST_POINTS))
        return Twin(points, replace(problem, cpu_count=self.cpu_count), latency, seed) if points else None


class Twin:
    """The other machine, simulated with all that was measured there: it answers for any configuration at any load.

    ``correction`` is what that simulation gets wrong.
    """

    def __init__(self, points: Sequence[Point], problem: Problem, latency: str, seed: int) -> None:
        self._problem, self._latency, self._seed = problem, latency, seed
        self._model = fit(points, problem, latency, seed)
        self.correction = Correction(learned(self._model, points, problem, latency).residuals, self._model.error)
        self._known: dict[Cell, Array] = {}

    def lesson(self, here: Sequence[Point]) -> Lesson:
        """With a simulation that is told as much of that machine as ``here`` tells of this one."""
        cells = [(self._problem.space.canonical(point.candidate), point.load.concurrency) for point in here]
        told = self._model.measure(cells)
        points = [replace(point, measurement=measured) for point, measured in zip(here, told, strict=True)]
        if not any(point.measurement.compute_infer_ms for point in here):
            points = [replace(one, measurement=_without_the_servers_part(one.measurement)) for one in points]
        return Lesson(self, fit(points, self._problem, self._latency, self._seed))

    def figures(self, cells: Sequence[Cell], threads: int) -> Array:
        """Log throughput and log tail [cells, 2]."""
        missing = [cell for cell in dict.fromkeys(cells) if cell not in self._known]
        self._known.update(zip(missing, self.figures_of(self._model, missing, threads), strict=True))
        return np.array([self._known[cell] for cell in cells]).reshape(-1, 2)

    def figures_of(self, model: ServerModel, cells: Sequence[Cell], threads: int) -> Array:
        """The same, as ``model`` has it."""
        figures = np.array([log_simulated(one, self._latency) for one in model.simulate(cells, threads)])
        return with_tails(figures.reshape(-1, 2), cells, self._problem.space.request_batch_size)


@dataclass(frozen=True)
class Lesson:
    """What a ``stranger`` to the other machine, who was told no more of it than is known here, gets wrong of it."""

    twin: Twin
    stranger: ServerModel

    def expected(self, cells: Sequence[Cell], threads: int) -> Array:
        """The errors [cells, 2] of log throughput and log tail; what they are here if the machines are alike."""
        return self.twin.figures(cells, threads) - self.twin.figures_of(self.stranger, cells, threads)


def _without_the_servers_part(measurement: Measurement) -> Measurement:
    return replace(measurement, queue_ms=None, compute_infer_ms=None, batch_stats="")
