"""``tune --join``: workers of one study, each a process, on a PostgreSQL server and a recorded table."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import optuna
import pytest

from optimizer.arguments.run import read_run_arguments
from optimizer.errors import BadInputError, EnvironmentFault
from optimizer.options import RunOptions
from optimizer.problem import Problem
from optimizer.search.entries import ABANDONED
from optimizer.search.result import REASON, finished_trials
from optimizer.sharing.join import join
from optimizer.sharing.shared_study import SharedStudy
from optimizer.sharing.workers import HOST, LIVES, ROLE, SEARCH
from optimizer.space import Space
from optimizer.store.patience import Patience
from optimizer.store.run_folder import RunFolder
from optimizer.store.study import Shared
from optimizer.trial import Candidate, LoadPoint, Trial
from tests import shared_run
from tests.command_fixtures import eventually
from tests.conftest import known_server
from tests.recorded_fixtures import RecordedProcess, record, rows, started
from tests.recorded_run import RESULT
from tests.storage_fixtures import PostgreSQL, postgresql

__all__ = ["postgresql"]

START_SECONDS = 30.0
PASSWORD = "geheim"
SPACE = Space(max_batch_size=(1, 4, 16), max_queue_delay_us=("off", 0, 1000))
CANDIDATES, LOADS = 5, (1, 4, 8)


class Workers:
    """Those of one study; each has a folder of its own."""

    def __init__(self, place: Path, url: str) -> None:
        self.table, self.url, self._place = place / "recorded.csv", url, place
        record(self.table, SPACE, LOADS)
        self.folders: list[Path] = []
        self.processes: list[RecordedProcess] = []

    def start(self, *options: str) -> RecordedProcess:
        self.folders.append(self._place / f"worker{len(self.folders)}")
        self.folders[-1].mkdir()
        return self.resume(self.folders[-1], *options)

    def resume(self, folder: Path, *options: str) -> RecordedProcess:
        words = [str(self.table), str(folder), self.url, self._place.name, *options]
        self.processes.append(started(shared_run.main, words, self._place))
        return self.processes[-1]

    def study(self) -> optuna.Study:
        url = self.url.replace("postgresql://", "postgresql+psycopg://")
        return optuna.load_study(study_name=self._place.name, storage=url)

    def confirmed(self) -> list[Path]:
        return [folder for folder in self.folders if (folder / RESULT).exists()]


@pytest.fixture
def workers(tmp_path: Path, postgresql: PostgreSQL) -> Iterator[Workers]:
    found = Workers(tmp_path, postgresql.url(PASSWORD))
    yield found
    for process in found.processes:
        process.kill()


def trials_in(folder: Path) -> list[str]:
    """One a trial of the table, in its order: what it tried."""
    named = ("max_batch_size", "dynamic_batching", "max_queue_delay_us", "instance_count")
    tried = {row["trial"]: " ".join(row[name] for name in named) for row in rows(folder)}
    return [tried[number] for number in sorted(tried, key=int)]


def said_to_wait(process: RecordedProcess) -> bool:
    return "does not answer; waiting" in process.complaints.read_text()


def assert_all_recorded_once(workers: Workers) -> None:
    found = [trial.candidate for trial in finished_trials(workers.study())]
    assert len(found) == len(set(found)) == CANDIDATES


def test_workers_try_each_configuration_once_and_the_last_one_confirms(workers: Workers) -> None:
    ended = [process.finish() for process in [workers.start() for _ in range(3)]]
    assert [one.code for one in ended] == [0, 0, 0], ended
    assert_all_recorded_once(workers)
    (last,) = workers.confirmed()
    assert len(trials_in(last)) == len(set(trials_in(last))) == CANDIDATES
    others = [folder for folder in workers.folders if folder != last]
    assert {tried for folder in others for tried in trials_in(folder)} < set(trials_in(last))
    told = sorted(one.stderr for one in ended)
    assert told[0] == ""
    assert all("the last one confirms what is best" in line or "confirms what is best" in line for line in told[1:])
    assert any(row["confirmation"] for row in rows(last))


def test_what_a_killed_worker_tried_is_tried_again(workers: Workers) -> None:
    killed = workers.start("slow_seconds=1")
    assert eventually(lambda: rows(workers.folders[0]) or not killed.is_running, START_SECONDS)
    killed.kill()
    assert killed.finish().code == -signal.SIGKILL
    ended = workers.start().finish()
    assert (ended.code, ended.stderr) == (0, "")
    assert_all_recorded_once(workers)
    assert trials_in(workers.folders[0])[0] in trials_in(workers.folders[1])
    lost = [trial for trial in workers.study().trials if trial.user_attrs.get(REASON) == ABANDONED]
    assert len(lost) == 1


def test_a_killed_worker_goes_on_with_what_it_was_trying(workers: Workers, tmp_path: Path) -> None:
    workers.url = f"sqlite:///{tmp_path}/study.db"
    killed = workers.start("slow_seconds=1")
    (folder,) = workers.folders
    assert eventually(lambda: rows(folder) or not killed.is_running, START_SECONDS)
    killed.kill()
    killed.finish()
    before = rows(folder)
    ended = workers.resume(folder).finish()
    assert (ended.code, ended.stderr) == (0, "")
    assert_all_recorded_once(workers)
    assert rows(folder)[: len(before)] == before
    assert len(trials_in(folder)) == len(set(trials_in(folder))) == CANDIDATES
    measured = [row for row in rows(folder) if not row["confirmation"]]
    assert len({(row["trial"], row["concurrency"]) for row in measured}) == len(measured)
    ended = workers.resume(folder).finish()  # there is nothing left to do
    assert (ended.code, [row for row in rows(folder) if not row["confirmation"]]) == (0, measured)


def test_a_database_that_is_gone_is_waited_for(workers: Workers, postgresql: PostgreSQL) -> None:
    """One worker is interrupted meanwhile; the other goes on once it is back, and tries what that one was trying."""
    waiting, interrupted = workers.start("slow_seconds=0.3"), workers.start("slow_seconds=0.3")
    assert eventually(lambda: all(map(rows, workers.folders)), START_SECONDS)
    postgresql.stop()
    assert eventually(lambda: said_to_wait(waiting) and said_to_wait(interrupted), START_SECONDS)
    interrupt(interrupted)
    ended = interrupted.finish(10)
    assert ended.code == 130, ended.stderr
    measured = rows(workers.folders[0])
    postgresql.start()
    ended = waiting.finish()
    assert ended.code == 0, ended.stderr
    began, over = ended.stderr.splitlines()
    assert began.endswith(f"what was measured is in {workers.folders[0] / 'trials.csv'}")
    assert over.endswith("the database answers again")
    assert rows(workers.folders[0])[: len(measured)] == measured
    assert_all_recorded_once(workers)
    assert workers.confirmed() == [workers.folders[0]]


def test_a_study_of_another_bound_is_not_joined(workers: Workers) -> None:
    ran = workers.start("slow_seconds=0.2")
    assert eventually(lambda: rows(workers.folders[0]), START_SECONDS)
    refused = workers.start("within_ms=6").finish()
    ran.kill()
    ran.finish()
    assert refused.code == 2
    assert "has another constraints (p95 <= 5 ms there, p95 <= 6 ms here); give what it was begun" in refused.stderr


def test_a_database_that_does_not_exist_is_named(workers: Workers) -> None:
    workers.url = workers.url.replace("/postgres", "/nowhere")
    ended = workers.start().finish()
    (line,) = ended.complaints
    assert ended.code == 2
    assert line.endswith('database "nowhere" does not exist')


# -- on a file, in this process ---------------------------------------------------------------------------------


def joined(problem: Problem, place: Path, worker: str, storage: str = "study.journal") -> SharedStudy:
    folder = RunFolder(place / worker)
    options = RunOptions(problem.model, search="random", storage=str(place / storage), join="s")
    return join(options, problem, folder, None, Shared(Patience(math.inf, list[str]().append, "")))


def finished(shared: SharedStudy, number: int, candidate: Candidate) -> None:
    load = LoadPoint(1, 4)
    shared.ledger.record(Trial(number, candidate, ((load, known_server(candidate, 4, 1)),)))


def test_a_configuration_is_claimed_by_one(problem: Problem, tmp_path: Path) -> None:
    outside = Candidate(3, dynamic_batching=True)
    first, second = problem.space.candidates()[:2]
    with joined(problem, tmp_path, "a") as a, joined(problem, tmp_path, "b") as b:
        assert a.claim(first, 4)
        assert b.claim(outside, 4)
        assert not b.claim(first, 4)
        assert not a.claim(outside, 4)
        assert b.claim(second, 4)
        assert a.are_running()
        finished(a, 0, first)
        finished(b, 0, outside)
        assert not b.claim(first, 4)
        assert not b.are_running()
        assert {trial.candidate for trial in a.trials()} == {first, outside}
        assert len({trial.number for trial in a.trials()}) == 2
    with joined(problem, tmp_path, "c") as c:
        assert c.abandoned() == [second]
        assert c.claim(second, 4)


def test_the_last_worker_confirms_and_a_later_one_what_is_new(problem: Problem, tmp_path: Path) -> None:
    first, second = problem.space.candidates()[:2]
    with joined(problem, tmp_path, "a") as a, joined(problem, tmp_path, "b") as b:
        finished(a, 0, first)
        assert a.hand_on() == "1 other worker goes on with the study s; the last one confirms what is best"
        assert b.hand_on() == ""
        with joined(problem, tmp_path, "c") as c:
            assert c.hand_on() == "another worker of the study s confirms what is best"
        with joined(problem, tmp_path, "d") as d:
            finished(d, 0, second)
            assert d.hand_on() == ""


def test_a_file_is_not_shared_by_hosts(problem: Problem, tmp_path: Path) -> None:
    with joined(problem, tmp_path, "a") as a:
        there = {HOST: "elsewhere", ROLE: SEARCH, LIVES: True, "pid": 1}
        a._workers._study.add_trial(optuna.create_trial(state=optuna.trial.TrialState.RUNNING, user_attrs=there))
        with pytest.raises(BadInputError, match=r"--join s: elsewhere is at work on it, .* postgresql://"):
            joined(problem, tmp_path, "b")


def test_another_model_is_named(problem: Problem, tmp_path: Path) -> None:
    with (
        joined(problem, tmp_path, "a"),
        pytest.raises(BadInputError, match=r"study 's' has another model \(known there, other here\)"),
    ):
        joined(replace(problem, model="other"), tmp_path, "b")


def test_waiting_ends_with_the_budget() -> None:
    told: list[str] = []
    with pytest.raises(EnvironmentFault, match=r"gone; what was measured is in trials.csv; once it answers, `tune"):
        Patience(0.0, told.append, "trials.csv").wait("postgresql://h/db", "gone")
    assert told == []


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--join", "s"], "--join s: in which database? Give the --storage that all workers have, postgresql://…"),
        (["--join", " ", "--storage", "x"], "give a name of 1 to 400 printable characters"),
    ],
)
def test_a_study_needs_a_name_and_a_storage(words: Sequence[str], complaint: str) -> None:
    with pytest.raises(BadInputError) as error:
        read_run_arguments([*words, "mlp"])
    assert complaint in str(error.value)


def interrupt(process: RecordedProcess) -> None:

    os.kill(process.pid, signal.SIGINT)
