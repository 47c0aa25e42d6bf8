"""Score a deployment's outputs against labelled samples, with a built-in metric or a user's function."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import numpy as np

from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import BadInputError, DeploymentError
from optimizer.core.safe_text import one_line, show_path
from optimizer.measure import server_calls
from optimizer.measure.output_comparison import read_outputs
from optimizer.model.input_data import Array, InputTensor
from optimizer.model.profile_schema import ScoreSection
from optimizer.model.profile_types import MetricFunction
from optimizer.model.recorded_samples import fit_samples, read_npz

ScoreFunction: TypeAlias = Callable[[dict[str, Array], Array], float]


def accuracy(outputs: Mapping[str, Array], labels: Array) -> float:
    """Return the share of samples that are classified as labelled, 0 to 1.

    With several columns the class is the column of the largest value. A single column of floats is the probability of
    class 1 if all values are between 0 and 1 (threshold 0.5), otherwise a logit (threshold 0). Integers are classes.
    """
    values, labels = _columns(outputs, labels)
    if values.shape[1] > 1:
        if labels.min() < 0 or labels.max() >= values.shape[1]:
            raise BadInputError(f"the labels must be columns of the output, from 0 to {values.shape[1] - 1}")
        return float(np.mean(values.argmax(axis=1) == labels))
    column = values[:, 0]
    if column.dtype.kind != "f":
        return float(np.mean(column == labels))
    threshold = 0.5 if np.all((column >= 0) & (column <= 1)) else 0.0
    return float(np.mean((column > threshold) == (labels > 0)))


def auc(outputs: Mapping[str, Array], labels: Array) -> float:
    """Return the area under the ROC curve: the probability that a sample labelled 1 ranks above one labelled 0.

    With two columns the second is that of label 1. For ranking models such as DLRM, since it needs no threshold.
    """
    from scipy.stats import rankdata

    values, labels = _columns(outputs, labels)
    if values.shape[1] > 2:
        raise BadInputError(f"needs an output with one or two columns, not {values.shape[1]}")
    ranks = rankdata(values[:, -1] - values[:, 0] if values.shape[1] == 2 else values[:, 0])
    positive = labels > 0
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives:
        raise BadInputError("needs samples of both labels")
    return float((ranks[positive].sum() - positives * (positives + 1) / 2) / (positives * negatives))


BUILT_IN_METRICS: dict[str, ScoreFunction] = {"accuracy": accuracy, "auc": auc}


def _columns(outputs: Mapping[str, Array], labels: Array) -> tuple[Array, Array]:
    """Return the only output as [samples, columns] and the labels as [samples]. Raises BadInputError."""
    if len(outputs) != 1:
        raise BadInputError(f"needs a single output, but the model has {', '.join(outputs)}; give a function instead")
    (values,) = outputs.values()
    if values.dtype.kind not in "fiub" or labels.dtype.kind not in "fiub":
        raise BadInputError("needs numeric outputs and labels; give a function instead")
    if labels.size != len(labels) or len(values) != len(labels):
        raise BadInputError(f"needs one label per sample, but the labels have the shape {list(labels.shape)}")
    return values.reshape(len(values), -1), labels.reshape(-1)


LABELS = "labels"
MAX_REQUEST_SAMPLES = 64
IN_FLIGHT = 16
TIMEOUT_SECONDS = 60.0  # limit for a request that is sent alone; others get more if that one is slow
_MAX_MESSAGE_LENGTH = 200


@dataclass(frozen=True)
class Scorer:
    """Sends labelled samples to a deployment and scores its outputs with ``metric``, which is called ``name``.

    ``inputs`` (by tensor name) and ``labels`` have the samples in the first dimension; they come from ``file``.
    """

    file: Path
    inputs: Mapping[str, Array]
    labels: Array
    name: str
    metric: ScoreFunction

    def measure(self, endpoint: Endpoint) -> float:
        """Return the score of the outputs for all samples.

        Raises:
            DeploymentError: The server failed a request, or the score is not a finite number.
            BadInputError: The samples do not fit the model, or the metric failed.
        """
        from optimizer.model.inference_requests import input_tensors

        largest = endpoint.largest_request
        inputs = self._inputs_for(input_tensors(server_calls.model_metadata(endpoint), largest, ()))
        alone = islice(self._messages(endpoint, inputs), 1)
        started = time.monotonic()
        first = server_calls.infer(endpoint, alone, in_flight=1, timeout_seconds=TIMEOUT_SECONDS)
        timeout_seconds = max(TIMEOUT_SECONDS, 4 * IN_FLIGHT * (time.monotonic() - started))

        def send(in_flight: int) -> list[bytes]:
            remaining = islice(self._messages(endpoint, inputs), 1, None)
            return server_calls.infer(endpoint, remaining, in_flight=in_flight, timeout_seconds=timeout_seconds)

        responses = first + server_calls.send_as_queue_permits(send, IN_FLIGHT)
        parts = [{name: tensor.values for name, tensor in read_outputs(response).items()} for response in responses]
        join = np.concatenate if largest else np.stack
        return self._score({name: join([part[name] for part in parts]) for name in parts[0]})

    def _messages(self, endpoint: Endpoint, inputs: Mapping[str, Array]) -> Iterator[bytes]:
        """Yield serialized requests with all samples; each has a single one if the model has no batch dimension."""
        from optimizer.model.inference_requests import to_message

        largest = endpoint.largest_request  # 0 without a batch dimension
        size = min(max(largest, 1), MAX_REQUEST_SAMPLES)
        for i in range(0, len(self.labels), size):
            samples = {name: array[i : i + size] if largest else array[i] for name, array in inputs.items()}
            yield to_message(endpoint.model, samples)

    def _score(self, outputs: dict[str, Array]) -> float:
        """Return the metric of the outputs.

        Raises BadInputError if the metric fails, DeploymentError if the score is not finite.
        """
        try:
            with contextlib.redirect_stdout(sys.stderr):  # standard output may hold a JSON document
                score = float(self.metric(outputs, self.labels))
        except (Exception, SystemExit) as error:
            raise _metric_error(self.name, error) from error
        if not math.isfinite(score):
            raise DeploymentError(f"the score of its outputs is {score} ({self.name})")
        return score

    def _inputs_for(self, tensors: Sequence[InputTensor]) -> dict[str, Array]:
        """Return the samples in the model's data types. Raises BadInputError if they do not fit the model."""
        names = [tensor.name for tensor in tensors]
        if set(names) != self.inputs.keys():
            raise BadInputError(
                f"{self.file}: has the inputs {', '.join(sorted(self.inputs))}, but the model's inputs are "
                f"{', '.join(names)}"
            )
        return {
            tensor.name: fit_samples(show_path(self.file), self.inputs[tensor.name], tensor) for tensor in tensors
        }


