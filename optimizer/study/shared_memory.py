"""Which runs can use shared memory."""

from __future__ import annotations

from optimizer.config.model_source import ModelSource
from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import one_line
from optimizer.core.shared_memory import DEFAULT_OUTPUT_BYTES, SharedMemory
from optimizer.options.run_options import RunOptions


def requested(options: RunOptions) -> SharedMemory | None:
    """Return the shared memory that ``options`` ask for; None without any."""
    if options.shared_memory == "none":
        return None
    return SharedMemory(options.shared_memory, round(options.output_shared_memory_bytes or DEFAULT_OUTPUT_BYTES))


def check_model(options: RunOptions, source: ModelSource, *, on_gpu: bool) -> None:
    """Raise BadInputError if the load on ``source`` cannot use the shared memory of ``options``."""
    if options.shared_memory == "none":
        return
    name = one_line(source.name)
    if source.is_streaming:
        problem = f"{name} streams, and tune's own client receives its responses in messages; leave it out"
    elif source.is_stateful:
        problem = f"{name} is stateful, and tune's own client sends its sequences in messages; leave it out"
    elif source.concurrent:
        problem = "several models get load at the same time, and perf_analyzer unregisters all regions; leave it out"
    elif options.shared_memory == "system" and options.load != "rate" and (tensor := _unnameable(source)):
        problem = f"perf_analyzer names memory after tensors, and {tensor!r} is no name of a file; use --load rate"
    elif options.shared_memory == "cuda" and not on_gpu:
        problem = f"{name} is served on the CPU; use --shared-memory system"
    else:
        return
    raise BadInputError(f"--shared-memory {options.shared_memory}: {problem}")


def _unnameable(source: ModelSource) -> str:
    """Return a tensor of the model whose name has a slash; empty if there is none."""
    tensors = (*source.config.input, *source.config.output)
    return next((one_line(tensor.name, 60) for tensor in tensors if "/" in tensor.name), "")
