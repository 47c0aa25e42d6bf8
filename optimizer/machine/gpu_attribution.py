"""Which GPUs a server uses, so that what other GPUs do is not told of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence

from optimizer.machine.nvml import Gpu, device_of_mig

CHOSEN = "CUDA_VISIBLE_DEVICES"


def visible(
    gpus: Sequence[Gpu],
    chosen: str | None = None,
    device_of: Callable[[str], str | None] = device_of_mig,
) -> tuple[Gpu, ...]:
    """Those that CUDA lets a program see, in the order in which it counts them: ``gpus: [ 0 ]`` is the first.

    ``chosen`` is $CUDA_VISIBLE_DEVICES, None the environment's own. As CUDA reads it: numbers, UUIDs or how these
    begin, and the first that is none of a GPU ends the list.
    """
    text = os.environ.get(CHOSEN) if chosen is None else chosen
    if text is None:
        return tuple(gpus)
    found: list[Gpu] = []
    for word in text.split(","):
        gpu = _named(word.strip(), gpus, device_of)
        if gpu is None or gpu in found:
            break
        found.append(gpu)
    return tuple(found)


def used_by(pids: Collection[int], gpus: Sequence[Gpu], placed: Collection[int] | None) -> tuple[Gpu, ...]:
    """Of the visible ``gpus`` those on which ``pids`` compute. Where NVML does not tell (in a container processes
    have other numbers): those ``placed``, by the server's instance groups; all where these name none (None)."""
    if placed is not None and not placed:
        return ()
    seen = tuple(gpu for gpu in gpus if not gpu.processes().keys().isdisjoint(pids))
    if seen:
        return seen
    return tuple(gpus) if placed is None else tuple(gpu for i, gpu in enumerate(gpus) if i in placed)


def _named(word: str, gpus: Sequence[Gpu], device_of: Callable[[str], str | None]) -> Gpu | None:
    if word.isascii() and word.isdigit():
        return next((gpu for gpu in gpus if gpu.index == int(word)), None)
    if word.startswith("MIG-"):
        word = device_of(word) or ""
    matching = [gpu for gpu in gpus if word and gpu.uuid.startswith(word)]
    return matching[0] if len(matching) == 1 else None
