"""The figures that the documents print, from ``published.csv``: named and in the units of a sweep's cells.

Plots are not read off: what stands only in a picture is not here.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, TypeAlias

Row: TypeAlias = dict[str, Any]
"""``label``, ``request_batch_size``, ``concurrency`` and figures as in a sweep's cells; what is not known is None."""

FILE = Path(__file__).with_name("published.csv")


def published(study: str, file: Path = FILE) -> list[Row]:
    """The rows of one study, in the document's order; none where the document prints no figure of it."""
    with file.open(newline="", encoding="utf-8") as text:
        return [_row(row) for row in csv.DictReader(text) if row["study"] == study]


def _row(row: dict[str, str]) -> Row:
    figures = {name: float(text) if text else None for name, text in row.items() if name.endswith(("_sec", "_ms"))}
    whole = {name: int(row[name]) for name in ("request_batch_size", "concurrency")}
    return {"label": row["label"], **whole, **figures}
