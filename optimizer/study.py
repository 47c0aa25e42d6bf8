"""Where a study is kept: an Optuna journal file in the run's folder, or a database."""

from __future__ import annotations

import contextlib
import json
import re
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy.exc
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.study import StudyDirection

from optimizer.command_line import redact as redact
from optimizer.errors import BadInputError
from optimizer.problem import Problem

PROBLEM_ATTRIBUTE = "problem"
CONNECT_SECONDS = 10
LOCK_SECONDS = 10  # a lock is held for milliseconds; one this old was left by a killed process

# driver that a plain URL means, and how it is installed
_DRIVERS = {
    "postgresql": ("psycopg", "pip install 'tritune[postgresql]'"),
    "mysql": ("pymysql", "pip install pymysql"),
}

optuna.logging.set_verbosity(optuna.logging.ERROR)
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


def open_study(storage: str | None, name: str, problem: Problem, sampler: BaseSampler) -> optuna.Study:
    """The study ``name``, created where it does not exist yet, with one direction per objective.

    ``storage``: path of a journal file, a database URL (``sqlite:///…``, ``postgresql://…``, ``mysql://…``),
    or None to keep it in memory. Raises BadInputError where it cannot be opened, its driver is missing, or
    the study was made for another problem. No password is ever part of the message.
    """
    up, down = StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE
    directions = [up if metric.better == "higher" else down for metric in problem.objectives]
    with _faults_named(storage or "memory"):
        study = optuna.create_study(
            storage=_storage(storage),
            study_name=name,
            sampler=sampler,
            directions=directions,
            load_if_exists=True,
        )
        _check_problem(study, problem, redact(storage or "memory"))
    return study


def check_storage(storage: str) -> None:
    """Raises BadInputError where ``storage``, which ``--storage`` gave, cannot be opened."""
    with _faults_named(storage, "--storage "):
        if re.match(r"[A-Za-z][\w+.-]*:(?!//)", storage):
            scheme = storage.partition(":")[0]
            raise BadInputError(f"--storage {scheme}:…: write a file, or a URL such as sqlite:///study.db")
        _storage(storage)


@contextlib.contextmanager
def _faults_named(storage: str, flag: str = "") -> Iterator[None]:
    """What Optuna and drivers raise, as BadInputError without a password."""
    shown = flag + redact(storage)
    try:
        yield
    except ImportError as error:
        raise BadInputError(f"{shown}: its database driver is not installed; {_mend(storage)}") from error
    except sqlalchemy.exc.NoSuchModuleError as error:
        raise BadInputError(f"{shown}: unknown kind of database; write sqlite, postgresql or mysql") from error
    except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.OptunaError, OSError, RuntimeError) as error:
        raise BadInputError(f"{shown}: the study cannot be opened: {_cause(error, storage)}") from error
    except (ValueError, KeyError, TypeError, AssertionError) as error:  # Optuna replaying a damaged journal
        raise BadInputError(f"{shown}: is not an intact study: {_cause(error, storage)}") from error


def _storage(storage: str | None) -> BaseStorage | None:
    if storage is None:
        return None
    if "://" not in storage:
        return _journal(Path(storage))
    dialect = _dialect(storage)
    server = dialect.split("+")[0] in _DRIVERS
    if dialect in _DRIVERS and find_spec(_DRIVERS[dialect][0]):
        dialect = f"{dialect}+{_DRIVERS[dialect][0]}"  # the plain name may mean another driver
    arguments: dict[str, Any] = {"connect_args": {"connect_timeout": CONNECT_SECONDS}} if server else {}
    return RDBStorage(f"{dialect}://{storage.partition('://')[2]}", engine_kwargs=arguments)


def _journal(path: Path) -> BaseStorage:
    # absolute, since the lock is a link to the file: one that leads nowhere is waited for without end
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = JournalFileSymlinkLock(str(path), grace_period=LOCK_SECONDS)
    if path.exists():
        lock.acquire()
        try:
            _drop_torn_line(path)
        finally:
            lock.release()
    return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))


def _drop_torn_line(path: Path) -> None:
    """A process killed while writing leaves half a line, which the next entry would run into."""
    with path.open("r+b") as file:
        data = file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            file.truncate(whole)


def _check_problem(study: optuna.Study, problem: Problem, shown: str) -> None:
    """Values of one problem mean nothing in another."""
    ours = {
        "model": problem.model,
        "parameters": {name: list(choices) for name, choices in problem.space.parameters().items()},
        "request_batch_size": problem.request_batch_size,
        "objectives": [metric.name for metric in problem.objectives],
        "constraints": [str(constraint) for constraint in problem.constraints],
    }
    theirs = study.user_attrs.get(PROBLEM_ATTRIBUTE)
    if theirs is None:
        study.set_user_attr(PROBLEM_ATTRIBUTE, ours)
        return
    ours = json.loads(json.dumps(ours))
    other = [key for key in ours if ours[key] != theirs.get(key)]
    if other:
        raise BadInputError(
            f"{shown}: study {study.study_name!r} has another {' and '.join(other)}; take another study name"
        )


def _dialect(storage: str) -> str:
    """``postgresql+psycopg://…`` -> ``postgresql+psycopg``; the old name of PostgreSQL is understood."""
    dialect = storage.partition("://")[0]
    return "postgresql" if dialect == "postgres" else dialect


def _mend(storage: str) -> str:
    driver = _DRIVERS.get(_dialect(storage))
    return driver[1] if driver else f"install the driver that {_dialect(storage)} names"


def _cause(error: BaseException, storage: str) -> str:
    """The innermost message in one line; a driver may repeat the URL, so the password is taken out."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(getattr(error, "orig", None) or error).split()) or type(error).__name__
    secret = re.search(r"://[^/@:]*:(.*)@", storage)
    if secret and secret[1]:
        text = text.replace(secret[1], "***")
    return redact(text)[:300]
