"""The sections of a profile as pydantic models; ``optimizer.model.profile`` reads and merges them.

The description and the example of a field are its only explanation: ``tune init`` writes them into profiles, and the
JSON Schema of profiles shows them in editors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from objectives.quantiles import PERCENTILE_RULE
from optimizer.config.batching import SEQUENCE_PREFERRED
from optimizer.config.ort_settings import is_accelerator_field
from optimizer.config.queue_policy import PRIORITY_POLICY, QUEUE_PATHS
from optimizer.core.candidate import (
    CPU_ACCELERATOR,
    INSTANCE_GPUS,
    MODEL_JSON_PREFIX,
    ORT_SETTING_PATHS,
    SERVER_CPUS,
    SERVER_OPTION_PREFIX,
    SERVER_PROCESSES,
    FieldValue,
    short_path,
)
from optimizer.core.request_sizes import SizeDistribution, TokenRequests
from optimizer.core.safe_text import format_value, resolve_inside
from optimizer.core.trial import MAX_CONCURRENCY
from optimizer.model.builders import BUILDERS
from optimizer.model.profile_types import (
    BuilderSetting,
    Choices,
    CpuList,
    DimSizes,
    ExistingFile,
    ExistingFolder,
    FieldChoice,
    FiniteNumber,
    GpuList,
    InputData,
    LatencyBound,
    ModelJsonKey,
    NameWithShare,
    NonEmpty,
    NonNegative,
    NonNegativeInt,
    PlainName,
    PositiveInt,
    PreferredSizes,
    PrintableText,
    Priorities,
    PriorityLevel,
    QueueDelay,
    RequestSize,
    ScoreMetric,
    ServerOption,
    ThreadCount,
    TokenLengths,
    ValueBounds,
    suggest,
)
from optimizer.model.requests import RequestOptions
from optimizer.options.values import parse_latency_metric

DEFAULT_DELAYS_US: Final = ("off", 0, 100, 500, 1000, 2000, 5000)
DEFAULT_PREFERRED_SIZES: Final = ("none", "max/2")
_DELAY: Final = "Time in µs that a request may wait for others to form a batch; off: no dynamic batching"
_PREFERRED: Final = "Batch sizes that the batcher prefers: none, max/2 (of max_batch_size), or sizes such as 8"
PERCENTILE_KEY: Final = r"^((ttft|itl)_)?p[5-9][0-9](\.[0-9]{1,4})?$"
# the types of model, as pydantic names them in error locations
BUILT, ONNX, STORED = "<built>", "<onnx>", "<stored>"


def _optional(description: str, example: object) -> Any:
    """Return a field that is None if the profile does not have the key."""
    return Field(default=None, description=description, examples=[example])


def _mapping(description: str, example: Mapping[object, object]) -> Any:
    """Return a field that is empty if the profile does not have the key."""
    return Field(default={}, description=description, examples=[example])


class ProfileSection(BaseModel):
    """Base of every section: immutable and strictly typed; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class BuiltModel(ProfileSection):
    """A model that a builder of ``optimizer.model.builders`` writes with these ``settings``."""

    builder: PlainName = Field(
        description="Builder of the model, which is written on this machine",
        examples=["mlp"],
        json_schema_extra={"enum": [*BUILDERS]},
    )
    settings: dict[str, BuilderSetting] = _mapping("Settings of the builder; each builder has its own", {"layers": 2})


class OnnxModel(ProfileSection):
    """An ONNX file, which exists at or below the profile's folder. Its configuration is derived from the graph."""

    onnx: ExistingFile = Field(
        description="ONNX file of the model, at or below the folder of this profile", examples=["model.onnx"]
    )


