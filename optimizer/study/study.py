"""Run one study: suggest a candidate, deploy and measure it, store and observe the trial, confirm the best.

The searcher is opened on the Optuna study of the run, which may be one that several workers share.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from optimizer.confirmation.confirmer import Confirmer, model_fitter
from optimizer.confirmation.plan import ConfirmationPlan
from optimizer.core.budget import Budget, RunMode
from optimizer.core.interfaces import ProgressObserver, Searcher, Target
from optimizer.core.notes import Note
from optimizer.core.trial import Trial
from optimizer.machine.hardware import Fingerprint
from optimizer.measure.measurer import Measurer
from optimizer.options.run_options import RunOptions
from optimizer.results.comparison import request_conditions
from optimizer.search import make_searcher, make_searcher_for_study
from optimizer.simulator.performance_model import compile_model
from optimizer.store.run_folder import HASH_DIGITS, MODEL_HASH, RunFolder
from optimizer.store.trials_table import TrialsTable
from optimizer.study.run_record import RunRecord
from optimizer.study.scheduler import OtherWorkers, Scheduler, SearchEnd
from optimizer.study.task import Task
from optimizer.study.trial_runner import run_trials

if TYPE_CHECKING:
    from optimizer.results.progress_observers import Progress
    from optimizer.search.transfer import TransferredStudy

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
    """A study and the places where it is stored.

    Attributes:
        record: It has the task, and writes run.json.
        table: The trials table.
        transferred: The trials of the study that ``--warm-start`` names; None without it.
        progress: It shows the progress.
        mode: Whether to search, to confirm, or both.
        session_seconds: Time of this session; None for what earlier ones left of the budget of the options.
    """

    record: RunRecord
    table: TrialsTable
    transferred: TransferredStudy | None
    progress: Progress
    mode: RunMode
    session_seconds: float | None = None

    @property
    def _seconds(self) -> tuple[float, float]:
        """The time of the budget, and what earlier sessions spent of it."""
        if self.session_seconds is not None:
            return self.session_seconds, 0.0
        return self.record.environment.options.budget_seconds, self.record.spent.seconds

    @property
    def remaining_seconds(self) -> float:
        """The time that this session has."""
        seconds, spent = self._seconds
        return max(seconds - spent, 0.0)

    def start_budget(self) -> Budget:
        """Return the budget, whose time begins now."""
        seconds, spent = self._seconds
        max_trials = self.record.environment.options.max_trials
        other_seconds = min(START_AND_REPORT_SECONDS, START_AND_REPORT_SHARE * seconds)
        return Budget(seconds, max_trials, spent, self.mode.confirm_share, other_seconds=other_seconds)


@dataclass(frozen=True)
class StudyResult:
    """How a study ended.

    Attributes:
        trials: All trials, with their confirmations.
        search_ended: Why the search ended.
        continued_by: The confirming worker if other workers continue the study; otherwise empty.
        seconds_left: The time of the budget that was left; negative if the last measurement exceeded it.
    """

    trials: list[Trial]
    search_ended: SearchEnd
    continued_by: str = ""
    seconds_left: float = 0.0


def run_locally(setup: StudySetup) -> StudyResult:
    """Search, then confirm, on a target of the run's environment."""
    task, folder, environment = setup.record.task, setup.record.folder, setup.record.environment

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
    task, record, environment = setup.record.task, setup.record, setup.record.environment
    stopwatch = environment.stopwatch
    if environment.options.search == "simulated":  # workers and servers start meanwhile
        with stopwatch.count("set_up"):
            compile_model(task.problem, environment.on_progress)
    budget = setup.start_budget()
    with (
        setup.progress.open_observer(task.problem, budget, environment.hardware) as observer,
        contextlib.ExitStack() as searching,
    ):
        # Garbage collections of the study leave out the modules, which they would search for 0.1 s each time.
        gc.freeze()
        searching.callback(gc.unfreeze)
        executor = make_executor(observer)
        searching.callback(lambda: record.add_notes(executor.notes))
        with stopwatch.count("search"):
            searcher, other_workers = searching.enter_context(open_searcher(record, setup.transferred))
        scheduler = Scheduler(task.problem, searcher, budget, stopwatch, task.comparisons(), other_workers)
        trials = executor.search(scheduler)
        search_ended = scheduler.search_ended
        if not (continued_by := other_workers.leave_search()):
            trials = other_workers.collect_trials(trials, setup.table)
        if setup.mode is not RunMode.SEARCH and not continued_by:
            with stopwatch.confirming():
                trials = executor.confirm(trials, budget, record.confirmation_plan(), record.write_plan)
        seconds_left = budget.seconds_left()
    return StudyResult(trials, search_ended, continued_by, seconds_left)


def _shared_conditions(options: RunOptions, task: Task) -> dict[str, str | None]:
    """Return the conditions that all workers of a shared study have to share; empty for a study of one run.

    An unknown condition is None and agrees with any other.
    """
    if options.study_name is None:
        return {}
    model = task.source.facts.get(MODEL_HASH)  # that of a remote server is not known
    return {
        MODEL_HASH: str(model)[:HASH_DIGITS] if model else None,
        **request_conditions(options, task.input_data.name, task.source.concurrent),
    }


def check_stored_study(options: RunOptions, task: Task, folder: RunFolder, fingerprint: Fingerprint) -> None:
    """Raise a TuneError if ``open_searcher`` would refuse the study of the run in ``folder``."""
    from optimizer.search.optuna_samplers import sampler_for  # imports Optuna
    from optimizer.store.optuna_study import check_study

    storage, name = options.storage or str(folder.study), options.study_name or folder.study_name
    sampler = sampler_for(options.search, options.seed)
    check_study(storage, name, task.problem, sampler, fingerprint, _shared_conditions(options, task))


@contextlib.contextmanager
def open_searcher(record: RunRecord, transferred: TransferredStudy | None) -> Iterator[tuple[Searcher, OtherWorkers]]:
    """Yield the searcher of a run, and the other workers of its study. Raises TuneError.

    The study is in the folder of the run, or in the storage that its options name. A study that was measured with
    another fingerprint is refused. A faulty storage is retried until the end of the budget. ``transferred`` is as in
    ``StudySetup``.
    """
    options, problem, folder = record.environment.options, record.task.problem, record.folder
    if options.study_name is not None:
        from optimizer.store.optuna_storage import RetryPolicy
        from optimizer.store.optuna_study import StudySharing
        from optimizer.study.distributed.shared_study import join

        until = time.monotonic() + options.budget_seconds - record.spent.seconds
        sharing = StudySharing(RetryPolicy(until, record.environment.on_progress, str(folder.trials)))
        conditions = _shared_conditions(options, record.task)
        with join(options, problem, folder, record.fingerprint, sharing, conditions) as shared:
            yield make_searcher_for_study(shared.tracker, options.search, options.seed, transferred), shared
        return
    searcher = make_searcher(
        options.search,
        problem,
        options.seed,
        options.storage or str(folder.study),
        folder.study_name,
        fingerprint=record.fingerprint,
        transferred=transferred,
    )
    yield searcher, OtherWorkers()
