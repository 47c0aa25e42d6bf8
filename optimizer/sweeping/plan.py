"""What a sweep measures: the product of what is listed for each setting, at each of the loads. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tritonclient.grpc.model_config_pb2 import ModelConfig

from objectives.metrics import Measurement
from optimizer import proto_path
from optimizer.batching import behaviour, resolve_policy, tidy
from optimizer.errors import BadInputError
from optimizer.space import Space
from optimizer.trial import INSTANCE_GPUS, Candidate, FieldValue, LoadPoint, Trial, of_server

MOST_CONFIGURATIONS = 1000


@dataclass(frozen=True)
class Choices:
    """What is listed for each setting; nothing listed is as the model's own configuration has it.

    ``max_queue_delay_us``: None is no dynamic batching. ``preferred_batch_size`` are policies (see
    ``batching.parse_policy``), ``fields`` other ModelConfig fields by proto path.
    """

    max_batch_size: tuple[int, ...] = ()
    max_queue_delay_us: tuple[int | None, ...] = ()
    preferred_batch_size: tuple[str, ...] = ()
    instance_count: tuple[int, ...] = ()
    fields: Mapping[str, tuple[FieldValue, ...]] = field(default_factory=dict)

    def check(self) -> None:
        """Raises BadInputError for a field that ModelConfig has not, or a value that does not fit it."""
        try:
            Space((1,), fields=self.fields)
            for path, values in self.fields.items():
                for value in values if not of_server(path) and path != INSTANCE_GPUS else ():
                    proto_path.normal(ModelConfig.DESCRIPTOR, path, value)
        except ValueError as error:
            raise BadInputError(f"--config {error}") from None


@dataclass(frozen=True)
class Asked:
    """What the command line asks for, besides the options that a run has too.

    ``concurrency`` or ``request_rate`` is empty; ``request_batch_size`` may be: then it is the profile's.
    ``words`` are the command's, so that a sweep can be resumed.
    """

    choices: Choices
    concurrency: tuple[int, ...]
    request_rate: tuple[float, ...]
    request_batch_size: tuple[int, ...]
    repeat: int
    words: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """``repeat`` measurements of each load of each configuration; a configuration's place is its trial's number.

    ``largest_mixed``: samples of the largest request, where they differ in size."""

    configurations: tuple[Candidate, ...]
    loads: tuple[LoadPoint, ...]
    repeat: int = 1
    largest_mixed: int = 0

    @property
    def request_batch_sizes(self) -> tuple[float, ...]:
        return tuple(dict.fromkeys(load.request_batch_size for load in self.loads))

    def loads_of(self, candidate: Candidate) -> tuple[LoadPoint, ...]:
        """Those whose requests its max_batch_size admits."""
        return tuple(load for load in self.loads if behaviour(candidate, self._largest(load)) is not None)

    def _largest(self, load: LoadPoint) -> int:
        return self.largest_mixed or round(load.request_batch_size)

    def missing(self, trial: Trial, rounds: int) -> list[LoadPoint]:
        """What ``trial`` was not yet measured at ``rounds`` times; nothing where it could not be deployed."""
        taken = [load for load, _ in trial.measurements]
        every = self.loads_of(trial.candidate) if trial.status == "ok" else ()
        return [load for load in every if taken.count(load) < rounds]

    def __len__(self) -> int:
        """The number of measurements."""
        return self.repeat * sum(len(self.loads_of(candidate)) for candidate in self.configurations)


@dataclass(frozen=True)
class Cell:
    """One configuration at one load. Of several measurements the one in the middle by throughput counts; where
    there is none, ``measurement.reason`` says why."""

    number: int
    candidate: Candidate
    load: LoadPoint
    measurement: Measurement
    measured: int

    @property
    def has_figures(self) -> bool:
        return self.measurement.throughput_infer_per_sec is not None


def configurations(own: Candidate, choices: Choices) -> tuple[Candidate, ...]:
    """The product of the choices, each configuration once. ``own`` is what the model's configuration says.

    Raises BadInputError where a choice would not be felt, or a preferred size is no whole number.
    """
    delays = choices.max_queue_delay_us or (own.max_queue_delay_us if own.dynamic_batching else None,)
    if choices.preferred_batch_size and all(delay is None for delay in delays):
        raise BadInputError(
            "--preferred-batch-size is of dynamic batching, which is off: give --max-queue-delay 0, or a delay in µs"
        )
    kept = ",".join(map(str, own.preferred_batch_sizes)) or "none"
    settings = itertools.product(
        choices.max_batch_size or (own.max_batch_size,),
        delays,
        choices.preferred_batch_size or (kept,),
        choices.instance_count or (own.instance_count,),
    )
    found: dict[Candidate, None] = {}
    for (size, delay, policy, count), values in itertools.product(
        settings, list(itertools.product(*choices.fields.values()))
    ):
        preferred = resolve_policy(policy, size) if delay is not None else ()
        if preferred is None:
            raise BadInputError(f"--preferred-batch-size {policy}: is no whole number for max_batch_size {size}")
        if not choices.preferred_batch_size:  # the model's own may be too large for this max_batch_size
            preferred = tuple(one for one in preferred if one <= size)
        fields = dict(own.fields) | dict(zip(choices.fields, values, strict=True))
        candidate = Candidate(size, delay is not None, delay or 0, preferred, count, tuple(fields.items()))
        found[tidy(candidate)] = None
        if len(found) > MOST_CONFIGURATIONS:
            raise BadInputError(f"more than {MOST_CONFIGURATIONS:,} configurations; list fewer values")
    return tuple(found)


def cells(plan: Plan, trials: Sequence[Trial]) -> list[Cell]:
    """Every configuration at every load, also those that could not be measured."""
    by_number = {trial.number: trial for trial in trials}
    found = []
    for number, candidate in enumerate(plan.configurations):
        trial = by_number.get(number, Trial(number, candidate))
        for load in plan.loads:
            taken = [measurement for at, measurement in trial.measurements if at == load]
            found.append(Cell(number, candidate, load, _middle(taken) or _reason(plan, trial, load), len(taken)))
    return found


def _middle(taken: Sequence[Measurement]) -> Measurement | None:
    known = [one for one in taken if one.throughput_infer_per_sec is not None]
    known.sort(key=lambda one: one.throughput_infer_per_sec or 0.0)
    return known[(len(known) - 1) // 2] if known else taken[-1] if taken else None


def _reason(plan: Plan, trial: Trial, load: LoadPoint) -> Measurement:
    if load not in plan.loads_of(trial.candidate):
        size = trial.candidate.max_batch_size
        return Measurement(reason=f"max_batch_size {size} admits no requests of {load.request_batch_size:g} samples")
    return Measurement(reason=trial.reason or "not measured")
