"""What may vary: the choices, which combinations are valid, and one canonical form for each behaviour."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, TypeAlias

from optimizer import placement, server_options
from optimizer.batching import ONE_BY_ONE, behaviour, of_batcher, parse_policy, resolve_policy, tidy
from optimizer.machine import cpus
from optimizer.trial import INSTANCE_GPUS, SERVER_CPUS, SERVER_OPTION, Candidate, FieldValue

Value: TypeAlias = FieldValue
OFF = "off"
_LARGEST = 2**31 - 1
# ModelConfig fields that are dimensions of their own
_OWN = (
    "max_batch_size",
    "dynamic_batching",
    "dynamic_batching.max_queue_delay_microseconds",
    "dynamic_batching.preferred_batch_size",
)


@dataclass(frozen=True)
class Space:
    """Static choices for every tuned setting; any combination can be asked for, not every one is valid.

    ``max_batch_size``: samples; 0 (a model without batch dimension) only alone. ``max_queue_delay_us``: 0 or
    more, or ``"off"`` (also None) for no dynamic batching. ``preferred_batch_sizes``: policies, see
    ``batching.parse_policy``. ``fields``: proto path in ModelConfig, INSTANCE_GPUS, or what is about the server, ->
    values.
    ``request_batch_size``: samples a request. Repeated choices count once. Raises ValueError in one line where
    that makes no space.
    """

    max_batch_size: tuple[int, ...]
    max_queue_delay_us: tuple[int | str | None, ...] = (OFF,)
    preferred_batch_sizes: tuple[Any, ...] = ("none",)
    instance_count: tuple[int, ...] = (1,)
    fields: Mapping[str, tuple[FieldValue, ...]] = field(default_factory=dict, hash=False)
    request_batch_size: int = 1

    def __post_init__(self) -> None:
        _whole("request_batch_size", self.request_batch_size, 1)
        sizes = [_whole("max_batch_size", value, 0) for value in self.max_batch_size]
        delays = [OFF if value in (None, OFF) else _delay(value) for value in self.max_queue_delay_us]
        policies = [parse_policy(value) for value in self.preferred_batch_sizes]
        counts = [_whole("instance_count", value, 1) for value in self.instance_count]
        plain = {
            "max_batch_size": _choices("max_batch_size", sizes),
            "max_queue_delay_us": _choices("max_queue_delay_us", delays),
            "preferred_batch_sizes": _choices("preferred_batch_sizes", policies),
            "instance_count": _choices("instance_count", counts),
            "fields": {path: _field(path, values) for path, values in sorted(self.fields.items())},
        }
        for name, value in plain.items():
            object.__setattr__(self, name, value)
        if 0 in self.max_batch_size and len(self.max_batch_size) > 1:
            raise ValueError("max_batch_size: 0 (no batch dimension) cannot be mixed with other sizes")
        if not self._spellings:
            raise ValueError(
                f"no valid configuration: max_batch_size {_words(self.max_batch_size)}, preferred sizes "
                f"{_words(self.preferred_batch_sizes)}, request batch size {self.request_batch_size}"
            )

    def parameters(self) -> dict[str, tuple[Value, ...]]:
        """Every parameter with its choices: the four of Triton by name, other fields by proto path."""
        own: dict[str, tuple[Any, ...]] = {
            "max_batch_size": self.max_batch_size,
            "max_queue_delay_us": self.max_queue_delay_us,
            "preferred_batch_sizes": self.preferred_batch_sizes,
            "instance_count": self.instance_count,
        }
        return own | dict(self.fields)

    def candidate(self, values: Mapping[str, Value]) -> Candidate | None:
        """The canonical candidate for one choice per parameter; None where the combination is not valid.

        Raises KeyError for a missing parameter.
        """
        size, delay = values["max_batch_size"], values["max_queue_delay_us"]
        spelled = self._spell(size, delay, values["preferred_batch_sizes"])
        if spelled is None:
            return None
        fields = tuple((path, values[path]) for path in self.fields)
        return self.canonical(replace(spelled, instance_count=int(values["instance_count"]), fields=fields))

    def canonical(self, candidate: Candidate) -> Candidate:
        """The one candidate that stands for all that behave as ``candidate`` does under this request size.

        One request at a time is written without dynamic batching and with the smallest max_batch_size that
        admits the request. A candidate outside the space keeps its own numbers, in plain form.
        """
        key = self._key(candidate)
        known = self._spellings.get(key)
        if known is not None:
            batching = known[0]
        elif key == ONE_BY_ONE:
            batching = Candidate(min(self._admitted, default=candidate.max_batch_size))
        else:
            batching = candidate
        fields = tuple((path, self._choice(path, value)) for path, value in candidate.fields)
        return tidy(replace(batching, instance_count=candidate.instance_count, fields=fields))

    def values_of(self, candidate: Candidate) -> dict[str, Value] | None:
        """A choice per parameter that spells ``candidate``; None where it lies outside the space."""
        known = self._spellings.get(self._key(candidate))
        fields = {path: self._choice(path, value) for path, value in candidate.fields}
        if known is not None and not known[0].dynamic_batching:
            # without dynamic batching its fields are gone: any choice spells that
            fields = {path: values[0] for path, values in self.fields.items() if of_batcher(path)} | fields
        inside = fields.keys() == self.fields.keys() and all(fields[p] in self.fields[p] for p in fields)
        if known is None or not inside or candidate.instance_count not in self.instance_count:
            return None
        rest = {path: fields[path] for path in self.fields}
        return {**known[1], "instance_count": candidate.instance_count, **rest}

    def loads(self, candidate: Candidate) -> tuple[int, ...] | None:
        """The concurrencies at which it can be measured, ascending; None is any."""
        return None

    def candidates(self) -> tuple[Candidate, ...]:
        """All distinct canonical candidates, ordered by batching, then by the given choices of the rest."""
        return tuple(self._enumerate())

    def __len__(self) -> int:
        """The number of distinct canonical candidates."""
        every = math.prod(map(len, self.fields.values()))
        without_batcher = math.prod(len(v) for path, v in self.fields.items() if not of_batcher(path))
        batchings = [batching.dynamic_batching for batching, _ in self._spellings.values()]
        return len(self.instance_count) * sum(every if on else without_batcher for on in batchings)

    def _enumerate(self) -> Iterator[Candidate]:
        for batching, _ in self._spellings.values():
            paths = [path for path in self.fields if batching.dynamic_batching or not of_batcher(path)]
            for count in self.instance_count:
                for values in product(*(self.fields[path] for path in paths)):
                    fields = tuple(zip(paths, values, strict=True))
                    yield replace(batching, instance_count=count, fields=fields)

    @cached_property
    def _admitted(self) -> tuple[int, ...]:
        return tuple(size for size in self.max_batch_size if size >= max(1, self.request_batch_size))

    @cached_property
    def _spellings(self) -> dict[object, tuple[Candidate, dict[str, Value]]]:
        """Behaviour of the batcher -> its canonical candidate (batching only), the first choices for it."""
        found: dict[object, tuple[Candidate, dict[str, Value]]] = {}
        spellings = product(self.max_batch_size, self.max_queue_delay_us, self.preferred_batch_sizes)
        for size, delay, policy in spellings:
            assert delay is not None
            spelled = self._spell(size, delay, policy)
            if spelled is None:
                continue
            key = self._key(spelled)
            plain = Candidate(min(self._admitted)) if key == ONE_BY_ONE else tidy(spelled)
            values: dict[str, Value] = {
                "max_batch_size": size,
                "max_queue_delay_us": delay,
                "preferred_batch_sizes": policy,
            }
            best, first = found.get(key, (plain, values))
            found[key] = (min(best, plain, key=_simplicity), first)
        return dict(sorted(found.items(), key=lambda item: _simplicity(item[1][0])))

    def _spell(self, size: Any, delay: Any, policy: Any) -> Candidate | None:
        """Choices as a candidate (batching only), not yet canonical; None where it would be refused."""
        r = self.request_batch_size
        if delay == OFF:
            return Candidate(size) if size >= r or (size, r) == (0, 1) else None
        sizes = resolve_policy(policy, size)
        # a preferred size below one request is never hit
        if size < r or sizes is None or any(not r <= s <= size for s in sizes):
            return None
        return Candidate(size, dynamic_batching=True, max_queue_delay_us=delay, preferred_batch_sizes=sizes)

    def _key(self, candidate: Candidate) -> object:
        return behaviour(candidate, self.request_batch_size, queued=any(map(of_batcher, self.fields)))

    def _choice(self, path: str, value: FieldValue) -> FieldValue:
        """``value`` as the choices of the path spell it: a config gives "4" where the profile said 4."""
        return next((choice for choice in self.fields.get(path, ()) if _text(choice) == _text(value)), value)


def _simplicity(batching: Candidate) -> tuple[object, ...]:
    sizes = batching.preferred_batch_sizes
    return batching.max_batch_size, batching.dynamic_batching, batching.max_queue_delay_us, len(sizes), sizes


def _choices(name: str, values: Any) -> tuple[Any, ...]:
    """Without repeats, in the order given. 1 and True are different choices."""
    distinct = tuple({(type(value), value): value for value in values}.values())
    if not distinct:
        raise ValueError(f"{name}: give at least one value")
    return distinct


def _whole(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LARGEST:
        raise ValueError(f"{name}: {value!r} is not a whole number from {least} to {_LARGEST}")
    return value


def _delay(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f'max_queue_delay_us: {value!r} is neither whole microseconds nor "off" (in quotes)')
    return _whole("max_queue_delay_us", value, 0)


def _field(path: str, values: Any) -> tuple[FieldValue, ...]:
    if path in _OWN or (path.startswith("instance_group") and path.endswith(".count")):
        raise ValueError(f"{path}: is no other field; it has its own name in the space (instance_count, …)")
    for value in values:
        if not isinstance(value, (str, int, float)) or value != value:
            raise ValueError(f"{path}: {value!r} is not a text, a number or true/false")
    if path == SERVER_CPUS:  # one spelling for one set
        values = [cpus.show(_cpus(value)) for value in values]
    if path.startswith(SERVER_OPTION):
        values = _options(path, values)
    if path == INSTANCE_GPUS:
        values = [placement.show(_gpus(value)) for value in values]
    return _choices(path, values)


def _options(path: str, values: Any) -> list[FieldValue]:
    try:
        name = server_options.check_name(path.removeprefix(SERVER_OPTION))
        return [server_options.spelled(name, value) for value in values]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _cpus(value: object) -> frozenset[int]:
    try:
        return cpus.parse(str(value))
    except ValueError as error:
        raise ValueError(f"{SERVER_CPUS}: {value!r}: {error}") from None


def _gpus(value: object) -> tuple[int, ...]:
    try:
        return placement.parse(str(value))
    except ValueError as error:
        raise ValueError(f"{INSTANCE_GPUS}: {value!r}: {error}") from None


def _text(value: FieldValue) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _words(values: tuple[object, ...]) -> str:
    return ", ".join(map(str, values))
