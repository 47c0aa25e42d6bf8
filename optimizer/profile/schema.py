"""The sections of a profile. ``optimizer.profile.reader`` reads and merges them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Discriminator, Tag, ValidationInfo, field_validator

from objectives.sla import Constraint
from optimizer.profile.faults import meant
from optimizer.profile.safe_paths import inside
from optimizer.profile.values import (
    Accelerator,
    BatchSize,
    Bound,
    Bounds,
    Choice,
    Count,
    CpuList,
    Delay,
    Folder,
    GpuList,
    GraphLevel,
    InputData,
    Key,
    LabelledData,
    Metric,
    Mode,
    Name,
    Number,
    Positive,
    Preferred,
    RequestSize,
    ServerOption,
    Setting,
    Sizes,
    Some,
    Tolerated,
)
from optimizer.profile.yaml_lines import show
from optimizer.requests.asked import Asked
from optimizer.trial import INSTANCE_GPUS, SERVER_CPUS, SERVER_OPTION, FieldValue

ONNX_RUNTIME: Final = {  # its settings -> their paths in ModelConfig
    "intra_op_thread_count": "parameters.intra_op_thread_count.string_value",
    "inter_op_thread_count": "parameters.inter_op_thread_count.string_value",
    "execution_mode": "parameters.execution_mode.string_value",
    "graph_level": "optimization.graph.level",
    "execution_accelerator": "optimization.execution_accelerators.gpu_execution_accelerator.0.name",
}
BUILT, STORED = "<built>", "<stored>"  # the two kinds of model, as pydantic calls them in its locations


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class BuiltModel(Section):
    """A model that a builder of ``optimizer.models`` writes; ``settings`` are that builder's."""

    builder: Name
    settings: dict[str, Setting] = {}


class StoredModel(Section):
    """The model ``name`` of a Triton repository: both are folders that exist, at or under the profile's.

    ``bls_composing_models`` are those that a model in Python calls; the steps of an ensemble are known. The space is
    about ``batcher``, one of these; by default the largest. ``concurrent_models`` get the same load at the same time,
    on the same device. ``variants`` are models of the same repository that can take its place.
    """

    repository: Folder
    name: Name
    bls_composing_models: Some[Name] | None = None
    concurrent_models: Some[Name] | None = None
    variants: Some[Name] | None = None
    batcher: Name | None = None

    @field_validator("name")
    @classmethod
    def _is_in_repository(cls, name: str, info: ValidationInfo) -> str:
        repository: Path | None = info.data.get("repository")
        if repository is None:  # a fault of its own
            return name
        try:
            folders = sorted(path.name for path in repository.iterdir() if path.is_dir())
        except OSError as error:
            raise ValueError(f"{show(name)} cannot be looked up: {error.strerror}") from None
        if name not in folders:
            raise ValueError(f"{show(name)} is no model of the repository; {meant(name, folders[:20])}")
        inside(repository, name)
        return name


def _kind_of_model(value: Any) -> str | None:
    """Which of the two is meant; None where neither or both are."""
    if not isinstance(value, dict):
        return BUILT
    built, stored = "builder" in value, "repository" in value or "name" in value
    return None if built == stored else BUILT if built else STORED


Model = Annotated[
    Annotated[BuiltModel, Tag(BUILT)] | Annotated[StoredModel, Tag(STORED)],
    Discriminator(
        _kind_of_model,
        custom_error_type="kind_of_model",
        custom_error_message="give either builder (and settings), or repository and name",
    ),
]


class SlaSection(Section):
    """Upper bounds on the latency of a request, in milliseconds. None is no bound."""

    avg: Bound = None
    p50: Bound = None
    p90: Bound = None
    p95: Bound = None
    p99: Bound = None

    def constraints(self) -> tuple[Constraint, ...]:
        return tuple(Constraint(f"latency-{key}", bound) for key, bound in self if bound is not None)


class RequestSection(Section):
    """One request. ``batch_size``: samples, or a mix as ``requests.sizes`` reads it. ``input_data``: ``random``,
    ``zero``, a file or folder of samples, or None: the builder's own where it has any.

    ``shapes`` are the sizes of an input with dynamic dims, without the batch dim, ``ranges`` the bounds of random
    values; both by an input's name, or by several with commas between them. Strings as perf_analyzer has them.
    """

    batch_size: RequestSize = 1
    input_data: InputData = None
    shapes: dict[Key, Sizes] = {}
    ranges: dict[Key, Bounds] = {}
    string_data: Key | None = None
    string_length: Positive | None = None

    def asked(self) -> Asked:
        """What is to be sent."""
        return Asked(
            str(self.input_data or ""),
            tuple(f"{names}:{sizes}" for names, sizes in self.shapes.items()),
            tuple(f"{names}:{bounds}" for names, bounds in self.ranges.items()),
            self.string_data,
            self.string_length,
        )


