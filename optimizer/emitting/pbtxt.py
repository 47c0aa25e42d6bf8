"""``pbtxt``: each model's config.pbtxt; ``per-device``: several runs' beside each other in one model repository.

Triton started with ``--model-config-name=h100`` takes ``<model>/configs/h100.pbtxt`` where there is one, else
``<model>/config.pbtxt``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer import model_config
from optimizer.emitting.header import commented, header
from optimizer.emitting.winner import Winner
from optimizer.errors import BadInputError
from optimizer.requests.sizes import parse_shape

LONGEST_DEVICE = 60
_MADE_BY_TUNE = "tritune: "


def emit_pbtxt(winner: Winner) -> dict[str, str]:
    """Files by path: ``config.pbtxt``, or ``<model>/config.pbtxt`` of several."""
    if len(winner.configs) == 1:
        return {"config.pbtxt": text_of(winner, winner.model)}
    return {f"{model}/config.pbtxt": text_of(winner, model) for model in winner.configs}


def emit_per_device(winners: Sequence[Winner], devices: Sequence[str] = ()) -> dict[str, str]:
    """``<model>/configs/<device>.pbtxt``. ``devices`` name those of ``winners``, else the hardware does.

    Raises BadInputError where two runs are of one model and device.
    """
    files: dict[str, str] = {}
    runs: dict[str, str] = {}
    for winner, device in zip(winners, devices or map(device_name, winners), strict=True):
        started = " ".join([f"tritonserver --model-config-name={device}", *winner.arguments])
        for model in winner.configs:
            path = f"{model}/configs/{device}.pbtxt"
            if path in files:
                raise BadInputError(
                    f"{runs[path]} and {winner.run}: both would be {path}; give one run for each device, or --device "
                    "NAME for each run"
                )
            files[path] = text_of(winner, model, f"taken by: {started}")
            runs[path] = winner.run
    return files


def text_of(winner: Winner, model: str, *more: str) -> str:
    """One model's configuration beneath its header, which protobuf's readers pass over."""
    return commented(header(winner, *more)) + "\n" + model_config.to_text(winner.configs[model])


def device_name(winner: Winner) -> str:
    """``NVIDIA H100 80GB HBM3`` -> ``nvidia-h100-80gb-hbm3``: Triton takes no spaces. Raises BadInputError."""
    if winner.device is None:
        raise BadInputError(f"{winner.run}: what it was measured on is not known; name it with --device")
    kept = re.sub(r"\((?:r|tm)\)|@.*", "", winner.device.lower())
    return re.sub(r"[^a-z0-9]+", "-", kept).strip("-")[:LONGEST_DEVICE].strip("-") or "device"


def with_warm_up(winner: Winner) -> Winner:
    """Every model but an ensemble runs the batches that its batcher aims at before it is ready.

    What the run itself warmed up with stays. Raises BadInputError for an input whose size is not known.
    """
    try:
        shapes = [parse_shape(text) for text in winner.shapes]
    except ValueError as error:
        raise BadInputError(f"{winner.run}: its shapes cannot be read: {error}") from None
    dims = {name.strip(): shape.largest for shape in shapes for name in shape.names.split(",")}
    return replace(winner, configs={name: _warmed_up(one, dims) for name, one in winner.configs.items()})


def _warmed_up(config: ModelConfig, dims: dict[str, tuple[int, ...]]) -> ModelConfig:
    by_tune = any(one.name.startswith(_MADE_BY_TUNE) for one in config.model_warmup)
    if by_tune or config.HasField("ensemble_scheduling"):
        return config
    for tensor in config.input:
        if -1 in tensor.dims and tensor.name not in dims:
            raise BadInputError(
                f"--warm-up: how large {tensor.name} of {config.name} is, the run does not tell; "
                "tune with --model-warmup, which warms up with the requests that it sends"
            )
    return model_config.warmed_up(config, dims)
