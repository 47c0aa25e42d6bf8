"""The adapter to Optuna's private API, and database storages that repeat statements after a lost connection.

No other module uses a name of Optuna that begins with an underscore.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

import optuna
from optuna.exceptions import OptunaError, StorageInternalError, UpdateFinishedTrialError
from optuna.storages import BaseStorage, RDBStorage
from optuna.storages._cached_storage import _CachedStorage
from optuna.storages._heartbeat import is_heartbeat_enabled
from optuna.storages._rdb import storage as rdb_storage
from optuna.trial import FrozenTrial, TrialState, create_trial

from optimizer.core.errors import BadInputError, EnvironmentFault
from optimizer.core.files import DISK_FAULTS, REMEDIES
from optimizer.core.safe_text import one_line
from optimizer.options.addresses import redact

RETRY_SECONDS = 30.0  # time from the first failure of a statement to its last repetition
FIRST_PAUSE_SECONDS = 0.05  # pause before the first repetition; each later one is twice as long
REPORT_SECONDS = 1.0  # shorter outages are not reported

# Optuna's `models` and SQLAlchemy's errors are imported at first use: a study in a journal needs 11 MB less.
rdb: Any = rdb_storage
sql_errors: Any = rdb.sqlalchemy_exc
# Operational errors that repeating a statement does not resolve: no space, read-only, no permission.
_LASTING_SQLITE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM)
_LASTING_SQLSTATES = ("53100",)  # PostgreSQL: disk_full
_LASTING_MYSQL = (1021, 1114, 1290, 1836)  # disk full, table full, read-only option, read-only mode

Returned = TypeVar("Returned")


def is_retryable(error: BaseException) -> bool:
    """Return whether a statement failed because the database is unreachable or locked, so that a retry may help."""
    cause = error.__cause__ if isinstance(error, StorageInternalError) else error
    if isinstance(cause, sql_errors.DBAPIError):
        if _is_lasting(cause.orig):
            return False
        is_lost = isinstance(cause, (sql_errors.OperationalError, sql_errors.InterfaceError))
        return is_lost or cause.connection_invalidated
    # Optuna went on in a transaction whose connection was lost
    return isinstance(cause, sql_errors.PendingRollbackError)


def _is_lasting(error: BaseException | None) -> bool:
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", 0) & 0xFF in _LASTING_SQLITE  # the upper bits are a subtype
    if sqlstate := getattr(error, "sqlstate", None):
        return sqlstate in _LASTING_SQLSTATES
    return bool(error and error.args and error.args[0] in _LASTING_MYSQL)


@dataclass
class RetryPolicy:
    """Repeats a statement for ``seconds``, or until ``until`` if that is later.

    Attributes:
        until: A time by ``time.monotonic()``.
        report: Called with one line when an outage exceeds REPORT_SECONDS, and one when it is over.
        measurements_file: The file that has all measurements meanwhile.
        longest_pause_seconds: The pause between two attempts doubles each time, up to this.
        seconds: Time from the first failure to the last attempt.
    """

    until: float = 0.0
    report: Callable[[str], None] | None = None
    measurements_file: str = ""
    longest_pause_seconds: float = 10.0
    seconds: float = field(default_factory=lambda: RETRY_SECONDS)
    _is_ended: bool = field(default=False, init=False)

    def run(
        self, attempt: Callable[[bool], Returned], is_retryable: Callable[[Exception], bool], shown: str
    ) -> Returned:
        """Return ``attempt(False)``, or the first ``attempt(True)`` that succeeds after a retryable error.

        All other errors, and the last one when no time is left, are raised unchanged. ``shown`` names the database
        in reports.
        """
        began: float | None = None
        pause_seconds, is_reported = FIRST_PAUSE_SECONDS, False
        while True:
            try:
                returned = attempt(began is not None)
            except Exception as error:
                now = time.monotonic()
                began = now if began is None else began
                left_seconds = max(self.until, began + self.seconds) - now
                if not is_retryable(error) or left_seconds <= 0 or self._is_ended:
                    raise
            else:
                if is_reported:
                    self._report(f"{shown}: the database answers again")
                return returned
            if now - began >= REPORT_SECONDS and not is_reported:
                is_reported = True
                measurements = f"all measurements are in {self.measurements_file}"
                self._report(f"{shown}: the database does not answer; waiting, {measurements}")
            time.sleep(min(pause_seconds, left_seconds))
            pause_seconds = min(2 * pause_seconds, self.longest_pause_seconds)

    def end(self) -> None:
        """Stop retrying: from now on every error is raised at once."""
        self._is_ended = True

    def _report(self, line: str) -> None:
        if self.report is not None:
            self.report(line)


# System attributes of a trial: the id of the call that created it, and of the call that took it from the queue.
CREATED_BY, CLAIMED_BY = "tritune:created_by", "tritune:claimed_by"
HEARTBEATS = ("record_heartbeat", "_get_stale_trial_ids")  # methods that only a database storage has
# Each is one transaction that can be repeated: a read, an upsert, or an insert whose duplicate Optuna ignores.
# A repeated create_new_study may report a duplicate, which create_study(load_if_exists=True) expects.
REPEATABLE_METHODS = (
    *("create_new_study", "set_study_user_attr", "set_study_system_attr"),
    *("get_study_id_from_name", "get_study_name_from_id", "get_study_directions", "get_all_studies"),
    *("get_study_user_attrs", "get_study_system_attrs"),
    *("set_trial_param", "_set_trial_param", "set_trial_intermediate_value"),
    *("set_trial_user_attr", "set_trial_system_attr"),
    *("get_trial", "get_trial_param", "get_trial_user_attrs", "get_trial_system_attrs", "_get_trials"),
    *("get_trial_id_from_study_id_trial_number", "_get_best_trial_id"),
    *HEARTBEATS,
)


class RetryingStorage(RDBStorage):
    """A database storage that repeats a statement after a lost connection, according to ``policy``.

    After a lost connection it is unknown whether the last COMMIT succeeded. A repeated write therefore first checks
    whether its rows exist: no trial is created twice, taken from the queue without being run, or finished twice.
    """

    def __init__(self, url: str, policy: RetryPolicy, **keywords: Any) -> None:
        """Connect to ``url``; ``keywords`` are those of RDBStorage."""
        self._policy = policy
        super().__init__(url, **keywords)

    def _repeated(self, attempt: Callable[[bool], Returned]) -> Returned:
        return self._policy.run(attempt, is_retryable, redact(self.url))

    def _create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> FrozenTrial:
        """Create a trial once. Optuna's method retries by itself and may create the trial several times."""
        template = copy.deepcopy(template_trial) if template_trial else create_trial(state=TrialState.RUNNING)
        call = uuid.uuid4().hex
        template.system_attrs = {**template.system_attrs, CREATED_BY: call}
        return self._repeated(lambda is_retry: self._create_once(study_id, template, call if is_retry else None))

    def _create_once(self, study_id: int, template: FrozenTrial, earlier_call: str | None) -> FrozenTrial:
        with rdb._create_scoped_session(self.scoped_session) as session:
            # The lock makes trial numbers unique, and waits for an earlier attempt whose COMMIT is still in progress.
            rdb.models.StudyModel.find_or_raise_by_id(study_id, session, for_update=True)
            trial = None if earlier_call is None else _created_by(earlier_call, study_id, session)
            if trial is None:
                trial = self._get_prepared_new_trial(study_id, template, session)
            created = copy.deepcopy(template)
            created.number, created.datetime_start = int(trial.number), trial.datetime_start
            created._trial_id = int(trial.trial_id)
            return created

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        """Start or finish a trial; return False if another worker has started it."""
        if state == TrialState.RUNNING:
            call = uuid.uuid4().hex
            return self._repeated(lambda _: self._claim(trial_id, call))
        return self._repeated(lambda is_retry: self._finish(trial_id, state, values, is_retry))

    def _claim(self, trial_id: int, call: str) -> bool:
        """Take a trial from the queue; return False if another call has taken it."""
        attributes = rdb.models.TrialSystemAttributeModel
        with rdb._create_scoped_session(self.scoped_session) as session:
            trial = rdb.models.TrialModel.find_or_raise_by_id(trial_id, session, for_update=True)
            self.check_trial_is_updatable(trial_id, trial.state)
            if trial.state != TrialState.WAITING:
                claim = attributes.find_by_trial_and_key(trial, CLAIMED_BY, session)
                return claim is not None and json.loads(claim.value_json) == call
            self._set_trial_attr_without_commit(session, attributes, trial_id, CLAIMED_BY, call)
            trial.state, trial.datetime_start = TrialState.RUNNING, datetime.now()
        return True

    def _finish(self, trial_id: int, state: TrialState, values: Sequence[float] | None, is_retry: bool) -> bool:
        try:
            return super().set_trial_state_values(trial_id, state, values)
        except UpdateFinishedTrialError:
            if not is_retry:
                raise
            stored = self.get_trial(trial_id)
            if stored.state != state or (values is not None and stored.values != list(values)):
                raise  # another worker finished it
            return True


