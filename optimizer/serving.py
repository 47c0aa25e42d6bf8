"""On which device a model is served: by its own configuration, and by what its backend finds in this environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer.machine import hardware
from optimizer.model_source import ModelSource
from optimizer.options import RunOptions
from optimizer.sources.repository import backend_of, is_ensemble, read_repository_model
from optimizer.trial import INSTANCE_GPUS, FieldValue

# what the embedded server's own backends need, to compute on a GPU; others do what their model does
REACH: Final[Mapping[str, Callable[[], bool]]] = {
    "onnxruntime": hardware.onnxruntime_on_gpu,
    "pytorch": hardware.torch_on_gpu,
}
LACKS: Final = {
    "onnxruntime": "the installed onnxruntime has no CUDA provider: served on the CPU (to change that, put "
    "onnxruntime-gpu in its place)",
    "pytorch": "the installed torch has no CUDA: served on the CPU (to change that, install its CUDA build)",
}


@dataclass(frozen=True)
class Serving:
    """``gpu_count``: GPUs that the server sees. ``native``: it has Triton's own backends, which compute on them."""

    gpu_count: int
    native: bool = False

    @classmethod
    def of(cls, options: RunOptions, gpus: Sequence[str]) -> Serving:
        return cls(len(gpus), native=options.target != "embedded")

    def on_gpu(self, config: ModelConfig) -> bool:
        """Whether a model has instances on a GPU. KIND_GPU and KIND_CPU are as they say; where the kind is left open
        its backend decides, and a model in Python is taken to compute on the CPU."""
        if not self.gpu_count or is_ensemble(config):
            return False
        kinds = {group.kind for group in config.instance_group if not group.passive}
        group = ModelConfig().instance_group.add()
        if group.KIND_GPU in kinds:
            return True
        return kinds != {group.KIND_CPU} and self.reaches(backend_of(config))

    def reaches(self, backend: str) -> bool:
        """Whether a backend computes on a GPU where a model leaves that open."""
        return bool(self.gpu_count) and (self.native or (backend in REACH and REACH[backend]()))

    def source_on_gpu(self, source: ModelSource) -> bool:
        """Whether any of its models has instances on a GPU."""
        return any(map(self.on_gpu, source.models.values()))

    def stored_on_gpu(self, repository: Path, name: str) -> bool:
        """The same of a stored model, or of the steps of an ensemble. Raises as ``read_repository_model``."""
        if not self.gpu_count:
            return False
        config = self._read(repository, name)
        steps = {step.model_name for step in config.ensemble_scheduling.step}
        return self.on_gpu(config) or any(self.on_gpu(self._read(repository, step)) for step in steps)

    def read(self, repository: Path, name: str, largest_batch: int) -> ModelSource:
        """The stored model, with the instance count that Triton chooses on its device. Raises as
        ``read_repository_model``."""
        gpu = self.stored_on_gpu(repository, name)
        return read_repository_model(repository, name, gpu=gpu, largest_batch=largest_batch, any_backend=self.native)

    def _read(self, repository: Path, name: str) -> ModelConfig:
        return read_repository_model(repository, name, gpu=False, any_backend=self.native).config


def asks_for_gpu(fields: Mapping[str, tuple[FieldValue, ...]]) -> bool:
    """Whether any choice puts instances on a GPU."""
    return INSTANCE_GPUS in fields or any("KIND_GPU" in map(str, values) for values in fields.values())


def note(config: ModelConfig) -> str:
    """Why a model is served on the CPU though a GPU is there."""
    kinds = {group.kind for group in config.instance_group}
    if kinds == {ModelConfig().instance_group.add().KIND_CPU}:
        return "a GPU is there, but config.pbtxt asks for the CPU (KIND_CPU): served there"
    lacks = LACKS.get(backend_of(config), "config.pbtxt does not ask for it (kind: KIND_GPU): served on the CPU")
    return f"a GPU is there, but {lacks}"
