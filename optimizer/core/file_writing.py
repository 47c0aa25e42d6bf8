"""Atomic writes of files, as text, CSV or JSON, and the errors to raise if a disk refuses a write."""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from optimizer.core.errors import BadInputError, EnvironmentFault, TuneError
from optimizer.core.safe_text import one_line

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
