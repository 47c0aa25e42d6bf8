"""What a builder of a reference model is: a settings class and a function that writes files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict

Say: TypeAlias = Callable[[str], None]
Facts: TypeAlias = dict[str, str | int | float]


class Settings(BaseModel):
    """Base of every builder's settings: immutable, strictly typed, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or output as Triton sees it: ``dtype`` is Triton's (``FP32``), ``dims`` without the batch."""

    name: str
    dtype: str
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """The folder of a model under construction, a Triton repository whose version folder exists already."""

    repository: Path
    name: str

    @property
    def version(self) -> Path:
        """Where ``model.onnx`` and the files beside it belong."""
        return self.repository / self.name / "1"

    @property
    def input_data(self) -> Path:
        """Where request data in perf_analyzer's JSON belongs; a builder that writes none gets random data."""
        return self.repository / "input_data.json"


@dataclass(frozen=True, slots=True)
class Written:
    """What a builder wrote: the model's interface, and the facts that every result states about it."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    facts: Facts = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Builder:
    """One kind of model. ``version`` goes up whenever the same settings give other files than before.

    ``write`` puts ``model.onnx`` (and, where it has any, request data) into a draft; the rest (caching,
    content hash, config.pbtxt) is not its business. It reports progress in lines without a line break.
    """

    name: str
    version: int
    settings: type[Settings]
    write: Callable[[Any, Draft, Say], Written]

    def parse(self, values: Mapping[str, object]) -> Settings:
        """Validated settings. Raises pydantic's ValidationError."""
        return self.settings.model_validate(dict(values))
