"""What a real run measures before it searches, as far as a space has it."""

from __future__ import annotations

from dataclasses import replace

from optimizer.space import Space
from optimizer.trial import Candidate


def baselines(space: Space) -> list[tuple[str, Candidate]]:
    """``Task.comparisons()`` of a model given with the largest max_batch_size and the fewest instances, by role.

    The baseline has no dynamic batching, the other has it plain (delay 0, no preferred sizes). A table does not
    say what its model's other fields were: their first choices stand for that. Only what lies in ``space`` can be
    measured; one entry where the two behave the same.
    """
    given = Candidate(
        max_batch_size=max(space.max_batch_size),
        instance_count=min(space.instance_count),
        fields=tuple((path, choices[0]) for path, choices in space.fields.items()),
    )
    roles = {"baseline": given, "dynamic_batching": replace(given, dynamic_batching=True)}
    found: dict[Candidate, str] = {}
    for role, candidate in roles.items():
        if space.values_of(candidate) is not None:
            found.setdefault(space.canonical(candidate), role)
    return [(role, candidate) for candidate, role in found.items()]
