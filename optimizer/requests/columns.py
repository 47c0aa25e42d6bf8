"""Samples of requests from tables: CSV and Parquet, a row a sample and a column by an input's name.

    x               one value (an input of one element), or all of an input in a list: in CSV such as [1, 2, 3]
    x[0], x[1], …   CSV: the elements of a vector, or of more dimensions in row-major order; x.0, x.1, … as well

A name that is an input's is that input, whatever it ends in. Cells of strings are taken as they are. Columns that
are no input's are left alone.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from optimizer.errors import BadInputError
from optimizer.requests.data import Tensor, from_values
from optimizer.requests.recorded import Sample, check_complete, shape_of
from optimizer.untrusted import one_line, read_bytes

MAX_BYTES = 64 << 20
MAX_PARQUET_BYTES = 128 << 20  # packed, and unpacked
FEWER = "write fewer samples"
_ELEMENT = re.compile(r"(.+?)(?:\[([0-9]{1,9})\]|\.([0-9]{1,9}))", re.DOTALL)
_TRUTH = {"true": True, "false": False, "1": True, "0": False}


def read_csv_samples(path: Path, tensors: Sequence[Tensor], optional: frozenset[str]) -> list[Sample]:
    """The rows in order. Raises BadInputError: ``file:line: input x: …``."""
    file = one_line(str(path))
    rows = _rows(file, read_bytes(path, MAX_BYTES, FEWER))
    _, header = next(rows, (1, []))
    places = _places(file, header, tensors)
    check_complete(file, places, tensors, optional)
    given = [tensor for tensor in tensors if tensor.name in places]
    samples = []
    for line, cells in rows:
        if len(cells) != len(header):
            raise BadInputError(f"{file}:{line}: has {len(cells)} cells where the header has {len(header)}")
        texts = {tensor.name: [cells[place] for place in places[tensor.name]] for tensor in given}
        samples.append(_sample(f"{file}:{line}", given, {t.name: _parsed(texts[t.name], t) for t in given}))
    return _not_empty(file, samples)


def read_parquet_samples(path: Path, tensors: Sequence[Tensor], optional: frozenset[str]) -> list[Sample]:
    """The rows in order. Raises BadInputError: ``file: row 3, input x: …``."""
    file = one_line(str(path))
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise BadInputError(f"{file}: Parquet is read by pyarrow; pip install 'tritune[parquet]'") from None
    data = io.BytesIO(read_bytes(path, MAX_PARQUET_BYTES, FEWER))
    try:
        table = ParquetFile(data)
        there = dict.fromkeys(table.schema_arrow.names)
        given = [tensor for tensor in tensors if tensor.name in there]
        batches = table.iter_batches(batch_size=256, columns=[tensor.name for tensor in given])
        rows = [row for batch in _bounded(file, batches) for row in batch.to_pylist()] if given else []
    except BadInputError:
        raise
    except Exception:  # of a damaged file pyarrow raises several kinds
        raise BadInputError(f"{file}: not a Parquet file") from None
    check_complete(file, there, tensors, optional)
    samples = [_sample(f"{file}: row {number}", given, _flat_row(row)) for number, row in enumerate(rows, start=1)]
    return _not_empty(file, samples)


def _bounded(file: str, batches: Iterator[Any]) -> Iterator[Any]:
    """A few bytes can stand for any number of values."""
    size = 0
    for batch in batches:
        size += batch.nbytes
        if size > MAX_PARQUET_BYTES:
            raise BadInputError(f"{file}: larger than {MAX_PARQUET_BYTES >> 20} MiB when it is unpacked; {FEWER}")
        yield batch


def _rows(file: str, data: bytes) -> Iterator[tuple[int, list[str]]]:
    """The rows that are not empty, each with the line on which it begins."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BadInputError(f"{file}:{line}: is not UTF-8 text") from None
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    before = 0
    try:
        for cells in reader:
            if cells:
                yield before + 1, cells
            before = reader.line_num
    except csv.Error as error:
        raise BadInputError(f"{file}:{before + 1}: not a row of a CSV file ({error})") from None


def _places(file: str, header: Sequence[str], tensors: Sequence[Tensor]) -> dict[str, list[int]]:
    """The columns of each input, in the order of its elements."""
    names = [tensor.name for tensor in tensors]
    found: dict[str, dict[int, int]] = {}
    for place, column in enumerate(header):
        name, index = column.strip(), -1
        if name not in names:
            element = _ELEMENT.fullmatch(name)
            if element is None or element[1] not in names:
                continue
            name, index = element[1], int(element[2] or element[3])
        if index in found.setdefault(name, {}):
            raise BadInputError(f"{file}: has two columns {one_line(column.strip(), 60)}")
        found[name][index] = place
    for name, columns in found.items():
        if sorted(columns) not in ([-1], list(range(len(columns)))):
            shown = one_line(name, 60)
            raise BadInputError(f"{file}: the columns of input {shown} are not {shown}, or {shown}[0] and so on")
    return {name: [columns[index] for index in sorted(columns)] for name, columns in found.items()}


def _parsed(cells: list[str], tensor: Tensor) -> list[Any]:
    """The values of one input in one row; what is none stays text, for ``from_values`` to refuse."""
    if tensor.datatype == "BYTES":
        return list(cells)
    cells = [cell.strip() for cell in cells]
    if len(cells) == 1 and cells[0].startswith("["):
        try:
            return _flat(json.loads(cells[0]))
        except (ValueError, RecursionError):
            return list(cells)
    return [_value(cell, tensor) for cell in cells]


def _value(text: str, tensor: Tensor) -> object:
    kind = tensor.dtype.kind
    if kind == "b":
        return _TRUTH.get(text.lower(), text)
    try:
        if re.fullmatch("[+-]?[0-9]{1,40}", text):
            return int(text)
        number = float(text) if text.isascii() and "_" not in text else None
    except ValueError:
        return text
    whole = kind in "iu" and number is not None and number.is_integer()
    return text if number is None else int(number) if whole else number


def _flat_row(row: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {name: _flat(value) if isinstance(value, list) else [value] for name, value in row.items()}


def _flat(value: list[Any]) -> list[Any]:
    """Without the brackets inside, for values in row-major order."""
    while any(isinstance(item, list) for item in value):
        value = [inner for item in value for inner in (item if isinstance(item, list) else [item])]
    return value


def _sample(where: str, tensors: Sequence[Tensor], values: Mapping[str, list[Any]]) -> Sample:
    sample: Sample = {}
    for tensor in tensors:
        try:
            array = from_values(values[tensor.name], tensor)
            sample[tensor.name] = array.reshape(shape_of(array.size, tensor))
        except ValueError as error:
            separator = ", " if ": row " in where else ": "
            raise BadInputError(f"{where}{separator}input {one_line(tensor.name)}: {error}") from None
    return sample


def _not_empty(file: str, samples: list[Sample]) -> list[Sample]:
    if not samples:
        raise BadInputError(f"{file}: has no rows")
    return samples
