"""What to deploy next: the simulator's ranking of the space, corrected by what was measured."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

import numpy as np

from objectives.metrics import METRICS
from objectives.sla import worst_violation
from optimizer.problem import Problem
from optimizer.search.correction import Correction, features, noise_of
from optimizer.search.server_model import (
    Array,
    Cell,
    ServerModel,
    fit,
    judged_latency,
    log_figures,
    log_simulated,
)
from optimizer.trial import Candidate, Point, Trial, points

LOADS = 9  # concurrencies that each candidate is predicted at
SHORTLIST = 320  # candidates that are followed once the whole space has been ranked
NEAR = 3.0  # loads are followed where the simulated latency is within this factor of the bound
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(15)


@dataclass(frozen=True, slots=True)
class Decision:
    """``gain``: by how much ``candidate``, measured at ``load``, is expected to raise the best throughput
    within the bounds, as a share of it; inf while nothing meets them."""

    candidate: Candidate
    load: int
    gain: float


@dataclass(frozen=True, eq=False)
class _Belief:
    """Log throughput and log tail (see ``correction``) of cells: [cells, 2] each."""

    mean: Array
    deviation: Array


class Guide:
    """Ranks a space. What is measured comes with each call; only simulations are kept between calls."""

    def __init__(self, problem: Problem, seed: int = 0) -> None:
        self._seed = seed
        self._problem = problem
        self._latency = judged_latency(problem)
        self._shortlist: dict[Candidate, tuple[int, ...]] | None = None

    def decide(self, trials: Sequence[Trial], tried: Set[Candidate]) -> Decision | None:
        """The most promising candidate of those not ``tried``; None where there is none.

        Before anything was measured, the one that teaches most: the plainest, which any other can be told from.
        """
        left = [candidate for candidate in self._problem.space.candidates() if candidate not in tried]
        if not left:
            return None
        measured = [point for point in points(trials) if self._is_known(point)]
        if not measured:
            return Decision(left[0], max(self._loads(left[0]), default=1), math.inf)
        model = fit(measured, self._problem, self._seed)
        cells = self._cells(model, tried) or [(c, load) for c in left for load in self._loads(c)]
        if not cells:  # what is left was recorded at no load
            return Decision(left[0], 1, math.inf)
        gains = self._gains(model, measured, cells)
        best = int(np.argmax(gains))
        candidate, load = cells[best]
        return Decision(candidate, load, float(gains[best]) if self._meeting(measured) else math.inf)

    # -- cells ----------------------------------------------------------------------------------------------

    def _cells(self, model: ServerModel, tried: Set[Candidate]) -> list[Cell]:
        if self._shortlist is None:
            self._shortlist = self._ranked(model)
        return [(c, load) for c, loads in self._shortlist.items() if c not in tried for load in loads]

    def _ranked(self, model: ServerModel) -> dict[Candidate, tuple[int, ...]]:
        """The whole space simulated: of each combination of instances and other fields, which the simulation may
        get wrong as a whole, the candidates that are best within it, at the loads that matter."""
        cells = [(c, load) for c in self._problem.space.candidates() for load in self._loads(c)]
        figures = np.exp(self._simulated(model, cells))
        bound_s = self._bound_s()
        scores: dict[Candidate, float] = {}
        loads: dict[Candidate, list[int]] = {}
        for (candidate, load), (throughput, latency_s) in zip(cells, figures.tolist(), strict=True):
            score = throughput * min(1.0, bound_s / latency_s) ** 3
            scores[candidate] = max(score, scores.get(candidate, 0.0))
            near = latency_s <= NEAR * bound_s and (bound_s == math.inf or latency_s >= bound_s / NEAR)
            loads.setdefault(candidate, []).extend([load] if near else [])
        groups: dict[object, list[Candidate]] = {}
        for candidate in sorted(scores, key=lambda c: -scores[c]):
            groups.setdefault((candidate.instance_count, candidate.fields), []).append(candidate)
        most = max(3, SHORTLIST // len(groups))
        return {c: tuple(loads[c]) or self._loads(c) for group in groups.values() for c in group[:most]}

    def _loads(self, candidate: Candidate) -> tuple[int, ...]:
        possible = self._problem.space.loads(candidate)
        if possible is not None:
            return possible
        steps = np.geomspace(1, self._problem.max_concurrency, LOADS)
        return tuple(dict.fromkeys(round(step) for step in steps.tolist()))

    # -- beliefs and gains ----------------------------------------------------------------------------------

    def _gains(self, model: ServerModel, measured: Sequence[Point], cells: Sequence[Cell]) -> Array:
        """For each cell the expected gain in log throughput over the best so far within the bounds."""
        space = self._problem.space
        known = [(space.canonical(point.candidate), point.load.concurrency) for point in measured]
        figures = np.array([log_figures(point, self._latency) for point in measured])
        figures = self._with_tails(figures, known)
        simulated = self._with_tails(self._simulated(model, known), known)
        learned = np.array([features(space, *cell) for cell in known])
        correction = Correction(
            learned,
            figures - simulated,
            [point.trial for point in measured],
            np.array([noise_of(point) for point in measured]),
        )
        mean, deviation = correction.predict(np.array([features(space, *cell) for cell in cells]))
        belief = _Belief(mean + self._with_tails(self._simulated(model, cells), cells), deviation)
        loads = np.array([load * self._problem.request_batch_size for _, load in cells], np.float64)
        meeting = self._meeting(measured)
        if not meeting:  # first of all something that meets the bound, and the more of it the better
            odds = _odds(belief, loads, self._bound_s())
            return np.asarray(odds * np.exp(belief.mean[:, 0] - belief.mean[:, 0].max()))
        # noisy measurements flatter: the best so far is what the model believes of them
        believed = correction.predict(learned)[0][:, 0] + simulated[:, 0]
        return _expected_improvement(belief, loads, self._bound_s(), float(max(believed[meeting])))

    def _simulated(self, model: ServerModel, cells: Sequence[Cell]) -> Array:
        """Log throughput and log latency [cells, 2]."""
        threads = max(1, min(4, os.cpu_count() or 1))
        simulated = model.simulate(self._problem, cells, threads)
        return np.array([log_simulated(one, self._latency) for one in simulated]).reshape(-1, 2)

    def _with_tails(self, figures: Array, cells: Iterable[Cell]) -> Array:
        """Log latency in seconds replaced by log tail: latency over mean latency, which is load / throughput."""
        loads = np.array([load * self._problem.request_batch_size for _, load in cells], np.float64)
        return np.stack([figures[:, 0], figures[:, 1] + figures[:, 0] - np.log(loads)], axis=1)

    def _meeting(self, measured: Sequence[Point]) -> list[int]:
        rules = self._problem.constraints
        return [
            i
            for i, point in enumerate(measured)
            if point.measurement.stable and worst_violation(rules, point.measurement) <= 0
        ]

    def _bound_s(self) -> float:
        bounds = [c.bound for c in self._problem.constraints if c.metric == self._latency]
        return min(bounds, default=math.inf) / 1e3

    def _is_known(self, point: Point) -> bool:
        m = point.measurement
        return bool(m.throughput_infer_per_sec and METRICS[self._latency].value(m))


def _odds(belief: _Belief, loads: Array, bound_s: float) -> Array:
    """That the latency is within the bound."""
    latency = belief.mean[:, 1] - belief.mean[:, 0] + np.log(loads)
    return _normal_cdf((math.log(bound_s) - latency) / np.hypot(*belief.deviation.T))


def _expected_improvement(belief: _Belief, loads: Array, bound_s: float, best: float) -> Array:
    """E[max(0, log throughput - best); latency within the bound], by Gauss-Hermite quadrature over the
    throughput: more throughput at a load is also less latency, so the two cannot be multiplied."""
    (throughput, tail), (spread, tail_spread) = belief.mean.T, belief.deviation.T
    gains = np.zeros(len(loads))
    for node, weight in zip(NODES, WEIGHTS / WEIGHTS.sum(), strict=True):
        reached = throughput + node * spread
        slack = math.log(bound_s) - (tail - reached + np.log(loads))
        gains += weight * np.maximum(0.0, reached - best) * _normal_cdf(slack / np.maximum(tail_spread, 1e-9))
    return gains


def _normal_cdf(z: Array) -> Array:
    from scipy.special import ndtr

    return np.asarray(ndtr(z))