def read_scorer(section: ScoreSection) -> Scorer:
    """Read the labelled samples and the metric that a profile names. Raises BadInputError."""
    arrays = read_npz(section.data)
    labels = arrays.pop(LABELS, None)
    if labels is None or not arrays:
        raise BadInputError(f"{section.data}: needs an array for each of the model's inputs and an array {LABELS!r}")
    counts = {name: len(array) if array.ndim else 0 for name, array in [*arrays.items(), (LABELS, labels)]}
    if len(set(counts.values())) != 1 or not counts[LABELS]:
        lengths = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise BadInputError(f"{section.data}: every array needs one entry per sample, but the lengths are {lengths}")
    if isinstance(section.metric, MetricFunction):
        name = f"{section.metric.file.name}:{section.metric.function}"
        return Scorer(section.data, arrays, labels, name, _load_metric(section.metric, name))
    return Scorer(section.data, arrays, labels, section.metric, BUILT_IN_METRICS[section.metric])


def _load_metric(metric: MetricFunction, name: str) -> ScoreFunction:
    """Return the user's function, called ``name`` in errors. Raises BadInputError if its module cannot be loaded."""
    spec = importlib.util.spec_from_file_location(f"tritune_metric_{metric.file.stem}", metric.file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses in the module need it
    try:
        with contextlib.redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
        function: ScoreFunction = getattr(module, metric.function)
    except (Exception, SystemExit) as error:
        raise _metric_error(name, error) from error
    return function


def _metric_error(name: str, error: BaseException) -> BadInputError:
    kind = "" if isinstance(error, BadInputError) else f"{type(error).__name__}: "
    return BadInputError(f"metric {name}: {kind}{one_line(str(error), _MAX_MESSAGE_LENGTH)}")
