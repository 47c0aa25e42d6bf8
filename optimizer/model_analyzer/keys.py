"""Every key that Model Analyzer 1.58 knows, and what becomes of it; ``docs/from-model-analyzer.md`` shows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Fate: TypeAlias = Literal["mapped to", "ignored:", "not supported:"]


@dataclass(frozen=True, slots=True)
class Key:
    """What becomes of a key, as a sentence goes on after its name."""

    fate: Fate
    words: str

    def __str__(self) -> str:
        return f"{self.fate} {self.words}"


Keys: TypeAlias = dict[str, Key]
KEY_BY_KEY = Key("mapped to", "what the keys in it are, each with a table below")


def _mapped(words: str, *names: str) -> Keys:
    return dict.fromkeys(names, Key("mapped to", words))


def ignored(words: str) -> Key:
    return Key("ignored:", words)


def unsupported(words: str) -> Key:
    return Key("not supported:", words)


def _ignored(words: str, *names: str) -> Keys:
    return dict.fromkeys(names, ignored(words))


def _unsupported(words: str, *names: str) -> Keys:
    return dict.fromkeys(names, unsupported(words))


_TOKENS = "tokens are not counted; a model is tuned by its requests"
_AGGREGATES = ("avg", "max", "min", "p25", "p50", "p75", "p90", "p95", "p99")
_TOKEN_LATENCIES = tuple(
    f"{name}_{kind}" for name in ("inter_token_latency", "time_to_first_token") for kind in _AGGREGATES
)

FILE: Keys = {
    **_mapped("`--model-repository` (looked for in the current folder and beside the file)", "model_repository"),
    **_mapped("MODEL, one of them", "profile_models"),
    **dict.fromkeys(("constraints", "objectives", "perf_analyzer_flags"), KEY_BY_KEY),
    **_mapped("the bound `sla.p99`, in place of the constraint perf_latency_p99", "latency_budget"),
    **_mapped("`--min-throughput`, in place of the constraint perf_throughput", "min_throughput"),
    **_mapped("`request.batch_size`", "batch_sizes"),
    **_mapped("`load.max_concurrency`, the largest: up to it loads are tried as the bound asks", "concurrency"),
    **_mapped(
        "`--load rate`: the highest rate that meets the bound is looked for",
        *("request_rate", "request_rate_search_enable"),
        *("run_config_search_min_request_rate", "run_config_search_max_request_rate"),
    ),
    **_mapped("`load.max_concurrency`", "run_config_search_max_concurrency"),
    **_ignored("loads are tried from 1 up, as the bound asks", "run_config_search_min_concurrency"),
    **_mapped(
        "`space.max_batch_size`, doubled from the least (1) to the most (128)",
        *("run_config_search_min_model_batch_size", "run_config_search_max_model_batch_size"),
    ),
    **_mapped(
        "`space.instance_group_count`, each from the least (1) to the most (5)",
        *("run_config_search_min_instance_count", "run_config_search_max_instance_count"),
    ),
    **_mapped("a space of what is listed; the rest stays as in config.pbtxt", "run_config_search_disable"),
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
    **_unsupported("each of several models counts the same", "weighting"),
    **_mapped("`model.bls_composing_models`, without what may vary of each", "bls_composing_models"),
    **_ignored("the steps of an ensemble are read from its config.pbtxt", "ensemble_composing_models"),
    **_unsupported("a kind of instances goes into the composing model's config.pbtxt", "cpu_only_composing_models"),
    **_ignored(_TOKENS, "model_type"),
    **_unsupported(_TOKENS, "genai_perf_flags"),
    **_unsupported(
        "give them with --server-arg (--target local); choices go under `space.server`", "triton_server_flags"
    ),
    **_unsupported("set them where `tune` is started: the server inherits them", "triton_server_environment"),
    **_ignored(
        "trials run on tune's own server, or where --target says: local, docker, remote",
        *("triton_launch_mode", "triton_server_path", "triton_install_path", "triton_http_endpoint"),
        *("triton_grpc_endpoint", "triton_metrics_url", "reload_model_disable", "client_max_retries"),
        *("triton_docker_image", "triton_docker_mounts", "triton_docker_labels", "triton_docker_shm_size"),
        "triton_docker_args",
    ),
    **_ignored("tune serves on the GPU that it sees; CUDA_VISIBLE_DEVICES chooses another", "gpus"),
    **_ignored(
        "tune reads memory, utilization and power by itself",
        *("monitoring_interval", "duration_seconds", "collect_cpu_metrics", "always_report_gpu_metrics"),
        "dcgm_disable",
    ),
    **_ignored(
        "tune brings its own perf_analyzer and keeps what it prints in the run's logs",
        *("perf_analyzer_path", "perf_analyzer_timeout", "perf_analyzer_cpu_util"),
        *("perf_analyzer_max_auto_adjusts", "perf_output", "perf_output_path", "triton_output_path"),
    ),
    **_ignored("results go to `--out`, and `--resume` continues them", "export_path", "checkpoint_directory"),
    **_ignored(
        "no repository is written; the run's best/config.pbtxt is the recommendation",
        *("output_model_repository_path", "override_output_model_repository"),
    ),
    **_ignored(
        "every run has report.html, trials.csv and pareto.csv, with all of it",
        *("skip_summary_reports", "skip_detailed_reports", "num_configs_per_model", "num_top_model_configs"),
        *("filename_model_inference", "filename_model_gpu", "filename_server_only", "inference_output_fields"),
        *("gpu_output_fields", "server_output_fields", "plots", "report_model_configs", "output_formats"),
    ),
    **_ignored("this is the file", "config_file"),
}

MODEL: Keys = {
    **dict.fromkeys(
        ("parameters", "constraints", "objectives", "model_config_parameters", "perf_analyzer_flags"), KEY_BY_KEY
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

PARAMETERS: Keys = {name: FILE[name] for name in ("batch_sizes", "concurrency", "request_rate")}

CONSTRAINTS: Keys = {
    **_mapped("`--min-throughput`", "perf_throughput"),
    **_mapped("the bound `sla.avg`", "perf_latency_avg"),
    **_mapped("the bound `sla.p90`", "perf_latency_p90"),
    **_mapped("the bound `sla.p95`", "perf_latency_p95"),
    **_mapped("the bound `sla.p99`", "perf_latency_p99", "perf_latency"),
    **_mapped("`--max-memory`: of the GPU where there is one, else of the server", "gpu_used_memory"),
    **_unsupported(_TOKENS, "output_token_throughput", *_TOKEN_LATENCIES),
}

OBJECTIVES: Keys = {
    **_mapped("`--objective throughput`", "perf_throughput"),
    **_mapped("`--objective latency-avg`", "perf_latency_avg"),
    **_mapped("`--objective latency-p90`", "perf_latency_p90"),
    **_mapped("`--objective latency-p95`", "perf_latency_p95"),
    **_mapped("`--objective latency-p99`", "perf_latency_p99", "perf_latency"),
    **_mapped(
        "`--objective memory`: of the GPU where there is one, else of the server", "gpu_used_memory", "cpu_used_ram"
    ),
    **_unsupported(
        "take `--objective memory`, what is used",
        *("gpu_free_memory", "gpu_total_memory", "cpu_available_ram", "cpu_free_ram"),
    ),
    **_unsupported("take `--objective energy`, of 1000 inferences", "gpu_power_usage"),
    **_unsupported("take `--objective throughput`", "gpu_utilization"),
    **_unsupported(
        "take a latency; its parts are in trials.csv",
        *("perf_client_response_wait", "perf_client_send_recv", "perf_server_queue", "perf_server_compute_input"),
        *("perf_server_compute_infer", "perf_server_compute_output"),
    ),
    **_unsupported(_TOKENS, "output_token_throughput", *_TOKEN_LATENCIES),
}

PERF_ANALYZER_FLAGS: Keys = {
    **_mapped("`request.input_data`, the first of several", "input-data"),
    **_mapped("`request.shapes`", "shape"),
    **_mapped("`request.batch_size`", "batch-size"),
    **_mapped("`load.max_concurrency`, its end", "concurrency-range"),
    **_mapped("`--load rate`: the highest rate that meets the bound is looked for", "request-rate-range"),
    **_mapped("`--arrivals` of `--load rate`", "request-distribution"),
    **_mapped("`--load rate --arrivals FILE`", "request-intervals"),
    **_mapped("`--measurement-interval`", "measurement-interval"),
    **_mapped("`--protocol`", "protocol"),
    **_ignored("each measurement has avg, p50, p90, p95 and p99; constraints say which is bounded", "percentile"),
    **_ignored(
        "a measurement is three windows, once more and twice as long where they disagree",
        *("measurement-mode", "measurement-request-count", "stability-percentage", "max-trials"),
    ),
    **_ignored("the load is tune's to choose, by the bounds in constraints", "binary-search", "latency-threshold"),
    **_ignored(
        "tune starts perf_analyzer with settings of its own",
        *("async", "sync", "max-threads", "model-name", "url", "service-kind", "model-repository"),
        *("triton-server-directory", "latency-report-file", "verbose", "extra-verbose", "verbose-csv"),
        *("collect-metrics", "metrics-url", "metrics-interval"),
    ),
    **_ignored(
        "server and load generator talk on one machine, without TLS",
        *("ssl-grpc-use-ssl", "ssl-grpc-root-certifications-file", "ssl-grpc-private-key-file"),
        *("ssl-grpc-certificate-chain-file", "ssl-https-verify-peer", "ssl-https-verify-host"),
        *("ssl-https-ca-certificates-file", "ssl-https-client-certificate-type"),
        *("ssl-https-client-certificate-file", "ssl-https-private-key-type", "ssl-https-private-key-file"),
    ),
    **_mapped("`request.string_length`", "string-length"),
    **_mapped("`request.string_data`", "string-data"),
    **_unsupported(
        "requests are independent of each other",
        *("num-of-sequences", "sequence-length", "sequence-id-range"),
    ),
    **_unsupported("each request gets one answer", "streaming"),
    **_unsupported("requests carry their data", "shared-memory", "output-shared-memory-size"),
    **_unsupported("requests are sent plain", "grpc-compression-algorithm", "http-header"),
    **_unsupported("version_policy in config.pbtxt says which version is served", "model-version"),
    **_unsupported("the server is Triton", "model-signature-name"),
    **_mapped("`model.bls_composing_models`", "bls-composing-models"),
}

MODEL_CONFIG_PARAMETERS: Keys = {  # of all the fields of ModelConfig; the others by their path
    **_mapped("`space.max_batch_size`", "max_batch_size"),
    **_mapped("`space.max_queue_delay_microseconds`", "dynamic_batching.max_queue_delay_microseconds"),
    **_mapped("`space.preferred_batch_size`", "dynamic_batching.preferred_batch_size"),
    **_mapped("`space.instance_group_count`", "instance_group.count"),
    **_mapped("`space.config`: instance_group.0.kind; KIND_GPU where there is one", "instance_group.kind"),
    **_mapped("`space.config`, by its path", "any other field"),
}

SECTIONS: dict[str, Keys] = {
    "The file": FILE,
    "A model in `profile_models`": MODEL,
    "`parameters` of a model": PARAMETERS,
    "`model_config_parameters` of a model": MODEL_CONFIG_PARAMETERS,
    "`constraints`": CONSTRAINTS,
    "`objectives`": OBJECTIVES,
    "`perf_analyzer_flags`": PERF_ANALYZER_FLAGS,
}
