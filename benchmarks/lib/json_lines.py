"""Files with one row of JSON a line, to which a benchmark that was interrupted adds the missing rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

RowT = TypeVar("RowT")


def read_rows(path: Path, form: TypeAdapter[RowT]) -> list[RowT]:
    """Return the rows of a file; none without a file. An incomplete line, which a killed run leaves, is ignored.

    Exits with a message if a row is of another form.
    """
    rows = list[RowT]()
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(form.validate_json(line))
        except ValidationError as error:
            if any(fault["type"] != "json_invalid" for fault in error.errors()):
                sys.exit(f"{path}: a row of another version of this benchmark; give another file or folder")
    return rows


def append_row(path: Path, row: Any) -> None:
    """Add a row at the end of the file, whose folder is made. A line break ends an incomplete line first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text() if path.exists() else ""
    with path.open("a") as file:
        file.write(("\n" if text and not text.endswith("\n") else "") + json.dumps(row) + "\n")