class StoredModel(ProfileSection):
    """The model ``name`` of a Triton repository; both folders exist, at or below the profile's folder.

    The steps of an ensemble are read from its config.pbtxt. ``batcher`` is by default the largest composing model.
    """

    repository: ExistingFolder = Field(
        description="Triton model repository, at or below the folder of this profile", examples=["models"]
    )
    name: PlainName = Field(description="Model of the repository that receives the requests", examples=["my_model"])
    bls_composing_models: NonEmpty[PlainName] | None = _optional(
        "Models that a Python model calls", ["tokenizer", "encoder"]
    )
    concurrent_models: NonEmpty[NameWithShare] | None = _optional(
        "Models that get load at the same time on the same device; NAME=3 gets three times the load of the model",
        ["my_other_model"],
    )
    variants: NonEmpty[PlainName] | None = _optional(
        "Models that may be served in place of the model", ["my_model_int8"]
    )
    batcher: PlainName | None = _optional(
        "Composing model that the search space is about (default: the largest)", "encoder"
    )

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


_KEYS_OF_MODELS: Final = {BUILT: {"builder"}, ONNX: {"onnx"}, STORED: {"repository", "name"}}


def model_type(value: Any) -> str | None:
    """Return the type of model that the keys belong to, or None if they belong to none or to several."""
    if not isinstance(value, dict):
        return BUILT
    types = [name for name, keys in _KEYS_OF_MODELS.items() if keys & value.keys()]
    return types[0] if len(types) == 1 else None


Model = Annotated[
    Annotated[BuiltModel, Tag(BUILT)] | Annotated[OnnxModel, Tag(ONNX)] | Annotated[StoredModel, Tag(STORED)],
    Discriminator(
        model_type,
        custom_error_type="kind_of_model",
        custom_error_message="give either builder (and settings), or onnx, or repository and name",
    ),
]


class SlaSection(ProfileSection):
    """Upper bounds in milliseconds on the times of a request; None is no bound.

    Only a model that streams its responses has a time to first response (``ttft``) and an inter-token latency
    (``itl``). Other percentiles are keys too, such as ``p99.9`` and ``ttft_p99.5``.
    """

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "patternProperties": {PERCENTILE_KEY: {"type": ["string", "integer", "number"]}},
            "additionalProperties": False,
        },
    )
    __pydantic_extra__: dict[str, LatencyBound] = Field(init=False)

    avg: LatencyBound = _optional("Upper bound on the average latency", "10ms")
    p50: LatencyBound = _optional("Upper bound on the median latency", "10ms")
    p90: LatencyBound = _optional("Upper bound on the 90th percentile of the latency", "15ms")
    p95: LatencyBound = _optional("Upper bound on the 95th percentile of the latency", "20ms")
    p99: LatencyBound = _optional("Upper bound on the 99th percentile of the latency", "50ms")
    ttft_avg: LatencyBound = _optional("Upper bound on the average time to first response", "100ms")
    ttft_p50: LatencyBound = _optional("Upper bound on the median time to first response", "100ms")
    ttft_p90: LatencyBound = _optional("Upper bound on the 90th percentile of the time to first response", "200ms")
    ttft_p95: LatencyBound = _optional("Upper bound on the 95th percentile of the time to first response", "200ms")
    ttft_p99: LatencyBound = _optional("Upper bound on the 99th percentile of the time to first response", "500ms")
    itl_avg: LatencyBound = _optional("Upper bound on the average inter-token latency", "20ms")
    itl_p50: LatencyBound = _optional("Upper bound on the median inter-token latency over requests", "20ms")
    itl_p90: LatencyBound = _optional("Upper bound on the 90th percentile of the inter-token latency", "30ms")
    itl_p95: LatencyBound = _optional("Upper bound on the 95th percentile of the inter-token latency", "30ms")
    itl_p99: LatencyBound = _optional("Upper bound on the 99th percentile of the inter-token latency", "50ms")

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_unknown_keys(cls, value: Any, read: ModelWrapValidatorHandler[SlaSection]) -> SlaSection:
        """Refuse a key that is neither a field nor a percentile, as other sections do."""
        for key in value if isinstance(value, dict) else ():
            if key not in cls.model_fields and not re.fullmatch(PERCENTILE_KEY, str(key)):
                is_percentile = re.fullmatch(r"((ttft|itl)_)?p(0|[1-9][0-9]*)(\.[0-9]*)?", str(key))
                kind = PydanticCustomError("percentile", PERCENTILE_RULE) if is_percentile else "extra_forbidden"
                fault = InitErrorDetails(type=kind, loc=(str(key),), input=value[key])
                raise ValidationError.from_exception_data(cls.__name__, [fault])
        return read(value)

    def latency_bounds_ms(self) -> dict[str, float]:
        """Return the bounds by metric, such as ``{"p95": 20.0, "ttft-p95": 200.0}``."""
        bounds = ((name.replace("_", "-"), bound) for name, bound in self if bound is not None)
        return {parse_latency_metric(name): bound for name, bound in bounds}


