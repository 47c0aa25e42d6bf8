"""Compare two responses to one request: whether they agree, and where they differ most.

The reference outputs are the responses of the unbatched baseline, which reference.npz keeps.
"""

from __future__ import annotations

import io
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from objectives.arrays import FloatArray
from optimizer.core.errors import BadInputError, DeploymentError
from optimizer.core.files import write_atomically
from optimizer.core.safe_text import one_line
from optimizer.model.recorded_samples import read_npz

Array: TypeAlias = npt.NDArray[Any]

# Relative rounding error, since batches of other sizes are summed in another order. All other types are exact.
DEFAULT_RELATIVE = {"FP64": 1e-3, "FP32": 1e-3, "FP16": 1e-2, "BF16": 5e-2}


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """An output tensor of a response.

    ``datatype`` is Triton's name of its type, and ``precision`` that of its values, see ``with_precision``. It is
    empty if it is the same.
    """

    datatype: str
    values: Array
    precision: str = ""


ModelOutputs: TypeAlias = Mapping[str, OutputTensor]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """A float may differ by ``absolute + relative x |expected value|``.

    If ``relative`` is None, it is the value of the output's precision in DEFAULT_RELATIVE. If ``absolute`` is None,
    it is ``relative`` times the output's mean magnitude, because small values may be sums of large ones.
    """

    relative: float | None = None
    absolute: float | None = None

    def allowed(self, expected: OutputTensor, magnitude: float) -> FloatArray:
        """Return the allowed difference of each value; 0 for integers, booleans and strings."""
        default = DEFAULT_RELATIVE.get(expected.precision or expected.datatype)
        if default is None:
            return np.zeros(expected.values.shape)
        relative = default if self.relative is None else self.relative
        absolute = relative * magnitude if self.absolute is None else self.absolute
        with np.errstate(invalid="ignore"):  # NaN for an infinite value, of which any other value differs
            return np.asarray(absolute + relative * np.abs(expected.values.astype(np.float64)))


@dataclass(frozen=True, slots=True, order=True)
class OutputDifference:
    """A difference, ordered by ``share_of_tolerance`` and then by ``distance``; both may be inf.

    ``share_of_tolerance`` is the distance divided by the allowed one. ``place`` is the index in the output.
    """

    share_of_tolerance: float
    distance: float
    text: str = field(compare=False)
    place: str = field(compare=False, default="")

    @property
    def is_allowed(self) -> bool:
        """Whether the difference is within the tolerance."""
        return self.share_of_tolerance <= 1


def read_outputs(serialized: bytes) -> ModelOutputs:
    """Return the outputs of a serialized ModelInferResponse.

    Raises DecodeError (protobuf) or ValueError if it is invalid.
    """
    from tritonclient.grpc.service_pb2 import ModelInferResponse

    from optimizer.model.inference_requests import decode_outputs

    response = ModelInferResponse.FromString(serialized)
    arrays = decode_outputs(response)
    return {output.name: OutputTensor(output.datatype, arrays[output.name]) for output in response.outputs}


def concatenate(responses: Sequence[bytes]) -> bytes:
    """Return one serialized ModelInferResponse with the contents of all ``responses``, in their order.

    Each output has one dimension: the number of its elements. No responses give a response without outputs. Raises
    DeploymentError if a response is invalid or the type of an output changes.
    """
    from google.protobuf.message import DecodeError
    from tritonclient.grpc.service_pb2 import ModelInferResponse

    joined: dict[str, tuple[Any, list[bytes]]] = {}  # the output tensor and its raw contents, by name
    for serialized in responses:
        try:
            response = ModelInferResponse.FromString(serialized)
        except DecodeError as error:
            raise DeploymentError("the server sent a response that is no ModelInferResponse") from error
        outputs, raws = response.outputs, response.raw_output_contents
        if len(outputs) != len(raws):
            raise DeploymentError(f"a response has {len(outputs)} outputs, but the contents of {len(raws)}")
        for output, raw in zip(outputs, raws, strict=True):
            first = ModelInferResponse.InferOutputTensor(name=output.name, datatype=output.datatype, shape=[0])
            total, contents = joined.setdefault(output.name, (first, []))
            if total.datatype != output.datatype:
                raise DeploymentError(
                    f"output {output.name} is {total.datatype} in one response and {output.datatype} in another"
                )
            total.shape[0] += int(np.prod(output.shape))
            contents.append(raw)
    raw_contents = [b"".join(contents) for _, contents in joined.values()]
    result = ModelInferResponse(outputs=[total for total, _ in joined.values()], raw_output_contents=raw_contents)
    return bytes(result.SerializeToString())


def _values_by_output(responses: Sequence[ModelOutputs], datatypes: Collection[str]) -> dict[str, Array]:
    """Return all values of each output whose type is one of ``datatypes``, flat, over all ``responses``."""
    values: dict[str, list[Array]] = {}
    for outputs in responses:
        for name, tensor in outputs.items():
            if tensor.datatype in datatypes:
                values.setdefault(name, []).append(tensor.values.ravel())
    return {name: np.concatenate(arrays) for name, arrays in values.items()}


