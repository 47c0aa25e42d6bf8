"""How good a deployment's answers to labelled samples are, by the user's own metric."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from optimizer.answers import inference
from optimizer.answers.comparison import read_answer
from optimizer.answers.npz import Array, read_npz
from optimizer.answers.score_metrics import BUILT_IN, Metric
from optimizer.errors import BadInputError, DeploymentError
from optimizer.interfaces import Endpoint
from optimizer.profile.schema import ScoreSection
from optimizer.profile.values import MetricFunction
from optimizer.untrusted import one_line

if TYPE_CHECKING:
    from tritonclient.grpc.service_pb2 import ModelMetadataResponse

LABELS = "labels"
LARGEST_REQUEST = 64  # samples
IN_FLIGHT = 16
TIMEOUT_SECONDS = 60.0
_LONGEST_MESSAGE = 200


@dataclass(frozen=True)
class Scorer:
    """``inputs`` by tensor name and ``labels``, both with the samples in the first dimension; ``metric`` judges.

    ``file`` is where the samples came from and ``name`` what the metric is called.
    """

    file: Path
    inputs: Mapping[str, Array]
    labels: Array
    name: str
    metric: Metric

    def measure(self, endpoint: Endpoint) -> float:
        """The score of the answers to all samples.

        Raises DeploymentError where the server fails a request or the score is no number, BadInputError where the
        samples do not fit the model or the metric fails.
        """
        from optimizer.requests.tensors import to_message

        largest = endpoint.largest_request  # 0: no batch dimension, so that a sample is a request
        inputs = self._in_the_models_types(inference.model_metadata(endpoint), batched=largest > 0)
        size = min(max(largest, 1), LARGEST_REQUEST)
        messages = (
            to_message(
                endpoint.model, {name: array[i : i + size] if largest else array[i] for name, array in inputs.items()}
            )
            for i in range(0, len(self.labels), size)
        )
        answers = inference.infer(endpoint, messages, in_flight=IN_FLIGHT, timeout_seconds=TIMEOUT_SECONDS)
        told = [{name: tensor.values for name, tensor in read_answer(answer).items()} for answer in answers]
        join = np.concatenate if largest else np.stack
        return self._judged({name: join([answer[name] for answer in told]) for name in told[0]})

    def _judged(self, outputs: dict[str, Array]) -> float:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # standard output may be a document
                score = float(self.metric(outputs, self.labels))
        except (Exception, SystemExit) as error:
            raise _fault(self.name, error) from error
        if not math.isfinite(score):
            raise DeploymentError(f"the score of its answers is {score} ({self.name})")
        return score

    def _in_the_models_types(self, metadata: ModelMetadataResponse, *, batched: bool) -> dict[str, Array]:
        wanted = {tensor.name: tensor for tensor in metadata.inputs}
        if wanted.keys() != self.inputs.keys():
            has, takes = ", ".join(sorted(self.inputs)), ", ".join(wanted)
            raise BadInputError(f"{self.file}: has {has} beside {LABELS}, and the model's inputs are {takes}")
        cast = {}
        for name, tensor in wanted.items():
            array, dims = self.inputs[name], tensor.shape[1 if batched else 0 :]
            if len(dims) != array.ndim - 1 or any(
                d not in (-1, n) for d, n in zip(dims, array.shape[1:], strict=True)
            ):
                raise BadInputError(
                    f"{self.file}: a sample of {name} has the shape {list(array.shape[1:])}, "
                    f"and the model takes {list(dims)}"
                )
            cast[name] = self._cast(name, array, tensor.datatype)
        return cast

    def _cast(self, name: str, array: Array, datatype: str) -> Array:
        """In Triton's type where no value is lost by it; floats may be rounded."""
        from tritonclient.utils import triton_to_np_dtype

        wanted = np.dtype(triton_to_np_dtype(datatype))
        kind = array.dtype.kind
        if wanted.kind == "O" and kind in "US":
            return np.asarray((np.char.encode(array, "utf-8") if kind == "U" else array).astype(object))
        if wanted.kind in "fiub" and kind in "fiub":
            with np.errstate(all="ignore"):
                cast = array.astype(wanted)
            if (wanted.kind == "f" and kind != "b") or np.array_equal(cast, array):
                return cast
        raise BadInputError(f"{self.file}: {name} holds {array.dtype}, and the model takes {datatype}")


def read_scorer(section: ScoreSection) -> Scorer:
    """The labelled samples and the metric that a profile names. Raises BadInputError."""
    arrays = read_npz(section.data)
    labels = arrays.pop(LABELS, None)
    if labels is None or not arrays:
        raise BadInputError(f"{section.data}: needs the model's inputs by name and an array {LABELS!r}")
    counts = {name: len(array) if array.ndim else 0 for name, array in [*arrays.items(), (LABELS, labels)]}
    if len(set(counts.values())) != 1 or not counts[LABELS]:
        told = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise BadInputError(f"{section.data}: every array needs one entry a sample in its first dimension ({told})")
    if isinstance(section.metric, MetricFunction):
        name = f"{section.metric.file.name}:{section.metric.function}"
        return Scorer(section.data, arrays, labels, name, _loaded(section.metric, name))
    return Scorer(section.data, arrays, labels, section.metric, BUILT_IN[section.metric])


def _loaded(metric: MetricFunction, name: str) -> Metric:
    spec = importlib.util.spec_from_file_location(f"tritune_metric_{metric.file.stem}", metric.file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as dataclasses in it expect
    try:
        with contextlib.redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
        function: Metric = getattr(module, metric.function)
    except (Exception, SystemExit) as error:
        raise _fault(name, error) from error
    return function


def _fault(name: str, error: BaseException) -> BadInputError:
    kind = "" if isinstance(error, BadInputError) else f"{type(error).__name__}: "
    return BadInputError(f"metric {name}: {kind}{one_line(str(error), _LONGEST_MESSAGE)}")