def _repeatable(name: str) -> Callable[..., Any]:
    method = getattr(RDBStorage, name)

    @functools.wraps(method)
    def repeated(self: RetryingStorage, *arguments: Any, **keywords: Any) -> Any:
        return self._repeated(lambda _: method(self, *arguments, **keywords))

    return repeated


for _name in REPEATABLE_METHODS:
    setattr(RetryingStorage, _name, _repeatable(_name))


def _created_by(call: str, study_id: int, session: Any) -> Any:
    trial, attribute = rdb.models.TrialModel, rdb.models.TrialSystemAttributeModel
    query = session.query(trial).join(attribute, attribute.trial_id == trial.trial_id)
    is_created = (attribute.key == CREATED_BY, attribute.value_json == json.dumps(call))
    return query.filter(trial.study_id == study_id, *is_created).one_or_none()


def storage_of(study: optuna.Study) -> BaseStorage:
    """Return the storage that ``study`` reads and writes."""
    return study._storage


def enter_trial(study: optuna.Study, template: FrozenTrial) -> int:
    """Create a trial like ``template`` in ``study`` and return its id, which is unique in the storage."""
    return study._storage.create_new_trial(study._study_id, template)


def trial_number(study: optuna.Study, trial_id: int) -> int:
    """Return the number within ``study`` of the trial ``trial_id``."""
    return study._storage.get_trial(trial_id).number


