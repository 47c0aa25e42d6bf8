"""The adapter to Optuna's private API, and which errors of a database are retried."""

from __future__ import annotations

import errno
import os
import re
import sqlite3
import time
from pathlib import Path

import optuna
import pytest
import sqlalchemy
import sqlalchemy.exc
from optuna.samplers import RandomSampler
from optuna.storages import RDBStorage
from optuna.storages._cached_storage import _CachedStorage

from optimizer.config.problem import Problem
from optimizer.config.search_space import SearchSpace
from optimizer.core.errors import EnvironmentFault
from optimizer.store import optuna_storage
from optimizer.store.optuna_storage import is_retryable
from optimizer.store.optuna_study import connect_arguments, open_study

ROOT = Path(__file__).parents[3]
OPTUNA_MAJOR_VERSION = "5"  # whose private API optuna_storage is written for; check that module before raising it
PROBLEM = Problem("m", SearchSpace((1, 4)), 1, 64)


def test_the_private_api_is_that_of_the_supported_version(tmp_path: Path) -> None:
    assert optuna.__version__.split(".")[0] == OPTUNA_MAJOR_VERSION
    supported = f"optuna>={OPTUNA_MAJOR_VERSION}.0,<{int(OPTUNA_MAJOR_VERSION) + 1}"
    assert f'"{supported}"' in (ROOT / "pyproject.toml").read_text()
    for name in (
        *optuna_storage.REPEATABLE_METHODS,
        "_create_new_trial",
        "_get_prepared_new_trial",
        "_set_trial_attr_without_commit",
    ):
        assert callable(getattr(RDBStorage, name)), name
    for name in ("_create_scoped_session", "models"):
        assert hasattr(optuna_storage.rdb, name), name
    study = open_study(f"sqlite:///{tmp_path}/study.db", "m", PROBLEM, RandomSampler(seed=0))
    storage = optuna_storage.storage_of(study)
    assert isinstance(storage, _CachedStorage)
    assert isinstance(storage._backend, optuna_storage.RetryingStorage)


def test_no_other_module_uses_the_private_api() -> None:
    private = re.compile(r"\bfrom optuna[\w.]*\._|\boptuna[\w.]*\._|\._(storage|study_id|backend)\b")
    users = [path.name for path in (ROOT / "optimizer").rglob("*.py") if private.search(path.read_text())]
    assert users == ["optuna_storage.py"]


def test_errors_that_a_retry_cannot_resolve_are_raised_at_once() -> None:
    class Raised(sqlite3.OperationalError):
        def __init__(self, code: int) -> None:
            super().__init__("x")
            self.sqlite_errorcode = code

    class PostgreSQLError(Exception):
        def __init__(self, sqlstate: str) -> None:
            self.sqlstate = sqlstate

    for error, expected in {
        Raised(sqlite3.SQLITE_BUSY): True,
        Raised(sqlite3.SQLITE_BUSY_SNAPSHOT): True,
        Raised(sqlite3.SQLITE_IOERR): True,
        sqlite3.OperationalError("an error without a code"): True,
        Raised(sqlite3.SQLITE_FULL): False,
        Raised(sqlite3.SQLITE_READONLY): False,
        Raised(sqlite3.SQLITE_READONLY_DBMOVED): False,
        Raised(sqlite3.SQLITE_CANTOPEN): False,
        PostgreSQLError("57P01"): True,  # terminated by an administrator
        PostgreSQLError("53100"): False,  # disk full
        Exception(2013, "lost connection"): True,  # as PyMySQL reports them
        Exception(1021, "disk full"): False,
    }.items():
        assert is_retryable(sqlalchemy.exc.OperationalError("", None, error)) is expected, error


@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_a_database_without_space_or_permission_ends_the_run_at_once(fault: str, tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    study = open_study(f"sqlite:///{path}", "m", PROBLEM, RandomSampler(seed=0))
    connection = study._storage._backend.engine.raw_connection()  # type: ignore[attr-defined]
    if fault == "full":
        connection.execute("PRAGMA max_page_count = 1")
    else:
        connection.execute("PRAGMA query_only = 1")
    connection.close()
    began = time.monotonic()
    with pytest.raises(EnvironmentFault, match=r"the study cannot be stored: .*(full|readonly)"):
        fill(study)
    assert time.monotonic() - began < optuna_storage.RETRY_SECONDS


def fill(study: optuna.Study) -> None:
    for number in range(500):
        study.set_user_attr(f"{number}", 1000 * "x")


@pytest.mark.parametrize("flag", ["", "--storage "])
@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (errno.ENOSPC, "No space left on device"),
        (errno.EDQUOT, "Disk quota exceeded"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_a_full_disk_is_no_mistake_of_the_user(number: int, cause: str, flag: str) -> None:
    with pytest.raises(EnvironmentFault) as caught, optuna_storage.opening_errors("r/study.journal", flag):
        raise OSError(number, os.strerror(number))
    then = "run the command again" if flag else "continue with `tune --resume`"
    assert str(caught.value) == (
        f"{flag}r/study.journal: the study cannot be stored: {cause}; free space there, then {then}"
    )


def test_a_database_on_a_full_disk_is_no_mistake_of_the_user(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    full = pytest.raises(EnvironmentFault, match="database or disk is full; free space there, then continue")
    with full, optuna_storage.opening_errors(url), sqlalchemy.create_engine(url).connect() as database:
        database.exec_driver_sql("CREATE TABLE t (a)")
        database.exec_driver_sql("PRAGMA max_page_count = 2")
        database.exec_driver_sql("INSERT INTO t VALUES (zeroblob(100000))")


def test_timeouts_of_the_url_take_precedence() -> None:
    assert connect_arguments("sqlite", "", "sqlite:///x.db") == {"timeout": 10}
    assert connect_arguments("sqlite", "", "sqlite:///x.db?timeout=1") == {}
    of_psycopg = connect_arguments("postgresql", "psycopg", "postgresql+psycopg://h/db?keepalives_idle=3")
    assert (of_psycopg["connect_timeout"], of_psycopg["tcp_user_timeout"]) == (10, 20_000)
    assert "keepalives_idle" not in of_psycopg
    assert connect_arguments("postgresql", "pg8000", "postgresql+pg8000://h/db") == {"connect_timeout": 10}
