"""The batcher's simulator, fitted to a run's trials and held to what was measured of each configuration."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from optimizer.batcher.simulator import ServiceTimes
from optimizer.problem import Problem
from optimizer.search.figures import Array, Cell, is_known, judged_latency, log_figures, log_simulated, with_tails
from optimizer.search.in_flight import in_flight
from optimizer.search.server_model import ServerModel, fit
from optimizer.search.service import Group
from optimizer.search.surroundings import SMALLEST_S
from optimizer.trial import Candidate, Point

LOADS, FINER = 20, 12  # concurrencies that are simulated of each configuration, and around its best
MOST_POINTS = 500  # that the simulation is fitted to, beside the subject's
LARGER = 4  # times the largest max_batch_size of the space: batches that are asked about


@dataclass(frozen=True, slots=True)
class Forecast:
    """A configuration at its best load within a bound, as simulated."""

    candidate: Candidate
    concurrency: int
    throughput_infer_per_sec: float
    latency_ms: float


class Forecaster:
    """Throughput within a bound on ``latency``, of ``subject`` and of others beside it.

    What the simulation gets wrong of a measured configuration is taken off, by the median ratio of its points; one
    that was not measured is taken to err as ``subject`` does, so that gains over it are ratios of two simulations.
    ``error`` is the median relative error in throughput before that, of ``points`` points.
    """

    def __init__(self, measured: Sequence[Point], subject: Point, problem: Problem, seed: int = 0) -> None:
        """``measured``: the search's points. Raises ValueError where none has a throughput and a latency."""
        self.latency = judged_latency(problem, measured)
        known = _thinned([point for point in _closed(measured, problem) if is_known(point, self.latency)], subject)
        space = problem.space
        larger = LARGER * max(*space.max_batch_size, subject.candidate.max_batch_size)
        wider = replace(space, max_batch_size=(*space.max_batch_size, larger)) if larger else space
        self._batch = space.request_batch_size
        self._model = fit(known, replace(problem, space=wider), self.latency, seed)
        self._most = max(problem.max_concurrency, *(point.load.concurrency for point in known))
        anchors = [point for point in _closed([subject], problem) if is_known(point, self.latency)]
        self._ratios = self._learned([one for one in known if one.candidate != subject.candidate] + anchors)
        self._usual = self._ratios.get(subject.candidate, np.zeros(2))
        self.error = statistics.median(abs(math.expm1(-one[0])) for one in self._residuals(known))
        self.points = len(known)

    def best(
        self,
        candidates: Sequence[Candidate],
        bound_ms: float,
        *,
        infer_share: float = 1.0,
        way_share: float = 1.0,
    ) -> Forecast | None:
        """The best of ``candidates`` at its best load within the bound; None where none meets it.

        ``infer_share``: a batch takes so much of its time; ``way_share``: so do the ways between client and server.
        """
        model = self._changed(infer_share, way_share)
        steps = dict.fromkeys(round(step) for step in np.geomspace(1, self._most, LOADS).tolist())
        found = self._within(model, [(one, load) for one in candidates for load in steps], bound_ms)
        if found is None:
            return None
        grid = list(steps)
        place = grid.index(found.concurrency)
        low, high = grid[max(place - 1, 0)], grid[min(place + 1, len(grid) - 1)]
        finer = dict.fromkeys(round(load) for load in np.linspace(low, high, FINER).tolist())
        return self._within(model, [(found.candidate, load) for load in finer], bound_ms)

    def quickest_ms(self, candidates: Sequence[Candidate]) -> float:
        """The lowest latency that any of them has at any load."""
        cells = [(one, 1) for one in candidates]
        return min(one.latency_ms for one in self._forecasts(self._model, cells))

    def _within(self, model: ServerModel, cells: Sequence[Cell], bound_ms: float) -> Forecast | None:
        met = [one for one in self._forecasts(model, cells) if one.latency_ms <= bound_ms]
        return max(met, key=lambda one: one.throughput_infer_per_sec, default=None)

    def _forecasts(self, model: ServerModel, cells: Sequence[Cell]) -> list[Forecast]:
        ratios = np.array([self._ratios.get(candidate, self._usual) for candidate, _ in cells])
        figures = self._simulated(model, cells) + ratios
        logs = np.log([load * self._batch for _, load in cells])
        latency_ms = 1e3 * np.exp(figures[:, 1] - figures[:, 0] + logs)
        return [
            Forecast(candidate, load, float(math.exp(one)), float(late))
            for (candidate, load), one, late in zip(cells, figures[:, 0], latency_ms, strict=True)
        ]

    def _simulated(self, model: ServerModel, cells: Sequence[Cell]) -> Array:
        """Log throughput and log tail, the latency over its mean [cells, 2]."""
        found = model.simulate(cells, threads=max(1, min(4, os.cpu_count() or 1)))
        figures = np.array([log_simulated(one, self.latency) for one in found]).reshape(-1, 2)
        return with_tails(figures, cells, self._batch)

    def _residuals(self, points: Sequence[Point]) -> Array:
        cells = [(point.candidate, point.load.concurrency) for point in points]
        figures = np.array([log_figures(point, self.latency) for point in points]).reshape(-1, 2)
        return with_tails(figures, cells, self._batch) - self._simulated(self._model, cells)

    def _learned(self, points: Sequence[Point]) -> dict[Candidate, Array]:
        of: dict[Candidate, list[Array]] = {}
        for point, residual in zip(points, self._residuals(points) if points else (), strict=True):
            of.setdefault(point.candidate, []).append(residual)
        return {candidate: np.median(residuals, axis=0) for candidate, residuals in of.items()}

    def _changed(self, infer_share: float, way_share: float) -> ServerModel:
        usual, around = self._model.times, self._model.around

        def times(group: Group) -> ServiceTimes:
            found = usual(group)
            return ServiceTimes(infer_share * found.seconds, found.step)

        way_s, gap_s = (max(SMALLEST_S, way_share * part) for part in (around.way_s, around.gap_s))
        return replace(self._model, times=times, around=replace(around, way_s=way_s, gap_s=gap_s))


def _thinned(known: Sequence[Point], subject: Point) -> list[Point]:
    """As many as tell enough, from the whole of the run."""
    step = max(1, math.ceil(len(known) / MOST_POINTS))
    return [point for i, point in enumerate(known) if i % step == 0 or point.candidate == subject.candidate]


def _closed(points: Sequence[Point], problem: Problem) -> list[Point]:
    return in_flight(points, problem) if problem.open_loop else list(points)


def bound_ms(problem: Problem, latency: str) -> float:
    """That on ``latency``; infinite without one."""
    return min((c.bound for c in problem.constraints if c.metric == latency), default=math.inf)
