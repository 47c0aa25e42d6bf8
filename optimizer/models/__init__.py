"""Reference models that are built on this machine: ``build("dlrm", {...})``.

A builder is one module with a ``Settings`` class and a function that writes files, named in ``BUILDERS``.
Importing this package imports none of them: onnx is loaded when a model is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from optimizer.errors import BadInputError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from optimizer.model_source import ModelSource
    from optimizer.models.builder import Builder, Interface, Settings

BUILDERS: dict[str, str] = {
    "bert": "optimizer.models.bert",
    "dlrm": "optimizer.models.dlrm",
    "minilm": "optimizer.models.minilm",
    "minilm_model": "optimizer.models.minilm_model",
    "mlp": "optimizer.models.mlp",
    "resnext": "optimizer.models.resnext",
    "text_recognition": "optimizer.models.text_recognition",
}
"""Name of a builder, also the name that the model is served under -> the module with its ``BUILDER``."""


def build(
    builder: str,
    settings: Mapping[str, object],
    *,
    cache: Path,
    max_batch_size: int,
    kind: Literal["KIND_CPU", "KIND_GPU"],
    say: Callable[[str], None],
) -> ModelSource:
    """The model of that name with these settings, from ``cache`` or built into it.

    ``max_batch_size`` and ``kind`` go into config.pbtxt. ``say`` gets progress, a line at a time, and nothing
    where the model is in the cache. Raises BadInputError for an unknown builder or setting, EnvironmentFault
    where the cache cannot be written.
    """
    found = _load(builder)
    parsed = _parse(found, settings)
    if max_batch_size < 1:
        raise BadInputError(f"max_batch_size of {builder}: must be 1 or more, not {max_batch_size}")
    from optimizer.models.cache import obtain

    return obtain(found, parsed, cache=cache, max_batch_size=max_batch_size, kind=kind, say=say)


def check_settings(builder: str, settings: Mapping[str, object]) -> None:
    """Raise BadInputError where ``build`` would, without building."""
    _parse(_load(builder), settings)


def describe(builder: str, settings: Mapping[str, object]) -> tuple[Interface, str]:
    """What the model takes and gives, and the document that it is from. Builds nothing; raises as ``build``."""
    found = _load(builder)
    return found.interface(_parse(found, settings)), found.source


def _load(name: str) -> Builder:
    if name not in BUILDERS:
        raise BadInputError(f"no builder named {name!r}; there are: {', '.join(sorted(BUILDERS))}")
    builder: Builder = importlib.import_module(BUILDERS[name]).BUILDER
    return builder


def _parse(builder: Builder, settings: Mapping[str, object]) -> Settings:
    from pydantic import ValidationError

    try:
        return builder.parse(settings)
    except ValidationError as error:
        problems = "; ".join(_problem(builder, details) for details in error.errors())
        raise BadInputError(f"settings of {builder.name}: {problems}") from None


def _problem(builder: Builder, details: ErrorDetails) -> str:
    key = ".".join(map(str, details["loc"]))
    if details["type"] == "extra_forbidden":
        return f"unknown key {key}; there are: {', '.join(builder.settings.model_fields)}"
    message = details["msg"]
    return f"{key}: {message[:1].lower()}{message[1:]}, not {details['input']!r}"
