"""Open the Optuna study of a run: in a journal file, or in a database that a URL names."""

from __future__ import annotations

import fcntl
import json
import random
import re
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import optuna
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend

from optimizer.config.problem import Problem
from optimizer.core.errors import BadInputError, ChangedRunError
from optimizer.core.load_shapes import RequestTimes
from optimizer.core.safe_text import one_line
from optimizer.machine.hardware import Fingerprint, parse_fingerprint
from optimizer.options.addresses import redact
from optimizer.store.optuna_storage import (
    DRIVERS,
    RetryingStorage,
    RetryPolicy,
    dialect_of,
    is_retryable,
    opening_errors,
    sql_errors,
    storage_of,
    translate_storage_errors,
)

POLL_SECONDS = 0.01  # pause between two attempts to lock a journal
CONNECT_SECONDS = 10  # limit of an attempt to connect to a database server
CREATION_ATTEMPTS, MAX_CREATION_PAUSE_SECONDS = 5, 1.0  # for tables that other workers create at the same time
LOCK_SECONDS = 10  # a lock is held for milliseconds; an SQLite URL may end in ?timeout=SECONDS
_JOURNAL_START = b'{"op_code":'
_MAX_LINE_BYTES = 16 << 20  # limit for an incomplete last line, which is read into memory
# libpq closes a connection whose peer is silent: after 10 + 3 * 5 s without traffic, or 20 s after an unacknowledged
# packet. Without these, a statement waits for up to two hours when the network fails without a reset.
_KEEPALIVE = {
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}


@dataclass(frozen=True)
class StudySharing:
    """How several workers share a study: one whose last heartbeat is older than ``grace_seconds`` counts as dead."""

    retry: RetryPolicy
    heartbeat_seconds: int = 10
    grace_seconds: int = 60


