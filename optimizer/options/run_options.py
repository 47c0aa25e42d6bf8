"""The options of a run as typed values, and the names that some of them take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, get_args

from objectives.sla import DEFAULT_CONFIDENCE
from optimizer.core.endpoint import DEFAULT_OUTPUT_BYTES, SharedMemory, SharedMemoryName
from optimizer.core.load_shapes import SHAPES, STEADY_DISTRIBUTIONS, is_load_shape

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
    concurrent_models: tuple[str, ...] = ()  # see optimizer.options.values.load_shares
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
    max_instance_count: int | None = None  # limit for one model
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
