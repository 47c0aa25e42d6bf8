"""What Optuna and the drivers of databases raise, as one line without a password."""

from __future__ import annotations

import contextlib
import functools
import sqlite3
from collections.abc import Callable, Iterator
from typing import Any

import sqlalchemy.exc
from optuna.exceptions import OptunaError, StorageInternalError
from optuna.storages import BaseStorage

from optimizer.command_line import redact
from optimizer.errors import BadInputError, EnvironmentFault
from optimizer.store.patience import Patience
from optimizer.untrusted import one_line

# driver that a plain URL means, and how it is installed
DRIVERS = {
    "postgresql": ("psycopg", "pip install 'tritune[postgresql]'"),
    "mysql": ("pymysql", "pip install pymysql"),
}
_DAMAGED = (ValueError, KeyError, TypeError, AssertionError)  # Optuna replaying a journal that is none
_REFUSED = (sqlalchemy.exc.SQLAlchemyError, StorageInternalError, OSError)
_LOST = (sqlalchemy.exc.OperationalError, sqlalchemy.exc.InterfaceError)  # what a restart of the server may mend


@contextlib.contextmanager
def opening(storage: str, flag: str = "") -> Iterator[None]:
    """While a study is opened every fault is a BadInputError: ``storage`` is what the user named."""
    shown = flag + redact(storage)
    try:
        yield
    except ImportError as error:
        raise BadInputError(f"{shown}: its database driver is not installed; {_mend(storage)}") from error
    except sqlalchemy.exc.NoSuchModuleError as error:
        raise BadInputError(f"{shown}: unknown kind of database; write sqlite, postgresql or mysql") from error
    except (*_REFUSED, *_DAMAGED, OptunaError, RuntimeError) as error:
        cause = cause_of(error, storage)
        if not _is_damaged(error):
            raise BadInputError(f"{shown}: the study cannot be opened: {cause}") from error
        raise BadInputError(
            f"{shown}: is not an intact study: {cause}; move it away: a run that is resumed fills a new one"
        ) from error


def name_later_faults(storage: BaseStorage, url: str, patience: Patience | None = None) -> None:
    """From now on ``storage`` raises an EnvironmentFault where it is locked, lost, damaged or full. With ``patience``
    one that does not answer is asked again."""
    for name in vars(BaseStorage):
        call = getattr(storage, name, None)
        if callable(call) and not name.startswith("_"):
            setattr(storage, name, _named(call, url, patience))


def _named(call: Callable[..., Any], url: str, patience: Patience | None) -> Callable[..., Any]:
    @functools.wraps(call)
    def once(*arguments: Any, **keywords: Any) -> Any:
        try:
            return call(*arguments, **keywords)
        except (*_REFUSED, *_DAMAGED, AttributeError) as error:  # Optuna's other errors are for its own use
            if patience is not None and _is_lost(error):
                raise
            raise EnvironmentFault(
                f"{redact(url)}: the study cannot be kept: {cause_of(error, url)}; "
                "once that is mended, `tune --resume` goes on"
            ) from error

    if patience is None:
        return once

    @functools.wraps(call)
    def patiently(*arguments: Any, **keywords: Any) -> Any:
        while True:
            try:
                found = once(*arguments, **keywords)
            except (*_LOST, StorageInternalError) as error:
                patience.wait(redact(url), cause_of(error, url))
            else:
                patience.answered(redact(url))
                return found

    return patiently


def dialect_of(storage: str) -> str:
    """``postgresql+psycopg://…`` -> ``postgresql+psycopg``; the old name of PostgreSQL is understood."""
    dialect = storage.partition("://")[0]
    return "postgresql" if dialect == "postgres" else dialect


def cause_of(error: BaseException, storage: str) -> str:
    """The innermost message in one line; a driver may repeat the URL, so the password is taken out."""
    error = _innermost(error)
    said = getattr(error, "orig", None) or getattr(error, "strerror", None) or error
    text = " ".join(str(said).split()) or type(error).__name__
    return one_line(redact(text, storage), 300)


def _innermost(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _is_lost(error: BaseException) -> bool:
    return isinstance(error, _LOST) or (
        isinstance(error, StorageInternalError) and isinstance(error.__cause__, _LOST)
    )


def _is_damaged(error: BaseException) -> bool:
    """Whether something is there, but no study."""
    if isinstance(error, _DAMAGED):
        return True
    cause = _innermost(error)
    return isinstance(cause, sqlite3.DatabaseError) and not isinstance(cause, sqlite3.OperationalError)


def _mend(storage: str) -> str:
    driver = DRIVERS.get(dialect_of(storage))
    return driver[1] if driver else f"install the driver that {dialect_of(storage)} names"
