"""The choices of the sequence batcher's settings in the search space of a stateful model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from optimizer.config.batching import (
    SEQUENCE_PREFERRED,
    SLOT_UTILIZATION,
    is_batcher_field,
    is_sequence_field,
    preferred_text,
)
from optimizer.config.model_config_proto import ModelConfig
from optimizer.config.search_space import OFF
from optimizer.core.errors import ParameterError
from optimizer.core.safe_text import one_line
from optimizer.core.trial import FieldValue
from optimizer.model.profile_schema import SpaceSection

CANDIDATE_SEQUENCES = "sequence_batching.oldest.max_candidate_sequences"
DELAYS_US = (0, 500, 2000)
SEQUENCES = (16, 64, 256)
UTILIZATIONS = (0.5, 1.0)  # with 0, Triton's default, the delay has no effect


def strategy_of(config: ModelConfig) -> Literal["direct", "oldest"]:
    """Return the strategy of the sequence batcher; Triton's default is ``direct``."""
    return "oldest" if config.sequence_batching.HasField("oldest") else "direct"


def delay_path(config: ModelConfig) -> str:
    """Return the path of the delay of the model's strategy."""
    return f"sequence_batching.{strategy_of(config)}.max_queue_delay_microseconds"


def check_sequence_fields(
    section: SpaceSection, config: ModelConfig, fields: Mapping[str, Sequence[FieldValue]]
) -> None:
    """Raise ParameterError if the choices do not fit the batcher of the model of ``config``."""
    name = one_line(config.name)
    if not config.HasField("sequence_batching"):
        if path := next(filter(is_sequence_field, fields), None):
            raise ParameterError(path, f"{name} is not stateful: its config.pbtxt has no sequence_batching")
        return
    strategy = strategy_of(config)
    for path in fields:
        if is_batcher_field(path):
            raise ParameterError(
                path, f"{name} is stateful, and Triton allows no dynamic_batching with it; leave it out"
            )
        if is_sequence_field(path) and path.split(".")[1] in {"direct", "oldest"} - {strategy}:
            raise ParameterError(path, f"the strategy of {name} is {strategy}; choose settings of {strategy}")
    if OFF in (section.max_queue_delay_microseconds or ()):
        raise ParameterError(
            "max_queue_delay_us", f'{name} is stateful, so its batcher cannot be "off"; write microseconds from 0'
        )
    if strategy == "direct" and section.preferred_batch_size:
        raise ParameterError(
            "preferred_batch_sizes", f"the strategy of {name} is direct, which has no preferred sizes; leave them out"
        )
    if not all(str(value).isdecimal() and int(value) >= 1 for value in fields.get(CANDIDATE_SEQUENCES, ())):
        raise ParameterError(CANDIDATE_SEQUENCES, "write whole numbers from 1: an instance needs a sequence to batch")
    if SEQUENCE_PREFERRED in fields:
        raise ParameterError(SEQUENCE_PREFERRED, "write the sizes under the key preferred_batch_size of the space")


def sequence_fields(
    section: SpaceSection, config: ModelConfig, sizes: Sequence[int]
) -> dict[str, tuple[FieldValue, ...]]:
    """Return the choices of the sequence batcher that are not in ``section.fields()``.

    ``max_queue_delay_microseconds`` and ``preferred_batch_size`` of ``section`` are those of the sequence batcher.
    Other missing choices are derived from the model; there is at least one. ``sizes`` are the largest batches.
    """
    given = section.fields()
    batches = max(sizes) > 1
    fields: dict[str, tuple[FieldValue, ...]] = {}
    if strategy_of(config) == "oldest":
        oldest = config.sequence_batching.oldest
        own = int(oldest.max_candidate_sequences)
        fields[CANDIDATE_SEQUENCES] = tuple(sorted({own, *SEQUENCES}))
        own_delay = int(oldest.max_queue_delay_microseconds)
        fields[delay_path(config)] = tuple(sorted({own_delay, *DELAYS_US})) if batches else (own_delay,)
        own_sizes = preferred_text(oldest.preferred_batch_size, config.max_batch_size)
        fields[SEQUENCE_PREFERRED] = tuple(dict.fromkeys(("none", "max/2", own_sizes))) if batches else ("none",)
        if section.preferred_batch_size:
            fields[SEQUENCE_PREFERRED] = tuple(section.preferred_batch_size)
    else:
        direct = config.sequence_batching.direct
        own_delay, own_share = int(direct.max_queue_delay_microseconds), float(direct.minimum_slot_utilization)
        fields[delay_path(config)] = tuple(sorted({own_delay, *DELAYS_US})) if batches else (own_delay,)
        fields[SLOT_UTILIZATION] = tuple(sorted({*UTILIZATIONS, own_share} - {0.0})) if batches else (own_share,)
    if section.max_queue_delay_microseconds:
        fields[delay_path(config)] = tuple(section.max_queue_delay_microseconds)
    return {path: choices for path, choices in fields.items() if path not in given}


def profile_key(path: str) -> str:
    """Return the key in a profile's space for a setting of the sequence batcher; empty if it has none of its own."""
    if path == SEQUENCE_PREFERRED:
        return "preferred_batch_size"
    is_delay = is_sequence_field(path) and path.endswith(".max_queue_delay_microseconds")
    return "max_queue_delay_microseconds" if is_delay else ""
