"""On which GPUs the instances of a model run: ``instance_group [ { gpus: [ 0, 1 ] } ]``, as one setting.

A placement is text, ``0,1``: GPUs as CUDA counts those that the server sees. Each has ``instance_group_count``
instances.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer.trial import INSTANCE_GPUS, FieldValue

MOST_GPUS = 64  # that a machine has
_BY_PATH = re.compile(r"instance_group\.\d+\.gpus\.\d+")


def parse(text: str) -> tuple[int, ...]:
    """``0,1`` or ``0+1`` -> (0, 1), ascending. Raises ValueError."""
    words = [word.strip() for word in text.replace("+", ",").split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 4 and int(word) < MOST_GPUS for word in words):
        raise ValueError("write numbers of GPUs, the first is 0, such as [0, 1]")
    return tuple(sorted(set(map(int, words))))


def show(gpus: Iterable[int]) -> str:
    return ",".join(map(str, gpus))


def put(config: ModelConfig, count: int, gpus: tuple[int, ...]) -> None:
    """``count`` instances on each. Of several groups the first stays: all would have the same GPUs."""
    groups = [group for group in config.instance_group if not group.passive]
    passive = [group for group in config.instance_group if group.passive]
    kept = groups[0] if groups else ModelConfig().instance_group.add()
    kept.kind, kept.count = kept.KIND_GPU, count
    kept.gpus[:] = gpus
    rest = [type(kept).FromString(group.SerializeToString()) for group in (kept, *passive)]
    config.ClearField("instance_group")
    config.instance_group.extend(rest)


def get(config: ModelConfig) -> str | None:
    """Of ``config``; None where its groups name none, or each its own."""
    named = {show(sorted(group.gpus)) for group in config.instance_group if not group.passive}
    return next(iter(named)) or None if len(named) == 1 else None


def named(configs: Iterable[ModelConfig]) -> tuple[int, ...] | None:
    """Every GPU on which one of ``configs`` has instances: empty where all run on the CPU, None where one leaves it
    open."""
    found: set[int] = set()
    for config in configs:
        for group in config.instance_group:
            if group.passive or group.kind == group.KIND_CPU:
                continue
            if not group.gpus:
                return None
            found.update(group.gpus)
    return tuple(sorted(found))


def absent(path: str, value: FieldValue, count: int) -> str:
    """Why ``value`` of the setting ``path`` names a GPU that is not there, of ``count``; empty where it does not."""
    if path != INSTANCE_GPUS and not _BY_PATH.fullmatch(path):
        return ""
    try:
        missing = [gpu for gpu in parse(str(value)) if gpu >= count]
    except ValueError as error:
        return f"{value!r}: {error}"
    there = {0: "there is none", 1: "there is one, GPU 0"}.get(count, f"there are {count}, from 0 to {count - 1}")
    return f"GPU {missing[0]} is not there: {there}" if missing else ""
