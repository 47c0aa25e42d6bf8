"""The probability that a configuration can be deployed and meets the bounds that are not simulated.

A server may crash, run out of memory, or reject a configuration. Configurations that share a setting with one that
failed are likely to fail too, so after two failures of such a group the search leaves it. If a GPU has too little
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
from optimizer.core.candidate import Candidate
from optimizer.core.trial import Trial
from optimizer.simulator.fitted_parameters import execution_settings

PRIOR_ALL_FEASIBLE = 0.8  # prior probability that no group is infeasible
# probabilities that a deployment of the infeasible group succeeds, and that another deployment fails
SUCCESS_IF_INFEASIBLE, FAILURE_IF_FEASIBLE = 0.03, 0.05

Group = tuple[str, Hashable]


class Feasibility:
    """The probability of success, learned from finished trials.

    At most one group of configurations is assumed to be infeasible; Bayes' rule gives the probability of each. The
    configurations of a group have the same execution settings, the same value of a field, or dynamic batching. A
    group may also be all configurations with at least a certain number of instances on all server processes, or with
    at least a certain maximum batch size.
    """

    def __init__(self, trials: Sequence[Trial], space: SearchSpace, bounds: Sla) -> None:
        """Weigh the groups of all failures. A trial succeeds if one of its measurements is within ``bounds``."""
        outcomes: list[tuple[Candidate, bool]] = []
        for trial in trials:
            has_succeeded = _has_succeeded(trial, bounds)
            if has_succeeded is not None:
                outcomes.append((space.canonical(trial.candidate), has_succeeded))
        failed = [candidate for candidate, has_succeeded in outcomes if not has_succeeded]
        groups = dict.fromkeys(group for candidate in failed for group in _groups(candidate))
        weights = {group: (1 - PRIOR_ALL_FEASIBLE) / len(groups) * _likelihood(group, outcomes) for group in groups}
        total = sum(weights.values()) + PRIOR_ALL_FEASIBLE * _likelihood(None, outcomes)
        self._infeasible = {group: weight / total for group, weight in weights.items()}

    def probabilities(self, candidates: Sequence[Candidate]) -> FloatArray:
        """Return the probability [candidates] of success, relative to that outside of the infeasible group."""
        if not self._infeasible:
            return np.ones(len(candidates))
        by_candidate = {candidate: self._probability(candidate) for candidate in dict.fromkeys(candidates)}
        return np.array([by_candidate[candidate] for candidate in candidates])

    def _probability(self, candidate: Candidate) -> float:
        infeasible = sum(weight for group, weight in self._infeasible.items() if _belongs(candidate, group))
        return 1 - infeasible * (1 - SUCCESS_IF_INFEASIBLE / (1 - FAILURE_IF_FEASIBLE))


def _has_succeeded(trial: Trial, bounds: Sla) -> bool | None:
    """Return whether a trial has a measurement within ``bounds``; None if it is not known to miss one.

    A trial without a measurement has not succeeded. The first window of a deployment that is given up for its latency
    has no other metric.
    """
    measured = [m for _, m in trial.measurements if m.has_values]
    if any(map(bounds.is_met, measured)):
        return True
    misses = any(0 < bound.violation(m) < math.inf for bound in bounds for m in measured)
    return False if misses or not measured else None


def _groups(candidate: Candidate) -> Iterator[Group]:
    yield "execution settings", execution_settings(candidate)
    yield "dynamic batching", candidate.dynamic_batching
    yield "instances", candidate.total_instances
    yield "max_batch_size", candidate.max_batch_size
    yield from (("field", pair) for pair in candidate.fields)


def _belongs(candidate: Candidate, group: Group) -> bool:
    kind, value = group
    if kind == "instances":
        return candidate.total_instances >= cast(int, value)
    if kind == "max_batch_size":
        return candidate.max_batch_size >= cast(int, value)
    return group in _groups(candidate)


def _likelihood(infeasible: Group | None, outcomes: Sequence[tuple[Candidate, bool]]) -> float:
    """Return the probability of ``outcomes`` if the group ``infeasible`` is so, or no group if it is None."""
    likelihood = 1.0
    for candidate, has_succeeded in outcomes:
        is_infeasible = infeasible is not None and _belongs(candidate, infeasible)
        success = SUCCESS_IF_INFEASIBLE if is_infeasible else 1 - FAILURE_IF_FEASIBLE
        likelihood *= success if has_succeeded else 1 - success
    return likelihood


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
    settings, other_settings = execution_settings(candidate), execution_settings(other)
    return (
        settings.fields == other_settings.fields
        and settings.instances >= other_settings.instances
        and candidate.max_batch_size >= other.max_batch_size
        and candidate.dynamic_batching >= other.dynamic_batching
    )