def set_trial_attribute(study: optuna.Study, trial: FrozenTrial | int, key: str, value: Any) -> None:
    """Set a user attribute of a running trial, which is given as an object or by its id."""
    trial_id = trial if isinstance(trial, int) else trial._trial_id
    study._storage.set_trial_user_attr(trial_id, key, value)


def has_heartbeats(study: optuna.Study) -> bool:
    """Return whether the storage of ``study`` records heartbeats of running trials."""
    return is_heartbeat_enabled(study._storage)


def record_heartbeat(study: optuna.Study, trial_id: int) -> None:
    """Record a heartbeat of the trial ``trial_id``, with retries after a lost connection."""
    study._storage.record_heartbeat(trial_id)  # type: ignore[attr-defined]


def record_heartbeat_once(study: optuna.Study, trial_id: int) -> None:
    """Record a heartbeat of the trial ``trial_id`` without a retry. Raises the database's error."""
    assert isinstance(study._storage, _CachedStorage)
    RDBStorage.record_heartbeat(study._storage._backend, trial_id)


# The driver of a plain URL, and how to install it.
DRIVERS = {
    "postgresql": ("psycopg", "pip install 'tritune[postgresql]'"),
    "mysql": ("pymysql", "pip install pymysql"),
}
_DAMAGE_ERRORS = (ValueError, KeyError, TypeError, AssertionError)  # raised by Optuna for a damaged journal


