"""Which GPUs the server of a target sees, and who tells of them: NVML here, its own metrics elsewhere."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from optimizer.arguments.target import address
from optimizer.deploy.docker.settings import ALL_GPUS, NO_GPUS, read_gpus
from optimizer.deploy.listener import is_loopback
from optimizer.machine import nvml, triton_metrics
from optimizer.machine.gpu_attribution import CHOSEN, visible
from optimizer.machine.nvml import Gpu
from optimizer.options import RunOptions

METRICS_PORT = 8002  # Triton's own


@dataclass(frozen=True)
class SeenGpus:
    """``names`` as CUDA counts them; of a server elsewhere their UUIDs. ``here`` are those that NVML tells of,
    ``metrics`` is where the server tells of its own (``host:port``), empty where it does not.

    ``fault``: why this machine's GPUs tell nothing where they are to serve, and what mends it; ``unusable``: for that
    reason they do not serve either.
    """

    names: tuple[str, ...] = ()
    here: tuple[Gpu, ...] = ()
    metrics: str = ""
    fault: str = ""
    unusable: bool = False


def seen(options: RunOptions) -> SeenGpus:
    """Asks NVML, and a remote server's metrics."""
    if options.target == "docker":
        ids = read_gpus(options.docker_gpus or NO_GPUS)
        return _here(None if ids == (ALL_GPUS,) else ",".join(ids))
    if options.target != "remote":
        return _here(os.environ.get(CHOSEN))
    host = address(options.url).where.rpartition(":")[0]
    metrics = options.metrics_url or f"{host}:{METRICS_PORT}"
    told = tuple(triton_metrics.read(metrics))
    found = _here(os.environ.get(CHOSEN)) if is_loopback(host.strip("[]")) else SeenGpus()
    return replace(found, names=told or found.names, metrics=metrics if told else "")


def _here(chosen: str | None) -> SeenGpus:
    """Those of this machine that are ``chosen``, as CUDA_VISIBLE_DEVICES has it; None is all."""
    found = nvml.survey()
    if chosen == "":
        return SeenGpus()
    gpus = tuple(found.gpus) if chosen is None else visible(found.gpus, chosen)
    return SeenGpus(tuple(gpu.name for gpu in gpus), gpus, "", found.told, found.unusable)
