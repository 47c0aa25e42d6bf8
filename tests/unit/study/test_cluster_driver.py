"""Tests for the cluster driver on simulated workers: parallel trials, lost workers and resume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from optimizer.config.problem import Problem
from optimizer.confirmation.plan import ConfirmationPlan
from optimizer.core.budget import Budget
from optimizer.core.candidate import Candidate
from optimizer.core.notes import Note, ServedOnCpu
from optimizer.core.stopwatch import Stopwatch
from optimizer.core.trial import LoadPoint, Trial
from optimizer.measure.measurer import MAX_CRASHES
from optimizer.results.progress_observers import QuietObserver
from optimizer.search import make_searcher
from optimizer.store.run_folder import RunFolder
from optimizer.store.trials_table import TrialsTable
from optimizer.study.distributed.driver import ClusterExecutor, Driver, EventRecorder, UnfinishedTrials
from optimizer.study.distributed.messages import (
    ClusterJob,
    ConfirmationEnded,
    ConfirmationPlanned,
    ConfirmJob,
    LoadMeasured,
    SearchJob,
    TrialEnded,
)
from optimizer.study.distributed.worker_pool import ClusterNode, WorkerEvent, WorkerHandle, WorkerLost
from optimizer.study.scheduler import Scheduler
from tests.conftest import measure_known_server

BASELINE = Candidate(64)
ON_CPU = ServedOnCpu("server_sees_no_gpu")
PLAN = ConfirmationPlan(0.01, (2,))
LOADS = tuple(LoadPoint(1, concurrency) for concurrency in (4, 8, 16, 32))


@dataclass
class SimulatedWorkers:
    """A WorkerGroup. ``is_lost`` says which job loses its worker after the first measurement.

    Jobs end in the order in which they were sent, or with ``newest_first`` in the opposite order.
    """

    count: int
    is_lost: Callable[[SearchJob], bool] = lambda job: False
    confirmations_lost: int = 0
    newest_first: bool = False
    on_cpu: Collection[Candidate] = ()  # a worker that has served one of them has a note
    jobs: list[ClusterJob] = field(default_factory=list)
    notes: Sequence[Note] = ()

    def __post_init__(self) -> None:
        self.handles = [
            WorkerHandle(None, ClusterNode(str(number), "host", 1, 0), "ready") for number in range(self.count)
        ]
        self._busy: list[tuple[WorkerHandle, ClusterJob]] = []

    def ready(self) -> list[WorkerHandle]:
        return self.handles

    def send(self, worker: WorkerHandle, job: ClusterJob) -> None:
        assert worker not in [other for other, _ in self._busy]
        self.jobs.append(job)
        self._busy.append((worker, job))

    def poll_events(self) -> list[tuple[WorkerHandle, WorkerEvent]]:
        worker, job = self._busy.pop(-1 if self.newest_first else 0)
        if isinstance(job, ConfirmJob):
            self.confirmations_lost -= 1
            is_lost = self.confirmations_lost >= 0
            ended = WorkerLost("killed") if is_lost else ConfirmationEnded(job.trials, (), "2.51")
            return [(worker, ConfirmationPlanned(PLAN)), (worker, ended)]
        events: list[WorkerEvent] = []
        trial = job.trial
        for load in LOADS[len(trial.measurements) :]:
            measured = measure_known_server(trial.candidate, load.concurrency, 1)
            events.append(LoadMeasured(trial, load, measured, None))
            trial = replace(trial, measurements=(*trial.measurements, (load, measured)))
            if self.is_lost(job):
                self.handles[self.handles.index(worker)] = WorkerHandle(None, worker.node, "ready")
                return [(worker, event) for event in (*events, WorkerLost("killed"))]
        return [(worker, event) for event in (*events, TrialEnded(trial, "", {}, self._notes(trial), "2.51"))]

    def _notes(self, trial: Trial) -> tuple[Note, ...]:
        return (ON_CPU,) if trial.candidate in self.on_cpu else ()


@dataclass
class DriverSetup:
    problem: Problem
    folder: RunFolder

    def driver(self, workers: SimulatedWorkers, max_trials: int = 10, search: str = "random") -> Driver:
        searcher = make_searcher(search, self.problem, storage=str(self.folder.study))
        budget, plain = Budget(600, max_trials), Candidate(64, True)
        scheduler = Scheduler(
            self.problem, searcher, budget, Stopwatch(), (("baseline", BASELINE), ("dynamic_batching", plain))
        )
        return Driver(workers, scheduler, self.recorder())

    def recorder(self) -> EventRecorder:
        return EventRecorder(TrialsTable(self.folder.trials, "known", {}), QuietObserver(), self.folder, print)


@pytest.fixture
def setup(problem: Problem, tmp_path: Path) -> DriverSetup:
    (tmp_path / "logs").mkdir()
    return DriverSetup(problem, RunFolder(tmp_path))


def test_no_configuration_is_tried_twice(setup: DriverSetup) -> None:
    workers = SimulatedWorkers(4)
    trials = setup.driver(workers).run()
    assert [trial.number for trial in trials] == list(range(10))
    assert len({trial.candidate for trial in trials}) == len(workers.jobs) == 10
    assert trials[0].candidate == BASELINE
    assert setup.recorder().table.read() == trials
    assert UnfinishedTrials(setup.folder.path).read() == set()


def test_measurements_of_workers_get_the_forecasts_of_the_driver(setup: DriverSetup) -> None:
    trials = setup.driver(SimulatedWorkers(2), max_trials=6, search="simulated").run()
    assert len(trials) > 4
    assert setup.recorder().table.read() == trials
    for trial in trials:
        forecasts = [measurement.forecast for _, measurement in trial.measurements]
        assert all(forecasts) is (trial.number > 0), "the first trial has nothing to learn from"


def test_each_configuration_is_tried_once_until_none_is_left(setup: DriverSetup) -> None:
    """This includes trials that run from the first to the last moment."""
    trials = setup.driver(SimulatedWorkers(4, newest_first=True), max_trials=100).run()
    canonical = setup.problem.space.canonical
    assert len({canonical(trial.candidate) for trial in trials}) == len(trials) == len(setup.problem.space)


def test_a_lost_trial_continues_with_its_measurements(setup: DriverSetup) -> None:
    sent = Counter[int]()

    def is_lost(job: SearchJob) -> bool:
        return job.trial.number in (0, 3) and len(job.trial.measurements) == 0

    workers = SimulatedWorkers(3, is_lost)
    trials = setup.driver(workers).run()
    for job in workers.jobs:
        assert isinstance(job, SearchJob)
        sent[job.trial.number] += 1
        assert len(job.trial.measurements) == sent[job.trial.number] - 1
    assert {number for number, times in sent.items() if times == 2} == {0, 3}
    assert all(trial.status == "ok" and len(trial.measurements) == len(LOADS) for trial in trials)
    assert setup.recorder().table.read() == trials


def test_a_trial_that_kills_each_worker_fails(setup: DriverSetup) -> None:
    workers = SimulatedWorkers(2, lambda job: job.trial.number == 1)
    trials = setup.driver(workers).run()
    numbers = [job.trial.number for job in workers.jobs if isinstance(job, SearchJob)]
    assert numbers.count(1) == MAX_CRASHES
    assert [trial.number for trial in trials if trial.status == "failed"] == [1]
    assert trials[1].reason == f"its worker was lost {MAX_CRASHES} times: killed"
    assert trials[1].measurements == ()
    assert setup.recorder().table.read() == trials


def test_several_unfinished_trials_are_resumed(setup: DriverSetup) -> None:
    recorder = setup.recorder()
    for number, candidate in ((0, BASELINE), (2, Candidate(16)), (4, Candidate(4))):
        recorder.table.append(Trial(number, candidate), LOADS[0], measure_known_server(candidate, 4, 1))
    UnfinishedTrials(setup.folder.path).write([2, 3, 4])
    workers = SimulatedWorkers(2)
    trials = setup.driver(workers, max_trials=6).run()
    begun = [(job.role, job.trial.number) for job in workers.jobs if isinstance(job, SearchJob)]
    assert begun[:2] == [("resumed", 2), ("resumed", 4)]
    assert sorted(number for _, number in begun[2:]) == [5, 6, 7]
    assert [trial.number for trial in trials] == [0, 2, 4, 5, 6, 7]
    assert len({trial.candidate for trial in trials}) == 6


def test_a_note_of_the_search_is_kept_whichever_worker_confirms(setup: DriverSetup) -> None:
    workers = SimulatedWorkers(2, on_cpu=[BASELINE])
    driver = setup.driver(workers, max_trials=2)
    trials = driver.run()
    assert driver.recorder.notes == (ON_CPU,)
    workers.handles.reverse()
    executor = ClusterExecutor(workers, driver.recorder)
    executor.confirm(trials, Budget(600), None, print)
    assert executor.notes == (ON_CPU,)


@pytest.mark.parametrize(("lost", "notes"), [(0, 0), (MAX_CRASHES - 1, 0), (MAX_CRASHES, 1)])
def test_the_confirmation_continues_on_another_worker(setup: DriverSetup, lost: int, notes: int) -> None:
    workers, trials = SimulatedWorkers(2, confirmations_lost=lost), [Trial(0, BASELINE), Trial(2, Candidate(4))]
    recorded = list[ConfirmationPlan]()
    executor = ClusterExecutor(workers, setup.recorder())
    assert executor.confirm(trials, Budget(600), None, recorded.append) == trials
    assert len(workers.jobs) == min(lost + 1, MAX_CRASHES)
    plans = [job.plan for job in workers.jobs if isinstance(job, ConfirmJob)]
    assert plans == [None, *(len(plans) - 1) * [PLAN]], "the next worker continues the plan"
    assert recorded == len(plans) * [PLAN]
    assert len(executor.notes) == notes
