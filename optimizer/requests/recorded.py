"""Samples of requests from a folder of binary files, or from arrays in .npz and .npy files.

    FOLDER      perf_analyzer's: one file an input, named as the input, with one sample of it: the raw little-endian
                bytes in row-major order; of strings their text, one a line
    FILE.npz    an array by each input's name, the samples in the first dimension
    FILE.npy    the same for a model with one input

What is there besides the model's inputs is left alone. ``columns`` reads tables.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from optimizer.answers.npz import FEWER, MAX_BYTES, read_npz
from optimizer.errors import BadInputError
from optimizer.profile.safe_paths import is_file, plain_name
from optimizer.requests.data import Array, Tensor, compatible
from optimizer.untrusted import one_line, read_bytes

Sample = dict[str, Array]


def read_folder(folder: Path, tensors: Sequence[Tensor], optional: frozenset[str]) -> list[Sample]:
    """The one sample in it. Raises BadInputError."""
    sample: Sample = {}
    for tensor in tensors:
        try:
            path = folder / plain_name(tensor.name)
            if tensor.name in optional and not is_file(path):
                continue
            raw = read_bytes(path, MAX_BYTES, "it holds one sample")
            sample[tensor.name] = _values(raw, tensor)
        except ValueError as error:
            raise BadInputError(f"{one_line(str(folder))}: input {one_line(tensor.name)}: {error}") from None
    return [sample]


def read_npz_samples(path: Path, tensors: Sequence[Tensor], optional: frozenset[str]) -> list[Sample]:
    """Raises BadInputError: ``file: sample 3, input x: …``."""
    return _samples(path, read_npz(path), tensors, optional)


def read_npy_samples(path: Path, tensors: Sequence[Tensor], optional: frozenset[str]) -> list[Sample]:
    """As ``read_npz_samples``."""
    name = one_line(str(path))
    needed = [tensor for tensor in tensors if tensor.name not in optional] or list(tensors)
    if len(needed) != 1:
        names = one_line(", ".join(tensor.name for tensor in needed), 200)
        raise BadInputError(f"{name}: holds one input, and the model's are {names}; write a .npz by np.savez")
    data = read_bytes(path, MAX_BYTES, FEWER)
    try:
        array = np.asarray(np.load(io.BytesIO(data), allow_pickle=False))
    except Exception as error:  # of a damaged file numpy raises several kinds
        if "allow_pickle" in str(error) and data.startswith(b"\x93NUMPY"):
            raise BadInputError(f"{name}: has Python objects; write text as np.array([...], dtype='U')") from None
        raise BadInputError(f"{name}: not a .npy file; np.save writes one") from None
    return _samples(path, {needed[0].name: array}, needed, optional)


def shape_of(size: int, tensor: Tensor) -> tuple[int, ...]:
    """The shape of ``size`` values where the model leaves at most one dimension open. Raises ValueError."""
    known = math.prod(own for own in tensor.shape if own != -1)
    missing = tensor.shape.count(-1)
    if missing > 1:
        raise ValueError(
            f"the model's shape is {list(tensor.shape)}, of which the number of values tells one open "
            f"dimension only; give --shape {one_line(tensor.name, 60)}:SIZES"
        )
    if size != known if missing == 0 else (known == 0 or size % known):
        raise ValueError(f"has {size} values, where the model's shape is {list(tensor.shape)}")
    return tuple(size // known if own == -1 else own for own in tensor.shape)


def _values(raw: bytes, tensor: Tensor) -> Array:
    if tensor.datatype == "BYTES":
        lines = raw.removesuffix(b"\n").split(b"\n")
        flat = np.empty(len(lines), object)
        flat[:] = [line.removesuffix(b"\r") for line in lines]
    else:
        if len(raw) % tensor.dtype.itemsize:
            raise ValueError(f"has {len(raw)} bytes, and a value of {tensor.datatype} has {tensor.dtype.itemsize}")
        flat = np.frombuffer(raw, tensor.dtype)
    return flat.reshape(shape_of(flat.size, tensor))


def _samples(
    path: Path, arrays: Mapping[str, Array], tensors: Sequence[Tensor], optional: frozenset[str]
) -> list[Sample]:
    name = one_line(str(path))
    given = {tensor.name: tensor for tensor in tensors if tensor.name in arrays}
    check_complete(name, arrays, tensors, optional)
    fitting: dict[str, Array] = {}
    for key, tensor in given.items():
        array = arrays[key]
        if array.ndim == 1 and math.prod(tensor.shape) == 1:
            array = array.reshape(-1, *tensor.shape)  # a scalar a sample
        if array.ndim == 0 or not compatible(array.shape[1:], tensor.shape):
            raise BadInputError(
                f"{name}: input {one_line(key)}: has the shape {list(array.shape)}, which is not samples of the "
                f"model's {list(tensor.shape)}, the samples first"
            )
        fitting[key] = _in_type(name, array, tensor)
    counts = {key: len(array) for key, array in fitting.items()}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        told = one_line(", ".join(f"{key} {count}" for key, count in counts.items()), 200)
        raise BadInputError(f"{name}: every array needs one entry a sample in its first dimension ({told})")
    return [{key: array[i] for key, array in fitting.items()} for i in range(min(counts.values()))]


def check_complete(
    file: str, there: Mapping[str, object], tensors: Sequence[Tensor], optional: frozenset[str]
) -> None:
    """Raises BadInputError where an input that the model needs is not ``there``."""
    lacking = [tensor.name for tensor in tensors if tensor.name not in there and tensor.name not in optional]
    if lacking or not any(tensor.name in there for tensor in tensors):
        needed = ", ".join(lacking or [tensor.name for tensor in tensors])
        has = ", ".join(there) or "nothing"
        raise BadInputError(f"{file}: lacks input {one_line(needed, 100)}; it has {one_line(has, 200)}")


def _in_type(file: str, array: Array, tensor: Tensor) -> Array:
    """In the input's type where no value is lost by it; floats may be rounded."""
    wanted, kind, name = tensor.dtype, array.dtype.kind, one_line(tensor.name)
    if tensor.datatype == "BYTES" and kind in "US":
        return np.asarray((np.char.encode(array, "utf-8", "surrogatepass") if kind == "U" else array).astype(object))
    if tensor.datatype == "BYTES" or kind not in "fiub":
        held = one_line(str(array.dtype), 60)
        raise BadInputError(f"{file}: input {name}: holds {held}, and the model takes {tensor.datatype}")
    with np.errstate(all="ignore"):
        cast = array.astype(wanted)
    wrong = np.argwhere(cast != array) if wanted.kind in "iub" or kind == "b" else np.empty((0, 1))
    if wrong.size:
        sample, value = int(wrong[0][0]) + 1, array[tuple(wrong[0])]
        raise BadInputError(f"{file}: sample {sample}, input {name}: {value} is not {tensor.datatype}")
    return np.asarray(cast)
