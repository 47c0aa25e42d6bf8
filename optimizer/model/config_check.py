"""Checks before a server starts: a config.pbtxt by the rules of Triton, and the number of instances by the memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from optimizer.config.backends import backend_of
from optimizer.config.model_config_proto import ModelConfig
from optimizer.config.model_source import ModelSource
from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import format_value, show_path
from optimizer.machine.hardware import memory_bytes
from optimizer.options.run_options import RunOptions

NO_SCALARS = (
    "it is a scalar, which Triton passes only to a model with batches; give it the shape [1] in the model, or a "
    "batch dimension"
)


def check_config(config: ModelConfig, path: Path, versions: Sequence[int]) -> None:
    """Raise BadInputError if Triton refuses ``config``, the content of ``path``, on every server.

    ``versions`` are the numbers of the model's version folders.
    """
    if problem := _batching_problem(config) or _tensor_problem(config) or _version_problem(config, versions):
        raise BadInputError(f"{show_path(path)}: {problem}")


def _batching_problem(config: ModelConfig) -> str:
    if config.max_batch_size < 0:
        return f"max_batch_size {config.max_batch_size} is below 0; write the largest batch, or 0 for no batches"
    sizes = config.dynamic_batching.preferred_batch_size
    if any(size < 1 for size in sizes):
        return f"preferred_batch_size {min(sizes)} is below 1, which Triton refuses; leave it out"
    largest = max(sizes, default=0)
    if largest > config.max_batch_size:
        return (
            f"preferred_batch_size {largest} is above max_batch_size {config.max_batch_size}, which Triton refuses; "
            "lower it or raise max_batch_size"
        )
    if problem := _sequence_problem(config):
        return problem
    counts = [group.count for group in config.instance_group]
    if any(count < 0 for count in counts):
        return f"instance_group: count {min(counts)} is below 0; write the number of instances"
    return ""


def _sequence_problem(config: ModelConfig) -> str:
    if not config.HasField("sequence_batching"):
        return ""
    if config.model_transaction_policy.decoupled:
        return (
            "sequence_batching and decoupled: tune measures models that keep state or that stream, not both in one; "
            "tune a copy with one of them"
        )
    oldest = config.sequence_batching.oldest
    largest = max(oldest.preferred_batch_size, default=0)
    if largest > config.max_batch_size:
        return (
            f"sequence_batching.oldest: preferred_batch_size {largest} is above max_batch_size "
            f"{config.max_batch_size}; lower it or raise max_batch_size"
        )
    if config.sequence_batching.HasField("oldest") and oldest.max_candidate_sequences < 1:
        return "sequence_batching.oldest: max_candidate_sequences is missing; write the sequences that are batched"
    return ""


def _tensor_problem(config: ModelConfig) -> str:
    for kind, tensors in (("input", config.input), ("output", config.output)):
        name, times = Counter(tensor.name for tensor in tensors).most_common(1)[0] if tensors else ("", 0)
        if times > 1:
            return f"{kind} {format_value(name)} is there {times} times; keep one"
        for tensor in tensors:
            which = f"{kind} {format_value(tensor.name)}"
            if any(dim < 1 and dim != -1 for dim in tensor.dims):
                dims = format_value(tuple(tensor.dims))
                return f"{which}: dims {dims}: write sizes from 1, or -1 for a variable size"
            if tensor.HasField("reshape") and not tensor.reshape.shape and not config.max_batch_size:
                return f"{which}: {NO_SCALARS}"
    return ""


def _version_problem(config: ModelConfig, versions: Sequence[int]) -> str:
    specific = config.version_policy.specific.versions
    if not specific or set(specific) & set(versions):
        return ""
    available = ", ".join(map(str, sorted(versions))) or "none"
    return f"version_policy: there is no version {', '.join(map(str, specific[:8]))}; the model has {available}"


MAX_INSTANCES = 64  # the default of --max-instance-count
GIB = 2**30
PROCESS_BYTES = 32 << 20  # the least memory of an instance's process, without weights
BACKENDS_THAT_COPY = ("onnxruntime", "pytorch")  # each instance has weights of its own


def instance_count(config: ModelConfig) -> int:
    """Return the number of instances that ``config`` asks for, on all of its GPUs."""
    groups = (group for group in config.instance_group if not group.passive)
    return sum(max(group.count, 1) * max(len(group.gpus), 1) for group in groups)


def too_many_instances(counts: Iterable[int], source: ModelSource, options: RunOptions, *, on_gpu: bool) -> str:
    """Return why one of ``counts`` is too large a number of instances of a model; an empty string if none is.

    The limit is ``--max-instance-count``. On the CPU of this machine the processes also have to fit into its memory,
    with the weights of a single model unless the user has set the limit.
    """
    largest = max(counts, default=0)
    limit = options.max_instance_count or MAX_INSTANCES
    if largest > limit:
        return (
            f"{largest:,} instances are above the limit of {limit:,}; write fewer, or raise the limit with "
            "--max-instance-count"
        )
    if on_gpu or options.target not in ("embedded", "local") or options.cluster is not None or largest < 2:
        return ""
    copied = backend_of(source.tuned_config) in BACKENDS_THAT_COPY and not source.composing
    weights = int(source.facts.get("model_bytes", 0)) if copied and options.max_instance_count is None else 0
    needed_bytes, limit_bytes = largest * (PROCESS_BYTES + weights), memory_bytes()
    if needed_bytes <= limit_bytes:
        return ""
    return (
        f"{largest:,} instances need about {needed_bytes / GIB:.1f} GiB of memory, and tune may use "
        f"{limit_bytes / GIB:.1f} GiB; write fewer{', or set --max-instance-count' if weights else ''}"
    )
