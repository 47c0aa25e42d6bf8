"""Whether what a run recommended still holds: the winner and its runners-up measured again, in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from objectives.confidence import Verdict
from objectives.sla import worst_violation
from optimizer.confirm.plan import WINDOWS, Confirmed, Entrant, confirmed, entrant, finalists
from optimizer.outcome import Outcome
from optimizer.problem import Problem
from optimizer.trial import Candidate, Trial, latest_points

RUNNERS_UP = 2


@dataclass(frozen=True, slots=True)
class Verified:
    """``found``: the winner first; one that could not be measured is in ``failed`` with the reason instead."""

    found: tuple[Confirmed, ...]
    failed: tuple[tuple[Candidate, str], ...]
    verdict_holds: bool
    ranking_holds: bool
    reason: str

    @property
    def holds(self) -> bool:
        return self.verdict_holds and self.ranking_holds


def entrants(outcome: Outcome, trials: Sequence[Trial], problem: Problem) -> list[Entrant]:
    """The recommendation at its own load, then the next best configurations."""
    winner = outcome.recommended
    if winner is None:
        return []
    rest = [point for point in latest_points(trials) if point.candidate != winner.candidate]
    others = finalists(rest, problem, RUNNERS_UP)
    return [entrant(winner, problem, WINDOWS, winner.load), *(entrant(point, problem, WINDOWS) for point in others)]


def verify(trials: Sequence[Trial], wanted: Sequence[Entrant], problem: Problem) -> Verified:
    """What the confirmations of ``wanted``, the winner first, say."""
    found, failed = list[Confirmed](), list[tuple[Candidate, str]]()
    for one in wanted:
        trial = next(trial for trial in trials if trial.number == one.trial)
        again = confirmed(trial, one.load, problem)
        if again is None:
            failed.append((one.candidate, trial.reason))
        else:
            found.append(again)
    if not found or found[0].point.trial != wanted[0].trial:
        return Verified(tuple(found), tuple(failed), False, False, f"the winner cannot be measured: {failed[0][1]}")
    winner, *others = found
    verdict_holds = winner.judged.verdict is Verdict.PASS
    better = [one for one in others if _is_better(one, winner, problem)]
    reasons = [] if verdict_holds else [winner.judged.reason]
    reasons += [f"trial {one.point.trial} now serves more within the bounds" for one in better]
    return Verified(tuple(found), tuple(failed), verdict_holds, not better, "; ".join(reasons))


def _is_better(one: Confirmed, winner: Confirmed, problem: Problem) -> bool:
    """Beyond chance: the intervals of the throughputs do not overlap."""
    meets = worst_violation(problem.constraints, one.point.measurement) <= 0
    return meets and one.judged.verdict is not Verdict.FAIL and one.throughput.low > winner.throughput.high
