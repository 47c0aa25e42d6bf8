"""Tuning changes only the tuned settings of a configuration, for any possible ModelConfig."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from google.protobuf import json_format, text_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer.config import field_path
from optimizer.config.model_config import apply, differences, to_override_json, to_text
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import Candidate

THREADS = "intra_op_thread_count"
DEEPEST = 3
SPACE = SearchSpace(
    (1, 4, 32),
    ("off", 0, 100),
    ("none", "max/2", "max"),
    (1, 3),
    {f"parameters.{THREADS}.string_value": ("1", "2")},
)
SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    # json_format writes the largest floats with so few digits that it refuses to read them
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(-(2.0**127), 2.0**127, width=32),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(allow_nan=False, allow_infinity=False),
    FieldDescriptor.CPPTYPE_STRING: st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
}


def fill(message: Message, draw: st.DrawFn, depth: int = 0) -> None:
    """Draw a few fields of the message, and fields of its nested messages."""
    fields: dict[str, Any] = {field.name: field for field in message.DESCRIPTOR.fields}
    names = st.lists(st.sampled_from(list(fields)), unique=True, max_size=6) if fields else st.just([])
    for field in map(fields.__getitem__, draw(names)):
        if field_path.is_map(field):
            key = draw(SCALARS[field_path.map_entry_field(field, "key").cpp_type])
            value = field_path.map_entry_field(field, "value")
            if value.message_type is None:
                getattr(message, field.name)[key] = draw(SCALARS[value.cpp_type])
            else:
                fill(getattr(message, field.name)[key], draw, depth + 1)
        elif field.message_type is not None:
            if depth < DEEPEST:
                inner = getattr(message, field.name)
                inner = inner.add() if field_path.is_repeated(field) else inner
                inner.SetInParent()
                fill(inner, draw, depth + 1)
        elif field_path.is_repeated(field):
            getattr(message, field.name).extend(draw(st.lists(values(field), max_size=3)))
        else:
            setattr(message, field.name, draw(values(field)))


def values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.enum_type is not None:
        return st.sampled_from([value.number for value in field.enum_type.values])
    return SCALARS[field.cpp_type]


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Draw any configuration but an ensemble, which has no instances and no batcher of its own."""
    config = ModelConfig()
    fill(config, draw)
    for _ in range(draw(st.integers(0, 2))):  # settings next to the tuned ones, more often than by chance
        fill(config.instance_group.add(), draw, 1)
    if config.WhichOneof("scheduling_choice") is None and draw(st.booleans()):
        fill(config.dynamic_batching, draw, 1)
    if config.instance_group:
        config.instance_group[0].passive = False  # at least one group runs requests
    config.ClearField("ensemble_scheduling")
    return config


def tunable(candidate: Candidate, config: ModelConfig) -> Candidate:
    """Draw a candidate, without dynamic batching if another scheduler excludes it."""
    if config.WhichOneof("scheduling_choice") in (None, "dynamic_batching"):
        return candidate
    return replace(candidate, dynamic_batching=False, max_queue_delay_us=0, preferred_batch_sizes=())


def untuned(config: ModelConfig, candidate: Candidate, groups: int) -> ModelConfig:
    """Return ``config`` without the settings of ``candidate``, with only the first ``groups`` instance groups."""
    rest = ModelConfig()
    rest.CopyFrom(config)
    rest.ClearField("max_batch_size")
    rest.parameters[THREADS].string_value = ""
    for sample in rest.model_warmup:  # Triton runs no larger batch
        sample.batch_size = min(sample.batch_size, max(1, candidate.max_batch_size))
    if not candidate.dynamic_batching:
        rest.ClearField("dynamic_batching")
    else:
        rest.dynamic_batching.SetInParent()
        for name in ("max_queue_delay_microseconds", "preferred_batch_size"):
            rest.dynamic_batching.ClearField(name)
    del rest.instance_group[groups:]
    for group in rest.instance_group:
        if not group.passive:
            group.ClearField("count")
    return rest


@settings(max_examples=150, deadline=None)
@given(configs(), st.sampled_from(list(SPACE.candidates())))
def test_every_other_field_survives(base: ModelConfig, of_space: Candidate) -> None:
    given_text = to_text(base)
    candidate = tunable(of_space, base)
    result = apply(candidate, base)
    assert to_text(base) == given_text
    groups = len(base.instance_group)
    assert untuned(result, candidate, groups) == untuned(base, candidate, groups)
    assert differences(candidate, result) == []
    # the written config.pbtxt and the load request of a trial have the same settings
    assert text_format.Parse(to_text(result), ModelConfig()) == result
    assert json_format.ParseDict(json.loads(to_override_json(result)), ModelConfig()) == result


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 2**31 - 1), max_size=4), st.sampled_from(list(SPACE.candidates())))
def test_no_inherited_preferred_size_is_above_the_limit(sizes: list[int], candidate: Candidate) -> None:
    """Triton would not load such a model."""
    base = ModelConfig(max_batch_size=2**31 - 1)
    base.dynamic_batching.preferred_batch_size.extend(sizes)
    batching = apply(candidate, base).dynamic_batching
    assert tuple(batching.preferred_batch_size) == candidate.preferred_batch_sizes
    assert max(batching.preferred_batch_size, default=0) <= candidate.max_batch_size
