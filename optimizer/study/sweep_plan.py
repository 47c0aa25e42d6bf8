"""The plan of a sweep: the product of the values listed for each setting, at each of the loads."""

from __future__ import annotations

import contextlib
import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from objectives.metrics import Measurement
from optimizer.config import field_path
from optimizer.config.batching import behaviour, normalize, resolve_preferred_sizes
from optimizer.config.model_config_proto import ModelConfig
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import (
    INSTANCE_GPUS,
    MODEL_JSON_PREFIX,
    Candidate,
    FieldChoices,
    is_server_field,
    short_path,
)
from optimizer.core.errors import BadInputError
from optimizer.core.notes import CombinationsLeftOut
from optimizer.core.trial import LoadPoint, Trial
from optimizer.options.command_line import option_words

MAX_CONFIGURATIONS = 1000
BUDGET_SECONDS = 18_000.0  # does not end a sweep; it only lets each model load for as long as in a run of 5 h
MODEL = "model"  # its key in GivenOptions
GivenOptions: TypeAlias = Mapping[str, str | list[str] | bool]  # by the name of the option


@contextlib.contextmanager
def config_errors() -> Iterator[None]:
    """Raise a ValueError of the context as a BadInputError about ``--config``."""
    try:
        yield
    except ValueError as error:
        raise BadInputError(f"--config {error}") from None


@dataclass(frozen=True)
class SweepChoices:
    """The values listed for each setting. A setting without values keeps that of the model's own configuration.

    A ``max_queue_delay_us`` of None disables dynamic batching. ``preferred_batch_size`` holds policies (see
    ``batching.parse_preferred_sizes``), ``fields`` other ModelConfig fields by path.
    """

    max_batch_size: tuple[int, ...] = ()
    max_queue_delay_us: tuple[int | None, ...] = ()
    preferred_batch_size: tuple[str, ...] = ()
    instance_count: tuple[int, ...] = ()
    fields: FieldChoices = field(default_factory=dict)

    def normalized(self) -> SweepChoices:
        """Return the choices with the values of ``fields`` as candidates have them: the GPUs ``0+1`` as ``0,1``.

        Raises BadInputError for an unknown ModelConfig field or a value of the wrong type.
        """
        with config_errors():
            for path, values in self.fields.items():
                if path.startswith(MODEL_JSON_PREFIX):
                    key = path.removeprefix(MODEL_JSON_PREFIX)
                    raise ValueError(
                        f"{path}: `tune sweep` does not change model.json; list the values as space.model_json.{key} "
                        "in a profile, and measure all of them with `tune --search grid`"
                    )
                for value in values if not is_server_field(path) and path != INSTANCE_GPUS else ():
                    field_path.normalize_value(ModelConfig.DESCRIPTOR, path, value)
            fields = SearchSpace((1,), fields=self.fields).fields
        return replace(self, fields={path: fields[path] for path in self.fields})


@dataclass(frozen=True)
class SweepRequest:
    """The options of a sweep that a run does not have.

    Either ``concurrency`` or ``request_rate`` is empty. An empty ``request_batch_size`` means that of the profile.
    ``given`` are the model and the options of the command as they were given, without secrets. A resume reads them.
    """

    choices: SweepChoices
    concurrency: tuple[int, ...]
    request_rate: tuple[float, ...]
    request_batch_size: tuple[int, ...]
    repeat: int
    given: GivenOptions

    @property
    def command(self) -> str:
        """The command that repeats the sweep."""
        options = {name: value for name, value in self.given.items() if name != MODEL}
        model = str(self.given.get(MODEL, ""))
        end = ["--"] if model.startswith("-") else []
        return shlex.join(["tune", "sweep", *option_words(options), *end, *filter(None, [model])])


@dataclass(frozen=True)
class SweepPlan:
    """The measurements of a sweep: each load of each configuration, ``repeat`` times.

    Attributes:
        configurations: The configurations; the index of one is its trial number.
        loads: The loads.
        repeat: Number of measurements of each load.
        largest_mixed: Number of samples in the largest request of a mix; 0 without a mix.
        left_out: The combinations that would only repeat others; None if there are none.
    """

    configurations: tuple[Candidate, ...]
    loads: tuple[LoadPoint, ...]
    repeat: int = 1
    largest_mixed: int = 0
    left_out: CombinationsLeftOut | None = None

    @property
    def request_batch_sizes(self) -> tuple[float, ...]:
        """Return the distinct request batch sizes, in the order of the loads."""
        return tuple(dict.fromkeys(load.request_batch_size for load in self.loads))

    def loads_of(self, candidate: Candidate) -> tuple[LoadPoint, ...]:
        """Return the loads whose requests fit the candidate's max_batch_size."""
        return tuple(
            load
            for load in self.loads
            if behaviour(candidate, self.largest_mixed or round(load.request_batch_size)) is not None
        )

    def missing(self, trial: Trial, rounds: int) -> list[LoadPoint]:
        """Return the loads that ``trial`` was measured at fewer than ``rounds`` times; none if it failed."""
        measured = [load for load, _ in trial.measurements]
        loads = self.loads_of(trial.candidate) if trial.status == "ok" else ()
        return [load for load in loads if measured.count(load) < rounds]

    def __len__(self) -> int:
        """Return the number of measurements."""
        return self.repeat * sum(len(self.loads_of(candidate)) for candidate in self.configurations)


