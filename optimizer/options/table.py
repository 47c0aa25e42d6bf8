"""The table of options: each option of ``tune run`` is declared once.

The parser and its help, the reproduced command, the Python keywords, the options of suites and of Model Analyzer's
files, and the reference page are generated from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from objectives.metrics import LATENCY, METRICS, TTFT
from objectives.sla import metric_name
from objectives.units import parse_bytes, parse_duration_ms, parse_rate
from optimizer.core.endpoint import ProtocolName
from optimizer.core.measurement_windows import FIRST_WINDOW_MS, RATE_WINDOW_MS, STREAM_WINDOW_MS
from optimizer.core.request_sizes import parse_input_shape, parse_priorities, parse_range, parse_token_lengths
from optimizer.options import values
from optimizer.options.addresses import (
    DEFAULT_URL,
    SSL_FLAGS,
    parse_cluster_address,
    parse_metrics_address,
    redact,
    redact_header,
    server_address,
)
from optimizer.options.option import Option, ValueType
from optimizer.options.run_options import (
    LOGS,
    SEARCHERS,
    SHARED_MEMORY,
    SLA_METRICS,
    TARGETS,
    SlaMetric,
    TargetName,
    is_distribution,
    is_trace,
)

SLA, MODEL, LOAD, SERVER, SEARCH, OUTPUT = "SLA and objective", "Model", "Load", "Server", "Search", "Output"
GROUPS: Final = (SLA, MODEL, LOAD, SERVER, SEARCH, OUTPUT)  # in the order of OPTIONS


def _checked_text(parse: Callable[[str], object]) -> Callable[[str], str]:
    """Return a parser that checks the text and returns it unchanged: its meaning depends on the model."""

    def keep(text: str) -> str:
        parse(text)
        return text

    return keep


def _number(metavar: str, minimum: int, maximum: int | None = None) -> ValueType:
    return ValueType(metavar, values.whole_number(minimum, maximum), annotation="int")


def _text(metavar: str) -> ValueType:
    return ValueType(metavar, values.parse_text)


_LATENCY = ValueType("TIME", parse_duration_ms, lambda value: f"{values.format_number(value)}ms")
_BOUND = ValueType(
    "METRIC<=TIME",
    values.parse_latency_bound,
    lambda bound: f"{bound[0]}<={_LATENCY.write(bound[1])}",
)
_INTERVAL = ValueType("TIME", values.parse_interval_ms, _LATENCY.write)
_BUDGET = ValueType("TIME", values.parse_budget_seconds, lambda value: f"{values.format_number(value)}s")
_RATE = ValueType("RATE", _checked_text(lambda text: parse_rate(text, 1)))
_BYTES = ValueType("SIZE", parse_bytes, lambda value: f"{values.format_number(value)}B")
_SCORE = ValueType("SCORE", values.parse_number, values.format_number, "str | int | float")
_SHARE = ValueType(
    "SHARE", values.parse_confidence, lambda value: f"{values.format_number(100 * value)}%", "str | int | float"
)
_OBJECTIVES = ValueType("NAME[,NAME]", values.parse_objectives, ",".join)
_MODELS = ValueType("NAMES", values.parse_model_names, ",".join)
_MODELS_WITH_SHARES = ValueType("NAME[=SHARE],…", values.parse_concurrent_models, ",".join)
_CPUS = ValueType("CPUS", values.parse_usable_cpus)
_LENGTHS = ValueType(
    "LENGTHS",
    _checked_text(parse_token_lengths),
    annotation="str | int",
    is_path=True,
    move=values.move_token_lengths,
)
_FOLDER = ValueType("DIR", values.parse_path, is_path=True)
_RUN = ValueType("RUN", values.parse_path, is_path=True, move=values.move_run)


def _choice(*names: str) -> ValueType:
    """Return the type of an option with few values, of which each has a name."""
    parse = values.text_where(names.__contains__, f"choose from {', '.join(names)}")
    literal = ", ".join(f'"{name}"' for name in names)
    return ValueType(f"{{{','.join(names)}}}", parse, annotation=f"Literal[{literal}]", choices=names)


def _program(metavar: str) -> ValueType:
    """Return the type of a path, or of a plain name that is looked up on PATH."""
    return ValueType(metavar, values.parse_text, is_path=True, move=values.move_program)


def _path(metavar: str) -> ValueType:
    """Return the type of a path; a relative one is moved to another working folder."""
    return ValueType(metavar, values.parse_path, is_path=True, move=values.move_path)


def _ssl_options(protocol: ProtocolName) -> tuple[Option, ...]:
    """Return the options for the PEM files of a server that speaks ``protocol`` over TLS, as in perf_analyzer."""
    files = {"ca": "certificates that verify the server", "cert": "client certificate", "key": "client private key"}
    is_http = protocol == "http"
    return tuple(
        Option(
            flag.removeprefix("--"),
            _program("FILE"),
            f"{files[name]} (PEM file), for a --url with {protocol}s://",
            stored_as=f"tls_{name}",
            is_for=lambda options: (options.url or "").startswith(("http://", "https://")) is is_http,
            targets=("remote",),
        )
        for name, flag in SSL_FLAGS[protocol].items()
    )


_LOCAL: tuple[TargetName, ...] = ("local",)
_DOCKER: tuple[TargetName, ...] = ("docker",)
_REMOTE: tuple[TargetName, ...] = ("remote",)

# the options of the target, which `tune verify --fresh` takes too
_TARGET_DECLARATIONS: Final = (
    Option(
        "target",
        _choice(*TARGETS),
        "Server that runs the trials. embedded: installed by tune; local: a tritonserver program; "
        "docker: an image; remote: a running server",
        is_common=True,
    ),
    Option(
        "tritonserver",
        _program("PATH"),
        "the tritonserver program",
        default="the one on PATH",
        targets=_LOCAL,
        is_common=True,
    ),
    Option(
        "backend-directory",
        _program("DIR"),
        "folder of the backends",
        default="next to the program, else /opt/tritonserver/backends",
        targets=_LOCAL,
    ),
    Option(
        "server-arg",
        ValueType("ARG", values.parse_server_arg),
        "argument of tritonserver, as --server-arg=--x=y; repeatable",
        stored_as="server_args",
        repeatable=True,
        targets=("local", "docker"),
    ),
    Option(
        "url",
        ValueType("URL", _checked_text(server_address)),
        "HOST:PORT of gRPC, or a URL with grpcs://, http:// or https://",
        default=DEFAULT_URL,
        targets=_REMOTE,
        is_common=True,
    ),
    Option(
        "metrics-url",
        ValueType("HOST:PORT", parse_metrics_address),
        "address of the server's metrics, which report GPUs",
        default="host of --url, port 8002",
        targets=_REMOTE,
    ),
    Option(
        "header",
        ValueType("NAME:VALUE", values.parse_header, redact_header),
        "header of each request; $VARIABLE in its value is expanded when it is sent; repeatable",
        stored_as="headers",
        repeatable=True,
        targets=_REMOTE,
        taken_by=("python", "batch", "sweep", "resume"),
    ),
    *_ssl_options("grpc"),
    *_ssl_options("http"),
    Option(
        "docker-image",
        _text("IMAGE"),
        "image of the server, such as nvcr.io/nvidia/tritonserver:…-py3",
        targets=_DOCKER,
        is_common=True,
    ),
    Option(
        "docker-gpus",
        _text("GPUS"),
        "GPUs that the container gets (all, none, or 0,1)",
        targets=_DOCKER,
        is_common=True,
    ),
    Option(
        "docker-mount",
        ValueType("SRC:DST", values.parse_text, move=values.move_mount),
        "another folder to mount in the container; repeatable",
        stored_as="docker_mounts",
        repeatable=True,
        targets=_DOCKER,
    ),
    Option("docker-shm-size", _text("SIZE"), "size of the container's shared memory, such as 1g", targets=_DOCKER),
    Option(
        "docker-ulimit",
        _text("NAME=N"),
        "resource limit of the container, such as memlock=-1; repeatable",
        stored_as="docker_ulimits",
        repeatable=True,
        targets=_DOCKER,
    ),
    Option(
        "docker-env",
        _text("NAME[=VALUE]"),
        "environment variable of the container; NAME alone passes the value of tune, which is not stored; repeatable",
        repeatable=True,
        targets=_DOCKER,
    ),
    Option("perf-analyzer-image", _text("IMAGE"), "Docker image whose perf_analyzer is used, such as Triton's SDK"),
)


def _sla_help(metric: SlaMetric) -> str:
    details = METRICS[metric_name(metric)]
    statistic = details.statistic.replace("avg", "average")
    if details.timing is LATENCY:
        return f"Upper bound on the {statistic} latency: 20ms, 0.02s, 500us"
    name, example = ("time to first response", "200ms") if details.timing is TTFT else ("inter-token latency", "30ms")
    return f"Upper bound on the {statistic} {name} of a model that streams: {example}"


_BY_GROUP: Final[dict[str, tuple[Option, ...]]] = {
    SLA: (
        *(
            Option(
                f"sla-{metric}",
                _LATENCY,
                _sla_help(metric),
                stored_as="sla_ms",
                key=metric,
                taken_by=("python",),
                is_common=metric in ("p95", "p99"),
            )
            for metric in SLA_METRICS
        ),
        Option(
            "sla",
            _BOUND,
            "Upper bound on any percentile: 'p99.9<=30ms', 'ttft-p99.5<=200ms' (also: --sla-p99.9 30ms); repeatable",
            stored_as="sla_ms",
            other_keys=True,
            repeatable=True,
            taken_by=("python",),
        ),
        Option(
            "min-throughput",
            _RATE,
            "Lower bound on the throughput: 4000/s (inferences) or 500req/s (requests)",
            taken_by=("python", "batch"),
        ),
        Option(
            "max-memory",
            _BYTES,
            "Upper bound on the memory of the GPU, or of the server without a GPU: 4GiB",
            stored_as="max_memory_bytes",
            taken_by=("python", "batch"),
            is_common=True,
        ),
        Option(
            "max-error-rate",
            ValueType("SHARE", values.parse_error_percent, lambda value: f"{values.format_number(value)}%"),
            "Upper bound on the share of requests that fail: 0.1%; without it, a failed request is an error",
            stored_as="max_error_percent",
            taken_by=("python", "batch"),
        ),
        Option(
            "min-score",
            _SCORE,
            "Lower bound on the score on the profile's labelled data (see docs/output-check.md)",
            taken_by=("python", "batch"),
        ),
        Option(
            "confidence",
            _SHARE,
            "Confidence level of the verdict on the SLA: 99%, 99.9%",
            taken_by=("python", "batch"),
        ),
        Option(
            "no-output-check",
            None,
            "Accept outputs that differ from the baseline's",
            stored_as="output_check",
            taken_by=("python", "batch"),
        ),
        Option(
            "objective",
            _OBJECTIVES,
            f"Objectives, the most important first: {', '.join(values.OBJECTIVES)}",
            stored_as="objectives",
            from_model_analyzer=True,
            taken_by=("python", "batch"),
            is_common=True,
        ),
    ),
    MODEL: (
        Option("model-repository", _path("DIR"), "Triton model repository that contains MODEL", is_common=True),
        Option("bls-composing-models", _MODELS, "Models that MODEL, a Python model, calls, separated by commas"),
        Option(
            "concurrent-models",
            _MODELS_WITH_SHARES,
            "Models that get load at the same time, separated by commas; NAME=3 gets three times the load of MODEL",
        ),
        Option("variants", _MODELS, "Models that may be served in place of MODEL, separated by commas"),
        Option(
            "max-instance-count",
            _number("N", 1, values.MAX_INT32),
            "Largest number of instances of a model that a configuration may have",
            default="64, fewer if memory is short",
            is_common=True,
        ),
        Option("model-warmup", None, "Let the server run each batch size once before it accepts requests"),
        Option(
            "from-model-analyzer",
            _path("FILE"),
            "Model Analyzer configuration file; MODEL is one of its models",
            taken_by=("python", "sweep"),
            is_common=True,
        ),
        Option(
            "print-profile",
            None,
            "Print the Model Analyzer file as a profile.yaml and exit",
            stored_as="",
            taken_by=(),
        ),
    ),
    LOAD: (
        Option(
            "load",
            _choice("concurrency", "rate"),
            "Fixed number of requests in flight (concurrency), or requests sent at a fixed rate (rate)",
            from_model_analyzer=True,
            taken_by=("python", "batch"),
            is_common=True,
        ),
        Option(
            "request-distribution",
            ValueType("NAME", values.parse_distribution),
            "Distribution of the requests of --load rate over time: poisson, constant, or a load shape: spike, ramp, "
            "diurnal, with values such as diurnal:1.5x:10s",
            stored_as="request_times",
            is_for=lambda options: is_distribution(options.request_times),
            from_model_analyzer=True,
        ),
        Option(
            "request-intervals",
            ValueType("FILE", values.parse_intervals, is_path=True, move=values.move_request_times),
            "File of the intervals between the requests of --load rate in µs, in place of a distribution",
            stored_as="request_times",
            is_for=lambda options: not is_distribution(options.request_times) and not is_trace(options.request_times),
            from_model_analyzer=True,
        ),
        Option(
            "request-trace",
            ValueType("FILE.csv", values.parse_trace, is_path=True, move=values.move_request_times),
            "File with the time of each request of --load rate, and its samples and priority, in place of a "
            "distribution: columns time_s, batch_size, priority",
            stored_as="request_times",
            is_for=lambda options: is_trace(options.request_times),
        ),
        Option(
            "request-batch-size",
            ValueType("N", values.parse_batch_size, annotation="str | int"),
            "Samples in each request; with --load rate also a mix of sizes such as '1*9|8*1'",
            short="b",
            is_common=True,
        ),
        Option(
            "priorities",
            ValueType("SHARES", _checked_text(parse_priorities)),
            "Priorities of the requests and their shares, such as '1*20|2*80'; 1 is the highest (see docs/queues.md)",
            default="the default level of the model",
        ),
        Option(
            "sequence-length",
            ValueType("N", values.parse_batch_size, annotation="str | int"),
            "Requests in each sequence to a stateful model, or a mix of lengths such as 10..30",
            default="20",
        ),
        Option(
            "input-data",
            ValueType("DATA", values.parse_input_data, is_path=True, move=values.move_input_data),
            "random, zero, JSON file or folder of perf_analyzer, or a .npz, .npy, .csv or .parquet file",
            default="random",
            is_common=True,
        ),
        Option(
            "shape",
            ValueType("NAME:SIZES", _checked_text(parse_input_shape)),
            "Shape of an input with variable dimensions: ids:128, a mix ids:16..128 or 'ids:16*3|128*1', "
            "or the same for several inputs a,b:16..128; repeatable",
            stored_as="shapes",
            repeatable=True,
            is_common=True,
        ),
        Option(
            "input-range",
            ValueType("NAME:LOW..HIGH", _checked_text(parse_range)),
            "Range of random values, such as ids:0..30521; repeatable",
            stored_as="input_ranges",
            repeatable=True,
        ),
        Option(
            "prompt-tokens",
            _LENGTHS,
            "Tokens of a prompt of a model that streams: 128, a range 32..256, lognormal:MEDIAN:SIGMA, or a file of "
            "numbers (see docs/streaming.md)",
            default="those of the profile",
        ),
        Option(
            "output-tokens",
            _LENGTHS,
            "Tokens that a model that streams generates for a prompt, written as --prompt-tokens",
            default="those of the profile",
        ),
        Option("string-data", ValueType("TEXT", values.parse_string_data), "Value of each string tensor"),
        Option("string-length", _number("N", 1, values.MAX_STRING_LENGTH), "Length of random strings", default="128"),
        Option(
            "protocol",
            _choice("grpc", "http"),
            "Protocol of the requests",
            from_model_analyzer=True,
            is_common=True,
        ),
        Option(
            "shared-memory",
            _choice(*SHARED_MEMORY),
            "Memory through which client and server on one machine pass inputs and outputs: none (in messages), "
            "system, or cuda (of a GPU); see docs/shared-memory.md",
            from_model_analyzer=True,
        ),
        Option(
            "output-shared-memory-size",
            _BYTES,
            "Shared memory for each sample of an output of strings or of variable shape: 100KiB, 1MiB",
            stored_as="output_shared_memory_bytes",
            default="100KiB",
            from_model_analyzer=True,
        ),
        Option(
            "measurement-interval",
            _INTERVAL,
            "Length of a perf_analyzer window; a measurement has three",
            stored_as="measurement_interval_ms",
            default=f"{FIRST_WINDOW_MS}ms; {RATE_WINDOW_MS}ms at a rate; {STREAM_WINDOW_MS}ms if the model streams",
        ),
        Option("client-cpus", _CPUS, "CPUs for the load generator, such as 4-5"),
    ),
    SERVER: (
        *_TARGET_DECLARATIONS,
        Option("server-cpus", _CPUS, "CPUs for the server, such as 0-3 (see docs/running.md)"),
    ),
    SEARCH: (
        Option(
            "budget",
            _BUDGET,
            "Wall time of the run: search (60 %) and confirmation (40 %); 5m, 90s",
            stored_as="budget_seconds",
            taken_by=("python", "resume"),
            is_common=True,
        ),
        Option(
            "max-trials",
            _number("N", 1, values.MAX_INT32),
            "Number of configurations to try, including the baselines",
            default="unlimited",
            taken_by=("python", "batch", "resume"),
            is_common=True,
        ),
        Option(
            "no-confirmation",
            None,
            "End with the search: the recommendation is not measured on fresh servers, so its verdict is UNDECIDED",
            stored_as="confirmation",
            taken_by=("python",),
        ),
        Option(
            "search",
            _choice(*SEARCHERS),
            "Search method",
            default="simulated; tpe for other objectives than throughput, goodput and output-throughput",
            taken_by=("python", "batch"),
        ),
        Option("seed", _number("N", 0, values.MAX_SEED), "Seed of the random numbers", always_written=True),
        Option(
            "warm-start",
            _RUN,
            "Learn from a run, or a table of trials, of another machine",
            taken_by=("python", "batch"),
        ),
        Option(
            "resume",
            _RUN,
            "Continue this run: its folder, a model for its newest run, or latest",
            stored_as="",
            taken_by=("python", "sweep", "resume"),
            is_common=True,
        ),
        Option(
            "storage",
            ValueType("URL", values.parse_storage, redact, move=values.move_storage),
            "Optuna storage: the URL of a database, or a journal file",
            default="a file in the folder of the run",
            taken_by=("python", "batch", "resume"),
        ),
        Option(
            "study-name",
            ValueType("NAME", values.parse_study_name),
            "Share the study of this name in --storage with other workers",
            taken_by=("python",),
        ),
        Option(
            "cluster",
            ValueType("ADDRESS", parse_cluster_address),
            "Run the trials on a Ray cluster (see docs/many-machines.md): auto (that of this machine) or ray://host:port",
            taken_by=("python", "resume"),
        ),
        Option(
            "cluster-cpus",
            _number("N", 1, values.MAX_CPU_COUNT),
            "CPUs per trial; such trials use no GPU",
            default="one GPU per trial, or a whole node without GPUs",
            taken_by=("python",),
        ),
    ),
    OUTPUT: (
        Option("out", _FOLDER, "Folder of the results", taken_by=("python", "sweep", "resume"), is_common=True),
        Option(
            "json",
            None,
            "Print one JSON document on standard output",
            stored_as="",
            taken_by=("sweep", "resume"),
            is_common=True,
        ),
        Option(
            "dry-run",
            None,
            "Show the search space, the first trials and the time, and measure nothing",
            stored_as="",
            taken_by=(),
            is_common=True,
        ),
        Option(
            "verbose",
            None,
            "Print the metrics, the Pareto front, model, hardware and the extent of the search at the end too",
            short="v",
            stored_as="",
            taken_by=("resume",),
            is_common=True,
        ),
        Option(
            "no-report",
            None,
            "Write no report.html (`tune report` writes it later)",
            stored_as="",
            taken_by=("python", "resume"),
        ),
        Option(
            "log",
            _choice(*LOGS),
            "Progress on standard error: live display, plain (one line per trial) or none",
            stored_as="",
            default="live on a terminal, else plain",
            taken_by=("python", "resume"),
            is_common=True,
        ),
    ),
}
OPTIONS: Final = tuple(replace(option, group=group) for group, options in _BY_GROUP.items() for option in options)
OPTIONS_BY_NAME: Final = {option.name: option for option in OPTIONS}
SLA_OPTIONS: Final = tuple(option.name for option in OPTIONS if option.field == "sla_ms")
TARGET_OPTIONS: Final = tuple(OPTIONS_BY_NAME[option.name] for option in _TARGET_DECLARATIONS)
REQUEST_TIME_OPTIONS: Final = tuple(option.name for option in OPTIONS if option.field == "request_times")
