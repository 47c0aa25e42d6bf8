"""The GPUs that the server of a target sees, and where they are measured."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from optimizer.deploy.docker_container import ALL_GPUS, NO_GPUS, read_gpus
from optimizer.deploy.remote_address import metrics_address, other_machine_address
from optimizer.machine import gpu_telemetry, nvml
from optimizer.machine.nvml import VISIBLE_DEVICES, Gpu, filter_visible
from optimizer.options.run_options import RunOptions


@dataclass(frozen=True)
class VisibleGpus:
    """The GPUs that a server sees, in the order of CUDA.

    ``names`` are their names, or their UUIDs for a server on another machine. ``local`` are the GPUs of this machine,
    which NVML can query. ``metrics`` is the ``host:port`` of the server's metrics, empty if it provides no GPU data.
    ``fault`` says why the GPUs of this machine provide no data, and what to do; with ``unusable`` a server cannot
    use them either.
    """

    names: tuple[str, ...] = ()
    local: tuple[Gpu, ...] = ()
    metrics: str = ""
    fault: str = ""
    unusable: bool = False


def visible_gpus(options: RunOptions) -> VisibleGpus:
    """Return the GPUs that the server of ``options`` sees, according to NVML or the metrics of a remote server."""
    if options.target == "docker":
        ids = read_gpus(options.docker_gpus or NO_GPUS)
        gpus = _local_gpus(None if ids == (ALL_GPUS,) else ",".join(ids))
        local = tuple(sorted(gpus.local, key=lambda gpu: gpu.index))  # whatever the order of the ids
        return replace(gpus, names=tuple(gpu.name for gpu in local), local=local)
    if options.target != "remote":
        return _local_gpus(os.environ.get(VISIBLE_DEVICES))
    metrics = metrics_address(options)
    uuids = tuple(gpu_telemetry.read_gpu_metrics(metrics))
    gpus = VisibleGpus() if other_machine_address(options) else _local_gpus(os.environ.get(VISIBLE_DEVICES))
    return replace(gpus, names=uuids or gpus.names, metrics=metrics if uuids else "")


def _local_gpus(chosen: str | None) -> VisibleGpus:
    """Return the GPUs of this machine that ``chosen`` lists in the form of CUDA_VISIBLE_DEVICES; None means all."""
    survey = nvml.survey()
    if chosen == "":
        return VisibleGpus()
    gpus = tuple(survey.gpus) if chosen is None else filter_visible(survey.gpus, chosen)
    return VisibleGpus(tuple(gpu.name for gpu in gpus), gpus, "", survey.message, survey.unusable)