def mean_magnitudes(responses: Sequence[ModelOutputs]) -> dict[str, float]:
    """Return the mean of the finite absolute values of each floating-point output over all ``responses``."""
    means = {}
    for name, values in _values_by_output(responses, DEFAULT_RELATIVE).items():
        finite = np.abs(values[np.isfinite(values)].astype(np.float64))
        means[name] = float(finite.mean()) if finite.size else 0.0
    return means


def with_precision(responses: Sequence[ModelOutputs]) -> list[ModelOutputs]:
    """Return ``responses`` with the precision of each output of type FP32 or FP64.

    A model that computes in FP16 or BF16 often converts its outputs to FP32. All their values are then numbers of the
    narrower type, and have its rounding errors. Whole and quantized numbers do not tell.
    """
    all_values = _values_by_output(responses, ("FP32", "FP64"))
    precisions = {name: _precision(values) for name, values in all_values.items()}
    return [
        {name: replace(tensor, precision=precisions.get(name, "")) for name, tensor in outputs.items()}
        for outputs in responses
    ]


def _precision(values: Array) -> str:
    """Return BF16 or FP16 if all finite ``values`` are numbers of that type, otherwise an empty string."""
    finite = values[np.isfinite(values)].astype(np.float64)
    single = finite.astype(np.float32)
    if np.array_equal(single, np.rint(single)) or not np.array_equal(single, finite):
        return ""
    if not np.any(single.view(np.uint32) & 0xFFFF):
        return "" if _have_one_step(finite, digits=7) else "BF16"
    with np.errstate(over="ignore"):
        is_half = np.array_equal(single.astype(np.float16), single)
    return "FP16" if is_half and not _have_one_step(finite, digits=10) else ""


def _have_one_step(values: FloatArray, *, digits: int) -> bool:
    """Return whether all values are multiples of the last of ``digits`` binary digits of the largest one.

    They may then be quantized, with a step that does not depend on their size.
    """
    steps = np.ldexp(values, digits - math.floor(math.log2(np.abs(values).max())))
    return bool(np.array_equal(steps, np.rint(steps)))


def find_difference(
    expected: ModelOutputs, actual: ModelOutputs, tolerance: Tolerance, magnitudes: Mapping[str, float]
) -> OutputDifference | None:
    """Return the difference that uses the largest share of ``tolerance``; None if the outputs are equal.

    ``magnitudes`` are those of ``mean_magnitudes``. A value that is not finite equals only itself. An output that is
    missing or has another type or shape differs, as does one that is not expected.
    """
    differences = [
        _difference(name, tensor, actual.get(name), tolerance, magnitudes.get(name, 0.0))
        for name, tensor in expected.items()
    ]
    unexpected = [name for name in actual if name not in expected]
    differences += [OutputDifference(math.inf, math.inf, f"{name} is not expected") for name in unexpected]
    return max(filter(None, differences), default=None)


def _difference(
    name: str, expected: OutputTensor, actual: OutputTensor | None, tolerance: Tolerance, magnitude: float
) -> OutputDifference | None:
    """Return the largest difference of the output ``name``; None if it is equal. ``actual`` is None if missing."""
    if actual is None:
        return OutputDifference(math.inf, math.inf, f"{name} is missing")
    if actual.datatype != expected.datatype:
        return OutputDifference(math.inf, math.inf, f"{name} is {actual.datatype} instead of {expected.datatype}")
    actual_values, expected_values = actual.values, expected.values
    if actual_values.shape != expected_values.shape:
        text = f"{name} has the shape {list(actual_values.shape)} instead of {list(expected_values.shape)}"
        return OutputDifference(math.inf, math.inf, text)
    if np.array_equal(actual_values, expected_values):
        return None
    allowed = tolerance.allowed(expected, magnitude)
    distance = _distance(actual_values, expected_values)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(distance == 0, 0.0, np.nan_to_num(distance / allowed, nan=math.inf, posinf=math.inf))
    largest = float(shares.max())
    worst = np.unravel_index(np.argmax(np.where(shares == largest, distance, -1.0)), distance.shape)
    if largest <= 1:  # an allowed difference is not described
        return OutputDifference(largest, float(distance[worst]), "")
    text = _describe_difference(
        name, actual_values[worst], expected_values[worst], float(distance[worst]), float(allowed[worst])
    )
    return OutputDifference(largest, float(distance[worst]), text, str([int(i) for i in worst]))


def _distance(actual: Array, expected: Array) -> FloatArray:
    """Return the distance of each pair of values; inf if it is not finite."""
    is_equal = actual == expected
    if actual.dtype.kind not in "iufb":
        return np.where(is_equal, 0.0, math.inf)
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    is_equal |= np.isnan(actual) & np.isnan(expected)
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.nan_to_num(np.abs(actual - expected), nan=math.inf, posinf=math.inf)
    # integers beyond 2**53 may differ although their floats do not
    return np.where(is_equal, 0.0, np.maximum(distance, np.finfo(np.float64).tiny))


