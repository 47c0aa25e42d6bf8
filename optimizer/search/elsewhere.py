"""What a study on another machine showed, as far as it can be expected here too."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from optimizer.problem import Problem
from optimizer.search.correction import settings
from optimizer.search.figures import is_known
from optimizer.search.in_flight import in_flight
from optimizer.search.learned import Learned, learned
from optimizer.search.result import Result, result_of
from optimizer.search.server_model import fit
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

    def learned(self, here: Sequence[Point], problem: Problem, latency: str, seed: int) -> Learned | None:
        """What a simulation that is told as much of that machine as ``here`` tells of this one gets wrong there.

        None where nothing was measured that a simulation knows.
        """
        points = latest_points(self.trials)
        if any(not point.load.concurrency for point in points):
            points = in_flight(points, problem)
        points = [point for point in points if is_known(point, latency)]
        if not points:
            return None
        there = replace(problem, cpu_count=self.cpu_count)
        alike = _alike(points, here, problem)
        model = fit(alike, there, latency, seed)
        if len(points) > MOST_POINTS:
            points = random.Random(seed).sample(points, MOST_POINTS)
        return learned(model, points, there, latency)


def _alike(points: Sequence[Point], here: Sequence[Point], problem: Problem) -> list[Point]:
    """Of ``points`` the one nearest in settings and load to each that was measured here."""
    from scipy.spatial.distance import cdist

    def places(of: Sequence[Point]) -> np.ndarray:
        space = problem.space
        return np.array([settings(space, space.canonical(one.candidate), one.load.concurrency) for one in of])

    nearest = cdist(places(here), places(points)).argmin(axis=1)
    return [points[i] for i in dict.fromkeys(nearest.tolist())]
