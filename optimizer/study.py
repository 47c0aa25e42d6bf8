"""One study, and how it is run on this machine: searched, then confirmed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optimizer.batcher.ahead import compile_ahead
from optimizer.budget import Budget
from optimizer.confirm.confirmer import Confirmer
from optimizer.interfaces import Searcher
from optimizer.machine.speed import SpeedLog
from optimizer.sharing.others import Nobody
from optimizer.stack import Stack, WatcherMaker
from optimizer.store.run_record import RunRecord
from optimizer.store.trials_table import TrialsTable
from optimizer.task import Task
from optimizer.trial import Trial
from optimizer.tuner import Tuner

if TYPE_CHECKING:
    from optimizer.sharing.shared_study import SharedStudy


@dataclass(frozen=True)
class Study:
    """What is searched, and where that is kept. ``search`` opens what proposes its trials, and the study where other
    workers share it. ``spent_seconds`` of its budget are those of earlier sessions; ``confirm_share`` of it is kept
    for the confirmation."""

    what: Task
    record: RunRecord
    table: TrialsTable
    search: Callable[[], AbstractContextManager[tuple[Searcher, SharedStudy | None]]]
    watch: WatcherMaker
    spent_seconds: float
    confirm_share: float

    def prepare(self, stack: Stack) -> None:
        """What may be made ready while something else is."""
        if stack.options.search == "simulated":
            with stack.stopwatch.set_up():
                compile_ahead(stack.say)

    def budget(self, at_once: int = 1) -> Budget:
        """Of so many trials at the same time."""
        options = self.record.options
        spent = self.spent_seconds / at_once
        return Budget(options.budget_seconds, options.max_trials, spent, self.confirm_share)


@dataclass(frozen=True)
class Found:
    """All trials; whether the searcher ended the search, not the budget; what the user should know of it; and who
    confirms, where other workers go on with the study."""

    trials: list[Trial]
    satisfied: bool
    notes: tuple[str, ...]
    handed_on: str = ""


def run_here(stack: Stack, study: Study) -> Found:
    """Search, then confirm, with ``stack``."""
    what, stopwatch, folder = study.what, stack.stopwatch, study.record.folder
    with contextlib.closing(stack.target(what, folder)) as target, study.record.naming(target):
        target.start()  # while the simulator and Optuna are loaded
        study.prepare(stack)
        budget = study.budget()
        with study.watch(what.problem, budget, stack.hardware) as watcher, contextlib.ExitStack() as joined:
            measuring = stack.measuring(what, folder, study.table, watcher)
            with stopwatch.searching():
                searcher, shared = joined.enter_context(study.search())
            tuner = Tuner(what.problem, searcher, target, measuring, budget, stopwatch, shared or Nobody())
            trials, speed = tuner.run(what.comparisons()), SpeedLog()
            handed_on = shared.hand_on() if shared else ""
            if shared and not handed_on:
                trials = shared.gathered(trials, study.table)
            if study.confirm_share > 0 and not handed_on:
                with stopwatch.confirming():
                    confirmer = Confirmer(what.problem, target, measuring, budget, trials, speed.probe)
                    trials = confirmer.run(what.baseline)
    return Found(trials, tuner.satisfied, (measuring.guard.note, speed.note()), handed_on)
