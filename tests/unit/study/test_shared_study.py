"""Tests for ``tune --study-name``: worker processes on a PostgreSQL server and a recorded table."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import optuna
import pytest

from optimizer.cli.run import read_run_arguments
from optimizer.config.problem import Problem
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import Candidate
from optimizer.core.errors import BadInputError
from optimizer.core.trial import LoadPoint, Trial
from optimizer.options.run_options import RunOptions
from optimizer.search.candidate_tracker import ABANDONED
from optimizer.search.optuna_encoding import finished_trials
from optimizer.store.optuna_storage import RetryPolicy
from optimizer.store.optuna_study import StudySharing, make_storage
from optimizer.store.run_folder import RunFolder
from optimizer.study.distributed.shared_study import (
    HAS_HEARTBEAT,
    HOST,
    ROLE,
    SEARCH,
    STARTED_TICKS,
    SharedStudy,
    join,
)
from tests import worker_process
from tests.command_fixtures import eventually
from tests.conftest import measure_known_server
from tests.recorded_fixtures import RecordedProcess, hold, is_held, record, release, rows, started
from tests.recorded_process import RESULT
from tests.storage_fixtures import PostgreSQL, postgresql

__all__ = ["postgresql"]

START_SECONDS = 600.0
PASSWORD = "geheim"
SPACE = SearchSpace(max_batch_size=(1, 4, 16), max_queue_delay_us=("off", 0, 1000))
CANDIDATES, LOADS = 5, (1, 4, 8)
BRIEF_GRACE = "grace_seconds=4"  # of a worker whose only companion dies


class Workers:
    """The worker processes of one study, each with its own folder."""

    def __init__(self, place: Path, url: str) -> None:
        self.table, self.url, self._place = place / "recorded.csv", url, place
        record(self.table, SPACE, LOADS)
        self.folders: list[Path] = []
        self.processes: list[RecordedProcess] = []

    def start(self, *options: str, held_at: int | None = None) -> RecordedProcess:
        """Start a worker. It measures no more than ``held_at`` rows until ``release``."""
        self.folders.append(self._place / f"worker{len(self.folders)}")
        self.folders[-1].mkdir()
        if held_at is not None:
            hold(self.folders[-1], held_at)
        return self.resume(self.folders[-1], *options)

    def resume(self, folder: Path, *options: str) -> RecordedProcess:
        words = [str(self.table), str(folder), self.url, self._place.name, *options]
        self.processes.append(started(worker_process.main, words, self._place))
        return self.processes[-1]

    def wait_until_held(self) -> None:
        assert eventually(lambda: all(map(is_held, self.folders)), START_SECONDS)

    def release(self) -> None:
        for folder in self.folders:
            release(folder)

    def study(self) -> optuna.Study:
        url = self.url.replace("postgresql://", "postgresql+psycopg://")
        return optuna.load_study(study_name=self._place.name, storage=url)

    def confirmed(self) -> list[Path]:
        return [folder for folder in self.folders if (folder / RESULT).exists()]


@pytest.fixture
def workers(tmp_path: Path, postgresql: PostgreSQL) -> Iterator[Workers]:
    workers = Workers(tmp_path, postgresql.url(PASSWORD))
    yield workers
    for process in workers.processes:
        process.kill()


def trials_in(folder: Path) -> list[str]:
    """Return the configuration of each trial in the table, in order."""
    named = ("max_batch_size", "dynamic_batching", "max_queue_delay_us", "instance_count")
    tried = {row["trial"]: " ".join(row[name] for name in named) for row in rows(folder)}
    return [tried[number] for number in sorted(tried, key=int)]


def reports_waiting(process: RecordedProcess) -> bool:
    return "does not answer; waiting" in process.stderr_path.read_text()


def assert_all_recorded_once(workers: Workers) -> None:
    candidates = [trial.candidate for trial in finished_trials(workers.study())]
    assert len(candidates) == len(set(candidates)) == CANDIDATES


def test_workers_try_each_configuration_once_and_the_last_one_confirms(workers: Workers) -> None:
    processes = [workers.start(held_at=0) for _ in range(3)]
    workers.wait_until_held()
    workers.release()
    ended = [process.finish() for process in processes]
    assert [process.code for process in ended] == [0, 0, 0], ended
    assert_all_recorded_once(workers)
    (last,) = workers.confirmed()
    assert len(trials_in(last)) == len(set(trials_in(last))) == CANDIDATES
    other_folders = [folder for folder in workers.folders if folder != last]
    tried = [configuration for folder in other_folders for configuration in trials_in(folder)]
    assert len(tried) == len(set(tried)), "no two workers try the same configuration"
    assert set(tried) <= set(trials_in(last))  # equal if the last worker was the last to start
    messages = sorted(process.stderr for process in ended)
    assert messages[0] == ""
    assert all("confirms the best configuration" in line for line in messages[1:])
    assert any(row["confirmation"] for row in rows(last))


def test_the_trial_of_a_killed_worker_is_repeated(workers: Workers) -> None:
    killed = workers.start(held_at=1)
    workers.wait_until_held()
    killed.kill()
    assert killed.finish().code == -signal.SIGKILL
    ended = workers.start(BRIEF_GRACE).finish()
    assert (ended.code, ended.stderr) == (0, "")
    assert_all_recorded_once(workers)
    assert trials_in(workers.folders[0])[0] in trials_in(workers.folders[1])
    lost = [trial for trial in workers.study().trials if ABANDONED in trial.user_attrs]
    assert len(lost) == 1


def test_a_resumed_worker_continues_its_trial(workers: Workers, tmp_path: Path) -> None:
    workers.url = f"sqlite:///{tmp_path}/study.db"
    killed = workers.start(held_at=1)
    (folder,) = workers.folders
    workers.wait_until_held()
    killed.kill()
    killed.finish()
    workers.release()
    before = rows(folder)
    ended = workers.resume(folder).finish()
    assert (ended.code, ended.stderr) == (0, "")
    assert_all_recorded_once(workers)
    assert rows(folder)[: len(before)] == before
    assert len(trials_in(folder)) == len(set(trials_in(folder))) == CANDIDATES
    measured = [row for row in rows(folder) if not row["confirmation"]]
    assert len({(row["trial"], row["concurrency"]) for row in measured}) == len(measured)
    ended = workers.resume(folder).finish()  # nothing is left to do
    assert (ended.code, [row for row in rows(folder) if not row["confirmation"]]) == (0, measured)


def test_workers_wait_for_a_database_that_is_gone(workers: Workers, postgresql: PostgreSQL) -> None:
    """One worker is interrupted meanwhile; the other continues later and repeats the trial of the first."""
    waiting, interrupted = workers.start(BRIEF_GRACE, held_at=1), workers.start(held_at=1)
    workers.wait_until_held()
    postgresql.stop()
    workers.release()
    assert eventually(lambda: reports_waiting(waiting) and reports_waiting(interrupted), START_SECONDS)
    interrupt(interrupted)
    ended = interrupted.finish()
    assert ended.code == 130, ended.stderr
    measured = rows(workers.folders[0])
    postgresql.start()
    ended = waiting.finish()
    assert ended.code == 0, ended.stderr
    began, over = ended.stderr.splitlines()
    assert began.endswith(f"all measurements are in {workers.folders[0] / 'trials.csv'}")
    assert over.endswith("the database answers again")
    assert rows(workers.folders[0])[: len(measured)] == measured
    assert_all_recorded_once(workers)
    assert workers.confirmed() == [workers.folders[0]]


# -- on a file, in this process ---------------------------------------------------------------------------------


def joined(problem: Problem, place: Path, worker: str, storage: str = "study.journal") -> SharedStudy:
    folder = RunFolder(place / worker)
    options = RunOptions(problem.model, search="random", storage=str(place / storage), study_name="s")
    return join(options, problem, folder, None, StudySharing(RetryPolicy(math.inf)))


def registry(place: Path) -> optuna.Study:
    """Return the study in which the workers of ``joined`` register."""
    return optuna.load_study(study_name="s (workers)", storage=make_storage(str(place / "study.journal")))


def finished(shared: SharedStudy, number: int, candidate: Candidate) -> None:
    load = LoadPoint(1, 4)
    shared.tracker.record(Trial(number, candidate, ((load, measure_known_server(candidate, 4, 1)),)))


def test_a_configuration_is_claimed_once(problem: Problem, tmp_path: Path) -> None:
    outside = Candidate(3, dynamic_batching=True)
    first, second = problem.space.candidates()[:2]
    with joined(problem, tmp_path, "a") as a, joined(problem, tmp_path, "b") as b:
        assert a.claim(first)
        assert b.claim(outside)
        assert not b.claim(first)
        assert not a.claim(outside)
        assert b.claim(second)
        assert a.are_running()
        finished(a, 0, first)
        finished(b, 0, outside)
        assert not b.claim(first)
        assert not b.are_running()
        assert {trial.candidate for trial in a.trials()} == {first, outside}
        assert len({trial.number for trial in a.trials()}) == 2
    with joined(problem, tmp_path, "c") as c:
        assert c.abandoned() == [second]
        assert c.claim(second)


def test_the_last_worker_confirms_and_a_later_one_only_new_trials(problem: Problem, tmp_path: Path) -> None:
    first, second = problem.space.candidates()[:2]
    with joined(problem, tmp_path, "a") as a, joined(problem, tmp_path, "b") as b:
        finished(a, 0, first)
        assert (
            a.leave_search() == "1 other worker continues the study s; the last one confirms the best configuration"
        )
        assert b.leave_search() == ""
        with joined(problem, tmp_path, "c") as c:
            assert c.leave_search() == "another worker of the study s confirms the best configuration"
        with joined(problem, tmp_path, "d") as d:
            finished(d, 0, second)
            assert d.leave_search() == ""


def test_a_worker_that_leaves_after_the_confirmation_does_not_repeat_it(problem: Problem, tmp_path: Path) -> None:
    first = problem.space.candidates()[0]
    with joined(problem, tmp_path, "slow") as slow:
        with contextlib.suppress(KeyboardInterrupt), joined(problem, tmp_path, "interrupted") as interrupted:
            finished(interrupted, 0, first)
            # it has left the search, and is about to ask who confirms
            registry(tmp_path).tell(slow.number, state=optuna.trial.TrialState.FAIL)
            assert interrupted.leave_search() == ""
            raise KeyboardInterrupt
        with joined(problem, tmp_path, "quick") as quick:
            assert quick.leave_search() == "", "the first confirmation did not end"
        assert slow.leave_search() == "another worker of the study s confirms the best configuration"
    with joined(problem, tmp_path, "later") as later:
        assert later.leave_search() == "", "its user asked for a confirmation after the end of the other"


def test_a_worker_whose_pid_another_process_has_is_dead(problem: Problem, tmp_path: Path) -> None:
    with joined(problem, tmp_path, "a") as a:
        workers = registry(tmp_path)
        registered = workers.trials[0].user_attrs
        ended = {**registered, STARTED_TICKS: registered[STARTED_TICKS] - 1}
        workers.add_trial(optuna.create_trial(state=optuna.trial.TrialState.RUNNING, user_attrs=ended))
        assert a.leave_search() == "", "no other worker searches"
        assert [trial.state.name for trial in workers.trials] == ["FAIL", "FAIL", "RUNNING"], "this one confirms"


def test_a_file_is_not_shared_by_hosts(problem: Problem, tmp_path: Path) -> None:
    with joined(problem, tmp_path, "a"):
        there = {HOST: "host2", ROLE: SEARCH, HAS_HEARTBEAT: True, "pid": 1}
        registry(tmp_path).add_trial(optuna.create_trial(state=optuna.trial.TrialState.RUNNING, user_attrs=there))
        with pytest.raises(BadInputError, match=r"--study-name s: host2 uses it, .* postgresql://"):
            joined(problem, tmp_path, "b")


def test_another_model_is_named(problem: Problem, tmp_path: Path) -> None:
    with (
        joined(problem, tmp_path, "a"),
        pytest.raises(BadInputError, match=r"study 's' differs in model \(known there, other here\)"),
    ):
        joined(replace(problem, model="other"), tmp_path, "b")


def test_retrying_ends_with_the_budget() -> None:
    reports: list[str] = []
    attempts: list[bool] = []

    def attempt(is_retry: bool) -> None:
        attempts.append(is_retry)
        raise ConnectionError("gone")

    policy = RetryPolicy(
        until=time.monotonic() + 0.01, seconds=0.0, report=reports.append, measurements_file="trials.csv"
    )
    with pytest.raises(ConnectionError, match="gone"):
        policy.run(attempt, lambda error: isinstance(error, ConnectionError), "postgresql://h/db")
    assert attempts[0] is False
    assert all(attempts[1:])
    assert reports == []


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--study-name", "s"], "--study-name s: --storage is missing; give the database of all workers"),
        (["--study-name", " ", "--storage", "./x.journal"], "give a name of 1 to 400 printable characters"),
    ],
)
def test_a_study_needs_a_name_and_a_storage(words: Sequence[str], complaint: str) -> None:
    with pytest.raises(BadInputError) as error:
        read_run_arguments([*words, "mlp"])
    assert complaint in str(error.value)


def interrupt(process: RecordedProcess) -> None:
    os.kill(process.pid, signal.SIGINT)
