"""The sections of a profile and what each value may be. ``optimizer.profile`` reads and merges them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeGuard, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    ValidationInfo,
    field_validator,
)

from objectives.sla import Constraint, parse_duration_ms
from optimizer.batching import parse_policy
from optimizer.machine import cpus
from optimizer.profile.faults import meant
from optimizer.profile.safe_paths import inside, plain_name
from optimizer.profile.yaml_lines import show
from optimizer.trial import SERVER_CPUS, FieldValue

T = TypeVar("T")

INT32_MAX: Final = 2**31 - 1  # ModelConfig's max_batch_size, preferred_batch_size and count
MAX_TERMS: Final = 32  # of a preferred-size policy
MAX_INPUT_DATA_BYTES: Final = 1 << 30  # perf_analyzer reads all of it at each launch, some 20 MB a second
SCORES: Final = ("accuracy", "auc")  # the metrics of ``optimizer.answers.score`` that need no file
ONNX_RUNTIME: Final = {  # its settings -> their paths in ModelConfig
    "intra_op_thread_count": "parameters.intra_op_thread_count.string_value",
    "inter_op_thread_count": "parameters.inter_op_thread_count.string_value",
    "execution_mode": "parameters.execution_mode.string_value",
    "graph_level": "optimization.graph.level",
    "execution_accelerator": "optimization.execution_accelerators.gpu_execution_accelerator.0.name",
}
BUILT, STORED = "<built>", "<stored>"  # the two kinds of model, as pydantic calls them in its locations


def _whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _bound_ms(value: object) -> float:
    if not isinstance(value, str) and not _whole(value) and not isinstance(value, float):
        raise ValueError(f"{show(value)} is not a time; write one such as 20ms, 0.02s or 500us")
    try:
        return parse_duration_ms(str(value))
    except ValueError as error:
        raise ValueError(f"{show(value)}: {error}") from None


def _delay(value: object) -> int | str:
    if value is False or (isinstance(value, str) and value.lower() == "off"):
        return "off"
    if _whole(value) and 0 <= value <= INT32_MAX:
        return value
    raise ValueError(f"{show(value)} is neither a number of µs from 0 on nor off (no dynamic batching)")


def _preferred(value: object) -> str:
    terms = value if isinstance(value, tuple) else (value,)
    try:
        if value is None or not all(isinstance(term, str) or _whole(term) for term in terms):
            raise ValueError
        policy = parse_policy(value)
    except ValueError:
        right = "none, max, max/2, a size, or a list of those such as [max/2, max]"
        raise ValueError(f"{show(value)} is not a choice; write {right}") from None
    if policy.count(",") >= MAX_TERMS:
        raise ValueError(f"{show(value)} has more than {MAX_TERMS} sizes")
    return policy


def _scalar(value: object) -> FieldValue:
    if isinstance(value, str | int | float):
        return value
    raise ValueError(f"{show(value)} is not a single value (text, number, true or false)")


def _cpu_list(value: object) -> str:
    try:
        return cpus.show(cpus.parse(str(value)))
    except ValueError as error:
        raise ValueError(f"{show(value)} is no list of CPUs; {error}") from None


def _setting(value: object) -> FieldValue | None:
    return None if value is None else _scalar(value)


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{show(value)} is not text; write it in quotes")
    return plain_name(value)


def _inside(value: object, info: ValidationInfo, kind: str) -> Path:
    if not isinstance(value, str):
        raise ValueError(f"{show(value)} is not the path of a {kind}")
    # ``folder`` is where the profile lies: whoever validates gives it as context
    path = inside((info.context or {})["folder"], value)
    if not (path.is_dir() if kind == "folder" else path.is_file()):
        raise ValueError(f"{show(value)} is not a {kind}")
    return path


def _folder(value: object, info: ValidationInfo) -> Path:
    return _inside(value, info, "folder")


def _input_data(value: object, info: ValidationInfo) -> Path | str | None:
    if value is None or value == "random" or value == "zero":
        return value if isinstance(value, str) else None
    path = _inside(value, info, "file")
    if path.stat().st_size > MAX_INPUT_DATA_BYTES:
        raise ValueError(f"{show(value)} is larger than {MAX_INPUT_DATA_BYTES >> 20} MiB; write fewer samples")
    return path


def _labelled(value: object, info: ValidationInfo) -> Path:
    return _inside(value, info, "file")


def _metric(value: object, info: ValidationInfo) -> str | MetricFunction:
    if isinstance(value, str) and value in SCORES:
        return value
    file, _, function = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not file.endswith(".py") or not function.isidentifier():
        right = f"{', '.join(SCORES)}, or a file and its function such as accuracy.py:score"
        raise ValueError(f"{show(value)} is no metric; write {right}")
    return MetricFunction(_inside(file, info, "file"), function)


def _number(value: object) -> float:
    try:  # text too: YAML 1.1 takes 1e-3 for it
        number = float(value) if isinstance(value, str | float) or _whole(value) else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{show(value)} is not a number")
    return number


def _tolerated(value: object) -> float:
    if (number := _number(value)) < 0:
        raise ValueError(f"{show(value)} is not at least 0")
    return number


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"{show(text)} has control characters")
    return text


def _not_empty(values: tuple[T, ...]) -> tuple[T, ...]:
    if not values:
        raise ValueError("is empty; give at least one value")
    return values


Some = Annotated[tuple[T, ...], AfterValidator(_not_empty)]
Key = Annotated[str, AfterValidator(_printable)]
Positive = Annotated[int, Field(ge=1, le=INT32_MAX)]
Count = Annotated[int, Field(ge=1, le=4096)]
Mode = Literal[0, 1]
GraphLevel = Literal[-1, 0, 1, 2]
Accelerator = Literal["none", "tensorrt"]
BatchSize = Annotated[int, Field(ge=0, le=INT32_MAX)]
Bound = Annotated[float | None, PlainValidator(_bound_ms)]
Delay = Annotated[int | str, PlainValidator(_delay)]
Preferred = Annotated[str, PlainValidator(_preferred)]
CpuList = Annotated[str, PlainValidator(_cpu_list)]
Name = Annotated[str, PlainValidator(_name)]
Setting = Annotated[FieldValue | None, PlainValidator(_setting)]
Choice = Annotated[FieldValue, PlainValidator(_scalar)]
Number = Annotated[float | None, PlainValidator(_number)]
Tolerated = Annotated[float | None, PlainValidator(_tolerated)]
Folder = Annotated[Path, PlainValidator(_folder)]
InputData = Annotated[Path | str | None, PlainValidator(_input_data)]

LabelledData = Annotated[Path, PlainValidator(_labelled)]


class MetricFunction(NamedTuple):
    """``function`` of the Python file ``file``."""

    file: Path
    function: str


Metric = Annotated[str | MetricFunction, PlainValidator(_metric)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class BuiltModel(Section):
    """A model that a builder of ``optimizer.models`` writes; ``settings`` are that builder's."""

    builder: Name
    settings: dict[str, Setting] = {}


