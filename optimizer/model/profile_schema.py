"""The sections of a profile as pydantic models; ``optimizer.model.profile`` reads and merges them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Discriminator, Tag, ValidationInfo, field_validator

from optimizer.core.safe_text import format_value, resolve_inside
from optimizer.core.trial import INSTANCE_GPUS, SERVER_CPUS, SERVER_OPTION_PREFIX, FieldValue
from optimizer.model.profile_values import (
    Accelerator,
    BatchSize,
    BuilderSetting,
    CpuList,
    DimSizes,
    ExecutionMode,
    ExistingFolder,
    FieldChoice,
    FiniteNumber,
    GpuList,
    GraphLevel,
    InputData,
    LabelledData,
    LatencyBound,
    NonEmpty,
    NonNegative,
    PlainName,
    PositiveInt,
    PreferredSizes,
    PrintableText,
    QueueDelay,
    RequestSize,
    ScoreMetric,
    ServerOption,
    ThreadCount,
    ValueBounds,
    suggest,
)
from optimizer.model.requests import RequestOptions

ONNX_RUNTIME_PATHS: Final = {  # settings of ONNX Runtime -> their paths in ModelConfig
    "intra_op_thread_count": "parameters.intra_op_thread_count.string_value",
    "inter_op_thread_count": "parameters.inter_op_thread_count.string_value",
    "execution_mode": "parameters.execution_mode.string_value",
    "graph_level": "optimization.graph.level",
    "execution_accelerator": "optimization.execution_accelerators.gpu_execution_accelerator.0.name",
}
BUILT, STORED = "<built>", "<stored>"  # the two types of model, as pydantic names them in error locations


class ProfileSection(BaseModel):
    """Base of every section: immutable and strictly typed; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class BuiltModel(ProfileSection):
    """A model that a builder of ``optimizer.model.builders`` writes with these ``settings``."""

    builder: PlainName
    settings: dict[str, BuilderSetting] = {}


class StoredModel(ProfileSection):
    """The model ``name`` of a Triton repository; both folders exist, at or below the profile's folder.

    ``bls_composing_models``: models that a Python model calls (an ensemble's steps are read from its config.pbtxt).
    ``batcher``: the composing model whose settings are tuned, by default the largest. ``concurrent_models`` receive
    the same load at the same time on the same device. ``variants`` of the same repository can replace the model.
    """

    repository: ExistingFolder
    name: PlainName
    bls_composing_models: NonEmpty[PlainName] | None = None
    concurrent_models: NonEmpty[PlainName] | None = None
    variants: NonEmpty[PlainName] | None = None
    batcher: PlainName | None = None

    @field_validator("name")
    @classmethod
    def _is_in_repository(cls, name: str, info: ValidationInfo) -> str:
        repository: Path | None = info.data.get("repository")
        if repository is None:  # reported as an error of ``repository``
            return name
        try:
            folders = sorted(path.name for path in repository.iterdir() if path.is_dir())
        except OSError as error:
            raise ValueError(f"{format_value(name)} cannot be looked up: {error.strerror}") from None
        if name not in folders:
            raise ValueError(f"{format_value(name)} is not a model of the repository; {suggest(name, folders[:20])}")
        resolve_inside(repository, name)
        return name


def _model_type(value: Any) -> str | None:
    """Return the type of model that the keys belong to, or None if they belong to neither or both."""
    if not isinstance(value, dict):
        return BUILT
    built, stored = "builder" in value, "repository" in value or "name" in value
    return None if built == stored else BUILT if built else STORED


Model = Annotated[
    Annotated[BuiltModel, Tag(BUILT)] | Annotated[StoredModel, Tag(STORED)],
    Discriminator(
        _model_type,
        custom_error_type="kind_of_model",
        custom_error_message="give either builder (and settings), or repository and name",
    ),
]


class SlaSection(ProfileSection):
    """Upper bounds on the latency of a request in milliseconds; None is no bound."""

    avg: LatencyBound = None
    p50: LatencyBound = None
    p90: LatencyBound = None
    p95: LatencyBound = None
    p99: LatencyBound = None

    def latency_bounds_ms(self) -> dict[str, float]:
        """Return the bounds by metric, such as ``{"p95": 20.0}``."""
        return {name: bound for name, bound in self if bound is not None}


class RequestSection(ProfileSection):
    """One request.

    ``batch_size``: samples, or a mix in the syntax of ``core.request_sizes``. ``input_data``: ``random``, ``zero``, a
    file or folder of samples, or None for the builder's own. ``shapes``: sizes of inputs with dynamic dims, without
    the batch dimension. ``ranges``: bounds of random values. The keys of both are input names, or several separated
    by commas. ``string_data`` and ``string_length`` are perf_analyzer's.
    """

    batch_size: RequestSize = 1
    input_data: InputData = None
    shapes: dict[PrintableText, DimSizes] = {}
    ranges: dict[PrintableText, ValueBounds] = {}
    string_data: PrintableText | None = None
    string_length: PositiveInt | None = None

    def options(self) -> RequestOptions:
        """Return the section as options for requests."""
        return RequestOptions(
            str(self.input_data or ""),
            tuple(f"{names}:{sizes}" for names, sizes in self.shapes.items()),
            tuple(f"{names}:{bounds}" for names, bounds in self.ranges.items()),
            self.string_data,
            self.string_length,
        )


