"""The options of a run as typed values, and the declaration of an option: its value type, help text and users."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args

from objectives.sla import DEFAULT_CONFIDENCE
from optimizer.core.endpoint import DEFAULT_OUTPUT_BYTES, SharedMemory, SharedMemoryName
from optimizer.core.load_shapes import SHAPES, STEADY_DISTRIBUTIONS, is_load_shape
from optimizer.options.addresses import redact_header

TargetName: TypeAlias = Literal["embedded", "local", "docker", "remote"]
SearchName: TypeAlias = Literal["simulated", "tpe", "nsga2", "random", "grid", "gp"]
LatencyMetric: TypeAlias = Literal["avg", "p50", "p90", "p95", "p99"]
TtftMetric: TypeAlias = Literal["ttft-avg", "ttft-p50", "ttft-p90", "ttft-p95", "ttft-p99"]
ItlMetric: TypeAlias = Literal["itl-avg", "itl-p50", "itl-p90", "itl-p95", "itl-p99"]
SlaMetric: TypeAlias = LatencyMetric | TtftMetric | ItlMetric  # those with an option of their own
LogName: TypeAlias = Literal["live", "plain", "none"]
TARGETS: Final[tuple[TargetName, ...]] = get_args(TargetName)
PROGRAM_TARGETS: Final[tuple[TargetName, ...]] = ("embedded", "local")  # have a server program on this machine
STARTING_TARGETS: Final = (*PROGRAM_TARGETS, "docker")  # start a server, whose options may then be searched
SHARED_MEMORY: Final[tuple[SharedMemoryName, ...]] = get_args(SharedMemoryName)
SEARCHERS: Final[tuple[SearchName, ...]] = get_args(SearchName)
EXHAUSTIVE_SEARCHES: Final[tuple[SearchName, ...]] = ("grid",)  # measure every configuration, so take no warm start
LOGS: Final[tuple[LogName, ...]] = get_args(LogName)
SLA_METRICS: Final[tuple[SlaMetric, ...]] = (*get_args(LatencyMetric), *get_args(TtftMetric), *get_args(ItlMetric))
DEFAULT_OBJECTIVES = ("throughput",)
# objectives of `simulated`; lengths do not depend on the configuration, so tokens are proportional to requests
SIMULATED_OBJECTIVES = ("throughput", "goodput", "output-throughput")
DISTRIBUTIONS: Final = (*STEADY_DISTRIBUTIONS, *SHAPES)
TRACE_ENDING: Final = ".csv"
GENERATED_DATA: Final = ("random", "zero")  # values of --input-data that are no file


def is_distribution(request_times: str) -> bool:
    """Return whether ``RunOptions.request_times`` names a distribution, rather than a file."""
    return request_times in STEADY_DISTRIBUTIONS or is_load_shape(request_times)


def is_trace(request_times: str) -> bool:
    """Return whether ``RunOptions.request_times`` is a file with the time of each request, not with intervals."""
    return not is_distribution(request_times) and request_times.lower().endswith(TRACE_ENDING)


def default_search(objectives: tuple[str, ...]) -> SearchName:
    """Return the default search method for ``objectives``: `simulated` ranks by one of its objectives alone."""
    return "simulated" if len(objectives) == 1 and objectives[0] in SIMULATED_OBJECTIVES else "tpe"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of ``tune run``: durations in ms, the budget in seconds, memory in bytes; None if not set.

    Everything that decides which measurements are made is a field and is stored in ``run.json``, so ``--resume`` uses
    the same values. ``optimizer.options.table`` declares the option of each field.
    """

    model: str
    sla_ms: dict[str, float] = field(default_factory=dict)  # upper bounds of the latencies by metric
    model_repository: str | None = None
    bls_composing_models: tuple[str, ...] = ()
    concurrent_models: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    model_warmup: bool = False
    from_model_analyzer: str | None = None  # the file; the options that it sets are stored in the other fields too
    target: TargetName = "embedded"
    tritonserver: str | None = None
    backend_directory: str | None = None
    server_args: tuple[str, ...] = ()
    url: str | None = None
    metrics_url: str | None = None
    headers: tuple[str, ...] = ()  # NAME:VALUE; variables of the environment are not expanded yet
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    docker_image: str | None = None
    docker_gpus: str | None = None
    docker_mounts: tuple[str, ...] = ()
    docker_shm_size: str | None = None
    docker_ulimits: tuple[str, ...] = ()
    docker_env: tuple[str, ...] = ()  # NAME=VALUE, or NAME for the value in the environment of tune
    perf_analyzer_image: str | None = None
    objectives: tuple[str, ...] = DEFAULT_OBJECTIVES
    min_throughput: str | None = None
    max_memory_bytes: float | None = None
    max_error_percent: float | None = None
    min_score: float | None = None
    confidence: float = DEFAULT_CONFIDENCE
    output_check: bool = True
    budget_seconds: float = 180.0
    max_trials: int | None = None
    max_instance_count: int | None = None  # of one model
    confirmation: bool = True
    search: str = default_search(DEFAULT_OBJECTIVES)
    seed: int = 0
    warm_start: str | None = None  # a run, or a table of trials, of another machine
    protocol: Literal["grpc", "http"] = "grpc"
    shared_memory: SharedMemoryName = "none"
    output_shared_memory_bytes: float | None = None  # for each sample of an output of variable size
    measurement_interval_ms: float | None = None  # length of each of the three windows
    request_batch_size: int | str | None = None  # text: a mix of sizes, see optimizer.core.request_sizes
    priorities: str | None = None  # shares of priorities, see optimizer.core.request_sizes
    sequence_length: int | str | None = None  # of a stateful model; text: a mix, see optimizer.core.request_sizes
    input_data: str | None = None  # random, zero, or a file or folder of samples
    shapes: tuple[str, ...] = ()  # see optimizer.core.request_sizes
    input_ranges: tuple[str, ...] = ()  # see optimizer.core.request_sizes
    string_data: str | None = None
    string_length: int | None = None
    prompt_tokens: str | None = None  # see optimizer.core.request_sizes
    output_tokens: str | None = None
    load: Literal["concurrency", "rate"] = "concurrency"
    request_times: str = DISTRIBUTIONS[0]  # or another distribution, or a file; only with load "rate"
    server_cpus: str | None = None  # such as 0-3
    client_cpus: str | None = None
    cluster: str | None = None  # auto, or ray://host:port
    cluster_cpus: int | None = None  # per trial
    storage: str | None = None
    study_name: str | None = None  # name of a study in the storage that several workers share
    out: str = "results"

    def requested_shared_memory(self) -> SharedMemory | None:
        """Return the shared memory of the load; None without any."""
        if self.shared_memory == "none":
            return None
        return SharedMemory(self.shared_memory, round(self.output_shared_memory_bytes or DEFAULT_OUTPUT_BYTES))


