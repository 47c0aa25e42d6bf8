"""The limit on the number of instances of a model, which protects the machine that serves it."""

from __future__ import annotations

from collections.abc import Iterable

from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer.config.model_source import ModelSource
from optimizer.model.repository import backend_of
from optimizer.options.run_options import RunOptions

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
    import psutil

    largest = max(counts, default=0)
    limit = options.max_instances or MAX_INSTANCES
    if largest > limit:
        return (
            f"{largest:,} instances are above the limit of {limit:,}; write fewer, or raise the limit with "
            "--max-instance-count"
        )
    if on_gpu or options.target not in ("embedded", "local") or options.cluster is not None or largest < 2:
        return ""
    copied = backend_of(source.tuned_config) in BACKENDS_THAT_COPY and not source.composing
    weights = int(source.facts.get("model_bytes", 0)) if copied and options.max_instances is None else 0
    needed, memory = largest * (PROCESS_BYTES + weights), psutil.virtual_memory().total
    if needed <= memory:
        return ""
    return (
        f"{largest:,} instances need about {needed / GIB:.1f} GiB of memory, and this machine has "
        f"{memory / GIB:.1f} GiB; write fewer{', or set --max-instance-count' if weights else ''}"
    )
