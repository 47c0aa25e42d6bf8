"""The requests to a model: the user's options are matched with the model's inputs and stored as a file."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from optimizer.config.model_config_proto import DataType, ModelConfig
from optimizer.core.errors import BadInputError
from optimizer.core.files import cache_error, replace_file
from optimizer.core.locks import file_lock
from optimizer.core.notes import OpenLoopSampleLimit, PerfAnalyzerSampleLimit
from optimizer.core.request_sizes import (
    InputShape,
    TokenRequests,
    ValueRange,
    parse_input_shape,
    parse_range,
    select_inputs,
)
from optimizer.core.safe_text import exists, is_file, is_folder, one_line, show_path
from optimizer.model import input_data
from optimizer.model.input_data import InputSample, InputTensor, ValueGenerator
from optimizer.model.recorded_samples import (
    check_complete,
    read_csv_samples,
    read_folder,
    read_npy_samples,
    read_npz_samples,
    read_parquet_samples,
)
from optimizer.model.token_inputs import TokenInputs
from optimizer.options.run_options import GENERATED_DATA

READERS: dict[str, Callable[[Path, Sequence[InputTensor], frozenset[str]], list[InputSample]]] = {
    ".npz": read_npz_samples,
    ".npy": read_npy_samples,
    ".csv": read_csv_samples,
    ".parquet": read_parquet_samples,
}
# perf_analyzer prepares every request before it starts; this many samples in all requests together take about 1 s
MAX_PREPARED_SAMPLES, MIN_SAMPLES = 1 << 19, 8
SEND_AT_RATE = "send at a rate (--load rate; for a sweep --request-rate)"  # advice in errors
MIN_ENTRY_BYTES = 10  # smallest size of an entry in perf_analyzer's JSON
# perf_analyzer reads the file at each of its starts and registers each sample in shared memory, so samples of one
# shape are few; a mix needs more for its shares
MAX_GENERATED_SAMPLES, GENERATED_BYTES = 128, 2 << 20
PREPARED_BYTES = 128 << 20  # limit for the requests that begin with each sample, which perf_analyzer copies there
MAX_MIXED_REQUESTS, MIN_MIXED_REQUESTS, MIXED_BYTES = 256, 8, 8 << 20
_GENERATED_FILE = re.compile(r"(random|zero)-[0-9a-f]{16}\.json")
EXAMPLE_SIZE, EXAMPLE_SIZES = "128", "16..128"  # examples of a variable dimension in errors


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The requests that the user asks for, on the command line or in a profile.

    ``input_data``: ``random``, ``zero``, a file or folder of samples, or empty if not given. ``shapes`` and
    ``ranges`` are texts that ``core.request_sizes`` parses; the last one for an input counts. ``string_data`` and
    ``string_length`` are perf_analyzer's.
    """

    input_data: str = ""
    shapes: tuple[str, ...] = ()
    ranges: tuple[str, ...] = ()
    string_data: str | None = None
    string_length: int | None = None

    @property
    def is_recorded(self) -> bool:
        """Whether the samples come from a file or folder."""
        return self.input_data not in ("", *GENERATED_DATA)

    def over(self, defaults: RequestOptions) -> RequestOptions:
        """Return these options, with ``defaults`` for those that are not set.

        Recorded samples replace all defaults. Zeros replace the ranges, which they do not have.
        """
        if self.is_recorded:
            return self
        return RequestOptions(
            self.input_data or defaults.input_data,
            defaults.shapes + self.shapes,
            self.ranges if self.input_data == "zero" else defaults.ranges + self.ranges,
            defaults.string_data if self.string_data is None else self.string_data,
            self.string_length or defaults.string_length,
        )


