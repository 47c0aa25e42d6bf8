"""Samples recorded in files: .npz, .npy, .csv, .parquet, or a folder with one file per input.

The files may come from anywhere: their size is bounded, and pickles are refused.
"""

from __future__ import annotations

import io
import json
import math
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy_format

from optimizer.core.errors import BadInputError
from optimizer.core.files import read_csv_rows
from optimizer.core.safe_text import check_file_name, is_file, one_line, read_bytes, show_path
from optimizer.model.input_data import Array, InputSample, InputTensor, compatible, from_values

MAX_BYTES = 512 << 20  # packed and unpacked
MAX_CSV_BYTES = 64 << 20
MAX_PARQUET_BYTES = 128 << 20  # packed and unpacked
FEWER = "write fewer samples"
_ELEMENT = re.compile(r"(.+?)(?:\[([0-9]{1,9})\]|\.([0-9]{1,9}))", re.DOTALL)
_TRUTH = {"true": True, "false": False, "1": True, "0": False}


def read_npz(path: Path) -> dict[str, Array]:
    """Return the arrays of the file by name.

    Raises BadInputError if it is not a .npz file, is too large or holds Python objects.
    """
    data = io.BytesIO(read_bytes(path, MAX_BYTES, FEWER))
    name = show_path(path)
    try:
        with zipfile.ZipFile(data) as members:
            if sum(member.file_size for member in members.infolist()) > MAX_BYTES:
                raise BadInputError(f"{name}: larger than {MAX_BYTES >> 20} MiB; {FEWER}")
            for member in members.infolist():
                with members.open(member) as file:
                    _refuse_objects(name, file)
        data.seek(0)
        with np.load(data, allow_pickle=False) as arrays:
            return {key: np.asarray(arrays[key]) for key in arrays.files}
    except BadInputError:
        raise
    except Exception:  # zipfile, zlib and numpy raise many types for a damaged file
        raise BadInputError(f"{name}: not a .npz file; np.savez writes one") from None


def _refuse_objects(name: str, file: IO[bytes]) -> None:
    """Raise BadInputError if ``file`` is an array of Python objects, which only unpickling could read.

    Only the header is read. A file that is damaged or is no array is left to ``np.load``.
    """
    try:
        version = npy_format.read_magic(file)
        read_header = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        _, _, dtype = read_header(file)
    except Exception:  # numpy evaluates the header as Python text, with many types of errors
        return
    if dtype.hasobject:
        raise BadInputError(f"{name}: has Python objects; write text as np.array([...], dtype='U')")


def read_folder(folder: Path, tensors: Sequence[InputTensor], optional: frozenset[str]) -> list[InputSample]:
    """Return the single sample in the folder, which has one file per input. Raises BadInputError."""
    sample: InputSample = {}
    for tensor in tensors:
        try:
            path = folder / check_file_name(tensor.name)
            if tensor.name in optional and not is_file(path):
                continue
            raw = read_bytes(path, MAX_BYTES, "it holds one sample")
            sample[tensor.name] = _values(raw, tensor)
        except ValueError as error:
            raise BadInputError(f"{show_path(folder)}: input {one_line(tensor.name)}: {error}") from None
    return [sample]


def read_npz_samples(path: Path, tensors: Sequence[InputTensor], optional: frozenset[str]) -> list[InputSample]:
    """Return the samples of a .npz file with an array per input, samples first.

    Raises BadInputError: ``file: sample 3, input x: …``.
    """
    return _samples(path, read_npz(path), tensors, optional)


def read_npy_samples(path: Path, tensors: Sequence[InputTensor], optional: frozenset[str]) -> list[InputSample]:
    """Return the samples of a .npy file, for a model with one required input. Raises BadInputError."""
    name = show_path(path)
    required = [tensor for tensor in tensors if tensor.name not in optional] or list(tensors)
    if len(required) != 1:
        names = one_line(", ".join(tensor.name for tensor in required), 200)
        raise BadInputError(f"{name}: holds one input, but the model has {names}; write a .npz file with np.savez")
    data = read_bytes(path, MAX_BYTES, FEWER)
    _refuse_objects(name, io.BytesIO(data))
    try:
        array = np.asarray(np.load(io.BytesIO(data), allow_pickle=False))
    except Exception:  # numpy raises several types for a damaged file
        raise BadInputError(f"{name}: not a .npy file; np.save writes one") from None
    return _samples(path, {required[0].name: array}, required, optional)


