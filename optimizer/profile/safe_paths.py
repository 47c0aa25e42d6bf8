"""Names and paths that somebody else wrote: asked about without surprise, and never leaving their folder."""

from __future__ import annotations

from pathlib import Path

from optimizer.profile.yaml_lines import show
from optimizer.untrusted import one_line


def plain_name(text: str) -> str:
    """``text`` where it can name one entry of a folder. Raises ValueError, saying what would be right."""
    if not text:
        raise ValueError("'' is not a name")
    if not text.isprintable():
        raise ValueError(f"{show(text)} has control characters")
    if "/" in text or "\\" in text:
        raise ValueError(f"{show(text)} has a separator; write the name alone, without folders")
    if text.startswith(".") or ".." in text:
        raise ValueError(f"{show(text)} must not begin with a dot or have '..' in it")
    return text


def inside(folder: Path, text: str) -> Path:
    """The absolute path of ``text`` in ``folder``, links followed.

    Raises ValueError where it is absolute, leads out of ``folder`` (by ``..`` or a link) or does not exist.
    """
    if not text or not text.isprintable():
        raise ValueError(f"{show(text)} is not a path")
    if Path(text).is_absolute() or "\\" in text:
        raise ValueError(f"{show(text)} must be a relative path, with / between its parts")
    try:
        root = folder.resolve()
        path = (root / text).resolve()
        exists = path.exists()
    except (OSError, RuntimeError, ValueError):  # too long, a loop of links, no permission
        raise ValueError(f"{show(text)} cannot be followed") from None
    if not path.is_relative_to(root):
        raise ValueError(f"{show(text)} leads out of the folder it belongs to; put it inside")
    if not exists:
        raise ValueError(f"{show(text)} does not exist in {one_line(str(root))}")
    return path


def is_file(path: Path) -> bool:
    """False, too, for what cannot be a path: too long a name, a NUL byte."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """As ``is_file``."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False
