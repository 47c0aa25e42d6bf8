"""Test the search space of stateful models, and the config.pbtxt of their candidates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer.config.batching import (
    CANDIDATE_SEQUENCES,
    DIRECT_DELAY,
    OLDEST_DELAY,
    SEQUENCE_PREFERRED,
    SLOT_UTILIZATION,
)
from optimizer.config.model_config import apply, candidate_of, differences
from optimizer.config.model_source import ModelSource
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import Candidate
from optimizer.core.errors import ParameterError
from optimizer.core.request_sizes import parse_size_distribution
from optimizer.machine.hardware import Hardware
from optimizer.model.default_space import build_space, space_keys
from optimizer.model.profile_schema import SpaceSection
from optimizer.results.configuration_text import triton_lines

OLDEST = 'name: "m" backend: "python" max_batch_size: 8 sequence_batching { oldest { max_candidate_sequences: 32 } }'
DIRECT = 'name: "m" backend: "python" max_batch_size: 8 sequence_batching { }'
TWO_CPUS = Hardware((), "a CPU", 2, 1 << 30)
SINGLE_REQUESTS = parse_size_distribution("1")


def config(text: str) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())


def space(text: str, **section: Any) -> SearchSpace:
    """Return the space of the model with these keys of a profile's space, whose lists are tuples there."""
    section = {key: tuple(value) if isinstance(value, list) else value for key, value in section.items()}
    section["config"] = {path: tuple(choices) for path, choices in section.get("config", {}).items()}
    source = ModelSource(Path("models"), "m", config(text))
    return build_space(SpaceSection(**section), source, SINGLE_REQUESTS, TWO_CPUS)


def test_the_derived_space_of_oldest_has_the_batcher_settings_and_no_dynamic_batching() -> None:
    derived = space(OLDEST)
    assert derived.is_stateful
    assert derived.max_queue_delay_us == ("off",)
    assert derived.max_batch_size == (1, 2, 4, 8)
    assert derived.fields[CANDIDATE_SEQUENCES] == (16, 32, 64, 256)
    assert derived.fields[OLDEST_DELAY] == (0, 500, 2000)
    assert derived.fields[SEQUENCE_PREFERRED] == ("none", "max/2")
    candidates = derived.candidates()
    assert len(candidates) == len(set(candidates)) == len(derived)
    assert {candidate.max_batch_size for candidate in candidates} == {1, 2, 4, 8}
    assert not any(candidate.dynamic_batching for candidate in candidates)


def test_a_direct_batcher_that_never_waits_counts_once() -> None:
    derived = space(DIRECT, max_batch_size=[8], instance_group_count=[1])
    assert derived.fields[DIRECT_DELAY] == (0, 500, 2000)
    assert derived.fields[SLOT_UTILIZATION] == (0.5, 1.0)
    pairs = [(dict(c.fields)[DIRECT_DELAY], dict(c.fields)[SLOT_UTILIZATION]) for c in derived.candidates()]
    assert pairs == [(0, 0.5), (500, 0.5), (500, 1.0), (2000, 0.5), (2000, 1.0)]
    never_waiting = Candidate(8, fields=((DIRECT_DELAY, 0), (SLOT_UTILIZATION, 0.0)))
    assert derived.canonical(never_waiting) == derived.candidates()[0]
    assert derived.parameter_values(never_waiting) is not None


@pytest.mark.parametrize(("text", "delay"), [(OLDEST, OLDEST_DELAY), (DIRECT, DIRECT_DELAY)])
def test_the_delay_counts_once_where_a_request_fills_a_batch(text: str, delay: str) -> None:
    derived = space(text, max_batch_size=[1, 4], max_queue_delay_microseconds=[500, 0])
    alone = [candidate for candidate in derived.candidates() if candidate.max_batch_size == 1]
    assert {dict(candidate.fields)[delay] for candidate in alone} == {500}
    assert {dict(c.fields)[delay] for c in derived.candidates() if c.max_batch_size == 4} == {500, 0}
    without_delay = replace(alone[0], fields=tuple((dict(alone[0].fields) | {delay: 0}).items()))
    assert derived.canonical(without_delay) == alone[0]
    values = derived.parameter_values(without_delay)
    assert values is not None
    assert derived.candidate(values) == alone[0]
    assert len(derived.candidates()) == len(set(derived.candidates())) == len(derived)


