"""Formats ``pbtxt``, a config.pbtxt per model, and ``per-device``, several runs in one model repository.

With ``--model-config-name=h100`` Triton reads ``<model>/configs/h100.pbtxt`` if it exists, otherwise
``<model>/config.pbtxt``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace

from optimizer.config import model_config
from optimizer.config.model_config_proto import ModelConfig
from optimizer.core.errors import BadInputError
from optimizer.core.request_sizes import parse_input_shape
from optimizer.core.safe_text import one_line
from optimizer.emit.production import commented, header
from optimizer.emit.recommended import Recommendation

LONGEST_DEVICE = 60
_MADE_BY_TUNE = "tritune: "


def emit_pbtxt(recommended: Recommendation) -> dict[str, str]:
    """Return ``config.pbtxt``, or ``<model>/config.pbtxt`` of each model if there are several, by path.

    A model.json that the run changed is added, in its version folder.
    """
    used_by = [_used_by(recommended)] if recommended.arguments else []
    if len(recommended.configs) == 1:
        files = {path.partition("/")[2]: text for path, text in recommended.files.items()}
        return {"config.pbtxt": text_of(recommended, recommended.model, *used_by), **files}
    return repository_files(recommended, *used_by)


def repository_files(recommended: Recommendation, *more: str) -> dict[str, str]:
    """Return the config.pbtxt of each model and each changed model.json, by path below the model repository."""
    configs = {f"{model}/config.pbtxt": text_of(recommended, model, *more) for model in recommended.configs}
    return {**configs, **recommended.files}


def emit_per_device(recommended_runs: Sequence[Recommendation], devices: Sequence[str] = ()) -> dict[str, str]:
    """Return ``<model>/configs/<device>.pbtxt`` of each run, by path.

    ``devices`` are the names of the runs' devices; if empty, names are made from the hardware. Raises BadInputError
    if two runs have the same model and device, or a run changes a model.json.
    """
    files: dict[str, str] = {}
    runs: dict[str, str] = {}
    for recommended, device in zip(recommended_runs, devices or map(device_name, recommended_runs), strict=True):
        if recommended.files:
            raise BadInputError(
                f"{recommended.run}: it changes {', '.join(recommended.files)}, which tritonserver does not choose "
                "by device; use --format pbtxt"
            )
        for model in recommended.configs:
            path = f"{model}/configs/{device}.pbtxt"
            if path in files:
                raise BadInputError(
                    f"{runs[path]} and {recommended.run}: both would write {path}; give one run per device, or "
                    "--device NAME once per run"
                )
            files[path] = text_of(recommended, model, _used_by(recommended, f"--model-config-name={device}"))
            runs[path] = recommended.run
    return files


def text_of(recommended: Recommendation, model: str, *more: str) -> str:
    """Return the config.pbtxt of ``model`` below its header, which is a comment in protobuf's text format."""
    return commented(header(recommended, *more)) + "\n" + model_config.to_text(recommended.configs[model])


def _used_by(recommended: Recommendation, *options: str) -> str:
    """Return a header line with the command line of the server that the file is for."""
    return f"used by: {shlex.join(['tritonserver', *options, *recommended.arguments])}"


def device_name(recommended: Recommendation) -> str:
    """Return a configuration name for the device: ``NVIDIA H100 80GB HBM3`` gives ``nvidia-h100-80gb-hbm3``.

    Raises BadInputError if the run was measured on another machine, whose device is unknown.
    """
    if recommended.device is None:
        raise BadInputError(
            f"{recommended.run}: its server ran on another machine, whose device is unknown; name it with --device"
        )
    kept = re.sub(r"\((?:r|tm)\)|@.*", "", recommended.device.lower())
    return re.sub(r"[^a-z0-9]+", "-", kept).strip("-")[:LONGEST_DEVICE].strip("-") or "device"


def with_warm_up(recommended: Recommendation) -> Recommendation:
    """Add warm-up requests: each model except ensembles runs the batches of its batcher before it is ready.

    The shapes of the run are those of the model that clients send requests to, and its warm-up requests are kept.
    Raises BadInputError for an input whose size is not known, and for models that do not load with such requests.
    """
    try:
        shapes = [parse_input_shape(text) for text in recommended.shapes]
    except ValueError as error:
        raise BadInputError(f"{recommended.run}: its shapes cannot be read: {error}") from None
    dims = {name.strip(): shape.largest for shape in shapes for name in shape.names.split(",")}
    configs = {
        name: _warmed_up(config, dims if name == recommended.model else {})
        for name, config in recommended.configs.items()
    }
    return replace(recommended, configs=configs, warms_up=True)


def _warmed_up(config: ModelConfig, dims: dict[str, tuple[int, ...]]) -> ModelConfig:
    by_tune = any(request.name.startswith(_MADE_BY_TUNE) for request in config.model_warmup)
    if by_tune or config.HasField("ensemble_scheduling"):
        return config
    reason = ""
    if config.HasField("sequence_batching"):
        reason = "keeps the state of sequences, and warm-up requests belong to no sequence"
    elif config.model_transaction_policy.decoupled:
        reason = "streams its responses, and warm-up requests of zeros ask for no tokens"
    if reason:
        raise BadInputError(f"--model-warmup: {one_line(config.name)} {reason}; leave the option out")
    for tensor in config.input:
        if -1 in tensor.dims and tensor.name not in dims:
            raise BadInputError(
                f"--model-warmup: the run does not record the size of input {tensor.name} of {config.name}; "
                "tune with --model-warmup, which uses the requests of the run"
            )
    return model_config.with_warmup(config, dims)
