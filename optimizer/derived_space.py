"""The space of a model: what a profile lists, and for what it leaves out choices that follow from the model."""

from __future__ import annotations

from optimizer import model_config
from optimizer.deployment import COUNT, DELAY
from optimizer.machine.hardware import Hardware
from optimizer.model_source import ModelSource
from optimizer.profile.schema import ONNX_RUNTIME, SpaceSection
from optimizer.requests.sizes import Dim
from optimizer.sources.repository import backend_of, is_ensemble
from optimizer.space import OFF, Space
from optimizer.trial import VARIANT, FieldValue

DEFAULT_DELAYS_US = ("off", 0, 100, 500, 1000, 2000, 5000)
DEFAULT_POLICIES = ("none", "max/2")
MOST_THREADS = 16


def space_of(section: SpaceSection, source: ModelSource, batch: Dim, hardware: Hardware) -> Space:
    """For requests of ``batch`` samples. Raises ValueError where that makes no space."""
    least = batch.largest  # that a max_batch_size has to admit
    largest = source.batched.max_batch_size
    fields = {**_beside(source, hardware), **section.fields()}
    if section == SpaceSection() and not hardware.gpus and backend_of(source.batched) == "onnxruntime":
        # by default each instance computes on every core, which is too many for several of them
        threads = _powers_of_two(1, min(hardware.cpu_count, MOST_THREADS))
        fields[ONNX_RUNTIME["intra_op_thread_count"]] = tuple(map(str, threads))
    if source.variants:
        fields[VARIANT] = tuple(source.variants)
    if largest == 0:
        return Space((0,), instance_count=section.instance_group_count or _counts(hardware), fields=fields)
    sizes = section.max_batch_size or _powers_of_two(least, max(largest, least))
    return Space(
        max_batch_size=tuple(size for size in sizes if size >= least) or (least,),
        max_queue_delay_us=section.max_queue_delay_microseconds or DEFAULT_DELAYS_US,
        preferred_batch_sizes=section.preferred_batch_size or DEFAULT_POLICIES,
        instance_count=section.instance_group_count or _counts(hardware),
        fields=fields,
        request_batch_size=batch.fixed or 1,
    )


def _beside(source: ModelSource, hardware: Hardware) -> dict[str, tuple[FieldValue, ...]]:
    """What may vary of the models beside the one that the space is about, unless the profile says."""
    fields: dict[str, tuple[FieldValue, ...]] = {}
    for name, config in {**source.composing, source.name: source.config}.items():
        if name == source.tuned or is_ensemble(config):
            continue
        own = model_config.candidate_of(config)
        fields[f"{name}/{COUNT}"] = tuple(sorted({own.instance_count, *_counts(hardware)}))
        if own.max_batch_size > 1:
            delay = own.max_queue_delay_us if own.dynamic_batching else OFF
            fields[f"{name}/{DELAY}"] = tuple(dict.fromkeys((OFF, 0, delay)))
    return fields


def _powers_of_two(least: int, most: int) -> tuple[int, ...]:
    """Up to ``most``, which is one of them too: what the model's own configuration admits may be no power."""
    sizes = [least]
    while sizes[-1] * 2 <= most:
        sizes.append(sizes[-1] * 2)
    return tuple(dict.fromkeys([*sizes, most]))


def _counts(hardware: Hardware) -> tuple[int, ...]:
    return (1, 2, 3, 4) if hardware.gpus else tuple(range(1, min(4, max(2, hardware.cpu_count)) + 1))
