"""Files that are there whole or as they were before, and what is said when a disk refuses them."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from optimizer.errors import EnvironmentFault

_MENDS = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space in your quota there",
    errno.EROFS: "make that file system writable",
    errno.EACCES: "make it writable",
    errno.EPERM: "make it writable",
}


def write_whole(path: Path, content: str | bytes) -> None:
    """Write the file at once: whatever happens, the power failing too, it is the new one or the old one.

    Its folder is made where there is none. Raises EnvironmentFault where the disk refuses it. One process at a time
    may write ``path``.
    """
    scratch = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(exist_ok=True)
        with scratch.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink()  # there only where something went wrong


def cannot_write(path: Path, error: OSError) -> EnvironmentFault:
    """To be raised where ``error`` came from writing ``path``, a file of a run."""
    mend = _MENDS.get(error.errno or 0, "see to that disk")
    return EnvironmentFault(f"cannot write {path}: {error.strerror}; {mend}, then `tune --resume` goes on")
