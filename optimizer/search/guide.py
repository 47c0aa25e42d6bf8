"""What to deploy next: the simulator's ranking of the space, corrected by what was measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from optimizer.problem import Problem
from optimizer.search.correction import settings
from optimizer.search.elsewhere import Elsewhere, Twin
from optimizer.search.figures import Array, Cell, is_known, judged_latency
from optimizer.search.in_flight import in_flight
from optimizer.search.service import group_of
from optimizer.search.view import Moment, View
from optimizer.trial import Candidate, Point, Trial, latest_points

LOADS = 9  # concurrencies that each candidate is predicted at
FINER, FINALISTS = 12, 6  # and around its best, the most promising ones
SHORTLIST = 320  # candidates that are followed once the whole space has been ranked
RANKED_BY = 2  # the first deployments: the order within a group changes little with more of them
KNOWN = 40  # of them from elsewhere
UNSEEN = 1 / 8  # of those that run: so many may have ended since what is believed was worked out
UNLIKELY = 0.005  # while nothing meets the bound: that anything left does


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
    """Ranks a space. What was measured comes with each call; the shortlist is kept between calls, and so is what is
    believed, as long as no more has been measured: several workers may ask meanwhile."""

    def __init__(self, problem: Problem, seed: int = 0, elsewhere: Elsewhere | None = None) -> None:
        self._problem = problem
        self._seed = seed
        self._elsewhere = elsewhere
        self._candidates = problem.space.candidates()
        self._shortlist: list[Candidate] = []
        self._view: View | None = None
        self._twins: dict[str, Twin | None] = {}  # of the machine elsewhere, by the latency that decides

    def decide(self, trials: Sequence[Trial], tried: Set[Candidate], running: Sequence[Cell] = ()) -> Decision | None:
        """The most promising candidate of those not ``tried``; None where there is none.

        ``running`` are being measured at the same time, and count as what they are believed to be. Before anything
        was measured it is what was best elsewhere, else the plainest one, or what is least like those running.
        """
        left = [candidate for candidate in self._candidates if candidate not in tried]
        if not left:
            return None
        points = latest_points(trials)
        if self._problem.open_loop:
            points = in_flight(points, self._problem)
        latency = judged_latency(self._problem, points)
        measured = [point for point in points if is_known(point, latency)]
        if not measured:
            known = self._elsewhere.best(self._problem) if self._elsewhere else []
            plain = self._unlike(running, left) if running else left[0]
            first = next((candidate for candidate in known if candidate not in tried), plain)
            return Decision(first, self._loads(first)[0], math.inf)
        moment = Moment(self._problem, tuple(trials), latency, self._seed, self._twin(latency))
        believed = self._believed(moment, measured, len(running))
        view = believed.with_running([*running, *believed.not_seen(measured)])
        cells, gains = self._promised(believed, view, left)
        best = [cells[i] for i in np.argsort(-gains)[: FINALISTS * LOADS]]
        finalists = list(dict.fromkeys(candidate for candidate, _ in best))[:FINALISTS]
        finer = [(c, load) for c in finalists for load in self._between(c, next(at for of, at in best if of == c))]
        gains, cells = np.concatenate([gains, view.gains(finer)]), cells + finer
        chosen = int(np.argmax(gains))
        if view.meets_anywhere:
            return Decision(*cells[chosen], float(gains[chosen]), view.noise_scale)
        return Decision(*cells[chosen], math.inf if view.odds(cells).max() > UNLIKELY else 0.0)

    def _believed(self, moment: Moment, measured: Sequence[Point], running: int) -> View:
        """What is believed of ``measured``. The one before, if only a few have ended since, of the many that run."""
        if self._view is None or self._view.lacks(moment) > (running - 1) * UNSEEN:
            self._view = View(moment, measured)
        return self._view

    def _promised(self, believed: View, view: View, left: Sequence[Candidate]) -> tuple[list[Cell], Array]:
        """What may be next, and its gains. While others run the same cells are asked again and again, which is
        cheaper than only those that are ``left``."""
        followed, remaining = self._followed(believed, left), set(left)
        if view is believed:
            cells = [(one, load) for one in followed for load in self._loads(one)]
            return cells, believed.gains(cells)
        if believed.promising is None:
            believed.promising = [(one, load) for one in followed for load in self._loads(one)]
        gains = view.gains(believed.promising)
        places = [i for i, (candidate, _) in enumerate(believed.promising) if candidate in remaining]
        if not places:  # all that was promising is being tried
            believed.promising = None
            return self._promised(believed, view, left)
        return [believed.promising[i] for i in places], gains[places]

    def _unlike(self, running: Sequence[Cell], left: Sequence[Candidate]) -> Candidate:
        """Of ``left`` the one that is farthest from all that is ``running`` (a maximin design: Johnson, Moore and
        Ylvisaker 1990)."""
        from scipy.spatial.distance import cdist

        space = self._problem.space
        there = [settings(space, *cell) for cell in running]
        here = [settings(space, candidate, self._loads(candidate)[0]) for candidate in left]
        return left[int(np.argmax(cdist(here, there).min(axis=1)))]

    def _twin(self, latency: str) -> Twin | None:
        if self._elsewhere is None:
            return None
        if latency not in self._twins:
            self._twins[latency] = self._elsewhere.twin(self._problem, latency, self._seed)
        return self._twins[latency]

    def _followed(self, view: View, left: Sequence[Candidate]) -> list[Candidate]:
        """The shortlist; once that is used up, whatever is left."""
        if not self._shortlist:
            self._shortlist = self._ranked(view.of_first(RANKED_BY))
        remaining = set(left)
        return [candidate for candidate in self._shortlist if candidate in remaining] or list(left)

    def _ranked(self, view: View) -> list[Candidate]:
        """The whole space simulated: of each combination of instances and other fields, which the simulation may
        get wrong as a whole, the candidates that are best within it."""
        candidates = self._candidates
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
        known = self._elsewhere.best(self._problem)[:KNOWN] if self._elsewhere else []
        return list(dict.fromkeys([*known, *(candidate for *_, candidate in order)]))[:SHORTLIST]

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
    return View(Moment(problem, trials, latency, 0, None), measured).forecast(cells)
