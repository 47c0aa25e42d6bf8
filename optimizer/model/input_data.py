"""perf_analyzer's JSON of request data (``--input-data``): read into arrays, written, and generated values.

    {"data": [ENTRY, ...]}            each ENTRY is one sample of every input; or lists of entries, which are joined
    ENTRY  = {"name": TENSOR, ...}
    TENSOR = [values, ...] | {"b64": "..."} | {"content": [values, ...] or {"b64": "..."}, "shape": [d1, ...]}

Values are flat in row-major order. Base64 encodes the little-endian bytes; each string is preceded by its length as
four bytes.
"""

from __future__ import annotations

import base64
import codecs
import functools
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from optimizer.core.errors import BadInputError
from optimizer.core.request_sizes import ValueRange
from optimizer.core.safe_text import one_line, read_bytes, show_path

Array: TypeAlias = npt.NDArray[Any]
InputSample: TypeAlias = dict[str, Array]  # one array per input, without the batch dimension

MAX_BYTES = 2**30
MAX_SENT_BYTES, MAX_SENT_ENTRIES = 32 << 20, 65_536  # limits of a file that tune's own client keeps in memory
JSON_ADVICE = 'write the format of perf_analyzer, which begins with {"data": ['
STRING_LENGTH = 128  # perf_analyzer's default
_CHARACTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789", dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output in Triton's terms: ``datatype`` such as ``FP32``, ``dims`` without the batch dimension."""

    name: str
    datatype: str
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InputTensor(TensorSpec):
    """An input of a served model; ``has_batch`` is whether requests have a batch dimension before its ``dims``."""

    has_batch: bool

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy type. Raises BadInputError for a type that the installed tritonclient cannot send."""
        dtype = _numpy_type(self.datatype)
        if dtype is None:
            raise BadInputError(
                f"input {one_line(self.name)} is of type {self.datatype}, which the installed tritonclient cannot "
                "send; pip install -U tritonclient"
            )
        return dtype


@functools.cache
def _numpy_type(datatype: str) -> np.dtype[Any] | None:
    """Return the numpy type of Triton's ``datatype``; None if the installed tritonclient cannot send it."""
    from tritonclient.utils import np_to_triton_dtype, triton_to_np_dtype

    dtype = np.dtype(triton_to_np_dtype(datatype) or np.void)
    return dtype if np_to_triton_dtype(dtype) == datatype else None


def parse_entries(path: Path, tensors: Sequence[InputTensor]) -> Iterator[InputSample]:
    """Yield the entries of the file in order, each parsed when it is needed; there is at least one.

    An input may be missing from all entries, not from some. Raises BadInputError: ``file: entry 3, input x: …``.
    """
    file = show_path(path)
    tensors_by_name = {tensor.name: tensor for tensor in tensors}
    first: Mapping[str, Any] | None = None
    for number, entry in enumerate(read_entries(path), start=1):
        where = f"{file}: entry {number}"
        if not isinstance(entry, dict):
            raise BadInputError(f"{where}: not an object with a tensor for each input")
        if unknown := [name for name in entry if name not in tensors_by_name]:
            problem = f"has {_show(unknown[0])}, but the model's inputs are {', '.join(tensors_by_name)}"
            raise BadInputError(f"{where}: {one_line(problem, 200)}")
        first = entry if first is None else first
        if missing := [name for name in first if name not in entry]:
            raise BadInputError(f"{where}: lacks input {one_line(missing[0])}, which the first entry has")
        if added := [name for name in entry if name not in first]:
            raise BadInputError(f"{where}: has input {one_line(added[0])}, which the first entry lacks")
        yield _parse_entry(where, entry, tensors_by_name)


def read_entries(path: Path) -> list[Any]:
    """Return the entries as JSON values; there is at least one. Raises BadInputError."""
    file, data = show_path(path), read_bytes(path, MAX_BYTES, "give fewer entries")
    if data.startswith(codecs.BOM_UTF8):
        raise BadInputError(
            f"{file}: begins with a byte order mark, which perf_analyzer does not take; save it as UTF-8 without one"
        )
    try:
        document = json.loads(data)
    except json.JSONDecodeError as error:
        raise BadInputError(f"{file}:{error.lineno}: not JSON: {error.msg}; {JSON_ADVICE}") from None
    except (ValueError, RecursionError):  # not Unicode, a number with thousands of digits, or nested too deeply
        raise BadInputError(f"{file}: not JSON; {JSON_ADVICE}") from None
    streams = document.get("data") if isinstance(document, dict) else None
    if not isinstance(streams, list):
        raise BadInputError(f"{file}: not perf_analyzer's input data; {JSON_ADVICE}")
    entries = [entry for stream in streams for entry in (stream if isinstance(stream, list) else [stream])]
    if not entries:
        raise BadInputError(f"{file}: has no entries; write at least one")
    return entries


