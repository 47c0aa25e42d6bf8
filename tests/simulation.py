"""Inputs of the simulator by their parameters, the simulation of a single scenario, and simulated measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from objectives.arrays import FloatArray
from objectives.batch_stats import BatchStatistic
from objectives.metrics import Measurement
from optimizer.config.queue_policy import DEFAULT_PRIORITY_LEVEL, PRIORITY_LEVELS, PRIORITY_POLICY
from optimizer.core.candidate import Candidate, FieldValue
from optimizer.core.trial import LoadPoint, Point
from optimizer.simulator.calibration import Observation
from optimizer.simulator.performance_model import PerformanceModel
from optimizer.simulator.scenario import (
    ClosedLoopLoad,
    MeasurementInterval,
    OpenLoopLoad,
    Overheads,
    Scenario,
    ServiceTimes,
    SimulatedLoad,
    SimulationResult,
)
from optimizer.simulator.simulate import lognormal_jitter, simulate_many, trace


def linear_times(
    fixed_s: float, per_sample_s: float, max_batch_size: int, instances: int = 1, *, contention: float = 0.0
) -> ServiceTimes:
    """Return times of ``(fixed_s + per_sample_s * b) * (1 + contention * (k - 1))`` for b samples, k busy."""
    uncontended = fixed_s + per_sample_s * np.arange(1, max(1, max_batch_size) + 1)
    return ServiceTimes(np.outer(uncontended, 1 + contention * np.arange(instances)))


MS, US = 1e-3, 1e-6
TYPICAL_TIMES = linear_times(2 * MS, 0.3 * MS, 16, 4, contention=0.4)
TYPICAL_OVERHEADS = Overheads(50 * US, 80 * US, 20 * US, 5 * US, 40 * US, 30 * US, 10 * US)
ALL_REQUESTS = MeasurementInterval(warm_up_requests=0)


def constant(seconds: float, sizes: int = 64, instances: int = 4) -> ServiceTimes:
    """Return equal times for all batches."""
    return ServiceTimes(np.full((sizes, instances), seconds))


def batcher(limit: int, delay_us: int = 0, *preferred: int, instances: int = 1) -> Candidate:
    """Return a candidate with dynamic batching."""
    return Candidate(limit, True, delay_us, preferred, instances)


def with_policy(
    candidate: Candidate, max_queue_size: int = 0, timeout_us: int = 0, action: str = "REJECT"
) -> Candidate:
    """Return the candidate with a queue policy; 0 sets no limit and no timeout."""
    policy: dict[str, FieldValue] = {"default_timeout_microseconds": timeout_us, "max_queue_size": max_queue_size}
    fields = [(name, value) for name, value in policy.items() if value]
    if timeout_us:
        fields.append(("timeout_action", action))
    prefix = "dynamic_batching.default_queue_policy."
    return replace(candidate, fields=tuple((prefix + name, value) for name, value in fields))


def leveled(candidate: Candidate, levels: int = 2, **settings: int | str) -> Candidate:
    """Return the candidate with priority levels, of which the lowest is the default.

    ``max_queue_size_2`` is a setting of the second level.
    """
    policies = {f"{PRIORITY_POLICY}.{name[-1]}.{name[:-2]}": value for name, value in settings.items()}
    fields = {PRIORITY_LEVELS: levels, DEFAULT_PRIORITY_LEVEL: levels, **dict(candidate.fields), **policies}
    return replace(candidate, fields=tuple(sorted(fields.items())))


def constant_load(requests_per_s: float, requests: int) -> OpenLoopLoad:
    """Return equidistant arrivals."""
    return OpenLoopLoad(np.arange(requests) / requests_per_s)


def poisson_load(requests_per_s: float, requests: int, seed: int = 0) -> OpenLoopLoad:
    """Return a Poisson process: independent, exponentially distributed distances."""
    gaps = np.random.default_rng(seed).exponential(1 / requests_per_s, requests)
    return OpenLoopLoad(np.cumsum(gaps))


def simulate(
    candidate: Candidate,
    load: SimulatedLoad,
    service: ServiceTimes,
    overheads: Overheads | None = None,
    *,
    request_batch_size: int = 1,
    fixed_shapes: bool = True,
    jitter: FloatArray | None = None,
    gaps_s: FloatArray | None = None,
    interval: MeasurementInterval | None = None,
) -> SimulationResult:
    """Simulate one candidate under one load. For the arguments see ``Scenario`` and ``simulate_many``."""
    scenario = Scenario(candidate, load, service, overheads or Overheads(), request_batch_size, fixed_shapes)
    return simulate_many([scenario], jitter=jitter, gaps_s=gaps_s, interval=interval)[0]


def observed_deployment(
    times: ServiceTimes, candidate: Candidate, concurrency: int, overheads: Overheads
) -> Observation:
    """Return the statistics of a simulated deployment."""
    log = trace(
        Scenario(candidate, ClosedLoopLoad(concurrency), times, overheads),
        jitter=lognormal_jitter(0.05),
        interval=MeasurementInterval(0, 3000),
    )
    done = ~np.isnan(log.end_s)
    lasted, sizes = (log.end_s - log.start_s)[done], log.requests[done]
    batches = tuple(
        BatchStatistic(int(b), int((sizes == b).sum()), round(1e9 * float(lasted[sizes == b].sum())))
        for b in np.unique(sizes)
    )
    return Observation(candidate.instance_count, concurrency, float(np.nanmax(log.end_s)), batches)


def measured_points(
    truth: PerformanceModel,
    cells: Sequence[tuple[Candidate, int]],
    latencies: Sequence[str],
    *,
    noise: float = 0.0,
) -> list[Point]:
    """Return what ``truth`` serves at each cell (candidate, concurrency), with a relative error of ``noise``."""
    rng = np.random.default_rng(0)
    points = []
    for number, ((candidate, concurrency), result) in enumerate(zip(cells, truth.simulate(cells), strict=True)):
        factor = float(np.exp(rng.normal(0, noise)))
        latencies_ms: dict[str, Any] = {
            f"{name.replace('-', '_')}_ms": 1e3 * result.latency_s(name) / factor for name in latencies
        }
        measurement = Measurement(result.throughput_infer_per_sec * factor, requests=500, stable=True, **latencies_ms)
        points.append(Point(number, candidate, LoadPoint(1, concurrency), measurement))
    return points
