"""Values of inputs that are made up: random or zero, within bounds, strings of a text or of a length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from optimizer.requests.data import Array, Tensor
from optimizer.requests.sizes import Bounds

STRING_LENGTH = 128  # perf_analyzer's default
_CHARACTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789", dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class Values:
    """``random`` integers are any of their type, floats are normally distributed; within ``bounds`` (both included)
    all are uniform. Strings are ``string_data``, or else of ``string_length`` random characters; with ``zero`` they
    are empty where neither is given.
    """

    kind: Literal["random", "zero"] = "random"
    bounds: Bounds | None = None
    string_data: str | None = None
    string_length: int | None = None

    def check(self, tensor: Tensor) -> None:
        """Raises ValueError where the bounds do not fit the type, BadInputError as ``Tensor.dtype``."""
        if self.bounds is None:
            return
        if tensor.dtype.kind not in "fiuV":  # V: BF16
            raise ValueError(f"{tensor.name} is {tensor.datatype}, and a range is of numbers")
        if tensor.dtype.kind in "iu":
            least, most = np.iinfo(tensor.dtype).min, np.iinfo(tensor.dtype).max
            if not all(isinstance(bound, int) and least <= bound <= most for bound in self.bounds):
                raise ValueError(f"{tensor.name} is {tensor.datatype}: write whole numbers from {least} to {most}")

    def array(self, tensor: Tensor, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
        """The values of one sample."""
        dtype = tensor.dtype
        if tensor.datatype == "BYTES":
            return self._strings(shape, rng)
        if self.kind == "zero":
            return np.zeros(shape, dtype)
        if dtype.kind == "b":
            return rng.integers(0, 2, shape).astype(bool)
        if dtype.kind in "iu":
            low, high = self.bounds or (np.iinfo(dtype).min, np.iinfo(dtype).max)
            return rng.integers(int(low), int(high), shape, dtype=dtype, endpoint=True)
        if self.bounds:
            low, high = self.bounds
            return np.asarray(rng.uniform(low, high, shape)).astype(dtype)
        return rng.standard_normal(shape, dtype=np.float32).astype(dtype)

    def bytes_of(self, tensor: Tensor, shape: tuple[int, ...]) -> int:
        """What the values of a sample take in a message."""
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
