"""What somebody else wrote: files read no further than a bound, texts shown so that they can only be read."""

from __future__ import annotations

import os
from pathlib import Path

from optimizer.errors import BadInputError


def one_line(text: str, most: int | None = None) -> str:
    """``text`` on one line of a terminal: whatever is not printable (control characters, line ends, marks that turn
    the direction of reading) as Python's escape for it.

    What is longer than ``most`` loses its middle: the end of a message often says what is wrong.
    """
    line = text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    if most is None or len(line) <= most:
        return line
    head = most // 3
    return f"{line[:head]}…{line[head + 1 - most :]}"


def read_bytes(path: Path, most: int, hint: str) -> bytes:
    """The whole file. Raises BadInputError where it cannot be read, is no file (a pipe would block, a device would
    not end) or has more than ``most`` bytes; ``hint`` then says what to do."""
    name = one_line(str(path))
    try:
        if path.exists() and not path.is_file():
            raise BadInputError(f"{name}: not a file")
        with path.open("rb") as file:
            data = file.read(most + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        reason = getattr(error, "strerror", None) or "not a path"
        raise BadInputError(f"{name}: cannot be read: {reason}") from None
    if len(data) > most:
        raise BadInputError(f"{name}: larger than {most >> 20} MiB; {hint}")
    return data


def read_tail(path: Path, most: int, start: int = 0) -> str:
    """The end of a log: of its bytes from ``start`` on the last ``most``. Raises OSError."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - most))
        return file.read(most).decode(errors="replace")
