"""The state of a batch's entries, the budget that each gets, its results, and their change since an earlier batch.

The budget goes to the entry with the largest expected improvement of its next deployment.

Each result has the confidence interval of its confirmation. If two intervals overlap, the change is within noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from objectives.intervals import ConfidenceInterval
from objectives.metrics import METRICS, Metric
from optimizer.config.search_space import Problem
from optimizer.confirmation.verdicts import ConfirmedLoad
from optimizer.core.budget import CONFIRM_SHARE
from optimizer.core.trial import Point, Trial, latest_points
from optimizer.machine.cpu_usage import DISTURBANCE_LIMIT
from optimizer.results import configuration_text, formatting, summary
from optimizer.results.comparison import COMPARED_VERSIONS, conditions, is_regression
from optimizer.results.finished_run import FinishedRun
from optimizer.store.run_folder import HASH_DIGITS, MODEL_HASH
from optimizer.study.batch.record import BatchRecord, Change, ChangeKind, EntryRecord, Estimate

SAME_BASELINE = 0.02  # relative change of a baseline that is not mentioned
RECENT_SHARE = 1 / 3  # share of the deployments whose gain predicts that of the next one
MINIMUM_TRIALS = 5  # the two comparisons and three of the search
SLICE_SECONDS, SLICE_DEPLOYMENTS = 30.0, 2.0  # a resumed run starts its server again, which takes seconds


def compare_batches(batch: BatchRecord, previous: BatchRecord, share: float | None) -> BatchRecord:
    """Return ``batch`` with the change of each entry since the batch ``previous``.

    An entry has regressed if it lost ``share`` or more and the intervals do not overlap. With None, none regresses.
    """
    earlier = {entry.label: entry for entry in previous.entries}
    entries = []
    for entry in batch.entries:
        change = compare_entries(earlier.get(entry.label), entry, previous.date) if entry.is_done else None
        entries.append(replace(entry, change=change, regressed=_is_regression(change, share)))
    gone = tuple(label for label in earlier if label not in {entry.label for entry in batch.entries})
    return replace(batch, entries=tuple(entries), gone=gone)


def _is_regression(change: Change | None, share: float | None) -> bool:
    if share is None or change is None or change.share is None or change.high is None:
        return False
    return is_regression(change.share, change.high, share)


def compare_entries(earlier: EntryRecord | None, current: EntryRecord, since: str) -> Change:
    """Return the change of an entry. ``since`` is the date of the earlier batch."""
    if earlier is None:
        return Change("new", since, f"not in the batch of {since}")
    if not earlier.is_done:
        return Change("new", since, f"not done on {since}")
    ending = f"it {_ending(earlier)} on {since}"
    if current.state == "failed":
        return Change("failed", since, f"it failed too on {since}" if earlier.state == "failed" else ending)
    if earlier.recommended is None:
        return Change(_change_from_nothing(earlier, current), since, ending)
    if difference := _different_condition(earlier, current):
        return Change("incomparable", since, f"not comparable with {since}: {difference}")
    if current.recommended is None:
        is_open = earlier.is_undecided or current.is_undecided
        return Change("undecided" if is_open else "missed", since, ending)
    change = _compare_estimates(earlier.recommended, current.recommended, since)
    if change.kind in ("lost", "gained"):
        return replace(change, description=change.description + _explain(earlier, current))
    return change


def _change_from_nothing(earlier: EntryRecord, current: EntryRecord) -> ChangeKind:
    """Return the kind of the change of an entry that recommended nothing in the earlier batch and has not failed."""
    if current.recommended is not None and not current.is_undecided:
        return "met"
    if earlier.has_missed and current.has_missed:
        return "same"
    return "incomparable" if earlier.state == "failed" else "undecided"


def _compare_estimates(old: Estimate, new: Estimate, since: str) -> Change:
    if not _have_ratio(old, new):
        old_value, new_value = (
            formatting.quantity(METRICS[estimate.metric], estimate.value) for estimate in (old, new)
        )
        text = f"{old.metric}: {new_value} now and {old_value} on {since}, which have no ratio"
        return Change("undecided", since, text)
    share, interval = _improvement(old, new), _improvement_interval(old, new)
    signed = f"{_signed(share)} since {since}"
    if interval is None:
        when, why = ("then", old.unsure) if old.low is None else ("now", new.unsure)
        return Change("undecided", since, f"{signed}, which may be noise ({when}: {why or 'no interval'})", share)
    if disturbance := _different_disturbance(old, new):
        return Change("undecided", since, f"{signed}, which may be noise ({disturbance})", share)
    low, high = interval.low, interval.high
    if low <= 0 <= high:
        return Change("noise", since, f"{signed}, within noise", share, low, high)
    kind: ChangeKind = "lost" if high < 0 else "gained"
    nearest, furthest = sorted((abs(low), abs(high)))
    text = f"{kind} {percent(share)} since {since} (between {percent(nearest)} and {percent(furthest)})"
    return Change(kind, since, text, share, low, high)


def _different_disturbance(old: Estimate, new: Estimate) -> str:
    """Return how other processes used the machine then and now; empty if the same, or if that is unknown."""
    old_share, new_share = old.other_cpu_share, new.other_cpu_share
    if old_share is None or new_share is None or abs(new_share - old_share) <= DISTURBANCE_LIMIT:
        return ""
    return (
        f"other processes or machines took {100 * new_share:.0f} % of the CPUs now, and {100 * old_share:.0f} % then"
    )


def _have_ratio(old: Estimate, new: Estimate) -> bool:
    """Return whether the values can be compared by their ratio: an error rate may be 0, and a score below it."""
    return min(old.value, new.value) > 0


def _improvement(old: Estimate, new: Estimate) -> float:
    """Return the relative improvement; negative is worse, also for metrics where lower is better.

    Both values are positive, see ``_have_ratio``.
    """
    return (new.value / old.value if METRICS[new.metric].better == "higher" else old.value / new.value) - 1


def _improvement_interval(old: Estimate, new: Estimate) -> ConfidenceInterval | None:
    """Return the interval of the improvement, with both values anywhere in their intervals; None if it is unknown."""
    if old.low is None or old.high is None or new.low is None or new.high is None:
        return None
    if min(old.low, new.low) <= 0:
        return None
    if METRICS[new.metric].better == "higher":
        return ConfidenceInterval(new.low / old.high - 1, new.high / old.low - 1)
    return ConfidenceInterval(old.low / new.high - 1, old.high / new.low - 1)


def _explain(earlier: EntryRecord, current: EntryRecord) -> str:
    """Return a sentence about other changes, to append to the change."""
    text, old, new = "", earlier.baseline, current.baseline
    if old and new and old.metric == new.metric and _have_ratio(old, new):
        change = _improvement(old, new)
        text = f"; its baseline {'as before' if abs(change) < SAME_BASELINE else _signed(change)}"
    names = sorted(earlier.circumstances.keys() & current.circumstances.keys())
    changed = [
        f"{name} {earlier.circumstances[name]} -> {current.circumstances[name]}"
        for name in names
        if earlier.circumstances[name] != current.circumstances[name]
    ]
    return f"{text}; {', '.join(changed)}" if changed else text


def _different_condition(earlier: EntryRecord, current: EntryRecord) -> str:
    """Return the first condition that differs; empty if an entry measured nothing."""
    if not current.conditions:
        return ""
    for name in earlier.conditions.keys() | current.conditions.keys():
        old, new = earlier.conditions.get(name, ""), current.conditions.get(name, "")
        if old != new:
            return f"other {name}, {old or 'none'} then and {new or 'none'} now"
    return ""


def _ending(entry: EntryRecord) -> str:
    """Return how ``entry`` ended, as a clause without its subject."""
    if entry.is_undecided:
        return f"ended UNDECIDED {'without' if entry.recommended is None else 'with'} a recommendation"
    endings = {
        "found": "had a configuration that meets its bounds",
        "none": "had no configuration that meets its bounds",
    }
    return endings.get(entry.state, "failed")


def percent(share: float) -> str:
    """Return the size of ``share`` in percent: ``5.8%``, ``12%``, ``0.43%``."""
    size = 100 * abs(share)
    return f"{size:.0f}%" if size >= 10 else f"{size:.2g}%"


def _signed(share: float) -> str:
    return f"{'-' if share < 0 else '+'}{percent(share)}"


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
    from optimizer.search.candidate_selector import CandidateSelector

    tried = {run.problem.space.canonical(trial.candidate) for trial in run.trials}
    decision = CandidateSelector(run.problem, run.options.seed).decide(run.trials, tried)
    return max(0.0, decision.gain) if decision is not None and math.isfinite(decision.gain) else 0.0


def _recent_gain(trials: Sequence[Trial], problem: Problem) -> float:
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
