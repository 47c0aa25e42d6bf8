"""The GPUs of a model's instances, ``instance_group [ { gpus: [ 0, 1 ] } ]``, as one setting.

A placement is a text such as ``0,1``: CUDA indices of the GPUs that the server sees. Each GPU has
``instance_group_count`` instances.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from optimizer.config.model_config_proto import ModelConfig
from optimizer.core.candidate import INSTANCE_GPUS, FieldValue

MAX_GPUS = 64  # limit for the GPUs of one machine
_BY_PATH = re.compile(r"instance_group\.\d+\.gpus\.\d+")


def parse(text: str) -> tuple[int, ...]:
    """Return the ascending GPU indices in ``0,1`` or ``0+1``. Raises an error with an example for any other text."""
    numbers = [part.strip() for part in text.replace("+", ",").split(",")]
    if not all(re.fullmatch("[0-9]{1,3}", number) and int(number) < MAX_GPUS for number in numbers):
        raise ValueError("write numbers of GPUs, the first is 0, such as [0, 1]")
    return tuple(sorted(set(map(int, numbers))))


def to_text(gpus: Iterable[int]) -> str:
    """Return the text that ``parse`` reads."""
    return ",".join(map(str, gpus))


def set_gpus(config: ModelConfig, count: int, gpus: tuple[int, ...]) -> None:
    """Put ``count`` instances on each of ``gpus``.

    Only the first instance group is kept, because all would have the same GPUs. Passive groups are kept too.
    """
    active_groups = [group for group in config.instance_group if not group.passive]
    passive_groups = [group for group in config.instance_group if group.passive]
    first = active_groups[0] if active_groups else ModelConfig().instance_group.add()
    first.kind, first.count = first.KIND_GPU, count
    first.gpus[:] = gpus
    copies = [type(first).FromString(group.SerializeToString()) for group in (first, *passive_groups)]
    config.ClearField("instance_group")
    config.instance_group.extend(copies)


def get_gpus(config: ModelConfig) -> str | None:
    """Return the GPUs of the instance groups; None if they name none or differ."""
    placements = {to_text(sorted(group.gpus)) for group in config.instance_group if not group.passive}
    return next(iter(placements)) or None if len(placements) == 1 else None


def used_gpus(configs: Iterable[ModelConfig]) -> tuple[int, ...] | None:
    """Return every GPU on which one of ``configs`` has instances.

    The result is empty if all instances run on the CPU, and None if an instance group names no GPU.
    """
    gpus: set[int] = set()
    for config in configs:
        for group in config.instance_group:
            if group.passive or group.kind == group.KIND_CPU:
                continue
            if not group.gpus:
                return None
            gpus.update(group.gpus)
    return tuple(sorted(gpus))


def instance_total(config: ModelConfig) -> int:
    """Return the number of instances that ``config`` asks for, on all of its GPUs; 0 without instance groups."""
    groups = (group for group in config.instance_group if not group.passive)
    return sum(max(1, group.count) * max(1, len(group.gpus)) for group in groups)


def instance_kinds(config: ModelConfig) -> set[str]:
    """Return the kinds of the instance groups that execute requests, such as KIND_GPU."""
    return {group.Kind.Name(group.kind) for group in config.instance_group if not group.passive}


def missing_gpu(path: str, value: FieldValue, count: int) -> str:
    """Return why ``value`` of the setting ``path`` names a missing GPU; an empty string if it does not.

    ``count`` is the number of GPUs that the server sees.
    """
    if path != INSTANCE_GPUS and not _BY_PATH.fullmatch(path):
        return ""
    try:
        missing = [gpu for gpu in parse(str(value)) if gpu >= count]
    except ValueError as error:
        return f"{value!r}: {error}"
    return _absent(missing[0], count) if missing else ""


def missing_device(config: ModelConfig, count: int) -> str:
    """Return which GPU ``config`` needs that a server with ``count`` GPUs lacks; an empty string if it lacks none."""
    for group in config.instance_group:
        if group.kind == group.KIND_GPU and not count:
            return (
                "instance_group: kind is KIND_GPU, and the server sees no GPU; write KIND_CPU, or see `tune doctor`"
            )
        for gpu in group.gpus:
            if gpu >= count:
                return f"instance_group: gpus: {_absent(gpu, count)}"
    return ""


def _absent(gpu: int, count: int) -> str:
    available = {0: "there is none", 1: "there is one, GPU 0"}.get(count, f"there are {count}, from 0 to {count - 1}")
    return f"GPU {gpu} is not there: {available}"
