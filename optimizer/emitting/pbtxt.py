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


def emit_per_device(winners: Sequence[Winner]) -> dict[str, str]:
    """``<model>/configs/<device>.pbtxt``. Raises BadInputError where two runs are of one device."""
    files: dict[str, str] = {}
    taken: dict[str, str] = {}
    for winner in winners:
        device = device_name(winner.device)
        started = f"tritonserver: --model-config-name={device}"
        options = [f"and {' '.join(winner.arguments)}"] if winner.arguments else []
        for model in winner.configs:
            path = f"{model}/configs/{device}.pbtxt"
            if path in files:
                raise BadInputError(
                    f"{taken[path]} and {winner.run}: both tuned {model} on {winner.device}; give one run for each device"
                )
            files[path] = text_of(winner, model, " ".join([started, *options]))
            taken[path] = winner.run
    return files


def text_of(winner: Winner, model: str, *more: str) -> str:
    """One model's configuration beneath its header, which protobuf's readers pass over."""
    return commented(header(winner, *more)) + "\n" + model_config.to_text(winner.configs[model])


def device_name(device: str) -> str:
    """``NVIDIA H100 80GB HBM3`` -> ``nvidia-h100-80gb-hbm3``: Triton takes no spaces."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")[:LONGEST_DEVICE].strip("-") or "device"


def with_warm_up(winner: Winner) -> Winner:
    """Every model but an ensemble runs the batches that its batcher aims at before it is ready.

    What the run itself warmed up with stays. Raises BadInputError for an input whose size is not known.
    """
    dims = {
        name.strip(): shape.largest for shape in map(parse_shape, winner.shapes) for name in shape.names.split(",")
    }
    return replace(winner, configs={name: _warmed_up(one, dims) for name, one in winner.configs.items()})


def _warmed_up(config: ModelConfig, dims: dict[str, tuple[int, ...]]) -> ModelConfig:
    if config.HasField("ensemble_scheduling") or any(
        one.name.startswith(_MADE_BY_TUNE) for one in config.model_warmup
    ):
        return config
    for tensor in config.input:
        if -1 in tensor.dims and tensor.name not in dims:
            raise BadInputError(
                f"--warm-up: how large {tensor.name} of {config.name} is, the run does not tell; "
                "tune with --model-warmup, which warms up with the requests that it sends"
            )
    return model_config.warmed_up(config, dims)
