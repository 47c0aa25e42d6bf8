"""Locks between processes: a lock file, and the lock of a whole folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from optimizer.core.errors import EnvironmentFault
from optimizer.core.files import write_error
from optimizer.core.safe_text import one_line, read_tail

LOCK_FILE = ".lock"  # name of the file in the locked folder
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
def folder_lock(folder: Path, content: str) -> Iterator[None]:
    """Keep other processes out of ``folder`` within the context.

    ``content`` names it for the message, such as ``this run``. Raises EnvironmentFault naming the process that uses
    the folder, or if the disk refuses the lock file.
    """

    def busy(holder: str) -> None:
        raise EnvironmentFault(f"{folder}: {holder} uses {content}; wait until it ends, or stop it")

    lock = folder / LOCK_FILE
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(file_lock(lock, busy))
        except OSError as error:
            raise write_error(lock, error, "run the command again") from error
        yield


def lock_holder(lock: Path) -> str | None:
    """Return the name of the process that holds the lock file ``lock``; None if no process does.

    The test takes a shared lock for a moment; a process that tries to lock the file at that moment fails.
    """
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe of that name must not block
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(lock)
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(descriptor)
    return None


def _acquired(path: Path, busy: Callable[[str], None]) -> TextIO:
    while True:
        with contextlib.ExitStack() as closing:
            file = closing.enter_context(open(path, "a+", opener=_open_no_link))
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


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


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
