"""Every key of Model Analyzer 1.58 and how it is imported; ``docs/reference-model-analyzer.md`` shows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from objectives.metrics import ITL, METRICS, STATISTICS, TTFT

Support: TypeAlias = Literal["mapped", "ignored", "unsupported"]


@dataclass(frozen=True, slots=True)
class KeySupport:
    """How a key is imported. Its text completes a sentence that begins with the key."""

    support: Support
    description: str

    def __str__(self) -> str:
        words = {"mapped": "mapped to", "ignored": "ignored:", "unsupported": "not supported:"}
        return f"{words[self.support]} {self.description}"


KeyTable: TypeAlias = dict[str, KeySupport]
NESTED_KEYS = KeySupport("mapped", "its keys, each with a table below")


def _mapped(description: str, *names: str) -> KeyTable:
    return dict.fromkeys(names, KeySupport("mapped", description))


def ignored(reason: str) -> KeySupport:
    """Return the support of a key that has no effect."""
    return KeySupport("ignored", reason)


def unsupported(advice: str) -> KeySupport:
    """Return the support of a key that cannot be imported; ``advice`` says what to use instead, if anything."""
    return KeySupport("unsupported", advice)


def _ignored(reason: str, *names: str) -> KeyTable:
    return dict.fromkeys(names, ignored(reason))


def _unsupported(advice: str, *names: str) -> KeyTable:
    return dict.fromkeys(names, unsupported(advice))


# constraint or objective of Model Analyzer -> statistic of the latency; perf_latency is an older name
LATENCIES = {
    "perf_latency_avg": "avg",
    "perf_latency_p90": "p90",
    "perf_latency_p95": "p95",
    "perf_latency_p99": "p99",
    "perf_latency": "p99",
}
_TOKEN_TIMINGS = {"inter_token_latency": ITL, "time_to_first_token": TTFT}
TOKEN_LATENCIES = {  # constraint or objective of Model Analyzer -> tune's metric
    f"{name}_{statistic}": METRICS[timing.metric(statistic)]
    for name, timing in _TOKEN_TIMINGS.items()
    for statistic in STATISTICS
}
_NO_STATISTIC = _unsupported(
    f"use one of {', '.join(STATISTICS)}",
    *(f"{name}_{statistic}" for name in _TOKEN_TIMINGS for statistic in ("max", "min", "p25", "p75")),
)

FILE: KeyTable = {
    **_mapped("`--model-repository` (in the current folder or in the folder of the file)", "model_repository"),
    **_mapped("MODEL, one of them", "profile_models"),
    **dict.fromkeys(("constraints", "objectives", "perf_analyzer_flags"), NESTED_KEYS),
    **_mapped("the bound `sla.p99`, in place of the constraint perf_latency_p99", "latency_budget"),
    **_mapped("`--min-throughput`, in place of the constraint perf_throughput", "min_throughput"),
    **_mapped("`request.batch_size`", "batch_sizes"),
    **_mapped(
        "`load.max_concurrency`, the largest; tune searches up to it for the load that meets the SLA", "concurrency"
    ),
    **_mapped(
        "`--load rate`: tune searches for the highest rate that meets the SLA",
        *("request_rate", "request_rate_search_enable"),
        *("run_config_search_min_request_rate", "run_config_search_max_request_rate"),
    ),
    **_mapped("`load.max_concurrency`", "run_config_search_max_concurrency"),
    **_ignored("tune searches for the load from 1 request in flight", "run_config_search_min_concurrency"),
    **_mapped(
        "`space.max_batch_size`, doubled from the minimum (default 1) to the maximum (default 128)",
        *("run_config_search_min_model_batch_size", "run_config_search_max_model_batch_size"),
    ),
    **_mapped(
        "`space.instance_group_count`, each from the minimum (default 1) to the maximum (default 5)",
        *("run_config_search_min_instance_count", "run_config_search_max_instance_count"),
    ),
    **_mapped("a space of the listed fields; all others stay as in config.pbtxt", "run_config_search_disable"),
    **_ignored(
        "tune has its own search; `--search grid` measures every configuration, `--search tpe` is Optuna's",
        *("run_config_search_mode", "run_config_search_max_binary_search_steps", "early_exit_enable"),
        *("min_percentage_of_search_space", "max_percentage_of_search_space", "optuna_min_trials"),
        *("optuna_early_exit_threshold", "use_concurrency_formula", "concurrency_sweep_disable"),
    ),
    **_mapped("`--max-trials`", "optuna_max_trials"),
    **_mapped("`--protocol`", "client_protocol"),
    **_mapped(
        "`model.concurrent_models`: MODEL (or the first) with the others under load",
        "run_config_profile_models_concurrently_enable",
    ),
    **_unsupported(
        "all models count alike in the objective; in a profile `model.concurrent_models: [NAME=3]` gives one of them "
        "three times the load",
        "weighting",
    ),
    **_mapped("`model.bls_composing_models`; the choices of each model to `space.models`", "bls_composing_models"),
    **_mapped(
        "`space.models`: the choices of each step; the steps are read from config.pbtxt", "ensemble_composing_models"
    ),
    **_mapped("`space.models`: instance_group.0.kind KIND_CPU of each model", "cpu_only_composing_models"),
    **_ignored("config.pbtxt says whether a model streams", "model_type"),
    **_unsupported(
        "give the lengths with --prompt-tokens and --output-tokens, or as `tokens` of a profile", "genai_perf_flags"
    ),
    **_unsupported(
        "give them with --server-arg (--target local or docker); choices go under `space.server`",
        "triton_server_flags",
    ),
    **_unsupported(
        "give them with --docker-env (--target docker), or set them where `tune` is started: an embedded or local "
        "server inherits them",
        "triton_server_environment",
    ),
    **_ignored(
        "trials run on tune's own server, or on the --target: local, docker, remote",
        *("triton_launch_mode", "triton_server_path", "triton_install_path", "triton_http_endpoint"),
        *("triton_grpc_endpoint", "triton_metrics_url", "reload_model_disable", "client_max_retries"),
        *("triton_docker_image", "triton_docker_mounts", "triton_docker_labels", "triton_docker_shm_size"),
        "triton_docker_args",
    ),
    **_ignored("tune uses the visible GPUs; CUDA_VISIBLE_DEVICES chooses others", "gpus"),
    **_ignored(
        "tune always records memory, utilization and power",
        *("monitoring_interval", "duration_seconds", "collect_cpu_metrics", "always_report_gpu_metrics"),
        "dcgm_disable",
    ),
    **_ignored(
        "tune uses its own perf_analyzer and keeps its output in the run's logs",
        *("perf_analyzer_path", "perf_analyzer_timeout", "perf_analyzer_cpu_util"),
        *("perf_analyzer_max_auto_adjusts", "perf_output", "perf_output_path", "triton_output_path"),
    ),
    **_ignored("results go to `--out`; `--resume` continues a run", "export_path", "checkpoint_directory"),
    **_ignored(
        "no repository is written; the recommendation is best/config.pbtxt in the run folder",
        *("output_model_repository_path", "override_output_model_repository"),
    ),
    **_ignored(
        "every run has report.html, trials.csv and pareto.csv with all measurements",
        *("skip_summary_reports", "skip_detailed_reports", "num_configs_per_model", "num_top_model_configs"),
        *("filename_model_inference", "filename_model_gpu", "filename_server_only", "inference_output_fields"),
        *("gpu_output_fields", "server_output_fields", "plots", "report_model_configs", "output_formats"),
    ),
    **_ignored("this is the file", "config_file"),
}

MODEL: KeyTable = {
    **dict.fromkeys(
        ("parameters", "constraints", "objectives", "model_config_parameters", "perf_analyzer_flags"), NESTED_KEYS
    ),
    **_mapped("`space.config`: instance_group.0.kind KIND_CPU", "cpu_only"),
    **{
        name: FILE[name]
        for name in (
            *("weighting", "genai_perf_flags", "triton_server_flags", "triton_server_environment"),
            "triton_docker_args",
        )
    },
}

COMPOSING_MODEL: KeyTable = {  # keys of a model in bls_composing_models or ensemble_composing_models
    **_unsupported("only the choices of a composing model are imported", *MODEL),
    **{name: MODEL[name] for name in ("model_config_parameters", "cpu_only")},
}

PARAMETERS: KeyTable = {name: FILE[name] for name in ("batch_sizes", "concurrency", "request_rate")}

CONSTRAINTS: KeyTable = {
    **_mapped("`--min-throughput`", "perf_throughput"),
    **{name: KeySupport("mapped", f"the bound `sla.{statistic}`") for name, statistic in LATENCIES.items()},
    **_mapped("`--max-memory`: of the GPU if there is one, else of the server", "gpu_used_memory"),
    **{
        name: KeySupport("mapped", f"the bound `sla.{metric.name.replace('-', '_')}`")
        for name, metric in TOKEN_LATENCIES.items()
    },
    **_NO_STATISTIC,
    **_unsupported("use perf_throughput, the requests per second", "output_token_throughput"),
}

OBJECTIVES: KeyTable = {
    **_mapped("`--objective throughput`", "perf_throughput"),
    **{name: KeySupport("mapped", f"`--objective latency-{statistic}`") for name, statistic in LATENCIES.items()},
    **_mapped(
        "`--objective memory`: of the GPU if there is one, else of the server", "gpu_used_memory", "cpu_used_ram"
    ),
    **_unsupported(
        "use `--objective memory`, the memory in use",
        *("gpu_free_memory", "gpu_total_memory", "cpu_available_ram", "cpu_free_ram"),
    ),
    **_unsupported("use `--objective energy`, per 1000 inferences", "gpu_power_usage"),
    **_unsupported("use `--objective throughput`", "gpu_utilization"),
    **_unsupported(
        "use a latency; its parts are in trials.csv",
        *("perf_client_response_wait", "perf_client_send_recv", "perf_server_queue", "perf_server_compute_input"),
        *("perf_server_compute_infer", "perf_server_compute_output"),
    ),
    **_mapped("`--objective output-throughput`", "output_token_throughput"),
    **{name: KeySupport("mapped", f"`--objective {metric.name}`") for name, metric in TOKEN_LATENCIES.items()},
    **_NO_STATISTIC,
}

PERF_ANALYZER_FLAGS: KeyTable = {
    **_mapped("`request.input_data`, the first of several", "input-data"),
    **_mapped("`request.shapes`", "shape"),
    **_mapped("`request.batch_size`", "batch-size"),
    **_mapped("`load.max_concurrency`, its end", "concurrency-range"),
    **_mapped("`--load rate`: tune searches for the highest rate that meets the SLA", "request-rate-range"),
    **_mapped("`--request-distribution` of `--load rate`", "request-distribution"),
    **_mapped("`--load rate --request-intervals FILE`", "request-intervals"),
    **_mapped("`--measurement-interval`", "measurement-interval"),
    **_mapped("`--protocol`", "protocol"),
    **_ignored("each measurement has avg, p50, p90, p95 and p99; constraints choose the bounded one", "percentile"),
    **_ignored(
        "a measurement is three windows, repeated once if they disagree",
        *("measurement-mode", "measurement-request-count", "stability-percentage", "max-trials"),
    ),
    **_ignored("tune chooses the load by the bounds in constraints", "binary-search", "latency-threshold"),
    **_ignored(
        "tune starts perf_analyzer with its own settings",
        *("async", "sync", "max-threads", "model-name", "url", "service-kind", "model-repository"),
        *("triton-server-directory", "latency-report-file", "verbose", "extra-verbose", "verbose-csv"),
        *("collect-metrics", "metrics-url", "metrics-interval"),
    ),
    **_unsupported(
        "give a grpcs:// or https:// --url, and the files with the options of these names (--target remote)",
        *("ssl-grpc-use-ssl", "ssl-grpc-root-certifications-file", "ssl-grpc-private-key-file"),
        *("ssl-grpc-certificate-chain-file", "ssl-https-verify-peer", "ssl-https-verify-host"),
        *("ssl-https-ca-certificates-file", "ssl-https-client-certificate-type"),
        *("ssl-https-client-certificate-file", "ssl-https-private-key-type", "ssl-https-private-key-file"),
    ),
    **_mapped("`request.string_length`", "string-length"),
    **_mapped("`request.sequence_length`", "sequence-length"),
    **_mapped("`request.string_data`", "string-data"),
    **_unsupported(
        "the concurrency is the number of sequences, and tune numbers them",
        *("num-of-sequences", "sequence-id-range"),
    ),
    **_ignored("the responses of a decoupled model are streamed in any case", "streaming"),
    **_mapped("`--shared-memory`", "shared-memory"),
    **_mapped("`--output-shared-memory-size`", "output-shared-memory-size"),
    **_unsupported("requests are sent without compression", "grpc-compression-algorithm"),
    **_unsupported("give it with --header (--target remote)", "http-header"),
    **_unsupported("version_policy in config.pbtxt selects the version", "model-version"),
    **_unsupported("the server is Triton", "model-signature-name"),
    **_mapped("`model.bls_composing_models`", "bls-composing-models"),
}

MODEL_CONFIG_PARAMETERS: KeyTable = {  # fields of ModelConfig; others by their path
    **_mapped("`space.max_batch_size`", "max_batch_size"),
    **_mapped("`space.max_queue_delay_microseconds`", "dynamic_batching.max_queue_delay_microseconds"),
    **_mapped("`space.preferred_batch_size`", "dynamic_batching.preferred_batch_size"),
    **_mapped("`space.instance_group_count`", "instance_group.count"),
    **_mapped("`space.config`: instance_group.0.kind; KIND_GPU if there is one", "instance_group.kind"),
    **_mapped("`space.config`, by its path", "any other field"),
}

SECTIONS: dict[str, KeyTable] = {
    "The file": FILE,
    "A model in `profile_models`": MODEL,
    "`parameters` of a model": PARAMETERS,
    "`model_config_parameters` of a model": MODEL_CONFIG_PARAMETERS,
    "`constraints`": CONSTRAINTS,
    "`objectives`": OBJECTIVES,
    "`perf_analyzer_flags`": PERF_ANALYZER_FLAGS,
}
