"""Jobs as the arrays that the compiled event loop reads, and what it wrote as outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from optimizer.batcher.job import Array, ClosedLoop, Job, OpenLoop, ServiceTimes, Simulated, Trace, Window

NS = 1e9
# with any of these set the batcher forms no batch ahead of an idle instance
QUEUE_POLICIES = (
    "dynamic_batching.default_queue_policy.default_timeout_microseconds",
    "dynamic_batching.default_queue_policy.allow_timeout_override",
    "dynamic_batching.default_queue_policy.max_queue_size",
    "dynamic_batching.priority_levels",
)

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Arguments of ``kernel.simulate_points``: one row of ``points`` for each job."""

    request_batch_sizes: list[int]
    instance_counts: list[int]
    points: Ints
    preferred: Ints
    services: Array
    factors: Array
    delays: Ints
    gaps: Ints
    arrivals: Ints
    in_flight: int
    most_measured: int

    @classmethod
    def of(
        cls,
        jobs: Sequence[Job],
        jitter: Array | None,
        delays_s: Array | None,
        gaps_s: Array | None,
        window: Window,
    ) -> Packed:
        packing = _Packing()
        rows = [packing.row(job, window) for job in jobs]
        factors, delays, gaps = (
            _ring("jitter", jitter, 1.0),
            _ring("delays", delays_s, 0.0),
            _ring("gaps", gaps_s, 0.0),
        )
        if not (factors > 0).all():
            raise ValueError("jitter: not all factors are positive")
        return cls(
            [job.request_batch_size for job in jobs],
            [job.candidate.instances for job in jobs],
            np.array(rows, np.int64),
            np.array(packing.preferred, np.int64),
            np.concatenate(packing.services),
            factors,
            np.round(NS * delays).astype(np.int64),
            np.round(NS * gaps).astype(np.int64),
            np.concatenate([np.empty(0, np.int64), *packing.arrivals]),
            packing.in_flight,
            packing.most_measured,
        )

    def run(self) -> list[Simulated]:
        """Simulate all. Other threads run meanwhile."""
        results, _, _ = self._call(0, 0)
        return [
            _outcome(row, size, instances)
            for row, size, instances in zip(
                results.tolist(), self.request_batch_sizes, self.instance_counts, strict=True
            )
        ]

    def trace(self) -> Trace:
        """The log of a single job."""
        room = self.most_measured + 1
        while True:
            _, executions, requests = self._call(room, room)
            if not executions[-1, 4] and requests[-1, 1] < 0:
                break
            room *= 2  # the warm-up and what was under way as the run stopped come on top of the measured
        executions, requests = executions[executions[:, 4] > 0], requests[requests[:, 1] >= 0]
        return Trace(
            executions[:, 0],
            executions[:, 1] / NS,
            np.where(executions[:, 2] < 0, np.nan, executions[:, 2] / NS),
            executions[:, 3],
            executions[:, 4],
            requests[:, 0] / NS,
            requests[:, 1] / NS,
        )

    def _call(self, executions: int, requests: int) -> tuple[Array, Ints, Ints]:
        from optimizer.batcher import kernel  # loads the compiler: only where something is simulated

        results = np.empty((len(self.points), kernel.RESULTS))
        execution_log = np.zeros((executions, kernel.EXECUTION_COLUMNS), np.int64)
        request_log = np.full((requests, kernel.REQUEST_COLUMNS), -1, np.int64)
        kernel.simulate_points(
            self.points,
            self.preferred,
            self.services,
            self.factors,
            self.delays,
            self.gaps,
            self.arrivals,
            self.in_flight,
            self.most_measured,
            results,
            execution_log,
            request_log,
        )
        return results, execution_log, request_log


