"""Checks whether a model can serve the priorities of a load, and the sizes and priorities of a recorded trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from optimizer.config.model_config_proto import ModelConfig
from optimizer.config.model_source import ModelSource
from optimizer.config.queue_policy import PRIORITY_LEVELS
from optimizer.core.errors import BadInputError
from optimizer.core.request_sizes import SizeDistribution
from optimizer.core.safe_text import one_line
from optimizer.core.trial import FieldValue
from optimizer.measure.load_client.request_trace import PRIORITY, SIZE, RecordedKinds

Fields: TypeAlias = Mapping[str, tuple[FieldValue, ...]]  # choices of the settings that config.pbtxt does not fix


def check_recorded_kinds(file: str, kinds: RecordedKinds, source: ModelSource, fields: Fields) -> None:
    """Raise BadInputError if a request of the trace ``file`` does not fit the model.

    Triton gives a request whose priority the model lacks the default priority, without an error. A priority has to be
    a level of every configuration that has levels. Those without levels treat all requests alike.
    """
    name = one_line(source.name)
    if source.is_streaming or source.is_stateful:
        raise BadInputError(
            f"{file}: {name} {'is stateful' if source.is_stateful else 'streams'}, and a trace has only its times; "
            f"leave the columns {SIZE} and {PRIORITY} out"
        )
    largest = max(source.config.max_batch_size, 1)
    levels = fewest_levels(source, fields)
    for (size, priority), line in zip(kinds.kinds, kinds.first_lines, strict=True):
        if size > largest:
            raise BadInputError(
                f"{file}:{line}: {SIZE} {size} is above the max_batch_size {largest} of {name}; send such requests "
                "in parts, or raise max_batch_size in config.pbtxt"
            )
        if priority > levels:
            raise BadInputError(
                f"{file}:{line}: {PRIORITY} {priority}: {_described(name, levels)}; raise {PRIORITY_LEVELS} in "
                f"config.pbtxt, or leave the column {PRIORITY} out"
            )


def fewest_levels(source: ModelSource, fields: Fields) -> int:
    """Return the fewest priority levels of the configurations that have any; 0 if none has.

    An ensemble passes the priority of a request on to its steps, so the levels are those of the steps.
    """
    levels: list[int] = []
    for name, config in _prioritized(source, source.name).items():
        path = PRIORITY_LEVELS if name == source.tuned_model else f"{name}/{PRIORITY_LEVELS}"
        levels += map(int, fields.get(path, (config.dynamic_batching.priority_levels,)))
    return min(filter(None, levels), default=0)


def _prioritized(source: ModelSource, name: str) -> dict[str, ModelConfig]:
    """Return the configurations of the models that get the priority of a request to the model ``name``."""
    config = source.models[name]
    steps = [_prioritized(source, step.model_name) for step in config.ensemble_scheduling.step]
    return {own: used for step in steps for own, used in step.items()} if steps else {name: config}


def priorities_fault(priorities: SizeDistribution, source: ModelSource, fields: Fields) -> str:
    """Return why the model cannot serve the ``priorities`` of a load; an empty text if it can."""
    name, levels = one_line(source.name), fewest_levels(source, fields)
    if source.is_streaming or source.is_stateful:
        return f"{name} {'is stateful' if source.is_stateful else 'streams'}; leave the priorities out"
    if priorities.largest > levels:
        return (
            f"{priorities.largest}: {_described(name, levels)}; raise {PRIORITY_LEVELS} in config.pbtxt, or set "
            "priority_levels in the space of a profile (in a sweep: with --config)"
        )
    return ""


def _described(name: str, levels: int) -> str:
    return f"{name} has the levels 1 to {levels}" if levels else f"{name} has no priority levels"