class RequestSection(ProfileSection):
    """One request. ``string_data`` and ``string_length`` are perf_analyzer's.

    Mixes of sizes have the syntax of ``core.request_sizes``. ``input_data`` None is the builder's own, else random.
    """

    batch_size: RequestSize = Field(
        default=1,
        description="Samples in a request; with --load rate also a mix of sizes such as 1*9|8*1",
        examples=[1],
    )
    priorities: Priorities | None = _optional(
        "Priorities of the requests and their shares; 1 is the highest (default: the default level of the model)",
        {1: 0.2, 2: 0.8},
    )
    sequence_length: RequestSize | None = _optional(
        "Requests in a sequence to a stateful model, or a mix of lengths such as 10..30 (default: 20)", 20
    )
    input_data: InputData = _optional(
        "Values of the inputs: random, zero, or a file or folder of samples (default: random)", "requests.json"
    )
    shapes: dict[PrintableText, DimSizes] = _mapping(
        "Sizes of inputs with variable dims, without the batch dimension: [128], or a mix as 16..128",
        {"input_ids": [128]},
    )
    ranges: dict[PrintableText, ValueBounds] = _mapping(
        "Bounds of random values, inclusive (default: the whole type for integers)", {"input_ids": [0, 30521]}
    )
    string_data: PrintableText | None = _optional("Value of each string", "a text to classify")
    string_length: PositiveInt | None = _optional("Characters of a random string (default: 128)", 128)

    def options(self) -> RequestOptions:
        """Return the section as options for requests."""
        return RequestOptions(
            str(self.input_data or ""),
            tuple(f"{names}:{sizes}" for names, sizes in self.shapes.items()),
            tuple(f"{names}:{bounds}" for names, bounds in self.ranges.items()),
            self.string_data,
            self.string_length,
        )


class TokensSection(ProfileSection):
    """The prompts and outputs of a model that streams. Lengths have the syntax of ``core.request_sizes``."""

    prompt: TokenLengths = _optional(
        "Tokens of a prompt: 128, a range 16..64, lognormal:MEDIAN:SIGMA, or a file of numbers", "16..64"
    )
    output: TokenLengths = _optional("Tokens that are generated for a prompt, written as those of a prompt", 32)
    prompt_input: PrintableText | None = _optional(
        "Input with the tokens of the prompt; strings get as many words", "INPUT_IDS"
    )
    output_input: PrintableText | None = _optional("Input with the number of tokens to generate", "MAX_TOKENS")
    output_text: PrintableText | None = _optional(
        "Text of an output_input of strings, with {tokens} for the number",
        '{"max_tokens": {tokens}, "ignore_eos": true}',
    )
    length_input: PrintableText | None = _optional(
        "Input with the number of tokens of the prompt (default: none)", "LENGTH"
    )
    output_tensor: PrintableText | None = _optional(
        "Output whose elements are the generated tokens (default: each response is one token)", "OUTPUT_ID"
    )
    maximum: PositiveInt | None = _optional(
        "Largest number of tokens of a prompt and its output together (default: unknown)", 512
    )

    def requests(
        self, prompt: SizeDistribution | None = None, output: SizeDistribution | None = None
    ) -> TokenRequests | None:
        """Return the generated requests, with the given lengths in place of the section's.

        None if one of the lengths or inputs is missing. Raises ValueError if they may be longer than ``maximum``.
        """
        prompt, output = prompt or self.prompt, output or self.output
        if not (prompt and output and self.prompt_input and self.output_input):
            return None
        requests = TokenRequests(
            prompt,
            output,
            self.prompt_input,
            self.output_input,
            self.maximum,
            self.length_input or "",
            self.output_text or "",
        )
        requests.check()
        return requests


