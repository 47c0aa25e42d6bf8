"""Scenarios as the arrays of the compiled event loop, and the event loop's output as results."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from objectives.arrays import FloatArray, IntArray
from optimizer.config.queue_policy import (
    ALLOW_TIMEOUT_OVERRIDE,
    DEFAULT_POLICY,
    DEFAULT_PRIORITY_LEVEL,
    MAX_QUEUE_SIZE,
    PRIORITY_LEVELS,
    PRIORITY_POLICY,
    TIMEOUT_US,
)
from optimizer.simulator.compilation import Records
from optimizer.simulator.dynamic_batcher.records import (
    EXECUTION_ROW_RECORD,
    MIX_RECORD,
    NONE,
    POLICY_RECORD,
    REQUEST_ROW_RECORD,
    RESULT_RECORD,
    SCENARIO_RECORD,
    QueuePolicy,
    ResultRow,
    ScenarioRow,
    Tables,
)
from optimizer.simulator.scenario import (
    RING_LENGTH,
    ClosedLoopLoad,
    MeasurementInterval,
    OpenLoopLoad,
    Scenario,
    ServiceTimes,
    SimulationResult,
    SimulationTrace,
)

NS = 1e9
# with any of these fields set, Triton's batcher forms no batch ahead of an idle instance
QUEUE_POLICIES = (TIMEOUT_US, ALLOW_TIMEOUT_OVERRIDE, MAX_QUEUE_SIZE, PRIORITY_LEVELS)


class PackedScenarios:
    """The arguments of ``event_loop.simulate_scenarios``: one row for each scenario.

    Raises:
        ValueError: A candidate refuses the requests, or the service times do not cover its batches or instances.
    """

    def __init__(
        self,
        scenarios: Sequence[Scenario],
        jitter: FloatArray | None,
        gaps_s: FloatArray | None,
        interval: MeasurementInterval,
    ) -> None:
        self._sizes = [(_unit(scenario), scenario.candidate.instances) for scenario in scenarios]
        self._preferred: list[int] = []
        self._services: list[FloatArray] = []
        self._arrivals: list[IntArray] = []
        self._mixes: list[Records] = []
        self._policies: list[QueuePolicy] = []
        self._mix_ranges: dict[Hashable, tuple[int, int]] = {}
        self._service_rows: dict[tuple[int, int], tuple[int, int]] = {}
        self._service_size = 0
        self._arrivals_size = 0
        self._in_flight = 1
        self._most_measured = 1
        rows = [self._row(scenario, interval) for scenario in scenarios]
        factors, gaps = _check_ring("jitter", jitter, 1.0), _check_ring("gaps", gaps_s, 0.0)
        if not (factors > 0).all():
            raise ValueError("jitter: all factors must be positive")
        self._rows = rows
        self._tables = Tables(
            preferred=np.array(self._preferred, np.int64),
            services=np.concatenate(self._services),
            factors=factors,
            gaps=np.round(NS * gaps).astype(np.int64),
            arrivals=np.concatenate([np.empty(0, np.int64), *self._arrivals]),
            mix=np.concatenate([np.empty(0, MIX_RECORD), *self._mixes]),
            policies=np.array(self._policies, POLICY_RECORD),
        )

    def run(self) -> list[SimulationResult]:
        """Simulate all scenarios. Releases the GIL."""
        results, _, _ = self._simulate(log_rows=0)
        rows = (ResultRow(*row) for row in results.tolist())
        return [_to_result(row, *sizes) for row, sizes in zip(rows, self._sizes, strict=True)]

    def trace(self) -> SimulationTrace:
        """Simulate a single scenario and return its executions and requests."""
        log_rows = self._most_measured + 1
        while True:
            _, executions, requests = self._simulate(log_rows)
            if not executions["requests"][-1] and requests["arrived"][-1] == NONE:
                break
            log_rows *= 2  # warm-up requests and those in flight at the end come on top of the measured ones
        executions, requests = executions[executions["requests"] > 0], requests[requests["arrived"] != NONE]
        ((unit, _),) = self._sizes
        return SimulationTrace(
            instance=executions["instance"],
            start_s=executions["start"] / NS,
            end_s=np.where(executions["end"] == NONE, np.nan, executions["end"] / NS),
            samples=unit * executions["units"],
            requests=executions["requests"],
            sent_s=requests["sent"] / NS,
            arrived_s=requests["arrived"] / NS,
            request_samples=unit * requests["units"],
            request_shape=requests["shape"],
            execution=requests["execution"],
        )

    def _simulate(self, log_rows: int) -> tuple[Records, Records, Records]:
        """Return the results of all scenarios, and the logs of executions and of requests with ``log_rows`` rows."""
        from optimizer.simulator.dynamic_batcher import event_loop  # imports the compiler, so only to simulate

        results = np.empty(len(self._sizes), RESULT_RECORD)
        executions = np.zeros(log_rows, EXECUTION_ROW_RECORD)
        requests = np.full(log_rows, NONE, REQUEST_ROW_RECORD)
        rows, most = np.array(self._rows, SCENARIO_RECORD), self._most_measured
        event_loop.simulate_scenarios(rows, self._tables, self._in_flight, most, results, executions, requests)
        return results, executions, requests

    def _row(self, scenario: Scenario, interval: MeasurementInterval) -> ScenarioRow:
        """Return the record of a scenario, after its tables are added to those of the others."""
        candidate, unit = scenario.candidate, _unit(scenario)
        largest_request, limit = _most_units(scenario)
        in_flight = scenario.load.max_in_flight
        if in_flight < 1:
            raise ValueError("load: no requests")
        largest = min(limit, in_flight * largest_request)
        busiest = min(candidate.instances, in_flight)
        warm_up, requests = interval.resolve(scenario.load)
        if warm_up < 0 or requests < 1 or (isinstance(scenario.load, OpenLoopLoad) and warm_up >= requests):
            raise ValueError(f"no request is left to measure: {requests} requests, {warm_up} of them to warm up")
        self._in_flight = max(self._in_flight, in_flight)
        self._most_measured = max(self._most_measured, 2 * requests + busiest * largest)
        preferred_from = len(self._preferred)
        if candidate.dynamic_batching and candidate.max_batch_size > 0:
            self._preferred += sorted(set(candidate.preferred_batch_sizes or (candidate.max_batch_size,)))
        services_from, services_stride = self._add_service_times(scenario.service, unit, largest, busiest)
        concurrency, arrivals_from, arrivals_to = self._add_load(scenario)
        mix_from, mix_to = self._add_mix(scenario)
        policy = _queue_policy(scenario, _only_level(scenario))
        levels, policies_from = self._add_levels(scenario)
        overheads = scenario.overheads
        return ScenarioRow(
            unit_samples=unit,
            limit=min(limit, in_flight * largest_request + 1),  # equivalent to any larger one, with smaller tables
            instances=candidate.instances,
            dynamic_batching=candidate.dynamic_batching,
            delay=1000 * candidate.max_queue_delay_us if candidate.dynamic_batching else 0,
            fixed_shapes=scenario.fixed_shapes,
            prefetch=_prefetches(scenario),
            preferred_from=preferred_from,
            preferred_to=len(self._preferred),
            services_from=services_from,
            services_stride=services_stride,
            concurrency=concurrency,
            arrivals_from=arrivals_from,
            arrivals_to=arrivals_to,
            warm_up_requests=warm_up,
            measured_requests=requests,
            send=round(NS * overheads.send_s),
            receive=round(NS * overheads.receive_s),
            client=round(NS * overheads.client_s),
            spacing=round(NS * overheads.spacing_s),
            wake=round(NS * overheads.wake_s),
            dispatch=round(NS * overheads.dispatch_s),
            release=round(NS * overheads.release_s),
            mix_from=mix_from,
            mix_to=mix_to,
            queue_limit=policy.limit,
            timeout=policy.timeout,
            rejects=policy.rejects,
            missed_wakes=round(1e6 * scenario.missed_share),
            levels=levels,
            policies_from=policies_from,
        )

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

    def _add_mix(self, scenario: Scenario) -> tuple[int, int]:
        """Return the range of the scenario's requests in ``Tables.mix``; empty if they are all alike."""
        if not scenario.has_mix:
            return 0, 0
        unit = _unit(scenario)
        requests = scenario.request_batch_size, scenario.request_mix, scenario.shape_shares, scenario.priorities
        default = _default_level(scenario)
        key = unit, requests, _levels(scenario), default, scenario.mix_seed
        if key not in self._mix_ranges:
            samples, shapes = scenario.mix()
            priorities = scenario.priority_mix()
            start = RING_LENGTH * len(self._mixes)
            levels = np.where((priorities < 1) | (priorities > _levels(scenario)), default, priorities)
            mix = np.empty(RING_LENGTH, MIX_RECORD)
            mix["units"], mix["shape"], mix["level"] = samples // unit, shapes, levels
            self._mixes.append(mix)
            self._mix_ranges[key] = start, start + RING_LENGTH
        return self._mix_ranges[key]

    def _add_levels(self, scenario: Scenario) -> tuple[int, int]:
        """Return the number of priority levels and the index of the first one's policy; 0 without a mix of them."""
        levels = _levels(scenario) if scenario.priorities is not None else 0
        if levels < 2:
            return 0, 0
        start = len(self._policies)
        self._policies += [_queue_policy(scenario, level) for level in range(1, levels + 1)]
        return levels, start

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


