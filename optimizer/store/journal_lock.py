"""The lock of a journal file: the journal itself, locked in the kernel, which drops it with a killed process."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import BinaryIO

POLL_SECONDS = 0.01
_BEGINNING = b'{"op_code":'
_LONGEST_LINE = 16 << 20


class JournalLock:
    """For Optuna's JournalFileBackend, whose own locks are files: one that a killed process left is waited for.

    Held by whoever appends. A half line at the end, left by one that was killed or whose disk was full, is cut off
    first: the next entry would run into it.
    """

    def __init__(self, journal: Path, patience_seconds: float) -> None:
        self._journal = journal
        self._patience_seconds = patience_seconds
        self._file: BinaryIO | None = None

    def acquire(self) -> bool:
        """Raises TimeoutError where another process keeps it for longer than is to be waited for."""
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
    file.seek(-1, 2)
    if file.read(1) == b"\n":
        return
    file.seek(0)
    if file.read(len(_BEGINNING)) not in (_BEGINNING, _BEGINNING[:size]):
        raise ValueError("it does not begin as a journal of Optuna does")  # somebody's file: it stays as it is
    start = max(0, size - _LONGEST_LINE)
    file.seek(start)
    end = file.read().rfind(b"\n") + 1
    if start and not end:
        raise ValueError(f"its last line is longer than {_LONGEST_LINE >> 20} MiB")
    file.truncate(start + end)
