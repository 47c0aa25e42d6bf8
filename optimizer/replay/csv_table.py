"""A CSV file as checked columns: whatever is wrong with it is told by file, line and column."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from optimizer.errors import BadInputError
from optimizer.profile.safe_paths import is_folder
from optimizer.untrusted import one_line, read_bytes

MAX_BYTES = 16 << 20
MOST_ROWS, MOST_COLUMNS = 50_000, 1_000
MOST_INT32 = 2**31 - 1  # what Triton's sizes hold
TRUTH = {"true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True)
class CsvTable:
    """``frame`` has the cells as text on one line without surrounding blanks, ``lines`` the line in the file of each
    row."""

    name: str
    frame: pd.DataFrame
    lines: Sequence[int]

    def has(self, column: str) -> bool:
        """Whether any cell of that column has a value."""
        return column in self.frame and bool((self.frame[column] != "").any())

    def only(self, column: str, text: str) -> CsvTable:
        """The rows that have ``text`` in that column."""
        chosen = [i for i, own in enumerate(self.texts(column)) if own == text]
        return CsvTable(self.name, self.frame.iloc[chosen].reset_index(drop=True), [self.lines[i] for i in chosen])

    def texts(self, column: str) -> list[str]:
        """Empty cells where the column is missing."""
        return list(self.frame[column]) if column in self.frame else [""] * len(self.frame)

    def numbers(self, column: str, *, most: float) -> list[float | None]:
        """None where a cell is empty. Raises BadInputError for what is no number from 0 to ``most``."""
        values, wrong = self._numbers(column, 0)
        self._refuse(column, wrong, "not a number of 0 or more")
        self._refuse(column, values > most, f"more than {most:g}, which nothing measures")
        return [None if value != value else value for value in values.tolist()]

    def wholes(self, column: str, *, least: int, most: int = MOST_INT32, empty: str = "") -> list[int | None]:
        """As ``numbers``, of whole numbers; ``empty`` is a word for no value."""
        values, wrong = self._numbers(column, least, empty)
        self._refuse(column, wrong | (values % 1 > 0) | (values > most), f"not a whole number from {least} to {most}")
        return [None if value != value else int(value) for value in values.tolist()]

    def truths(self, column: str) -> list[bool | None]:
        """None where a cell is empty. Raises BadInputError for what is neither true nor false."""
        texts = [text.lower() for text in self.texts(column)]
        wrong = np.array([text != "" and text not in TRUTH for text in texts])
        self._refuse(column, wrong, "neither true nor false")
        return [TRUTH.get(text) for text in texts]

    def fault(self, row: int, message: str) -> BadInputError:
        """``table.csv:7: message``."""
        return BadInputError(f"{self.name}:{self.lines[row]}: {message}")

    def _numbers(self, column: str, least: float, empty: str = "") -> tuple[np.ndarray, np.ndarray]:
        texts = pd.Series(self.texts(column), dtype=object)
        given = ~texts.str.lower().isin(["", empty]).to_numpy()
        values = pd.to_numeric(texts.where(given), errors="coerce").to_numpy(float)
        wrong = given & ~(np.isfinite(values) & (values >= least))
        return np.where(wrong, np.nan, values), wrong

    def _refuse(self, column: str, wrong: np.ndarray, what: str) -> None:
        if wrong.any():
            row = int(wrong.argmax())
            raise self.fault(row, f"{column}: {shown(self.texts(column)[row])} is {what}")


def read_csv(path: Path, required: Sequence[str]) -> CsvTable:
    """Read it whole. Raises BadInputError where that is no table that has the ``required`` columns and a row.

    Columns without a name (as pandas writes for its index) are left out, and so are empty lines.
    """
    name = one_line(str(path))
    numbered = _numbered_rows(name, _text(path, name))
    _, header = next(numbered, (0, None))
    if header is None:
        raise BadInputError(f"{name}: is empty; a table begins with a line that names its columns")
    _check_header(name, header, required)
    rows: list[list[str]] = []
    lines: list[int] = []
    for line, cells in numbered:
        if len(cells) != len(header):
            raise BadInputError(f"{name}:{line}: has {len(cells)} cells where the header has {len(header)}")
        if len(rows) == MOST_ROWS:
            raise BadInputError(f"{name}: has more than {MOST_ROWS:,} rows; leave out what is not needed")
        rows.append(cells)
        lines.append(line)
    if not rows:
        raise BadInputError(f"{name}: has no rows below its header")
    frame = pd.DataFrame(rows, columns=pd.Index(header), dtype=object)
    return CsvTable(name, frame.drop(columns="", errors="ignore"), lines)


def _numbered_rows(name: str, text: str) -> Iterator[tuple[int, list[str]]]:
    """The rows that are not empty, each with the line on which it begins."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    before = 0
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield before + 1, [one_line(cell.strip()) for cell in cells]
            before = reader.line_num
    except csv.Error as error:
        raise BadInputError(f"{name}:{before + 1}: not a row of a CSV file ({error})") from None


def _check_header(name: str, header: list[str], required: Sequence[str]) -> None:
    missing = [column for column in required if column not in header]
    if missing:
        lacks = f"columns {', '.join(missing)}" if len(missing) > 1 else f"column {missing[0]}"
        raise BadInputError(f"{name}: lacks the {lacks}; a table needs {', '.join(required)}")
    if len(header) > MOST_COLUMNS:
        raise BadInputError(f"{name}: has more than {MOST_COLUMNS:,} columns; leave out what is not needed")
    named = [column for column in header if column]
    for first, second in itertools.pairwise(sorted(named)):
        if first == second:
            raise BadInputError(f"{name}: has two columns {shown(first)}")


def _text(path: Path, name: str) -> str:
    if is_folder(path):
        raise BadInputError(f"{name}: is a folder; give the table in it, such as {name}/trials.csv")
    content = read_bytes(path, MAX_BYTES, "leave out what is not needed")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BadInputError(f"{name}:{line}: is not UTF-8 text") from None


def shown(text: str) -> str:
    """A cell as an error quotes it."""
    shown = repr(text)
    return shown if len(shown) <= 60 else f"{shown[:57]}…"
