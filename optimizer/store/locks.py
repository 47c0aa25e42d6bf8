"""Locks between processes. The kernel drops them with their holder, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from optimizer.errors import EnvironmentFault
from optimizer.store.disk import cannot_write
from optimizer.untrusted import one_line, read_tail

NAMED_SECONDS = 1.0  # a holder writes at once who it is


@contextlib.contextmanager
def locked(path: Path, busy: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock file ``path``, which is removed at the end; a killed holder leaves it, unlocked.

    Where another process holds it ``busy`` is called with who that is (``process 12 on host``): it may raise, else
    the lock is waited for. Raises OSError where the file cannot be written or locked.
    """
    file = _acquired(path, busy)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # a disk that has become read-only
            path.unlink()  # while it is held: who waits for it finds that it is no longer the lock
        file.close()


@contextlib.contextmanager
def alone_in(folder: Path, doing: str) -> Iterator[None]:
    """Keep other processes out of ``folder``. Raises EnvironmentFault naming the one that is at work on ``doing`` in
    it, or where the disk refuses."""

    def busy(holder: str) -> None:
        raise EnvironmentFault(f"{folder}: {holder} is at work on {doing}; wait for its end, or end it")

    lock = folder / ".lock"
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(lock, busy))
        except OSError as error:
            raise cannot_write(lock, error) from error
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
    """Whether ``path`` still is ``file``: its last holder has removed it."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    deadline = time.monotonic() + NAMED_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if text := one_line(read_tail(path, 200).strip()):
                return text
        time.sleep(0.01)
    return "another process"
