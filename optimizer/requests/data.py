"""The JSON of request data that perf_analyzer's ``--input-data`` takes, read into arrays.

    {"data": [ENTRY, ...]}            each ENTRY one sample of every input; or lists of entries, one after another
    ENTRY  = {"name": TENSOR, ...}
    TENSOR = [values, ...] | {"b64": "..."} | {"content": [values, ...] or {"b64": "..."}, "shape": [d1, ...]}

Values are flat in row-major order; base64 is of the little-endian bytes, with the length of each string as four bytes
before it.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from optimizer.errors import BadInputError
from optimizer.untrusted import one_line, read_bytes

Array: TypeAlias = npt.NDArray[Any]

MAX_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input of a served model. ``datatype`` is Triton's (``FP32``); ``shape`` is without the batch dimension."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    has_batch: bool

    @property
    def dtype(self) -> np.dtype[Any]:
        """Raises BadInputError for a type that the installed tritonclient cannot send."""
        from tritonclient.utils import np_to_triton_dtype, triton_to_np_dtype

        dtype = np.dtype(triton_to_np_dtype(self.datatype) or np.void)
        if np_to_triton_dtype(dtype) != self.datatype:
            raise BadInputError(
                f"input {one_line(self.name)} is of type {self.datatype}, which the installed tritonclient cannot "
                "send; pip install -U tritonclient"
            )
        return dtype


def read(path: Path, tensors: Sequence[Tensor]) -> list[dict[str, Array]]:
    """The entries in order, each input as an array without the batch dimension; at least one.

    An input may be missing in all entries (the server knows whether it is optional), not in some. Raises
    BadInputError: ``file: entry 3, input x: …``.
    """
    file = one_line(str(path))
    entries = read_entries(path)
    known = {tensor.name: tensor for tensor in tensors}
    found: list[dict[str, Array]] = []
    for number, entry in enumerate(entries, start=1):
        where = f"{file}: entry {number}"
        if not isinstance(entry, dict):
            raise BadInputError(f"{where}: not an object with a tensor for each input")
        if unknown := [name for name in entry if name not in known]:
            named = f"has {_shown(unknown[0])}, but the model's inputs are {', '.join(known)}"
            raise BadInputError(f"{where}: {one_line(named, 200)}")
        if found and (missing := [name for name in found[0] if name not in entry]):
            raise BadInputError(f"{where}: lacks input {one_line(missing[0])}, which the first entry has")
        if found and (added := [name for name in entry if name not in found[0]]):
            raise BadInputError(f"{where}: has input {one_line(added[0])}, which the first entry lacks")
        found.append(_arrays(where, entry, known))
    return found


def read_entries(path: Path) -> list[Any]:
    """As they are written; at least one. Raises BadInputError."""
    return _entries(one_line(str(path)), read_bytes(path, MAX_BYTES, "give fewer entries"))


def compatible(shape: Sequence[int], model_shape: Sequence[int]) -> bool:
    """Whether the model takes ``shape``; -1 in the model's is any size."""
    same_rank = len(shape) == len(model_shape)
    return same_rank and all(own in (-1, given) for own, given in zip(model_shape, shape, strict=True))


def from_bytes(dtype: np.dtype[Any], raw: bytes) -> Array:
    """The flat array whose row-major little-endian bytes are ``raw``; objects are strings, as bytes.

    Raises ValueError where ``raw`` cannot be that.
    """
    from tritonclient.utils import deserialize_bytes_tensor

    if dtype != np.object_:
        return np.frombuffer(raw, dtype)
    try:
        return np.asarray(deserialize_bytes_tensor(raw), dtype=object)
    except struct.error:
        raise ValueError("strings need their length as four bytes before each") from None


def _entries(file: str, data: bytes) -> list[Any]:
    try:
        document = json.loads(data)
    except json.JSONDecodeError as error:
        raise BadInputError(f"{file}:{error.lineno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError):  # not Unicode, a number of thousands of digits, nested without end
        raise BadInputError(f"{file}: not JSON") from None
    streams = document.get("data") if isinstance(document, dict) else None
    if not isinstance(streams, list):
        raise BadInputError(f'{file}: not perf_analyzer\'s input data; it begins {{"data": [')
    entries = [entry for stream in streams for entry in (stream if isinstance(stream, list) else [stream])]
    if not entries:
        raise BadInputError(f"{file}: has no entries")
    return entries


def _arrays(where: str, entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    arrays = {}
    for name, given in entry.items():
        try:
            arrays[name] = _array(given, tensors[name])
        except ValueError as error:
            raise BadInputError(f"{where}, input {one_line(name)}: {error}") from None
    return arrays


def _array(given: Any, tensor: Tensor) -> Array:
    shape, content = tensor.shape, given
    if isinstance(given, dict):
        if "shape" in given:
            shape = _shape(given["shape"], tensor)
        content = given.get("content", given)
    if -1 in shape:
        raise ValueError(f'the model\'s shape is {list(shape)}; write {{"content": [...], "shape": [...]}}')
    if isinstance(content, list):
        values = from_values(content, tensor)
    elif isinstance(content, dict) and isinstance(content.get("b64"), str):
        values = from_bytes(tensor.dtype, base64.b64decode(content["b64"]))
    else:
        raise ValueError('write a list of values, or {"b64": "..."}')
    if values.size != math.prod(shape):
        raise ValueError(f"has {values.size} values, where the shape {list(shape)} has {math.prod(shape)}")
    return values.reshape(shape)


def _shape(given: Any, tensor: Tensor) -> tuple[int, ...]:
    sizes = isinstance(given, list) and all(type(size) is int and 0 <= size < 2**31 for size in given)
    if not sizes or not compatible(given, tensor.shape):
        raise ValueError(f"the shape {_shown(given)} does not fit the model's {list(tensor.shape)}")
    return tuple(given)


def from_values(values: Sequence[Any], tensor: Tensor) -> Array:
    """The flat array of one sample. Raises ValueError for what numpy would silently cut to fit: a fraction as an
    integer, a string as a number."""
    dtype = tensor.dtype
    if dtype == np.object_:
        if not all(isinstance(value, str | bytes) for value in values):
            raise ValueError("strings are needed")
        strings = np.empty(len(values), object)
        strings[:] = [v if isinstance(v, bytes) else v.encode("utf-8", "surrogatepass") for v in values]
        return strings
    kinds = {"b": (bool,), "i": (int,), "u": (int,)}.get(dtype.kind, (int, float))
    least, most = (np.iinfo(dtype).min, np.iinfo(dtype).max) if dtype.kind in "iu" else (-math.inf, math.inf)
    for value in values:
        if type(value) not in kinds or value < least or value > most:
            raise ValueError(f"{_shown(value)} is not {tensor.datatype}")
    try:
        with np.errstate(over="ignore"):  # to infinity
            return np.array(values, dtype)
    except OverflowError:  # an integer of hundreds of digits
        raise ValueError(f"a value is too large for {tensor.datatype}") from None


def _shown(value: Any) -> str:
    return one_line(json.dumps(value, default=str), 60)
