"""Every candidate of the space, in an order in which the first ones already cover it."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations

import optuna

from optimizer.problem import Problem
from optimizer.search.ledger import Ledger
from optimizer.trial import Candidate, Trial


class GridSearcher:
    """A Searcher that always takes the candidate whose settings, two by two, have been tried least.

    So each pair of values meets early, as in a covering array. Ties are broken in an order drawn by ``seed``.
    """

    is_exhaustive = True

    def __init__(self, problem: Problem, study: optuna.Study, seed: int = 0, ledger: Ledger | None = None) -> None:
        """``ledger`` is that of ``study``, where it is kept already."""
        self._ledger = ledger or Ledger(problem, study)
        self._order = list(problem.space.candidates())
        random.Random(seed).shuffle(self._order)

    def suggest(self) -> Candidate | None:
        while True:
            tried = self._ledger.tried()
            left = [candidate for candidate in self._order if candidate not in tried]
            if not left:
                return None
            seen = Counter(pair for candidate in tried for pair in _pairs(candidate))
            chosen = min(left, key=lambda candidate: sum(seen[pair] for pair in _pairs(candidate)))
            if self._ledger.start(chosen) is not None:
                return chosen

    def expected_load(self, candidate: Candidate) -> int | None:
        """Nothing is expected."""
        return None

    def observe(self, trial: Trial) -> None:
        self._ledger.record(trial)


def _pairs(candidate: Candidate) -> list[tuple[object, ...]]:
    # relative to max_batch_size: half of it is one choice, whatever it is half of
    preferred = tuple(size / candidate.max_batch_size for size in candidate.preferred_batch_sizes)
    settings: list[object] = [
        ("max_batch_size", candidate.max_batch_size),
        ("delay", candidate.dynamic_batching, candidate.max_queue_delay_us),
        ("preferred", preferred),
        ("instances", candidate.instance_count),
        *candidate.fields,
    ]
    return list(combinations(settings, 2))