class LoadSection(ProfileSection):
    """The range of the closed-loop load: 1 to ``max_concurrency`` requests in flight."""

    max_concurrency: int = Field(
        default=256,
        ge=1,
        le=MAX_CONCURRENCY,
        description=f"Largest number of requests in flight that is tried, at most {MAX_CONCURRENCY}",
        examples=[64],
    )


class ModelSpaceSection(ProfileSection):
    """The choices of another model in the space, such as a step of an ensemble."""

    max_batch_size: Choices[PositiveInt] = _optional("Largest batch in samples", [1, 8])
    max_queue_delay_microseconds: Choices[QueueDelay] = _optional(_DELAY, ["off", 0, 500])
    preferred_batch_size: Choices[PreferredSizes] = _optional(_PREFERRED, ["none", "max/2"])
    instance_group_count: Choices[PositiveInt] = _optional("Instances of the model", [1, 2])
    config: dict[PrintableText, NonEmpty[FieldChoice]] = _mapping(
        "Any other field of its config.pbtxt, by its path", {"optimization.graph.level": [0, 1]}
    )

    def fields(self) -> dict[str, tuple[FieldValue, ...]]:
        """Return the choices by parameter name or path in ModelConfig."""
        settings = {name: choices for name, choices in self if name != "config" and choices}
        return {**settings, **self.config}


