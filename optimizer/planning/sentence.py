"""A run in one sentence of the kind that documents use, and what was published of the same model."""

from __future__ import annotations

from dataclasses import dataclass

from objectives.sla import Constraint
from optimizer.planning.source import Source
from optimizer.report import words


@dataclass(frozen=True, slots=True)
class Published:
    """``sentence`` is quoted as it stands in the document ``title``."""

    sentence: str
    title: str


PUBLISHED = {  # by what builds the model
    "dlrm": Published(
        "if we have a 20ms upper bound on latency, then a single GPU can handle up to 8 concurrent requests. This "
        "leads to total throughput of 1.776.030 recommendations/sec.",
        "Deploying the DLRM model using Triton Inference Server (requests of 4096, one V100-32G)",
    ),
    "bert": Published(
        "the throughput at BS=1, Client Concurrent Requests = 64 is 119 and in Figure 4, the throughput at BS=8, "
        "Client Concurrent Requests = 8 is 517",
        "Deploying the BERT model using Triton Inference Server (BERT Base, one V100-32G)",
    ),
    "resnext": Published(
        "|256 | 1312 | 195.87 | 196.87 | 197.75 | 199.06|",
        "Deploying the ResNeXt101-32x4d model using Triton Inference Server (FP16, one V100-16G: concurrent "
        "requests, img/s, average, 90%, 95% and 99% latency in ms)",
    ),
    "text_recognition": Published(
        "Concurrency: 16, throughput: 3187.76 infer/sec, latency 10567 usec",
        "Triton Conceptual Guide, part 2 (requests of 2, p95, one A100)",
    ),
    "minilm": Published(
        "batch size 1, seq len 16 tokens -> `1.7ms`/query", "transformer-deploy, demo scripts (one query at a time)"
    ),
}


def sentence(source: Source) -> str:
    """``with a 20 ms bound on p95 one machine (…) handles 47 concurrent requests of 4, 13,315 infer/s``."""
    load, device = source.point.load, source.device
    one = f"one {device}" if source.devices == 1 else f"{source.devices} {device}s"
    handles = f"handle{'s' if source.devices == 1 else ''}"
    served = f"{load.concurrency:,} concurrent requests"
    if load.request_rate:
        served = f"{words.load(load)}, each"
    size = f" of {words.exact(load.request_batch_size)}"
    rate = words.of(source.point, "throughput")
    return f"{_within(source.bounds)} {one} ({source.hardware}) {handles} {served}{size}, {rate}"


def _within(bounds: tuple[Constraint, ...]) -> str:
    told = " and ".join(f"a {words.exact(bound.bound)} ms bound on {words.short(bound.metric)}" for bound in bounds)
    return f"with {told}"
