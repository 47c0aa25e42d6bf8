"""The nouns of a study: Candidate, LoadPoint, Trial, Point. Frozen, without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from objectives.metrics import Measurement

FieldValue: TypeAlias = str | int | float | bool
SERVER_CPUS = "server_cpus"  # among a candidate's fields: the CPUs that its server runs on, as cpus.parse reads them
SERVER_OPTION = "server."  # begins the fields that are options of the server: see optimizer.server_options
VARIANT = "variant"  # among them too: which of several models of one kind is served
INSTANCE_GPUS = "instance_group_gpus"  # among them too: the GPUs of its instances, as placement.parse reads them


SETTINGS = (  # of a candidate, besides its fields, as columns name them
    "max_batch_size",
    "dynamic_batching",
    "max_queue_delay_us",
    "preferred_batch_sizes",
    "instance_count",
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration of the model, in Triton's terms.

    ``preferred_batch_sizes`` is ascending; empty means none are set. With ``dynamic_batching`` false the
    delay is 0 and there are no preferred sizes. ``fields`` are other ModelConfig fields by proto path
    (``parameters.intra_op_thread_count.string_value``), sorted by path. What that model's config.pbtxt does not know
    may be among them: SERVER_CPUS, options of the server, VARIANT, and settings of the models beside it as
    ``<model>/<parameter>``; and what is no single field of it, INSTANCE_GPUS.
    """

    max_batch_size: int
    dynamic_batching: bool = False
    max_queue_delay_us: int = 0
    preferred_batch_sizes: tuple[int, ...] = ()
    instance_count: int = 1
    fields: tuple[tuple[str, FieldValue], ...] = ()

    @property
    def config_fields(self) -> tuple[tuple[str, FieldValue], ...]:
        """Those of ``fields`` that are about this model's config.pbtxt."""
        return tuple(field for field in self.fields if not of_server(field[0]) and not model_of(field[0]))

    @property
    def proto_fields(self) -> tuple[tuple[str, FieldValue], ...]:
        """Those of ``config_fields`` that are fields of ModelConfig by their path."""
        return tuple(field for field in self.config_fields if field[0] != INSTANCE_GPUS)

    @property
    def instance_gpus(self) -> str | None:
        """None: those that its configuration names anyway."""
        chosen = dict(self.fields).get(INSTANCE_GPUS)
        return None if chosen is None else str(chosen)

    @property
    def instances(self) -> int:
        """All of them: ``instance_count`` for each GPU that it is placed on."""
        return self.instance_count * (self.instance_gpus.count(",") + 1 if self.instance_gpus else 1)

    @property
    def server_cpus(self) -> str | None:
        """None: those that the server has anyway."""
        chosen = dict(self.fields).get(SERVER_CPUS)
        return None if chosen is None else str(chosen)

    def __str__(self) -> str:
        batching = "no dynamic batching"
        if self.dynamic_batching:
            preferred = (
                f" preferred {','.join(map(str, self.preferred_batch_sizes))}" if self.preferred_batch_sizes else ""
            )
            batching = f"delay {self.max_queue_delay_us} µs{preferred}"
        extra = "".join(f" · {short_path(path)}={value}" for path, value in self.fields)
        return f"max_batch_size {self.max_batch_size} · {batching} · instances {self.instance_count}{extra}"


def of_server(path: str) -> bool:
    """Whether a field is about what is served and by what server, and not in any model's configuration."""
    return path in (SERVER_CPUS, VARIANT) or path.startswith(SERVER_OPTION)


def model_of(path: str) -> str:
    """The model that a field ``<model>/<parameter>`` is about; empty for one of the candidate's own."""
    return "" if path.startswith("parameters.") or "/" not in path else path.partition("/")[0]


def of_model(fields: Iterable[tuple[str, FieldValue]], model: str) -> dict[str, FieldValue]:
    """Those about ``model``, by parameter."""
    return {path.removeprefix(f"{model}/"): value for path, value in fields if model_of(path) == model}


def short_path(path: str) -> str:
    """``parameters.intra_op_thread_count.string_value`` -> ``intra_op_thread_count``; of another model
    ``<model>/intra_op_thread_count``."""
    if model := model_of(path):
        return f"{model}/{short_path(path.removeprefix(f'{model}/'))}"
    parts = path.split(".")
    return parts[1] if parts[0] == "parameters" and len(parts) > 1 else parts[-1]


@dataclass(frozen=True, slots=True, order=True)
class LoadPoint:
    """Requests of ``request_batch_size`` samples each, of a mix on average.

    In a closed loop ``concurrency`` of them are in flight; in an open loop (``concurrency`` 0) ``request_rate`` a
    second are sent, whatever has been answered.
    """

    request_batch_size: float
    concurrency: int = 0
    request_rate: float = 0.0


@dataclass(frozen=True, slots=True)
class Confirmation:
    """A measurement of what is recommended, repeated on the ``server``-th fresh server (from 1)."""

    server: int
    load: LoadPoint
    measurement: Measurement

    @property
    def is_lost(self) -> bool:
        """Whether it gave no figures: the server crashed, or the load generator failed or fell behind."""
        return self.measurement.throughput_infer_per_sec is None


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate and what was measured on it, in the order of measuring.

    ``status`` is ``failed`` where the candidate could not be deployed; ``reason`` then says why.
    ``confirmations`` are apart from the search's measurements: they are what a verdict rests on.
    """

    number: int
    candidate: Candidate
    measurements: tuple[tuple[LoadPoint, Measurement], ...] = ()
    status: Literal["ok", "failed"] = "ok"
    reason: str = ""
    deploy_seconds: float | None = None
    confirmations: tuple[Confirmation, ...] = ()

    def confirmed_by(self, again: Confirmation) -> Trial:
        """With one confirmation more; it takes the place of a lost one just before it."""
        kept = self.confirmations
        if kept and kept[-1].is_lost and (kept[-1].server, kept[-1].load) == (again.server, again.load):
            kept = kept[:-1]
        return replace(self, confirmations=(*kept, again))


@dataclass(frozen=True, slots=True)
class Point:
    """One measured (configuration, load): what fronts and recommendations are made of."""

    trial: int
    candidate: Candidate
    load: LoadPoint
    measurement: Measurement

    @property
    def throughput_infer_per_sec(self) -> float:
        """0 where it is unknown."""
        return self.measurement.throughput_infer_per_sec or 0.0


def points(trials: Sequence[Trial]) -> Iterator[Point]:
    """Every measured point of every trial."""
    for trial in trials:
        for load, measurement in trial.measurements:
            yield Point(trial.number, trial.candidate, load, measurement)


def latest_points(trials: Sequence[Trial]) -> list[Point]:
    """The measured points; where one was measured again, the later measurement counts.

    Windows that disagree tell nothing, so that an unstable repetition does not take a stable measurement's place.
    """
    latest: dict[tuple[int, LoadPoint], Point] = {}
    for point in points(trials):
        before = latest.get((point.trial, point.load))
        if before is None or point.measurement.stable or not before.measurement.stable:
            latest[point.trial, point.load] = point
    return list(latest.values())
