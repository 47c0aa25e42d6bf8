"""Bounded reading of untrusted files, names and paths that stay in their folder, and texts safe for a terminal."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from optimizer.core.errors import BadInputError

QUOTE_LENGTH = 300  # limit for the characters of a value in a message


def one_line(text: str, max_characters: int | None = None) -> str:
    """Return ``text`` on one line, safe for a terminal.

    Characters that are not printable (control characters, line ends, bidirectional marks) become Python escapes. A
    text longer than ``max_characters`` characters loses its middle, as the end of a message often has the cause.
    """
    line = text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    if max_characters is None or len(line) <= max_characters:
        return line
    head = max_characters // 3
    return f"{line[:head]}…{line[head + 1 - max_characters :]}"


def shorten(text: str, max_characters: int = 300) -> str:
    """Return ``text`` on one printable line of at most ``max_characters``, with runs of spaces collapsed."""
    return one_line(" ".join(text.split()), max_characters)


def quote(text: str) -> str:
    """Return ``text`` on one line for a message, shortened to QUOTE_LENGTH; blank text is shown as ``' '``."""
    return one_line(text, QUOTE_LENGTH) if text.strip() else ascii(text[:QUOTE_LENGTH])


def show_path(path: str | Path) -> str:
    """Return ``path`` as text on one printable line."""
    return one_line(str(path))


def printable(value: Any) -> Any:
    """Return a JSON value in which every text, also each key, is as ``one_line`` returns it."""
    if isinstance(value, str):
        return one_line(value)
    if isinstance(value, dict):
        return {one_line(key): printable(element) for key, element in value.items()}
    return [printable(element) for element in value] if isinstance(value, list) else value


def read_bytes(path: Path, max_bytes: int, hint: str) -> bytes:
    """Return the content of a file.

    Raises BadInputError if it cannot be read, is not a regular file (a pipe would block, a device has no end), or has
    more than ``max_bytes`` bytes. ``hint`` ends the message about a file that is too large.
    """
    check_file(path)
    name = show_path(path)
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise BadInputError(f"{name}: cannot be read: {error.strerror}; make it readable") from None
    if len(data) > max_bytes:
        raise BadInputError(f"{name}: larger than {max_bytes >> 20} MiB; {hint}")
    return data


def decode_utf8(data: bytes, file: str) -> str:
    """Return the text of ``file`` without a byte order mark. Raises BadInputError: ``file:line: problem``."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        byte = f"{data[error.start]:#04x}"
        raise BadInputError(f"{file}:{line}: byte {byte} is not UTF-8 text; save the file as UTF-8") from None


def check_file(path: Path) -> None:
    """Raise BadInputError if ``path`` is not a regular file, or cannot be looked up.

    That is so if its folder cannot be read, for a loop of links, and for a name that is too long or has a NUL byte.
    """
    if fault := file_fault(path):
        raise BadInputError(f"{show_path(path)}: {fault}; check the path")


def named_file(argument: str, text: str, wanted: str) -> Path:
    """Return the path ``text`` of a file that the user gave as ``argument``, an option or the name of an argument.

    Raises BadInputError if it is empty or not a regular file. ``wanted`` ends the message with the file to give.
    """
    if fault := file_fault(Path(text)) if text.strip() else "is empty":
        raise BadInputError(f"{argument} {quote(text)}: {fault}; give {wanted}")
    return Path(text)


def file_fault(path: Path) -> str:
    """Return why ``path`` is not a regular file, such as ``no such file``; empty if it is one."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "no such file"
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        return f"cannot be read: {getattr(error, 'strerror', None) or 'not a path'}"
    if stat.S_ISREG(mode):
        return ""
    return "is a folder" if stat.S_ISDIR(mode) else "is a device or a pipe"


def read_tail(path: Path, max_bytes: int, start: int = 0) -> str:
    """Return the last ``max_bytes`` of a file as text, ignoring those before offset ``start``. Raises OSError."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - max_bytes))
        return file.read(max_bytes).decode(errors="replace")


def check_file_name(text: str) -> str:
    """Return ``text`` if it can be the name of a file in a folder. Raises ValueError with the reason if not."""
    if not text:
        raise ValueError("'' is not a name")
    if not text.isprintable():
        raise ValueError(f"{format_value(text)} has control characters")
    if "/" in text or "\\" in text:
        raise ValueError(f"{format_value(text)} has a separator; write the name alone, without folders")
    if text.startswith(".") or ".." in text:
        raise ValueError(f"{format_value(text)} must not begin with a dot or have '..' in it")
    return text


# a shell takes all other characters literally: those of shlex.quote, and letters of any language
_NOT_LITERAL = re.compile(r"[^\w.@%+=:,-]")


def check_shell_word(text: str) -> str:
    """Return ``text`` if it can be the name of a file and a shell takes it literally without quotes.

    Triton's Python backend starts the process of a model through bash, with names that it does not quote. Raises
    ValueError with the reason.
    """
    if special := _NOT_LITERAL.search(check_file_name(text)):
        raise ValueError(
            f"{format_value(text)} has {format_value(special[0])}, which the shell that starts a model would not "
            "take literally; rename it with letters, digits and . _ -"
        )
    return text


def is_shell_path(path: str | Path) -> bool:
    """Return whether a shell takes the absolute ``path`` literally without quotes."""
    return not _NOT_LITERAL.search(str(path).replace(os.sep, ""))


def resolve_inside(folder: Path, text: str) -> Path:
    """Return the absolute path of ``text`` in ``folder``, with links resolved.

    Raises ValueError if ``text`` is absolute, leads out of ``folder`` (by ``..`` or a link) or does not exist.
    """
    if not text or not text.isprintable():
        raise ValueError(f"{format_value(text)} is not a path")
    if Path(text).is_absolute() or "\\" in text:
        raise ValueError(f"{format_value(text)} must be a relative path, with / between its parts")
    try:
        root = folder.resolve()
        path = (root / text).resolve()
        exists = path.exists()
    except (OSError, RuntimeError, ValueError):  # too long, a loop of links, no permission
        raise ValueError(f"{format_value(text)} cannot be followed") from None
    if not path.is_relative_to(root):
        raise ValueError(f"{format_value(text)} leads out of its folder; give a path inside it")
    if not exists:
        raise ValueError(f"{format_value(text)} does not exist in {show_path(root)}")
    return path


def is_file(path: Path) -> bool:
    """Return whether ``path`` is a file. False also for an impossible path: a name too long, or a NUL byte."""
    return _is_true(path.is_file)


def is_folder(path: Path) -> bool:
    """Return whether ``path`` is a folder. False also for an impossible path."""
    return _is_true(path.is_dir)


def exists(path: Path) -> bool:
    """Return whether ``path`` exists, also as a device or a pipe. False also for an impossible path."""
    return _is_true(path.exists)


def readable_entries(folder: Path) -> list[Path]:
    """Return the entries of ``folder``; none if it cannot be read or does not exist."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _is_true(check: Callable[[], bool]) -> bool:
    try:
        return check()
    except (OSError, ValueError):
        return False


def format_value(value: object) -> str:
    """Return ``value`` as it would be written in YAML, on one line of at most 60 characters."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, tuple):
        text = f"[{', '.join(format_value(item) for item in value[:8])}{', …' if len(value) > 8 else ''}]"
    elif isinstance(value, str):
        text = repr(value) if value.isprintable() else ascii(value)
    else:
        text = "null" if value is None else scalar_text(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def scalar_text(value: object) -> str:
    """Return a scalar as YAML and a config.pbtxt write it: ``true`` for True."""
    return str(value).lower() if isinstance(value, bool) else str(value)