@dataclass(frozen=True)
class SweepCell:
    """One configuration at one load.

    ``measurement`` is the median by throughput of ``measured`` measurements; without one, its reason explains why.
    """

    number: int
    candidate: Candidate
    load: LoadPoint
    measurement: Measurement
    measured: int


def configurations(
    configured: Candidate, choices: SweepChoices
) -> tuple[tuple[Candidate, ...], CombinationsLeftOut | None]:
    """Return the product of the choices, without duplicates. ``configured`` is the model's own configuration.

    Combinations that differ from another one only in settings without effect are left out, with a note.

    Raises BadInputError if a choice would have no effect or a preferred batch size is not an integer.
    """
    delays = choices.max_queue_delay_us or (configured.max_queue_delay_us if configured.dynamic_batching else None,)
    if choices.preferred_batch_size and all(delay is None for delay in delays):
        raise BadInputError(
            "--preferred-batch-size needs dynamic batching, which is off: add --max-queue-delay 0, or a delay in µs"
        )
    configured_sizes = ",".join(map(str, configured.preferred_batch_sizes)) or "none"
    settings = itertools.product(
        choices.max_batch_size or (configured.max_batch_size,),
        delays,
        choices.preferred_batch_size or (configured_sizes,),
        choices.instance_count or (configured.instance_count,),
    )
    space = SearchSpace((1,), fields=choices.fields)
    candidates: dict[Candidate, None] = {}
    left_out, unused = 0, dict[str, None]()
    for (size, delay, policy, count), values in itertools.product(
        settings, list(itertools.product(*choices.fields.values()))
    ):
        preferred = resolve_preferred_sizes(policy, size) if delay is not None else ()
        if preferred is None:
            problem = f"is not an integer for max_batch_size {size}; leave one of the two out"
            raise BadInputError(f"--preferred-batch-size {policy} {problem}")
        if not choices.preferred_batch_size:  # the model's own may be too large for this max_batch_size
            preferred = tuple(batch for batch in preferred if batch <= size)
        fields = dict(configured.fields) | dict(zip(choices.fields, values, strict=True))
        candidate = normalize(Candidate(size, delay is not None, delay or 0, preferred, count, tuple(fields.items())))
        effective = space.effective_fields(size, candidate.fields)
        if effective != candidate.fields:
            left_out += 1
            reasons = space.without_effect(size, dict(candidate.fields))
            for path, _ in set(candidate.fields) - set(effective):
                unused[f"{short_path(path)} {reasons[path]}"] = None
        candidates[replace(candidate, fields=effective)] = None
        if len(candidates) > MAX_CONFIGURATIONS:
            raise BadInputError(f"more than {MAX_CONFIGURATIONS:,} configurations; list fewer values")
    return tuple(candidates), CombinationsLeftOut(left_out, tuple(sorted(unused))) if left_out else None


def sweep_cells(
    plan: SweepPlan, trials: Sequence[Trial], failures: Mapping[int, str] | None = None
) -> list[SweepCell]:
    """Return a cell for every configuration at every load, also for those that could not be measured.

    ``failures`` has the reason why measuring a configuration ended early, by its number.
    """
    by_number = {trial.number: trial for trial in trials}
    cells = []
    for number, candidate in enumerate(plan.configurations):
        trial = by_number.get(number, Trial(number, candidate))
        for load in plan.loads:
            measured = [measurement for at, measurement in trial.measurements if at == load]
            measurement = _median(measured) or _reason(plan, trial, load, (failures or {}).get(number, ""))
            cells.append(SweepCell(number, candidate, load, measurement, len(measured)))
    return cells


def _median(measured: Sequence[Measurement]) -> Measurement | None:
    with_throughput = [measurement for measurement in measured if measurement.has_values]
    with_throughput.sort(key=lambda measurement: measurement.throughput_infer_per_sec or 0.0)
    return with_throughput[(len(with_throughput) - 1) // 2] if with_throughput else measured[-1] if measured else None


def _reason(plan: SweepPlan, trial: Trial, load: LoadPoint, failure: str) -> Measurement:
    if load not in plan.loads_of(trial.candidate):
        size = trial.candidate.max_batch_size
        return Measurement(reason=f"max_batch_size {size} admits no requests of {load.request_batch_size:g} samples")
    return Measurement(reason=trial.reason or failure or "not measured")
