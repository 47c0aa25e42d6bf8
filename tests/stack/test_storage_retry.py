"""Tests for lost database connections: no trial is lost, and none is stored twice."""

from __future__ import annotations

import itertools
import os
import random
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import optuna
import pytest
from optuna.samplers import RandomSampler
from optuna.trial import TrialState
from sqlalchemy import event

from optimizer.config.problem import Problem
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import Candidate
from optimizer.core.errors import EnvironmentFault
from optimizer.core.trial import LoadPoint, Trial
from optimizer.search.candidate_tracker import CandidateTracker
from optimizer.search.optuna_encoding import TRIAL, finished_trials
from optimizer.store.optuna_storage import RetryPolicy, storage_of
from optimizer.store.optuna_study import StudySharing, open_study
from tests.conftest import measure_known_server
from tests.storage_fixtures import PostgreSQL, postgresql

__all__ = ["postgresql"]

PROBLEM = Problem("m", SearchSpace((1, 4, 16), max_queue_delay_us=("off", 0, 1000)), 1, 64)
TRIALS = 3  # one of each way in which a trial is entered
AT_ONCE = 5
LONGEST_PAUSE_SECONDS = 0.05  # between two moments at which a connection is dropped


def trials() -> list[Trial]:
    candidates: list[Candidate] = list(PROBLEM.space.candidates())[:TRIALS]
    load = LoadPoint(1, 1)
    return [
        Trial(n, candidate, ((load, measure_known_server(candidate, 1, 1)),))
        for n, candidate in enumerate(candidates)
    ]


def record_all(study: optuna.Study, recorded: Callable[[], object] = lambda: None) -> None:
    """Enter trials in each possible way: from the queue, at once, and finished."""
    tracker = CandidateTracker(PROBLEM, study)
    for trial in trials():
        if trial.number % 3 == 0:
            tracker.enqueue(trial.candidate)
            assert tracker.ask(tracker.tried()) == trial.candidate
        elif trial.number % 3 == 1:
            assert tracker.start(trial.candidate, 1)
        tracker.record(trial)
        recorded()


def assert_recorded_once(study: optuna.Study) -> None:
    assert finished_trials(study) == trials()
    entered = study.get_trials()
    assert [trial.number for trial in entered] == list(range(TRIALS))
    assert [trial.user_attrs[TRIAL] for trial in entered] == list(range(TRIALS))
    assert {trial.state for trial in entered} == {TrialState.COMPLETE}
    measured = [measure_known_server(trial.candidate, 1, 1).throughput_infer_per_sec for trial in trials()]
    assert [trial.value for trial in entered] == measured


@contextmanager
def connections_dropped(server: PostgreSQL) -> Iterator[tuple[Callable[[], None], list[int]]]:
    """Drop connections at random moments. Yield a function that allows one more drop, and the dropped process ids.

    There are never more drops than recorded trials: otherwise no trial would succeed on a slow machine.
    """
    import psycopg

    dropped: list[int] = []
    done, allowed = threading.Event(), threading.Semaphore(AT_ONCE)
    other_connections = (
        "FROM pg_stat_activity WHERE usename = 'tune' AND pid <> pg_backend_pid() AND state IS NOT NULL"
    )
    query = f"SELECT pid, pg_terminate_backend(pid) {other_connections} ORDER BY random() LIMIT 1"

    def drop() -> None:
        with psycopg.connect(server.url("x"), autocommit=True) as connection:
            while True:
                allowed.acquire()
                if done.is_set():
                    return
                time.sleep(random.uniform(0, LONGEST_PAUSE_SECONDS))
                dropped.extend(pid for pid, _ in connection.execute(query))

    thread = threading.Thread(target=drop)
    thread.start()
    try:
        yield allowed.release, dropped
    finally:
        done.set()
        allowed.release()
        thread.join()


