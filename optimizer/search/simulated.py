"""Search guided by simulation: rank the whole space, measure the most promising, correct the ranking."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import optuna

from objectives import pareto
from objectives.metrics import METRICS
from optimizer.problem import Problem
from optimizer.search.correction import Correction, features
from optimizer.search.ledger import Ledger
from optimizer.search.server_model import (
    Array,
    ServerModel,
    fit,
    judged_latency,
    log_figures,
    log_simulated,
)
from optimizer.trial import Candidate, Point, Trial, points

LOADS = 9  # concurrencies that each candidate is predicted at
SMALLEST_GAIN = 0.01  # of throughput: another deployment that promises less is not worth its time
REFITS = 4  # the simulator is refitted to the first trials, later ones only correct it


class SimulatedSearcher:
    """A Searcher that knows Triton's batcher.

    A simulation of the batcher, fitted to what was measured so far, predicts throughput and latency of every
    candidate at every load. Gaussian processes on log(measured / simulated) correct both and say how sure they
    are. Next comes the candidate with the largest expected improvement under the latency bound; the search ends
    when that is below ``smallest_gain`` (a share of the throughput).
    """

    def __init__(self, problem: Problem, study: optuna.Study, smallest_gain: float = SMALLEST_GAIN) -> None:
        self._problem = problem
        self._ledger = Ledger(problem, study)
        self._candidates = list(problem.space.candidates())
        self._latency = judged_latency(problem)
        self._smallest_gain = smallest_gain
        self._trials: dict[int, Trial] = {}
        self._model: ServerModel | None = None
        self._simulated: dict[tuple[Candidate, int], tuple[float, float]] = {}
        self._expected: dict[Candidate, int] = {}

    def observe(self, trial: Trial) -> None:
        self._trials[trial.number] = trial
        self._ledger.record(trial)

    def expected_load(self, candidate: Candidate) -> int | None:
        """The concurrency at which ``candidate`` is predicted to be at its best."""
        return self._expected.get(candidate)

    def suggest(self) -> Candidate | None:
        tried = self._ledger.tried()
        left = [candidate for candidate in self._candidates if candidate not in tried]
        if not left:
            return None
        measured = [point for point in points(list(self._trials.values())) if self._is_known(point)]
        if not measured:
            return self._ledger.start(left[0])
        if self._model is None or len(self._trials) <= REFITS:
            self._model = fit(measured, self._problem, self._model)
            self._simulated.clear()
        cells = [(candidate, load) for candidate in left for load in self._loads(candidate)]
        if not cells:
            return self._ledger.start(left[0])
        gains = self._expected_gains(measured, cells)
        best = int(np.argmax(gains))
        if gains[best] < self._smallest_gain and self._best(measured) is not None:
            return None
        candidate, load = cells[best]
        self._expected[candidate] = load
        return self._ledger.start(candidate)

    def _expected_gains(self, measured: Sequence[Point], cells: list[tuple[Candidate, int]]) -> Array:
        """For each cell the expected gain in log throughput over the best so far, times the odds of the bound."""
        assert self._model is not None
        space = self._problem.space
        simulated = self._predict(cells)
        known = [(space.canonical(point.candidate), point.load.concurrency) for point in measured]
        residuals = np.array([log_figures(point, self._latency) for point in measured]) - self._predict(known)
        correction = Correction(np.array([features(space, *cell) for cell in known]), residuals)
        mean, deviation = correction.predict(np.array([features(space, *cell) for cell in cells]))
        mean += simulated
        odds = _below(np.log(self._bound_s()), mean[:, 1], deviation[:, 1])
        best = self._best(measured)
        if best is None:  # first of all something that meets the bound, and the more of it the better
            return np.asarray(odds * np.exp(mean[:, 0] - mean[:, 0].max()))
        return np.asarray(odds * _improvement(mean[:, 0] - best, deviation[:, 0]))

    def _predict(self, cells: Sequence[tuple[Candidate, int]]) -> Array:
        assert self._model is not None
        new = [cell for cell in dict.fromkeys(cells) if cell not in self._simulated]
        for cell, simulated in zip(new, self._model.simulate(self._problem, new), strict=True):
            self._simulated[cell] = log_simulated(simulated, self._latency)
        return np.array([self._simulated[cell] for cell in cells])

    def _best(self, measured: Sequence[Point]) -> float | None:
        """Log of the highest throughput that met the bounds."""
        best = pareto.best(measured, (METRICS["throughput"],), self._problem.constraints)
        return None if best is None else log_figures(best, self._latency)[0]

    def _bound_s(self) -> float:
        bounds = [c.bound for c in self._problem.constraints if c.metric == self._latency]
        return min(bounds, default=math.inf) / 1e3

    def _loads(self, candidate: Candidate) -> tuple[int, ...]:
        possible = self._problem.space.loads(candidate)
        if possible is not None:
            return possible
        steps = np.geomspace(1, self._problem.max_concurrency, LOADS)
        return tuple(dict.fromkeys(round(step) for step in steps.tolist()))

    def _is_known(self, point: Point) -> bool:
        m = point.measurement
        return bool(m.stable and m.throughput_infer_per_sec and METRICS[self._latency].value(m))


def _below(bound: float, mean: Array, deviation: Array) -> Array:
    from scipy.stats import norm

    return np.asarray(norm.cdf((bound - mean) / deviation))


def _improvement(gain: Array, deviation: Array) -> Array:
    """Expected improvement of a normal variable over zero (Jones et al. 1998, equation 15)."""
    from scipy.stats import norm

    z = gain / deviation
    return np.asarray(gain * norm.cdf(z) + deviation * norm.pdf(z))
