"""The folder of the cache, the folders of the package, and the sizes of folders."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path


def shipped_folder(name: str) -> Path:
    """Return the folder ``name`` of the installed package; of the checkout if the package is an editable install."""
    package = Path(__file__).parents[1]
    checkout = package.parent
    if not (package / name).is_dir() and (checkout / "pyproject.toml").is_file():
        return checkout / name
    return package / name


def cache_folder() -> Path:
    """Return ``$TRITUNE_CACHE`` if it is set, otherwise ``tritune`` in the user's cache folder.

    This is ``$XDG_CACHE_HOME``, or ``~/.cache`` if that is not set or relative (XDG Base Directory Specification).
    """
    if folder := os.environ.get("TRITUNE_CACHE"):
        return Path(folder).expanduser()
    caches = Path(os.environ.get("XDG_CACHE_HOME", "")).expanduser()
    return (caches if caches.is_absolute() else Path("~/.cache").expanduser()) / "tritune"


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
