"""What a builder of a reference model is: a settings class and a function that writes files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelConfig

Say: TypeAlias = Callable[[str], None]
Facts: TypeAlias = dict[str, str | int | float]
Kind: TypeAlias = Literal["KIND_CPU", "KIND_GPU"]


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
class Interface:
    """What a model takes and gives."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


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

    def beside(self, name: str) -> Draft:
        """Another model of the same repository, for an ensemble to be made of."""
        draft = Draft(self.repository, name)
        draft.version.mkdir(parents=True)
        return draft


@dataclass(frozen=True, slots=True)
class Builder:
    """One kind of model. ``version`` goes up whenever the same settings give other files than before.

    ``source`` is the document that serves it. ``interface`` follows from the settings alone. ``write`` puts
    ``model.onnx`` (and, where it has any, request data) into a draft and returns the facts that every result states;
    the rest (caching, content hash, config.pbtxt) is not its business. It reports progress in lines without a line
    break. ``configs`` is for a repository of several models, an ensemble and its parts: the configuration of each,
    for a max_batch_size and the kind of instances. None is one ONNX model.
    """

    name: str
    version: int
    source: str
    settings: type[Settings]
    interface: Callable[[Any], Interface]
    write: Callable[[Any, Draft, Say], Facts]
    configs: Callable[[int, Kind], Sequence[ModelConfig]] | None = None

    def parse(self, values: Mapping[str, object]) -> Settings:
        """Validated settings. Raises pydantic's ValidationError."""
        return self.settings.model_validate(dict(values))