class JournalLock:
    """A lock for Optuna's JournalFileBackend that the kernel releases when its process dies.

    Optuna's own locks are files, which a killed process leaves behind. The lock is held while an entry is appended.
    An incomplete last line, left by a killed process or a full disk, is cut off first, so that the next entry begins
    on a line of its own.
    """

    def __init__(self, journal: Path, patience_seconds: float) -> None:
        self._journal = journal
        self._patience_seconds = patience_seconds
        self._file: BinaryIO | None = None

    def acquire(self) -> bool:
        """Take the lock and return true. Raises TimeoutError if another process holds it for too long."""
        file = self._journal.open("r+b")
        try:
            self._wait_for(file)
            _cut_torn_line(file)
        except BaseException:
            file.close()
            raise
        self._file = file
        return True

    def release(self) -> None:
        """Release the lock; no effect if it is not held."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _wait_for(self, file: BinaryIO) -> None:
        deadline = time.monotonic() + self._patience_seconds
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"another process keeps it locked for more than {self._patience_seconds:g} s"
                    ) from None
                time.sleep(POLL_SECONDS)


def _cut_torn_line(file: BinaryIO) -> None:
    size = file.seek(0, 2)
    if size == 0:
        return
    file.seek(0)
    if file.read(len(_JOURNAL_START)) not in (_JOURNAL_START, _JOURNAL_START[:size]):
        raise ValueError("it does not begin like a journal of Optuna")  # another file, which must not be changed
    file.seek(-1, 2)
    if file.read(1) == b"\n":
        return
    start = max(0, size - _MAX_LINE_BYTES)
    file.seek(start)
    end = file.read().rfind(b"\n") + 1
    if start and not end:
        raise ValueError(f"its last line is longer than {_MAX_LINE_BYTES >> 20} MiB")
    file.truncate(start + end)


def make_storage(storage: str, sharing: StudySharing | None = None) -> BaseStorage:
    """Return the storage at ``storage``, a file or a database URL; its tables are created if they do not exist.

    Raises the errors of the driver and of Optuna; see optuna_storage.opening_errors.
    """
    if "://" not in storage:
        return _journal(Path(storage))
    dialect = dialect_of(storage)
    if dialect in DRIVERS and find_spec(DRIVERS[dialect][0]):
        dialect = f"{dialect}+{DRIVERS[dialect][0]}"  # SQLAlchemy's default for the plain name is another driver
    kind, _, driver = dialect.partition("+")
    url = f"{dialect}://{storage.partition('://')[2]}"
    engine: dict[str, Any] = {"connect_args": connect_arguments(kind, driver, url)}
    if kind in DRIVERS:
        engine["pool_pre_ping"] = True  # replaces a connection that was lost since its last use
    policy = sharing.retry if sharing else RetryPolicy()

    def create() -> RetryingStorage:
        return RetryingStorage(
            url,
            policy,
            engine_kwargs=engine,
            heartbeat_interval=sharing.heartbeat_seconds if sharing else None,
            grace_period=sharing.grace_seconds if sharing else None,
        )

    def is_dropped(error: Exception) -> bool:
        return kind != "sqlite" and is_retryable(error) and _is_reachable(url, engine["connect_args"])

    # A database that cannot be reached at all is reported at once, because its URL may be wrong.
    return policy.run(lambda _: _create_tables(create), is_dropped, redact(storage))


def connect_arguments(kind: str, driver: str, url: str) -> dict[str, int]:
    """Return the timeouts of a connection, without those that the URL sets."""
    timeouts = {"timeout": LOCK_SECONDS} if kind == "sqlite" else {}
    if kind in DRIVERS:
        timeouts = {"connect_timeout": CONNECT_SECONDS}
    if kind == "postgresql" and driver in ("", "psycopg", "psycopg2"):  # these use libpq
        timeouts |= _KEEPALIVE
    return {name: value for name, value in timeouts.items() if f"{name}=" not in url.partition("?")[2]}


def _is_reachable(url: str, connect_arguments: Mapping[str, Any]) -> bool:
    import sqlalchemy  # only here, because a study in a journal does not need it

    dialect = sqlalchemy.create_engine(url).dialect
    arguments, keywords = dialect.create_connect_args(sqlalchemy.make_url(url))
    try:
        dialect.connect(*arguments, **{**keywords, **connect_arguments}).close()
    except dialect.loaded_dbapi.Error:
        return False
    return True


def _create_tables(create: Callable[[], RetryingStorage]) -> RetryingStorage:
    """Return ``create()``, repeated if another worker creates the same tables at the same time."""
    for _ in range(CREATION_ATTEMPTS):
        try:
            return create()
        except (sql_errors.IntegrityError, sql_errors.ProgrammingError):
            time.sleep(random.uniform(0, MAX_CREATION_PAUSE_SECONDS))
    return create()


def _journal(path: Path) -> BaseStorage:
    path = path.resolve()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        file = next((parent for parent in path.parents if parent.is_file()), path.parent)
        raise NotADirectoryError(f"{file} is not a folder") from None
    lock: Any = JournalLock(path, LOCK_SECONDS)
    return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))


PROBLEM_ATTRIBUTE, FINGERPRINT_ATTRIBUTE = "problem", "fingerprint"
MAX_DIFFERENCE_LENGTH = 200  # characters of a difference in a message

optuna.logging.set_verbosity(optuna.logging.ERROR)
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
# optimizer.study.distributed.shared_study records the heartbeats
warnings.filterwarnings("ignore", message="Heartbeat of storage is supposed")


def open_study(
    storage: str | None,
    name: str,
    problem: Problem,
    sampler: BaseSampler,
    fingerprint: Fingerprint | None = None,
    sharing: StudySharing | None = None,
    conditions: Mapping[str, str | None] | None = None,
) -> optuna.Study:
    """Return the study ``name``, created if it does not exist yet, with one direction per objective.

    ``storage`` is the path of a journal file, a database URL (``sqlite:///…``, ``postgresql://…``, ``mysql://…``),
    or None for memory. Statements of a database are repeated for RETRY_SECONDS after a lost connection, or longer
    if ``sharing`` says so. ``conditions`` are further values, by name, that all workers of a shared study must have;
    one that is unknown (None) agrees with any other.

    Raises BadInputError if the storage cannot be opened, its driver is missing, or the study was made for another
    problem or other ``conditions``, or measured with another ``fingerprint``. Later errors of the storage (a lock, a
    lost connection, a full disk) are raised by the study as EnvironmentFault. No message contains a password.
    """
    shown = redact(storage or "memory")
    with opening_errors(storage or "memory"):
        study = optuna.create_study(
            storage=None if storage is None else make_storage(storage, sharing),
            study_name=name,
            sampler=sampler,
            directions=["maximize" if metric.better == "higher" else "minimize" for metric in problem.objectives],
            load_if_exists=True,
        )
        _refuse_other_problem(study, problem, conditions or {}, shown)
        _refuse_other_fingerprint(study, fingerprint, shown)
        if PROBLEM_ATTRIBUTE not in study.user_attrs:
            study.set_user_attr(PROBLEM_ATTRIBUTE, _problem_document(problem, conditions or {}))
        if fingerprint is not None and _stored_fingerprint(study) is None:
            study.set_user_attr(FINGERPRINT_ATTRIBUTE, fingerprint.to_document())
    if storage is not None:
        translate_storage_errors(storage_of(study), storage, sharing.retry.measurements_file if sharing else "")
    return study


def check_study(
    storage: str,
    name: str,
    problem: Problem,
    sampler: BaseSampler,
    fingerprint: Fingerprint,
    conditions: Mapping[str, str | None] | None = None,
) -> None:
    """Raise BadInputError if the stored study ``name`` is one that ``open_study`` would refuse.

    A study that does not exist is not created, and an existing one is not changed.
    """
    shown = redact(storage)
    with opening_errors(storage):
        if "://" not in storage and not Path(storage).exists():
            return
        backend = make_storage(storage)
        try:
            study = optuna.load_study(study_name=name, storage=backend, sampler=sampler)
        except KeyError:
            return
        _refuse_other_problem(study, problem, conditions or {}, shown)
        _refuse_other_fingerprint(study, fingerprint, shown)


def check_storage(storage: str) -> None:
    """Raise BadInputError if the value of ``--storage`` cannot be opened."""
    with opening_errors(storage, "--storage "):
        if re.match(r"[A-Za-z][\w+.-]*:(?!//)", storage):
            scheme = storage.partition(":")[0]
            raise BadInputError(f"--storage {scheme}:…: write a file, or a URL such as sqlite:///study.db")
        make_storage(storage)


def _problem_document(problem: Problem, conditions: Mapping[str, str | None]) -> dict[str, Any]:
    """Return what determines the values of a study's trials: the problem, and the conditions that are known."""
    return {
        "model": problem.model,
        "parameters": {name: list(choices) for name, choices in problem.space.parameters().items()},
        "request_batch_size": problem.request_batch_size,
        **({"request_mix": problem.request_mix.choices} if problem.request_mix else {}),
        **({"request_times": _request_times_text(problem.request_times)} if problem.request_times else {}),
        **({"priorities": str(problem.priorities)} if problem.priorities else {}),
        "objectives": [metric.name for metric in problem.objectives],
        "constraints": list(map(str, problem.sla)),
        **{name: value for name, value in conditions.items() if value is not None},
    }


def _refuse_other_problem(
    study: optuna.Study, problem: Problem, conditions: Mapping[str, str | None], shown: str
) -> None:
    """Raise ChangedRunError if the study has another problem or other conditions, which give other values."""
    stored = study.user_attrs.get(PROBLEM_ATTRIBUTE)
    if stored is None:
        return
    current = json.loads(json.dumps(_problem_document(problem, conditions)))
    unknown = {name for name, value in conditions.items() if value is None or name not in stored}
    keys = [key for key in {**current, **stored} if key not in unknown]  # either may lack settings of the other
    changed = [key for key in keys if current.get(key) != stored.get(key)]
    if changed:
        differences = " and ".join(f"{key} ({_difference(stored.get(key), current.get(key))})" for key in changed)
        raise ChangedRunError(
            f"{shown}: study {study.study_name!r} differs in {differences}; use the options that it "
            "was started with, or another study name"
        )


def _request_times_text(times: RequestTimes) -> str:
    """Return the distribution, or the size of a recording, whose path differs between machines."""
    return f"{times.recorded_requests} recorded" if times.recorded_requests else times.distribution


def _difference(stored: Any, current: Any) -> str:
    """Return the names of the choices that differ, or both values."""
    if isinstance(stored, Mapping) and isinstance(current, Mapping):
        names = sorted(name for name in {*stored, *current} if stored.get(name) != current.get(name))
        return one_line(", ".join(names), MAX_DIFFERENCE_LENGTH)
    return one_line(f"{_value_text(stored)} there, {_value_text(current)} here", MAX_DIFFERENCE_LENGTH)


def _value_text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None or value == "" else str(value)


def _stored_fingerprint(study: optuna.Study) -> Fingerprint | None:
    return parse_fingerprint(study.user_attrs.get(FINGERPRINT_ATTRIBUTE))


def _refuse_other_fingerprint(study: optuna.Study, fingerprint: Fingerprint | None, shown: str) -> None:
    """Raise ChangedRunError if the study has another fingerprint, whose measurements differ."""
    stored = _stored_fingerprint(study)
    if fingerprint is not None and stored is not None and stored != fingerprint:
        raise ChangedRunError(
            f"{shown}: study {study.study_name!r} was measured with another device, server or perf_analyzer "
            f"({fingerprint.differences(stored)}), and the two are not ranked together; begin another run on this "
            "one, with --warm-start and that run"
        )
