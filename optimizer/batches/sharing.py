"""How the budget of a batch is shared: a minimum for each entry, then slices to the one that promises most.

Pure: what an entry promises is told from outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optimizer.budget import CONFIRM_SHARE

MINIMUM_TRIALS = 5  # the two that are compared with, and three of the search
SLICE_SECONDS, SLICE_DEPLOYMENTS = 30.0, 2.0  # a run that goes on starts its server again: some seconds


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the search of one entry stands.

    ``promise``: by how much another deployment is expected to raise the best throughput, as a share of it.
    ``usual_seconds``: what a deployment usually takes. ``is_over``: the search has come to its end.
    """

    spent_seconds: float
    usual_seconds: float
    promise: float
    is_over: bool = False

    @property
    def promise_per_second(self) -> float:
        return self.promise / max(self.usual_seconds, 1e-9)


@dataclass(frozen=True, slots=True)
class Slice:
    """The entry at ``index`` may search ``seconds`` more."""

    index: int
    seconds: float


def search_seconds(budget_seconds: float) -> float:
    """What all searches together may take; the rest is kept for the confirmations."""
    return (1 - CONFIRM_SHARE) * budget_seconds


def minimum_seconds(budget_seconds: float, entries: int) -> float:
    """The most that the minimum of each entry may take."""
    return search_seconds(budget_seconds) / entries


def next_slice(standings: Sequence[Standing], left_seconds: float) -> Slice | None:
    """For the largest promise per second; of equal ones that on which least was spent. None where all are over, or
    no deployment fits in any more."""
    if left_seconds <= 0:
        return None
    fitting = [i for i, one in enumerate(standings) if not one.is_over and one.usual_seconds <= left_seconds]
    if len(fitting) <= 1:
        return Slice(fitting[0], left_seconds) if fitting else None
    chosen = max(fitting, key=lambda i: (standings[i].promise_per_second, -standings[i].spent_seconds))
    wanted = max(SLICE_SECONDS, SLICE_DEPLOYMENTS * standings[chosen].usual_seconds)
    return Slice(chosen, wanted if left_seconds >= 1.5 * wanted else left_seconds)


def confirm_seconds(left_seconds: float, entries: int) -> float:
    """For the next confirmation, with as many ``entries`` left to be confirmed: what one leaves is the others'."""
    return max(0.0, left_seconds) / entries