def shape_of(size: int, tensor: InputTensor) -> tuple[int, ...]:
    """Return the shape of ``size`` values if the model leaves at most one dimension open. Raises ValueError."""
    fixed_size = math.prod(dim for dim in tensor.dims if dim != -1)
    open_dims = tensor.dims.count(-1)
    if open_dims > 1:
        raise ValueError(
            f"the model's shape is {list(tensor.dims)}, and the number of values determines only one open "
            f"dimension; give --shape {one_line(tensor.name, 60)}:SIZES"
        )
    fits = (fixed_size > 0 and size % fixed_size == 0) if open_dims else size == fixed_size
    if not fits:
        raise ValueError(f"has {size} values, but the model's shape is {list(tensor.dims)}")
    return tuple(size // fixed_size if dim == -1 else dim for dim in tensor.dims)


def _values(raw: bytes, tensor: InputTensor) -> Array:
    if tensor.datatype == "BYTES":
        lines = raw.removesuffix(b"\n").split(b"\n")
        flat = np.empty(len(lines), object)
        flat[:] = [line.removesuffix(b"\r") for line in lines]
    else:
        if len(raw) % tensor.dtype.itemsize:
            raise ValueError(f"has {len(raw)} bytes, but a value of {tensor.datatype} has {tensor.dtype.itemsize}")
        flat = np.frombuffer(raw, tensor.dtype)
    return flat.reshape(shape_of(flat.size, tensor))


def _samples(
    path: Path, arrays: Mapping[str, Array], tensors: Sequence[InputTensor], optional: frozenset[str]
) -> list[InputSample]:
    name = show_path(path)
    check_complete(name, arrays, tensors, optional)
    fitted = {
        tensor.name: fit_samples(name, arrays[tensor.name], tensor) for tensor in tensors if tensor.name in arrays
    }
    counts = {key: len(array) for key, array in fitted.items()}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        lengths = one_line(", ".join(f"{key} {count}" for key, count in counts.items()), 200)
        raise BadInputError(f"{name}: every array needs one entry per sample in its first dimension ({lengths})")
    return [{key: array[i] for key, array in fitted.items()} for i in range(min(counts.values()))]


def fit_samples(file: str, array: Array, tensor: InputTensor) -> Array:
    """Return samples of an input in its datatype, with the samples in the first dimension.

    Raises BadInputError if their shape or values do not fit the input.
    """
    if array.ndim == 1 and all(size == 1 for size in tensor.dims):
        array = array.reshape(-1, *tensor.dims)  # one scalar per sample
    if array.ndim == 0 or not compatible(array.shape[1:], tensor.dims):
        raise BadInputError(
            f"{file}: input {one_line(tensor.name)}: has the shape {list(array.shape)}, which is not a number of "
            f"samples, then the model's {list(tensor.dims)}"
        )
    return to_datatype(file, array, tensor)


def check_complete(
    file: str, present: Mapping[str, object], tensors: Sequence[InputTensor], optional: frozenset[str]
) -> None:
    """Raise BadInputError if an input that the model requires is not ``present``."""
    lacking = [tensor.name for tensor in tensors if tensor.name not in present and tensor.name not in optional]
    if lacking or not any(tensor.name in present for tensor in tensors):
        needed = ", ".join(lacking or [tensor.name for tensor in tensors])
        has = ", ".join(present) or "nothing"
        raise BadInputError(f"{file}: lacks input {one_line(needed, 100)}; it has {one_line(has, 200)}")


def to_datatype(file: str, array: Array, tensor: InputTensor) -> Array:
    """Return the array in the input's type, floats rounded. Raises BadInputError for values that do not fit.

    A float that is too large for the type does not fit; an infinity that the file has does.
    """
    dtype, kind, name = tensor.dtype, array.dtype.kind, one_line(tensor.name)
    if tensor.datatype == "BYTES" and kind in "US":
        return np.asarray((np.char.encode(array, "utf-8", "surrogatepass") if kind == "U" else array).astype(object))
    if tensor.datatype == "BYTES" or kind not in "fiub":
        array_type = one_line(str(array.dtype), 60)
        raise BadInputError(f"{file}: input {name}: holds {array_type}, but the model takes {tensor.datatype}")
    with np.errstate(all="ignore"):
        cast = array.astype(dtype)
    is_exact = dtype.kind in "iub" or kind == "b"
    changed = cast != array if is_exact else np.isinf(cast) & np.isfinite(array)
    places = np.argwhere(changed)
    if places.size:
        sample, value = int(places[0][0]) + 1, array[tuple(places[0])]
        problem = f"{value} is {'not' if is_exact else 'too large for'} {tensor.datatype}"
        raise BadInputError(f"{file}: sample {sample}, input {name}: {problem}")
    return np.asarray(cast)


def read_csv_samples(path: Path, tensors: Sequence[InputTensor], optional: frozenset[str]) -> list[InputSample]:
    """Return the rows of a CSV file in order. Raises BadInputError: ``file:line: input x: …``."""
    file = show_path(path)
    rows = read_csv_rows(read_bytes(path, MAX_CSV_BYTES, FEWER), file)
    _, header = next(rows, (1, []))
    columns = _columns_of(file, header, tensors)
    check_complete(file, columns, tensors, optional)
    recorded = [tensor for tensor in tensors if tensor.name in columns]
    samples = []
    for line, cells in rows:
        if len(cells) != len(header):
            raise BadInputError(f"{file}:{line}: has {len(cells)} cells, but the header has {len(header)}")
        values = {t.name: _parse_cells([cells[column] for column in columns[t.name]], t) for t in recorded}
        samples.append(_sample(f"{file}:{line}: ", recorded, values))
    return _not_empty(file, samples)


def read_parquet_samples(
    path: Path, tensors: Sequence[InputTensor], optional: frozenset[str], max_bytes: int = MAX_PARQUET_BYTES
) -> list[InputSample]:
    """Return the rows of a Parquet file, in order.

    Raises BadInputError, such as ``file: row 3, input x: …``, also for a file with more than ``max_bytes``, packed or
    unpacked.
    """
    file = show_path(path)
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise BadInputError(f"{file}: reading Parquet needs pyarrow; pip install 'tritune[parquet]'") from None
    data = io.BytesIO(read_bytes(path, max_bytes, FEWER))
    try:
        table = ParquetFile(data)
        present = dict.fromkeys(table.schema_arrow.names)
        recorded = [tensor for tensor in tensors if tensor.name in present]
        batches = table.iter_batches(batch_size=256, columns=[tensor.name for tensor in recorded])
        rows = [row for batch in _bounded(file, batches, max_bytes) for row in batch.to_pylist()] if recorded else []
    except BadInputError:
        raise
    except Exception:  # pyarrow raises several types for a damaged file
        raise BadInputError(f"{file}: not a Parquet file; write it with pyarrow.parquet.write_table") from None
    check_complete(file, present, tensors, optional)
    samples = [
        _sample(f"{file}: row {number}, ", recorded, _flat_row(row)) for number, row in enumerate(rows, start=1)
    ]
    return _not_empty(file, samples)


def _bounded(file: str, batches: Iterator[Any], max_bytes: int) -> Iterator[Any]:
    """Yield the batches up to ``max_bytes`` in all: a few compressed bytes can expand to any number of values."""
    size = 0
    for batch in batches:
        size += batch.nbytes
        if size > max_bytes:
            raise BadInputError(f"{file}: larger than {max_bytes >> 20} MiB when unpacked; {FEWER}")
        yield batch


def _columns_of(file: str, header: Sequence[str], tensors: Sequence[InputTensor]) -> dict[str, list[int]]:
    """Return the columns of each input, in the order of its elements."""
    names = [tensor.name for tensor in tensors]
    by_input: dict[str, dict[int, int]] = {}
    for position, column in enumerate(header):
        name, index = column.strip(), -1
        if name not in names:
            element = _ELEMENT.fullmatch(name)
            if element is None or element[1] not in names:
                continue
            name, index = element[1], int(element[2] or element[3])
        if index in by_input.setdefault(name, {}):
            raise BadInputError(f"{file}: has two columns {one_line(column.strip(), 60)}")
        by_input[name][index] = position
    for name, columns in by_input.items():
        if sorted(columns) not in ([-1], list(range(len(columns)))):
            shown = one_line(name, 60)
            raise BadInputError(f"{file}: the columns of input {shown} must be {shown}, or {shown}[0], {shown}[1], …")
    return {name: [columns[index] for index in sorted(columns)] for name, columns in by_input.items()}


def _parse_cells(cells: list[str], tensor: InputTensor) -> list[Any]:
    """Return the values of one input in one row; other cells stay text, which ``from_values`` refuses."""
    if tensor.datatype == "BYTES":
        return list(cells)
    cells = [cell.strip() for cell in cells]
    if len(cells) == 1 and cells[0].startswith("["):
        try:
            return _flat(json.loads(cells[0]))
        except (ValueError, RecursionError):
            return list(cells)
    return [_parse_cell(cell, tensor) for cell in cells]


def _parse_cell(text: str, tensor: InputTensor) -> object:
    kind = tensor.dtype.kind
    if kind == "b":
        return _TRUTH.get(text.lower(), text)
    if re.fullmatch("[+-]?[0-9]{1,40}", text):
        return int(text)
    if not text.isascii() or "_" in text:  # float() would accept these
        return text
    try:
        number = float(text)
    except ValueError:
        return text
    if math.isinf(number) and "inf" not in text.lower():
        return text  # beyond the largest number, such as 1e400
    return int(number) if kind in "iu" and number.is_integer() else number


def _flat_row(row: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {name: _flat(value) if isinstance(value, list) else [value] for name, value in row.items()}


def _flat(value: list[Any]) -> list[Any]:
    """Return nested lists as one list, in row-major order."""
    while any(isinstance(item, list) for item in value):
        value = [inner for item in value for inner in (item if isinstance(item, list) else [item])]
    return value


def _sample(where: str, tensors: Sequence[InputTensor], values: Mapping[str, list[Any]]) -> InputSample:
    sample: InputSample = {}
    for tensor in tensors:
        try:
            array = from_values(values[tensor.name], tensor)
            sample[tensor.name] = array.reshape(shape_of(array.size, tensor))
        except ValueError as error:
            raise BadInputError(f"{where}input {one_line(tensor.name)}: {error}") from None
    return sample


def _not_empty(file: str, samples: list[InputSample]) -> list[InputSample]:
    if not samples:
        raise BadInputError(f"{file}: has no rows")
    return samples
