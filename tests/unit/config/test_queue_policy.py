"""Settings of the batcher's queue: invalid combinations, settings without effect, and limits that refuse requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer.config.model_source import ModelSource
from optimizer.config.queue_policy import (
    ALLOW_TIMEOUT_OVERRIDE,
    DEFAULT_PRIORITY_LEVEL,
    MAX_QUEUE_SIZE,
    PRESERVE_ORDERING,
    PRIORITY_LEVELS,
    PRIORITY_POLICY,
    TIMEOUT_ACTION,
    TIMEOUT_US,
    check_queue_fields,
    configured_queue,
    may_refuse,
    with_default_queue,
    with_queue,
)
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import Candidate, FieldValue, short_path
from optimizer.core.errors import ParameterError
from optimizer.core.request_sizes import parse_size_distribution
from optimizer.machine.hardware import Hardware
from optimizer.model.default_space import build_space
from optimizer.model.profile_schema import SpaceSection

Fields = Mapping[str, tuple[FieldValue, ...]]
LEVELS: Fields = {PRIORITY_LEVELS: (0, 2), DEFAULT_PRIORITY_LEVEL: (2,)}

TWO_LEVELS = "dynamic_batching { priority_levels: 2 default_priority_level: 1 }"


def config(text: str = "", max_batch_size: int = 8) -> ModelConfig:
    return text_format.Parse(text, ModelConfig(max_batch_size=max_batch_size))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({MAX_QUEUE_SIZE: (0, 16)}, ""),
        ({TIMEOUT_US: (0, 1000), TIMEOUT_ACTION: ("REJECT", "DELAY")}, ""),
        (
            {TIMEOUT_ACTION: ("DELAY",)},
            "dynamic_batching { default_queue_policy { default_timeout_microseconds: 9 } }",
        ),
        (LEVELS, ""),
        ({**LEVELS, f"{PRIORITY_POLICY}.1.max_queue_size": (4,)}, ""),
        ({f"{PRIORITY_POLICY}.2.max_queue_size": (4,)}, TWO_LEVELS),
        ({PRESERVE_ORDERING: (True, False)}, ""),
        ({TIMEOUT_US: (0, 9), TIMEOUT_ACTION: ("DELAY",), PRESERVE_ORDERING: (False,)}, ""),
        ({TIMEOUT_US: (9,), TIMEOUT_ACTION: ("REJECT",), PRESERVE_ORDERING: (True,)}, ""),
        ({ALLOW_TIMEOUT_OVERRIDE: ("true", "false")}, ""),  # the words of a sweep
    ],
)
def test_combinations_that_triton_accepts_are_allowed(fields: Fields, text: str) -> None:
    check_queue_fields(config(text), fields)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({TIMEOUT_ACTION: ("DELAY",)}, "timeout_action: .* without a timeout; add default_timeout_microseconds"),
        ({TIMEOUT_ACTION: ("DELAY",), TIMEOUT_US: (0,)}, "without a timeout"),
        ({PRIORITY_LEVELS: (2,)}, "add default_priority_level from 1 to 2"),
        ({DEFAULT_PRIORITY_LEVEL: (1,)}, "has no effect without levels; add priority_levels"),
        ({PRIORITY_LEVELS: (2, 4), DEFAULT_PRIORITY_LEVEL: (1, 3)}, "3 is not a level from 1 to priority_levels 2"),
        ({**LEVELS, f"{PRIORITY_POLICY}.3.max_queue_size": (4,)}, "3 is not a level from 1 to priority_levels 2"),
        ({f"{PRIORITY_POLICY}.1.max_queue_size": (4,)}, "has no effect without levels"),
        ({**LEVELS, f"{PRIORITY_POLICY}.1.timeout_action": ("DELAY",)}, "without a timeout"),
        ({**LEVELS, PRESERVE_ORDERING: (True,)}, "excludes preserve_ordering"),
        ({**LEVELS, PRESERVE_ORDERING: ("true",)}, "excludes preserve_ordering"),
        ({TIMEOUT_US: (0, 9), TIMEOUT_ACTION: ("REJECT", "DELAY"), PRESERVE_ORDERING: (True,)}, "DELAY excludes"),
        (
            {
                PRIORITY_LEVELS: (1,),
                DEFAULT_PRIORITY_LEVEL: (1,),
                PRESERVE_ORDERING: (True, False),
                f"{PRIORITY_POLICY}.1.default_timeout_microseconds": (9,),
                f"{PRIORITY_POLICY}.1.timeout_action": ("DELAY",),
            },
            r"priority_queue_policy\.1\.timeout_action: DELAY excludes preserve_ordering",
        ),
        ({ALLOW_TIMEOUT_OVERRIDE: ("yes",)}, "'yes' does not fit; it takes true or false"),
        ({MAX_QUEUE_SIZE: (True,)}, "True does not fit"),
        ({MAX_QUEUE_SIZE: (-1,)}, "-1 does not fit"),
    ],
)
def test_other_combinations_are_refused(fields: Fields, problem: str) -> None:
    with pytest.raises(ParameterError, match=problem):
        check_queue_fields(config(), fields)


def test_the_order_of_a_model_that_delays_is_not_preserved() -> None:
    text = "dynamic_batching { default_queue_policy { default_timeout_microseconds: 9 timeout_action: DELAY } }"
    with pytest.raises(ParameterError, match="DELAY excludes preserve_ordering"):
        check_queue_fields(config(text), {PRESERVE_ORDERING: (True,)})


def test_a_model_without_batch_dimension_has_no_queue() -> None:
    with pytest.raises(ParameterError, match="max_queue_size: needs dynamic batching"):
        check_queue_fields(config(max_batch_size=0), {MAX_QUEUE_SIZE: (4,)})


def test_a_queue_needs_a_delay_in_the_space() -> None:
    source = ModelSource(Path("models"), "m", config())

    def space_with_delays(*delays: int | str) -> SearchSpace:
        section = SpaceSection(max_queue_delay_microseconds=delays, max_queue_size=(0, 4))
        return build_space(section, source, parse_size_distribution("1"), Hardware((), "a CPU", 2, 1 << 30))

    assert MAX_QUEUE_SIZE in space_with_delays("off", 0).fields
    with pytest.raises(ParameterError, match="max_queue_size: has no effect without dynamic batching; add a delay"):
        space_with_delays("off")


def test_settings_without_effect_are_searched_once() -> None:
    fields: Fields = {
        TIMEOUT_US: (0, 1000),
        TIMEOUT_ACTION: ("REJECT", "DELAY"),
        **LEVELS,
        DEFAULT_PRIORITY_LEVEL: (1, 2),
    }
    space = SearchSpace((4,), (0,), fields=fields)
    candidates_settings = [dict(candidate.fields) for candidate in space.candidates()]
    assert len(space) == len(candidates_settings) == 3 * 3  # no timeout, or two actions; no levels, or two defaults
    assert all(settings[TIMEOUT_ACTION] == "REJECT" for settings in candidates_settings if settings[TIMEOUT_US] == 0)
    assert all(
        settings[DEFAULT_PRIORITY_LEVEL] == 1 for settings in candidates_settings if settings[PRIORITY_LEVELS] == 0
    )
    for candidate in space.candidates():
        values = space.parameter_values(candidate)
        assert values is not None
        assert space.candidate(values) == candidate


def test_the_permission_of_a_timeout_is_searched_only_where_it_turns_prefetching_off() -> None:
    fields: Fields = {MAX_QUEUE_SIZE: (0, 4), ALLOW_TIMEOUT_OVERRIDE: (False, True)}
    candidates_settings = [
        dict(candidate.fields) for candidate in SearchSpace((4,), (0,), fields=fields).candidates()
    ]
    pairs = [(settings[MAX_QUEUE_SIZE], settings[ALLOW_TIMEOUT_OVERRIDE]) for settings in candidates_settings]
    assert sorted(pairs) == [(0, False), (0, True), (4, False)]


def test_the_queue_of_a_configuration_is_what_differs_from_the_defaults() -> None:
    text = (
        "dynamic_batching { priority_levels: 2 default_priority_level: 2 default_queue_policy { max_queue_size: 4 } "
        "priority_queue_policy { key: 1 value { default_timeout_microseconds: 9 timeout_action: DELAY } } }"
    )
    assert dict(configured_queue(config(text))) == {
        MAX_QUEUE_SIZE: 4,
        PRIORITY_LEVELS: 2,
        DEFAULT_PRIORITY_LEVEL: 2,
        f"{PRIORITY_POLICY}.1.max_queue_size": 0,
        f"{PRIORITY_POLICY}.1.default_timeout_microseconds": 9,
        f"{PRIORITY_POLICY}.1.timeout_action": "DELAY",
        f"{PRIORITY_POLICY}.1.allow_timeout_override": False,
    }
    assert configured_queue(config("dynamic_batching { }")) == configured_queue(config()) == ()


def test_policies_of_levels_limit_nothing_in_a_configuration_without_levels() -> None:
    queue = configured_queue(
        config("dynamic_batching { priority_queue_policy { key: 1 value { max_queue_size: 4 } } }")
    )
    assert dict(queue)[PRIORITY_LEVELS] == 0
    assert not may_refuse({path: (value,) for path, value in queue})


def test_settings_of_a_candidate_replace_those_of_the_configuration() -> None:
    configured = configured_queue(config("dynamic_batching { default_queue_policy { max_queue_size: 4 } }"))
    candidate = Candidate(4, dynamic_batching=True, fields=((MAX_QUEUE_SIZE, 9),))
    assert with_queue(candidate, configured) == candidate
    assert dict(with_queue(replace(candidate, fields=()), configured).fields) == {MAX_QUEUE_SIZE: 4}
    assert with_queue(Candidate(4), configured) == Candidate(4)


def test_limits_and_timeouts_that_reject_may_refuse_requests() -> None:
    assert may_refuse({MAX_QUEUE_SIZE: (0, 4)})
    assert may_refuse({f"{PRIORITY_POLICY}.2.default_timeout_microseconds": (9,)})
    assert not may_refuse({MAX_QUEUE_SIZE: (0,), **LEVELS})
    assert not may_refuse({PRIORITY_LEVELS: (0,), f"{PRIORITY_POLICY}.2.max_queue_size": (4,)})
    assert not may_refuse({TIMEOUT_US: (9,), TIMEOUT_ACTION: ("DELAY",)})
    assert may_refuse({TIMEOUT_US: (9,), TIMEOUT_ACTION: ("REJECT", "DELAY")})
    assert not may_refuse({PRESERVE_ORDERING: (True,)})


def test_the_names_of_a_level_keep_the_level() -> None:
    assert short_path(f"{PRIORITY_POLICY}.2.max_queue_size") == "priority_queue_policy.2.max_queue_size"
    assert short_path(MAX_QUEUE_SIZE) == "max_queue_size"


def test_a_configuration_without_queue_settings_is_the_one_without_limits() -> None:
    fields: Fields = {MAX_QUEUE_SIZE: (0, 4), TIMEOUT_US: (0, 9), TIMEOUT_ACTION: ("DELAY", "REJECT"), **LEVELS}
    space = SearchSpace((4,), (0,), fields=fields)
    plain = with_default_queue(Candidate(4, dynamic_batching=True), space.fields)
    assert space.canonical(plain) in space.candidates()
    assert not may_refuse({path: (value,) for path, value in plain.fields})
    assert with_default_queue(Candidate(4), space.fields) == Candidate(4)
    limited = Candidate(4, dynamic_batching=True, fields=((MAX_QUEUE_SIZE, 4),))
    assert dict(with_default_queue(limited, space.fields).fields)[MAX_QUEUE_SIZE] == 4
