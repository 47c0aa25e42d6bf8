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
from optimizer.core.request_sizes import InputShape, parse_input_shape
from optimizer.core.safe_text import one_line, quote, show_path
from optimizer.emit.production import commented, header
from optimizer.emit.recommended import Recommendation
from optimizer.results.finished_run import FinishedRun

MAX_DEVICE_CHARACTERS = 60
_MADE_BY_TUNE = "tritune: "  # beginning of the names of warm-up requests that `tune` adds


def emit_pbtxt(recommendation: Recommendation) -> dict[str, str]:
    """Return ``config.pbtxt``, or ``<model>/config.pbtxt`` of each model if there are several, by path.

    A model.json that the run changed is added, in its version folder.
    """
    used_by = [_used_by(recommendation)] if recommendation.arguments else []
    if len(recommendation.configs) == 1:
        files = {path.partition("/")[2]: text for path, text in recommendation.files.items()}
        return {"config.pbtxt": text_of(recommendation, recommendation.model, *used_by), **files}
    return repository_files(recommendation, *used_by)


def repository_files(recommendation: Recommendation, *more: str) -> dict[str, str]:
    """Return the config.pbtxt of each model and each changed model.json, by path below the model repository."""
    configs = {f"{model}/config.pbtxt": text_of(recommendation, model, *more) for model in recommendation.configs}
    return {**configs, **recommendation.files}


def emit_per_device(recommendations: Sequence[Recommendation], devices: Sequence[str] = ()) -> dict[str, str]:
    """Return ``<model>/configs/<device>.pbtxt`` of each run, by path.

    ``devices`` are the names of the runs' devices; if empty, names are made from the hardware. Raises BadInputError
    if two runs have the same model and device, or a run changes a model.json.
    """
    files: dict[str, str] = {}
    runs: dict[str, str] = {}
    for recommendation, device in zip(recommendations, devices or map(device_name, recommendations), strict=True):
        name = recommendation.run.name
        if recommendation.files:
            raise BadInputError(
                f"{name}: it changes {', '.join(recommendation.files)}, which tritonserver does not choose by "
                "device; use --format pbtxt"
            )
        for model in recommendation.configs:
            path = f"{model}/configs/{device}.pbtxt"
            if path in files:
                raise BadInputError(
                    f"{runs[path]} and {name}: both would write {path}; give one run per device, or --device NAME "
                    "once per run"
                )
            files[path] = text_of(recommendation, model, _used_by(recommendation, f"--model-config-name={device}"))
            runs[path] = name
    return files


def text_of(recommendation: Recommendation, model: str, *more: str) -> str:
    """Return the config.pbtxt of ``model`` below its header, which is a comment in protobuf's text format."""
    return commented(header(recommendation, *more)) + "\n" + model_config.to_text(recommendation.configs[model])


def _used_by(recommendation: Recommendation, *options: str) -> str:
    """Return a header line with the command line of the server that the file is for."""
    return f"used by: {shlex.join(['tritonserver', *options, *recommendation.arguments])}"


def device_name(recommendation: Recommendation) -> str:
    """Return a configuration name for the device: ``NVIDIA H100 80GB HBM3`` gives ``nvidia-h100-80gb-hbm3``.

    Raises BadInputError if the run was measured on another machine, whose device is unknown.
    """
    if recommendation.device is None:
        raise BadInputError(
            f"{recommendation.run.name}: its server ran on another machine, whose device is unknown; name it with "
            "--device"
        )
    name = re.sub(r"\((?:r|tm)\)|@.*", "", recommendation.device.lower())  # without trademarks and the clock rate
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")[:MAX_DEVICE_CHARACTERS].strip("-") or "device"


def with_warm_up(recommendation: Recommendation) -> Recommendation:
    """Add warm-up requests: each model except ensembles runs the batches of its batcher before it is ready.

    The shapes of the run are those of the model that clients send requests to, and its warm-up requests are kept.
    Raises BadInputError for an input whose size is not known, and for models that do not load with such requests.
    """
    shapes = [_read_shape(recommendation.run, text) for text in recommendation.run.options.shapes]
    dims = {name.strip(): shape.largest for shape in shapes for name in shape.names.split(",")}
    configs = {
        name: _add_warm_up(config, dims if name == recommendation.model else {})
        for name, config in recommendation.configs.items()
    }
    return replace(recommendation, configs=configs, warms_up=True)


def _read_shape(run: FinishedRun, text: str) -> InputShape:
    try:
        return parse_input_shape(text)
    except ValueError as error:
        raise BadInputError(
            f"{show_path(run.folder.info)}: the shape {quote(text)} cannot be read: {error}; restore the file, or "
            "leave --model-warmup out"
        ) from None


def _add_warm_up(config: ModelConfig, dims: dict[str, tuple[int, ...]]) -> ModelConfig:
    """Return ``config`` with warm-up requests; ``dims`` has the size of each input of variable size."""
    has_requests_of_tune = any(request.name.startswith(_MADE_BY_TUNE) for request in config.model_warmup)
    if has_requests_of_tune or config.HasField("ensemble_scheduling"):
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