class StoredModel(Section):
    """The model ``name`` of a Triton repository: both are folders that exist, at or under the profile's.

    ``bls_composing_models`` are those that a model in Python calls; the steps of an ensemble are known. The space is
    about ``batcher``, one of these; by default the largest. ``variants`` are models of the same repository that can
    take its place.
    """

    repository: Folder
    name: Name
    bls_composing_models: Some[Name] | None = None
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
    """One request. ``input_data``: ``random``, ``zero``, a perf_analyzer JSON file, or None: the
    builder's own where it has any.

    ``shapes`` fixes the dynamic dims of an input, without the batch dim.
    """

    batch_size: Positive = 1
    input_data: InputData = None
    shapes: dict[Key, Some[Positive]] = {}


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
    field of ModelConfig by its proto path. ``server_cpus``: lists of the CPUs that the server runs on. ``models``:
    the same for models beside, by name.
    """

    max_batch_size: Some[BatchSize] | None = None
    max_queue_delay_microseconds: Some[Delay] | None = None
    preferred_batch_size: Some[Preferred] | None = None
    instance_group_count: Some[Positive] | None = None
    server_cpus: Some[CpuList] | None = None
    onnxruntime: OnnxRuntimeSection = OnnxRuntimeSection()
    config: dict[Key, Some[Choice]] = {}
    models: dict[Name, BesideSection] = {}

    def fields(self) -> dict[str, tuple[FieldValue, ...]]:
        """As ``Space`` takes them."""
        beside = {
            f"{name}/{path}": choices for name, one in self.models.items() for path, choices in one.fields().items()
        }
        chosen_cpus = {SERVER_CPUS: self.server_cpus} if self.server_cpus else {}
        return self.onnxruntime.fields() | self.config | chosen_cpus | beside


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
