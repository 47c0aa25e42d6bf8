"""The instances of a model: whether they run on a GPU, and how many of them a configuration may have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from optimizer.config.backends import ONNXRUNTIME, backend_of, is_ensemble
from optimizer.config.gpu_placement import instance_kinds
from optimizer.config.model_config_proto import ModelConfig
from optimizer.config.model_source import ModelSource
from optimizer.core.candidate import INSTANCE_GPUS, FieldValue
from optimizer.core.notes import ServedOnCpu
from optimizer.machine.hardware import memory_bytes, onnxruntime_on_gpu, torch_on_gpu
from optimizer.model.repository import read_repository_model
from optimizer.options.run_options import PROGRAM_TARGETS, RunOptions

# whether the embedded server's own backends can compute on a GPU; others do what their model does
GPU_CHECKS: Final[Mapping[str, Callable[[], bool]]] = {"onnxruntime": onnxruntime_on_gpu, "pytorch": torch_on_gpu}


@dataclass(frozen=True)
class DeviceAssignment:
    """Decides which models are served on a GPU.

    ``gpu_count`` is the number of GPUs that the server sees. ``is_embedded`` is whether the embedded server serves,
    with tune's own backends. Triton's native backends use GPUs.
    """

    gpu_count: int
    is_embedded: bool = True

    @classmethod
    def of(cls, options: RunOptions, gpus: Sequence[str]) -> DeviceAssignment:
        """Return the assignment for the server of ``options`` with these GPUs."""
        return cls(len(gpus), is_embedded=options.target == "embedded")

    def on_gpu(self, config: ModelConfig) -> bool:
        """Return whether a model has instances on a GPU.

        If instance groups do not set KIND_GPU or KIND_CPU, the backend decides. On the embedded server, Python models
        then count as CPU models.
        """
        if not self.gpu_count or is_ensemble(config):
            return False
        kinds = instance_kinds(config)
        return "KIND_GPU" in kinds or (kinds != {"KIND_CPU"} and self.reaches(backend_of(config)))

    def explain_cpu_serving(self, config: ModelConfig) -> ServedOnCpu:
        """Return the note why the model, which is not ``on_gpu``, is served on the CPU although there is a GPU.

        A backend of the embedded server without CUDA is the cause even if config.pbtxt says KIND_CPU, because tune
        writes that itself for a model of such a backend.
        """
        backend = backend_of(config)
        if self.is_embedded and backend in GPU_CHECKS and not self.reaches(backend):
            return ServedOnCpu("onnxruntime_without_cuda" if backend == ONNXRUNTIME else "torch_without_cuda")
        return ServedOnCpu("kind_cpu" if instance_kinds(config) == {"KIND_CPU"} else "no_kind_gpu")

    def reaches(self, backend: str) -> bool:
        """Return whether a backend computes on a GPU if the model does not set the kind of its instances."""
        return bool(self.gpu_count) and (not self.is_embedded or (backend in GPU_CHECKS and GPU_CHECKS[backend]()))

    def source_on_gpu(self, source: ModelSource) -> bool:
        """Return whether any of the source's models has instances on a GPU."""
        return any(map(self.on_gpu, source.models.values()))

    def stored_on_gpu(self, repository: Path, name: str) -> bool:
        """Return whether a stored model, or a step of it, has instances on a GPU.

        Raises the errors of ``read_repository_model``.
        """
        if not self.gpu_count:
            return False
        config = self._read(repository, name)
        steps = {step.model_name for step in config.ensemble_scheduling.step}
        return self.on_gpu(config) or any(self.on_gpu(self._read(repository, step)) for step in steps)

    def read(self, repository: Path, name: str, largest_batch: int) -> ModelSource:
        """Return the stored model with the instance count that Triton chooses on its device.

        Raises the errors of ``read_repository_model``.
        """
        gpu = self.stored_on_gpu(repository, name)
        return read_repository_model(
            repository, name, gpu=gpu, largest_batch=largest_batch, is_embedded=self.is_embedded
        )

    def _read(self, repository: Path, name: str) -> ModelConfig:
        return read_repository_model(repository, name, gpu=False, is_embedded=self.is_embedded).config


def has_gpu_choice(fields: Mapping[str, Iterable[FieldValue]]) -> bool:
    """Return whether any choice puts instances on a GPU."""
    return INSTANCE_GPUS in fields or any("KIND_GPU" in map(str, values) for values in fields.values())


DEFAULT_MAX_INSTANCES = 64  # without --max-instance-count
GIB = 2**30
PROCESS_BYTES = 32 << 20  # the least memory of an instance's process, without weights
BACKENDS_THAT_COPY = ("onnxruntime", "pytorch")  # each instance has weights of its own


def too_many_instances(counts: Iterable[int], source: ModelSource, options: RunOptions, *, on_gpu: bool) -> str:
    """Return why one of ``counts`` is too large a number of instances of a model; an empty string if none is.

    The limit is ``--max-instance-count``. On the CPU of this machine the processes also have to fit into its memory,
    with the weights of a single model unless the user has set the limit.
    """
    largest = max(counts, default=0)
    limit = options.max_instance_count or DEFAULT_MAX_INSTANCES
    if largest > limit:
        return (
            f"{largest:,} instances are above the limit of {limit:,}; write fewer, or raise the limit with "
            "--max-instance-count"
        )
    if on_gpu or options.target not in PROGRAM_TARGETS or options.cluster is not None or largest < 2:
        return ""
    copied = backend_of(source.tuned_config) in BACKENDS_THAT_COPY and not source.composing
    weights = int(source.facts.get("model_bytes", 0)) if copied and options.max_instance_count is None else 0
    needed_bytes, limit_bytes = largest * (PROCESS_BYTES + weights), memory_bytes()
    if needed_bytes <= limit_bytes:
        return ""
    return (
        f"{largest:,} instances need about {needed_bytes / GIB:.1f} GiB of memory, and tune may use "
        f"{limit_bytes / GIB:.1f} GiB; write fewer{', or set --max-instance-count' if weights else ''}"
    )