@dataclass(frozen=True, slots=True)
class RequestBatching:
    """How samples become requests: ``samples`` per request, sent by the open loop or by perf_analyzer.

    ``mixed``: requests have up to ``samples``. ``seed`` determines random values. In a request of several samples
    all have the same shape, with perf_analyzer in all requests.
    """

    samples: int = 1
    open_loop: bool = False
    seed: int = 0
    mixed: bool = False

    @property
    def max_prepared_samples(self) -> int:
        """The number of samples that perf_analyzer prepares for such requests in about a second."""
        return max(MIN_SAMPLES, MAX_PREPARED_SAMPLES // self.samples)

    def check(self, source: str, samples: Sequence[InputSample]) -> None:
        """Raise BadInputError if these requests cannot be formed from consecutive samples of ``source``."""
        shapes = [tuple(array.shape for array in sample.values()) for sample in samples]
        if self.samples == 1 or len(set(shapes)) == 1:
            return
        if not self.open_loop:
            raise BadInputError(
                f"{one_line(source, 200)}: perf_analyzer sends requests of {self.samples} samples in one shape only; "
                f"set --request-batch-size 1, or {SEND_AT_RATE}"
            )
        groups = [set(shapes[i : i + self.samples]) for i in range(0, len(shapes), self.samples)]
        if self.mixed or len(shapes) % self.samples or any(len(group) > 1 for group in groups):
            raise BadInputError(
                f"{one_line(source, 200)}: samples of different shapes cannot be in one request of {self.samples}; "
                "set --request-batch-size 1 or put samples of one shape together"
            )


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests as a load generator takes them.

    ``input_data`` is perf_analyzer's JSON, with an absolute path; ``shapes`` are its ``name:d1,d2``. ``unbounded``:
    inputs whose random integers cover their whole type. ``has_unbounded_numbers``: whether the user gave no bounds
    for the random numbers of an input. ``largest``: the largest shape of each input with dynamic dims. ``note``: a
    remark for the user.
    """

    input_data: Path
    shapes: tuple[str, ...] = ()
    unbounded: tuple[str, ...] = ()
    has_unbounded_numbers: bool = False
    largest: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    note: PerfAnalyzerSampleLimit | OpenLoopSampleLimit | None = None

    def limited(self, batching: RequestBatching, cache: Path) -> Requests:
        """Return evenly chosen samples of a large file, as many as the load generator can take.

        perf_analyzer prepares them in about a second. In an open loop, tune's own client keeps them in memory. Fewer
        generated samples are as good, so they get no note. Raises BadInputError or EnvironmentFault.
        """
        path = self.input_data
        if batching.open_loop:
            return self._limited_to_memory(path, batching.samples, cache)
        limit = batching.max_prepared_samples
        if batching.samples == 1 or path.stat().st_size <= limit * MIN_ENTRY_BYTES:
            return self
        entries = input_data.read_entries(path)
        if len(entries) <= limit:
            return self
        sample = [entries[i * len(entries) // limit] for i in range(limit)]
        return self._reduced(sample, PerfAnalyzerSampleLimit(limit, len(entries), batching.samples), cache)

    def _limited_to_memory(self, path: Path, together: int, cache: Path) -> Requests:
        """Return evenly chosen groups of ``together`` samples: MAX_SENT_ENTRIES, or about MAX_SENT_BYTES if fewer."""
        size, count = path.stat().st_size, input_data.count_entries(path)
        if count == 1 or (size <= input_data.MAX_SENT_BYTES and count <= input_data.MAX_SENT_ENTRIES):
            return self
        entries = input_data.read_entries(path)
        groups = [entries[first : first + together] for first in range(0, count, together)]
        share = min(input_data.MAX_SENT_BYTES / size, input_data.MAX_SENT_ENTRIES / count)
        limit = max(1, math.floor(share * len(groups)))
        sample = [entry for number in range(limit) for entry in groups[number * len(groups) // limit]]
        return self._reduced(sample, OpenLoopSampleLimit(len(sample), count), cache)

    def _reduced(
        self, sample: Sequence[Any], note: PerfAnalyzerSampleLimit | OpenLoopSampleLimit, cache: Path
    ) -> Requests:
        """Return the requests with the entries ``sample`` in place of all. Recorded ones get the ``note``."""
        kind = generated_kind(self.input_data.name)
        stored = _store(input_data.entries_to_json(sample), cache, kind and f"{kind}-")
        return replace(self, input_data=stored, note=None if kind else note)


class InputOptionError(BadInputError):
    """A shape or a range of RequestOptions does not fit the model; ``text`` is the option as it is written there."""

    def __init__(self, kind: Literal["shape", "range"], text: str, problem: str) -> None:
        super().__init__(f"{kind} {one_line(text, 60)}: {problem}")
        self.kind = kind
        self.text = text
        self.problem = problem

    def __reduce__(self) -> tuple[type[InputOptionError], tuple[str, str, str]]:
        return type(self), (self.kind, self.text, self.problem)


def prepare_requests(
    options: RequestOptions,
    config: ModelConfig,
    batching: RequestBatching,
    cache: Path,
    tokens: TokenRequests | None = None,
    index_ranges: Mapping[str, tuple[int, int]] | None = None,
) -> Requests:
    """Return the requests to the model of ``config``; generated or converted samples are stored in ``cache``.

    ``tokens`` are the lengths of generated prompts and outputs of a model that streams. ``index_ranges`` are the
    ranges of random values of inputs for which ``options`` have none.

    Raises BadInputError if ``options`` do not fit the model, ParameterError for a key of the section ``tokens`` whose
    input does not, and EnvironmentFault if ``cache`` cannot be written.
    """
    inputs = _Inputs(config, options, tokens, index_ranges or {})
    requests = inputs.recorded(batching, cache) if options.is_recorded else inputs.generated(batching, cache)
    return requests.limited(batching, cache)


def generated_kind(name: str) -> str:
    """Return ``random`` or ``zero`` for the name of a file that ``prepare_requests`` has generated, else nothing."""
    match = _GENERATED_FILE.fullmatch(name)
    return match[1] if match else ""


def _store(content: bytes, cache: Path, prefix: str = "") -> Path:
    """Write ``content`` into ``cache`` under its hash, unless it is there; other processes may do so too.

    The name of the file begins with ``prefix``.
    """
    if len(content) > input_data.MAX_BYTES:
        raise BadInputError(f"the input data would be more than {input_data.MAX_BYTES >> 20} MiB; give fewer samples")
    folder = cache / "requests"
    path = folder / f"{prefix}{hashlib.sha256(content).hexdigest()[:16]}.json"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with file_lock(folder / ".lock", lambda holder: None):
            if not path.exists() or path.stat().st_size != len(content):
                replace_file(path, content)
    except OSError as error:
        raise cache_error(f"write {path}", error) from error
    return path


def _example_sizes(shape: Sequence[int], size: str) -> str:
    """Return the sizes of ``shape``, separated by commas, with ``size`` for each variable one."""
    return ",".join(size if dim == -1 else str(dim) for dim in shape)


def _shape_options(names_by_dims: Mapping[tuple[int, ...], Sequence[str]], size: str) -> str:
    """Return options that give the ``size`` to each variable dimension of the inputs."""
    options = (f"--shape {','.join(names)}:{_example_sizes(dims, size)}" for dims, names in names_by_dims.items())
    return one_line(" ".join(options), 300)


class _ShapeOption(NamedTuple):
    """The shape of an input, and the text of the option that gives it, perhaps to several inputs."""

    text: str
    shape: InputShape


class _Inputs:
    """The options by input of the model. Raises BadInputError for options that do not fit it, and as TokenInputs."""

    def __init__(
        self,
        config: ModelConfig,
        options: RequestOptions,
        tokens: TokenRequests | None,
        index_ranges: Mapping[str, tuple[int, int]],
    ) -> None:
        batched = config.max_batch_size > 0
        self.model = str(config.name)
        self.tensors = {
            tensor.name: InputTensor(tensor.name, _datatype(tensor.data_type), tuple(tensor.dims), batched)
            for tensor in config.input
        }
        self.optional = frozenset(tensor.name for tensor in config.input if tensor.optional)
        self.kind: Literal["random", "zero"] = "zero" if options.input_data == "zero" else "random"
        self.shapes: dict[str, _ShapeOption] = {}
        self.bounds: dict[str, ValueRange] = {}
        self.index_ranges = index_ranges
        self.options = options
        for text in options.shapes:
            self._add_shape(text)
        for text in options.ranges:
            self._add_range(text)
        self.tokens: TokenInputs | None = None
        if tokens is not None:
            self._add_tokens(tokens)

    @property
    def _describes_strings(self) -> bool:
        return self.options.string_data is not None or bool(self.options.string_length)

    def recorded(self, batching: RequestBatching, cache: Path) -> Requests:
        """Return requests with the samples of a file or folder; perf_analyzer's own JSON is used in place."""
        name = one_line(self.options.input_data, 60)
        if self.bounds or self._describes_strings:
            raise BadInputError(
                f"input data {name}: ranges and strings apply to random requests only; leave them out, or the input "
                "data"
            )
        if mixes := [option.text for option in self.shapes.values() if option.shape.fixed is None]:
            raise BadInputError(
                f"shape {one_line(mixes[0], 60)}: a mix applies to random requests only; the input data {name} have "
                "their own shapes"
            )
        path = Path(self.options.input_data).absolute()
        if not is_folder(path) and not is_file(path):
            problem = "is a device or a pipe" if exists(path) else "no such file or folder"
            raise BadInputError(f"input data {name}: {problem}; give a file or folder, or random or zero")
        shapes = {name: option.shape.fixed or () for name, option in self.shapes.items()}
        tensors = [replace(tensor, dims=shapes.get(name, tensor.dims)) for name, tensor in self.tensors.items()]
        reader = read_folder if is_folder(path) else READERS.get(path.suffix.lower())
        if reader is None:
            samples = list(input_data.parse_entries(path, tensors))
            check_complete(show_path(path), samples[0], tensors, self.optional)
        else:
            samples = reader(path, tensors, self.optional)
        batching.check(str(path), samples)
        largest = {
            name: tuple(np.max([sample[name].shape for sample in samples], axis=0).tolist())
            for name, tensor in self.tensors.items()
            if -1 in tensor.dims and name in samples[0]
        }
        if reader is None:
            return Requests(path, _shape_texts(shapes), largest=largest)
        return Requests(_store(input_data.to_json(samples), cache), largest=largest)

    def generated(self, batching: RequestBatching, cache: Path) -> Requests:
        """Return random or zero requests, in a file that all load generators read."""
        tensors = list(self.tensors.values())
        if self._describes_strings and all(tensor.datatype != "BYTES" for tensor in tensors):
            inputs = one_line(", ".join(f"{tensor.name} {tensor.datatype}" for tensor in tensors), 200)
            raise BadInputError(
                f"--string-data and --string-length: {self.model} has no input of strings (its inputs are {inputs}); "
                "leave them out"
            )
        if unsized_tensors := [tensor for tensor in tensors if -1 in tensor.dims and tensor.name not in self.shapes]:
            raise BadInputError(self._explain_missing_shapes(unsized_tensors))
        bounded = (*self.bounds, *self.index_ranges, *(self.tokens.filled if self.tokens else ()))
        numbers = {
            tensor.name: tensor.datatype
            for tensor in tensors
            if tensor.datatype not in ("BOOL", "BYTES") and tensor.name not in bounded and self.kind == "random"
        }
        unbounded = tuple(name for name, datatype in numbers.items() if datatype.startswith(("INT", "UINT")))
        fixed = {name: option.shape.fixed for name, option in self.shapes.items() if option.shape.fixed is not None}
        samples = self._generate(batching)
        batching.check(f"shapes {', '.join(dict.fromkeys(option.text for option in self.shapes.values()))}", samples)
        largest = {name: option.shape.largest for name, option in self.shapes.items()}
        stored = _store(input_data.to_json(samples), cache, f"{self.kind}-")
        return Requests(stored, _shape_texts(fixed), unbounded, bool(numbers), largest)

    def _explain_missing_shapes(self, tensors: Sequence[InputTensor]) -> str:
        """Return the error for inputs of unknown sizes, with the options that give sizes to all of them."""
        groups: dict[tuple[int, ...], list[str]] = {}
        for tensor in tensors:
            groups.setdefault(tensor.dims, []).append(one_line(tensor.name, 60))
        dims, (name, *_) = next(iter(groups.items()))
        sizes = _example_sizes(dims, EXAMPLE_SIZE).replace(",", ", ")
        return (
            f"input {name!r} of {self.model} has dims {list(dims)}, which random requests cannot fill: give "
            f"{_shape_options(groups, EXAMPLE_SIZE)}, a mix such as {_shape_options(groups, EXAMPLE_SIZES)}, or "
            f"--input-data FILE (in a profile request.shapes, such as {{{name}: [{sizes}]}}, or request.input_data)"
        )

    def _generate(self, batching: RequestBatching) -> list[InputSample]:
        """Return the samples of whole requests; all samples of one request have the same shape."""
        options = self.options
        generators = {
            name: ValueGenerator(self.kind, self._bounds_of(tensor), options.string_data, options.string_length)
            for name, tensor in self.tensors.items()
        }
        has_mix = self.tokens is not None or any(option.shape.fixed is None for option in self.shapes.values())
        together = batching.samples if has_mix else 1  # samples of one shape fill requests of any size
        fewest, most, aim_bytes = 1, MAX_GENERATED_SAMPLES, GENERATED_BYTES
        if not batching.open_loop:
            most = min(most, batching.max_prepared_samples)
            aim_bytes = min(aim_bytes, PREPARED_BYTES // batching.samples)
        if has_mix:
            fewest, most, aim_bytes = MIN_MIXED_REQUESTS, MAX_MIXED_REQUESTS, MIXED_BYTES
        shapes = self._draw_shapes(most, batching.seed)
        sizes = [
            together * sum(generators[name].bytes_of(self.tensors[name], dims) for name, dims in by_name.items())
            for by_name in shapes
        ]
        if max(sizes) * fewest > input_data.MAX_BYTES:
            raise BadInputError(
                f"a request to {self.model} would have {max(sizes) / 2**20:,.0f} MiB; give smaller shapes"
            )
        count = max(fewest, min(most, aim_bytes * len(sizes) // max(1, sum(sizes))))
        if count < most:
            shapes = self._draw_shapes(count, batching.seed)
        rng = np.random.default_rng(batching.seed)
        samples = [
            {name: generators[name].array(self.tensors[name], dims, rng) for name, dims in by_name.items()}
            for by_name in shapes
            for _ in range(together)
        ]
        if self.tokens is not None:
            self.tokens.fill(samples, batching.seed)
        return samples

    def _bounds_of(self, tensor: InputTensor) -> ValueRange | None:
        """Return the range of random values; that of the rows of a table is limited to values of the type."""
        rows, kind = self.index_ranges.get(tensor.name), tensor.dtype.kind
        if tensor.name in self.bounds or rows is None:
            return self.bounds.get(tensor.name)
        if kind in "iu":
            return rows[0], min(rows[1], np.iinfo(tensor.dtype).max)
        if kind == "f":
            return rows[0], min(rows[1], float(np.finfo(tensor.dtype).max))
        return None if kind == "b" else rows

    def _draw_shapes(self, count: int, seed: int) -> list[dict[str, tuple[int, ...]]]:
        """Return the shape of each input for ``count`` requests; inputs named together get the same shape."""
        rng = np.random.default_rng([seed, 1])
        drawn_shapes = {option.text: option.shape.draw(count, rng) for option in self.shapes.values()}
        return [
            {
                name: drawn_shapes[self.shapes[name].text][i] if name in self.shapes else tensor.dims
                for name, tensor in self.tensors.items()
            }
            for i in range(count)
        ]

    def _add_shape(self, text: str) -> None:
        try:
            shape = parse_input_shape(text)
            for name in select_inputs(shape.names, self.tensors):
                if not shape.fits_model(self.tensors[name].dims):
                    dims = self.tensors[name].dims
                    example = _example_sizes(dims, EXAMPLE_SIZE)
                    raise ValueError(f"{name} has dims {list(dims)}; write sizes that fit, such as {example}")
                self.shapes[name] = _ShapeOption(text, shape)
        except ValueError as error:
            raise InputOptionError("shape", text, one_line(str(error), 200)) from None

    def _add_tokens(self, tokens: TokenRequests) -> None:
        """Give the prompt's input its lengths."""
        self.tokens = TokenInputs(tokens, self.tensors, self.model)
        for name in (*self.tokens.filled, tokens.prompt_input):
            if name in self.shapes or (name in self.bounds and name in self.tokens.filled):
                raise BadInputError(
                    f"input {one_line(name, 60)}: the tokens: section gives its values; leave out its shape and range"
                )
        named = {*self.tokens.filled, tokens.prompt_input, *self.bounds, *self.shapes}
        self.tensors = {  # random values of the other inputs would change the generated tokens
            name: tensor for name, tensor in self.tensors.items() if name in named or name not in self.optional
        }
        if shape := self.tokens.prompt_shape:
            text = f"{tokens.prompt_input}: lengths of the prompts"
            self.shapes[tokens.prompt_input] = _ShapeOption(text, shape)

    def _add_range(self, text: str) -> None:
        try:
            names, bounds = parse_range(text)
            if self.kind == "zero":
                raise ValueError("input data zero has no range of values; leave the range out")
            for name in select_inputs(names, self.tensors):
                ValueGenerator(bounds=bounds).check(self.tensors[name])
                self.bounds[name] = bounds
        except ValueError as error:
            raise InputOptionError("range", text, one_line(str(error), 200)) from None


def _shape_texts(shapes: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
    """Return the shapes in the syntax of perf_analyzer's --shape."""
    return tuple(f"{name}:{','.join(map(str, shape))}" for name, shape in shapes.items())


def _datatype(data_type: int) -> str:
    name = str(DataType.Name(data_type)).removeprefix("TYPE_")
    return {"STRING": "BYTES"}.get(name, name)