def test_the_keys_for_batching_are_those_of_the_sequence_batcher() -> None:
    limited_space = space(
        OLDEST, max_batch_size=[4], max_queue_delay_microseconds=[100], preferred_batch_size=["max/2", 4]
    )
    assert limited_space.fields[OLDEST_DELAY] == (100,)
    assert limited_space.fields[SEQUENCE_PREFERRED] == ("max/2", "4")
    space_of_its_keys = space(OLDEST, **space_keys(limited_space))
    assert space_of_its_keys == limited_space


@pytest.mark.parametrize(
    ("text", "section", "problem"),
    [
        (OLDEST, {"max_queue_delay_microseconds": ["off"]}, 'cannot be "off"'),
        (OLDEST, {"max_batch_size": [4], "preferred_batch_size": [8]}, "no choice divides or fits max_batch_size 4"),
        (OLDEST, {"config": {CANDIDATE_SEQUENCES: [0, 4]}}, f"{CANDIDATE_SEQUENCES}: write whole numbers from 1"),
        (OLDEST, {"config": {CANDIDATE_SEQUENCES: [-1]}}, "write whole numbers from 1"),
        (
            DIRECT.replace("max_batch_size: 8", ""),
            {"max_batch_size": [8]},
            r"m has no batch dimension; write \[0\] or leave it out",
        ),
        (OLDEST, {"config": {SLOT_UTILIZATION: [0.5]}}, "the strategy of m is oldest"),
        (OLDEST, {"config": {"dynamic_batching.preserve_ordering": [True]}}, "no dynamic_batching"),
        (DIRECT, {"preferred_batch_size": [4]}, "the strategy of m is direct"),
        ('name: "m" max_batch_size: 8', {"config": {CANDIDATE_SEQUENCES: [8]}}, "m is not stateful"),
    ],
)
def test_choices_that_do_not_fit_the_strategy_are_refused(text: str, section: dict[str, Any], problem: str) -> None:
    with pytest.raises(ParameterError, match=problem):
        space(text, **section)


def test_the_emitted_configuration_has_exactly_the_settings_of_the_candidate() -> None:
    base = config(OLDEST)
    fields = ((CANDIDATE_SEQUENCES, 64), (OLDEST_DELAY, 500), (SEQUENCE_PREFERRED, "max/2"))
    candidate = Candidate(16, instance_count=2, fields=fields)
    applied = apply(candidate, base)
    oldest = applied.sequence_batching.oldest
    assert (oldest.max_candidate_sequences, oldest.max_queue_delay_microseconds) == (64, 500)
    assert list(oldest.preferred_batch_size) == [8]
    assert not applied.HasField("dynamic_batching")
    assert differences(candidate, applied) == []
    assert differences(candidate, base) != []
    assert candidate_of(applied, [SEQUENCE_PREFERRED]).fields == ((SEQUENCE_PREFERRED, "8"),)
    assert triton_lines(candidate)[1] == (
        "sequence_batching { oldest { max_candidate_sequences: 64 max_queue_delay_microseconds: 500 "
        "preferred_batch_size: [ 8 ] } }"
    )
    assert "sequence batching" in str(candidate)


def test_the_size_that_triton_adds_is_no_difference() -> None:
    served = config(OLDEST)
    served.sequence_batching.oldest.preferred_batch_size[:] = [8]
    assert differences(Candidate(8, fields=((SEQUENCE_PREFERRED, "none"),)), served) == []