def _check_ring(name: str, values: FloatArray | None, default: float) -> FloatArray:
    ring = np.array([default] if values is None else values, np.float64)
    if not (ring.ndim == 1 and len(ring) and np.isfinite(ring).all() and (ring >= 0).all()):
        raise ValueError(f"{name}: must be a non-empty row of finite numbers that are at least 0")
    return ring


def _unit(scenario: Scenario) -> int:
    """Return the samples of a unit: those of each request, or the step of the service times if requests differ."""
    return scenario.request_batch_size if scenario.request_mix is None else scenario.service.step


def _most_units(scenario: Scenario) -> tuple[int, int]:
    """Return the units of the largest request, and how many fit in one batch."""
    mix, unit = scenario.request_mix, _unit(scenario)
    size, largest = scenario.request_batch_size, max(1, scenario.candidate.max_batch_size)
    if mix is not None:
        size = mix.largest
        if any(bound % unit for low, high, _ in mix.choices for bound in {low, high, low + (high > low)}):
            raise ValueError(f"service times: given in steps of {unit} samples, but not all requests are multiples")
    if not 1 <= size <= largest:
        raise ValueError(f"requests of {size} samples are refused where max_batch_size is {largest}")
    if scenario.candidate.instance_count < 1:
        raise ValueError("instance_count: must be at least 1")
    return size // unit, (largest if scenario.candidate.dynamic_batching else size) // unit