def storage_errors(*further_errors: type[Exception]) -> tuple[type[Exception], ...]:
    """Return the errors of a storage that cannot be reached, read or written, and ``further_errors``."""
    return (sql_errors.SQLAlchemyError, StorageInternalError, OSError, *further_errors)


@contextlib.contextmanager
def opening_errors(storage: str, flag: str = "") -> Iterator[None]:
    """Translate every error while a study is opened into one about ``storage``, as the user named it.

    It is a BadInputError, or an EnvironmentFault if the disk of the storage is full or faulty.
    """
    shown = flag + redact(storage)
    try:
        yield
    except ImportError as error:
        dialect = dialect_of(storage)
        advice = DRIVERS[dialect][1] if dialect in DRIVERS else f"install the driver that {dialect} names"
        raise BadInputError(f"{shown}: its database driver is not installed; {advice}") from error
    except sql_errors.NoSuchModuleError as error:
        raise BadInputError(f"{shown}: unknown kind of database; write sqlite, postgresql or mysql") from error
    except storage_errors(*_DAMAGE_ERRORS, OptunaError, RuntimeError) as error:
        cause = error_cause(error, storage)
        if _is_full(_innermost(error)):
            next_step = "run the command again" if flag else "continue with `tune --resume`"
            fix = f"free space there, then {next_step}"
            raise EnvironmentFault(f"{shown}: the study cannot be stored: {cause}; {fix}") from error
        if not _is_damaged(error):
            fix = "give another --storage" if flag else "check that file or database"
            raise BadInputError(f"{shown}: the study cannot be opened: {cause}; {fix}") from error
        raise BadInputError(
            f"{shown}: is not an intact study: {cause}; move it away: a resumed run creates a new one"
        ) from error


def translate_storage_errors(storage: BaseStorage, url: str, measurements_file: str) -> None:
    """Make the methods of ``storage`` raise an EnvironmentFault if it is locked, unreachable, damaged or full.

    ``measurements_file`` names the file that has all measurements meanwhile.
    """
    for name in (*vars(BaseStorage), *HEARTBEATS):
        method = getattr(storage, name, None)
        if callable(method) and (name in HEARTBEATS or not name.startswith("_")):
            setattr(storage, name, _translated(method, url, measurements_file))


def _translated(method: Callable[..., Any], url: str, measurements_file: str) -> Callable[..., Any]:
    measurements = f"all measurements are in {measurements_file}; " if measurements_file else ""

    @functools.wraps(method)
    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            return method(*arguments, **keywords)
        except storage_errors(*_DAMAGE_ERRORS, AttributeError) as error:  # Optuna handles its other errors itself
            cause = _innermost(error)
            fix = "free space there" if _is_full(cause) else REMEDIES.get(getattr(cause, "errno", 0), "fix that")
            raise EnvironmentFault(
                f"{redact(url)}: the study cannot be stored: {error_cause(error, url)}; "
                f"{measurements}{fix}, then continue with `tune --resume`"
            ) from error

    return call


def dialect_of(storage: str) -> str:
    """Return the dialect and driver of a URL, such as ``postgresql+psycopg``; ``postgres`` means ``postgresql``."""
    dialect = storage.partition("://")[0]
    return "postgresql" if dialect == "postgres" else dialect


def error_cause(error: BaseException, storage: str) -> str:
    """Return the innermost message in one line, without the password, which a driver may repeat with the URL."""
    error = _innermost(error)
    message = getattr(error, "orig", None) or getattr(error, "strerror", None) or error
    text = " ".join(str(message).split()) or type(error).__name__
    return one_line(redact(text, storage), 300)


def _innermost(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _is_full(error: BaseException) -> bool:
    """Return whether the disk of a storage is full or faulty."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
    return isinstance(error, OSError) and error.errno in DISK_FAULTS


def _is_damaged(error: BaseException) -> bool:
    """Return whether the storage exists but is not a study."""
    if isinstance(error, _DAMAGE_ERRORS):
        return True
    cause = _innermost(error)
    return isinstance(cause, sqlite3.DatabaseError) and not isinstance(cause, sqlite3.OperationalError)
