"""The probability that a configuration can be deployed and meets the bounds that are not simulated.

A server may crash, run out of memory, or reject a configuration. Configurations that share a setting with one that
failed are likely to fail too, so after two failures of such a family the search leaves it. If a GPU has too little
memory for a configuration, one failure suffices for those that need at least as much.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import cast

import numpy as np

from objectives.arrays import FloatArray
from objectives.sla import Sla
from optimizer.config.search_space import SearchSpace
from optimizer.core.trial import Candidate, Trial
from optimizer.simulator.fitted_parameters import execution_settings

NONE_BROKEN = 0.8  # prior probability
# probabilities that a deployment of a broken family succeeds, and that another deployment fails
BROKEN_WORKS, SOUND_FAILS = 0.03, 0.05

Family = tuple[str, Hashable]


class Feasibility:
    """The probability of success, learned from finished trials.

    At most one family of configurations is taken to be broken; which one follows from Bayes' rule. A family has the
    same execution settings, the same value of a field or dynamic batching in common, or it has at least some number
    of instances on all server processes or some maximum batch size.
    """

    def __init__(self, trials: Sequence[Trial], space: SearchSpace, bounds: Sla) -> None:
        """Weigh the families of all failures. A trial succeeds if one of its measurements is within ``bounds``.

        A trial without a measurement fails. One that is not known to miss a bound is left out: the first window of a
        deployment that is given up for its latency has no other metric.
        """
        outcomes: list[tuple[Candidate, bool]] = []
        for trial in trials:
            measured = [m for _, m in trial.measurements if m.throughput_infer_per_sec is not None]
            succeeds = any(map(bounds.is_met, measured))
            if succeeds or not measured or any(0 < b.violation(m) < math.inf for b in bounds for m in measured):
                outcomes.append((space.canonical(trial.candidate), succeeds))
        families = dict.fromkeys(family for candidate, ok in outcomes if not ok for family in _families(candidate))
        weights = {family: (1 - NONE_BROKEN) / len(families) * _likelihood(family, outcomes) for family in families}
        total = sum(weights.values()) + NONE_BROKEN * _likelihood(None, outcomes)
        self._broken = {family: weight / total for family, weight in weights.items()}

    def probabilities(self, candidates: Sequence[Candidate]) -> FloatArray:
        """Return the probability [candidates] of success, relative to that of a configuration of no broken family."""
        if not self._broken:
            return np.ones(len(candidates))
        known = {candidate: self._probability(candidate) for candidate in dict.fromkeys(candidates)}
        return np.array([known[candidate] for candidate in candidates])

    def _probability(self, candidate: Candidate) -> float:
        broken = sum(weight for family, weight in self._broken.items() if _belongs(candidate, family))
        return 1 - broken * (1 - BROKEN_WORKS / (1 - SOUND_FAILS))


def _families(candidate: Candidate) -> Iterator[Family]:
    yield "execution settings", execution_settings(candidate)
    yield "dynamic batching", candidate.dynamic_batching
    yield "instances", candidate.instances * candidate.server_processes
    yield "max_batch_size", candidate.max_batch_size
    yield from (("field", pair) for pair in candidate.fields)


def _belongs(candidate: Candidate, family: Family) -> bool:
    kind, value = family
    if kind == "instances":
        return candidate.instances * candidate.server_processes >= cast(int, value)
    if kind == "max_batch_size":
        return candidate.max_batch_size >= cast(int, value)
    return family in _families(candidate)


def _likelihood(broken: Family | None, outcomes: Sequence[tuple[Candidate, bool]]) -> float:
    """Return the probability of ``outcomes`` if the family ``broken`` is, or none if it is None."""
    likely = 1.0
    for candidate, ok in outcomes:
        works = BROKEN_WORKS if broken and _belongs(candidate, broken) else 1 - SOUND_FAILS
        likely *= works if ok else 1 - works
    return likely


def beyond_gpu_memory(trials: Sequence[Trial], candidates: Iterable[Candidate]) -> set[Candidate]:
    """Return the ``candidates`` that need at least as much GPU memory as one that failed for lack of it.

    They have at least its instances and its max_batch_size, and the same other settings except those of the batcher.
    A failure does not count if such a candidate was served: then something else held the memory at that time.
    """
    lacking = [trial.candidate for trial in trials if trial.lacks_gpu_memory]
    if not lacking:
        return set()
    served = [trial.candidate for trial in trials if trial.has_served]
    lacking = [failed for failed in lacking if not any(_needs_as_much(other, failed) for other in served)]
    return {other for other in candidates if any(_needs_as_much(other, failed) for failed in lacking)}


def _needs_as_much(candidate: Candidate, other: Candidate) -> bool:
    """Return whether ``candidate`` needs at least the memory of ``other``; False if that is unknown."""
    (instances, settings), (least, same) = execution_settings(candidate), execution_settings(other)
    is_as_large = instances >= least and candidate.max_batch_size >= other.max_batch_size
    return is_as_large and settings == same and candidate.dynamic_batching >= other.dynamic_batching