class _Packing:
    """Collects what rows point into. The order of a row is that of the columns in ``kernel``."""

    def __init__(self) -> None:
        self.preferred: list[int] = []
        self.services: list[Array] = []
        self.arrivals: list[Ints] = []
        self.in_flight = 1
        self.most_measured = 1
        self._service_rows: dict[tuple[int, int], tuple[int, int]] = {}
        self._service_size = 0
        self._arrivals_size = 0

    def row(self, job: Job, window: Window) -> list[int]:
        candidate, size = job.candidate, job.request_batch_size
        limit = _most_requests(job)
        in_flight = _in_flight(job)
        reach = min(limit, in_flight)
        busiest = min(candidate.instances, in_flight)
        warm_up, requests = window.resolved(job.load)
        if warm_up < 0 or requests < 1 or (isinstance(job.load, OpenLoop) and warm_up >= requests):
            raise ValueError(f"no request is left to measure: {requests} requests, {warm_up} of them to warm up")
        self.in_flight = max(self.in_flight, in_flight)
        self.most_measured = max(self.most_measured, 2 * requests + busiest * reach)
        sizes_from = len(self.preferred)
        if candidate.dynamic_batching and candidate.max_batch_size > 0:
            self.preferred += sorted(set(candidate.preferred_batch_sizes or (candidate.max_batch_size,)))
        service, stride = self._service(job.service, size, reach, busiest)
        concurrency, arrivals_from, arrivals_to = self._load(job)
        delay_us = candidate.max_queue_delay_us if candidate.dynamic_batching else 0
        over = job.overheads
        latencies = (
            over.send_s,
            over.receive_s,
            over.client_s,
            over.spacing_s,
            over.wake_s,
            over.dispatch_s,
            over.release_s,
        )
        return [
            size,
            min(limit, in_flight + 1),  # as good as any limit above it, and its tables are smaller
            candidate.instances,
            candidate.dynamic_batching,
            1000 * delay_us,
            job.fixed_shapes,
            _prefetches(job),
            sizes_from,
            len(self.preferred),
            service,
            stride,
            concurrency,
            arrivals_from,
            arrivals_to,
            warm_up,
            requests,
            *(round(NS * latency) for latency in latencies),
        ]

    def _service(self, service: ServiceTimes, size: int, reach: int, busiest: int) -> tuple[int, int]:
        """Where the times of 1, 2 … requests start in ``services``, and how many columns they have."""
        sizes, instances = service.seconds.shape
        if size % service.step:
            raise ValueError(f"service times: in steps of {service.step} samples, requests have {size}")
        if sizes * service.step < reach * size:
            raise ValueError(f"service times: up to {sizes * service.step} samples, {reach * size} can be in a batch")
        if instances < busiest:
            raise ValueError(f"service times: for up to {instances} busy instances, {busiest} can be")
        # the jobs keep the service times alive, so that identities are not reused meanwhile
        known = self._service_rows.get((id(service), size))
        if known is None:
            each = size // service.step
            times = NS * np.ascontiguousarray(service.seconds[each - 1 :: each], np.float64)
            known = self._service_rows[id(service), size] = (self._service_size, instances)
            self.services.append(times.ravel())
            self._service_size += times.size
        return known

    def _load(self, job: Job) -> tuple[int, int, int]:
        if isinstance(job.load, ClosedLoop):
            return job.load.concurrency, 0, 0
        arrivals = np.round(NS * np.asarray(job.load.arrivals_s, np.float64)).astype(np.int64)
        if arrivals[0] < 0 or (np.diff(arrivals) < 0).any():
            raise ValueError("arrivals: not ascending from 0")
        start = self._arrivals_size
        self.arrivals.append(arrivals)
        self._arrivals_size += len(arrivals)
        return 0, start, self._arrivals_size


def _ring(name: str, values: Array | None, none: float) -> Array:
    ring = np.array([none] if values is None else values, np.float64)
    if not (ring.ndim == 1 and len(ring) and np.isfinite(ring).all() and (ring >= 0).all()):
        raise ValueError(f"{name}: not a row of numbers above 0")
    return ring


def _in_flight(job: Job) -> int:
    """The most requests that can be under way."""
    count = job.load.concurrency if isinstance(job.load, ClosedLoop) else len(job.load.arrivals_s)
    if count < 1:
        raise ValueError("load: no requests")
    return count


def _most_requests(job: Job) -> int:
    """In one batch."""
    size, largest = job.request_batch_size, max(1, job.candidate.max_batch_size)
    if not 1 <= size <= largest:
        raise ValueError(f"requests of {size} samples are refused where max_batch_size is {largest}")
    if job.candidate.instance_count < 1:
        raise ValueError("instance_count: none to run on")
    return largest // size if job.candidate.dynamic_batching else 1


def _prefetches(job: Job) -> bool:
    if job.prefetch is not None:
        return job.prefetch
    return not any(value for path, value in job.candidate.fields if path in QUEUE_POLICIES)


def _outcome(row: list[float], size: int, instances: int) -> Simulated:
    nan = float("nan")
    duration, requests, executions, latency, p50, p90, p95, p99, queue, busy, overloaded = row
    served = bool(requests)
    return Simulated(
        throughput_infer_per_s=size * requests / (duration / NS) if duration else nan,
        latency_avg_s=latency / requests / NS if served else nan,
        latency_p50_s=p50 / NS,
        latency_p90_s=p90 / NS,
        latency_p95_s=p95 / NS,
        latency_p99_s=p99 / NS,
        queue_avg_s=queue / requests / NS if served else nan,
        mean_batch_size=size * requests / executions if executions else nan,
        utilization=busy / (instances * duration) if duration else nan,
        requests=int(requests),
        duration_s=duration / NS,
        overloaded=bool(overloaded),
    )
