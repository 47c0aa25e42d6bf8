"""Many trials at a time, on workers that are played: none is tried twice, and what is lost runs again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from optimizer.budget import Budget
from optimizer.cluster.confirming import Confirming
from optimizer.cluster.driver import Driver
from optimizer.cluster.events import Confirmed, Ended, Measured
from optimizer.cluster.jobs import ConfirmJob, Job, SearchJob
from optimizer.cluster.keeper import Keeper
from optimizer.cluster.place import Happening, Lost, Place
from optimizer.cluster.share import Node
from optimizer.cluster.unfinished import Unfinished
from optimizer.course import Course
from optimizer.crashes import CRASHES
from optimizer.problem import Problem
from optimizer.report.live import QuietWatcher
from optimizer.search import make_searcher
from optimizer.stopwatch import Stopwatch
from optimizer.store.run_folder import RunFolder
from optimizer.store.trials_table import TrialsTable
from optimizer.trial import Candidate, LoadPoint, Trial
from tests.conftest import known_server

BASELINE = Candidate(64)
LOADS = tuple(LoadPoint(1, concurrency) for concurrency in (4, 8, 16, 32))


@dataclass
class Played:
    """Workers of which ``is_lost`` says which loses its trial after the first measurement. The first that was sent
    work has done it first, or last."""

    count: int
    is_lost: Callable[[SearchJob], bool] = lambda job: False
    confirmations_lost: int = 0
    newest_first: bool = False
    jobs: list[Job] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.places = [Place(None, Node(str(number), "host", 1, 0), "ready") for number in range(self.count)]
        self._at_work: list[tuple[Place, Job]] = []

    def ready(self) -> list[Place]:
        return self.places

    def send(self, place: Place, job: Job) -> None:
        assert place not in [other for other, _ in self._at_work]
        self.jobs.append(job)
        self._at_work.append((place, job))

    def happened(self) -> list[tuple[Place, Happening]]:
        place, job = self._at_work.pop(-1 if self.newest_first else 0)
        if isinstance(job, ConfirmJob):
            self.confirmations_lost -= 1
            return [(place, Lost("killed") if self.confirmations_lost >= 0 else Confirmed(job.trials, (), "2.51"))]
        told: list[Happening] = []
        trial = job.trial
        for load in LOADS[len(trial.measurements) :]:
            measured = known_server(trial.candidate, load.concurrency, 1)
            told.append(Measured(trial, load, measured, None))
            trial = replace(trial, measurements=(*trial.measurements, (load, measured)))
            if self.is_lost(job):
                self.places[self.places.index(place)] = Place(None, place.node, "ready")
                return [(place, one) for one in (*told, Lost("killed"))]
        return [(place, one) for one in (*told, Ended(trial, "", {}, "2.51"))]


@dataclass
class Bench:
    problem: Problem
    folder: RunFolder

    def driver(self, crew: Played, max_trials: int = 10) -> Driver:
        searcher = make_searcher("random", self.problem, storage=str(self.folder.study))
        comparisons = [("baseline", BASELINE), ("dynamic_batching", Candidate(64, True))]
        course = Course(self.problem, searcher, Budget(600, max_trials), Stopwatch(), comparisons)
        return Driver(crew, course, self.keeper())

    def keeper(self) -> Keeper:
        return Keeper(TrialsTable(self.folder.trials, "known", {}), QuietWatcher(), self.folder, print)


@pytest.fixture
def bench(problem: Problem, tmp_path: Path) -> Bench:
    (tmp_path / "logs").mkdir()
    return Bench(problem, RunFolder(tmp_path))


def test_no_configuration_is_tried_twice(bench: Bench) -> None:
    crew = Played(4)
    trials = bench.driver(crew).run()
    assert [trial.number for trial in trials] == list(range(10))
    assert len({trial.candidate for trial in trials}) == len(crew.jobs) == 10
    assert trials[0].candidate == BASELINE
    assert bench.keeper().table.read() == trials
    assert Unfinished(bench.folder.path).read() == set()


def test_each_configuration_is_tried_once_until_none_is_left(bench: Bench) -> None:
    """What runs from the beginning to the end, too."""
    trials = bench.driver(Played(4, newest_first=True), max_trials=100).run()
    canonical = bench.problem.space.canonical
    assert len({canonical(trial.candidate) for trial in trials}) == len(trials) == len(bench.problem.space)


def test_a_lost_trial_goes_on_where_it_was(bench: Bench) -> None:
    sent = Counter[int]()

    def is_lost(job: SearchJob) -> bool:
        return job.trial.number in (0, 3) and len(job.trial.measurements) == 0

    crew = Played(3, is_lost)
    trials = bench.driver(crew).run()
    for job in crew.jobs:
        assert isinstance(job, SearchJob)
        sent[job.trial.number] += 1
        assert len(job.trial.measurements) == sent[job.trial.number] - 1
    assert {number for number, times in sent.items() if times == 2} == {0, 3}
    assert all(trial.status == "ok" and len(trial.measurements) == len(LOADS) for trial in trials)
    assert bench.keeper().table.read() == trials


def test_what_kills_each_worker_has_failed(bench: Bench) -> None:
    crew = Played(2, lambda job: job.trial.number == 1)
    trials = bench.driver(crew).run()
    numbers = [job.trial.number for job in crew.jobs if isinstance(job, SearchJob)]
    assert numbers.count(1) == CRASHES
    assert [trial.number for trial in trials if trial.status == "failed"] == [1]
    assert trials[1].reason == f"its worker was lost {CRASHES} times: killed"
    assert trials[1].measurements == ()
    assert bench.keeper().table.read() == trials


def test_several_unfinished_trials_are_gone_on_with(bench: Bench) -> None:
    keeper = bench.keeper()
    for number, candidate in ((0, BASELINE), (2, Candidate(16)), (4, Candidate(4))):
        keeper.table.append(Trial(number, candidate), LOADS[0], known_server(candidate, 4, 1))
    Unfinished(bench.folder.path).write([2, 3, 4])
    crew = Played(2)
    trials = bench.driver(crew, max_trials=6).run()
    begun = [(job.role, job.trial.number) for job in crew.jobs if isinstance(job, SearchJob)]
    assert begun[:2] == [("resumed", 2), ("resumed", 4)]
    assert sorted(number for _, number in begun[2:]) == [5, 6, 7]
    assert [trial.number for trial in trials] == [0, 2, 4, 5, 6, 7]
    assert len({trial.candidate for trial in trials}) == 6


@pytest.mark.parametrize(("lost", "notes"), [(0, 0), (CRASHES - 1, 0), (CRASHES, 1)])
def test_the_confirmation_goes_on_elsewhere(bench: Bench, lost: int, notes: int) -> None:
    crew, trials = Played(2, confirmations_lost=lost), [Trial(0, BASELINE), Trial(2, Candidate(4))]
    confirming = Confirming(crew, bench.keeper(), Budget(600))
    assert confirming.run(trials) == trials
    assert len(crew.jobs) == min(lost + 1, CRASHES)
    assert len(confirming.notes) == notes
