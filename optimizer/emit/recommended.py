"""The recommendation of a finished run: its configurations, measurements and the resources of the measured server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from objectives.sla import Sla, Verdict
from optimizer.config import model_config, model_json, ort_settings
from optimizer.config.model_config_proto import ModelConfig, ModelInstanceGroup
from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import check_file_name, is_file, one_line
from optimizer.core.trial import Point
from optimizer.deploy.docker_container import ALL_GPUS, SHM_SIZE, Bind, parse_environment, parse_mount, read_gpus
from optimizer.deploy.managed_target import auto_complete_options
from optimizer.options import server_options
from optimizer.options.values import parse_cpus
from optimizer.results.finished_run import FinishedRun, how_to_finish, nothing_recommended, why_unfinished
from optimizer.results.recommendation import Outcome
from optimizer.results.verification import passed_separately
from optimizer.store.run_folder import model_files

MAX_MODELS = 100
MAX_SUMMARIES_PER_SECOND = 500  # at 30 µs a request (benchmarks/latency_quantiles.md): 1.5 % of a CPU
_BYTES = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@dataclass(frozen=True)
class Recommendation:
    """A configuration for production, and the resources of the server that was measured with it.

    Attributes:
        run: The run that recommends it.
        outcome: The outcome of the run.
        point: The recommended candidate at its load, with the measurement.
        model: The model that clients send requests to.
        configs: The configuration of each model by its name.
        arguments: The options of the measured tritonserver except repository and ports.
        separate_pass: The result of the newest separate test as text, if the run is UNDECIDED and this test was
            passed; otherwise empty.
        gpus: The number of GPUs of the measured server; 0 if it ran on another machine.
        cpus: The number of CPUs that all its processes together could use, fractional under a CPU quota; None if it
            ran on another machine.
        shared_memory_bytes: The size of /dev/shm of the measured container.
        load_seconds: The time that loading the configuration took on each server; None if it was not measured.
        files: The text of each model.json that the run changed, by path below the model repository.
        unread_settings: Settings that only tune's own backend reads.
        mounts: The folders of the measured machine in its container; empty for other targets.
        ulimits: The limits of that container, such as ``nofile=100000``.
        environment: The variables of that container by name; None for a value that was not stored.
        warms_up: Whether warm-up requests were added to ``configs``.
    """

    run: FinishedRun
    outcome: Outcome
    point: Point
    model: str
    configs: Mapping[str, ModelConfig]
    arguments: tuple[str, ...]
    separate_pass: str
    gpus: int
    cpus: float | None
    shared_memory_bytes: int
    load_seconds: float | None
    files: Mapping[str, str]
    unread_settings: tuple[str, ...]
    mounts: tuple[Bind, ...]
    ulimits: tuple[str, ...]
    environment: Mapping[str, str | None]
    warms_up: bool = False

    @property
    def sla(self) -> Sla:
        """The bounds of the run."""
        return self.run.problem.sla

    @property
    def is_undecided(self) -> bool:
        """Whether neither the run nor its newest separate test has decided that the SLA is met."""
        return self.outcome.verdict is Verdict.UNDECIDED and not self.separate_pass

    @property
    def device(self) -> str | None:
        """The name of the measured server's GPU, or else of its CPU; None if it ran on another machine."""
        if self.run.options.target == "remote":
            return None
        gpu_names = self.run.gpus if self.gpus else ()
        return gpu_names[0] if gpu_names else str(self.run.info["hardware"]["cpu"])

    @property
    def triton_version(self) -> str:
        """The version of the measured tritonserver."""
        return self.run.versions.get("tritonserver", "unknown")

    @property
    def memory_bytes(self) -> float | None:
        """The memory of the server's processes; None if it was not measured."""
        return self.point.measurement.server_memory_bytes

    @property
    def server_processes(self) -> int:
        """The number of servers that shared the device and the load; in production each is a replica."""
        return self.point.candidate.server_processes

    @property
    def measured_load(self) -> float:
        """The highest load of a server at which the SLA was met: requests in flight, or a second if ``is_rate``.

        A request rate is that of all models under load, of which this one has its part.
        """
        load = self.point.load
        own_rate = load.request_rate / (1 + sum(self.run.concurrent_models.values()))
        return (own_rate or float(load.concurrency)) / self.server_processes

    @property
    def measured_load_of_all(self) -> float:
        """The same of all models under load together: Knative counts the requests to a pod, whatever their model."""
        load, shares = self.point.load, (1.0, *self.run.concurrent_models.values())
        return (load.request_rate or float(sum(load.scaled(s).concurrency for s in shares))) / self.server_processes

    @property
    def is_rate(self) -> bool:
        return bool(self.point.load.request_rate)

    @property
    def is_streaming(self) -> bool:
        """Whether the model streams its responses."""
        return bool(self.configs[self.model].model_transaction_policy.decoupled)

    @property
    def is_stateful(self) -> bool:
        """Whether a model keeps a state for each sequence of requests."""
        return any(config.HasField("sequence_batching") for config in self.configs.values())

    @property
    def served_rate(self) -> float:
        """The requests per second of a server at the highest load that met the SLA."""
        rate = (
            self.point.load.request_rate or self.point.throughput_infer_per_sec / self.point.load.request_batch_size
        )
        return rate / self.server_processes

    @property
    def no_quantiles_reason(self) -> str:
        """Why Triton cannot export quantiles that `tune watch` compares with the bounds; empty if it can."""
        if not self.sla.latency_levels:
            return "the SLA bounds no percentile of the latency"
        if self.is_streaming:
            return "Triton does not time the whole request of a model that streams"
        is_chosen = any(argument.startswith(server_options.METRICS_CONFIG) for argument in self.arguments)
        return f"the run has its own {server_options.METRICS_CONFIG}" if is_chosen else ""

    @property
    def quantiles(self) -> tuple[str, ...]:
        """The options with which Triton exports the bounded quantiles, for `tune watch`; empty if it cannot."""
        return () if self.no_quantiles_reason else server_options.latency_quantiles(self.sla.latency_levels)

    @property
    def affordable_quantiles(self) -> tuple[str, ...]:
        """``quantiles``, or nothing if exporting them takes a noticeable share of a CPU at the measured rate."""
        rate = self.served_rate * len(self.configs)
        return self.quantiles if rate <= MAX_SUMMARIES_PER_SECOND else ()


