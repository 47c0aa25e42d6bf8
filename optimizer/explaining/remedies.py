"""What would raise the throughput, simulated: more instances, FP16, larger batches, a nearer client, another SLA."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from optimizer.explaining.bottleneck import Seen
from optimizer.explaining.forecast import Forecast, Forecaster
from optimizer.report import words
from optimizer.trial import Candidate

FP16_FACTOR = 0.5  # of the inference time; nothing in a run of another precision tells it
SLA_FACTORS = (0.5, 1.5, 2.0)
MOST_INSTANCES = 64  # beyond it nobody asks, and service times are kept for each number
Name = Literal["more instances", "FP16", "larger batches", "nearer client", "no copying"]


@dataclass(frozen=True, slots=True)
class Remedy:
    """``change`` says what is changed. ``forecast`` is None where no load would meet the bound.

    ``gain``: relative to what explains itself, at its best load within the same bound; None where that, or this,
    meets the bound at no load.
    """

    name: Name
    change: str
    forecast: Forecast | None
    gain: float | None


@dataclass(frozen=True, slots=True)
class OtherSla:
    """The best of ``forecast.candidate`` and others within ``factor`` times the bound; ``gain`` as in ``Remedy``."""

    factor: float
    bound_ms: float
    forecast: Forecast | None
    gain: float | None


def remedies(
    forecaster: Forecaster, one: Seen, bound_ms: float, fp16_factor: float, *, on_gpu: bool
) -> tuple[Remedy, ...]:
    """Each on its own, the largest gain first."""
    own = one.point.candidate
    usual = forecaster.best([own], bound_ms)
    assumed = f"assumed, not measured: inference takes {fp16_factor:g} of its time"
    copied = one.copied_share
    found: list[tuple[Name, str, Forecast | None]] = []
    more = forecaster.best(list(_more_instances(own)), bound_ms)
    found.append(("more instances", _instances(more, own), more))
    faster = forecaster.best([own], bound_ms, infer_share=copied + fp16_factor * (1 - copied))
    found.append(("FP16", assumed if on_gpu else f"{assumed}; on a CPU often nothing is gained", faster))
    if larger := list(_larger_batches(own)):
        batched = forecaster.best(larger, bound_ms)
        change = words.configuration(batched.candidate if batched else larger[0])
        found.append(("larger batches", change, batched))
    near = forecaster.best([own], bound_ms, way_share=0.0)
    found.append(("nearer client", "as if no time passed between client and server", near))
    if copied:
        kept = forecaster.best([own], bound_ms, infer_share=1 - copied)
        found.append(("no copying", "shared memory: inputs and outputs stay where they are", kept))
    listed = [Remedy(name, change, forecast, gain(forecast, usual)) for name, change, forecast in found]
    return tuple(sorted(listed, key=lambda remedy: -(remedy.gain if remedy.gain is not None else -1.0)))


def other_slas(forecaster: Forecaster, tried: Sequence[Candidate], bound_ms: float) -> tuple[OtherSla, ...]:
    """The best of ``tried`` within other bounds; gains are over their best within this one."""
    usual = forecaster.best(tried, bound_ms)
    found = [(factor, forecaster.best(tried, factor * bound_ms)) for factor in SLA_FACTORS]
    return tuple(OtherSla(factor, factor * bound_ms, one, gain(one, usual)) for factor, one in found)


def gain(one: Forecast | None, usual: Forecast | None) -> float | None:
    if one is None or usual is None:
        return None
    return one.throughput_infer_per_sec / usual.throughput_infer_per_sec - 1


def _more_instances(own: Candidate) -> Iterator[Candidate]:
    counts = {own.instance_count + 1, 2 * own.instance_count}
    for count in sorted(one for one in counts if one <= MOST_INSTANCES) or [own.instance_count + 1]:
        yield replace(own, instance_count=count)


def _instances(more: Forecast | None, own: Candidate) -> str:
    count = more.candidate.instance_count if more else own.instance_count + 1
    return f"{count} instances in place of {own.instance_count}"


def _larger_batches(own: Candidate) -> Iterator[Candidate]:
    """By Triton's defaults, and with half of it preferred; without dynamic batching that comes first."""
    if own.max_batch_size < 1:
        return
    batched = replace(own, dynamic_batching=True, preferred_batch_sizes=())
    sizes = (2 * own.max_batch_size, 4 * own.max_batch_size)
    for size in sizes if own.dynamic_batching else (own.max_batch_size, *sizes):
        yield replace(batched, max_batch_size=size)
        yield replace(batched, max_batch_size=size, preferred_batch_sizes=(size // 2,))
