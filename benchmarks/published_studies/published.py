"""The results that the documents print, from ``published.csv``, with the names and units of a sweep's cells.

Values that appear only in plots are not included.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, TypeAlias

Row: TypeAlias = dict[str, Any]
"""``label``, ``request_batch_size``, ``concurrency`` and metrics as in a sweep's cells. Unknown values are None."""

FILE = Path(__file__).with_name("published.csv")


def published(study: str, file: Path = FILE) -> list[Row]:
    """Return the rows of one study in the document's order, or none if the document prints no results of it."""
    with file.open(newline="", encoding="utf-8") as text:
        return [_row(row) for row in csv.DictReader(text) if row["study"] == study]


def _row(row: dict[str, str]) -> Row:
    figures = {name: float(text) if text else None for name, text in row.items() if name.endswith(("_sec", "_ms"))}
    whole = {name: int(row[name]) for name in ("request_batch_size", "concurrency")}
    return {"label": row["label"], **whole, **figures}
