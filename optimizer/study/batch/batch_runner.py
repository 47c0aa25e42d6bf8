"""Run a batch: a minimum for each entry, then the rest by expected improvement, then the confirmations.

Each step is an ordinary run that is resumed for some time. Between steps only its folder is kept. The rest of
the budget goes to the entry with the largest expected improvement of its next deployment. After each step the results
of the run are copied to the record of its entry.
"""

from __future__ import annotations

import itertools
import math
import shutil
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, TypeAlias

from objectives.metrics import METRICS, Metric
from optimizer.config.problem import Problem
from optimizer.confirmation.verdicts import ConfirmedLoad
from optimizer.core import interrupts
from optimizer.core.budget import CONFIRM_SHARE, RunMode
from optimizer.core.errors import BadInputError, ChangedRunError, EnvironmentFault, TuneError
from optimizer.core.safe_text import exists, is_file, one_line
from optimizer.core.trial import Point, Trial, latest_points
from optimizer.options.addresses import redact
from optimizer.options.run_options import RunOptions
from optimizer.results import configuration_text, summary
from optimizer.results.comparison import COMPARED_VERSIONS, conditions
from optimizer.results.finished_run import FinishedRun, read_run
from optimizer.store.run_folder import HASH_DIGITS, MODEL_HASH, WRITTEN_FORMAT, RunFolder
from optimizer.study.batch.record import BatchFolder, BatchRecord, EntryRecord, EntryStatus, Estimate
from optimizer.study.batch.suite import Suite
from optimizer.study.run_messages import notes_on_throughput

MAX_REASON_LENGTH = 400  # limit in characters
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


