"""Runs one study: suggest a candidate, deploy and measure it, store and observe the trial, confirm the best."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from optimizer.config.search_space import Problem
from optimizer.confirmation.confirmer import Confirmer, model_fitter
from optimizer.core.budget import Budget
from optimizer.core.interfaces import Searcher, Target
from optimizer.core.notes import Note
from optimizer.core.stopwatch import Stopwatch
from optimizer.core.trial import Candidate, Trial
from optimizer.measure.measurer import Measurer
from optimizer.simulator.performance_model import compile_model
from optimizer.store.trials_table import TrialsTable
from optimizer.study.environment import Environment, ObserverFactory
from optimizer.study.run_record import RunRecord
from optimizer.study.scheduler import NoOtherWorkers, OtherWorkers, Scheduler, SearchEnd
from optimizer.study.task import Task
from optimizer.study.trial_runner import TrialRunner

if TYPE_CHECKING:
    from optimizer.study.distributed.shared_study import SharedStudy

# The start of Python and the report took 2 s each on 2 cores (benchmarks/real_verdicts.md).
START_AND_REPORT_SECONDS = 4.0
START_AND_REPORT_SHARE = 0.025  # of a short budget


@dataclass
class Tuner:
    """Searches one study, one trial at a time. Only this class uses searcher, target and load generator together.

    ``run`` sets ``scheduler``, which knows the best point so far and why the search is over.
    """

    problem: Problem
    searcher: Searcher
    target: Target
    measurer: Measurer
    budget: Budget
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    others: OtherWorkers = field(default_factory=NoOtherWorkers)
    scheduler: Scheduler = field(init=False)

    def run(self, comparisons: Sequence[tuple[str, Candidate]]) -> list[Trial]:
        """Measure ``comparisons`` (role, candidate), then search until searcher or budget end it. Return all trials.

        The search continues where the trials table ends. All measurements are in the table, whatever stops it.
        """
        scheduler = Scheduler(self.problem, self.searcher, self.budget, self.stopwatch, comparisons, self.others)
        self.scheduler = scheduler
        self.measurer.with_forecast = scheduler.with_forecast  # a copy would have notes of its own
        runner = TrialRunner(
            self.target, self.measurer, scheduler.baseline, self.budget.search_seconds_left, self.stopwatch
        )
        earlier = self.measurer.table.read()
        unfinished = earlier.pop() if earlier else None
        scheduler.resume(earlier)
        scheduled = scheduler.resume_unfinished(unfinished) if unfinished else scheduler.next_or_wait()
        while scheduled is not None:
            role, trial = scheduled
            trial = runner.run(trial, role, scheduler.rules(trial.candidate))
            scheduler.finished(trial, runner.log)
            self.measurer.observer.trial_finished(trial, scheduler.best())
            scheduled = scheduler.next_or_wait()
        return scheduler.trials


@dataclass(frozen=True)
class StudySetup:
    """The task of a study and the places where it is stored.

    ``open_searcher`` yields the searcher, and the shared study if there are other workers. Earlier sessions used
    ``spent_seconds`` of the budget; ``confirm_share`` of it is reserved for the confirmation. ``confirm_seconds`` is
    the time of a session that only continues the confirmation, and None for any other.
    """

    task: Task
    record: RunRecord
    table: TrialsTable
    open_searcher: Callable[[], AbstractContextManager[tuple[Searcher, SharedStudy | None]]]
    open_observer: ObserverFactory
    spent_seconds: float
    confirm_share: float
    confirm_seconds: float | None = None

    def compile_simulator(self, environment: Environment) -> None:
        """Compile the simulator if the search needs it; workers and servers start meanwhile."""
        if environment.options.search == "simulated":
            with environment.stopwatch.count("set_up"):
                compile_model(self.task.problem, environment.say)

    def budget(self, at_once: int = 1) -> Budget:
        """Return the budget. Earlier time is divided by ``at_once``, the number of parallel trials."""
        options = self.record.environment.options
        seconds, spent, confirm_share = options.budget_seconds, self.spent_seconds / at_once, self.confirm_share
        if self.confirm_seconds is not None:
            seconds, spent, confirm_share = self.confirm_seconds, 0.0, 1.0
        other_seconds = min(START_AND_REPORT_SECONDS, START_AND_REPORT_SHARE * seconds)
        return Budget(seconds, options.max_trials, spent, confirm_share, other_seconds=other_seconds)


@dataclass(frozen=True)
class StudyResult:
    """How a study ended. ``continued_by`` names the confirming worker if other workers continue the study."""

    trials: list[Trial]
    search_ended: SearchEnd
    notes: tuple[Note, ...]
    continued_by: str = ""


def run_locally(environment: Environment, setup: StudySetup) -> StudyResult:
    """Search, then confirm, on the target of ``environment``, which is closed afterwards."""
    task, stopwatch, folder = setup.task, environment.stopwatch, setup.record.folder
    with environment.closed_at_end():
        target = environment.make_target(task, folder)
        with setup.record.adding_version(target):
            target.start()  # while the simulator and Optuna are loaded
            setup.compile_simulator(environment)
            budget = setup.budget()
            with (
                setup.open_observer(task.problem, budget, environment.hardware) as observer,
                contextlib.ExitStack() as searching,
            ):
                measurer = environment.make_measurer(task, folder, setup.table, observer)
                with stopwatch.count("search"):
                    searcher, shared = searching.enter_context(setup.open_searcher())
                others = shared or NoOtherWorkers()
                tuner = Tuner(task.problem, searcher, target, measurer, budget, stopwatch, others)
                trials = tuner.run(task.comparisons())
                search_ended = tuner.scheduler.search_ended
                continued_by = shared.leave_search() if shared else ""
                if shared and not continued_by:
                    trials = shared.collect_trials(trials, setup.table)
                if setup.confirm_share > 0 and not continued_by:
                    with stopwatch.confirming():
                        fit = model_fitter(task.problem, environment.options)
                        plan, record = setup.record.confirmation_plan(), setup.record.write_plan
                        confirmer = Confirmer(task.problem, target, measurer, budget, trials, fit, plan, record)
                        trials = confirmer.run([candidate for _, candidate in task.comparisons()])
    return StudyResult(trials, search_ended, measurer.notes, continued_by)