def read_recommendation(run: FinishedRun, action: str = "emit") -> Recommendation:
    """Return what ``run`` recommends. ``action`` says in the error what cannot be done without a recommendation.

    Raises BadInputError, in one line, if the run has not ended, recommends nothing or is damaged.
    """
    point, outcome = _recommended_point(run, action)
    options = run.options
    model = point.candidate.served_model(run.problem.model)
    configs = _read_configs(run, model)
    files = _read_files(run, model, configs)
    _check_measured(run, point, configs, files)
    separate_pass = passed_separately(run.folder, point) if outcome.verdict is Verdict.UNDECIDED else ""
    try:
        return Recommendation(
            run=run,
            outcome=outcome,
            point=point,
            model=model,
            configs=configs,
            arguments=(
                *auto_complete_options(configs.values()),
                *server_options.to_arguments(point.candidate.fields),
                *options.server_args,
            ),
            separate_pass=separate_pass,
            gpus=_gpu_count(run, configs),
            cpus=_cpu_count(run, point),
            shared_memory_bytes=_parse_bytes(options.docker_shm_size or SHM_SIZE),
            load_seconds=_load_seconds(run, point),
            files=files,
            unread_settings=ort_settings.unread_settings(configs.values()) if options.target == "embedded" else (),
            mounts=tuple(map(parse_mount, options.docker_mounts)),
            ulimits=options.docker_ulimits,
            environment=parse_environment(options.docker_env),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise run.folder.no_record(error) from None


def _recommended_point(run: FinishedRun, action: str) -> tuple[Point, Outcome]:
    folder = run.folder.path
    if run.status == "left":
        raise BadInputError(
            f"{folder}: this worker left the study {run.options.study_name} before its end; give the run folder of "
            "the worker that confirmed, or join the study again"
        )
    if reason := why_unfinished(run):
        raise BadInputError(f"{folder}: {reason} and has no final recommendation; {how_to_finish(run)}")
    if run.outcome is None or run.outcome.recommended is None:
        raise nothing_recommended(run, action)
    return run.outcome.recommended, run.outcome


def _load_seconds(run: FinishedRun, point: Point) -> float | None:
    """Return the time in which a server loaded the configuration of ``point``; the servers load one after another."""
    seconds = next((trial.deploy_seconds for trial in run.trials if trial.number == point.trial), None)
    return None if seconds is None else seconds / point.candidate.server_processes


def _read_configs(run: FinishedRun, model: str) -> dict[str, ModelConfig]:
    best = run.folder.best
    single = best / "config.pbtxt"
    files = {path.parent.name: path for path in sorted(best.glob("*/config.pbtxt"))[:MAX_MODELS]}
    if is_file(single):
        files = {model: single}
    try:
        configs = {check_file_name(name): model_config.read(path) for name, path in files.items()}
    except ValueError as error:
        raise BadInputError(f"{best}: {error}") from None
    if model not in configs:
        raise BadInputError(
            f"{best}: the configuration of {one_line(model)} was deleted; "
            f"`tune --resume {run.folder.path}` writes it again"
        )
    return configs


def _read_files(run: FinishedRun, model: str, configs: Mapping[str, ModelConfig]) -> dict[str, str]:
    """Return the texts of each changed model.json, by path below the model repository."""
    best = run.folder.best
    prefix = f"{model}/" if len(configs) == 1 and is_file(best / "config.pbtxt") else ""
    return {f"{prefix}{path.relative_to(best).as_posix()}": model_json.read(path) for path in model_files(best)}


def _check_measured(
    run: FinishedRun, point: Point, configs: Mapping[str, ModelConfig], files: Mapping[str, str]
) -> None:
    """Raise BadInputError if no file in best/ has the settings of the recommended ``point``.

    The measurements would then belong to another configuration.
    """
    measured = replace(point.candidate, fields=point.candidate.config_fields)
    model_settings = point.candidate.model_json
    has_measured_config = any(not model_config.differences(measured, config) for config in configs.values())
    has_measured_settings = bool(model_settings) == bool(files) and all(
        model_settings.items() <= json.loads(text).items() for text in files.values()
    )
    if not (has_measured_config and has_measured_settings):
        raise BadInputError(
            f"{run.folder.best}: differs from the configuration that the run measured, because it was edited or "
            f"written by another version of tune; `tune --resume {run.folder.path}` writes it again"
        )


def _gpu_count(run: FinishedRun, configs: Mapping[str, ModelConfig]) -> int:
    """Return the number of GPUs of the measured server; 0 if it ran on another machine or used none."""
    options = run.options
    if options.target == "remote" or not run.info["server_uses_gpus"]:
        return 0
    if options.target == "docker":
        gpus = read_gpus(options.docker_gpus or "none")
        return len(run.info["hardware"]["gpus"]) if gpus == (ALL_GPUS,) else len(gpus)
    groups = [group for config in configs.values() for group in config.instance_group]
    is_on_cpus = groups and all(group.kind == ModelInstanceGroup.KIND_CPU for group in groups)
    return 0 if is_on_cpus else len(run.gpus)


def _cpu_count(run: FinishedRun, point: Point) -> float | None:
    """Return how many CPUs the measured server could use; None if it ran on another machine.

    A CPU quota limits the server also where the candidate chose its CPUs. Shared CPUs count as the server's.
    """
    available = run.info["server_cpus"]
    if available is None:
        return None
    chosen = point.candidate.server_cpus
    return min(float(available), len(parse_cpus(chosen))) if chosen else float(available)


def _parse_bytes(size: str) -> int:
    return int(size) if size.isdigit() else int(size[:-1]) * _BYTES[size[-1]]
