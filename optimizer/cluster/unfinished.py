"""Which trials are being run, kept in the run's folder: what a run that ends at any moment leaves unfinished."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from optimizer.store.disk import write_whole

NAME = "running.txt"


class Unfinished:
    """Their numbers, in ``folder``; the file is there as long as there are some."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME

    def read(self) -> set[int]:
        """Empty where the file is none of ours."""
        try:
            return {int(word) for word in self._path.read_text().split()}
        except (OSError, ValueError):
            return set()

    def write(self, numbers: Iterable[int]) -> None:
        """Raises EnvironmentFault where the disk refuses it."""
        words = " ".join(map(str, sorted(numbers)))
        if words:
            write_whole(self._path, f"{words}\n")
            return
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
