"""Exhaustive search, in an order in which the first candidates already cover the space."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations

from objectives.metrics import Forecast
from optimizer.config.search_space import Problem
from optimizer.core.trial import Candidate, LoadPoint, Trial
from optimizer.search.candidate_tracker import CandidateTracker
from optimizer.search.transfer import TransferredStudy


class GridSearcher:
    """A Searcher that suggests the candidate whose pairs of settings have been tried least.

    So each pair of values is tried early, as in a covering array. Ties are broken in an order that ``seed``
    determines.
    """

    is_exhaustive = True

    def __init__(self, problem: Problem, tracker: CandidateTracker, seed: int = 0) -> None:
        self._tracker = tracker
        self._order = list(problem.space.candidates())
        random.Random(seed).shuffle(self._order)

    def suggest(self) -> Candidate | None:
        """Return the next candidate, or None if all have been tried."""
        while True:
            tried = self._tracker.tried()
            left = [candidate for candidate in self._order if candidate not in tried]
            if not left:
                return None
            seen = Counter(pair for candidate in tried for pair in _pairs(candidate))
            chosen = min(left, key=lambda candidate: sum(seen[pair] for pair in _pairs(candidate)))
            if self._tracker.start(chosen) is not None:
                return chosen

    def expected_load(self, candidate: Candidate) -> int | None:
        """Return None: no load is predicted."""
        return None

    def forecast(self, candidate: Candidate, load: LoadPoint, speed_probe_ms: float | None) -> Forecast | None:
        """Return None: no measurement is forecast."""
        return None

    def observe(self, trial: Trial) -> None:
        """Record a finished trial."""
        self._tracker.record(trial)


def new_searcher(
    problem: Problem, tracker: CandidateTracker, seed: int, transferred: TransferredStudy | None
) -> GridSearcher:
    """Return the search method grid. It cannot begin with another study."""
    return GridSearcher(problem, tracker, seed)


def _pairs(candidate: Candidate) -> list[tuple[object, ...]]:
    # relative to max_batch_size: half of it is the same choice for every maximum
    preferred = tuple(size / candidate.max_batch_size for size in candidate.preferred_batch_sizes)
    settings: list[object] = [
        ("max_batch_size", candidate.max_batch_size),
        ("delay", candidate.dynamic_batching, candidate.max_queue_delay_us),
        ("preferred", preferred),
        ("instances", candidate.instance_count),
        *candidate.fields,
    ]
    return list(combinations(settings, 2))
