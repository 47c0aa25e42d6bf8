"""All that is believed at one moment of a search: of any configuration at any load."""

from __future__ import annotations

import copy
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from objectives.sla import worst_violation
from optimizer.batcher.simulator import Simulated
from optimizer.problem import Problem
from optimizer.search.acquisition import Belief, expected_improvement, odds
from optimizer.search.correction import Correction, There, features
from optimizer.search.elsewhere import Twin
from optimizer.search.figures import LATENCY_FIELDS, Array, Cell, log_loads, log_simulated, with_tails
from optimizer.search.learned import learned
from optimizer.search.server_model import ServerModel, fit
from optimizer.search.service import group_of
from optimizer.trial import Point, Trial

T = TypeVar("T")

FAILURE = 3  # successes that one failure in a group weighs up
THREADS = max(1, min(4, os.cpu_count() or 1))


@dataclass(frozen=True)
class Moment:
    """What is known as a decision is made, besides the points. ``latency``: the metric that decides."""

    problem: Problem
    trials: Sequence[Trial]
    latency: str
    seed: int
    twin: Twin | None


class View:
    """All that is believed after some measurements: a fitted simulation and its correction.

    What is simulated for one question is kept for the next.
    """

    def __init__(self, moment: Moment, measured: Sequence[Point]) -> None:
        self._moment, self._measured = moment, measured
        self._kept: dict[Cell, tuple[Simulated, list[float]]] = {}  # with its features
        self.promising: list[Cell] | None = None  # what is asked again
        self._asked: list[tuple[Sequence[Cell], Array]] = []  # with its features
        self._problem, self._latency = moment.problem, moment.latency
        bounds = (c.bound for c in self._problem.constraints if c.metric == self._latency)
        self.bound_s = min(bounds, default=math.inf) / 1e3
        self._model: ServerModel = fit(measured, self._problem, self._latency, moment.seed)
        here = learned(self._model, measured, self._problem, self._latency, THREADS)
        self._longer_tail = here.longer_tail
        self._lesson = moment.twin.lesson(measured) if moment.twin else None
        there = None
        if moment.twin and self._lesson:
            there = There(moment.twin.correction, self._lesson.expected(here.cells, THREADS))
        self._correction = Correction(here.residuals, self._model.error, there)
        meeting = [i for i, point in enumerate(measured) if self._meets(point)]
        self.meets_anywhere = bool(meeting)  # a measured point meets the bounds
        # noisy measurements flatter: the best so far is what is believed of them
        beliefs = self._correction.predict(here.residuals.inputs, there.expected if there else None)
        self._best = [float(max((mean + here.simulated)[meeting, 0])) for mean, _ in beliefs] if meeting else None

    def lacks(self, moment: Moment) -> float:
        """How many of the trials are not known here; inf where those that are known are no part of them."""
        own, others = ({(one.number, one.candidate) for one in each.trials} for each in (self._moment, moment))
        same = moment.latency == self._moment.latency and own <= others
        return len(others) - len(own) if same else math.inf

    def not_seen(self, measured: Sequence[Point]) -> list[Cell]:
        """Those of ``measured`` that are not known here."""
        own, space = {(point.trial, point.candidate) for point in self._measured}, self._problem.space
        new = [point for point in measured if (point.trial, point.candidate) not in own]
        return [(space.canonical(point.candidate), point.load.concurrency) for point in new]

    def with_running(self, running: Sequence[Cell]) -> View:
        """What is believed while ``running`` are being measured: each counts as measured with what is believed of
        it, so that what is like them promises less."""
        if not running:
            return self
        view, inputs = copy.copy(self), self._simulated(running)[1]
        view._correction = self._correction.believing(inputs)
        beliefs = self._beliefs(running)
        throughput, tail = self._likeliest(beliefs).mean.T
        loads = log_loads(running, self._problem.space.request_batch_size)
        meeting = tail - throughput + loads <= math.log(self.bound_s)
        if meeting.any():
            best = self._best or [-math.inf] * len(beliefs)
            view._best = [max(one, float(max(b.mean[meeting, 0]))) for one, b in zip(best, beliefs, strict=True)]
        return view

    @property
    def noise_scale(self) -> float:
        return self._correction.noise_scale

    def of_first(self, deployments: int) -> View:
        """What was believed after so many deployments: the same, however many have been made since."""
        first = sorted({point.trial for point in self._measured})[:deployments]
        measured = [point for point in self._measured if point.trial in first]
        return View(self._moment, measured)

    def simulated(self, cells: Sequence[Cell]) -> Array:
        """Log throughput and log latency [cells, 2]."""
        return self._figures(self._model.simulate(cells, THREADS))

    def _simulated(self, cells: Sequence[Cell]) -> tuple[list[Simulated], Array]:
        """And its features [cells, features], for the same cells the same array; each cell once."""
        new = [cell for cell in dict.fromkeys(cells) if cell not in self._kept]
        for cell, one in zip(new, self._model.simulate(new, THREADS), strict=True):
            self._kept[cell] = one, features(self._problem.space, *cell, one)
        kept = [self._kept[cell] for cell in cells]
        inputs = next((array for asked, array in self._asked if asked is cells), None)
        if inputs is None:
            inputs = np.array([own for _, own in kept])
            self._asked.append((cells, inputs))
        return [one for one, _ in kept], inputs

    def _figures(self, simulated: Sequence[Simulated]) -> Array:
        return np.array([log_simulated(one, self._latency) for one in simulated]).reshape(-1, 2)

    def gains(self, cells: Sequence[Cell]) -> Array:
        """For each cell the expected gain in log throughput over the best so far within the bounds; while nothing
        meets them the expected throughput within them, on a scale of its own."""
        if not cells:
            return np.zeros(0)
        reliable, beliefs = self._reliability(cells), self._beliefs(cells)
        if self._best is not None:
            gains = (
                expected_improvement(one, self.bound_s, best) for one, best in zip(beliefs, self._best, strict=True)
            )
        else:
            gains = (odds(one, self.bound_s) * np.exp(one.mean[:, 0]) for one in beliefs)
        return reliable * self._averaged(gains)

    def forecast(self, cells: Sequence[Cell]) -> tuple[Array, Array]:
        """Throughput (infer/s) and latency (s), each [cells], as the likeliest belief has them."""
        belief = self._likeliest(self._beliefs(cells))
        throughput, tail = belief.mean.T
        return np.exp(throughput), np.exp(tail - throughput + belief.log_loads)

    def _likeliest(self, beliefs: Sequence[T]) -> T:
        return beliefs[int(np.argmax(self._correction.odds))]

    def odds(self, cells: Sequence[Cell]) -> Array:
        """That the latency bound is met."""
        return self._averaged(odds(one, self.bound_s) for one in self._beliefs(cells))

    def _averaged(self, values: Iterable[Array]) -> Array:
        """Over the beliefs, as likely as each is."""
        return np.asarray(sum(share * one for share, one in zip(self._correction.odds, values, strict=True)))

    def _beliefs(self, cells: Sequence[Cell]) -> list[Belief]:
        found, inputs = self._simulated(cells)
        simulated = self._tails(self._figures(found), cells) + self._longer_tail
        loads = log_loads(cells, self._problem.space.request_batch_size)
        expected = self._lesson.expected(cells, THREADS) if self._lesson else None
        return [
            Belief(mean + simulated, deviation, loads)
            for mean, deviation in self._correction.predict(inputs, expected)
        ]

    def _tails(self, figures: Array, cells: Sequence[Cell]) -> Array:
        return with_tails(figures, cells, self._problem.space.request_batch_size)

    def _reliability(self, cells: Sequence[Cell]) -> Array:
        """How likely each cell's group can be had at all: it deploys, and meets the bounds that are no latency."""
        others = tuple(c for c in self._problem.constraints if c.metric not in (*LATENCY_FIELDS, "throughput"))
        good: Counter[object] = Counter()
        bad: Counter[object] = Counter()
        for trial in self._moment.trials:
            measured = [m for _, m in trial.measurements if m.throughput_infer_per_sec is not None]
            met = any(worst_violation(others, m) <= 0 for m in measured)
            (good if met else bad)[group_of(self._problem.space.canonical(trial.candidate))] += 1
        groups = [group_of(candidate) for candidate, _ in cells]
        return np.array([(good[g] + 1) / (good[g] + FAILURE * bad[g] + 1) for g in groups])

    def _meets(self, point: Point) -> bool:
        return point.measurement.stable and worst_violation(self._problem.constraints, point.measurement) <= 0
