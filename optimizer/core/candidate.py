"""One configuration of the model, with the names of its settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

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
SETTING_COLUMNS = (  # the attributes of a candidate other than its fields, as columns of trials.csv
    "max_batch_size",
    "dynamic_batching",
    "max_queue_delay_us",
    "preferred_batch_sizes",
    "instance_count",
)


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