def _describe_difference(name: str, actual: Any, expected: Any, distance: float, allowed: float) -> str:
    if math.isfinite(distance):
        limit = f"more than {allowed:.3g} allowed" if allowed else "but must be equal"
        return f"{name} by {distance:.3g} ({_value_text(actual)} instead of {_value_text(expected)}), {limit}"
    return f"{name} is {_value_text(actual)} instead of {_value_text(expected)}"


def _value_text(value: Any) -> str:
    if isinstance(value, np.floating):
        return f"{value:.6g}"
    text = str(value) if isinstance(value, np.generic) else repr(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


# -- the outputs of the baseline -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OutputDeviation:
    """The largest difference of a response, as a share of the allowed one.

    ``problem`` describes it if it is not allowed; otherwise it is empty.
    """

    share_of_tolerance: float
    problem: str = ""


@dataclass(frozen=True)
class ReferenceOutputs:
    """Serialized requests and the baseline's responses to them, in the same order.

    ``seconds_alone`` is the mean time of a request that is sent alone. ``first_seconds`` is the time until the first
    responses after the deployment. ``missing_reason`` says why there are no responses; it is empty if there are some.
    """

    requests: tuple[bytes, ...]
    responses: tuple[bytes, ...]
    seconds_alone: float
    first_seconds: float
    missing_reason: str = ""

    def expected_seconds(self, count: int) -> float:
        """Return the time of ``count`` requests after a deployment, if they are served one at a time."""
        return self.first_seconds + count * self.seconds_alone

    @cached_property
    def outputs(self) -> list[ModelOutputs]:
        """The decoded responses, with the precision of their values."""
        return with_precision([read_outputs(response) for response in self.responses])

    @cached_property
    def magnitudes(self) -> dict[str, float]:
        """The mean magnitude of each floating-point output."""
        return mean_magnitudes(self.outputs)

    def nan_share(self) -> tuple[str, float]:
        """Return the output with the largest share of NaN, and this share (0 to 1)."""
        shares = {
            name: float(np.isnan(values).mean())
            for name, values in _values_by_output(self.outputs, DEFAULT_RELATIVE).items()
            if values.size
        }
        return max(shares.items(), key=lambda item: item[1], default=("", 0.0))

    def compare(self, order: Sequence[int], responses: Sequence[bytes], tolerance: Tolerance) -> OutputDeviation:
        """Return how far ``responses`` are from those of the baseline.

        ``order`` holds the number of the request that each response belongs to. Raises DeploymentError if a response
        is invalid.
        """
        differences: list[tuple[OutputDifference, int]] = []
        for number, response in zip(order, responses, strict=True):
            try:
                expected, actual = self.outputs[number], read_outputs(response)
            except ValueError as error:
                raise DeploymentError(
                    f"an output does not match its own shape ({one_line(str(error), 100)}); a Python model may have "
                    "another numpy than the server's Python backend needs (see docs/targets.md)"
                ) from error
            difference = find_difference(expected, actual, tolerance, self.magnitudes)
            if difference is not None:
                differences.append((difference, number))
        if not differences:
            return OutputDeviation(0.0)
        worst, number = max(differences, key=lambda item: item[0])
        if worst.is_allowed:
            return OutputDeviation(worst.share_of_tolerance)
        place = f"{worst.place} of " if worst.place else ""
        count = sum(not difference.is_allowed for difference, _ in differences)
        text = f"{worst.text}, at {place}request {number}; {count} of {len(responses)} responses differ"
        return OutputDeviation(worst.share_of_tolerance, text)

    def write(self, file: Path) -> None:
        """Write ``file`` atomically. Raises EnvironmentFault."""
        arrays: dict[str, Any] = {f"request_{i}": _bytes(message) for i, message in enumerate(self.requests)}
        arrays |= {f"response_{i}": _bytes(message) for i, message in enumerate(self.responses)}
        content = io.BytesIO()
        arrays |= {"seconds_alone": self.seconds_alone, "first_seconds": self.first_seconds}
        np.savez(content, missing_reason=self.missing_reason, **arrays)
        write_atomically(file, content.getvalue())

    @classmethod
    def read(cls, file: Path) -> ReferenceOutputs:
        """Read what ``write`` wrote. Raises BadInputError for any other file."""
        from google.protobuf.message import DecodeError

        arrays = read_npz(file)
        try:
            numbers = range(sum(name.startswith("request_") for name in arrays))
            reference = cls(
                tuple(arrays[f"request_{i}"].tobytes() for i in numbers),
                tuple(arrays[f"response_{i}"].tobytes() for i in numbers),
                float(arrays["seconds_alone"]),
                float(arrays["first_seconds"]),
                str(arrays["missing_reason"]),
            )
            is_complete = bool(reference.outputs or reference.missing_reason)
            if not (is_complete and math.isfinite(reference.expected_seconds(1))):
                raise ValueError
        except (KeyError, ValueError, TypeError, DecodeError):
            raise BadInputError(
                f"{file}: not a file of reference outputs; delete it, and the run records them again"
            ) from None
        return reference


def _bytes(message: bytes) -> Array:
    return np.frombuffer(message, dtype=np.uint8)
