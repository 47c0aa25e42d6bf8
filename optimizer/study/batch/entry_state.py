"""The results of a batch's entries, and the part of the budget that each entry gets next.

The budget goes to the entry with the largest expected improvement of its next deployment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from objectives.metrics import Metric
from optimizer.config.search_space import Problem
from optimizer.confirmation.verdicts import ConfirmedLoad
from optimizer.core.budget import CONFIRM_SHARE
from optimizer.core.trial import Point, Trial, latest_points
from optimizer.results import configuration_text, summary
from optimizer.results.comparison import COMPARED_VERSIONS, conditions
from optimizer.results.finished_run import FinishedRun
from optimizer.store.run_folder import HASH_DIGITS, MODEL_HASH
from optimizer.study.batch.record import EntryRecord, Estimate

RECENT_SHARE = 1 / 3  # share of the deployments whose gain predicts that of the next one
MINIMUM_TRIALS = 5  # the two comparisons and three of the search
SLICE_SECONDS, SLICE_DEPLOYMENTS = 30.0, 2.0  # a resumed run starts its server again, which takes seconds


@dataclass(frozen=True, slots=True)
class EntryState:
    """The state of one entry's search. ``trial_seconds`` is the median time of a trial."""

    spent_seconds: float
    trial_seconds: float
    expected_improvement: float
    is_over: bool = False

    @property
    def improvement_per_second(self) -> float:
        """Return the expected improvement per second of the next deployment."""
        return self.expected_improvement / max(self.trial_seconds, 1e-9)


@dataclass(frozen=True, slots=True)
class Allocation:
    """The entry at ``index`` may search for another ``seconds``."""

    index: int
    seconds: float


def entry_state(entry: EntryRecord, run: FinishedRun, improvement: Callable[[FinishedRun], float]) -> EntryState:
    """Return the state of an entry. ``improvement`` estimates the gain of another deployment."""
    is_over = entry.is_done or entry.search_is_over
    times = [
        (trial.deploy_seconds or 0) + sum(measurement.measure_seconds or 0 for _, measurement in trial.measurements)
        for trial in run.trials
    ]
    trial_seconds = median(times) if times else 0.0
    return EntryState(entry.seconds, trial_seconds, 0.0 if is_over else improvement(run), is_over)


def search_is_over(run: FinishedRun, max_trials: int | None) -> bool:
    """Return whether the search has converged, tried every candidate, or run ``max_trials``."""
    ended = run.info.get("search_ended") in ("converged", "exhausted")
    return ended or (max_trials is not None and len(run.trials) >= max_trials)


def describe_entry(entry: EntryRecord, run: FinishedRun) -> EntryRecord:
    """Return ``entry`` with the results of its run."""
    outcome, problem = run.outcome, run.problem
    if outcome is None:
        return entry
    metric, best, baseline = problem.objectives[0], outcome.recommended, outcome.baseline
    return replace(
        entry,
        trials=outcome.trials,
        recommended=_estimate(metric, best, outcome.confirmed),
        baseline=_estimate(metric, baseline.point, outcome.confirmation_of(baseline.point)),
        headline=summary.answer_with_cause(outcome, problem),
        verdict=outcome.verdict.value,
        speedup=outcome.speedup,
        speedup_interval=baseline.gain.bounds if baseline.gain else None,
        configuration=configuration_text.configuration(best.candidate) if best else "",
        conditions=conditions(run),
        circumstances=_circumstances(run),
    )


def _estimate(metric: Metric, point: Point | None, confirmed: ConfirmedLoad | None) -> Estimate | None:
    """Return the value of ``metric`` at ``point`` with the interval of its confirmation; None if it is unknown."""
    value = metric.value(point.measurement) if point else None
    if value is None or not math.isfinite(value):
        return None
    if confirmed is None:
        return Estimate(metric.name, value, unsure="not measured again on fresh servers")
    if confirmed.disturbance:
        return Estimate(metric.name, value, unsure=confirmed.disturbance)
    interval = confirmed.interval(metric.name)
    if interval is None or interval.is_unknown or not math.isfinite(interval.high):
        return Estimate(metric.name, value, unsure=f"the interval of {metric.name} is not known")
    other_cpu_share = confirmed.point.measurement.other_cpu_share
    return Estimate(metric.name, value, interval.low, interval.high, other_cpu_share=other_cpu_share)


def _circumstances(run: FinishedRun) -> dict[str, str]:
    """Return versions and the hash of the model, which may explain a change but do not make entries incomparable."""
    circumstances = {name: run.versions[name] for name in COMPARED_VERSIONS if name in run.versions}
    model = run.facts.get(MODEL_HASH)
    return {**circumstances, **({"model": str(model)[:HASH_DIGITS]} if model else {})}


def expected_improvement(run: FinishedRun) -> float:
    """Return the expected gain of another deployment, as a share of the best value so far.

    The simulated search has an estimate. Other methods are expected to gain what their recent deployments gained. If
    no configuration meets the bounds after n trials, it is the probability 1 / (n + 1) that the next one does.
    """
    if not run.trials or _best(run.trials, run.problem) is None:
        return 1 / (len(run.trials) + 1)
    if run.options.search == "simulated":
        return _simulated_gain(run)
    return _recent_gain(run.trials, run.problem)


def _simulated_gain(run: FinishedRun) -> float:
    """Return the expected gain of the next trial by the simulated search; 0 if it has ended."""
    from optimizer.search.candidate_selector import CandidateSelector

    tried = {run.problem.space.canonical(trial.candidate) for trial in run.trials}
    decision = CandidateSelector(run.problem, run.options.seed).decide(run.trials, tried)
    return max(0.0, decision.gain) if decision is not None and math.isfinite(decision.gain) else 0.0


def _recent_gain(trials: Sequence[Trial], problem: Problem) -> float:
    """Return the mean gain in the logarithm of the first objective by each of the latest trials."""
    recent = max(1, round(RECENT_SHARE * len(trials)))
    earlier_best, best = _best(trials[:-recent], problem), _best(trials, problem)
    if best is None:
        return 0.0
    if earlier_best is None:
        return 1 / recent
    return abs(math.log(best / earlier_best)) / recent


def _best(trials: Sequence[Trial], problem: Problem) -> float | None:
    """Return the first objective of the best point within the bounds; None if there is none."""
    point = problem.best_point(latest_points(trials))
    value = problem.objectives[0].value(point.measurement) if point else None
    return value if value and value > 0 else None


def search_seconds(budget_seconds: float) -> float:
    """Return the time for all searches together; the rest is reserved for the confirmations."""
    return (1 - CONFIRM_SHARE) * budget_seconds


def next_allocation(states: Sequence[EntryState], left_seconds: float) -> Allocation | None:
    """Return the time for the entry with the largest expected improvement per second (ties: least time spent).

    Return None if all searches are over or no deployment fits the remaining time.
    """
    if left_seconds <= 0:
        return None
    fitting = [i for i, state in enumerate(states) if not state.is_over and state.trial_seconds <= left_seconds]
    if len(fitting) <= 1:
        return Allocation(fitting[0], left_seconds) if fitting else None
    chosen = max(fitting, key=lambda i: (states[i].improvement_per_second, -states[i].spent_seconds))
    seconds = max(SLICE_SECONDS, SLICE_DEPLOYMENTS * states[chosen].trial_seconds)
    return Allocation(chosen, seconds if left_seconds >= 1.5 * seconds else left_seconds)