class LoadSection(Section):
    """The range of the closed loop: 1 to ``max_concurrency`` requests in flight."""

    max_concurrency: Positive = 256


class BesideSection(Section):
    """The choices of a model beside the one that the space is about: another step of the ensemble, say."""

    max_batch_size: Some[Positive] | None = None
    max_queue_delay_microseconds: Some[Delay] | None = None
    preferred_batch_size: Some[Preferred] | None = None
    instance_group_count: Some[Positive] | None = None
    config: dict[Key, Some[Choice]] = {}

    def fields(self) -> dict[str, tuple[FieldValue, ...]]:
        own = {name: choices for name, choices in self if name != "config" and choices}
        return {**own, **self.config}


class OnnxRuntimeSection(Section):
    """Settings of ONNX Runtime, as Triton's backend calls them.

    ``execution_mode``: 0 one operator after another, 1 in parallel. ``graph_level``: -1 basic, 1 extended, 0 all
    optimizations, 2 none. ``execution_accelerator`` (on a GPU): none, tensorrt.
    """

    intra_op_thread_count: Some[Count] | None = None
    inter_op_thread_count: Some[Count] | None = None
    execution_mode: Some[Mode] | None = None
    graph_level: Some[GraphLevel] | None = None
    execution_accelerator: Some[Accelerator] | None = None

    def fields(self) -> dict[str, tuple[FieldValue, ...]]:
        found = {ONNX_RUNTIME[name]: choices for name, choices in self if choices}
        return {path: tuple(map(str, c)) if path.startswith("parameters.") else c for path, c in found.items()}


class SpaceSection(Section):
    """The choices of each parameter; None is not given. What combinations are valid, ``Space`` decides.

    ``max_batch_size`` 0 is a model without batch dimension. A delay of ``off`` is no dynamic batching.
    ``preferred_batch_size`` holds policies, see ``batching.parse_policy``; ``config`` choices of any other
    field of ModelConfig by its proto path. ``server_cpus``: lists of the CPUs that the server runs on;
    ``server``: choices of its options, by their names; ``instance_group_gpus``: of the GPUs that have instances.
    ``models``: the same for models beside, by name.
    """

    max_batch_size: Some[BatchSize] | None = None
    max_queue_delay_microseconds: Some[Delay] | None = None
    preferred_batch_size: Some[Preferred] | None = None
    instance_group_count: Some[Positive] | None = None
    instance_group_gpus: Some[GpuList] | None = None
    server_cpus: Some[CpuList] | None = None
    server: dict[ServerOption, Some[Choice]] = {}
    onnxruntime: OnnxRuntimeSection = OnnxRuntimeSection()
    config: dict[Key, Some[Choice]] = {}
    models: dict[Name, BesideSection] = {}

    def fields(self) -> dict[str, tuple[FieldValue, ...]]:
        """As ``Space`` takes them."""
        beside = {
            f"{name}/{path}": choices for name, one in self.models.items() for path, choices in one.fields().items()
        }
        chosen = {SERVER_CPUS: self.server_cpus, INSTANCE_GPUS: self.instance_group_gpus}
        placed = {path: choices for path, choices in chosen.items() if choices}
        options = {f"{SERVER_OPTION}{name}": choices for name, choices in self.server.items()}
        return self.onnxruntime.fields() | self.config | placed | options | beside


class ScoreSection(Section):
    """How good the answers to labelled samples are. ``data``: a .npz file of inputs by tensor name, the samples in
    the first dimension, and ``labels``. ``metric``: one of SCORES, or a function; higher is better. A configuration
    whose score is below ``minimum`` is not recommended.
    """

    data: LabelledData
    metric: Metric
    minimum: Number = None


class ToleranceSection(Section):
    """How far an answer may lie from the unbatched baseline's; see ``optimizer.answers.comparison.Tolerance``."""

    relative: Tolerated = None
    absolute: Tolerated = None
