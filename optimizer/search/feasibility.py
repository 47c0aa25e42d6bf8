"""The probability that a configuration can be deployed and meets the bounds that are not simulated.

A server may crash, run out of memory, or reject a configuration. Configurations that share a setting with one that
failed are likely to fail too, so after two failures of such a family the search leaves it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from objectives.sla import Sla
from optimizer.config.search_space import SearchSpace
from optimizer.core.trial import Candidate, Trial
from optimizer.simulator.fitted_parameters import execution_settings
from optimizer.simulator.scenario import Array

# A family of configurations is sound or broken. SOUND is the prior probability of a sound one; ODD that a deployment
# of a sound family fails, or one of a broken family succeeds.
SOUND, ODD = 0.9, 0.05

Family = tuple[Hashable, ...]


class Feasibility:
    """The probability of success by family, learned from finished trials.

    A family has the same value of a field, the same execution settings, or dynamic batching in common. There are also
    families of at least as many instances, and of at least as large a maximum batch size. A failure with fewer of
    them counts against such a family, and a success with more of them counts for it.
    """

    def __init__(self, trials: Sequence[Trial], space: SearchSpace, bounds: Sla) -> None:
        """Count the successes and failures. A trial succeeds if one of its measurements is within ``bounds``."""
        self._outcomes: dict[Candidate, Counter[bool]] = {}
        for trial in trials:
            measured = [m for _, m in trial.measurements if m.throughput_infer_per_sec is not None]
            outcome = any(map(bounds.is_met, measured))
            self._outcomes.setdefault(space.canonical(trial.candidate), Counter())[outcome] += 1
        self._known: dict[Candidate, float] = {}

    def probabilities(self, candidates: Sequence[Candidate]) -> Array:
        """Return the probability [candidates] of success, that of the candidate's least sound family."""
        if not any(outcomes[False] for outcomes in self._outcomes.values()):
            return np.ones(len(candidates))
        for candidate in candidates:
            if candidate not in self._known:
                self._known[candidate] = min(self._of_families(candidate))
        return np.array([self._known[candidate] for candidate in candidates])

    def _of_families(self, candidate: Candidate) -> Iterator[float]:
        own = set(_same(candidate))
        for family in own:
            alike = [outcomes for other, outcomes in self._outcomes.items() if family in _same(other)]
            yield _probability(sum(o[True] for o in alike), sum(o[False] for o in alike))
        for size in (_instances, _largest_batch):
            succeeded = sum(o[True] for other, o in self._outcomes.items() if size(other) >= size(candidate))
            failed = sum(o[False] for other, o in self._outcomes.items() if size(other) <= size(candidate))
            yield _probability(succeeded, failed)


def _same(candidate: Candidate) -> Iterator[Family]:
    yield "execution settings", execution_settings(candidate)
    yield "dynamic_batching", candidate.dynamic_batching
    yield from candidate.fields


def _instances(candidate: Candidate) -> int:
    return candidate.instances


def _largest_batch(candidate: Candidate) -> int:
    return candidate.max_batch_size


def _probability(succeeded: int, failed: int) -> float:
    """Return the probability that the next deployment of a family succeeds (Bayes' rule)."""
    sound = SOUND * (1 - ODD) ** succeeded * ODD**failed
    broken = (1 - SOUND) * ODD**succeeded * (1 - ODD) ** failed
    share = sound / (sound + broken)
    return share * (1 - ODD) + (1 - share) * ODD
