"""The discrete-event loop of the dynamic batcher, compiled to machine code by Numba.

Import this module only where something is simulated: the import loads the compiler. Times are in ns. Compiled
functions must be in the file of those that call them: Numba would not compile the callers again when they change.
"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import numpy as np

from optimizer.simulator.compilation import CompiledOnce, Floats, Ints, Records, compiled, inlined, record_type
from optimizer.simulator.scenario import REJECTED, TIMED_OUT

# columns of ``policies``, as ``queue_limit``, ``timeout`` and ``rejects`` of a scenario
LEVEL_LIMIT = 0
LEVEL_TIMEOUT = 1
LEVEL_REJECTS = 2

# rows of ``mix``
MIX_UNITS = 0
MIX_SHAPE = 1
MIX_LEVEL = 2

# columns of ``results``
RESULT_DURATION = 0
RESULT_REQUESTS = 1
RESULT_EXECUTIONS = 2
RESULT_LATENCY = 3  # sum over requests
RESULT_P50 = 4
RESULT_P90 = 5
RESULT_P95 = 6
RESULT_P99 = 7
RESULT_QUEUE = 8  # sum over requests
RESULT_COMPUTE = 9  # sum over requests
RESULT_BUSY = 10  # integral over time of the number of busy instances
RESULT_OVERLOADED = 11
RESULT_COMPLETED_UNITS = 12
RESULT_REJECTED = 13
RESULT_TIMED_OUT = 14
RESULTS = 15

# columns of the two logs
EXECUTION_COLUMNS = 5  # instance, start, end, units, requests
REQUEST_COLUMNS = 5  # sent, arrived, units, shape, execution (as in SimulationTrace)
EXECUTION = 4  # the last of these columns

# where a request is before its execution: the first index of ``flight``
IN_TRANSIT = 0
IN_QUEUE = 1
DELAYED = 2  # behind this queue, because it expired
IN_PAYLOAD = 3
PLACES = 4

# the facts of a request: the second index of ``flight``
SENT = 0
ARRIVED = 1
NUMBER = 2
UNITS = 3
SHAPE = 4
LEVEL = 5  # priority, 1 is the highest; 0 if there is a single queue
FACTS = 6

# rows of ``payloads``
PAYLOAD_UNITS = 0
PAYLOAD_REQUESTS = 1
PAYLOAD_OLDEST = 2  # the earliest arrival
PAYLOAD_SHAPE = 3
PAYLOAD_CLOSED = 4  # a request of another shape came next: no instance merges this payload with another one
PAYLOAD_ROWS = 5

# This number has a fixed type: a literal has a type of its own, for which Numba compiles the functions that get it
# once more.
NONE = cast(int, np.int64(-1))

# rows of ``instances``, which has a column for each
STATE = 0  # SLEEPING, WAKING, EXECUTING, RELEASING or OVERTAKEN
WHEN = 1  # time of the next event
ASLEEP = 2  # order in which they fell asleep
SIZE = 3  # units of the batch
MEMBERS = 4  # requests of the batch
SINCE = 5  # when the number of busy instances last changed the speed of the execution
RUN = 6  # number of the execution
WAITED = 7  # time in the queue, summed over the requests of the batch
BEGUN = 8  # when the execution began
INSTANCE_ROWS = 9

# rows of ``progress``, which has a column for each instance
LEFT = 0  # share of the execution that remained at SINCE
FACTOR = 1  # on its service time
PROGRESS_ROWS = 2

FOREVER = 2**62
IDLE_WAIT = 500_000_000  # after this time the batcher runs even if it was not notified
PREEMPTION = 32_000  # mean time for which a batcher that runs too early keeps the instance from being idle: measured
MIN_ARRIVALS = 30  # arrivals; fewer show no trend
REFUSED_PAUSE = 100_000  # a client whose request was refused sends again no sooner than this after it arrived
MAX_REFUSED = 20  # refused requests for each wanted one, after which a closed loop ends in any case

SLEEPING = 0
WAKING = 1
EXECUTING = 2
RELEASING = 3
OVERTAKEN = 4  # the batcher, notified of the end of the execution, runs before the instance is idle


class ScenarioRow(NamedTuple):
    """A scenario as the loop reads it: a NumPy record with these fields. Times are in ns.

    Requests and batches have sizes in units: a request, or a number of samples that divides all requests of a mix.

    Attributes:
        unit_samples: Samples of a unit.
        limit: The most units in a batch.
        instances: Instances of the model.
        dynamic_batching: Whether there is a batcher. Otherwise each request is a payload.
        delay: Time that a request waits in the batcher for others.
        fixed_shapes: Whether all requests may share a batch. Then not every arrival wakes the batcher.
        prefetch: Whether the batcher forms payloads ahead of idle instances.
        preferred_from: First index of the preferred sizes in ``Tables.preferred``.
        preferred_to: The index after the last one.
        services_from: Index in ``Tables.services`` of the time of one unit on one busy instance.
        services_stride: Columns of that table of service times.
        concurrency: Clients of a closed loop; 0: an open loop.
        arrivals_from: First index of an open loop's send times in ``Tables.arrivals``.
        arrivals_to: The index after the last one.
        warm_up_requests: Requests that complete before the interval starts.
        measured_requests: Requests that complete in the interval.
        send, receive, client, spacing, wake, dispatch, release: As the fields of ``Overheads``.
        mix_from: First column of the requests in ``Tables.mix``.
        mix_to: The column after the last one; ``mix_from`` if all requests have one unit and one shape.
        queue_limit: The most requests in the batcher's queue; 0: no limit.
        timeout: Time in the queue after which a request expires; 0: none does.
        rejects: Whether expired requests are rejected. Otherwise they move behind those that have not expired.
        missed_wakes: Millionths of the ended executions after which the batcher runs before the instance is idle.
        levels: Priority levels with queues of their own; 0 and 1: a single queue.
        policies_from: Index of the first level's policy in ``Tables.policies``.
    """

    unit_samples: int
    limit: int
    instances: int
    dynamic_batching: bool
    delay: int
    fixed_shapes: bool
    prefetch: bool
    preferred_from: int
    preferred_to: int
    services_from: int
    services_stride: int
    concurrency: int
    arrivals_from: int
    arrivals_to: int
    warm_up_requests: int
    measured_requests: int
    send: int
    receive: int
    client: int
    spacing: int
    wake: int
    dispatch: int
    release: int
    mix_from: int
    mix_to: int
    queue_limit: int
    timeout: int
    rejects: bool
    missed_wakes: int
    levels: int
    policies_from: int


class Tables(NamedTuple):
    """The tables that all scenarios share.

    Attributes:
        preferred: Preferred batch sizes in samples, the lists of all scenarios concatenated.
        services: Service times in ns, the tables of all scenarios concatenated.
        factors: Factors on the service times of successive executions, used cyclically.
        gaps: Additional distances between successive arrivals in ns, used cyclically.
        arrivals: Send times of open loops in ns, the lists of all scenarios concatenated.
        mix: Sizes, shapes and priorities [rows, requests] of successive requests, used cyclically, the lists of
            all scenarios with a mix concatenated.
        policies: Queue policies [levels, columns] of the priority levels of all scenarios concatenated.
    """

    preferred: Ints
    services: Floats
    factors: Floats
    gaps: Ints
    arrivals: Ints
    mix: Ints
    policies: Ints


class Arrays(NamedTuple):
    """The arrays of the simulation of a scenario.

    Attributes:
        tables: The tables that all scenarios share.
        flight: Requests [PLACES, FACTS, ring]: ring buffers of those in each place.
        payloads: Payloads [PAYLOAD_ROWS, ring] that wait for an instance: ring buffers.
        latencies: Latencies in ns [requests] of the measured requests.
        preferred_up_to: The largest preferred size [units + 1] up to a size, see ``_tabulate``.
        next_preferred_size: The next preferred size [units + 1], see ``_tabulate``.
        sent_times: Send times [instances, requests] of the requests in the batch of each instance.
        instances: The instances [INSTANCE_ROWS, instances].
        progress: Their executions [PROGRESS_ROWS, instances].
        executions: Output, the log of executions [rows, EXECUTION_COLUMNS].
        requests: Output, the log of requests [rows, REQUEST_COLUMNS].
    """

    tables: Tables
    flight: Ints
    payloads: Ints
    latencies: Ints
    preferred_up_to: Ints
    next_preferred_size: Ints
    sent_times: Ints
    instances: Ints
    progress: Floats
    executions: Ints
    requests: Ints


class State:
    """The state of the simulation of a scenario: the fields of a NumPy record, all 0 at first.

    The interval starts and ends when the same instance ends an execution, so that it contains whole cycles.

    An open loop overloads the server if during the last third of the arrivals the queue is never empty and grows: its
    minimum length in the second half of this third exceeds that in the first half. A queue that fits into one more
    batch for each instance and the batcher can be requests that wait for a preferred size.
    """

    # the scenario
    alike: bool  # requests leave each place in the order in which they were sent, so they can stay where they are
    has_levels: bool  # the queue has several priority levels
    timeout: int  # the longest one of a request in the queue; 0: no request expires
    largest: int  # preferred size in samples
    mask: int  # maps a number to its slot in a ring buffer
    queue_place: int  # the first index of ``flight`` of the queue
    payload_place: int  # the same of payloads
    now: int
    # requests: how many were sent, have arrived, joined a payload, began to be executed, were answered
    issued: int
    arrived: int
    formed: int
    started: int
    completed: int
    refusals: int  # rejected or timed out
    rejected: int
    timed_out: int
    unanswered: int  # expired in the queue; the batcher rejects them when it runs again
    refused: int  # answered now without having been executed
    total: int  # requests of an open loop
    last_arrival: int
    last_response: int
    # the queue
    queue_head: int
    queue_tail: int
    delayed_head: int
    delayed_tail: int
    queued_samples: int
    # the batcher; payloads from head to tail wait for an instance
    head: int
    tail: int
    current: int  # the payload that the batcher may still extend; NONE: it is not queued yet
    current_size: int
    unmergeable: int  # the head, if an instance could not merge it
    saturated: bool  # the current payload is closed
    next_preferred: int  # samples in the queue at which an arrival wakes the batcher
    batcher_at: int  # when it runs
    slot_deadline: int  # when the wait for a slot ends and expired requests are rejected; NONE: there is no wait
    polling: bool  # it tries again and again until the current payload is executed
    overtaken: bool  # it has taken the CPU of an instance that is not idle yet; it has only one
    notified: bool  # it is notified now
    # the instances
    sleep_count: int
    busy: int
    runs: int  # executions
    last_end: int
    last_ended_instance: int
    # the interval
    measuring: bool
    opened: int
    cycle_instance: int  # the instance that ended an execution when it started
    is_at_cycle_end: bool
    measured: int
    units_measured: int
    batches: int
    latency_sum: int
    queue_sum: int
    compute_sum: int
    busy_area: int
    rejected_before: int
    timed_out_before: int
    # whether the server is overloaded
    least_waiting: int
    earlier_waiting: int
    overloaded: bool


SCENARIO_RECORD = record_type(ScenarioRow)
STATE_RECORD = record_type(State)


@CompiledOnce
def simulate_scenarios(
    scenarios: Records,
    tables: Tables,
    in_flight: int,
    most_measured: int,
    results: Floats,
    executions: Ints,
    requests: Ints,
) -> None:
    """Simulate each row of ``scenarios`` and write the same row of ``results``.

    Args:
        scenarios: [scenarios] records of the type SCENARIO_RECORD.
        tables: Sizes, times and arrivals to which the scenarios refer.
        in_flight: The largest number of requests that any scenario has in flight.
        most_measured: The largest number of requests that the interval of any scenario can hold.
        results: Output, [scenarios, RESULTS].
        executions: Output, the log of executions as far as it has rows; may be empty.
        requests: Output, the log of requests as far as it has rows; may be empty.
    """
    limit = max(np.max(scenarios["limit"]), 1)
    ring = 1
    while ring < in_flight + 2:
        ring *= 2
    flight = np.empty((PLACES, FACTS, ring), np.int64)
    payloads = np.empty((PAYLOAD_ROWS, ring), np.int64)
    latencies = np.empty(most_measured, np.int64)
    preferred_up_to, next_preferred_size = np.empty(limit + 1, np.int64), np.empty(limit + 1, np.int64)
    sent_times = np.empty((max(np.max(scenarios["instances"]), 1), min(limit, ring)), np.int64)
    for row in range(scenarios.shape[0]):
        scenario = scenarios[row]
        instances = np.zeros((INSTANCE_ROWS, scenario.instances), np.int64)
        instances[WHEN, :] = FOREVER
        instances[ASLEEP, :] = np.arange(scenario.instances)
        progress = np.zeros((PROGRESS_ROWS, scenario.instances))
        arrays = Arrays(
            tables,
            flight,
            payloads,
            latencies,
            preferred_up_to,
            next_preferred_size,
            sent_times,
            instances,
            progress,
            executions,
            requests,
        )
        states = np.zeros(1, STATE_RECORD)
        _simulate_scenario(states[0], scenario, arrays)
        _write_results(states[0], latencies, results[row])


@compiled
def _simulate_scenario(state: State, scenario: ScenarioRow, arrays: Arrays) -> None:
    """Run the event loop, from the first request to the end of the interval."""
    state.largest = _tabulate(
        arrays.tables.preferred[scenario.preferred_from : scenario.preferred_to],
        scenario.unit_samples,
        scenario.limit,
        arrays.preferred_up_to,
        arrays.next_preferred_size,
    )
    state.mask = arrays.flight.shape[2] - 1
    _compare_requests(state, scenario, arrays.tables.policies)
    _send_first(state, scenario, arrays)
    while True:
        ended, ended_instance, wake_time, woken_instance = _next_events(arrays.instances)
        due = FOREVER
        if state.arrived < state.issued:
            due = arrays.flight[IN_TRANSIT, ARRIVED, state.arrived & state.mask]
        time = min(min(ended, due), min(state.batcher_at, wake_time))
        if time > state.now:
            if _is_over(state, scenario):
                break
            _advance(state, scenario, time)
        taker = NONE  # the instance that takes a payload
        state.notified, state.refused = False, 0
        if ended == state.now:
            if arrays.instances[STATE, ended_instance] == EXECUTING:
                _answer(state, scenario, arrays, ended_instance)
            if _is_ready(state, scenario, arrays.instances, ended_instance):
                taker = ended_instance
        elif due == state.now:
            _arrive(state, scenario, arrays)
        elif state.batcher_at == state.now:
            while _form_payload(state, scenario, arrays):
                pass
        else:
            taker = woken_instance
        if taker >= 0:
            _take_payload(state, scenario, arrays, taker)
        if state.notified:
            state.batcher_at = min(state.batcher_at, state.now + (0 if state.polling else scenario.wake))
        if state.refused > 0:
            _answer_refused(state, scenario, arrays)


@inlined
def _compare_requests(state: State, scenario: ScenarioRow, policies: Ints) -> None:
    """Find out whether requests differ for the batcher, by size, shape, priority or expiry."""
    state.has_levels, state.timeout, has_limits = scenario.levels > 1, scenario.timeout, scenario.queue_limit > 0
    if state.has_levels:
        for level in range(scenario.levels):
            state.timeout = max(state.timeout, policies[scenario.policies_from + level, LEVEL_TIMEOUT])
            has_limits = has_limits or policies[scenario.policies_from + level, LEVEL_LIMIT] > 0
    state.alike = scenario.mix_from == scenario.mix_to and state.timeout == 0 and not has_limits
    state.queue_place, state.payload_place = (IN_TRANSIT, IN_TRANSIT) if state.alike else (IN_QUEUE, IN_PAYLOAD)


@inlined
def _next_events(instances: Ints) -> tuple[int, int, int, int]:
    """Return when the next instance ends or is ready, and which; when the next one wakes up, and which."""
    ended = wake_time = FOREVER
    ended_instance = woken_instance = NONE
    for j in range(instances.shape[1]):
        if instances[STATE, j] == WAKING:
            if instances[WHEN, j] < wake_time:
                wake_time, woken_instance = instances[WHEN, j], j
        elif instances[WHEN, j] < ended:
            ended, ended_instance = instances[WHEN, j], j
    return ended, ended_instance, wake_time, woken_instance


@inlined
def _is_over(state: State, scenario: ScenarioRow) -> bool:
    """Return whether the interval has ended. The time is then not advanced."""
    if state.completed + state.refusals >= state.total:
        return True
    if not state.measuring or state.measured < scenario.measured_requests or state.last_end != state.now:
        return False
    return bool(state.is_at_cycle_end or state.measured >= 2 * scenario.measured_requests)


@inlined
def _advance(state: State, scenario: ScenarioRow, time: int) -> None:
    """Advance the time. If the warm-up is over, the interval starts first."""
    if not state.measuring and state.completed >= scenario.warm_up_requests and state.last_end == state.now:
        state.measuring = True
        state.opened, state.cycle_instance = state.now, state.last_ended_instance
        state.rejected_before, state.timed_out_before = state.rejected, state.timed_out
    if state.measuring:
        state.busy_area += state.busy * (time - state.now)
    state.now = time
    state.is_at_cycle_end = False


# -- requests --------------------------------------------------------------------------------------------------------


@inlined
def _send_first(state: State, scenario: ScenarioRow, arrays: Arrays) -> None:
    """Send the first requests: one of each client in a closed loop, and all in an open loop."""
    state.last_arrival = state.last_response = -scenario.spacing
    state.current = state.unmergeable = state.cycle_instance = state.last_ended_instance = state.slot_deadline = NONE
    state.batcher_at = IDLE_WAIT
    state.sleep_count = scenario.instances
    state.measuring = scenario.warm_up_requests == 0
    if scenario.concurrency > 0:
        state.total, initial = FOREVER, scenario.concurrency
    else:
        state.total = initial = scenario.arrivals_to - scenario.arrivals_from
    for i in range(initial):
        sent = 0 if scenario.concurrency > 0 else arrays.tables.arrivals[scenario.arrivals_from + i]
        _send(state, scenario, arrays, sent)


@inlined
def _send(state: State, scenario: ScenarioRow, arrays: Arrays, sent: int) -> None:
    i = state.issued & state.mask
    gap = scenario.spacing + arrays.tables.gaps[state.issued % len(arrays.tables.gaps)]
    state.last_arrival = max(sent + scenario.send, state.last_arrival + gap)
    arrays.flight[IN_TRANSIT, SENT, i], arrays.flight[IN_TRANSIT, ARRIVED, i] = sent, state.last_arrival
    state.issued += 1


@inlined
def _arrive(state: State, scenario: ScenarioRow, arrays: Arrays) -> None:
    """Put the next request into the queue or, without dynamic batching, into a payload of its own."""
    flight, requests = arrays.flight, arrays.requests
    transit = flight[IN_TRANSIT]
    i, units = state.arrived & state.mask, 1
    if not state.alike:
        shape = 0
        position = scenario.mix_from + state.arrived % max(scenario.mix_to - scenario.mix_from, 1)
        if scenario.mix_from < scenario.mix_to:
            units, shape = arrays.tables.mix[MIX_UNITS, position], arrays.tables.mix[MIX_SHAPE, position]
        transit[NUMBER, i], transit[UNITS, i], transit[SHAPE, i] = state.arrived, units, shape
        transit[LEVEL, i] = arrays.tables.mix[MIX_LEVEL, position] if state.has_levels else 0
    if state.arrived < len(requests):
        requests[state.arrived, 0], requests[state.arrived, 1] = transit[SENT, i], state.now
        requests[state.arrived, 2], requests[state.arrived, 3] = units, 0 if state.alike else transit[SHAPE, i]
    state.arrived += 1
    _watch_queue(state, scenario)
    if not scenario.dynamic_batching:
        if not state.alike:
            _move(transit, i, flight[state.payload_place], state.formed & state.mask)
        state.formed += 1
        payload = state.tail & state.mask
        arrays.payloads[PAYLOAD_UNITS, payload], arrays.payloads[PAYLOAD_REQUESTS, payload] = units, 1
        state.tail += 1
        _notify_instance(state.now + scenario.dispatch, arrays.instances)
    else:
        state.queued_samples += units * scenario.unit_samples  # Triton also counts a request that it then rejects
        if _is_queue_full(state, scenario, arrays, transit[LEVEL, i]):
            state.rejected += 1
            state.refusals += 1
            state.refused = 1
            if state.arrived <= len(requests):
                requests[state.arrived - 1, EXECUTION] = REJECTED
        else:
            _enqueue(state, scenario, arrays, i)


@inlined
def _watch_queue(state: State, scenario: ScenarioRow) -> None:
    """Compare the shortest queue in the two last sixths of the arrivals."""
    waiting = state.arrived - state.started - state.refusals
    if state.arrived == state.total - state.total // 3:
        state.least_waiting = waiting
    elif state.arrived == state.total - state.total // 6:
        state.earlier_waiting, state.least_waiting = state.least_waiting, waiting
    elif state.arrived == state.total:
        grows = 0 < state.earlier_waiting < state.least_waiting > scenario.limit * (scenario.instances + 1)
        state.overloaded = grows and state.total >= MIN_ARRIVALS


@inlined
def _is_queue_full(state: State, scenario: ScenarioRow, arrays: Arrays, level: int) -> bool:
    """Return whether the queue, or that of the priority ``level``, has no room for another request."""
    limit = scenario.queue_limit
    waiting = _queued(state)
    if state.has_levels:
        limit = arrays.tables.policies[scenario.policies_from + level - 1, LEVEL_LIMIT]
        waiting = _count_level(arrays.flight[state.queue_place], state.queue_head, state.queue_tail, level)
        waiting += _count_level(arrays.flight[DELAYED], state.delayed_head, state.delayed_tail, level)
    return bool(0 < limit <= waiting)


@inlined
def _enqueue(state: State, scenario: ScenarioRow, arrays: Arrays, i: int) -> None:
    """Put the request in slot ``i`` of ``transit`` into the queue, and notify the batcher if that may matter."""
    if state.has_levels:
        _insert(arrays.flight[IN_TRANSIT], i, arrays.flight[state.queue_place], state.queue_head, state.queue_tail)
    elif not state.alike:
        _move(arrays.flight[IN_TRANSIT], i, arrays.flight[state.queue_place], state.queue_tail & state.mask)
    state.queue_tail += 1
    if _has_slot(state, scenario, arrays.instances):
        enough = state.queued_samples >= state.next_preferred
        state.notified = enough or state.saturated or _is_stale(state) or state.polling or not scenario.fixed_shapes


@inlined
def _answer_refused(state: State, scenario: ScenarioRow, arrays: Arrays) -> None:
    """Answer the requests that are refused now. In a closed loop, each client sends its next request."""
    for _ in range(state.refused):
        state.last_response = max(state.now + scenario.receive, state.last_response + scenario.spacing)
        if scenario.concurrency > 0:
            _send(state, scenario, arrays, max(state.last_response + scenario.client, state.now + REFUSED_PAUSE))
    if scenario.concurrency > 0 and state.refusals >= MAX_REFUSED * (
        scenario.warm_up_requests + scenario.measured_requests
    ):
        state.total = 0  # give up


# -- the batcher -----------------------------------------------------------------------------------------------------


@inlined
def _form_payload(state: State, scenario: ScenarioRow, arrays: Arrays) -> bool:
    """Let the batcher form or extend a payload. Return whether it runs again at once; otherwise it sleeps."""
    payloads = arrays.payloads
    state.refused, state.unanswered = state.refused + state.unanswered, 0
    if state.saturated or _is_stale(state):
        state.current, state.current_size, state.saturated, state.next_preferred = NONE, 0, False, 0
    state.polling = False
    state.batcher_at = state.now + IDLE_WAIT
    if _queued(state) == 0 and state.slot_deadline < 0:
        return False
    blocked = not _has_slot(state, scenario, arrays.instances)
    if blocked:  # a notification does not extend the wait
        if state.slot_deadline < 0:
            state.slot_deadline = state.now + IDLE_WAIT
        state.batcher_at = state.slot_deadline
        if state.now < state.slot_deadline:
            return False
    state.slot_deadline = state.now + IDLE_WAIT if blocked else -1
    reached = scenario.levels  # the lowest priority level whose timeout applies
    if state.has_levels and state.timeout > 0:
        if not blocked:
            reached = _reached_level(state, scenario, arrays)
        _expire_levels(state, scenario, arrays, reached, blocked)
    elif state.timeout > 0:
        _expire(state, scenario, arrays, blocked)
    if blocked or _queued(state) == 0:
        return True
    if state.alike:
        pending, wait = _form(state, scenario, arrays)
        other_shape = False
    else:
        pending, wait, other_shape = _form_different(state, scenario, arrays)
    if wait > 0:
        state.batcher_at = state.now + wait + scenario.wake
        return False
    if pending > 0 and state.current < 0:
        state.current = state.tail
        state.tail += 1
        payload = state.current & state.mask
        payloads[PAYLOAD_OLDEST, payload] = FOREVER
        payloads[PAYLOAD_REQUESTS, payload] = payloads[PAYLOAD_SHAPE, payload] = payloads[PAYLOAD_CLOSED, payload] = 0
        _notify_instance(state.now + scenario.dispatch, arrays.instances)
    if other_shape:
        payloads[PAYLOAD_CLOSED, state.current & state.mask] = 1
    if pending == 0 and not state.saturated:
        state.polling = True
        _wake_at_timeout(state, scenario, arrays, reached)
        return False
    _extend_payload(state, scenario, arrays, pending)
    return True


@inlined
def _queued(state: State) -> int:
    """Return the number of requests in the queue, with those that have expired."""
    return state.queue_tail - state.queue_head + state.delayed_tail - state.delayed_head


@inlined
def _is_stale(state: State) -> bool:
    """Return whether the batcher can no longer extend its current payload."""
    return state.current >= 0 and (state.current < state.head or state.current == state.unmergeable)


@inlined
def _has_slot(state: State, scenario: ScenarioRow, instances: Ints) -> bool:
    """Return whether the batcher may form a payload.

    With prefetch up to 2n payloads may wait for the n instances, otherwise one for each idle instance.
    """
    if scenario.prefetch:
        return bool(state.tail - state.head < 2 * instances.shape[1])
    idle = 0
    for j in range(instances.shape[1]):
        if instances[STATE, j] == SLEEPING or instances[STATE, j] == WAKING:
            idle += 1
    return bool(state.tail - state.head < idle)


@inlined
def _form(state: State, scenario: ScenarioRow, arrays: Arrays) -> tuple[int, int]:
    """Decide how the batcher extends its current payload from the queue.

    This is the loop over the queue of Triton's ``GetDynamicBatch`` in closed form, as all requests are alike. Return
    the number of requests that join the payload, and the time to wait instead (0: do not wait).
    """
    limit, samples, size = scenario.limit, scenario.unit_samples, state.current_size
    take = min(state.queue_tail - state.queue_head, limit - size)
    more = state.queue_tail - state.queue_head > take  # the next request does not fit
    total = size + take
    best = 0
    closed = False
    if arrays.preferred_up_to[total] > size:
        best = arrays.preferred_up_to[total] - size
    else:
        # The first request beyond the largest preferred size selects the batch without it. Triton does not compare
        # the first request of a new payload, and treats a selected batch of 0 requests as none.
        beyond = max(state.largest // samples + 1 - size, 1)
        if size + beyond == 1:
            beyond = 2
        examined = take + (1 if more else 0)
        if beyond <= examined:
            closed = True
            best = beyond - 1
            if best == 0 and examined > beyond:
                best = 1
    oldest = arrays.flight[state.queue_place, ARRIVED, state.queue_head & state.mask]
    return _decide(state, scenario, arrays, take, total, best, closed, more, oldest, FOREVER)


@inlined
def _form_different(state: State, scenario: ScenarioRow, arrays: Arrays) -> tuple[int, int, bool]:
    """Decide as ``_form`` does, for requests that differ in size, shape or expiry.

    This is the loop of Triton's ``GetDynamicBatch``. In addition return whether a request of another shape comes
    next, which closes the payload for good.
    """
    flight, mask = arrays.flight, state.mask
    samples, timeout, size = scenario.unit_samples, scenario.timeout, state.current_size
    shape = arrays.payloads[PAYLOAD_SHAPE, state.current & mask]
    units_taken = count = best = 0
    closed = send = other_shape = False
    oldest = expiry = FOREVER
    queue_head, delayed_head = state.queue_head, state.delayed_head
    for _ in range(_queued(state)):
        is_fresh = _is_fresh_next(flight, queue_head, state.queue_tail, delayed_head, state.delayed_tail)
        where, i = (IN_QUEUE, queue_head & mask) if is_fresh else (DELAYED, delayed_head & mask)
        units, arrived = flight[where, UNITS, i], flight[where, ARRIVED, i]
        if size + units_taken > 0:
            if (size + units_taken + units) * samples > state.largest and best == 0:
                best, closed = count, True
            if size + units_taken + units > scenario.limit:
                send = True
                break
            if not scenario.fixed_shapes and flight[where, SHAPE, i] != shape:
                send = other_shape = True
                break
        else:
            shape = flight[where, SHAPE, i]
        units_taken += units
        count += 1
        queue_head, delayed_head = queue_head + is_fresh, delayed_head + (not is_fresh)
        if state.has_levels:
            timeout = arrays.tables.policies[scenario.policies_from + flight[where, LEVEL, i] - 1, LEVEL_TIMEOUT]
        oldest = min(oldest, arrived)
        if timeout > 0 and is_fresh:
            expiry = min(expiry, arrived + timeout)
        if arrays.preferred_up_to[size + units_taken] == size + units_taken:
            best = count
    pending, wait = _decide(state, scenario, arrays, count, size + units_taken, best, closed, send, oldest, expiry)
    return pending, wait, other_shape


@inlined
def _decide(
    state: State,
    scenario: ScenarioRow,
    arrays: Arrays,
    count: int,
    total: int,
    best: int,
    closed: bool,
    send: bool,
    oldest: int,
    expiry: int,
) -> tuple[int, int]:
    """Return the number of requests that join the payload, and the time to wait instead (0: do not wait).

    This is the end of Triton's ``GetDynamicBatch``.

    Args:
        state: The state.
        scenario: The scenario.
        arrays: The arrays.
        count: Requests that the batcher has looked at and that fit.
        total: Units of the payload with all of them.
        best: Requests with which the payload has a preferred size; 0 if there is none.
        closed: Whether the payload with ``best`` requests takes no others.
        send: Whether the next request does not fit, or has another shape.
        oldest: The earliest arrival among ``count`` requests.
        expiry: The first time at which one of them expires.
    """
    samples, delay, size = scenario.unit_samples, scenario.delay, state.current_size
    late = delay > 0 and state.now - oldest >= delay
    state.saturated = closed
    if best > 0 and not late:
        state.saturated = closed or delay == 0
        return best, 0
    if count == 0:
        return 0, 0
    if send or total * samples >= state.largest:
        state.saturated = True
        return count, 0
    if late or delay == 0:
        return count, 0
    state.next_preferred = arrays.next_preferred_size[total] - size * samples
    if not closed and size > 0 and arrays.preferred_up_to[size] != size:
        return count, 0
    wait = min(oldest + delay, expiry) - state.now
    return count, wait // 1000 * 1000  # Triton waits for whole microseconds


@inlined
def _tabulate(preferred: Ints, samples: int, limit: int, preferred_up_to: Ints, next_preferred_size: Ints) -> int:
    """Tabulate the ascending preferred sizes (in samples) by the number m of units in a batch.

    ``preferred_up_to[m]`` is the largest number of units up to m whose samples are a preferred size, or 0.
    ``next_preferred_size[m]`` is the next preferred size above m units, or the smallest one. Returns the largest
    preferred size.
    """
    k = 0
    preferred_up_to[0] = 0
    for m in range(limit + 1):
        if m > 0:
            preferred_up_to[m] = preferred_up_to[m - 1]
        while k < len(preferred) and preferred[k] <= m * samples:
            if preferred[k] == m * samples:
                preferred_up_to[m] = m
            k += 1
        next_preferred_size[m] = preferred[k % len(preferred)] if len(preferred) > 0 else 0
    return preferred[-1] if len(preferred) > 0 else 0


@inlined
def _is_fresh_next(flight: Ints, queue_head: int, queue_tail: int, delayed_head: int, delayed_tail: int) -> bool:
    """Return whether the next request is one that has not expired: in each level these come first."""
    mask = flight.shape[2] - 1
    if queue_head >= queue_tail or delayed_head >= delayed_tail:
        return queue_head < queue_tail
    fresh, expired = flight[IN_QUEUE, LEVEL, queue_head & mask], flight[DELAYED, LEVEL, delayed_head & mask]
    return bool(fresh <= expired)


@inlined
def _extend_payload(state: State, scenario: ScenarioRow, arrays: Arrays, pending: int) -> None:
    """Move the next ``pending`` requests of the queue into the current payload."""
    payloads = arrays.payloads
    samples, mask = scenario.unit_samples, state.mask
    queue, batched = arrays.flight[state.queue_place], arrays.flight[state.payload_place]
    payload = state.current & state.mask
    if state.alike:
        payloads[PAYLOAD_OLDEST, payload] = min(
            payloads[PAYLOAD_OLDEST, payload], queue[ARRIVED, state.queue_head & mask]
        )
        state.queue_head += pending
        state.formed += pending
        state.current_size += pending
        state.queued_samples -= pending * samples
    else:
        delayed = arrays.flight[DELAYED]
        for _ in range(pending):
            i = state.formed & mask
            if _is_fresh_next(
                arrays.flight, state.queue_head, state.queue_tail, state.delayed_head, state.delayed_tail
            ):
                _move(queue, state.queue_head & mask, batched, i)
                state.queue_head += 1
            else:
                _move(delayed, state.delayed_head & mask, batched, i)
                state.delayed_head += 1
            state.formed += 1
            state.current_size += batched[UNITS, i]
            state.queued_samples -= batched[UNITS, i] * samples
            payloads[PAYLOAD_OLDEST, payload] = min(payloads[PAYLOAD_OLDEST, payload], batched[ARRIVED, i])
            payloads[PAYLOAD_SHAPE, payload] = batched[SHAPE, i]  # if shapes matter, all have this one
    payloads[PAYLOAD_UNITS, payload] = state.current_size
    payloads[PAYLOAD_REQUESTS, payload] += pending


# -- expiry ----------------------------------------------------------------------------------------------------------


@inlined
def _reached_level(state: State, scenario: ScenarioRow, arrays: Arrays) -> int:
    """Return the lowest priority level whose timeout Triton applies while it forms a batch.

    It looks at a level only if all requests of the levels above fit in the batch.
    """
    flight = arrays.flight
    mask, size, shape = state.mask, state.current_size, arrays.payloads[PAYLOAD_SHAPE, state.current & state.mask]
    for level in range(1, scenario.levels):
        policy = scenario.policies_from + level - 1
        timeout = arrays.tables.policies[policy, LEVEL_TIMEOUT]
        rejects = arrays.tables.policies[policy, LEVEL_REJECTS] != 0
        for place in (IN_QUEUE, DELAYED):
            is_fresh = place == IN_QUEUE
            first, last = state.queue_head, state.queue_tail
            if not is_fresh:
                first, last = state.delayed_head, state.delayed_tail
            for k in range(first, last):
                i = k & mask
                if flight[place, LEVEL, i] != level:
                    continue
                if is_fresh and rejects and 0 < timeout < state.now - flight[place, ARRIVED, i]:
                    continue
                if size == 0:
                    shape = flight[place, SHAPE, i]
                size += flight[place, UNITS, i]
                if size > scenario.limit or (not scenario.fixed_shapes and flight[place, SHAPE, i] != shape):
                    return level
    return int(scenario.levels)


@inlined
def _expire(state: State, scenario: ScenarioRow, arrays: Arrays, blocked: bool) -> None:
    """Reject or delay the requests whose time in the queue has expired; if the batcher is blocked, delay none."""
    rejects, queue = scenario.rejects, arrays.flight[state.queue_place]
    while (rejects or not blocked) and state.queue_head < state.queue_tail:
        i = state.queue_head & state.mask
        if state.now <= queue[ARRIVED, i] + state.timeout:
            break
        state.queue_head += 1
        if rejects:
            _time_out(state, scenario, arrays, i, blocked)
        else:
            _move(queue, i, arrays.flight[DELAYED], state.delayed_tail & state.mask)
            state.delayed_tail += 1


@inlined
def _expire_levels(state: State, scenario: ScenarioRow, arrays: Arrays, reached: int, blocked: bool) -> None:
    """Reject or delay the requests of the priority levels up to ``reached`` whose time in the queue has expired.

    If the batcher is blocked, delay none.
    """
    queue, delayed, mask = arrays.flight[state.queue_place], arrays.flight[DELAYED], state.mask
    kept = state.queue_head
    for k in range(state.queue_head, state.queue_tail):
        i = k & mask
        policy = scenario.policies_from + queue[LEVEL, i] - 1
        rejects = arrays.tables.policies[policy, LEVEL_REJECTS] != 0
        limit_ns = arrays.tables.policies[policy, LEVEL_TIMEOUT]
        has_expired = queue[LEVEL, i] <= reached and 0 < limit_ns < state.now - queue[ARRIVED, i]
        if not has_expired or (blocked and not rejects):
            if kept != k:
                _move(queue, i, queue, kept & mask)
            kept += 1
        elif rejects:
            _time_out(state, scenario, arrays, i, blocked)
        else:
            _insert(queue, i, delayed, state.delayed_head, state.delayed_tail)
            state.delayed_tail += 1
    state.queue_tail = kept


@inlined
def _time_out(state: State, scenario: ScenarioRow, arrays: Arrays, i: int, blocked: bool) -> None:
    """Reject the request in slot ``i`` of the queue because it has expired."""
    state.timed_out += 1
    state.refusals += 1
    state.unanswered += 1
    if not blocked:  # otherwise Triton still counts it
        state.queued_samples -= arrays.flight[state.queue_place, UNITS, i] * scenario.unit_samples
    if arrays.flight[state.queue_place, NUMBER, i] < len(arrays.requests):
        arrays.requests[arrays.flight[state.queue_place, NUMBER, i], EXECUTION] = TIMED_OUT


@inlined
def _wake_at_timeout(state: State, scenario: ScenarioRow, arrays: Arrays, reached: int) -> None:
    """Let the batcher run when the first request expires whose timeout applies."""
    queue, mask = arrays.flight[state.queue_place], state.mask
    if state.has_levels and state.timeout > 0:
        for k in range(state.queue_head, state.queue_tail):
            level = queue[LEVEL, k & mask]
            limit_ns = arrays.tables.policies[scenario.policies_from + level - 1, LEVEL_TIMEOUT]
            if limit_ns > 0 and level <= reached:
                state.batcher_at = min(state.batcher_at, queue[ARRIVED, k & mask] + limit_ns + 1)
    elif state.timeout > 0 and state.queue_head < state.queue_tail:
        state.batcher_at = min(state.batcher_at, queue[ARRIVED, state.queue_head & mask] + state.timeout + 1)


# -- ring buffers ----------------------------------------------------------------------------------------------------


@inlined
def _move(source: Ints, i: int, target: Ints, k: int) -> None:
    for fact in range(FACTS):
        target[fact, k] = source[fact, i]


@inlined
def _insert(source: Ints, i: int, queue: Ints, head: int, tail: int) -> None:
    """Put a request behind all others of its priority level or a higher one."""
    mask, slot = queue.shape[1] - 1, tail
    while slot > head and queue[LEVEL, (slot - 1) & mask] > source[LEVEL, i]:
        _move(queue, (slot - 1) & mask, queue, slot & mask)
        slot -= 1
    _move(source, i, queue, slot & mask)


@inlined
def _count_level(queue: Ints, head: int, tail: int, level: int) -> int:
    """Return the requests of a priority level between ``head`` and ``tail`` of a ring buffer."""
    mask, count = queue.shape[1] - 1, 0
    for k in range(head, tail):
        if queue[LEVEL, k & mask] == level:
            count += 1
    return count


# -- instances -------------------------------------------------------------------------------------------------------


@inlined
def _notify_instance(at: int, instances: Ints) -> None:
    """Wake the instance that has slept longest, if any sleeps."""
    chosen = -1
    for j in range(instances.shape[1]):
        is_asleep = instances[STATE, j] == SLEEPING
        if is_asleep and (chosen < 0 or instances[ASLEEP, j] < instances[ASLEEP, chosen]):
            chosen = j
    if chosen >= 0:
        instances[STATE, chosen], instances[WHEN, chosen] = WAKING, at


@inlined
def _take_payload(state: State, scenario: ScenarioRow, arrays: Arrays, j: int) -> None:
    """Let instance ``j`` execute the payload that waits longest, or sleep if there is none."""
    instances, progress = arrays.instances, arrays.progress
    batched = arrays.flight[state.payload_place]
    if state.head == state.tail:
        instances[STATE, j], instances[WHEN, j], instances[ASLEEP, j] = SLEEPING, FOREVER, state.sleep_count
        state.sleep_count += 1
        return
    count, together = _merge_payloads(state, scenario, arrays.payloads)
    instances[WAITED, j] = 0
    for i in range(together):
        slot = (state.started + i) & state.mask
        arrays.sent_times[j, i] = batched[SENT, slot]
        instances[WAITED, j] += state.now - batched[ARRIVED, slot]
        if len(arrays.requests) > 0:
            number = state.started + i if state.alike else batched[NUMBER, slot]
            if number < len(arrays.requests):
                arrays.requests[number, EXECUTION] = state.runs
    instances[SIZE, j], instances[MEMBERS, j] = count, together
    state.started += together
    state.least_waiting = min(state.least_waiting, state.arrived - state.started - state.refusals)
    state.busy += 1
    _rescale(state, scenario, arrays, state.busy - 1, j)
    progress[FACTOR, j] = arrays.tables.factors[state.runs % len(arrays.tables.factors)]
    span = (
        arrays.tables.services[scenario.services_from + (count - 1) * scenario.services_stride + state.busy - 1]
        * progress[FACTOR, j]
    )
    instances[STATE, j], instances[SINCE, j], progress[LEFT, j] = EXECUTING, state.now, 1.0
    instances[BEGUN, j] = state.now
    instances[WHEN, j] = state.now + max(int(span + 0.5), 1)
    instances[RUN, j] = state.runs
    if state.runs < len(arrays.executions):
        row = arrays.executions[state.runs]
        row[0], row[1], row[2], row[3], row[4] = j, state.now, -1, count, together
    state.runs += 1
    state.notified = scenario.dynamic_batching


@inlined
def _merge_payloads(state: State, scenario: ScenarioRow, payloads: Ints) -> tuple[int, int]:
    """Remove the first payload for an instance, and merge those into it that have waited for longer than the delay.

    Return the units and the requests of the batch.
    """
    limit, front = scenario.limit, state.head & state.mask
    units, requests = payloads[PAYLOAD_UNITS, front], payloads[PAYLOAD_REQUESTS, front]
    state.head += 1
    if scenario.delay > 0 and limit * scenario.unit_samples > 1 and payloads[PAYLOAD_CLOSED, front] == 0:
        while state.head < state.tail:
            other = state.head & state.mask
            if payloads[PAYLOAD_CLOSED, other] != 0 or state.now - payloads[PAYLOAD_OLDEST, other] <= scenario.delay:
                break
            state.unmergeable = state.head
            differs = not scenario.fixed_shapes and payloads[PAYLOAD_SHAPE, front] != payloads[PAYLOAD_SHAPE, other]
            if differs or units + payloads[PAYLOAD_UNITS, other] > limit:
                break
            units += payloads[PAYLOAD_UNITS, other]
            requests += payloads[PAYLOAD_REQUESTS, other]
            state.head += 1
    return units, requests


@inlined
def _rescale(state: State, scenario: ScenarioRow, arrays: Arrays, before: int, excluded: int) -> None:
    """Change the speed of the running executions except ``excluded``: ``before`` instances were busy."""
    instances, progress, services = arrays.instances, arrays.progress, arrays.tables.services
    for j in range(instances.shape[1]):
        if instances[STATE, j] != EXECUTING or j == excluded:
            continue
        row = scenario.services_from + (instances[SIZE, j] - 1) * scenario.services_stride
        old, new = (
            services[row + before - 1] * progress[FACTOR, j],
            services[row + state.busy - 1] * progress[FACTOR, j],
        )
        if old != new:
            progress[LEFT, j] = max(progress[LEFT, j] - (state.now - instances[SINCE, j]) / old, 0.0)
            instances[SINCE, j] = state.now
            instances[WHEN, j] = state.now + int(progress[LEFT, j] * new + 0.5)


@inlined
def _answer(state: State, scenario: ScenarioRow, arrays: Arrays, j: int) -> None:
    """End the execution of instance ``j``. In a closed loop, each client sends its next request."""
    instances = arrays.instances
    state.busy -= 1
    _rescale(state, scenario, arrays, state.busy + 1, j)
    state.completed += instances[MEMBERS, j]
    state.last_end, state.last_ended_instance = state.now, j
    state.is_at_cycle_end = state.is_at_cycle_end or j == state.cycle_instance or state.cycle_instance < 0
    if state.measuring:
        state.batches += 1
        state.queue_sum += instances[WAITED, j]
        state.compute_sum += instances[MEMBERS, j] * (state.now - instances[BEGUN, j])
        state.units_measured += instances[SIZE, j]
    for i in range(instances[MEMBERS, j]):
        state.last_response = max(state.now + scenario.receive, state.last_response + scenario.spacing)
        if state.measuring:
            latency = state.last_response - arrays.sent_times[j, i]
            arrays.latencies[state.measured] = latency
            state.latency_sum += latency
            state.measured += 1
        if scenario.concurrency > 0:
            _send(state, scenario, arrays, state.last_response + scenario.client)
    if instances[RUN, j] < len(arrays.executions):
        arrays.executions[instances[RUN, j], 2] = state.now
    instances[STATE, j], instances[WHEN, j] = RELEASING, state.now + scenario.release


@inlined
def _is_ready(state: State, scenario: ScenarioRow, instances: Ints, j: int) -> bool:
    """Return whether instance ``j``, whose time has come, takes a payload: not if the batcher overtakes it."""
    if instances[STATE, j] == OVERTAKEN:
        state.overtaken = False
        return True
    if instances[WHEN, j] != state.now:
        return False
    may_overtake = scenario.dynamic_batching and not scenario.prefetch and not state.overtaken
    if may_overtake and _is_missed(instances[RUN, j], state.now, scenario.missed_wakes):
        state.overtaken = True
        instances[STATE, j], instances[WHEN, j] = OVERTAKEN, state.now + _preempted_ns(instances[RUN, j], state.now)
        state.batcher_at = state.now
        return False
    state.notified = scenario.dynamic_batching
    return True


@inlined
def _is_missed(run: int, now: int, missed: int) -> bool:
    """Return whether the batcher runs too early at the end of this execution."""
    return 1e6 * _uniform(run, now) < missed


@compiled
def _preempted_ns(run: int, now: int) -> int:
    """Return how long an instance whose CPU the batcher takes is not idle, exponentially distributed."""
    return 1 + int(-math.log(1 - _uniform(now, run)) * PREEMPTION)


@inlined
def _uniform(a: int, b: int) -> float:
    """Return a hash of two numbers, at least 0 and less than 1. Its modulus is a prime next to a million."""
    modulus = 1_000_003
    a, b = a % modulus, b % modulus
    return ((a * a * 7919 + a * 104729 + b * 31) % modulus) / modulus


# -- results ---------------------------------------------------------------------------------------------------------


@inlined
def _write_results(state: State, latencies: Ints, result: Floats) -> None:
    result[RESULT_DURATION] = state.last_end - state.opened
    result[RESULT_REQUESTS] = state.measured
    result[RESULT_COMPLETED_UNITS] = state.units_measured
    result[RESULT_REJECTED] = state.rejected - state.rejected_before
    result[RESULT_TIMED_OUT] = state.timed_out - state.timed_out_before
    result[RESULT_EXECUTIONS] = state.batches
    result[RESULT_LATENCY] = state.latency_sum
    _write_percentiles(latencies, state.measured, result)
    result[RESULT_QUEUE] = state.queue_sum
    result[RESULT_COMPUTE] = state.compute_sum
    result[RESULT_BUSY] = state.busy_area
    result[RESULT_OVERLOADED] = 1.0 if state.overloaded and state.refusals == 0 else 0.0


@inlined
def _write_percentiles(latencies: Ints, measured: int, result: Floats) -> None:
    """Write the percentiles of the first ``measured`` latencies by perf_analyzer's definition; NaN without any.

    A percentile is the element at the nearest rank, halves rounded up.
    """
    stop = measured
    for column, percent in ((RESULT_P99, 99.0), (RESULT_P95, 95.0), (RESULT_P90, 90.0), (RESULT_P50, 50.0)):
        rank = int(percent / 100.0 * (measured - 1) + 0.5)
        if measured > 0:  # no element up to the rank is larger than the one at the rank
            _partition(latencies, rank, stop)
            stop = rank + 1
        result[column] = latencies[rank] if measured > 0 else np.nan


@compiled
def _partition(values: Ints, rank: int, stop: int) -> None:
    """Reorder ``values[:stop]`` so that ``values[rank]`` is not smaller than any before it or larger than any after.

    This is Hoare's selection algorithm. ``np.partition`` would do, but Numba takes 6 s to compile it.
    """
    low, high = 0, stop - 1
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