def _median_seconds(trials: Sequence[Trial]) -> float:
    """Return the median time of a trial; 0 without trials."""
    times = [
        (trial.deploy_seconds or 0) + sum(measurement.measure_seconds or 0 for _, measurement in trial.measurements)
        for trial in trials
    ]
    return median(times) if times else 0.0


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
    bounded = dict.fromkeys(constraint.metric for constraint in problem.sla)
    recommended = _estimate(metric, best, outcome.confirmed)
    throughput_notes = tuple(map(str, notes_on_throughput(outcome, run.trials, problem)))
    if recommended and throughput_notes and not run.remaining_tests.is_complete:
        recommended = replace(recommended, unsure=recommended.unsure or "its test ended before a higher load passed")
    return replace(
        entry,
        trials=outcome.trials,
        recommended=recommended,
        bounded=tuple(filter(None, (_estimate(METRICS[name], best, outcome.confirmed) for name in bounded))),
        concurrency=(best.load.concurrency or None) if best else None,
        request_rate=(best.load.request_rate or None) if best else None,
        baseline=_estimate(metric, baseline.point, outcome.confirmation_of(baseline.point)),
        headline=summary.answer_with_cause(outcome, problem),
        verdict=outcome.verdict.value,
        remaining_tests=run.remaining_tests,
        gain=baseline.gain,
        missed_in_usual_states=outcome.missed_in_usual_states(baseline) if best else None,
        throughput_notes=throughput_notes,
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
    interval = confirmed.interval(metric.name)
    if interval is None or interval.is_unknown or not math.isfinite(interval.high):
        unsure = confirmed.disturbance or f"the interval of {metric.name} is not known"
        return Estimate(metric.name, value, unsure=unsure)
    other_cpu_share = confirmed.point.measurement.other_cpu_share
    return Estimate(metric.name, value, interval.low, interval.high, confirmed.disturbance, other_cpu_share)


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


# Starts or resumes the run of an entry in the folder: searches or confirms for some seconds, and returns the status
# of the run. Raises TuneError.
RunEntry: TypeAlias = Callable[[RunOptions, RunFolder, RunMode, float], str]


@dataclass
class BatchRunner:
    """Run the entries of ``suite``.

    ``record`` always equals batch.json in ``folder``; ``on_progress`` gets a line for each step.
    """

    suite: Suite
    folder: BatchFolder
    record: BatchRecord
    run_entry: RunEntry
    on_progress: Callable[[str], None]
    expected_improvement: Callable[[FinishedRun], float] = expected_improvement
    clock: Callable[[], float] = time.monotonic
    _states: dict[int, EntryState] = field(init=False, default_factory=dict)

    def run(self) -> BatchRecord:
        """Return the record of the finished or interrupted batch. An entry that fails does not end it.

        Raises EnvironmentFault if the disk refuses the record.
        """
        try:
            self._update(status="running")
            self._run_minimums()
            self._allocate()
            self._confirm()
            self._update(status="finished")
        except KeyboardInterrupt:
            interrupts.acknowledge()
            self._update(status="interrupted")
        return self.record

    def _run_minimums(self) -> None:
        """Search for each entry that has not begun, with at most an equal share of the time and MINIMUM_TRIALS."""
        max_seconds = search_seconds(self.record.budget_seconds) / len(self.record.entries)
        for index, entry in enumerate(self.record.entries):
            if entry.state == "waiting":
                try:
                    self._search_minimum(index, max_seconds)
                except ChangedRunError:
                    self._begin_new_run(index)
                    self._search_minimum(index, max_seconds)

    def _search_minimum(self, index: int, max_seconds: float) -> None:
        entry = self.record.entries[index]
        seconds = max(0.0, max_seconds - entry.seconds)
        self.on_progress(f"{entry.label}: minimum search, at most {seconds:.0f} s")
        self._step(index, seconds, max_trials=MINIMUM_TRIALS)

    def _begin_new_run(self, index: int) -> None:
        """Give an entry a new run, whose time counts from zero, because its present one cannot be continued."""
        entry = self.record.entries[index]
        names = (f"{entry.folder}-{number}" for number in itertools.count(2))
        used = {other.folder for other in self.record.entries}
        folder = next(name for name in names if name not in used and not exists(self.folder.path / name))
        self.on_progress(
            f"{entry.label}: its model, bounds or server have changed, so a new run in {folder} measures it; "
            f"{entry.folder} keeps the earlier measurements"
        )
        begun = EntryRecord(entry.model, entry.sla, entry.target, entry.command, folder, earlier_folder=entry.folder)
        self._update_entry(index, begun)

    def _allocate(self) -> None:
        """Give the rest of the search time to one entry after another, until no search can use it."""
        while self._search_seconds_left() > 0:
            states = [self._state(index) for index in range(len(self.record.entries))]  # the estimates take time, too
            chosen = next_allocation(states, self._search_seconds_left())
            if chosen is None:
                return
            expected = f"{100 * states[chosen.index].expected_improvement:.2g} %"
            label = self.record.entries[chosen.index].label
            self.on_progress(f"{label}: {chosen.seconds:.0f} s more, expected gain of another deployment {expected}")
            self._step(chosen.index, chosen.seconds)

    def _search_seconds_left(self) -> float:
        return search_seconds(self.record.budget_seconds) - self.record.spent_seconds

    def _confirm(self) -> None:
        """Confirm each searched entry; those that are left share the remaining time equally."""
        pending = [index for index, entry in enumerate(self.record.entries) if entry.state == "searched"]
        for done, index in enumerate(pending):
            left_seconds = self.record.budget_seconds - self.record.spent_seconds
            seconds = max(0.0, left_seconds) / (len(pending) - done)  # the other entries get the time that one leaves
            self.on_progress(
                f"{self.record.entries[index].label}: confirmation on fresh servers, at most {seconds:.0f} s"
            )
            self._step(index, seconds, RunMode.CONFIRM)
            entry = self.record.entries[index]
            if entry.state != "failed":
                self.on_progress(f"{entry.label}: {entry.headline}")

    def _state(self, index: int) -> EntryState:
        """Return the state of an entry. It is cached until the next step, because the estimate takes seconds."""
        if index not in self._states:
            entry = self.record.entries[index]
            run = None if entry.is_done else self._read(entry)
            if run is None:
                self._states[index] = EntryState(entry.seconds, 0.0, 0.0, is_over=True)
            else:
                started, is_over = self.clock(), entry.search_is_over
                improvement = 0.0 if is_over else self.expected_improvement(run)
                self._states[index] = EntryState(entry.seconds, _median_seconds(run.trials), improvement, is_over)
                self._update_entry(index, replace(entry, seconds=entry.seconds + self.clock() - started))
        return self._states[index]

    def _step(
        self, index: int, seconds: float, mode: RunMode = RunMode.SEARCH, max_trials: int | None = None
    ) -> None:
        """Run an entry for ``seconds`` more.

        Raises KeyboardInterrupt after recording the measurements. Raises ChangedRunError if the run of an entry that
        has not been searched was begun earlier and cannot be continued.
        """
        entry, options = self.record.entries[index], self.suite.entries[index].options
        folder, run = RunFolder(self.folder.path / entry.folder), self._read(entry)
        has_begun = is_file(folder.info)
        has_measured = run is not None and any(trial.measurements for trial in run.trials)
        limits = [limit for limit in (options.max_trials, max_trials) if limit is not None]
        # also limits the loading of a model, so all steps have the same
        budget_seconds = round(self.record.budget_seconds / len(self.record.entries), 3)
        options = replace(options, budget_seconds=budget_seconds, max_trials=min(limits, default=None))
        started, status, reason = self.clock(), "failed", ""
        try:
            # a run that measured nothing begins again, because its model may have been corrected
            _create(folder, anew=run is not None and entry.state == "waiting" and not has_measured)
            status = self.run_entry(options, folder, mode, seconds)
        except KeyboardInterrupt:
            interrupts.acknowledge()
            status = "interrupted"
        except Exception as error:  # the other entries still run
            if isinstance(error, ChangedRunError) and entry.state == "waiting" and has_begun:
                raise
            reason = self._reason(error)
        is_interrupted, used_seconds = status == "interrupted", self.clock() - started
        try:
            entry = self._entry_after(index, status, used_seconds, confirmed=mode is RunMode.CONFIRM)
        except Exception as error:  # the record of the batch must be written, and the other entries still run
            status, reason = "failed", reason or self._reason(error)
            entry = replace(entry, seconds=entry.seconds + used_seconds)
        if status == "failed":
            reason = one_line(reason, MAX_REASON_LENGTH)
            entry = replace(entry, state="failed", recommended=None, reason=reason, headline="", verdict="")
            entry = replace(entry, bounded=(), concurrency=None, request_rate=None)
            entry = replace(entry, missed_in_usual_states=None, throughput_notes=())  # notes on a recommendation
            self.on_progress(f"{entry.label}: failed: {entry.reason}")
        self._states.pop(index, None)
        self._update_entry(index, entry)
        if is_interrupted:
            raise KeyboardInterrupt

    def _reason(self, error: Exception) -> str:
        """Return why an entry failed. The traceback of a fault of tune itself is shown."""
        if isinstance(error, TuneError):
            return str(error).partition("\n")[0] + (f" (log: {error.log})" if error.log else "")
        for line in redact(traceback.format_exc()).splitlines():
            self.on_progress(line)
        return f"a fault of tune itself: {type(error).__name__}: {redact(str(error))}"

    def _entry_after(self, index: int, status: str, seconds: float, *, confirmed: bool) -> EntryRecord:
        """Return the record of an entry after a step of ``seconds``.

        Raises BadInputError if the step ended normally, but its run cannot be read.
        """
        before = self.record.entries[index]
        try:
            run = read_run(self.folder.path / before.folder)
        except BadInputError:
            if status in ("interrupted", "failed"):  # it may have no results yet
                return replace(before, seconds=before.seconds + seconds)
            raise
        if before.seconds == 0:  # downloads and builds, which happen once, are not part of the budget
            seconds -= run.info.get("times", {}).get("set_up_seconds", 0.0)
        entry = describe_entry(replace(before, seconds=before.seconds + max(0.0, seconds)), run)
        if status == "interrupted":
            return entry
        measured = len(run.trials) + sum(len(trial.measurements) for trial in run.trials)
        is_stalled = before.state != "waiting" and measured == before.measured
        is_over = is_stalled or search_is_over(run, self.suite.entries[index].options.max_trials)
        state: EntryStatus = ("found" if entry.recommended else "none") if confirmed else "searched"
        return replace(entry, state=state, search_is_over=is_over, measured=measured)

    def _read(self, entry: EntryRecord) -> FinishedRun | None:
        """Return the run of an entry; None if it has no results yet."""
        with suppress(BadInputError):
            return read_run(self.folder.path / entry.folder)
        return None

    def _update_entry(self, index: int, entry: EntryRecord) -> None:
        self._update(entries=(*self.record.entries[:index], entry, *self.record.entries[index + 1 :]))

    def _update(self, **changes: Any) -> None:
        written = time.strftime(WRITTEN_FORMAT)
        self.record = replace(self.record, written=written, **changes)
        self.folder.write(self.record)


def _create(folder: RunFolder, *, anew: bool) -> None:
    try:
        if anew:
            shutil.rmtree(folder.path)
        (folder.path / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentFault(
            f"cannot create {folder.path}: {error.strerror}; make it writable, or choose another --out"
        ) from error
