"""Exhaustive search, in an order in which the first candidates already cover the space."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations

from optimizer.core.candidate import Candidate
from optimizer.search.candidate_tracker import CandidateTracker, TrackedSearcher
from optimizer.search.transfer import TransferredStudy


class GridSearcher(TrackedSearcher):
    """A Searcher that suggests the candidate whose pairs of settings have been tried least.

    So each pair of values is tried early, as in a covering array. Ties are broken in an order that ``seed``
    determines.
    """

    is_exhaustive = True

    def __init__(self, tracker: CandidateTracker, seed: int) -> None:
        super().__init__(tracker)
        self._order = list(tracker.problem.space.candidates())
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
            if self._tracker.start(chosen):
                return chosen


def new_searcher(tracker: CandidateTracker, seed: int, transferred: TransferredStudy | None) -> GridSearcher:
    """Return the search method grid. It cannot begin with another study."""
    return GridSearcher(tracker, seed)


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
