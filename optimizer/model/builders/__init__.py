"""Reference models that are built on this machine: ``build("dlrm", {...})``.

A builder is a ``Builder`` object, named in ``BUILDERS``. Importing this package loads neither a builder nor onnx.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from optimizer.core.errors import BadInputError

if TYPE_CHECKING:
    from optimizer.config.model_source import ModelSource
    from optimizer.model.builders.builder import Builder


BUILDERS: dict[str, str] = {
    "accumulator": "optimizer.model.builders.stateful:ACCUMULATOR_BUILDER",
    "bert": "optimizer.model.builders.encoders:BERT_BUILDER",
    "dlrm": "optimizer.model.builders.dense:DLRM_BUILDER",
    "gru": "optimizer.model.builders.stateful:GRU_BUILDER",
    "minilm": "optimizer.model.builders.encoders:MINILM_BUILDER",
    "minilm_model": "optimizer.model.builders.encoders:CLASSIFIER_BUILDER",
    "mlp": "optimizer.model.builders.dense:MLP_BUILDER",
    "resnext": "optimizer.model.builders.convolutional:RESNEXT_BUILDER",
    "text_recognition": "optimizer.model.builders.convolutional:TEXT_RECOGNITION_BUILDER",
    "tinygpt": "optimizer.model.builders.tinygpt:BUILDER",
}
"""Name of a builder, also the name that its model is served under -> ``module:attribute`` of its ``Builder``."""


def build(
    builder: str,
    settings: Mapping[str, object],
    *,
    cache: Path,
    max_batch_size: int,
    kind: Literal["KIND_CPU", "KIND_GPU"],
    on_progress: Callable[[str], None],
) -> ModelSource:
    """Return the model with these settings from ``cache``; build it there first if it is missing.

    ``max_batch_size`` and ``kind`` (of the instances) are written into config.pbtxt. ``on_progress`` receives
    lines while the model is built. Raises pydantic's ValidationError for settings that the builder does not take,
    BadInputError for a ``max_batch_size`` below 1, and EnvironmentFault if the cache cannot be written.
    """
    chosen = load_builder(builder)
    parsed = chosen.parse(settings)
    if max_batch_size < 1:
        raise BadInputError(f"max_batch_size of {builder}: must be 1 or more, not {max_batch_size}")
    from optimizer.model.builders.builder import ReferenceModel

    return ReferenceModel(chosen, parsed, max_batch_size, kind).find_or_build(cache, on_progress)


def load_builder(name: str) -> Builder:
    """Import the builder ``name``, which is in BUILDERS."""
    builder: Builder = pkgutil.resolve_name(BUILDERS[name])
    return builder