class LoadSection(ProfileSection):
    """The range of the closed-loop load: 1 to ``max_concurrency`` requests in flight."""

    max_concurrency: PositiveInt = 256


class ModelSpaceSection(ProfileSection):
    """The choices of another model in the space, such as a step of an ensemble."""

    max_batch_size: NonEmpty[PositiveInt] | None = None
    max_queue_delay_microseconds: NonEmpty[QueueDelay] | None = None
    preferred_batch_size: NonEmpty[PreferredSizes] | None = None
    instance_group_count: NonEmpty[PositiveInt] | None = None
    config: dict[PrintableText, NonEmpty[FieldChoice]] = {}

    def fields(self) -> dict[str, tuple[FieldValue, ...]]:
        """Return the choices by parameter name or path in ModelConfig."""
        own = {name: choices for name, choices in self if name != "config" and choices}
        return {**own, **self.config}


class OnnxRuntimeSection(ProfileSection):
    """Choices of ONNX Runtime's settings, under the names of Triton's backend.

    ``execution_mode``: 0 runs operators one after another, 1 in parallel. ``graph_level``: -1 basic, 1 extended, 0
    all optimizations, 2 none. ``execution_accelerator`` (on a GPU): none, tensorrt.
    """

    intra_op_thread_count: NonEmpty[ThreadCount] | None = None
    inter_op_thread_count: NonEmpty[ThreadCount] | None = None
    execution_mode: NonEmpty[ExecutionMode] | None = None
    graph_level: NonEmpty[GraphLevel] | None = None
    execution_accelerator: NonEmpty[Accelerator] | None = None

    def fields(self) -> dict[str, tuple[FieldValue, ...]]:
        """Return the choices by path in ModelConfig."""
        fields = {ONNX_RUNTIME_PATHS[name]: choices for name, choices in self if choices}
        return {path: tuple(map(str, c)) if path.startswith("parameters.") else c for path, c in fields.items()}


class SpaceSection(ProfileSection):
    """The choices of each parameter; None is not given. ``Space`` decides which combinations are valid.

    ``max_batch_size`` 0 is a model without batch dimension. A delay of ``off`` disables dynamic batching.
    ``preferred_batch_size`` holds policies, see ``batching.parse_policy``. ``config``: choices of other fields of
    ModelConfig by their paths. ``server_cpus``: sets of CPUs for the server. ``server``: choices of the server's
    options by name. ``instance_group_gpus``: sets of GPUs for the instances. ``models``: choices of other models.
    """

    max_batch_size: NonEmpty[BatchSize] | None = None
    max_queue_delay_microseconds: NonEmpty[QueueDelay] | None = None
    preferred_batch_size: NonEmpty[PreferredSizes] | None = None
    instance_group_count: NonEmpty[PositiveInt] | None = None
    instance_group_gpus: NonEmpty[GpuList] | None = None
    server_cpus: NonEmpty[CpuList] | None = None
    server: dict[ServerOption, NonEmpty[FieldChoice]] = {}
    onnxruntime: OnnxRuntimeSection = OnnxRuntimeSection()
    config: dict[PrintableText, NonEmpty[FieldChoice]] = {}
    models: dict[PlainName, ModelSpaceSection] = {}

    def fields(self) -> dict[str, tuple[FieldValue, ...]]:
        """Return the choices of all but the four main parameters, by the keys that ``Space`` uses."""
        others = {
            f"{name}/{path}": choices
            for name, section in self.models.items()
            for path, choices in section.fields().items()
        }
        placement = {SERVER_CPUS: self.server_cpus, INSTANCE_GPUS: self.instance_group_gpus}
        placed = {path: choices for path, choices in placement.items() if choices}
        options = {f"{SERVER_OPTION_PREFIX}{name}": choices for name, choices in self.server.items()}
        return self.onnxruntime.fields() | self.config | placed | options | others


class ScoreSection(ProfileSection):
    """The quality of the outputs for labelled samples.

    ``data``: a .npz file with an array per input, samples first, and ``labels``. ``metric``: one of SCORES or a
    function; higher is better. A configuration whose score is below ``minimum`` is not recommended.
    """

    data: LabelledData
    metric: ScoreMetric
    minimum: FiniteNumber = None


class ToleranceSection(ProfileSection):
    """The allowed deviation of an output from the unbatched one; see ``measure.output_comparison.Tolerance``."""

    relative: NonNegative = None
    absolute: NonNegative = None
