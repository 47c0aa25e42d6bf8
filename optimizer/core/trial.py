"""Candidates, load points, trials and measured points: the frozen data of a study, without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from objectives.metrics import Measurement
from optimizer.core.errors import DeploymentError

FieldValue: TypeAlias = str | int | float | bool
FieldChoices: TypeAlias = Mapping[str, tuple[FieldValue, ...]]  # choices by the names in Candidate.fields
SEQUENCE_PREFIX = "sequence_batching."  # prefix of paths in ModelConfig that only a stateful model has
# names in Candidate.fields that are not paths in ModelConfig
SERVER_CPUS = "server_cpus"  # CPUs that the server runs on, as parse_cpus reads them
SERVER_PROCESSES = "server_processes"  # number of servers with this configuration that share the load and the device
SERVER_OPTION_PREFIX = "server."  # prefix of options of tritonserver, see optimizer.options.server_options
MODEL_JSON_PREFIX = "model_json."  # prefix of keys of model.json, see optimizer.config.model_json
VARIANT = "variant"  # which of several equivalent models is served
INSTANCE_GPUS = "instance_group_gpus"  # GPUs of the instances, as gpu_placement.parse reads them

CPU_ACCELERATOR, GPU_ACCELERATOR = (
    f"optimization.execution_accelerators.{device}_execution_accelerator.0" for device in ("cpu", "gpu")
)
ORT_SETTING_PATHS = {  # settings of ONNX Runtime, by their short names -> their paths in ModelConfig
    "intra_op_thread_count": "parameters.intra_op_thread_count.string_value",
    "inter_op_thread_count": "parameters.inter_op_thread_count.string_value",
    "execution_mode": "parameters.execution_mode.string_value",
    "allow_spinning": "parameters.session.intra_op.allow_spinning.string_value",
    "graph_level": "optimization.graph.level",
    "execution_accelerator": f"{GPU_ACCELERATOR}.name",
    "precision_mode": f"{GPU_ACCELERATOR}.parameters.precision_mode",
    "cuda_graphs": f"{GPU_ACCELERATOR}.parameters.trt_cuda_graph_enable",
}
PLAN_CUDA_GRAPHS = "optimization.cuda.graphs"  # read by the tensorrt backend
_SHORT_NAMES = {path: name for name, path in ORT_SETTING_PATHS.items()} | {
    f"{CPU_ACCELERATOR}.name": "execution_accelerator",
    PLAN_CUDA_GRAPHS: "cuda_graphs",
}
CROSS_CHECK_GENERATOR = "perf_analyzer"  # load generator of the measurements that check tune's own client
MAX_CONCURRENCY = 2**16  # a simulation of more requests in flight would exceed the memory
SETTING_COLUMNS = (  # the attributes of a candidate other than its fields, as columns of trials.csv
    "max_batch_size",
    "dynamic_batching",
    "max_queue_delay_us",
    "preferred_batch_sizes",
    "instance_count",
)
TrialRole: TypeAlias = Literal[  # why a trial runs
    "baseline",  # the configuration as given, which gains are relative to
    "dynamic_batching",  # the same configuration with plain `dynamic_batching {}`
    "search",  # the searcher suggests a candidate
    "repeat",  # the searcher suggests a candidate again, because deployments of one candidate differ
    "control",  # the speed of the machine has changed, so the best candidate is measured again
    "abandoned",  # the worker of a shared study that tried the candidate has died
    "resumed",  # an earlier session of the run began it
    "confirm",  # the candidate is measured on a fresh server
    "sweep",  # `tune sweep` measures the candidate
]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration of the model, in Triton's terms.

    Attributes:
        max_batch_size: Samples; 0 if the model has no batch dimension.
        dynamic_batching: Whether the dynamic batcher is on. If not, the delay is 0 and no sizes are preferred.
        max_queue_delay_us: ``max_queue_delay_microseconds`` of the dynamic batcher.
        preferred_batch_sizes: Ascending; empty if none are set.
        instance_count: Instances for each instance group, on each of its GPUs; 0 if the instance groups of a model
            that is not tuned keep their own counts.
        fields: Other settings as (name, value), sorted by name. A name is a path in ModelConfig (such as
            ``parameters.intra_op_thread_count.string_value``), ``<model>/<parameter>`` for another model that is
            served, INSTANCE_GPUS, SERVER_CPUS, SERVER_PROCESSES, VARIANT, an option of the server, or a key of
            model.json.
    """

    max_batch_size: int
    dynamic_batching: bool = False
    max_queue_delay_us: int = 0
    preferred_batch_sizes: tuple[int, ...] = ()
    instance_count: int = 1
    fields: tuple[tuple[str, FieldValue], ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        """The values of SETTING_COLUMNS and then of the fields, by name."""
        return {**{name: getattr(self, name) for name in SETTING_COLUMNS}, **dict(self.fields)}

    @property
    def config_fields(self) -> tuple[tuple[str, FieldValue], ...]:
        """The fields that change this model's config.pbtxt."""
        return tuple(field for field in self.fields if not is_server_field(field[0]) and not model_of_field(field[0]))

    @property
    def proto_fields(self) -> tuple[tuple[str, FieldValue], ...]:
        """The fields whose name is a path in ModelConfig."""
        return tuple(field for field in self.config_fields if field[0] != INSTANCE_GPUS)

    @property
    def is_stateful(self) -> bool:
        """Whether the candidate sets the sequence batcher of a stateful model."""
        return any(path.startswith(SEQUENCE_PREFIX) for path, _ in self.fields)

    @property
    def instance_gpus(self) -> str | None:
        """The GPUs of the instances, as text; None if they are those of the base configuration."""
        chosen = dict(self.fields).get(INSTANCE_GPUS)
        return None if chosen is None else str(chosen)

    @property
    def model_json(self) -> dict[str, FieldValue]:
        """The values that the candidate sets in the model's model.json, by key."""
        return {
            path.removeprefix(MODEL_JSON_PREFIX): value
            for path, value in self.fields
            if path.startswith(MODEL_JSON_PREFIX)
        }

    @property
    def instances(self) -> int:
        """The total number of instances: ``instance_count`` on each of its GPUs."""
        return self.instance_count * (self.instance_gpus.count(",") + 1 if self.instance_gpus else 1)

    def served_model(self, default: str) -> str:
        """Return the variant that serves in place of the tuned model, or ``default``, the name of that model."""
        return str(dict(self.fields).get(VARIANT, default))

    @property
    def server_cpus(self) -> str | None:
        """The CPUs of the server, as text; None if the search does not vary them."""
        chosen = dict(self.fields).get(SERVER_CPUS)
        return None if chosen is None else str(chosen)

    @property
    def server_processes(self) -> int:
        """The number of servers that serve this configuration together; 1 if the search does not vary it."""
        return server_processes(self.fields)

    @property
    def total_instances(self) -> int:
        """The number of instances on all GPUs of all server processes."""
        return self.instances * self.server_processes

    def __str__(self) -> str:
        batching = "sequence batching" if self.is_stateful else "no dynamic batching"
        if self.dynamic_batching:
            preferred = (
                f" preferred {','.join(map(str, self.preferred_batch_sizes))}" if self.preferred_batch_sizes else ""
            )
            batching = f"delay {self.max_queue_delay_us} µs{preferred}"
        extra = "".join(f" · {short_path(path)}={value}" for path, value in self.fields)
        return f"max_batch_size {self.max_batch_size} · {batching} · instances {self.instance_count}{extra}"


def is_server_field(path: str) -> bool:
    """Return whether a field of a candidate is outside of config.pbtxt: of the server, the variant or model.json."""
    return path in (SERVER_CPUS, SERVER_PROCESSES, VARIANT) or path.startswith(
        (SERVER_OPTION_PREFIX, MODEL_JSON_PREFIX)
    )


def server_processes(fields: Iterable[tuple[str, FieldValue]]) -> int:
    """Return the number of server processes in the fields of a candidate; 1 if there is none."""
    return int(dict(fields).get(SERVER_PROCESSES, 1))


def model_of_field(path: str) -> str:
    """Return the model of a field ``<model>/<parameter>``; an empty string for a field of the tuned model."""
    return "" if path.startswith("parameters.") or "/" not in path else path.partition("/")[0]


def fields_of_model(fields: Iterable[tuple[str, FieldValue]], model: str) -> dict[str, FieldValue]:
    """Return the fields of the other model ``model``, by parameter."""
    return {path.removeprefix(f"{model}/"): value for path, value in fields if model_of_field(path) == model}


def short_path(path: str) -> str:
    """Return a short name for a field, such as ``threads`` for ``parameters.threads.string_value``.

    A field of another model keeps the prefix ``<model>/``.
    """
    if model := model_of_field(path):
        return f"{model}/{short_path(path.removeprefix(f'{model}/'))}"
    if ".priority_queue_policy." in path:  # the same settings exist for each level
        return path[path.index("priority_queue_policy.") :]
    if path in _SHORT_NAMES:
        return _SHORT_NAMES[path]
    parts = path.split(".")
    return ".".join(parts[1:-1]) if parts[0] == "parameters" and len(parts) > 2 else parts[-1]


@dataclass(frozen=True, slots=True, order=True)
class LoadPoint:
    """A load.

    Attributes:
        request_batch_size: Samples of each request (the mean for mixed sizes).
        concurrency: Requests in flight at any time in a closed loop; 0 in an open loop.
        request_rate: Requests per second that an open loop sends, regardless of the answers; 0 in a closed loop.
    """

    request_batch_size: float
    concurrency: int = 0
    request_rate: float = 0.0

    def __str__(self) -> str:
        """Return the load for messages: ``concurrency 24`` or ``3,000 requests/s``."""
        return f"{self.request_rate:,.6g} requests/s" if self.request_rate else f"concurrency {self.concurrency:,}"

    def cells(self) -> dict[str, float | None]:
        """Return the cells of a table by column, with None for the rate of a closed loop, or the concurrency."""
        return {
            "request_batch_size": self.request_batch_size,
            "concurrency": self.concurrency or None,
            "request_rate": self.request_rate or None,
        }


@dataclass(frozen=True, slots=True)
class ConfirmationWindow:
    """A window that was measured on a fresh server.

    Attributes:
        server: Number of the fresh server among those of the run, from 1, in the order of measuring.
        load: Load of the window.
        measurement: The measurement of the window.
        error_probability: Error probability of the test of this load; 0 if the candidate is only compared.
        latency_slope: See ``FreshServer``.
    """

    server: int
    load: LoadPoint
    measurement: Measurement
    error_probability: float = 0.0
    latency_slope: float | None = None

    @property
    def is_tested(self) -> bool:
        """Whether the window belongs to a test."""
        return self.error_probability > 0

    @property
    def is_lost(self) -> bool:
        """Whether the window has no values: the server crashed, or the load generator failed or sent too late."""
        return self.measurement.throughput_infer_per_sec is None


@dataclass(frozen=True, slots=True)
class FreshServer:
    """The fresh server of a row of the trials table.

    Attributes:
        number: Number of the server among those of the run, from 1, in the order of measuring.
        error_probability: Error probability of the test of the load; 0 if the candidate is only compared.
        load_generator: The load generator of a measurement that checks tune's own client; empty for others.
        repeats: Number of the first lost server of an earlier session that this one repeats; 0 if it repeats none.
        latency_slope: Rise of the log of latency over the fall of the log of the CPU share that other programs leave,
            as the search has shown it, or a usual one; None in a separate test, which does not depend on the search.
    """

    number: int
    error_probability: float = 0.0
    load_generator: str = ""
    repeats: int = 0
    latency_slope: float | None = None


@dataclass(frozen=True, slots=True)
class Crash:
    """A server that died or hung.

    Attributes:
        reason: The error message.
        load: Load that it served; None if it was not measured yet.
        error_probability: Error probability of the test of this load; 0 if the server was not part of a test.
    """

    reason: str
    load: LoadPoint | None = None
    error_probability: float = 0.0


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate with its measurements.

    Attributes:
        number: Number of the trial in its study, from 0.
        candidate: Configuration that was deployed.
        measurements: Pairs of load and measurement of the search, in the order of measuring.
        status: ``failed`` if the candidate could not be deployed.
        reason: Why it failed; empty otherwise.
        deploy_seconds: Time of the deployment; None if unknown.
        confirmations: Measurements on fresh servers. Only these count for the verdict.
        cross_checks: Measurements of perf_analyzer on the same servers, which check tune's own load client.
        lacks_gpu_memory: Whether it failed because a GPU has too little memory.
        crashes: Its servers that died or hung.
    """

    number: int
    candidate: Candidate
    measurements: tuple[tuple[LoadPoint, Measurement], ...] = ()
    status: Literal["ok", "failed"] = "ok"
    reason: str = ""
    deploy_seconds: float | None = None
    confirmations: tuple[ConfirmationWindow, ...] = ()
    cross_checks: tuple[ConfirmationWindow, ...] = ()
    lacks_gpu_memory: bool = False
    crashes: tuple[Crash, ...] = ()

    @property
    def has_served(self) -> bool:
        """Whether a measurement of the search has a throughput."""
        return any(measurement.throughput_infer_per_sec is not None for _, measurement in self.measurements)

    def with_failure(self, error: DeploymentError) -> Trial:
        """Return the trial as failed with ``error``, without measurements."""
        return Trial(
            self.number,
            self.candidate,
            status="failed",
            reason=str(error),
            deploy_seconds=self.deploy_seconds,
            lacks_gpu_memory=error.lacks_gpu_memory,
        )

    def with_confirmation(self, confirmation: ConfirmationWindow, repeats: int = 0) -> Trial:
        """Return the trial with one more confirmation.

        It replaces lost ones at the end: that of the same server, or those of the server ``repeats`` and later ones.
        """
        kept, first = self.confirmations, repeats or confirmation.server
        while kept and kept[-1].is_lost and kept[-1].server >= first:
            kept = kept[:-1]
        return replace(self, confirmations=(*kept, confirmation))

    def with_row(self, load: LoadPoint, measurement: Measurement, fresh: FreshServer) -> Trial:
        """Return the trial with one more row of the server ``fresh``."""
        confirmation = ConfirmationWindow(
            fresh.number, load, measurement, fresh.error_probability, fresh.latency_slope
        )
        if fresh.load_generator:
            return replace(self, cross_checks=(*self.cross_checks, confirmation))
        return self.with_confirmation(confirmation, fresh.repeats)


@dataclass(frozen=True, slots=True)
class Point:
    """The measurement of one candidate at one load. Pareto fronts and recommendations consist of points."""

    trial: int
    candidate: Candidate
    load: LoadPoint
    measurement: Measurement

    @property
    def throughput_infer_per_sec(self) -> float:
        """The throughput; 0 if it is unknown."""
        return self.measurement.throughput_infer_per_sec or 0.0


def all_points(trials: Sequence[Trial]) -> Iterator[Point]:
    """Yield every measured point of every trial."""
    for trial in trials:
        for load, measurement in trial.measurements:
            yield Point(trial.number, trial.candidate, load, measurement)


def latest_points(trials: Sequence[Trial]) -> list[Point]:
    """Return the measured points, with the latest measurement of each load of each trial.

    An unstable measurement does not replace an earlier stable one.
    """
    latest: dict[tuple[int, LoadPoint], Point] = {}
    for point in all_points(trials):
        before = latest.get((point.trial, point.load))
        if before is None or point.measurement.stable or not before.measurement.stable:
            latest[point.trial, point.load] = point
    return list(latest.values())