@pytest.mark.parametrize("studies", [5, pytest.param(50, marks=pytest.mark.long)])
def test_no_trial_is_lost_or_repeated_if_connections_are_dropped(postgresql: PostgreSQL, studies: int) -> None:
    storage = postgresql.url("x")
    names = [f"dropped {number}" for number in range(studies)]
    open_study(storage, "creates the tables", PROBLEM, RandomSampler(seed=0))
    with connections_dropped(postgresql) as (recorded, dropped), ThreadPoolExecutor(AT_ONCE) as pool:

        def run(name: str) -> None:
            record_all(open_study(storage, name, PROBLEM, RandomSampler(seed=0)), recorded)

        list(pool.map(run, names))
    assert len(dropped) >= studies
    kept = optuna.storages.RDBStorage(storage.replace("postgresql://", "postgresql+psycopg://"))
    for name in names:
        assert_recorded_once(optuna.load_study(study_name=name, storage=kept))


def test_a_silent_network_is_noticed_by_the_kernel(postgresql: PostgreSQL) -> None:
    study = open_study(postgresql.url("x"), "keepalive", PROBLEM, RandomSampler(seed=0))
    backend = storage_of(study)._backend  # type: ignore[attr-defined]
    connection = backend.engine.raw_connection()
    with socket.socket(fileno=os.dup(connection.driver_connection.fileno())) as client_socket:
        assert client_socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert client_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
        assert client_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
    connection.close()


def connect_by_driver(driver: ModuleType, study: optuna.Study, commit: Callable[[Any], None]) -> None:
    """Let ``study`` connect by ``driver`` with connections whose method ``commit`` is this function."""
    engine = storage_of(study)._backend.engine  # type: ignore[attr-defined]
    connection_type: Any = type("Connection", (driver.Connection,), {"commit": commit})

    def connect(_: object, __: object, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> object:
        if driver is sqlite3:
            return sqlite3.connect(*arguments, **keywords, factory=connection_type)
        return connection_type.connect(*arguments, **keywords)

    event.listen(engine, "do_connect", connect)
    engine.dispose()  # with the connections that it has


@pytest.mark.parametrize("kind", ["postgresql", "sqlite"])
def test_a_commit_whose_acknowledgement_is_lost_is_not_repeated(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Every other COMMIT succeeds, but the connection is lost before that is acknowledged."""
    driver, message, storage = sqlite3, "disk I/O error", f"sqlite:///{tmp_path}/study.db"
    if kind == "postgresql":
        driver, message = import_module("psycopg"), "server closed the connection unexpectedly"
        storage = request.getfixturevalue("postgresql").url("x")
    study = open_study(storage, "acknowledgements", PROBLEM, RandomSampler(seed=0))
    other = open_study(storage, "without a tracker", PROBLEM, RandomSampler(seed=0))
    commits = itertools.count(1)

    def commit(connection: Any) -> None:
        driver.Connection.commit(connection)
        if next(commits) % 2:
            connection.close()
            raise driver.OperationalError(message)

    for each in (study, other):
        connect_by_driver(driver, each, commit)
    record_all(study)
    other.tell(other.ask(), 1.0)
    assert next(commits) > 2 * TRIALS
    assert_recorded_once(open_study(storage, "acknowledgements", PROBLEM, RandomSampler(seed=0)))
    assert [(trial.state, trial.value) for trial in other.trials] == [(TrialState.COMPLETE, 1.0)]


def test_a_lost_database_is_reported_with_the_table_of_all_measurements(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/study.db"
    sharing = StudySharing(RetryPolicy(seconds=0.2, measurements_file="trials.csv"))
    study = open_study(storage, "gone", PROBLEM, RandomSampler(seed=0), sharing=sharing)
    commits: list[object] = []

    def lose(connection: object) -> None:
        commits.append(connection)
        raise sqlite3.OperationalError("gone")

    connect_by_driver(sqlite3, study, lose)
    expected = r"the study cannot be stored: gone; all measurements are in trials.csv; fix that, then continue"
    with pytest.raises(EnvironmentFault, match=expected):
        study.add_trial(optuna.create_trial(value=1.0))
    assert len(commits) > 1
