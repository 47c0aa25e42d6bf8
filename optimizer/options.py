"""What the user asked for, parsed: the command line's values as frozen types."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from objectives.sla import CONFIDENCE

SLA_METRICS = ("avg", "p50", "p90", "p95", "p99")
THROUGHPUT = ("throughput",)
Target: TypeAlias = Literal["embedded", "local", "docker", "remote"]


def default_search(objectives: tuple[str, ...]) -> str:
    """The search method where none is asked for: the simulation ranks by throughput alone."""
    return "simulated" if objectives == THROUGHPUT else "tpe"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of ``tune run``. Durations in ms, budget in seconds, memory in bytes; None is not given.

    All that decides what is measured is here and in ``run.json``, so that ``--resume`` starts from the same.
    """

    model: str
    sla_ms: dict[str, float] = field(default_factory=dict)  # by "p95"
    model_repository: str | None = None
    bls_composing_models: tuple[str, ...] = ()
    concurrent_models: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    model_warmup: bool = False
    from_model_analyzer: str | None = None  # its file; what follows from that is among the other options too
    target: Target = "embedded"
    tritonserver: str | None = None  # these are by target: see arguments.target
    backend_directory: str | None = None
    server_args: tuple[str, ...] = ()
    url: str | None = None
    metrics_url: str | None = None
    headers: tuple[str, ...] = ()  # NAME:VALUE as given; see optimizer.headers
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    docker_image: str | None = None
    docker_gpus: str | None = None
    docker_mounts: tuple[str, ...] = ()
    docker_shm_size: str | None = None
    docker_ulimits: tuple[str, ...] = ()
    perf_analyzer_image: str | None = None
    objectives: tuple[str, ...] = THROUGHPUT
    min_throughput: str | None = None
    max_memory_bytes: float | None = None
    min_score: float | None = None
    confidence: float = CONFIDENCE
    output_check: bool = True
    budget_seconds: float = 240.0
    max_trials: int | None = None
    search: str = default_search(THROUGHPUT)
    seed: int = 0
    warm_start: str | None = None  # a run or a table of another machine
    protocol: Literal["grpc", "http"] = "grpc"
    measurement_interval_ms: float | None = None  # of each of three windows
    request_batch_size: int | str | None = None  # a mix: see requests.sizes
    input_data: str | None = None  # random, zero, or a file or folder of samples
    shapes: tuple[str, ...] = ()  # see requests.sizes, as are ranges
    ranges: tuple[str, ...] = ()
    string_data: str | None = None
    string_length: int | None = None
    load: Literal["concurrency", "rate"] = "concurrency"
    arrivals: str = "poisson"  # or constant, or a file; of the rate
    server_cpus: str | None = None  # such as 0-3
    client_cpus: str | None = None
    storage: str | None = None
    join: str | None = None  # a study in that storage, which other workers share
    out: str = "results"
