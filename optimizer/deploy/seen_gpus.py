"""Which GPUs the server of a target sees, and who tells of them: NVML here, its own metrics elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optimizer.arguments.target import address
from optimizer.deploy.docker.settings import ALL_GPUS, read_gpus
from optimizer.deploy.listener import is_loopback
from optimizer.machine import nvml, triton_metrics
from optimizer.machine.gpu_attribution import visible
from optimizer.machine.nvml import Gpu
from optimizer.options import RunOptions

METRICS_PORT = 8002  # Triton's own


@dataclass(frozen=True)
class SeenGpus:
    """``names`` as CUDA counts them; of a server elsewhere their UUIDs. ``here`` are those that NVML tells of,
    ``metrics`` is where the server tells of its own (``host:port``), empty where it does not."""

    names: tuple[str, ...] = ()
    here: tuple[Gpu, ...] = ()
    metrics: str = ""


def seen(options: RunOptions) -> SeenGpus:
    """Asks NVML, and a remote server's metrics."""
    if options.target == "docker":
        return _of(_handed_in(nvml.survey().gpus, options.docker_gpus))
    if options.target != "remote":
        return _of(visible(nvml.survey().gpus))
    at = address(options.url)
    host = at.where.rpartition(":")[0]
    metrics = options.metrics_url or f"{host}:{METRICS_PORT}"
    told = tuple(triton_metrics.read(metrics))
    here = visible(nvml.survey().gpus) if is_loopback(host.strip("[]")) else ()
    return SeenGpus(told or tuple(gpu.name for gpu in here), here, metrics if told else "")


def _of(gpus: Sequence[Gpu]) -> SeenGpus:
    return SeenGpus(tuple(gpu.name for gpu in gpus), tuple(gpus))


def _handed_in(gpus: Sequence[Gpu], asked: str | None) -> tuple[Gpu, ...]:
    ids = read_gpus(asked or "none")
    return tuple(gpus) if ids == (ALL_GPUS,) else visible(gpus, ",".join(ids))
