"""What is served: a model inside a Triton repository, whoever made it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig


@dataclass(frozen=True)
class ModelSource:
    """A model folder ``repository/name`` holding ``config.pbtxt`` and numbered versions.

    ``config`` is config.pbtxt as given. ``input_data`` is a perf_analyzer JSON data file, None for random data.
    ``facts`` is what every result states about the model (precision, rows, bytes, content hash, …).
    """

    repository: Path
    name: str
    config: ModelConfig
    input_data: Path | None = None
    facts: dict[str, str | int | float] = field(default_factory=dict)
