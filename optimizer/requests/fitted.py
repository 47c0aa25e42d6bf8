"""What is asked, fitted to a model: what perf_analyzer, the open loop and the comparison of answers all read.

That is ``random`` or ``zero`` with a shape for each open input, or a JSON file in perf_analyzer's format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from optimizer.errors import BadInputError
from optimizer.profile.safe_paths import is_file, is_folder
from optimizer.requests import data
from optimizer.requests.asked import Asked
from optimizer.requests.columns import read_csv_samples, read_parquet_samples
from optimizer.requests.data import Tensor
from optimizer.requests.made import Values
from optimizer.requests.recorded import Sample, read_folder, read_npy_samples, read_npz_samples
from optimizer.requests.sent import Sent
from optimizer.requests.sizes import Bounds, Shape, meant_by, parse_range, parse_shape
from optimizer.requests.thinned import thinned
from optimizer.requests.written import keep
from optimizer.untrusted import one_line

MOST_REQUESTS, LEAST_REQUESTS = 256, 8  # made up
MADE_BYTES = 8 << 20  # as many requests as are about that; perf_analyzer reads them at each launch, 20 MB a second
MOST_BYTES = 1 << 30
MADE_UP = ("random", "zero")  # by whoever sends them
READERS: dict[str, Callable[[Path, Sequence[Tensor], frozenset[str]], list[Sample]]] = {
    ".npz": read_npz_samples,
    ".npy": read_npy_samples,
    ".csv": read_csv_samples,
    ".parquet": read_parquet_samples,
}


@dataclass(frozen=True, slots=True)
class Requests:
    """``input_data`` is ``random``, ``zero`` or the absolute path of perf_analyzer's JSON, ``shapes`` are its
    ``name:d1,d2``. ``unbounded``: inputs whose random integers are any of their type. ``largest``: how large inputs
    with open dims get. ``note``: what the user should know of it."""

    input_data: str = "random"
    shapes: tuple[str, ...] = ()
    unbounded: tuple[str, ...] = ()
    largest: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    note: str = ""

    def soon_prepared(self, sent: Sent, cache: Path) -> Requests:
        """See ``thinned``. Raises BadInputError, EnvironmentFault."""
        if self.input_data in MADE_UP:
            return self
        path, note = thinned(Path(self.input_data), sent, cache)
        return replace(self, input_data=str(path), note=note or self.note)


def fitted(asked: Asked, config: ModelConfig, sent: Sent, cache: Path) -> Requests:
    """What is sent to the model of ``config``. What is made or converted is kept in ``cache``, by its content.

    Raises BadInputError where ``asked`` does not fit the model, EnvironmentFault where ``cache`` cannot be written.
    """
    inputs = _Inputs(config, asked)
    found = inputs.recorded(sent, cache) if asked.is_recorded else inputs.made(sent, cache)
    return found.soon_prepared(sent, cache)


class _Inputs:
    """What is asked, by input of the model. Raises BadInputError for what does not fit it."""

    def __init__(self, config: ModelConfig, asked: Asked) -> None:
        batched = config.max_batch_size > 0
        self.model = str(config.name)
        self.tensors = {
            tensor.name: Tensor(tensor.name, _datatype(tensor.data_type), tuple(tensor.dims), batched)
            for tensor in config.input
        }
        self.optional = frozenset(tensor.name for tensor in config.input if tensor.optional)
        self.kind: Literal["random", "zero"] = "zero" if asked.input_data == "zero" else "random"
        self.shapes: dict[str, tuple[str, Shape]] = {}
        self.bounds: dict[str, Bounds] = {}
        self.asked = asked
        for text in asked.shapes:
            self._take_shape(text)
        for text in asked.ranges:
            self._take_range(text)

    def recorded(self, sent: Sent, cache: Path) -> Requests:
        """The samples of a file or a folder; perf_analyzer's own JSON stays where it is."""
        name = one_line(self.asked.input_data, 60)
        if self.bounds or self.asked.string_data is not None or self.asked.string_length:
            raise BadInputError(
                f"input data {name}: ranges and strings are about random requests; leave them out, or the input data"
            )
        if mixes := [text for text, shape in self.shapes.values() if shape.fixed is None]:
            raise BadInputError(
                f"shape {one_line(mixes[0], 60)}: a mix is of random requests; the input data {name} have their own"
            )
        path = Path(self.asked.input_data).absolute()
        if not is_folder(path) and not is_file(path):
            raise BadInputError(f"input data {name}: no such file or folder; give one, random or zero")
        shapes = {name: shape.fixed or () for name, (_, shape) in self.shapes.items()}
        tensors = [replace(tensor, shape=shapes.get(name, tensor.shape)) for name, tensor in self.tensors.items()]
        reader = read_folder if is_folder(path) else READERS.get(path.suffix.lower())
        samples = data.read(path, tensors) if reader is None else reader(path, tensors, self.optional)
        sent.check(str(path), samples)
        largest = {
            name: tuple(np.max([sample[name].shape for sample in samples], axis=0).tolist())
            for name, tensor in self.tensors.items()
            if -1 in tensor.shape and name in samples[0]
        }
        if reader is None:
            return Requests(str(path), _texts(shapes), largest=largest)
        return Requests(str(keep(samples, cache)), largest=largest)

    def made(self, sent: Sent, cache: Path) -> Requests:
        tensors = list(self.tensors.values())
        for tensor in tensors:
            if -1 in tensor.shape and tensor.name not in self.shapes:
                name = one_line(tensor.name, 60)
                raise BadInputError(
                    f"input {name!r} of {self.model} has dims {list(tensor.shape)}, which random requests cannot "
                    f"fill: give --shape {name}:128, a mix such as --shape {name}:16..128, or --input-data FILE "
                    f"(in a profile request.shapes, such as {{{name}: [128]}}, or request.input_data)"
                )
        integers = [tensor.name for tensor in tensors if tensor.datatype.startswith(("INT", "UINT"))]
        unbounded = tuple(name for name in integers if name not in self.bounds and self.kind == "random")
        fixed = {name: shape.fixed for name, (_, shape) in self.shapes.items() if shape.fixed is not None}
        plain = not self.bounds and self.asked.string_data is None and not self.asked.string_length
        if plain and len(fixed) == len(self.shapes):
            return Requests(self.kind, _texts(fixed), unbounded, fixed)
        samples = self._samples(sent)
        sent.check(f"shapes {', '.join(self.asked.shapes)}", samples)
        largest = {name: shape.largest for name, (_, shape) in self.shapes.items()}
        return Requests(str(keep(samples, cache)), (), unbounded, largest)

    def _samples(self, sent: Sent) -> list[Sample]:
        """A request's worth of one shape after the other, since only equal shapes are one request."""
        values = {
            name: Values(self.kind, self.bounds.get(name), self.asked.string_data, self.asked.string_length)
            for name in self.tensors
        }
        drawn = self._drawn(MOST_REQUESTS, sent.seed)
        sizes = [
            sent.samples * sum(values[name].bytes_of(self.tensors[name], shape) for name, shape in one.items())
            for one in drawn
        ]
        if max(sizes) * LEAST_REQUESTS > MOST_BYTES:
            raise BadInputError(
                f"a request to {self.model} would have {max(sizes) / 2**20:,.0f} MiB; ask for smaller shapes"
            )
        count = max(LEAST_REQUESTS, min(MOST_REQUESTS, MADE_BYTES * len(sizes) // max(1, sum(sizes))))
        rng = np.random.default_rng(sent.seed)
        return [
            {name: values[name].array(self.tensors[name], shape, rng) for name, shape in one.items()}
            for one in (drawn if count == MOST_REQUESTS else self._drawn(count, sent.seed))
            for _ in range(sent.samples)
        ]

    def _drawn(self, count: int, seed: int) -> list[dict[str, tuple[int, ...]]]:
        """The shape of each input, for ``count`` requests; inputs that were named together have the same."""
        rng = np.random.default_rng([seed, 1])
        mixes = {text: shape.draw(count, rng) for text, shape in self.shapes.values()}
        return [
            {
                name: mixes[self.shapes[name][0]][i] if name in self.shapes else tensor.shape
                for name, tensor in self.tensors.items()
            }
            for i in range(count)
        ]

    def _take_shape(self, text: str) -> None:
        try:
            shape = parse_shape(text)
            for name in meant_by(shape.names, self.tensors):
                if not shape.could_be(self.tensors[name].shape):
                    raise ValueError(f"{name} is {list(self.tensors[name].shape)}")
                self.shapes[name] = (text, shape)
        except ValueError as error:
            raise BadInputError(f"shape {one_line(text, 60)}: {one_line(str(error), 200)}") from None

    def _take_range(self, text: str) -> None:
        try:
            names, bounds = parse_range(text)
            if self.kind == "zero":
                raise ValueError("the values are to be zero")
            for name in meant_by(names, self.tensors):
                Values(bounds=bounds).check(self.tensors[name])
                self.bounds[name] = bounds
        except ValueError as error:
            raise BadInputError(f"range {one_line(text, 60)}: {one_line(str(error), 200)}") from None


def _texts(shapes: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
    """As perf_analyzer's --shape takes them."""
    return tuple(f"{name}:{','.join(map(str, shape))}" for name, shape in shapes.items())


def _datatype(data_type: int) -> str:
    name = str(DataType.Name(data_type)).removeprefix("TYPE_")
    return {"STRING": "BYTES"}.get(name, name)
