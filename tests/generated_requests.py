"""Files of generated requests for load generators and output checks in tests, as ``tune`` writes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from optimizer.config.model_config_proto import DataType, ModelConfig
from optimizer.model.requests import RequestBatching, RequestOptions, prepare_requests


def write_requests(config: ModelConfig, folder: Path, *shapes: str, data: str = "random", seed: int = 0) -> Path:
    """Return the file of requests that ``--input-data DATA`` gives the model, written below ``folder``.

    ``shapes`` are values of ``--shape``.
    """
    return prepare_requests(RequestOptions(data, shapes), config, RequestBatching(seed=seed), folder).input_data


def model_with(inputs: Iterable[tuple[str, str, Sequence[int]]], max_batch_size: int) -> ModelConfig:
    """Return a model with inputs of (name, data type, shape), as a server reports them with the batch dimension."""
    config = ModelConfig(name="m", max_batch_size=max_batch_size)
    for name, datatype, shape in inputs:
        data_type = DataType.Value(f"TYPE_{'STRING' if datatype == 'BYTES' else datatype}")
        config.input.add(name=name, data_type=data_type, dims=shape[1:] if max_batch_size else shape)
    return config
