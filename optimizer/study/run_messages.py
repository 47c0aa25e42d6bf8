"""The messages of a run: the line before its first measurement, and notes on its measurements and its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from objectives.load_sequence import MARGIN
from objectives.metrics import METRICS
from objectives.pooled_windows import pool_measurements
from objectives.sla import Verdict
from optimizer.config import ort_settings
from optimizer.config.model_source import served_models
from optimizer.config.problem import Problem
from optimizer.confirmation.candidate_tests import next_verdict
from optimizer.confirmation.windows import server_windows
from optimizer.core.budget import RunMode
from optimizer.core.notes import (
    ConfirmationComplete,
    ConfirmationLeftOut,
    DisturbedWindowsCounted,
    DisturbedWindowsLeftOut,
    HighestConcurrency,
    LessThanInSearch,
    NextVerdictNeeds,
    Note,
    RefusalsSimulated,
    SearchConverged,
    ServerCrashes,
    SettingsUnread,
    UntestedServedMore,
    UsualStatesJudged,
    present,
)
from optimizer.core.trial import Point, Trial, all_points, latest_points, trial_of
from optimizer.deploy.target_factory import describe_server
from optimizer.machine.gpu_telemetry import throttle_note
from optimizer.machine.speed_probe import speed_note
from optimizer.measure.load_client.open_loop import lateness_note
from optimizer.options.run_options import RunOptions
from optimizer.results import formatting
from optimizer.results.recommendation import Outcome
from optimizer.results.summary import RemainingTests
from optimizer.search import MIN_GAIN
from optimizer.study.load_generators import choose_clients
from optimizer.study.run_record import RunRecord
from optimizer.study.study import StudyResult
from optimizer.study.task import Task

CLEARLY_LESS = 0.7  # share of the search's throughput; the search overestimates the best by less than the rest


def start_line(
    mode: RunMode, spent_seconds: float, problem: Problem, options: RunOptions, seconds: float, folder: Path
) -> str:
    """Return the first line of a session in ``mode``, which takes at most ``seconds`` and fills ``folder``.

    Earlier sessions of the run have measured for ``spent_seconds``.
    """
    limit = f"for at most {formatting.duration(seconds)}"
    action, aim = "continuing" if spent_seconds else "tuning", goal(problem)
    if mode is RunMode.CONFIRM:
        action, aim = "testing the recommendation for", formatting.bounds(problem.sla) or "no bound"
    elif options.max_trials is not None:
        limit += f" and {formatting.count(options.max_trials, 'trial')}"
    return f"{action} {problem.model} on {describe_server(options)}, {limit}: {aim}; results in {folder}"


def goal(problem: Problem) -> str:
    """Return the objectives and the bounds, in words."""
    best = ", then ".join(
        f"{'highest' if metric.better == 'higher' else 'lowest'} {formatting.metric_label(metric.name)}"
        for metric in problem.objectives
    )
    bounds = formatting.bounds(problem.sla)
    return f"{best} within {bounds}" if bounds else f"{best}, without a bound"


def notes_on_measurements(trials: Sequence[Trial]) -> list[Note | None]:
    """Return notes for the user on the measurements of all sessions of a run."""
    measurements = [measurement for trial in trials for _, measurement in trial.measurements]
    measurements += [window.measurement for trial in trials for window in trial.confirmations]
    return [
        throttle_note([measurement.gpu_throttling for measurement in measurements]),
        lateness_note(measurements),
        speed_note(measurements),
    ]


def notes_on_outcome(outcome: Outcome, trials: Sequence[Trial], task: Task, options: RunOptions) -> list[Note | None]:
    """Return notes for the user on the recommendation."""
    unread: tuple[str, ...] = ()
    if outcome.recommended and options.target == "embedded":
        configs = served_models(task.source, outcome.recommended.candidate).configs
        unread = ort_settings.unread_settings(configs.values())
    return [
        _highest_concurrency(outcome, task.problem),
        *notes_on_throughput(outcome, trials, task.problem),
        _disturbed_windows(outcome, trials, task.problem),
        _usual_states(outcome),
        ServerCrashes(len(outcome.crashes), outcome.crashes[-1].rstrip(".")) if outcome.crashes else None,
        SettingsUnread(unread) if unread else None,
    ]


def notes_on_search(result: StudyResult, record: RunRecord) -> list[Note | None]:
    """Return notes for the user on the search of a study."""
    return [
        _refusals_note(result.trials, record),
        SearchConverged(MIN_GAIN) if record.search_ended == "converged" else None,
    ]


def note_on_tests(result: StudyResult, record: RunRecord, outcome: Outcome, *, only_confirms: bool) -> Note | None:
    """Return a note for the user on the tests that are left; None if the verdict does not need it.

    Record which tests are left.

    Args:
        result: How the session ended.
        record: The record of the run.
        outcome: The outcome of the run.
        only_confirms: Whether the session only continued the confirmation, as that of ``tune verify`` does.
    """
    options, plan = record.environment.options, record.confirmation_plan()
    is_shown = only_confirms or outcome.verdict is Verdict.UNDECIDED
    if plan is None:
        return ConfirmationLeftOut() if is_shown and outcome.recommended and not options.confirmation else None
    is_checked = choose_clients(options, record.task).perf_analyzer_checks
    test = next_verdict(plan, result.trials, record.task.problem, is_cross_checked=is_checked)
    record.remaining_tests = RemainingTests(test is None, test.seconds if test else 0.0)
    if not is_shown:
        return None
    if test is None:
        return ConfirmationComplete()
    return NextVerdictNeeds(test.missing_servers, test.seconds, result.seconds_left)


def _highest_concurrency(outcome: Outcome, problem: Problem) -> HighestConcurrency | None:
    """Return a note if the profile, and not the latency bound, limits the recommended load."""
    best = outcome.recommended
    if best is None or problem.open_loop or not problem.sla.latencies:
        return None
    is_well_inside = problem.sla.share_of_bound(best.measurement) < math.exp(-MARGIN)
    is_highest = best.load.concurrency >= problem.max_concurrency
    return HighestConcurrency(best.load.concurrency) if is_highest and is_well_inside else None


def _passed(outcome: Outcome) -> Point | None:
    """Return the recommendation if it passed its test; None otherwise."""
    confirmed = outcome.confirmed
    return outcome.recommended if confirmed and confirmed.judged.verdict is Verdict.PASS else None


def notes_on_throughput(outcome: Outcome, trials: Sequence[Trial], problem: Problem) -> tuple[Note, ...]:
    """Return notes if the recommendation passed with clearly less throughput than the search measured.

    There are none if a high throughput is not sought.
    """
    best = _passed(outcome)
    if best is None or problem.keeps_best_load:
        return ()
    return present([_less_than_in_search(best, trials, problem), _untested_served_more(best, trials, problem)])


def _less_than_in_search(best: Point, trials: Sequence[Trial], problem: Problem) -> LessThanInSearch | None:
    """Return a note if ``best``, which passed, has clearly less throughput than the search measured."""
    expected = problem.best_point(all_points([trial_of(best, trials)]))
    if expected is None or best.throughput_infer_per_sec >= CLEARLY_LESS * expected.throughput_infer_per_sec:
        return None
    return LessThanInSearch(expected.throughput_infer_per_sec, best.throughput_infer_per_sec)


def _untested_served_more(best: Point, trials: Sequence[Trial], problem: Problem) -> UntestedServedMore | None:
    """Return a note if ``best``, which passed, has clearly less throughput than an untested configuration."""
    tested = {trial.candidate for trial in trials if trial.confirmations}
    other = problem.best_point([point for point in latest_points(trials) if point.candidate not in tested])
    if other is None or best.throughput_infer_per_sec >= CLEARLY_LESS * other.throughput_infer_per_sec:
        return None
    return UntestedServedMore(other.trial, other.throughput_infer_per_sec)


def _disturbed_windows(outcome: Outcome, trials: Sequence[Trial], problem: Problem) -> Note | None:
    """Return a note if the recommendation passed with disturbed windows, or would miss the SLA with them."""
    best, judged = _passed(outcome), outcome.confirmed.judged if outcome.confirmed else None
    if best is None or judged is None or not judged.disturbed_share:
        return None
    if judged.counts_disturbed:
        return DisturbedWindowsCounted(judged.disturbed_share)
    servers = server_windows(trial_of(best, trials), best.load)
    pooled = pool_measurements([window for server in servers for window in server])
    metrics = [METRICS[constraint.metric] for constraint in problem.sla.missed(pooled)]
    missed = tuple(f"{metric.short_name} {formatting.quantity(metric, metric.value(pooled))}" for metric in metrics)
    return DisturbedWindowsLeftOut(judged.disturbed_share, missed) if missed else None


def _usual_states(outcome: Outcome) -> UsualStatesJudged | None:
    """Return a note if the recommendation was judged as with other programs that are usually more active."""
    tested = outcome.confirmed if outcome.confirmed and outcome.confirmed.error else None
    return UsualStatesJudged(tested.judged.latency_rise) if tested and tested.judged.latency_rise > 0 else None


def _refusals_note(trials: Sequence[Trial], record: RunRecord) -> Note | None:
    """Return a note on the simulated refusals of a limited queue; None if the search did not simulate any."""
    problem, options = record.task.problem, record.environment.options
    permits_failures = problem.sla.permitted_failures and problem.may_refuse
    if options.search != "simulated" or not problem.is_simulated or not permits_failures:
        return None
    from optimizer.search.candidate_selector import fit_surrogate  # imports SciPy

    try:
        refusals = fit_surrogate(problem, trials, options.seed).refusals
    except ValueError:  # nothing was measured
        return None
    return RefusalsSimulated(refusals.compared, refusals.agreed, refusals.is_trusted) if refusals.compared else None
