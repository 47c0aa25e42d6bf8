"""The search space: choices, valid combinations and canonical candidates."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple, TypeVar

from optimizer.config import gpu_placement, model_config, model_json, ort_settings, queue_policy
from optimizer.config.batching import (
    DIRECT_DELAY,
    OLDEST_DELAY,
    ONE_BY_ONE,
    SEQUENCE_PREFERRED,
    SLOT_UTILIZATION,
    behaviour,
    is_batcher_field,
    is_sequence_field,
    normalize,
    parse_preferred_sizes,
    resolve_preferred_sizes,
)
from optimizer.config.queue_policy import Fields, is_queue_field
from optimizer.core.candidate import (
    INSTANCE_GPUS,
    MODEL_JSON_PREFIX,
    SERVER_CPUS,
    SERVER_OPTION_PREFIX,
    SERVER_PROCESSES,
    Candidate,
    FieldChoices,
    FieldValue,
    model_of_field,
    short_path,
)
from optimizer.core.errors import ParameterError
from optimizer.core.safe_text import scalar_text
from optimizer.options import server_options
from optimizer.options.values import MAX_INT32, format_cpus, parse_cpus

T = TypeVar("T")
OFF = "off"
# the keys of a profile's space for the settings that each model has
SPACE_KEYS = ("max_batch_size", "max_queue_delay_microseconds", "preferred_batch_size", "instance_group_count")
MAX_BATCH_SIZE, MAX_QUEUE_DELAY, PREFERRED_BATCH_SIZE, INSTANCE_COUNT = SPACE_KEYS
MAX_SERVER_PROCESSES = 64
_WAITING = (OLDEST_DELAY, DIRECT_DELAY, SLOT_UTILIZATION)  # how long the sequence batcher waits for more requests
# paths in ModelConfig -> the key of the space that sets them. An index of an instance group is left out.
_KEY_OF_FIELD = {
    "max_batch_size": MAX_BATCH_SIZE,
    "dynamic_batching": MAX_QUEUE_DELAY,
    "dynamic_batching.max_queue_delay_microseconds": MAX_QUEUE_DELAY,
    "dynamic_batching.preferred_batch_size": PREFERRED_BATCH_SIZE,
    "instance_group": INSTANCE_COUNT,
    "instance_group_count": INSTANCE_COUNT,
    "instance_group.count": INSTANCE_COUNT,
}
_SWEEP_OPTIONS = {  # keys of the space -> options of ``tune sweep``
    MAX_BATCH_SIZE: "--max-batch-size",
    MAX_QUEUE_DELAY: "--max-queue-delay",
    PREFERRED_BATCH_SIZE: "--preferred-batch-size",
    INSTANCE_COUNT: "--instance-count",
}


class BatcherBehaviour(NamedTuple):
    """A behaviour of the batcher: the canonical candidate (batching only), and the first choices that have it."""

    candidate: Candidate
    choices: dict[str, FieldValue]


@dataclass(frozen=True)
class SearchSpace:
    """The choices for every tuned setting. Not every combination of choices is a valid candidate.

    Repeated choices count once. Raises ParameterError if a choice is invalid, and ValueError if no combination of
    choices is valid.

    Attributes:
        max_batch_size: Samples. 0 (no batch dimension) must be the only choice.
        max_queue_delay_us: Microseconds from 0, or ``"off"`` for no dynamic batching.
        preferred_batch_sizes: Texts such as ``max/2,max``, see ``batching.parse_preferred_sizes``.
        instance_count: Instances for each instance group, on each of its GPUs.
        fields: Choices of other settings by name; see ``Candidate.fields`` for the names.
        request_batch_size: Samples of a request.
        is_streaming: Whether the model streams its responses.
    """

    max_batch_size: tuple[int, ...]
    max_queue_delay_us: tuple[int | str, ...] = (OFF,)
    preferred_batch_sizes: tuple[Any, ...] = ("none",)
    instance_count: tuple[int, ...] = (1,)
    fields: FieldChoices = field(default_factory=dict, hash=False)
    request_batch_size: int = 1
    is_streaming: bool = False

    def __post_init__(self) -> None:
        _whole("request_batch_size", self.request_batch_size, 1)
        sizes = [_whole("max_batch_size", value, 0) for value in self.max_batch_size]
        delays = [value if value == OFF else _delay(value) for value in self.max_queue_delay_us]
        policies = [parse_preferred_sizes(value) for value in self.preferred_batch_sizes]
        counts = [_whole("instance_count", value, 1) for value in self.instance_count]
        normalized = {
            "max_batch_size": _choices("max_batch_size", sizes),
            "max_queue_delay_us": _choices("max_queue_delay_us", delays),
            "preferred_batch_sizes": _choices("preferred_batch_sizes", policies),
            "instance_count": _choices("instance_count", counts),
            "fields": {path: _field(path, values) for path, values in sorted(self.fields.items())},
        }
        for name, value in normalized.items():
            object.__setattr__(self, name, value)
        if 0 in self.max_batch_size and len(self.max_batch_size) > 1:
            raise ParameterError("max_batch_size", "0 (no batch dimension) cannot be mixed with other sizes")
        if not self._batchings:
            raise ValueError(
                f"no valid configuration: max_batch_size {_words(self.max_batch_size)}, preferred sizes "
                f"{_words(self.preferred_batch_sizes)}, request batch size {self.request_batch_size}"
            )
        if self._preferred_paths and next(self._enumerate(), None) is None:
            path = self._preferred_paths[0]
            largest = self.fields.get(f"{model_of_field(path)}/{MAX_BATCH_SIZE}", self.max_batch_size)
            raise ParameterError(
                path,
                f"{_words(self.fields[path])}: no choice divides or fits max_batch_size {_words(largest)}; give "
                "smaller sizes, or none",
            )

    @property
    def is_stateful(self) -> bool:
        """Whether the model has the sequence batcher; then at least one of its fields has choices."""
        return any(map(is_sequence_field, self.fields))

    @property
    def max_server_processes(self) -> int:
        """The largest number of server processes that share the load."""
        return max(int(count) for count in self.fields.get(SERVER_PROCESSES, (1,)))

    def parameters(self) -> dict[str, tuple[FieldValue, ...]]:
        """Return the choices of every parameter: the four of the batcher and the instances, then the fields."""
        batcher_and_instances: dict[str, tuple[Any, ...]] = {
            "max_batch_size": self.max_batch_size,
            "max_queue_delay_us": self.max_queue_delay_us,
            "preferred_batch_sizes": self.preferred_batch_sizes,
            "instance_count": self.instance_count,
        }
        return batcher_and_instances | dict(self.fields)

    def candidate(self, values: Mapping[str, FieldValue]) -> Candidate | None:
        """Return the canonical candidate for one choice of each parameter; None if the combination is invalid.

        Raises KeyError for a missing parameter.
        """
        size, delay = values["max_batch_size"], values["max_queue_delay_us"]
        batching = self._batching(size, delay, values["preferred_batch_sizes"])
        if batching is None:
            return None
        fields = tuple((path, values[path]) for path in self.fields)
        if not self._prefers_possible_sizes(batching.max_batch_size, fields):
            return None
        return self.canonical(replace(batching, instance_count=int(values["instance_count"]), fields=fields))

    def canonical(self, candidate: Candidate) -> Candidate:
        """Return the one candidate that represents all with the behaviour of ``candidate`` at this request size.

        A batcher that executes single requests is represented by no dynamic batching and the smallest max_batch_size
        that accepts the request. A candidate outside the space keeps its numbers, in normal form.
        """
        key = self._key(candidate)
        if key in self._batchings:
            batching = self._batchings[key].candidate
        elif key == ONE_BY_ONE:
            batching = Candidate(min(self._admitted, default=candidate.max_batch_size))
        else:
            batching = candidate
        fields = tuple((path, self._choice(path, value)) for path, value in candidate.fields)
        fields = self.effective_fields(batching.max_batch_size, fields)
        return normalize(replace(batching, instance_count=candidate.instance_count, fields=fields))

    def parameter_values(self, candidate: Candidate) -> dict[str, FieldValue] | None:
        """Return one choice of each parameter that gives ``candidate``; None if it is outside the space."""
        batching = self._batchings.get(self._key(candidate))
        if batching is None or candidate.instance_count not in self.instance_count:
            return None
        choices = tuple((path, self._choice(path, value)) for path, value in candidate.fields)
        fields = dict(self.effective_fields(candidate.max_batch_size, choices))
        if not batching.candidate.dynamic_batching:
            # without dynamic batching its fields do not exist: any choice gives the candidate
            fields = {path: values[0] for path, values in self.fields.items() if is_batcher_field(path)} | fields
        if fields.keys() != self.fields.keys() or any(fields[path] not in self.fields[path] for path in fields):
            return None
        field_values = {path: fields[path] for path in self.fields}
        return {**batching.choices, "instance_count": candidate.instance_count, **field_values}

    def allowed_concurrencies(self, candidate: Candidate) -> tuple[int, ...] | None:
        """Return the concurrencies at which ``candidate`` can be measured, ascending; None for any.

        Recorded tables override it.
        """
        return None

    def candidates(self) -> tuple[Candidate, ...]:
        """Return all canonical candidates, ordered by batching, then by the order of the other choices."""
        return tuple(self._enumerate())

    def __len__(self) -> int:
        """Return the number of canonical candidates."""
        conditional = any(map(is_queue_field, self.fields)) or ort_settings.is_conditional(self.fields)
        if self._preferred_paths or self.is_stateful or conditional:
            return self._enumerated_count
        with_batcher = math.prod(map(len, self.fields.values()))
        without_batcher = math.prod(len(v) for path, v in self.fields.items() if not is_batcher_field(path))
        combinations = sum(
            with_batcher if batching.candidate.dynamic_batching else without_batcher
            for batching in self._batchings.values()
        )
        return len(self.instance_count) * combinations

    @cached_property
    def _enumerated_count(self) -> int:
        return sum(1 for _ in self._enumerate())

    def _enumerate(self) -> Iterator[Candidate]:
        for batching, _ in self._batchings.values():
            paths = [path for path in self.fields if batching.dynamic_batching or not is_batcher_field(path)]
            for count in self.instance_count:
                for values in product(*(self.fields[path] for path in paths)):
                    fields = tuple(zip(paths, values, strict=True))
                    if not self._prefers_possible_sizes(batching.max_batch_size, fields):
                        continue
                    if self.effective_fields(batching.max_batch_size, fields) == fields:
                        yield replace(batching, instance_count=count, fields=fields)

    @cached_property
    def _admitted(self) -> tuple[int, ...]:
        return tuple(size for size in self.max_batch_size if size >= max(1, self.request_batch_size))

    @cached_property
    def _batchings(self) -> dict[object, BatcherBehaviour]:
        """The behaviours of the batcher by their key, the simplest one first."""
        batchings: dict[object, BatcherBehaviour] = {}
        combinations = product(self.max_batch_size, self.max_queue_delay_us, self.preferred_batch_sizes)
        for size, delay, policy in combinations:
            batching = self._batching(size, delay, policy)
            if batching is None:
                continue
            key = self._key(batching)
            normal = Candidate(min(self._admitted)) if key == ONE_BY_ONE else normalize(batching)
            values: dict[str, FieldValue] = {
                "max_batch_size": size,
                "max_queue_delay_us": delay,
                "preferred_batch_sizes": policy,
            }
            simplest, first_choices = batchings.get(key, BatcherBehaviour(normal, values))
            batchings[key] = BatcherBehaviour(min(simplest, normal, key=_simplicity), first_choices)
        return dict(sorted(batchings.items(), key=lambda item: _simplicity(item[1].candidate)))

    def _batching(self, size: Any, delay: Any, policy: Any) -> Candidate | None:
        """Return the candidate (batching only) of three choices; None if the server would refuse a request."""
        samples = self.request_batch_size
        if delay == OFF:
            return Candidate(size) if size >= samples or (size, samples) == (0, 1) else None
        sizes = resolve_preferred_sizes(policy, size)
        # a preferred size below one request is never reached
        if size < samples or sizes is None or any(not samples <= preferred <= size for preferred in sizes):
            return None
        return Candidate(size, dynamic_batching=True, max_queue_delay_us=delay, preferred_batch_sizes=sizes)

    def _key(self, candidate: Candidate) -> object:
        queued = any(map(is_batcher_field, self.fields))
        return behaviour(
            candidate, self.request_batch_size, queued=queued, stateful=self.is_stateful, streams=self.is_streaming
        )

    def effective_fields(self, max_batch_size: int, fields: Fields) -> Fields:
        """Return ``fields`` with the first choice of each setting that has no effect."""
        unused = self.without_effect(max_batch_size, dict(fields)).keys() & self.fields.keys()
        return tuple((path, self.fields[path][0] if path in unused else value) for path, value in fields)

    def without_effect(self, max_batch_size: int, fields: Mapping[str, FieldValue]) -> dict[str, str]:
        """Return the settings of ``fields`` that have no effect next to the others, with the reason in words.

        See ``ort_settings`` for those of ONNX Runtime, and ``queue_policy`` for those of the batcher's queue. In the
        sequence batcher a single request fills a batch if ``max_batch_size`` is at most 1, so it never waits. With
        the strategy ``direct`` a batch waits only if both its delay and its share of slots are above 0.
        """
        reasons = {**ort_settings.without_effect(fields), **queue_policy.without_effect(fields)}
        for path in self._preferred_paths:
            if fields.get(delay := f"{model_of_field(path)}/{MAX_QUEUE_DELAY}") == OFF:
                reasons[path] = f"with {delay} off"
        if max_batch_size <= 1:
            reasons |= {path: f"with max_batch_size {max_batch_size}" for path in _WAITING if path in fields}
        elif {DIRECT_DELAY, SLOT_UTILIZATION} <= fields.keys():
            for path, other in ((DIRECT_DELAY, SLOT_UTILIZATION), (SLOT_UTILIZATION, DIRECT_DELAY)):
                if float(fields[path]) == 0:
                    reasons[other] = f"with {short_path(path)} 0"
                    break
        return reasons

    @cached_property
    def _preferred_paths(self) -> tuple[str, ...]:
        """The fields that are preferred batch sizes: those of the sequence batcher, and of other models."""
        return tuple(p for p in self.fields if p == SEQUENCE_PREFERRED or p.endswith(f"/{PREFERRED_BATCH_SIZE}"))

    def _prefers_possible_sizes(self, max_batch_size: int, fields: Fields) -> bool:
        """Return whether Triton accepts the chosen preferred sizes of the sequence batcher and of other models.

        Those of a model whose ``max_batch_size`` is not in the space are not checked.
        """
        values = dict(fields) if self._preferred_paths else {}
        for path in self._preferred_paths:
            model = model_of_field(path)
            limit = values.get(f"{model}/{MAX_BATCH_SIZE}") if model else max_batch_size
            if limit is not None and values.get(f"{model}/{MAX_QUEUE_DELAY}") != OFF:
                sizes = resolve_preferred_sizes(str(values[path]), int(limit))
                if sizes is None or max(sizes, default=0) > int(limit):
                    return False
        return True

    def _choice(self, path: str, value: FieldValue) -> FieldValue:
        """Return the choice of ``path`` that equals ``value``: config.pbtxt has "4" for a 4 in the profile."""
        return next((choice for choice in self.fields.get(path, ()) if _text(choice) == _text(value)), value)


def _simplicity(batching: Candidate) -> tuple[object, ...]:
    sizes = batching.preferred_batch_sizes
    return batching.max_batch_size, batching.dynamic_batching, batching.max_queue_delay_us, len(sizes), sizes


def _choices(name: str, values: Any) -> tuple[Any, ...]:
    """Return the values without repetitions, in their order. 1 and True are different choices."""
    distinct = tuple({(type(value), value): value for value in values}.values())
    if not distinct:
        raise ParameterError(name, "give at least one value")
    return distinct


def _whole(name: str, value: object, minimum: int, maximum: int = MAX_INT32) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise ParameterError(name, f"{value!r} is not a whole number from {minimum} to {maximum}")
    return value


def _delay(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParameterError("max_queue_delay_us", f'{value!r} is neither whole microseconds nor "off" (in quotes)')
    return _whole("max_queue_delay_us", value, 0)


def refuse_field_of_key(path: str) -> None:
    """Raise ParameterError if a key of the space sets the field at ``path`` in ModelConfig."""
    if key := _KEY_OF_FIELD.get(re.sub(r"\.\d+(?=\.|$)", "", path)):
        option = _SWEEP_OPTIONS[key]
        raise ParameterError(path, f"write space.{key} in a profile, or {option} of `tune sweep`, in place of it")


def _field(path: str, values: Any) -> tuple[FieldValue, ...]:
    refuse_field_of_key(path)
    for value in values:
        if not isinstance(value, (str, int, float)) or value != value:
            raise ParameterError(path, f"{value!r} is not a text, a number or true/false")
        try:
            model_config.check_shell_value(path.rpartition("/")[2], str(value))
        except ValueError as error:
            raise ParameterError(path, str(error)) from None
    if path == SEQUENCE_PREFERRED:
        values = [parse_preferred_sizes(value) for value in values]
    if path == SERVER_CPUS:  # one text for each set of CPUs
        values = [format_cpus(_parsed(path, parse_cpus, value)) for value in values]
    if path == SERVER_PROCESSES:
        values = [_whole(path, value, 1, MAX_SERVER_PROCESSES) for value in values]
    if path.startswith(SERVER_OPTION_PREFIX):
        values = _options(path, values)
    if path.startswith(MODEL_JSON_PREFIX):
        _parsed(path, model_json.check_key, path.removeprefix(MODEL_JSON_PREFIX))
    if path == INSTANCE_GPUS:
        values = [gpu_placement.to_text(_parsed(path, gpu_placement.parse, value)) for value in values]
    return _choices(path, values)


def _options(path: str, values: Any) -> list[FieldValue]:
    try:
        name = server_options.check_option_name(path.removeprefix(SERVER_OPTION_PREFIX))
        return [server_options.normalize_value(name, value) for value in values]
    except ValueError as error:
        raise ParameterError(path, str(error)) from None


def _parsed(path: str, parse: Callable[[str], T], value: object) -> T:
    try:
        return parse(str(value))
    except ValueError as error:
        raise ParameterError(path, f"{value!r}: {error}") from None


def _text(value: FieldValue) -> str:
    return str(value).removesuffix(".0") if isinstance(value, float) else scalar_text(value)


def _words(values: tuple[object, ...]) -> str:
    return ", ".join(map(str, values))
