"""Two answers to one request: whether they agree, and where they differ most."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Floats: TypeAlias = npt.NDArray[np.float64]

# How far rounding leads where batches of other sizes are summed in another order; all other types are exact.
DEFAULT_RELATIVE = {"FP64": 1e-3, "FP32": 1e-3, "FP16": 1e-2, "BF16": 5e-2}


@dataclass(frozen=True, slots=True)
class Tensor:
    """An output as the server sent it; ``datatype`` is Triton's name of its type."""

    datatype: str
    values: Array


Answer: TypeAlias = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """A float may lie ``absolute + relative x |the expected value|`` from what is expected.

    Where ``relative`` is None it is that of the output's type in DEFAULT_RELATIVE; where ``absolute`` is None it is
    that share of the output's mean magnitude, since values near zero are sums of others that are not.
    """

    relative: float | None = None
    absolute: float | None = None

    def allowed(self, expected: Tensor, magnitude: float) -> Floats:
        """In the shape of ``expected``; 0 for integers, booleans and strings."""
        default = DEFAULT_RELATIVE.get(expected.datatype)
        if default is None:
            return np.zeros(expected.values.shape)
        relative = default if self.relative is None else self.relative
        absolute = relative * magnitude if self.absolute is None else self.absolute
        with np.errstate(invalid="ignore"):  # none of an infinite value: it is another value that differs from it
            return np.asarray(absolute + relative * np.abs(expected.values.astype(np.float64)))


@dataclass(frozen=True, slots=True, order=True)
class Difference:
    """Ordered by ``excess``, the distance in units of what is allowed, then by ``distance``; both may be inf."""

    excess: float
    distance: float
    text: str = field(compare=False)
    place: str = field(compare=False, default="")  # the index in the output


def read_answer(serialized: bytes) -> Answer:
    """Of a ModelInferResponse. Raises DecodeError (protobuf) or ValueError where it is none."""
    from tritonclient.grpc.service_pb2 import ModelInferResponse

    from optimizer.requests.tensors import outputs

    response = ModelInferResponse.FromString(serialized)
    arrays = outputs(response)
    return {output.name: Tensor(output.datatype, arrays[output.name]) for output in response.outputs}


def magnitudes(answers: Sequence[Answer]) -> dict[str, float]:
    """The mean of the finite absolute values of each output of floats, over all ``answers``."""
    found: dict[str, list[Floats]] = {}
    for answer in answers:
        for name, tensor in answer.items():
            if tensor.datatype in DEFAULT_RELATIVE:
                found.setdefault(name, []).append(np.abs(tensor.values.astype(np.float64)).ravel())
    means = {}
    for name, values in found.items():
        joined = np.concatenate(values)
        finite = joined[np.isfinite(joined)]
        means[name] = float(finite.mean()) if finite.size else 0.0
    return means


def difference(
    expected: Answer, got: Answer, tolerance: Tolerance, typical: Mapping[str, float]
) -> Difference | None:
    """The largest difference that is more than allowed, None without one; ``typical`` are the ``magnitudes``.

    What is not finite equals only its like. An output that is missing, or of another type or shape, differs.
    """
    found = [
        one
        for name, tensor in expected.items()
        if (one := _difference(name, tensor, got.get(name), tolerance, typical.get(name, 0.0)))
    ]
    return max(found, default=None)


def _difference(
    name: str, expected: Tensor, got: Tensor | None, tolerance: Tolerance, magnitude: float
) -> Difference | None:
    if got is None:
        return Difference(math.inf, math.inf, f"{name} is missing")
    if got.datatype != expected.datatype:
        return Difference(math.inf, math.inf, f"{name} is {got.datatype} instead of {expected.datatype}")
    ours, theirs = got.values, expected.values
    if ours.shape != theirs.shape:
        text = f"{name} has the shape {list(ours.shape)} instead of {list(theirs.shape)}"
        return Difference(math.inf, math.inf, text)
    if np.array_equal(ours, theirs):
        return None
    allowed = tolerance.allowed(expected, magnitude)
    distance = _distance(ours, theirs)
    with np.errstate(divide="ignore", invalid="ignore"):
        excess = np.where(distance == 0, 0.0, np.nan_to_num(distance / allowed, nan=math.inf, posinf=math.inf))
    if not np.any(excess > 1):
        return None
    worst = np.unravel_index(np.lexsort((distance.ravel(), excess.ravel()))[-1], distance.shape)
    text = _text(name, ours[worst], theirs[worst], float(distance[worst]), float(allowed[worst]))
    return Difference(float(excess[worst]), float(distance[worst]), text, str([int(i) for i in worst]))


def _distance(ours: Array, theirs: Array) -> Floats:
    """Of each value from the other; inf where it is no number that can be told."""
    same = ours == theirs
    if ours.dtype.kind not in "iufb":
        return np.where(same, 0.0, math.inf)
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    same |= np.isnan(ours) & np.isnan(theirs)
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.nan_to_num(np.abs(ours - theirs), nan=math.inf, posinf=math.inf)
    # integers beyond 2**53 may differ where their floats do not
    return np.where(same, 0.0, np.maximum(apart, np.finfo(np.float64).tiny))


def _text(name: str, ours: Any, theirs: Any, distance: float, allowed: float) -> str:
    if math.isfinite(distance):
        more = f"more than {allowed:.3g} allowed" if allowed else "where none is allowed"
        return f"{name} by {distance:.3g} ({_shown(ours)} instead of {_shown(theirs)}), {more}"
    return f"{name} is {_shown(ours)} instead of {_shown(theirs)}"


def _shown(value: Any) -> str:
    if isinstance(value, np.floating):
        return f"{value:.6g}"
    text = str(value) if isinstance(value, np.generic) else repr(value)
    return text if len(text) <= 40 else f"{text[:39]}…"
