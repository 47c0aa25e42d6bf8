"""Atomic writes, write errors, locks between processes, sizes of folders, and the cache folder."""

from __future__ import annotations

import contextlib
import csv
import errno
import fcntl
import io
import json
import os
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
        scratch.unlink(missing_ok=True)  # of a killed process; in a folder from someone else it may be a link
        with scratch.open("xb") as file:
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


def shipped_folder(name: str) -> Path:
    """Return the folder ``name`` of the installed package; of the checkout if the package is an editable install."""
    package = Path(__file__).parents[1]
    checkout = package.parent
    if not (package / name).is_dir() and (checkout / "pyproject.toml").is_file():
        return checkout / name
    return package / name


def cache_folder() -> Path:
    """Return ``$TRITUNE_CACHE`` if it is set, otherwise ``tritune`` in the user's cache folder."""
    if folder := os.environ.get("TRITUNE_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tritune"


LOCK_FILE = ".lock"  # of a folder
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

    lock = folder / LOCK_FILE
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(file_lock(lock, busy))
        except OSError as error:
            raise write_error(lock, error) from error
        yield


def lock_holder(lock: Path) -> str | None:
    """Return the name of the process that holds the lock file ``lock``; None if no process does.

    The lock is shared for an instant, in which a process that wants it finds it held.
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


def stored_bytes(*paths: Path) -> int:
    """Return the total size of the files at or below ``paths``; a file with several hard links counts once.

    Links are not followed. Files that cannot be read, or are removed meanwhile, are left out.
    """
    sizes: dict[tuple[int, int], int] = {}
    for path in paths:
        folders = () if path.is_symlink() else os.walk(path)
        files = (Path(folder, name) for folder, _, names in folders for name in names)
        for file in (path, *files):
            with contextlib.suppress(OSError):
                status = file.lstat()
                if not stat.S_ISDIR(status.st_mode):
                    sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


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


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Write a table as CSV; values that a row lacks are empty. Raises EnvironmentFault."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(row.get(column)) for column in columns] for row in rows)
    write_atomically(path, text.getvalue())


def _cell(value: object) -> object:
    if isinstance(value, bool):
        return "true" if value else "false"
    return " ".join(map(str, value)) if isinstance(value, list) else value


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write indented JSON with a final line break. Raises EnvironmentFault."""
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
