"""Where a study is kept: an Optuna journal file in the run's folder, or a database."""

from __future__ import annotations

import json
import random
import re
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy.exc
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection

from optimizer.command_line import redact as redact
from optimizer.errors import BadInputError
from optimizer.machine.fingerprint import Fingerprint, read
from optimizer.problem import Problem
from optimizer.store.journal_lock import JournalLock
from optimizer.store.patience import Patience
from optimizer.store.study_faults import DRIVERS, dialect_of, name_later_faults, opening
from optimizer.untrusted import one_line

PROBLEM_ATTRIBUTE, FINGERPRINT_ATTRIBUTE = "problem", "fingerprint"
CONNECT_SECONDS = 10
LONGEST_DIFFERENCE = 200
CREATIONS, LONGEST_CREATION_SECONDS = 5, 1.0  # of tables, by several workers at the same time
LOCK_SECONDS = 10  # a lock is held for milliseconds; an SQLite URL may end in ?timeout=SECONDS

optuna.logging.set_verbosity(optuna.logging.ERROR)
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
warnings.filterwarnings("ignore", message="Heartbeat of storage is supposed")  # optimizer.sharing.heartbeat beats


@dataclass(frozen=True)
class Shared:
    """How a study is shared: a worker whose last heartbeat is older than ``grace_seconds`` is gone."""

    patience: Patience
    heartbeat_seconds: int = 10
    grace_seconds: int = 60


def open_study(
    storage: str | None,
    name: str,
    problem: Problem,
    sampler: BaseSampler,
    fingerprint: Fingerprint | None = None,
    shared: Shared | None = None,
) -> optuna.Study:
    """The study ``name``, created where it does not exist yet, with one direction per objective.

    ``storage``: path of a journal file, a database URL (``sqlite:///…``, ``postgresql://…``, ``mysql://…``),
    or None to keep it in memory. Raises BadInputError where it cannot be opened, its driver is missing, or
    the study was made for another problem, or on another device or server than ``fingerprint`` tells. What goes wrong
    later (a lock, a lost connection, a full disk) the study raises as EnvironmentFault; where it is ``shared``, a
    lost connection is waited for first. No password is ever part of the message.
    """
    up, down = StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE
    directions = [up if metric.better == "higher" else down for metric in problem.objectives]
    with opening(storage or "memory"):
        study = optuna.create_study(
            storage=_storage(storage, shared),
            study_name=name,
            sampler=sampler,
            directions=directions,
            load_if_exists=True,
        )
        _check_problem(study, problem, redact(storage or "memory"))
        _check_fingerprint(study, fingerprint, redact(storage or "memory"))
    if storage is not None:
        name_later_faults(study._storage, storage, shared.patience if shared else None)
    return study


def check_storage(storage: str) -> None:
    """Raises BadInputError where ``storage``, which ``--storage`` gave, cannot be opened."""
    with opening(storage, "--storage "):
        if re.match(r"[A-Za-z][\w+.-]*:(?!//)", storage):
            scheme = storage.partition(":")[0]
            raise BadInputError(f"--storage {scheme}:…: write a file, or a URL such as sqlite:///study.db")
        _storage(storage)


def _storage(storage: str | None, shared: Shared | None = None) -> BaseStorage | None:
    if storage is None:
        return None
    if "://" not in storage:
        return _journal(Path(storage))
    dialect = dialect_of(storage)
    kind = dialect.split("+")[0]
    if dialect in DRIVERS and find_spec(DRIVERS[dialect][0]):
        dialect = f"{dialect}+{DRIVERS[dialect][0]}"  # the plain name may mean another driver
    engine: dict[str, Any] = {}
    if kind in DRIVERS:
        # a connection that was lost since it was last used is made anew
        engine = {"pool_pre_ping": True, "connect_args": {"connect_timeout": CONNECT_SECONDS}}
    elif dialect == "sqlite" and "timeout=" not in storage:
        engine = {"connect_args": {"timeout": LOCK_SECONDS}}
    return _created(
        lambda: RDBStorage(
            f"{dialect}://{storage.partition('://')[2]}",
            engine_kwargs=engine,
            heartbeat_interval=shared.heartbeat_seconds if shared else None,
            grace_period=shared.grace_seconds if shared else None,
        )
    )


def _created(create: Callable[[], RDBStorage]) -> RDBStorage:
    """Once more where another worker creates the same tables just now."""
    for _ in range(CREATIONS):
        try:
            return create()
        except (sqlalchemy.exc.IntegrityError, sqlalchemy.exc.ProgrammingError):
            time.sleep(random.uniform(0, LONGEST_CREATION_SECONDS))
    return create()


def _journal(path: Path) -> BaseStorage:
    path = path.resolve()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        file = next((above for above in path.parents if above.is_file()), path.parent)
        raise NotADirectoryError(f"{file} is not a folder") from None
    lock: Any = JournalLock(path, LOCK_SECONDS)
    return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))


def _check_problem(study: optuna.Study, problem: Problem, shown: str) -> None:
    """Values of one problem mean nothing in another."""
    ours = {
        "model": problem.model,
        "parameters": {name: list(choices) for name, choices in problem.space.parameters().items()},
        "request_batch_size": problem.request_batch_size,
        **({"request_mix": problem.request_mix.choices} if problem.request_mix else {}),
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
        told = " and ".join(f"{key} ({_difference(theirs.get(key), ours[key])})" for key in other)
        raise BadInputError(
            f"{shown}: study {study.study_name!r} has another {told}; give what it was begun with, or take another "
            "study name"
        )


def _difference(theirs: Any, ours: Any) -> str:
    """Which of several choices differ, or both values."""
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        names = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
        return one_line(", ".join(names), LONGEST_DIFFERENCE)
    return one_line(f"{_shown(theirs)} there, {_shown(ours)} here", LONGEST_DIFFERENCE)


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def _check_fingerprint(study: optuna.Study, fingerprint: Fingerprint | None, shown: str) -> None:
    """What was measured elsewhere is not ranked with what is measured here."""
    if fingerprint is None:
        return
    theirs = read(study.user_attrs.get(FINGERPRINT_ATTRIBUTE))
    if theirs is None:
        study.set_user_attr(FINGERPRINT_ATTRIBUTE, fingerprint.document())
    elif theirs != fingerprint:
        raise BadInputError(
            f"{shown}: study {study.study_name!r} was measured elsewhere ({fingerprint.differences(theirs)}), and "
            "the two are not ranked together; begin another run here, with --warm-start and a run from there"
        )
