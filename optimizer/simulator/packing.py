"""Scenarios as the arrays of the compiled event loop, and the event loop's output as results."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from optimizer.simulator.scenario import (
    Array,
    ClosedLoopLoad,
    MeasurementInterval,
    OpenLoopLoad,
    Overheads,
    Scenario,
    ServiceTimes,
    SimulationResult,
    SimulationTrace,
)

NS = 1e9
# with any of these fields set, Triton's batcher forms no batch ahead of an idle instance
QUEUE_POLICIES = (
    "dynamic_batching.default_queue_policy.default_timeout_microseconds",
    "dynamic_batching.default_queue_policy.allow_timeout_override",
    "dynamic_batching.default_queue_policy.max_queue_size",
    "dynamic_batching.priority_levels",
)

Ints = npt.NDArray[np.int64]


class PackedScenarios:
    """The arguments of ``event_loop.simulate_points``: one row of ``points`` for each scenario.

    Raises:
        ValueError: A candidate refuses the requests, or the service times do not cover its batches or instances.
    """

    def __init__(
        self, scenarios: Sequence[Scenario], jitter: Array | None, gaps_s: Array | None, window: MeasurementInterval
    ) -> None:
        self._sizes = [(scenario.request_batch_size, scenario.candidate.instances) for scenario in scenarios]
        self._preferred: list[int] = []
        self._services: list[Array] = []
        self._arrivals: list[Ints] = []
        self._service_rows: dict[tuple[int, int], tuple[int, int]] = {}
        self._service_size = 0
        self._arrivals_size = 0
        self._in_flight = 1
        self._most_measured = 1
        points = np.array([self._row(scenario, window) for scenario in scenarios], np.int64)
        factors, gaps = _check_ring("jitter", jitter, 1.0), _check_ring("gaps", gaps_s, 0.0)
        if not (factors > 0).all():
            raise ValueError("jitter: all factors must be positive")
        self._points = points
        self._tables = (
            np.array(self._preferred, np.int64),
            np.concatenate(self._services),
            factors,
            np.round(NS * gaps).astype(np.int64),
            np.concatenate([np.empty(0, np.int64), *self._arrivals]),
        )

    def run(self) -> list[SimulationResult]:
        """Simulate all scenarios. Releases the GIL."""
        results, _, _ = self._simulate(log_rows=0)
        return [_to_result(row, *sizes) for row, sizes in zip(results.tolist(), self._sizes, strict=True)]

    def trace(self) -> SimulationTrace:
        """Simulate a single scenario and return its executions and requests."""
        rows = self._most_measured + 1
        while True:
            _, executions, requests = self._simulate(rows)
            if not executions[-1, 4] and requests[-1, 1] < 0:
                break
            rows *= 2  # warm-up requests and those in flight at the end come on top of the measured ones
        executions, requests = executions[executions[:, 4] > 0], requests[requests[:, 1] >= 0]
        return SimulationTrace(
            executions[:, 0],
            executions[:, 1] / NS,
            np.where(executions[:, 2] < 0, np.nan, executions[:, 2] / NS),
            executions[:, 3],
            executions[:, 4],
            requests[:, 0] / NS,
            requests[:, 1] / NS,
        )

    def _simulate(self, log_rows: int) -> tuple[Array, Ints, Ints]:
        from optimizer.simulator import event_loop  # imports the compiler, so only when something is simulated

        results = np.empty((len(self._sizes), event_loop.RESULTS))
        executions = np.zeros((log_rows, event_loop.EXECUTION_COLUMNS), np.int64)
        requests = np.full((log_rows, event_loop.REQUEST_COLUMNS), -1, np.int64)
        tables, most = event_loop.Tables(*self._tables), self._most_measured
        event_loop.simulate_points(self._points, tables, self._in_flight, most, results, executions, requests)
        return results, executions, requests

    def _row(self, scenario: Scenario, window: MeasurementInterval) -> list[int]:
        """Return the columns of ``points`` in the order that ``event_loop`` defines."""
        candidate, size = scenario.candidate, scenario.request_batch_size
        limit = _most_requests(scenario)
        in_flight = _most_in_flight(scenario)
        largest = min(limit, in_flight)
        busiest = min(candidate.instances, in_flight)
        warm_up, requests = window.resolve(scenario.load)
        if warm_up < 0 or requests < 1 or (isinstance(scenario.load, OpenLoopLoad) and warm_up >= requests):
            raise ValueError(f"no request is left to measure: {requests} requests, {warm_up} of them to warm up")
        self._in_flight = max(self._in_flight, in_flight)
        self._most_measured = max(self._most_measured, 2 * requests + busiest * largest)
        preferred_from = len(self._preferred)
        if candidate.dynamic_batching and candidate.max_batch_size > 0:
            self._preferred += sorted(set(candidate.preferred_batch_sizes or (candidate.max_batch_size,)))
        return [
            size,
            min(limit, in_flight + 1),  # equivalent to any larger limit, with smaller tables
            candidate.instances,
            candidate.dynamic_batching,
            1000 * candidate.max_queue_delay_us if candidate.dynamic_batching else 0,
            scenario.fixed_shapes,
            _prefetches(scenario),
            preferred_from,
            len(self._preferred),
            *self._add_service_times(scenario.service, size, largest, busiest),
            *self._add_load(scenario),
            warm_up,
            requests,
            *(round(NS * getattr(scenario.overheads, name)) for name in Overheads.__slots__),
        ]

    def _add_service_times(self, service: ServiceTimes, size: int, largest: int, busiest: int) -> tuple[int, int]:
        """Return the index of the times of one request in ``services``, and the number of columns of that table."""
        sizes, instances = service.seconds.shape
        if size % service.step:
            raise ValueError(f"service times: given in steps of {service.step} samples, but a request has {size}")
        if sizes * service.step < largest * size:
            raise ValueError(
                f"service times: given up to {sizes * service.step} samples, but a batch can have {largest * size}"
            )
        if instances < busiest:
            raise ValueError(f"service times: given for up to {instances} busy instances, but {busiest} can be busy")
        # the scenarios keep the service times alive, so no id is reused
        row = self._service_rows.get((id(service), size))
        if row is None:
            steps = size // service.step
            times = NS * np.ascontiguousarray(service.seconds[steps - 1 :: steps], np.float64)
            row = self._service_rows[id(service), size] = (self._service_size, instances)
            self._services.append(times.ravel())
            self._service_size += times.size
        return row

    def _add_load(self, scenario: Scenario) -> tuple[int, int, int]:
        """Return the concurrency (0: open loop) and the range of the scenario's arrivals."""
        if isinstance(scenario.load, ClosedLoopLoad):
            return scenario.load.concurrency, 0, 0
        arrivals = np.round(NS * np.asarray(scenario.load.arrivals_s, np.float64)).astype(np.int64)
        if arrivals[0] < 0 or (np.diff(arrivals) < 0).any():
            raise ValueError("arrivals: not ascending from 0")
        start = self._arrivals_size
        self._arrivals.append(arrivals)
        self._arrivals_size += len(arrivals)
        return 0, start, self._arrivals_size


