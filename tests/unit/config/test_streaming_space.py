"""Test the search space of models that stream, which may compute requests together that no batch joined."""

from __future__ import annotations

from dataclasses import replace

from optimizer.config.search_space import SearchSpace

SPACE = SearchSpace((1, 4, 16), ("off", 0, 5000), ("none", "max/2"), (1, 2), is_streaming=True)


def test_each_largest_batch_is_a_configuration_of_its_own() -> None:
    without_batcher = {c.max_batch_size for c in SPACE.candidates() if not c.dynamic_batching}
    assert without_batcher == {1, 4, 16}
    merged = {c.max_batch_size for c in replace(SPACE, is_streaming=False).candidates() if not c.dynamic_batching}
    assert merged == {1}


def test_candidates_are_canonical_and_counted() -> None:
    candidates = SPACE.candidates()
    assert len(set(candidates)) == len(candidates) == len(SPACE)
    for candidate in candidates:
        assert SPACE.canonical(candidate) == candidate
        values = SPACE.parameter_values(candidate)
        assert values is not None
        assert SPACE.candidate(values) == candidate
