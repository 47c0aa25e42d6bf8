"""What is served: a model inside a Triton repository, whoever made it, with the models that it is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig


@dataclass(frozen=True)
class ModelSource:
    """A model folder ``repository/name`` holding ``config.pbtxt`` and numbered versions.

    ``config`` is config.pbtxt as given. ``input_data`` is a perf_analyzer JSON data file, None for random data.
    ``facts`` is what every result states about the model (precision, rows, bytes, content hash, …).

    ``composing`` are the models that it calls, as given: the steps of an ensemble, or what a model in Python asks
    (BLS). A candidate's own settings are those of ``batcher``, one of them; of itself where that is empty.
    ``concurrent`` are those among them that get load of their own at the same time, on the same device.
    ``variants`` are models with the same inputs and outputs, one of which is served in its place; itself among them.
    Models whose folder is not ``repository/<name>`` are in ``elsewhere``. With ``warm_up`` the server tries the batch
    sizes before it takes requests; in it are the dims of inputs whose own are open.
    """

    repository: Path
    name: str
    config: ModelConfig
    input_data: Path | None = None
    facts: dict[str, str | int | float] = field(default_factory=dict)
    composing: Mapping[str, ModelConfig] = field(default_factory=dict)
    batcher: str = ""
    concurrent: tuple[str, ...] = ()
    variants: Mapping[str, ModelConfig] = field(default_factory=dict)
    elsewhere: Mapping[str, Path] = field(default_factory=dict)
    warm_up: Mapping[str, tuple[int, ...]] | None = None

    @property
    def tuned(self) -> str:
        """The model that a candidate's own settings are about."""
        return self.batcher or self.name

    @property
    def batched(self) -> ModelConfig:
        """As given: that model's configuration."""
        return self.composing[self.batcher] if self.batcher else self.config

    @property
    def models(self) -> dict[str, ModelConfig]:
        """Every model that may be served, as given."""
        return {**self.composing, **self.variants, self.name: self.config}

    def folder(self, model: str) -> Path:
        """Where its versions are."""
        return self.elsewhere.get(model, self.repository / model)
