"""Run one study: suggest a candidate, deploy and measure it, store and observe the trial, confirm the best."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from optimizer.confirmation.confirmer import Confirmer, model_fitter
from optimizer.confirmation.plan import ConfirmationPlan
from optimizer.core.budget import Budget, RunMode
from optimizer.core.interfaces import ProgressObserver, Searcher, Target
from optimizer.core.notes import Note
from optimizer.core.trial import Trial
from optimizer.measure.measurer import Measurer
from optimizer.options.run_options import RunOptions
from optimizer.simulator.performance_model import compile_model
from optimizer.store.trials_table import TrialsTable
from optimizer.study.environment import ObserverFactory
from optimizer.study.run_record import RunRecord
from optimizer.study.scheduler import OtherWorkers, Scheduler, SearchEnd
from optimizer.study.task import Task
from optimizer.study.trial_runner import run_trials

# The start of Python and the report took about 2 s each on 2 cores.
START_AND_REPORT_SECONDS = 4.0
START_AND_REPORT_SHARE = 0.025  # share of a short budget


class TrialExecutor(Protocol):
    """Runs the trials of a study: on one server after another of this machine, or on the workers of a cluster."""

    @property
    def notes(self) -> Sequence[Note]:
        """Return notes for the user on the measurements so far."""

    def search(self, scheduler: Scheduler) -> list[Trial]:
        """Run the trials that ``scheduler`` chooses after those in the table. Return all trials."""

    def confirm(
        self,
        trials: list[Trial],
        budget: Budget,
        plan: ConfirmationPlan | None,
        store_plan: Callable[[ConfirmationPlan], None],
    ) -> list[Trial]:
        """Return the ``trials`` with their confirmations.

        ``plan`` is that of an earlier session, whose tests continue; None for a confirmation that begins.
        ``store_plan`` is called with the plan before the first window that depends on it.
        """


@dataclass(frozen=True)
class LocalExecutor:
    """Runs trials on ``target``, one at a time."""

    task: Task
    options: RunOptions
    target: Target
    measurer: Measurer

    @property
    def notes(self) -> tuple[Note, ...]:
        return self.measurer.notes

    def search(self, scheduler: Scheduler) -> list[Trial]:
        return run_trials(scheduler, self.target, self.measurer)

    def confirm(
        self,
        trials: list[Trial],
        budget: Budget,
        plan: ConfirmationPlan | None,
        store_plan: Callable[[ConfirmationPlan], None],
    ) -> list[Trial]:
        problem = self.task.problem
        fit = model_fitter(problem, self.options)
        confirmer = Confirmer(problem, self.target, self.measurer, budget, trials, fit, plan, store_plan)
        return confirmer.run([candidate for _, candidate in self.task.comparisons()])


@dataclass(frozen=True)
class StudySetup:
    """The task of a study and the places where it is stored.

    Attributes:
        task: The model, the problem and the requests.
        record: It writes run.json.
        table: The trials table.
        open_searcher: It yields the searcher and the other workers of the study.
        open_observer: It opens the display of progress.
        spent_seconds: Time of the budget that earlier sessions used.
        mode: Whether to search, to confirm, or both.
        confirm_seconds: Budget of a session that only continues the confirmation; None for that of the options.
    """

    task: Task
    record: RunRecord
    table: TrialsTable
    open_searcher: Callable[[], AbstractContextManager[tuple[Searcher, OtherWorkers]]]
    open_observer: ObserverFactory
    spent_seconds: float
    mode: RunMode
    confirm_seconds: float | None = None

    @property
    def remaining_seconds(self) -> float:
        """Return the time that this session has."""
        if self.confirm_seconds is not None:
            return self.confirm_seconds
        return max(self.record.environment.options.budget_seconds - self.spent_seconds, 0.0)

    def start_budget(self) -> Budget:
        """Return the budget, whose time begins now."""
        options = self.record.environment.options
        seconds, spent = options.budget_seconds, self.spent_seconds
        if self.confirm_seconds is not None:
            seconds, spent = self.confirm_seconds, 0.0
        other_seconds = min(START_AND_REPORT_SECONDS, START_AND_REPORT_SHARE * seconds)
        return Budget(seconds, options.max_trials, spent, self.mode.confirm_share, other_seconds=other_seconds)


@dataclass(frozen=True)
class StudyResult:
    """How a study ended. ``continued_by`` names the confirming worker if other workers continue the study."""

    trials: list[Trial]
    search_ended: SearchEnd
    continued_by: str = ""


def run_locally(setup: StudySetup) -> StudyResult:
    """Search, then confirm, on a target of the run's environment."""
    task, folder, environment = setup.task, setup.record.folder, setup.record.environment

    def make_executor(observer: ProgressObserver) -> LocalExecutor:
        measurer = environment.make_measurer(task, folder, setup.table, observer)
        return LocalExecutor(task, environment.options, target, measurer)

    with (
        environment.open_target(task, folder) as target,
        setup.record.recording_server_version(lambda: target.server_version),
    ):
        target.start()  # while the simulator and Optuna are loaded
        return run_study(setup, make_executor)


def run_study(setup: StudySetup, make_executor: Callable[[ProgressObserver], TrialExecutor]) -> StudyResult:
    """Search, then confirm. ``make_executor`` returns the executor of the trials.

    The record gets the notes on the measurements, also if the study is interrupted or fails.
    """
    task, record, environment = setup.task, setup.record, setup.record.environment
    stopwatch = environment.stopwatch
    if environment.options.search == "simulated":  # workers and servers start meanwhile
        with stopwatch.count("set_up"):
            compile_model(task.problem, environment.on_progress)
    budget = setup.start_budget()
    with (
        setup.open_observer(task.problem, budget, environment.hardware) as observer,
        contextlib.ExitStack() as searching,
    ):
        executor = make_executor(observer)
        searching.callback(lambda: record.add_notes(executor.notes))
        with stopwatch.count("search"):
            searcher, other_workers = searching.enter_context(setup.open_searcher())
        scheduler = Scheduler(task.problem, searcher, budget, stopwatch, task.comparisons(), other_workers)
        trials = executor.search(scheduler)
        search_ended = scheduler.search_ended
        if not (continued_by := other_workers.leave_search()):
            trials = other_workers.collect_trials(trials, setup.table)
        if setup.mode is not RunMode.SEARCH and not continued_by:
            with stopwatch.confirming():
                trials = executor.confirm(trials, budget, record.confirmation_plan(), record.write_plan)
    return StudyResult(trials, search_ended, continued_by)
