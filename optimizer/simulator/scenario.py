"""Inputs and results of a simulation: service times, overheads, offered load, measurement interval and outcome.

Times are in seconds (suffix ``_s``), batch sizes in samples. Arrays are float64 and must not be changed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from objectives.arrays import FloatArray, IntArray
from objectives.metrics import METRICS, QUANTILES
from objectives.quantiles import quantile_at
from optimizer.core.candidate import Candidate
from optimizer.core.request_sizes import SizeDistribution

RING_LENGTH = 4096  # random numbers that successive executions or requests use in turn


@dataclass(frozen=True, eq=False)
class ServiceTimes:
    """How long an instance computes one batch (the service time of the queueing model).

    ``seconds[i, k - 1]`` is the time of a batch of ``(i + 1) * step`` samples while k instances are busy, this one
    included. When k changes during an execution, its remaining share continues at the new speed.

    Raises:
        ValueError: The times are not a positive, finite matrix, or ``step`` is not positive.
    """

    seconds: FloatArray
    step: int = 1

    def __post_init__(self) -> None:
        if self.seconds.ndim != 2 or 0 in self.seconds.shape:
            raise ValueError(f"service times: shape {self.seconds.shape}, expected (batch sizes, busy instances)")
        if not (np.isfinite(self.seconds).all() and (self.seconds > 0).all()):
            raise ValueError("service times: all must be positive and finite")
        if self.step < 1:
            raise ValueError(f"service times: step is {self.step}, it must be at least 1")

    def up_to(self, samples: int) -> ServiceTimes:
        """Return times that cover batches of ``samples``.

        Beyond the known sizes the times rise as they do over the larger half of these. If there is only one size,
        half of its time is taken to be fixed.
        """
        sizes, rows = len(self.seconds), -(-samples // self.step)
        if rows <= sizes:
            return self
        last, half = self.seconds[-1], sizes // 2
        rise = (last - self.seconds[half - 1]) / (sizes - half) if half else last / 2
        further = last + np.outer(np.arange(1, rows - sizes + 1), np.maximum(rise, 0.0))
        return ServiceTimes(np.concatenate([self.seconds, further]), self.step)


@dataclass(frozen=True, slots=True)
class Overheads:
    """Latencies outside the computation, in seconds.

    A search fits ``send_s``, ``receive_s``, ``wake_s`` and ``dispatch_s``. The others stay 0 in a run; they serve the
    comparison of the simulator with Triton (``benchmarks/simulator_proof.py``).

    Attributes:
        send_s: From a client's send until the request is in the batcher's queue.
        receive_s: From the end of the computation until the client has the response.
        client_s: From the response until the same client sends its next request (closed loop only).
        spacing_s: The minimum time between two arrivals, and between two responses. Clients and network process
            them one at a time.
        wake_s: From a notification of the batcher, or the end of its wait, until it runs.
        dispatch_s: From a ready batch until a sleeping instance takes it.
        release_s: From the end of the computation until the instance is ready for the next batch.

    Raises:
        ValueError: A latency is negative or not finite.
    """

    send_s: float = 0.0
    receive_s: float = 0.0
    client_s: float = 0.0
    spacing_s: float = 0.0
    wake_s: float = 0.0
    dispatch_s: float = 0.0
    release_s: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"overheads: {name} is {getattr(self, name)}, it must be finite and at least 0")


@dataclass(frozen=True, slots=True)
class ClosedLoopLoad:
    """``concurrency`` clients; each sends its next request after its response. All of them start at time 0."""

    concurrency: int

    @property
    def max_in_flight(self) -> int:
        """The largest number of requests that are in flight at the same time."""
        return self.concurrency


def concurrency_of_process(candidate: Candidate, concurrency: int) -> int:
    """Return the requests in flight on the fullest of the server processes of ``candidate``, which share the load."""
    return -(-concurrency // candidate.server_processes)


@dataclass(frozen=True, slots=True, eq=False)
class OpenLoopLoad:
    """Requests that are sent at fixed times, independent of responses. ``arrivals_s`` [requests] ascends from 0."""

    arrivals_s: FloatArray

    @property
    def max_in_flight(self) -> int:
        """The largest number of requests that can be in flight at the same time."""
        return len(self.arrivals_s)


SimulatedLoad: TypeAlias = ClosedLoopLoad | OpenLoopLoad


@dataclass(frozen=True, slots=True)
class MeasurementInterval:
    """The requests of a simulation that are measured.

    ``warm_up_requests`` complete first. In a closed loop at least ``requests`` are then measured; an open loop is
    measured until all its requests have completed. None selects a default that depends on the load.
    """

    warm_up_requests: int | None = None
    requests: int | None = None

    def resolve(self, load: SimulatedLoad) -> tuple[int, int]:
        """Return the number of warm-up requests and of measured requests under ``load``."""
        warm_up, requests = self.warm_up_requests, self.requests
        if isinstance(load, OpenLoopLoad):
            total = len(load.arrivals_s)
            return (total // 10 if warm_up is None else warm_up), total
        return (
            max(200, 4 * load.concurrency) if warm_up is None else warm_up,
            max(2000, 10 * load.concurrency) if requests is None else requests,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Scenario:
    """The input of one simulation.

    A run leaves ``prefetch``, ``request_mix``, ``shape_shares`` and ``mix_seed`` at their defaults. They serve the
    comparison of the simulator with Triton (``benchmarks/simulator_proof.py``).

    Attributes:
        request_batch_size: Samples of each request. With a ``request_mix`` it has no effect.
        fixed_shapes: No input has a dimension of -1 (unless it has ``allow_ragged_batch``) or is a shape tensor.
            Otherwise only requests of equal shape share a batch.
        prefetch: The batcher forms batches ahead of idle instances; None derives it from the candidate's queue
            policies, as Triton does.
        request_mix: Distribution of the samples of a request; None if all requests have the same number.
        shape_shares: Relative frequency of each distinct input shape. It has an effect only without fixed shapes.
        mix_seed: Determines the order of sizes and shapes.
        refuses: The candidate's queue policy applies: ``max_queue_size``, the default timeout and its action.
            Otherwise it only decides about ``prefetch``.
        priorities: Shares of the priorities of the requests; None if all have the default level.
        missed_share: Share of the ends of executions at which the batcher runs too early. Without prefetch it needs
            an idle instance. The thread of an instance first notifies the batcher and then counts itself as idle. If
            the operating system runs the batcher in between, it finds no idle instance. It then sleeps until the
            next request is accepted, or for half a second. docs/queues.md explains the effects.
    """

    candidate: Candidate
    load: SimulatedLoad
    service: ServiceTimes
    overheads: Overheads = field(default_factory=Overheads)
    request_batch_size: int = 1
    fixed_shapes: bool = True
    prefetch: bool | None = None
    request_mix: SizeDistribution | None = None
    shape_shares: tuple[float, ...] = (1.0,)
    mix_seed: int = 0
    refuses: bool = True
    missed_share: float = 0.0
    priorities: SizeDistribution | None = None

    @property
    def has_mix(self) -> bool:
        """Whether requests differ in a way that matters to the batcher."""
        differ = len(self.shape_shares) > 1 and not self.fixed_shapes
        return self.request_mix is not None or self.priorities is not None or differ

    def mix(self) -> tuple[IntArray, IntArray]:
        """Return the samples and the numbers of the shapes of successive requests, each [RING_LENGTH].

        Raises:
            ValueError: A share is not positive or not finite.
        """
        if not self.shape_shares or not all(0 < share < math.inf for share in self.shape_shares):
            raise ValueError(f"shape_shares: {self.shape_shares}, all must be positive and finite")
        rng = np.random.default_rng(self.mix_seed)
        sizes = self.request_mix or SizeDistribution(((self.request_batch_size, self.request_batch_size, 1.0),))
        shapes = SizeDistribution(tuple((number, number, share) for number, share in enumerate(self.shape_shares)))
        return sizes.draw(RING_LENGTH, rng), shapes.draw(RING_LENGTH, rng)

    def priority_mix(self) -> IntArray:
        """Return the priorities of successive requests [RING_LENGTH]; 0 for those without one."""
        if self.priorities is None:
            return np.zeros(RING_LENGTH, np.int64)
        return self.priorities.draw(RING_LENGTH, np.random.default_rng(self.mix_seed + 1))


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The simulated performance of a scenario, in the terms of perf_analyzer.

    Attributes:
        throughput_infer_per_sec: Samples per second of the requests that complete.
        latency_p95_s: 95th percentile of the time from a client's send to its response. All latencies are of the
            requests that complete in the measurement interval. Quantiles follow perf_analyzer's definition.
        queue_avg_s: Mean time from the arrival at the batcher to the start of the computation.
        compute_avg_s: Mean time of the execution that a request is part of.
        mean_batch_size: Samples per execution.
        utilization: Mean share of busy instances.
        requests: Requests that complete in the interval.
        overloaded: The queue of an open loop only grows, so latencies depend on the length of the simulation.
        rejected: Requests in the interval that were refused because the queue was full (``max_queue_size``).
        timed_out: Requests in the interval that were refused because they expired in the queue.
    """

    throughput_infer_per_sec: float
    latency_avg_s: float
    latency_p50_s: float
    latency_p90_s: float
    latency_p95_s: float
    latency_p99_s: float
    queue_avg_s: float
    compute_avg_s: float
    mean_batch_size: float
    utilization: float
    requests: int
    duration_s: float
    overloaded: bool
    rejected: int = 0
    timed_out: int = 0

    def latency_s(self, metric: str) -> float:
        """Return the latency of a metric such as ``latency-p95``.

        A percentile other than those above is estimated from them. A simulation of some thousand requests would
        hardly determine one beyond p99.
        """
        definition = METRICS[metric]
        if definition.quantile is None or definition.statistic in QUANTILES:
            return float(getattr(self, f"latency_{definition.statistic}_s"))
        quantiles_s = {level: float(getattr(self, f"latency_{name}_s")) for name, level in QUANTILES.items()}
        return quantile_at(quantiles_s, definition.quantile)

    def scaled_to_servers(self, servers: float) -> SimulationResult:
        """Return the result of ``servers`` equal servers, each with this load."""
        if servers == 1:
            return self
        return replace(
            self,
            throughput_infer_per_sec=servers * self.throughput_infer_per_sec,
            requests=round(servers * self.requests),
            rejected=round(servers * self.rejected),
            timed_out=round(servers * self.timed_out),
        )

    @property
    def rejected_share(self) -> float:
        """Share of the requests that were rejected; NaN without requests."""
        return self._share(self.rejected)

    @property
    def timed_out_share(self) -> float:
        """Share of the requests that timed out in the queue; NaN without requests."""
        return self._share(self.timed_out)

    def _share(self, requests: int) -> float:
        total = self.requests + self.rejected + self.timed_out
        return requests / total if total else math.nan


@dataclass(frozen=True, slots=True, eq=False)
class SimulationTrace:
    """All executions and requests of a simulation, ordered by start and by arrival.

    Attributes:
        end_s: End of each execution; NaN if the simulation stopped earlier.
        samples: Samples of each execution.
        requests: Number of requests of each execution.
        request_samples: Samples of each request.
        request_shape: Number of each request's shape.
        execution: The number of the execution that computes each request; REJECTED or TIMED_OUT of
            ``dynamic_batcher.records``, or -1 if the simulation ended before.
    """

    instance: IntArray
    start_s: FloatArray
    end_s: FloatArray
    samples: IntArray
    requests: IntArray
    sent_s: FloatArray
    arrived_s: FloatArray
    request_samples: IntArray
    request_shape: IntArray
    execution: IntArray
