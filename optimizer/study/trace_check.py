"""Checks whether a model can serve the sizes and priorities of a recorded trace of requests."""

from __future__ import annotations

from optimizer.config.model_source import ModelSource
from optimizer.config.search_space import SearchSpace
from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import one_line
from optimizer.measure.load_client.request_trace import PRIORITY, SIZE, RecordedKinds

PRIORITY_LEVELS = "dynamic_batching.priority_levels"


def check_recorded_kinds(file: str, kinds: RecordedKinds, source: ModelSource, space: SearchSpace) -> None:
    """Raise BadInputError if a request of the trace ``file`` does not fit the model.

    Triton gives a request whose priority the model lacks the default priority, without an error. A priority has to be
    a level of every configuration that has levels.
    """
    name = one_line(source.name)
    if source.is_streaming or source.is_stateful:
        raise BadInputError(
            f"{file}: {name} {'is stateful' if source.is_stateful else 'streams'}, and a trace has only its times; "
            f"leave the columns {SIZE} and {PRIORITY} out"
        )
    largest = max(source.config.max_batch_size, 1)
    levels = source.tuned_config.dynamic_batching.priority_levels
    levels = min(map(int, space.fields.get(PRIORITY_LEVELS, (levels,))))
    for (size, priority), line in zip(kinds.kinds, kinds.first_lines, strict=True):
        if size > largest:
            raise BadInputError(
                f"{file}:{line}: {SIZE} {size} is above the max_batch_size {largest} of {name}; send such requests "
                "in parts, or raise max_batch_size in config.pbtxt"
            )
        if priority > levels:
            has = f"{name} has the levels 1 to {levels}" if levels else f"{name} has no priority levels"
            raise BadInputError(
                f"{file}:{line}: {PRIORITY} {priority}: {has}; raise {PRIORITY_LEVELS} in config.pbtxt, or leave the "
                f"column {PRIORITY} out"
            )
