"""The quick search of Triton Model Analyzer (its docs/config_search.md), as a Searcher.

It climbs over two coordinates, the choices of max_batch_size and the number of instances, with dynamic batching at
its defaults. The load of a configuration is 2 * max_batch_size * instances samples in flight. Model Analyzer measures
only this load during the climb and sweeps the loads of the three best configurations afterwards; here the load search
starts at this load on every configuration, so no sweep follows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from optimizer.config.problem import Problem
from optimizer.core.candidate import Candidate
from optimizer.core.trial import Trial
from optimizer.search.optuna_encoding import TrialScore, score_trial
from other_searchers.benchmark_searcher import BenchmarkSearcher

RADIUS = 3.0  # Euclidean distance, in steps, of the neighbors of a configuration
ENOUGH_NEIGHBORS = 3  # measured neighbors before a step
STEP_GAINS = (0.09, 0.3, 1.0)  # relative gains for steps of 1, 2 and 3
MOST_VISITS = 2

Coordinate = tuple[int, int]  # the ranks of max_batch_size and of the number of instances


@dataclass(frozen=True)
class Outcome:
    """The score of a configuration: its throughput, and its violation of the bounds (0 or less: they are met)."""

    throughput: float
    violation: float

    @property
    def passes(self) -> bool:
        return self.violation <= 0

    @property
    def rank(self) -> tuple[bool, float]:
        """Return a key by which better outcomes are larger."""
        return (True, self.throughput) if self.passes else (False, -self.violation)

    def gain(self, other: Outcome) -> float:
        """Return the relative gain of ``other``: in throughput, or towards the bounds if this one misses them."""
        if not self.passes:
            return self.violation - other.violation
        mean = (self.throughput + other.throughput) / 2
        return (other.throughput - self.throughput) / mean if mean else 0.0


class QuickSearcher(BenchmarkSearcher):
    """A Searcher that climbs from the smallest configuration until a step leads nowhere new."""

    def __init__(self, problem: Problem, seed: int = 0) -> None:
        super().__init__(problem)
        self._cells = _cells(problem)
        self._outcomes: dict[Candidate, Outcome | None] = {}  # None: the deployment failed
        self._path = self._climb()

    def choose(self) -> tuple[Candidate, int | None] | None:
        for coordinate in self._path:
            candidate = self._cells[coordinate]
            if candidate not in self.tried:
                samples = 2 * candidate.max_batch_size * candidate.instance_count
                load = max(1, round(samples / self.problem.request_batch_size))
                return candidate, min(load, self.problem.max_concurrency)
        return None

    def observe(self, trial: Trial) -> None:
        super().observe(trial)
        score = score_trial(trial, self.problem)
        candidate = self.problem.space.canonical(trial.candidate)
        if isinstance(score, TrialScore):
            self._outcomes[candidate] = Outcome(score.values[0], max(score.constraints.values(), default=0.0))
        else:
            self._outcomes[candidate] = None

    def _climb(self) -> Iterator[Coordinate]:
        """Yield the coordinates to measure. Each has been measured when the generator continues."""
        if not self._cells:
            return
        home, is_careful, has_passed = min(self._cells), False, False
        visits = Counter[Coordinate]()
        while True:
            yield home
            outcome = self._outcome(home)
            if outcome is None or (has_passed and not outcome.passes):
                back = min(self._neighbors(home), key=lambda one: math.dist(one, self._best()), default=home)
                if math.dist(back, self._best()) >= math.dist(home, self._best()):
                    return
                home, is_careful = back, True
                visits[home] += 1
                continue
            has_passed = has_passed or outcome.passes
            while (missing := self._missing(home, outcome, is_careful)) is not None:
                yield missing
            if self._is_mixed(home, outcome) or is_careful:
                following = self._best_passing_around(home)
            else:
                following = self._step(home, outcome)
            if following == home or visits[following] >= MOST_VISITS:
                return
            visits[following] += 1
            home, is_careful = following, False

    def _missing(self, home: Coordinate, outcome: Outcome, is_careful: bool) -> Coordinate | None:
        """Return the next neighbor of ``home`` to measure before a step; None if enough are known."""
        neighbors = self._neighbors(home)
        unknown = [one for one in neighbors if not self._is_measured(one)]
        if is_careful or self._is_mixed(home, outcome):
            return next((one for one in unknown if math.dist(one, home) == 1), None)
        known = [one for one in neighbors if self._outcome(one) is not None]
        if len(known) >= ENOUGH_NEIGHBORS:
            return None
        covered = [{one[axis] for one in known} for axis in (0, 1)]
        return max(unknown, key=lambda one: sum(one[axis] not in covered[axis] for axis in (0, 1)), default=None)

    def _step(self, home: Coordinate, outcome: Outcome) -> Coordinate:
        """Return the cell closest to a step from ``home`` in the direction of the mean gain by step on each axis."""
        gains, steps = [0.0, 0.0], [0, 0]
        for neighbor in self._neighbors(home):
            other = self._outcome(neighbor)
            if other is None:
                continue
            for axis in (0, 1):
                step = neighbor[axis] - home[axis]
                gains[axis] += outcome.gain(other) * ((step > 0) - (step < 0))
                steps[axis] += abs(step)
        moved = []
        for axis in (0, 1):
            slope = gains[axis] / steps[axis] if steps[axis] else 0.0
            moved.append(home[axis] + int(math.copysign(sum(abs(slope) > gain for gain in STEP_GAINS), slope)))
        return min(self._cells, key=lambda one: math.dist(one, moved))

    def _is_mixed(self, home: Coordinate, outcome: Outcome) -> bool:
        """Return whether some measured neighbors meet the bounds and others, or ``home``, do not."""
        known = [other for one in self._neighbors(home) if (other := self._outcome(one)) is not None]
        return any(other.passes != outcome.passes for other in known)

    def _best_passing_around(self, home: Coordinate) -> Coordinate:
        """Return the best measured coordinate around ``home`` that meets the bounds, or ``home`` if none does."""
        known = {one: other for one in [home, *self._neighbors(home)] if (other := self._outcome(one)) is not None}
        passing = [one for one, other in known.items() if other.passes]
        return max(passing, key=lambda one: known[one].rank, default=home)

    def _best(self) -> Coordinate:
        """Return the best measured coordinate; the smallest one if nothing is known."""
        known = {one: outcome for one in self._cells if (outcome := self._outcome(one)) is not None}
        return max(known, key=lambda one: known[one].rank, default=min(self._cells))

    def _neighbors(self, home: Coordinate) -> list[Coordinate]:
        """Return the cells within RADIUS of ``home``, short steps first."""
        near = [one for one in self._cells if one != home and math.dist(one, home) <= RADIUS]
        return sorted(near, key=lambda one: (abs(one[0] - home[0]), abs(one[1] - home[1]), -one[0], -one[1]))

    def _is_measured(self, coordinate: Coordinate) -> bool:
        return self._cells[coordinate] in self._outcomes

    def _outcome(self, coordinate: Coordinate) -> Outcome | None:
        return self._outcomes.get(self._cells[coordinate])


def _cells(problem: Problem) -> dict[Coordinate, Candidate]:
    """Return the configuration at each coordinate.

    It has dynamic batching with the smallest delay, no preferred sizes and the first choices of other fields, as far
    as the space has them.
    """
    first = tuple((path, choices[0]) for path, choices in problem.space.fields.items())

    def distance(candidate: Candidate) -> tuple[int, ...]:
        return (
            not candidate.dynamic_batching,
            sum(field not in first for field in candidate.fields),
            len(candidate.preferred_batch_sizes),
            candidate.max_queue_delay_us,
        )

    candidates = problem.space.candidates()
    sizes = sorted({candidate.max_batch_size for candidate in candidates})
    counts = sorted({candidate.instance_count for candidate in candidates})
    cells = {}
    for (i, size), (j, count) in product(enumerate(sizes), enumerate(counts)):
        own = [one for one in candidates if (one.max_batch_size, one.instance_count) == (size, count)]
        if own:
            cells[i, j] = min(own, key=distance)
    return cells
