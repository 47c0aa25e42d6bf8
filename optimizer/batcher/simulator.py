"""What a configuration would do under a load: Triton's dynamic batcher in discrete events.

``simulate`` takes a candidate's batcher settings, how long the model computes, the latencies around it and a
load, and returns what perf_analyzer would report. The rules are those of ``dynamic_batch_scheduler.cc``,
``instance_queue.cc`` and ``rate_limiter.cc`` of the Triton core (2.51): which arrivals wake the batcher, how far
it forms batches ahead of the instances, preferred sizes, the delay, merging by an idle instance. Things that
happen at the same time are taken in this order: instances finish, requests arrive, the batcher runs, notified
instances look for work. Nothing is drawn at random here, so equal input gives equal output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from optimizer.batcher.job import (
    Array,
    ClosedLoop,
    Job,
    Load,
    OpenLoop,
    Overheads,
    ServiceTimes,
    Simulated,
    Trace,
    Window,
)
from optimizer.batcher.packing import Packed
from optimizer.trial import Candidate

__all__ = [
    "ClosedLoop",
    "Job",
    "Load",
    "OpenLoop",
    "Overheads",
    "ServiceTimes",
    "Simulated",
    "Trace",
    "Window",
    "empirical_jitter",
    "exponential_delays",
    "lognormal_jitter",
    "simulate",
    "simulate_many",
    "trace",
]

JITTER_FACTORS = 4096


def lognormal_jitter(relative_std: float, seed: int = 0) -> Array:
    """Factors of mean 1 by which successive executions are longer or shorter."""
    variance = math.log1p(relative_std**2)
    normal = np.random.default_rng(seed).standard_normal(JITTER_FACTORS)
    return np.exp(math.sqrt(variance) * normal - variance / 2)


def exponential_delays(mean_s: float, seed: int = 0) -> Array:
    """Times that most requests hardly need on the way in and a few need several times over."""
    return np.random.default_rng(seed).exponential(mean_s, JITTER_FACTORS)


def empirical_jitter(factors: Sequence[float], seed: int = 0) -> Array:
    """Factors drawn from observed ones (measured time / expected time)."""
    return np.random.default_rng(seed).choice(np.asarray(factors, np.float64), JITTER_FACTORS)


def simulate(
    candidate: Candidate,
    load: Load,
    service: ServiceTimes,
    overheads: Overheads | None = None,
    *,
    request_batch_size: int = 1,
    fixed_shapes: bool = True,
    prefetch: bool | None = None,
    jitter: Array | None = None,
    delays_s: Array | None = None,
    gaps_s: Array | None = None,
    window: Window | None = None,
) -> Simulated:
    """One candidate under one load. The options are those of ``Job`` and ``simulate_many``."""
    job = Job(candidate, load, service, overheads or Overheads(), request_batch_size, fixed_shapes, prefetch)
    return simulate_many([job], jitter=jitter, delays_s=delays_s, gaps_s=gaps_s, window=window)[0]


def simulate_many(
    jobs: Sequence[Job],
    *,
    jitter: Array | None = None,
    delays_s: Array | None = None,
    gaps_s: Array | None = None,
    window: Window | None = None,
    threads: int = 1,
) -> list[Simulated]:
    """What each job gives.

    ``jitter``: factors on the service times of successive executions; ``delays_s``: what successive requests need
    on the way in on top of ``send_s``; ``gaps_s``: how much longer than ``spacing_s`` after the one before they
    arrive at least, as where few processors bring a batch's clients their responses and take their next requests.
    All are used in a ring, and all jobs see the same, so that they can be compared. They matter: without them
    clients whose requests once shared a batch do so for ever, while on a real server one late request can part them
    for good.

    Raises ValueError where a candidate refuses its requests, or where service times do not cover the batches or
    instances of a candidate.
    """
    if not jobs:
        return []
    window = window or Window()
    # neighbours are often alike in cost, so each thread takes every so manieth
    packed = [Packed.of(jobs[i::threads], jitter, delays_s, gaps_s, window) for i in range(min(threads, len(jobs)))]
    outcomes: list[list[Simulated]]
    if len(packed) == 1:
        outcomes = [packed[0].run()]
    else:
        with ThreadPoolExecutor(len(packed)) as pool:
            outcomes = list(pool.map(Packed.run, packed))
    return [outcomes[i % len(packed)][i // len(packed)] for i in range(len(jobs))]


def trace(
    job: Job,
    *,
    jitter: Array | None = None,
    delays_s: Array | None = None,
    gaps_s: Array | None = None,
    window: Window | None = None,
) -> Trace:
    """Each execution and request of one job, from its first request to the end of the window."""
    return Packed.of([job], jitter, delays_s, gaps_s, window or Window()).trace()
