"""The space of a recorded table: only what was recorded can be had."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

from optimizer.space import OFF, Space, Value
from optimizer.trial import Candidate, FieldValue


@dataclass(frozen=True)
class RecordedSpace(Space):
    """A Space in which a combination is valid where it behaves as a candidate of ``recorded`` does.

    ``recorded`` has the concurrencies of each candidate, none where its deployment failed. Candidates that
    behave the same are one, spelled as the first of them and with the loads of all. Make it by
    ``recorded_space``, which takes the choices from the candidates.
    """

    recorded: Mapping[Candidate, Set[int]] = field(default_factory=dict, hash=False)

    def candidate(self, values: Mapping[str, Value]) -> Candidate | None:
        found = super().candidate(values)
        return found if found in self._loads else None

    def values_of(self, candidate: Candidate) -> dict[str, Value] | None:
        return super().values_of(candidate) if self.canonical(candidate) in self._loads else None

    def loads(self, candidate: Candidate) -> tuple[int, ...] | None:
        return self._loads.get(self.canonical(candidate), ())

    def candidates(self) -> tuple[Candidate, ...]:
        """In the order of the table."""
        return tuple(self._loads)

    def __len__(self) -> int:
        return len(self._loads)

    @cached_property
    def _loads(self) -> dict[Candidate, tuple[int, ...]]:
        loads: dict[Candidate, tuple[int, ...]] = {}
        for candidate, own in self.recorded.items():
            canonical = self.canonical(candidate)
            loads[canonical] = tuple(sorted({*own, *loads.get(canonical, ())}))
        return loads

    @cached_property
    def _spellings(self) -> dict[object, tuple[Candidate, dict[str, Value]]]:
        """As in a Space, of the recorded candidates alone."""
        found: dict[object, tuple[Candidate, dict[str, Value]]] = {}
        policies = _policies(self.recorded)
        for candidate in self.recorded:
            batching = replace(candidate, instance_count=1, fields=())
            values: dict[str, Value] = {
                "max_batch_size": candidate.max_batch_size,
                "max_queue_delay_us": candidate.max_queue_delay_us if candidate.dynamic_batching else OFF,
                "preferred_batch_sizes": policies[candidate],
            }
            found.setdefault(self._key(candidate), (batching, values))
        return found


def recorded_space(recorded: Mapping[Candidate, Set[int]], request_batch_size: int) -> RecordedSpace:
    """The space of ``recorded`` (candidate -> concurrencies). Raises ValueError where they are of no one space."""
    fields: dict[str, list[FieldValue]] = {}
    for candidate in recorded:
        for path, value in candidate.fields:
            fields.setdefault(path, []).append(value)
    delays = {candidate.max_queue_delay_us for candidate in recorded if candidate.dynamic_batching}
    off = (OFF,) if not all(candidate.dynamic_batching for candidate in recorded) else ()
    return RecordedSpace(
        max_batch_size=tuple(sorted({candidate.max_batch_size for candidate in recorded})),
        max_queue_delay_us=(*off, *sorted(delays)),
        preferred_batch_sizes=tuple(_policies(recorded).values()),
        instance_count=tuple(sorted({candidate.instance_count for candidate in recorded})),
        fields={path: tuple(values) for path, values in fields.items()},
        request_batch_size=request_batch_size,
        recorded=recorded,
    )


def _policies(candidates: Iterable[Candidate]) -> dict[Candidate, str]:
    """Preferred sizes as policies, relative to max_batch_size where that makes no more categories of them.

    So ``4`` of 8 and ``8`` of 16 are one choice, ``max/2``: what was learned of one holds for the other.
    """
    relative = {candidate: _policy(candidate, relative=True) for candidate in candidates}
    absolute = {candidate: _policy(candidate, relative=False) for candidate in relative}
    return min((relative, absolute), key=lambda policies: len(set(policies.values())))


def _policy(candidate: Candidate, *, relative: bool) -> str:
    largest = candidate.max_batch_size

    def term(size: int) -> str:
        if not relative or largest % size:
            return str(size)
        return "max" if size == largest else f"max/{largest // size}"

    return ",".join(map(term, candidate.preferred_batch_sizes)) or "none"
