"""What to deploy next: the simulator's ranking of the space, corrected by what was measured."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from objectives.sla import worst_violation
from optimizer.batcher.simulator import Simulated
from optimizer.problem import Problem
from optimizer.search.acquisition import Belief, expected_improvement, odds
from optimizer.search.correction import Correction, features, noise_of
from optimizer.search.figures import (
    LATENCY_FIELDS,
    Array,
    Cell,
    is_known,
    judged_latency,
    log_figures,
    log_loads,
    log_simulated,
    with_tails,
)
from optimizer.search.in_flight import in_flight
from optimizer.search.server_model import ServerModel, fit
from optimizer.search.service import group_of
from optimizer.trial import Candidate, Point, Trial, latest_points

LOADS = 9  # concurrencies that each candidate is predicted at
FINER, FINALISTS = 12, 6  # and around its best, the most promising ones
SHORTLIST = 320  # candidates that are followed once the whole space has been ranked
RANKED_BY = 2  # the first deployments: the order within a group changes little with more of them
UNLIKELY = 0.005  # while nothing meets the bound: that anything left does
FAILURE = 3  # successes that one failure in a group weighs up


@dataclass(frozen=True, slots=True)
class Decision:
    """``gain``: by how much ``candidate``, measured at ``load``, is expected to raise the best throughput
    within the bounds, as a share of it; inf while nothing meets them and something may. ``noise``: that of the
    measurements, as a multiple of the usual."""

    candidate: Candidate
    load: int
    gain: float
    noise: float = 1.0


class Guide:
    """Ranks a space. What was measured comes with each call; only the shortlist is kept between calls."""

    def __init__(self, problem: Problem, seed: int = 0) -> None:
        self._problem = problem
        self._seed = seed
        self._shortlist: list[Candidate] = []

    def decide(self, trials: Sequence[Trial], tried: Set[Candidate]) -> Decision | None:
        """The most promising candidate of those not ``tried``; None where there is none.

        Before anything was measured it is the plainest one.
        """
        left = [candidate for candidate in self._problem.space.candidates() if candidate not in tried]
        if not left:
            return None
        points = latest_points(trials)
        if self._problem.open_loop:
            points = in_flight(points, self._problem)
        latency = judged_latency(self._problem, points)
        measured = [point for point in points if is_known(point, latency)]
        if not measured:
            return Decision(left[0], self._loads(left[0])[0], math.inf)
        view = _View(self._problem, trials, measured, latency, self._seed)
        cells = [
            (candidate, load)
            for candidate in self._followed(view, left)
            if candidate not in tried
            for load in self._loads(candidate)
        ]
        gains = view.gains(cells)
        best = [cells[i] for i in np.argsort(-gains)[: FINALISTS * LOADS]]
        finalists = list(dict.fromkeys(candidate for candidate, _ in best))[:FINALISTS]
        finer = [(c, load) for c in finalists for load in self._between(c, next(at for of, at in best if of == c))]
        gains, cells = np.concatenate([gains, view.gains(finer)]), cells + finer
        chosen = int(np.argmax(gains))
        if view.meets_anywhere:
            return Decision(*cells[chosen], float(gains[chosen]), view.noise_scale)
        return Decision(*cells[chosen], math.inf if view.odds(cells).max() > UNLIKELY else 0.0)

    def _followed(self, view: _View, left: Sequence[Candidate]) -> list[Candidate]:
        """The shortlist; once that is used up, whatever is left."""
        if not self._shortlist:
            self._shortlist = self._ranked(view.of_first(RANKED_BY))
        remaining = set(left)
        return [candidate for candidate in self._shortlist if candidate in remaining] or list(left)

    def _ranked(self, view: _View) -> list[Candidate]:
        """The whole space simulated: of each combination of instances and other fields, which the simulation may
        get wrong as a whole, the candidates that are best within it."""
        candidates = self._problem.space.candidates()
        if len(candidates) <= SHORTLIST:
            return list(candidates)
        cells = [(candidate, load) for candidate in candidates for load in self._loads(candidate)]
        scores: dict[Candidate, float] = {}
        for (candidate, _), (throughput, latency_s) in zip(
            cells, np.exp(view.simulated(cells)).tolist(), strict=True
        ):
            score = throughput * min(1.0, view.bound_s / latency_s) ** 3
            scores[candidate] = max(score, scores.get(candidate, 0.0))
        places: Counter[object] = Counter()
        order: list[tuple[int, float, Candidate]] = []
        for candidate in sorted(scores, key=lambda c: -scores[c]):
            group = group_of(candidate)
            order.append((places[group], -scores[candidate], candidate))
            places[group] += 1
        order.sort(key=lambda entry: entry[:2])  # the best of each group, then the second best, …
        return [candidate for _, _, candidate in order[:SHORTLIST]]

    def _loads(self, candidate: Candidate) -> tuple[int, ...]:
        possible = self._problem.space.loads(candidate)
        if possible is not None:
            return possible or (1,)  # recorded at no load: its deployment failed
        steps = np.geomspace(1, self._problem.max_concurrency, LOADS)
        return tuple(dict.fromkeys(round(step) for step in steps.tolist()))

    def _between(self, candidate: Candidate, load: int) -> list[int]:
        """Loads around ``load``, finer than the grid of the ranking; none where only some can be measured."""
        if self._problem.space.loads(candidate) is not None:
            return []
        grid = self._loads(candidate)
        place = grid.index(load)
        low, high = grid[max(place - 1, 0)], grid[min(place + 1, len(grid) - 1)]
        return sorted({round(one) for one in np.linspace(low, high, FINER).tolist()} - {load})


def forecast(problem: Problem, trials: Sequence[Trial], cells: Sequence[Cell]) -> tuple[Array, Array]:
    """Throughput (infer/s) and latency (s) of the metric that decides, that a Guide expects of ``cells`` after
    ``trials``. Raises ValueError where nothing was measured."""
    points = latest_points(trials)
    if problem.open_loop:
        points = in_flight(points, problem)
    latency = judged_latency(problem, points)
    measured = [point for point in points if is_known(point, latency)]
    if not measured:
        raise ValueError("nothing was measured")
    return _View(problem, trials, measured, latency, seed=0).forecast(cells)


class _View:
    """All that is believed after some measurements: a fitted simulation and its correction."""

    def __init__(
        self, problem: Problem, trials: Sequence[Trial], measured: Sequence[Point], latency: str, seed: int
    ) -> None:
        self._problem, self._trials, self._measured, self._latency, self._seed = (
            problem,
            trials,
            measured,
            latency,
            seed,
        )
        self._model: ServerModel = fit(measured, problem, latency, seed)
        self.bound_s = min((c.bound for c in problem.constraints if c.metric == latency), default=math.inf) / 1e3
        known = [(problem.space.canonical(point.candidate), point.load.concurrency) for point in measured]
        figures = np.array([log_figures(point, latency) for point in measured])
        found = self._simulate(known)
        simulated = self._tails(self._figures(found), known)
        learned = np.array([features(problem.space, *cell, one) for cell, one in zip(known, found, strict=True)])
        residuals = self._tails(figures, known) - simulated
        # arrivals at random have a longer tail than the closed loop that is simulated, whatever the candidate
        self._longer_tail = np.array([0.0, float(np.median(residuals[:, 1])) if problem.open_loop else 0.0])
        self._correction = Correction(
            learned,
            residuals - self._longer_tail,
            [point.trial for point in measured],
            np.array([noise_of(point) for point in measured]),
            self._model.error,
        )
        # noisy measurements flatter: the best so far is what the model believes of them
        believed = self._correction.predict(learned)[0][:, 0] + simulated[:, 0]
        meeting = [i for i, point in enumerate(measured) if self._meets(point)]
        self._best = float(max(believed[meeting])) if meeting else None

    @property
    def noise_scale(self) -> float:
        return self._correction.noise_scale

    @property
    def meets_anywhere(self) -> bool:
        """Whether a measured point meets the bounds."""
        return self._best is not None

    def of_first(self, deployments: int) -> _View:
        """What was believed after so many deployments: the same, however many have been made since."""
        first = sorted({point.trial for point in self._measured})[:deployments]
        measured = [point for point in self._measured if point.trial in first]
        return _View(self._problem, self._trials, measured, self._latency, self._seed)

    def simulated(self, cells: Sequence[Cell]) -> Array:
        """Log throughput and log latency [cells, 2]."""
        return self._figures(self._simulate(cells))

    def _simulate(self, cells: Sequence[Cell]) -> list[Simulated]:
        return self._model.simulate(cells, threads=max(1, min(4, os.cpu_count() or 1)))

    def _figures(self, simulated: Sequence[Simulated]) -> Array:
        return np.array([log_simulated(one, self._latency) for one in simulated]).reshape(-1, 2)

    def gains(self, cells: Sequence[Cell]) -> Array:
        """For each cell the expected gain in log throughput over the best so far within the bounds; while nothing
        meets them the expected throughput within them, on a scale of its own."""
        if not cells:
            return np.zeros(0)
        belief = self._belief(cells)
        reliable = self._reliability(cells)
        if self._best is not None:
            return reliable * expected_improvement(belief, self.bound_s, self._best)
        return np.asarray(reliable * odds(belief, self.bound_s) * np.exp(belief.mean[:, 0]))

    def forecast(self, cells: Sequence[Cell]) -> tuple[Array, Array]:
        """Throughput (infer/s) and latency (s), each [cells]."""
        belief = self._belief(cells)
        throughput, tail = belief.mean.T
        return np.exp(throughput), np.exp(tail - throughput + belief.log_loads)

    def odds(self, cells: Sequence[Cell]) -> Array:
        """That the latency bound is met."""
        return odds(self._belief(cells), self.bound_s)

    def _belief(self, cells: Sequence[Cell]) -> Belief:
        found = self._simulate(cells)
        space = self._problem.space
        inputs = np.array([features(space, *cell, one) for cell, one in zip(cells, found, strict=True)])
        mean, deviation = self._correction.predict(inputs)
        simulated = self._tails(self._figures(found), cells)
        return Belief(
            mean + simulated + self._longer_tail, deviation, log_loads(cells, self._problem.space.request_batch_size)
        )

    def _tails(self, figures: Array, cells: Sequence[Cell]) -> Array:
        return with_tails(figures, cells, self._problem.space.request_batch_size)

    def _reliability(self, cells: Sequence[Cell]) -> Array:
        """How likely each cell's group can be had at all: it deploys, and meets the bounds that are no latency."""
        others = tuple(c for c in self._problem.constraints if c.metric not in (*LATENCY_FIELDS, "throughput"))
        good: Counter[object] = Counter()
        bad: Counter[object] = Counter()
        for trial in self._trials:
            measured = [m for _, m in trial.measurements if m.throughput_infer_per_sec is not None]
            met = any(worst_violation(others, m) <= 0 for m in measured)
            (good if met else bad)[group_of(self._problem.space.canonical(trial.candidate))] += 1
        groups = [group_of(candidate) for candidate, _ in cells]
        return np.array([(good[g] + 1) / (good[g] + FAILURE * bad[g] + 1) for g in groups])

    def _meets(self, point: Point) -> bool:
        return point.measurement.stable and worst_violation(self._problem.constraints, point.measurement) <= 0