def _levels(scenario: Scenario) -> int:
    """Return the number of priority levels of the batcher's queue."""
    fields = dict(scenario.candidate.fields) if scenario.candidate.dynamic_batching else {}
    return int(fields.get(PRIORITY_LEVELS, 0))


def _default_level(scenario: Scenario) -> int:
    """Return the priority level of requests without a priority."""
    return int(dict(scenario.candidate.fields).get(DEFAULT_PRIORITY_LEVEL, 1))


def _only_level(scenario: Scenario) -> int:
    """Return the priority level of all requests; 0 if there are no levels, or several with requests."""
    levels = _levels(scenario)
    return _default_level(scenario) if levels == 1 or (levels and scenario.priorities is None) else 0


def _queue_policy(scenario: Scenario, level: int) -> QueuePolicy:
    """Return the policy of a priority ``level`` if it has one of its own, else the default policy. 0 has none."""
    applies = scenario.refuses and scenario.candidate.dynamic_batching
    fields = dict(scenario.candidate.fields) if applies else {}
    prefix = f"{PRIORITY_POLICY}.{level}."
    if not any(path.startswith(prefix) for path in fields):
        prefix = f"{DEFAULT_POLICY}."
    return QueuePolicy(
        limit=int(fields.get(f"{prefix}max_queue_size", 0)),
        timeout=1000 * int(fields.get(f"{prefix}default_timeout_microseconds", 0)),
        rejects=fields.get(f"{prefix}timeout_action") != "DELAY",
    )


def _prefetches(scenario: Scenario) -> bool:
    if scenario.prefetch is not None:
        return scenario.prefetch
    return not any(value for path, value in scenario.candidate.fields if path in QUEUE_POLICIES)


def _to_result(row: ResultRow, unit: int, instances: int) -> SimulationResult:
    nan, samples = float("nan"), unit * row.units
    return SimulationResult(
        throughput_infer_per_sec=samples / (row.duration / NS) if row.duration else nan,
        latency_avg_s=row.latency / row.requests / NS if row.requests else nan,
        latency_p50_s=row.latency_p50 / NS,
        latency_p90_s=row.latency_p90 / NS,
        latency_p95_s=row.latency_p95 / NS,
        latency_p99_s=row.latency_p99 / NS,
        queue_avg_s=row.queue / row.requests / NS if row.requests else nan,
        compute_avg_s=row.compute / row.requests / NS if row.requests else nan,
        mean_batch_size=samples / row.executions if row.executions else nan,
        utilization=row.busy / (instances * row.duration) if row.duration else nan,
        requests=row.requests,
        duration_s=row.duration / NS,
        overloaded=row.overloaded,
        rejected=row.rejected,
        timed_out=row.timed_out,
    )