def count_entries(path: Path) -> int:
    """Return the number of entries; parse a file again only if it has changed. Raises BadInputError."""
    return _count_entries(path, path.stat().st_mtime_ns)


@functools.lru_cache
def _count_entries(path: Path, _: int) -> int:
    return len(read_entries(path))


def to_json(samples: Sequence[InputSample], *, with_shapes: bool = True) -> bytes:
    """Return the file's content for ``samples``.

    Values are base64 of their bytes: exact, and the only form in which perf_analyzer accepts FP16.
    """
    entries = [{name: _encode(array, with_shapes) for name, array in sample.items()} for sample in samples]
    return entries_to_json(entries)


def entries_to_json(entries: Sequence[Any]) -> bytes:
    """Return the file's content for entries as ``read_entries`` returns them."""
    return ('{"data": [\n' + ",\n".join(map(json.dumps, entries)) + "\n]}\n").encode()


def compatible(shape: Sequence[int], model_shape: Sequence[int]) -> bool:
    """Return whether the model accepts ``shape``; -1 in the model's shape is any size."""
    same_rank = len(shape) == len(model_shape)
    return same_rank and all(model_size in (-1, size) for model_size, size in zip(model_shape, shape, strict=True))


def to_bytes(array: Array) -> bytes:
    """Return the row-major little-endian bytes of ``array``, which ``from_bytes`` reads."""
    from tritonclient.utils import serialize_byte_tensor

    is_text = array.dtype == np.object_ and array.size
    return bytes(serialize_byte_tensor(array).item()) if is_text else array.tobytes()


def from_bytes(dtype: np.dtype[Any], raw: bytes) -> Array:
    """Return the flat array with the row-major little-endian bytes ``raw``; strings are an object array of bytes.

    Raises ValueError if ``raw`` does not hold whole values.
    """
    from tritonclient.utils import deserialize_bytes_tensor

    if dtype != np.object_:
        return np.frombuffer(raw, dtype)
    try:
        return np.asarray(deserialize_bytes_tensor(raw), dtype=object)
    except struct.error:
        raise ValueError("each string needs its length before it, as four little-endian bytes") from None


def from_values(values: Sequence[Any], tensor: InputTensor) -> Array:
    """Return the flat array of one sample.

    Raises ValueError for values that numpy would silently change: a fraction to an integer, a string to a number.
    """
    dtype = tensor.dtype
    if dtype == np.object_:
        if not all(isinstance(value, str | bytes) for value in values):
            raise ValueError("strings are needed")
        strings = np.empty(len(values), object)
        strings[:] = [v if isinstance(v, bytes) else v.encode("utf-8", "surrogatepass") for v in values]
        return strings
    types = {"b": (bool,), "i": (int,), "u": (int,)}.get(dtype.kind, (int, float))
    low, high = (np.iinfo(dtype).min, np.iinfo(dtype).max) if dtype.kind in "iu" else (-math.inf, math.inf)
    for value in values:
        if type(value) not in types or value < low or value > high:
            raise ValueError(f"{_show(value)} is not {tensor.datatype}")
    try:
        with np.errstate(over="ignore"):
            array = np.array(values, dtype)
        infinite: list[int] = np.flatnonzero(np.isinf(array)).tolist() if dtype.kind == "f" else []
        overflown = [values[place] for place in infinite if abs(values[place]) != math.inf]
    except OverflowError:  # an integer with hundreds of digits
        raise ValueError(f"a value has too many digits for {tensor.datatype}; write a smaller one") from None
    if overflown:
        raise ValueError(f"{_show(overflown[0])} is too large for {tensor.datatype}")
    return array


