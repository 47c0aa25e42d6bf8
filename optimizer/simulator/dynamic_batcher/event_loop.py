"""The discrete-event loop of the dynamic batcher, compiled to machine code by Numba.

Import this module only where something is simulated: the import loads the compiler.
"""

from __future__ import annotations

import numpy as np

from optimizer.simulator.compilation import CompiledOnce, Records, compiled, inlined
from optimizer.simulator.dynamic_batcher.batch_choice import tabulate_preferred_sizes
from optimizer.simulator.dynamic_batcher.batcher import IDLE_WAIT, arrive, form_payload
from optimizer.simulator.dynamic_batcher.clients import answer, answer_refused, next_arrival, send_first
from optimizer.simulator.dynamic_batcher.instances import end_execution, is_ready, next_events, take_payload
from optimizer.simulator.dynamic_batcher.interval import advance, is_over, write_result
from optimizer.simulator.dynamic_batcher.records import (
    EXECUTING,
    FOREVER,
    IN_PAYLOAD,
    IN_QUEUE,
    IN_TRANSIT,
    INSTANCE_RECORD,
    NONE,
    PAYLOAD_RECORD,
    PLACES,
    REQUEST_RECORD,
    STATE_RECORD,
    Arrays,
    ScenarioRow,
    State,
    Tables,
)


@CompiledOnce
def simulate_scenarios(
    scenarios: Records,
    tables: Tables,
    in_flight: int,
    most_measured: int,
    results: Records,
    executions: Records,
    requests: Records,
) -> None:
    """Simulate each row of ``scenarios`` and write the same row of ``results``.

    Args:
        scenarios: Records ``ScenarioRow``.
        tables: Sizes, times and arrivals to which the scenarios refer.
        in_flight: The largest number of requests that any scenario has in flight.
        most_measured: The largest number of requests that the interval of any scenario can hold.
        results: Output, records ``ResultRow``.
        executions: Output, the log of executions as far as it has rows; may be empty.
        requests: Output, the log of requests as far as it has rows; may be empty.
    """
    limit = max(np.max(scenarios["limit"]), 1)
    ring = 1
    while ring < in_flight + 2:
        ring *= 2
    flight = np.empty((PLACES, ring), REQUEST_RECORD)
    payloads = np.empty(ring, PAYLOAD_RECORD)
    latencies = np.empty(most_measured, np.int64)
    preferred_up_to, next_preferred_size = np.empty(limit + 1, np.int64), np.empty(limit + 1, np.int64)
    sent_times = np.empty((max(np.max(scenarios["instances"]), 1), min(limit, ring)), np.int64)
    for row in range(len(scenarios)):
        scenario = scenarios[row]
        arrays = Arrays(
            tables,
            flight,
            payloads,
            latencies,
            preferred_up_to,
            next_preferred_size,
            sent_times,
            np.zeros(scenario.instances, INSTANCE_RECORD),
            executions,
            requests,
        )
        states = np.zeros(1, STATE_RECORD)
        _simulate_scenario(states[0], scenario, arrays)
        write_result(states[0], latencies, results[row])


@compiled
def _simulate_scenario(state: State, scenario: ScenarioRow, arrays: Arrays) -> None:
    """Run the event loop, from the first request to the end of the interval."""
    _prepare(state, scenario, arrays)
    send_first(state, scenario, arrays)
    while True:
        ended, ended_instance, wake_time, woken_instance = next_events(arrays.instances)
        due = next_arrival(state, arrays)
        time = min(min(ended, due), min(state.batcher_at, wake_time))
        if time > state.now:
            if is_over(state, scenario):
                break
            advance(state, scenario, time)
        taker = NONE  # the instance that takes a payload
        state.notified, state.refused = False, 0
        if ended == state.now:
            if arrays.instances[ended_instance].state == EXECUTING:
                end_execution(state, scenario, arrays, ended_instance)
                answer(state, scenario, arrays, ended_instance)
            if is_ready(state, scenario, arrays.instances, ended_instance):
                taker = ended_instance
        elif due == state.now:
            arrive(state, scenario, arrays)
        elif state.batcher_at == state.now:
            while form_payload(state, scenario, arrays):
                pass
        else:
            taker = woken_instance
        if taker >= 0:
            take_payload(state, scenario, arrays, taker)
        if state.notified:
            state.batcher_at = min(state.batcher_at, state.now + (0 if state.polling else scenario.wake))
        if state.refused > 0:
            answer_refused(state, scenario, arrays)


@inlined
def _prepare(state: State, scenario: ScenarioRow, arrays: Arrays) -> None:
    """Set the state before the first request, in which the batcher and all instances sleep."""
    state.largest = tabulate_preferred_sizes(
        arrays.tables.preferred[scenario.preferred_from : scenario.preferred_to],
        scenario.unit_samples,
        scenario.limit,
        arrays.preferred_up_to,
        arrays.next_preferred_size,
    )
    state.largest_units = state.largest // scenario.unit_samples
    state.mask = arrays.flight.shape[1] - 1
    _compare_requests(state, scenario, arrays.tables.policies)
    state.current = state.unmergeable = state.cycle_instance = state.last_ended_instance = state.slot_deadline = NONE
    state.batcher_at = IDLE_WAIT
    state.measuring = scenario.warm_up_requests == 0
    state.sleep_count = scenario.instances
    for j in range(scenario.instances):
        arrays.instances[j].event_at, arrays.instances[j].asleep = FOREVER, j


@inlined
def _compare_requests(state: State, scenario: ScenarioRow, policies: Records) -> None:
    """Find out whether requests differ for the batcher, by size, shape, priority or expiry."""
    state.has_levels, state.timeout, has_limits = scenario.levels > 1, scenario.timeout, scenario.queue_limit > 0
    if state.has_levels:
        for level in range(scenario.levels):
            policy = policies[scenario.policies_from + level]
            state.timeout = max(state.timeout, policy.timeout)
            has_limits = has_limits or policy.limit > 0
    state.alike = scenario.mix_from == scenario.mix_to and state.timeout == 0 and not has_limits
    state.queue_place, state.payload_place = (IN_TRANSIT, IN_TRANSIT) if state.alike else (IN_QUEUE, IN_PAYLOAD)
