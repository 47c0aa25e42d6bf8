"""Tests for a study whose trials run on a server of the test."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optimizer.config.problem import Problem
from optimizer.core.budget import Budget, RunMode, SpentTime
from optimizer.core.candidate import Candidate
from optimizer.core.notes import Note, ServedOnCpu
from optimizer.core.stopwatch import Stopwatch
from optimizer.core.trial import Trial
from optimizer.options.run_options import RunOptions
from optimizer.results.progress_observers import Progress, QuietObserver
from optimizer.store.run_folder import RunFolder
from optimizer.store.trials_table import TrialsTable
from optimizer.study.run_record import RunRecord
from optimizer.study.scheduler import Scheduler
from optimizer.study.study import StudySetup, run_study

ON_CPU = ServedOnCpu("server_sees_no_gpu")


class Executor:
    """A TrialExecutor that has one trial. ``interrupted`` names the step that is interrupted."""

    def __init__(self, interrupted: str = "") -> None:
        self.interrupted = interrupted
        self.steps: list[str] = []
        self.notes: tuple[Note, ...] = ()

    def search(self, scheduler: Scheduler) -> list[Trial]:
        self._run("search")
        return scheduler.trials

    def confirm(self, trials: list[Trial], budget: Budget, plan: object, record: Callable[..., None]) -> list[Trial]:
        self._run("confirm")
        return trials

    def _run(self, step: str) -> None:
        self.steps.append(step)
        self.notes = (ON_CPU,)
        if step == self.interrupted:
            raise KeyboardInterrupt


def setup_of(problem: Problem, folder: Path, mode: RunMode, **fields: Any) -> StudySetup:
    environment = SimpleNamespace(
        options=RunOptions("known", search="random", budget_seconds=100.0),
        stopwatch=Stopwatch(),
        hardware=None,
    )
    task: Any = SimpleNamespace(problem=problem, comparisons=lambda: [("baseline", Candidate(1))])
    record = RunRecord(RunFolder(folder), environment, task, None, (), spent=SpentTime(40.0))  # type: ignore[arg-type]
    return StudySetup(
        record,
        TrialsTable(folder / "trials.csv", "known", {}),
        None,
        Progress(print, lambda *_: QuietObserver()),
        mode=mode,
        **fields,
    )


@pytest.mark.parametrize("interrupted", ["search", "confirm"])
def test_an_interrupted_study_keeps_its_notes(problem: Problem, tmp_path: Path, interrupted: str) -> None:
    setup, executor = setup_of(problem, tmp_path, RunMode.SEARCH_AND_CONFIRM), Executor(interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_study(setup, lambda _: executor)
    assert setup.record.notes == (ON_CPU,)


def test_garbage_collections_leave_out_the_modules_until_the_study_ends(problem: Problem, tmp_path: Path) -> None:
    frozen: list[int] = []

    class Counting(Executor):
        def _run(self, step: str) -> None:
            frozen.append(gc.get_freeze_count())
            super()._run(step)

    with pytest.raises(KeyboardInterrupt):
        run_study(setup_of(problem, tmp_path, RunMode.SEARCH_AND_CONFIRM), lambda _: Counting("confirm"))
    assert min(frozen) > len(gc.get_objects(generation=0))
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize(
    ("mode", "steps"),
    [
        (RunMode.SEARCH_AND_CONFIRM, ["search", "confirm"]),
        (RunMode.SEARCH, ["search"]),
        (RunMode.CONFIRM, ["search", "confirm"]),  # its search has no time, and only reads the stored trials
    ],
)
def test_the_mode_says_whether_a_study_confirms(
    problem: Problem, tmp_path: Path, mode: RunMode, steps: list[str]
) -> None:
    executor = Executor()
    run_study(setup_of(problem, tmp_path, mode), lambda _: executor)
    assert executor.steps == steps


@pytest.mark.parametrize(
    ("mode", "session_seconds", "search_seconds", "seconds"),
    [
        (RunMode.SEARCH_AND_CONFIRM, None, 20.0, 57.5),
        (RunMode.SEARCH, None, 60.0, 57.5),
        (RunMode.CONFIRM, None, -40.0, 57.5),
        (RunMode.CONFIRM, 80.0, 0.0, 78.0),
        (RunMode.SEARCH, 80.0, 80.0, 78.0),
    ],
)
def test_the_budget_is_divided(
    problem: Problem,
    tmp_path: Path,
    mode: RunMode,
    session_seconds: float | None,
    search_seconds: float,
    seconds: float,
) -> None:
    budget = setup_of(problem, tmp_path, mode, session_seconds=session_seconds).start_budget()
    assert budget.search_seconds_left() == pytest.approx(search_seconds, abs=0.5)
    assert budget.seconds_left() == pytest.approx(seconds, abs=0.5)
