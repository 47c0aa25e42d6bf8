"""Metrics that need no Python file: of a classifier's one output, against the labels of its samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from optimizer.answers.npz import Array
from optimizer.errors import BadInputError

Metric: TypeAlias = Callable[[dict[str, Array], Array], float]


def accuracy(outputs: Mapping[str, Array], labels: Array) -> float:
    """The share of samples that are classified as labelled, 0 to 1.

    With several columns the class is that of the largest. One column of floats is a probability where all are from
    0 to 1 (of the class 1, which it is from above 0.5), else a logit (above 0). Whole numbers are the class itself.
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
    """The area under the ROC curve, 0 to 1: how likely a sample labelled 1 ranks above one labelled 0.

    Of two columns the second is that of the label 1. Needs no threshold: for models that rank, such as DLRM.
    """
    from scipy.stats import rankdata

    values, labels = _columns(outputs, labels)
    if values.shape[1] > 2:
        raise BadInputError(f"is for one column or two, and the output has {values.shape[1]}")
    ranks = rankdata(values[:, -1] - values[:, 0] if values.shape[1] == 2 else values[:, 0])
    good = labels > 0
    hits, misses = int(good.sum()), int((~good).sum())
    if not hits or not misses:
        raise BadInputError("needs samples of both labels")
    return float((ranks[good].sum() - hits * (hits + 1) / 2) / (hits * misses))


BUILT_IN: dict[str, Metric] = {"accuracy": accuracy, "auc": auc}


def _columns(outputs: Mapping[str, Array], labels: Array) -> tuple[Array, Array]:
    """The one output as [samples, columns], the labels as [samples]."""
    if len(outputs) != 1:
        raise BadInputError(f"is for one output, and the model has {', '.join(outputs)}; give a function instead")
    (values,) = outputs.values()
    if values.dtype.kind not in "fiub" or labels.dtype.kind not in "fiub":
        raise BadInputError("is for numbers; give a function instead")
    if labels.size != len(labels) or len(values) != len(labels):
        raise BadInputError(f"needs one label a sample, and labels have the shape {list(labels.shape)}")
    return values.reshape(len(values), -1), labels.reshape(-1)