class OnnxRuntimeSection(ProfileSection):
    """Choices of ONNX Runtime's settings, under the names of Triton's backend."""

    intra_op_thread_count: Choices[ThreadCount] = _optional(
        "Threads of one operator, for each instance "
        "(default: every core; searched if a profile without space is served on a CPU)",
        [1, 2],
    )
    inter_op_thread_count: Choices[ThreadCount] = _optional("Operators at a time if execution_mode is 1", [1, 2])
    execution_mode: Choices[Literal[0, 1]] = _optional(
        "0: one operator after another, 1: operators in parallel", [0, 1]
    )
    allow_spinning: Choices[bool] = _optional(
        "Whether idle threads wait in a busy loop (default: true); only the embedded server reads it", [True, False]
    )
    graph_level: Choices[Literal[-1, 0, 1, 2]] = _optional(
        "Graph optimizations: -1 basic, 1 extended, 0 all (the default), 2 none", [0, 1]
    )
    execution_accelerator: Choices[Literal["none", "openvino", "tensorrt"]] = _optional(
        "Accelerator: none, openvino on a CPU, tensorrt on a GPU", ["none", "openvino"]
    )
    precision_mode: Choices[Literal["FP32", "FP16", "BF16"]] = _optional(
        "Precision in which tensorrt computes (default: FP32)", ["FP32", "FP16"]
    )
    cuda_graphs: Choices[bool] = _optional(
        "Whether tensorrt launches its kernels as a CUDA graph (default: false)", [False, True]
    )

    @field_validator("execution_accelerator")
    @classmethod
    def _check_device(cls, choices: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if choices and {"openvino", "tensorrt"}.issubset(choices):
            raise ValueError("openvino computes on a CPU and tensorrt on a GPU; name one of them")
        return choices

    def fields(self) -> dict[str, tuple[FieldValue, ...]]:
        """Return the choices by path in ModelConfig."""
        paths = dict(ORT_SETTING_PATHS)
        if "openvino" in (self.execution_accelerator or ()):
            paths["execution_accelerator"] = f"{CPU_ACCELERATOR}.name"
        fields = {paths[name]: choices for name, choices in self if choices}
        return {path: tuple(map(_text, c)) if ".graph." not in path else c for path, c in fields.items()}


def _text(choice: object) -> str:
    """Return the text of a parameter: Triton's backend reads 1 and 0 for true and false."""
    return str(int(choice)) if isinstance(choice, bool) else str(choice)


class QueuePolicySection(ProfileSection):
    """The choices of the queue of one priority level, in place of those of the default queue."""

    max_queue_size: Choices[NonNegativeInt] = _optional("Requests of this level that may wait; 0: no limit", [0, 16])
    default_timeout_microseconds: Choices[NonNegativeInt] = _optional(
        "Time in µs that a request of this level may wait; 0: any", [0, 20000]
    )
    timeout_action: Choices[Literal["REJECT", "DELAY"]] = _optional(
        "Action for a request that has waited for longer", ["REJECT"]
    )
    allow_timeout_override: Choices[bool] = _optional("Whether a request may set a shorter timeout", [False])


class SpaceSection(ProfileSection):
    """The choices of each parameter; None is not given. ``SearchSpace`` decides which combinations are valid."""

    max_batch_size: Choices[NonNegativeInt] = _optional(
        "Largest batch in samples; [0] for a model without batch dimension "
        "(default: powers of two up to that of the model)",
        [1, 2, 4, 8, 16],
    )
    max_queue_delay_microseconds: Choices[QueueDelay] = _optional(
        f"{_DELAY} (default: {', '.join(map(str, DEFAULT_DELAYS_US))})", ["off", 0, 500, 2000]
    )
    preferred_batch_size: Choices[PreferredSizes] = _optional(
        f"{_PREFERRED} (default: {', '.join(DEFAULT_PREFERRED_SIZES)})", ["none", "max/2"]
    )
    instance_group_count: Choices[PositiveInt] = _optional(
        "Instances of the model, on each of its GPUs "
        "(default: 1 to 4; on fewer than 4 CPUs up to that number, but at least 2)",
        [1, 2],
    )
    instance_group_gpus: Choices[GpuList] = _optional("Sets of GPUs that the instances are placed on", [[0], [0, 1]])
    server_cpus: Choices[CpuList] = _optional("Sets of CPUs that the server runs on", ["0-3", "0-7"])
    server_processes: Choices[PositiveInt] = _optional(
        "Numbers of servers with the same configuration that share the load and the device", [1, 2]
    )
    server: dict[ServerOption, NonEmpty[FieldChoice]] = _mapping(
        "Options of tritonserver, by name without dashes", {"rate-limit": ["off", "execution_count"]}
    )
    model_json: dict[ModelJsonKey, NonEmpty[FieldChoice]] = _mapping(
        "Keys of model.json in the version folder of the model, which Triton's vLLM backend reads",
        {"max_num_seqs": [64, 128, 256]},
    )
    max_queue_size: Choices[NonNegativeInt] = _optional(
        "Requests that may wait in the batcher's queue, which rejects others; 0: no limit", [0, 16, 64]
    )
    default_timeout_microseconds: Choices[NonNegativeInt] = _optional(
        "Time in µs that a request may wait in the batcher's queue; 0: any", [0, 20000]
    )
    timeout_action: Choices[Literal["REJECT", "DELAY"]] = _optional(
        "Action for a request that has waited for longer: REJECT, or DELAY behind all others", ["REJECT", "DELAY"]
    )
    allow_timeout_override: Choices[bool] = _optional("Whether a request may set a shorter timeout", [False])
    priority_levels: Choices[NonNegativeInt] = _optional(
        "Levels of priority, each with a queue of its own; 0: none", [0, 2]
    )
    default_priority_level: Choices[PositiveInt] = _optional(
        "Level of a request without a priority; 1 is the highest", [2]
    )
    priority_queue_policy: dict[PriorityLevel, QueuePolicySection] = _mapping(
        "Queues of single levels, in place of the settings above, by level",
        {2: {"default_timeout_microseconds": [20000]}},
    )
    onnxruntime: OnnxRuntimeSection = Field(
        default=OnnxRuntimeSection(), description="Settings of ONNX Runtime, under the names of Triton's backend"
    )
    config: dict[PrintableText, NonEmpty[FieldChoice]] = _mapping(
        "Any other field of config.pbtxt, by its path", {"dynamic_batching.preserve_ordering": [True, False]}
    )
    models: dict[PlainName, ModelSpaceSection] = _mapping(
        "Choices of other models that are served with it, such as steps of an ensemble, by model "
        "(default: instance counts and queue delays of each)",
        {"tokenizer": {"instance_group_count": [1, 2]}},
    )

    def fields(self) -> dict[str, tuple[FieldValue, ...]]:
        """Return the choices of all but the four main parameters, by the keys that ``SearchSpace`` uses."""
        other_models = {
            f"{name}/{path}": choices
            for name, section in self.models.items()
            for path, choices in section.fields().items()
        }
        placement = {
            SERVER_CPUS: self.server_cpus,
            SERVER_PROCESSES: self.server_processes,
            INSTANCE_GPUS: self.instance_group_gpus,
        }
        placed = {path: choices for path, choices in placement.items() if choices}
        options = {f"{SERVER_OPTION_PREFIX}{name}": choices for name, choices in self.server.items()}
        file = {f"{MODEL_JSON_PREFIX}{key}": choices for key, choices in self.model_json.items()}
        return self.onnxruntime.fields() | self._queue_fields() | self.config | placed | options | file | other_models

    def _queue_fields(self) -> dict[str, tuple[FieldValue, ...]]:
        """Return the choices of the batcher's queue by path in ModelConfig."""
        choices_by_path = {path: getattr(self, name) for name, path in QUEUE_PATHS.items()}
        for level, section in self.priority_queue_policy.items():
            choices_by_path |= {f"{PRIORITY_POLICY}.{level}.{name}": choices for name, choices in section}
        return {path: choices for path, choices in choices_by_path.items() if choices}


_KEYS_OF_PARAMETERS: Final = {  # of SearchSpace
    "max_batch_size": "max_batch_size",
    "max_queue_delay_us": "max_queue_delay_microseconds",
    "preferred_batch_sizes": "preferred_batch_size",
    SEQUENCE_PREFERRED: "preferred_batch_size",
    "instance_count": "instance_group_count",
    SERVER_CPUS: "server_cpus",
    SERVER_PROCESSES: "server_processes",
    INSTANCE_GPUS: "instance_group_gpus",
    **{path: name for name, path in QUEUE_PATHS.items()},
}


def keys_of_parameter(name: str) -> tuple[str, ...]:
    """Return the keys below ``space`` that lead to the choices of a parameter of SearchSpace; empty without any."""
    if name.startswith(SERVER_OPTION_PREFIX):
        return "server", name.removeprefix(SERVER_OPTION_PREFIX)
    if name.startswith(MODEL_JSON_PREFIX):
        return "model_json", name.removeprefix(MODEL_JSON_PREFIX)
    if name.startswith(f"{PRIORITY_POLICY}."):
        return "priority_queue_policy", *name.removeprefix(f"{PRIORITY_POLICY}.").split(".")
    if is_accelerator_field(name) or name in ORT_SETTING_PATHS.values():
        return "onnxruntime", short_path(name)
    return (_KEYS_OF_PARAMETERS[name],) if name in _KEYS_OF_PARAMETERS else ()


class ScoreSection(ProfileSection):
    """The quality of the outputs for labelled samples.

    A configuration whose score is below ``minimum`` is not recommended.
    """

    data: ExistingFile = Field(
        description="An .npz file with an array for each input, samples first, and labels", examples=["labelled.npz"]
    )
    metric: ScoreMetric = Field(
        description="accuracy, auc, or a Python function such as accuracy.py:score; higher is better",
        examples=["accuracy"],
    )
    minimum: FiniteNumber = _optional("Lower bound on the score of a recommended configuration", 0.9)


class ToleranceSection(ProfileSection):
    """The allowed deviation of an output from the unbatched one; see ``measure.output_comparison.Tolerance``."""

    relative: NonNegative = _optional(
        "Allowed difference of an output, relative to its value (default: by its type)", 0.01
    )
    absolute: NonNegative = _optional(
        "Allowed difference in addition (default: relative times the mean magnitude)", 0.001
    )
