"""The version folders of a stored model, and their files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from optimizer.core.safe_text import exists


def version_folders(entries: Iterable[Path]) -> list[Path]:
    """Return the version folders among the ``entries`` of the folder of a model, ascending."""
    folders = [entry for entry in entries if re.fullmatch("[0-9]{1,18}", entry.name) and entry.is_dir()]
    return sorted(folders, key=lambda folder: int(folder.name))


def is_model_folder(folder: Path) -> bool:
    """Return whether ``folder`` has a config.pbtxt or a version folder; False if it cannot be read."""
    return exists(folder / "config.pbtxt") or any(entry.name.isdecimal() for entry in folder.glob("[0-9]*"))


def version_files(version: Path) -> list[Path]:
    """Return the files in a version folder, without those that Python caches there."""
    return [file for file in version.rglob("*") if file.is_file() and file.parent.name != "__pycache__"]