DEFAULTS: Final = RunOptions("")

OptionUser: TypeAlias = Literal["python", "batch", "sweep", "resume"]
MovePath: TypeAlias = Callable[[Path, str, RunOptions], str]


@dataclass(frozen=True, slots=True)
class ValueType:
    """A type of option values.

    Attributes:
        metavar: The value's name in help texts.
        parse: Text to value. Raises ValueError with advice.
        write: Value to the text that reads as the same value. Secrets are replaced.
        annotation: The type of the Python keyword. A value that may be a path is also a ``Path``.
        is_path: Whether the value may be a path.
        move: The value as seen from another working folder, for a value that may be a path.
        choices: The allowed values if there are few.
    """

    metavar: str
    parse: Callable[[str], Any] = str
    write: Callable[[Any], str] = str
    annotation: str = "str"
    is_path: bool = False
    move: MovePath | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Option:
    """One option of ``tune run``.

    Attributes:
        name: The flag without dashes.
        type: How its value is read and written; None for a switch, which takes no value.
        help: The help text, without the targets that take it.
        taken_by: The interfaces that take it in addition to ``tune run``: ``optimizer.tune``, the entries of a suite
            of ``tune batch``, ``tune sweep``, and ``tune run --resume``.
        short: The letter of its short flag; empty if it has none.
        stored_as: The field of RunOptions: None if it has the option's name, empty for an option that only the
            command itself uses.
        key: The key in the field if that is a mapping.
        other_keys: The option gives all keys of the field that no other option has, each with its value.
        is_for: Whether this option, rather than another one with the same field, gives options their value.
        default: The default in words if it is not the default of the field.
        repeatable: It may be given several times; the field is a tuple.
        targets: The targets that take it.
        from_model_analyzer: Model Analyzer's file may set it, so the reproduced command always has it.
        always_written: The reproduced command has it even if it is the default.
        group: The heading under which help shows it.
        is_common: ``tune run --help`` shows it, and not only ``tune run --help-all``.
    """

    name: str
    type: ValueType | None
    help: str
    taken_by: tuple[OptionUser, ...] = ("python", "batch", "sweep")
    stored_as: str | None = None
    key: str = ""
    other_keys: bool = False
    is_for: Callable[[RunOptions], bool] = lambda options: True
    short: str = ""
    default: str = ""
    repeatable: bool = False
    targets: tuple[TargetName, ...] = TARGETS
    from_model_analyzer: bool = False
    always_written: bool = False
    group: str = ""
    is_common: bool = False

    @property
    def field(self) -> str:
        """The field of RunOptions; empty if it has none."""
        return self.keyword if self.stored_as is None else self.stored_as

    @property
    def flag(self) -> str:
        """The flag with its dashes."""
        return f"--{self.name}"

    @property
    def flags(self) -> tuple[str, ...]:
        """The flag, and the short one if there is one."""
        return (self.flag, f"-{self.short}") if self.short else (self.flag,)

    @property
    def keyword(self) -> str:
        """The name as an identifier."""
        return self.name.replace("-", "_")

    def help_text(self, default: str = "") -> str:
        """Return the help with the default, or with ``default`` in its place."""
        default = default or self.default
        if not default and self.type is not None and self.field and not self.key and not self.repeatable:
            value = getattr(DEFAULTS, self.field) if self.is_for(DEFAULTS) else None
            default = "" if value in (None, ()) else self.type.write(value)
        targets = "" if self.targets == TARGETS else f"{', '.join(self.targets)}: "
        return f"{targets}{self.help} (default: {default})" if default else f"{targets}{self.help}"

    @property
    def switch_value(self) -> bool:
        """The value of a switch's field if the switch is given."""
        return not self.name.startswith("no-")

    def redact(self, text: str) -> str:
        """Return the text of a value for a message, with secrets replaced."""
        return redact_header(text) if self.name == "header" else text

    def value_in(self, options: RunOptions) -> Any:
        """Return the option's value in ``options``."""
        value = getattr(options, self.field)
        if self.other_keys:
            return tuple((key, bound) for key, bound in value.items() if key not in SLA_METRICS)
        return value.get(self.key) if self.key else value