@dataclass(frozen=True, slots=True)
class ValueGenerator:
    """Generates the values of an input.

    ``random`` integers cover the whole range of their type and floats are normally distributed; with ``bounds``
    (inclusive) both are uniform. Strings are ``string_data``, else ``string_length`` random characters; with
    ``zero`` they are empty unless one of the two is given.
    """

    kind: Literal["random", "zero"] = "random"
    bounds: ValueRange | None = None
    string_data: str | None = None
    string_length: int | None = None

    def check(self, tensor: InputTensor) -> None:
        """Raise ValueError if the bounds do not fit the input's type."""
        if self.bounds is None:
            return
        if tensor.dtype.kind == "b" and not set(self.bounds) <= {0, 1}:
            raise ValueError(f"{tensor.name} is BOOL: write 0..0, 1..1 or 0..1")
        if tensor.dtype.kind not in "bfiuV":  # V: BF16
            raise ValueError(f"{tensor.name} is {tensor.datatype}, but a range needs numbers")
        if tensor.dtype.kind in "iu":
            low, high = np.iinfo(tensor.dtype).min, np.iinfo(tensor.dtype).max
            if not all(isinstance(bound, int) and low <= bound <= high for bound in self.bounds):
                raise ValueError(f"{tensor.name} is {tensor.datatype}: write whole numbers from {low} to {high}")

    def array(self, tensor: InputTensor, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
        """Return the values of one sample."""
        dtype = tensor.dtype
        if tensor.datatype == "BYTES":
            return self._strings(shape, rng)
        if self.kind == "zero":
            return np.zeros(shape, dtype)
        if dtype.kind == "b":
            low, high = self.bounds or (0, 1)
            return rng.integers(int(low), int(high), shape, endpoint=True).astype(bool)
        if dtype.kind in "iu":
            low, high = self.bounds or (np.iinfo(dtype).min, np.iinfo(dtype).max)
            return rng.integers(int(low), int(high), shape, dtype=dtype, endpoint=True)
        if self.bounds:
            low, high = self.bounds
            return np.asarray(rng.uniform(low, high, shape)).astype(dtype)
        return rng.standard_normal(shape, dtype=np.float32).astype(dtype)

    def bytes_of(self, tensor: InputTensor, shape: tuple[int, ...]) -> int:
        """Return the size of one sample in a message, in bytes."""
        if tensor.datatype != "BYTES":
            return math.prod(shape) * tensor.dtype.itemsize
        return math.prod(shape) * (4 + (self._length if self._text is None else len(self._text)))

    @property
    def _length(self) -> int:
        return self.string_length or (0 if self.kind == "zero" else STRING_LENGTH)

    @property
    def _text(self) -> bytes | None:
        return None if self.string_data is None else self.string_data.encode("utf-8", "surrogateescape")

    def _strings(self, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
        if self._text is not None:
            return np.full(shape, self._text, object)
        letters = rng.choice(_CHARACTERS, (math.prod(shape), self._length))
        strings = np.empty(len(letters), object)
        strings[:] = [row.tobytes() for row in letters]
        return strings.reshape(shape)


def _encode(array: Array, with_shape: bool) -> dict[str, object]:
    content = {"b64": base64.b64encode(to_bytes(array)).decode()}
    return {"content": content, "shape": list(array.shape)} if with_shape else {**content}


def _parse_entry(where: str, entry: Mapping[str, Any], tensors: Mapping[str, InputTensor]) -> InputSample:
    arrays = {}
    for name, value in entry.items():
        try:
            arrays[name] = _parse_tensor(value, tensors[name])
        except ValueError as error:
            raise BadInputError(f"{where}, input {one_line(name)}: {error}") from None
    return arrays


def _parse_tensor(value: Any, tensor: InputTensor) -> Array:
    shape, content = tensor.dims, value
    if isinstance(value, dict):
        if "shape" in value:
            shape = _parse_shape(value["shape"], tensor)
        content = value.get("content", value)
    if -1 in shape:
        raise ValueError(f'the model\'s shape is {list(shape)}; write {{"content": [...], "shape": [...]}}')
    if isinstance(content, list):
        if unknown := [number for number in content if isinstance(number, float) and not math.isfinite(number)]:
            raise ValueError(
                f'{_show(unknown[0])} is not a number of JSON; write finite numbers, or {{"b64": "..."}}'
            )
        if any(isinstance(value, list) for value in content):
            raise ValueError("has lists in a list; write all values in one list, in row-major order")
        values = from_values(content, tensor)
    elif isinstance(content, dict) and isinstance(content.get("b64"), str):
        values = from_bytes(tensor.dtype, base64.b64decode(content["b64"]))
    else:
        raise ValueError('write a list of values, or {"b64": "..."}')
    if values.size != math.prod(shape):
        raise ValueError(f"has {values.size} values, but the shape {list(shape)} has {math.prod(shape)}")
    return values.reshape(shape)


def _parse_shape(value: Any, tensor: InputTensor) -> tuple[int, ...]:
    sizes = isinstance(value, list) and all(type(size) is int and 0 <= size < 2**31 for size in value)
    if not sizes or not compatible(value, tensor.dims):
        raise ValueError(f"the shape {_show(value)} does not fit the model's {list(tensor.dims)}")
    return tuple(value)


def _show(value: Any) -> str:
    return one_line(json.dumps(value, default=str), 60)
