"""Atomic writes, write errors, locks between processes, and the cache folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from optimizer.core.errors import BadInputError, EnvironmentFault, TuneError
from optimizer.core.safe_text import one_line, read_tail

DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # the place is right, but its disk takes nothing
_REMEDIES = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space in your quota there",
    errno.EROFS: "make that file system writable",
    errno.EACCES: "make it writable",
    errno.EPERM: "make it writable",
}


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file of a run atomically, as ``replace_file``; the folder of ``path`` is created if it is missing.

    Raises EnvironmentFault if the disk refuses the write.
    """
    try:
        path.parent.mkdir(exist_ok=True)
        replace_file(path, content)
    except OSError as error:
        raise write_error(path, error) from error


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace the file atomically: after a crash or a power failure it has the old or the new content.

    Only one process at a time may write ``path``. Raises OSError.
    """
    scratch = path.with_name(f".{path.name}.new")
    try:
        with scratch.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink()  # it exists only after an error


def write_error(path: Path, error: OSError, then: str = "continue with `tune --resume`") -> EnvironmentFault:
    """Return the error to raise if writing ``path``, a file of a run, failed with ``error``.

    ``then`` says what to do once the disk is repaired.
    """
    remedy = _REMEDIES.get(error.errno or 0, "check that disk")
    return EnvironmentFault(f"cannot write {one_line(str(path))}: {error.strerror}; {remedy}, then {then}")


def output_error(path: Path, error: OSError, flag: str) -> TuneError:
    """Return the error to raise if writing ``path``, a place that the user chose with ``flag``, failed."""
    if error.errno in DISK_FAULTS:
        return write_error(path, error, "run the command again")
    return BadInputError(f"cannot write {one_line(str(path))}: {error.strerror}; give another place with {flag}")


def cache_folder() -> Path:
    """Return ``$TRITUNE_CACHE`` if it is set, otherwise ``tritune`` in the user's cache folder."""
    if folder := os.environ.get("TRITUNE_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tritune"


HOLDER_WAIT_SECONDS = 1.0  # a new holder writes its name into the lock file within this time


@contextlib.contextmanager
def file_lock(path: Path, busy: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock file ``path`` within the context, and remove it at the end. A killed holder leaves it unlocked.

    If another process holds the lock, ``busy`` is called with its name (``process 12 on host``). ``busy`` may raise;
    otherwise this process waits for the lock. Raises OSError if the file cannot be written or locked.
    """
    file = _acquired(path, busy)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # a disk that has become read-only
            path.unlink()  # before the release: waiting processes then notice that the file is no longer the lock
        file.close()


@contextlib.contextmanager
def folder_lock(folder: Path, task: str) -> Iterator[None]:
    """Keep other processes out of ``folder`` within the context. ``task`` names the work for the message.

    Raises EnvironmentFault naming the process that uses the folder, or if the disk refuses the lock file.
    """

    def busy(holder: str) -> None:
        raise EnvironmentFault(f"{folder}: {holder} uses it for {task}; wait until it ends, or stop it")

    lock = folder / ".lock"
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(file_lock(lock, busy))
        except OSError as error:
            raise write_error(lock, error) from error
        yield


def _acquired(path: Path, busy: Callable[[str], None]) -> TextIO:
    while True:
        with contextlib.ExitStack() as closing:
            file = closing.enter_context(path.open("a+"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                busy(_holder(path))
                fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(path, file):
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
                file.flush()
                closing.pop_all()
                return file


def _is_at(path: Path, file: TextIO) -> bool:
    """Return whether ``path`` is still ``file``, which its last holder may have removed."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    deadline = time.monotonic() + HOLDER_WAIT_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if text := one_line(read_tail(path, 200).strip()):
                return text
        time.sleep(0.01)
    return "another process"
