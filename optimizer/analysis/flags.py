"""The flags of ``tune run`` as keyword arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

from optimizer.errors import BadInputError

Number = str | int | float


class Flags(TypedDict, total=False):
    """By the flags' names, as ``tune --help`` has them, with ``_`` for ``-``; one that may be repeated takes a list.

    Durations, sizes and rates are texts with a unit: ``sla_p95="20ms"``, ``max_memory="4GiB"``.
    """

    sla_avg: str
    sla_p50: str
    sla_p90: str
    sla_p95: str
    sla_p99: str
    min_throughput: str
    max_memory: str
    min_score: Number
    confidence: Number
    no_output_check: bool
    objective: str
    model_repository: str | Path
    bls_composing_models: str
    concurrent_models: str
    variants: str
    model_warmup: bool
    from_model_analyzer: str | Path
    protocol: Literal["grpc", "http"]
    load: Literal["concurrency", "rate"]
    arrivals: str | Path
    measurement_interval: str
    server_cpus: str
    client_cpus: str
    request_batch_size: Number
    input_data: str | Path
    shape: list[str]
    input_range: list[str]
    string_data: str
    string_length: int
    target: Literal["embedded", "local", "docker", "remote"]
    tritonserver: str | Path
    backend_directory: str | Path
    server_arg: list[str]
    url: str
    metrics_url: str
    header: list[str]
    tls_ca: str | Path
    tls_cert: str | Path
    tls_key: str | Path
    docker_image: str
    docker_gpus: str
    docker_mount: list[str]
    docker_shm_size: str
    docker_ulimit: list[str]
    perf_analyzer_image: str
    budget: str
    max_trials: int
    search: Literal["simulated", "tpe", "nsga2", "random", "grid", "gp"]
    seed: int
    warm_start: str | Path
    out: str | Path
    resume: str | Path
    storage: str
    join: str
    no_report: bool
    log: Literal["live", "plain", "none"]


def command_words(model: str | Path | None, flags: Mapping[str, Any]) -> list[str]:
    """The words of the command line that say the same. None is a flag that is not given.

    Raises BadInputError for a value that no flag can have.
    """
    words = [word for name, value in flags.items() for word in _words(f"--{name.replace('_', '-')}", value)]
    return words if model is None else [*words, "--", str(model)]


def _words(flag: str, value: object) -> Iterable[str]:
    if value is None or value is False:
        return
    if value is True:
        yield flag
    elif isinstance(value, (str, int, float, Path)):
        yield f"{flag}={value}"
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield f"{flag}={one}"
    else:
        raise BadInputError(f"{flag}: {type(value).__name__} is not a text, a number, True or a list of texts")
