"""What another deployment of a run promises: by how much it is expected to raise the best, as a share of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from objectives import pareto
from optimizer.problem import Problem
from optimizer.store.finished import FinishedRun
from optimizer.trial import Trial, latest_points

LATE_SHARE = 1 / 3  # of the deployments: what they gained is what the next are expected to


def promise(run: FinishedRun) -> float:
    """The simulated search's own estimate; of other methods what their latest deployments have gained.

    While nothing meets the bounds: the odds that the next deployment does, after so many that did not.
    """
    if not run.trials or _best(run.trials, run.problem) is None:
        return 1 / (len(run.trials) + 1)
    if run.options.search == "simulated":
        return _simulated(run)
    return _of_late(run.trials, run.problem)


def _simulated(run: FinishedRun) -> float:
    from optimizer.search.guide import Guide

    tried = {run.problem.space.canonical(trial.candidate) for trial in run.trials}
    decision = Guide(run.problem, run.options.seed).decide(run.trials, tried)
    return max(0.0, decision.gain) if decision is not None and math.isfinite(decision.gain) else 0.0


def _of_late(trials: Sequence[Trial], problem: Problem) -> float:
    late = max(1, round(LATE_SHARE * len(trials)))
    before, now = _best(trials[:-late], problem), _best(trials, problem)
    if now is None:
        return 0.0
    if before is None:
        return 1 / late
    return abs(math.log(now / before)) / late


def _best(trials: Sequence[Trial], problem: Problem) -> float | None:
    """The first objective of what is best within the bounds; None where nothing is."""
    point = pareto.best(latest_points(trials), problem.objectives, problem.constraints)
    value = problem.objectives[0].value(point.measurement) if point else None
    return value if value and value > 0 else None