def _check_ring(name: str, values: Array | None, default: float) -> Array:
    ring = np.array([default] if values is None else values, np.float64)
    if not (ring.ndim == 1 and len(ring) and np.isfinite(ring).all() and (ring >= 0).all()):
        raise ValueError(f"{name}: must be a non-empty row of finite numbers that are at least 0")
    return ring


def _most_in_flight(scenario: Scenario) -> int:
    load = scenario.load
    count = load.concurrency if isinstance(load, ClosedLoopLoad) else len(load.arrivals_s)
    if count < 1:
        raise ValueError("load: no requests")
    return count


def _most_requests(scenario: Scenario) -> int:
    """Return how many requests fit in one batch."""
    size, largest = scenario.request_batch_size, max(1, scenario.candidate.max_batch_size)
    if not 1 <= size <= largest:
        raise ValueError(f"requests of {size} samples are refused where max_batch_size is {largest}")
    if scenario.candidate.instance_count < 1:
        raise ValueError("instance_count: must be at least 1")
    return largest // size if scenario.candidate.dynamic_batching else 1


def _prefetches(scenario: Scenario) -> bool:
    if scenario.prefetch is not None:
        return scenario.prefetch
    return not any(value for path, value in scenario.candidate.fields if path in QUEUE_POLICIES)


def _to_result(row: list[float], size: int, instances: int) -> SimulationResult:
    nan = float("nan")
    duration, requests, executions, latency, p50, p90, p95, p99, queue, busy, overloaded = row
    served = bool(requests)
    return SimulationResult(
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
