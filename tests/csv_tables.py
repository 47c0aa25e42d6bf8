"""Read and write CSV tables as text, such as trials.csv of a run."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the cells of each row by column."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Replace the table at ``path``. It has the columns of all rows; a cell is empty if its row lacks the column."""
    written = list(rows)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, dict.fromkeys(name for row in written for name in row), lineterminator="\n")
        writer.writeheader()
        writer.writerows(written)


def write_timestamps(path: Path, times: Iterable[object]) -> Path:
    """Write the recording of requests that arrive at these times, with another column, and return ``path``."""
    path.write_text("\n".join(["timestamp,what", *(f"{time},x" for time in times)]) + "\n")
    return path
