"""The measurement interval: its start, its end, and its result."""

from __future__ import annotations

import numpy as np

from optimizer.simulator.compilation import Ints, compiled, inlined
from optimizer.simulator.dynamic_batcher.records import Instance, ResultRow, ScenarioRow, State

MIN_ARRIVALS = 30  # arrivals; fewer show no trend


@inlined
def is_over(state: State, scenario: ScenarioRow) -> bool:
    """Return whether the interval has ended. The time is then not advanced."""
    if state.completed + state.refusals >= state.total:
        return True
    if not state.measuring or state.measured < scenario.measured_requests or state.last_end != state.now:
        return False
    return bool(state.is_at_cycle_end or state.measured >= 2 * scenario.measured_requests)


@inlined
def advance(state: State, scenario: ScenarioRow, time: int) -> None:
    """Advance the time. If the warm-up is over, the interval starts first."""
    if not state.measuring and state.completed >= scenario.warm_up_requests and state.last_end == state.now:
        state.measuring = True
        state.opened, state.cycle_instance = state.now, state.last_ended_instance
        state.rejected_before, state.timed_out_before = state.rejected, state.timed_out
    if state.measuring:
        state.busy_area += state.busy * (time - state.now)
    state.now = time
    state.is_at_cycle_end = False


@inlined
def count_execution(state: State, instance: Instance) -> None:
    """Add an execution that ends now to the interval, if this has started."""
    if state.measuring:
        state.batches += 1
        state.queue_sum += instance.waited
        state.compute_sum += instance.requests * (state.now - instance.begun)
        state.units_measured += instance.units


@inlined
def count_latency(state: State, latencies: Ints, latency: int) -> None:
    """Add a request that completes now to the interval, if this has started."""
    if state.measuring:
        latencies[state.measured] = latency
        state.latency_sum += latency
        state.measured += 1


@inlined
def watch_queue(state: State, scenario: ScenarioRow) -> None:
    """Decide after each arrival of an open loop whether the requests overload the server.

    They do if during the last third of the arrivals the queue is never empty and grows: its minimum length in the
    second half of this third exceeds that in the first half. A queue that fits into one more batch for each instance
    and the batcher can be requests that wait for a preferred size.
    """
    waiting = state.arrived - state.started - state.refusals
    if state.arrived == state.total - state.total // 3:
        state.least_waiting = waiting
    elif state.arrived == state.total - state.total // 6:
        state.earlier_waiting, state.least_waiting = state.least_waiting, waiting
    elif state.arrived == state.total:
        grows = 0 < state.earlier_waiting < state.least_waiting > scenario.limit * (scenario.instances + 1)
        state.overloaded = grows and state.total >= MIN_ARRIVALS


@inlined
def write_result(state: State, latencies: Ints, result: ResultRow) -> None:
    """Write the result of the interval, with percentiles by perf_analyzer's definition."""
    result.duration = state.last_end - state.opened
    result.requests, result.units, result.executions = state.measured, state.units_measured, state.batches
    result.latency, result.queue, result.compute = state.latency_sum, state.queue_sum, state.compute_sum
    result.busy = state.busy_area
    result.overloaded = state.overloaded and state.refusals == 0
    result.rejected = state.rejected - state.rejected_before
    result.timed_out = state.timed_out - state.timed_out_before
    # in ascending order: no element from the rank of a percentile on is smaller than the one at this rank
    measured = latencies[: state.measured]
    result.latency_p50, rank = _percentile(measured, 50.0, 0)
    result.latency_p90, rank = _percentile(measured, 90.0, rank)
    result.latency_p95, rank = _percentile(measured, 95.0, rank)
    result.latency_p99, rank = _percentile(measured, 99.0, rank)


@inlined
def _percentile(latencies: Ints, percent: float, start: int) -> tuple[float, int]:
    """Return a percentile and its rank, the nearest one with halves rounded up; NaN without latencies.

    No latency before the index ``start`` may be larger than one from there on.
    """
    if len(latencies) == 0:
        return np.nan, start
    rank = int(percent / 100.0 * (len(latencies) - 1) + 0.5)
    partition(latencies, start, rank)
    return float(latencies[rank]), rank


@compiled
def partition(values: Ints, start: int, rank: int) -> None:
    """Reorder ``values[start:]`` so that ``values[rank]`` is not smaller than any before it or larger than any after.

    This is Hoare's selection algorithm. ``np.partition`` would do, but Numba takes 6 s to compile it.
    """
    low, high = start, len(values) - 1
    while low < high:
        pivot = values[(low + high) // 2]
        i, j = low, high
        while i <= j:
            while values[i] < pivot:
                i += 1
            while values[j] > pivot:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if rank <= j:
            high = j
        elif rank >= i:
            low = i
        else:
            break
