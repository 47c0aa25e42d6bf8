"""The batcher: it takes requests from the queue and forms payloads, which wait for an instance.

It sleeps until it is notified or until its wait ends. Then it forms payloads until it has to wait again.
"""

from __future__ import annotations

from optimizer.simulator.compilation import Records, inlined
from optimizer.simulator.dynamic_batcher import queue
from optimizer.simulator.dynamic_batcher.batch_choice import choose_alike, choose_different
from optimizer.simulator.dynamic_batcher.cyclic_tables import next_mixed_request
from optimizer.simulator.dynamic_batcher.instances import notify_instance
from optimizer.simulator.dynamic_batcher.interval import watch_queue
from optimizer.simulator.dynamic_batcher.records import (
    FOREVER,
    IN_TRANSIT,
    NONE,
    REJECTED,
    SLEEPING,
    WAKING,
    Arrays,
    Request,
    ScenarioRow,
    State,
    Tables,
)

IDLE_WAIT = 500_000_000  # ns, after this time the batcher runs even if it was not notified


@inlined
def arrive(state: State, scenario: ScenarioRow, arrays: Arrays) -> None:
    """Put the next request into the queue or, without dynamic batching, into a payload of its own."""
    number, request = state.arrived, arrays.flight[IN_TRANSIT, state.arrived & state.mask]
    if not state.alike:
        _complete(state, scenario, arrays.tables, request)
    units = 1 if state.alike else request.units
    if number < len(arrays.requests):
        log = arrays.requests[number]
        log.sent, log.arrived = request.sent, state.now
        log.units, log.shape = units, 0 if state.alike else request.shape
    state.arrived += 1
    watch_queue(state, scenario)
    if not scenario.dynamic_batching:
        if not state.alike:
            queue.copy(request, arrays.flight[state.payload_place, state.formed & state.mask])
        state.formed += 1
        payload = arrays.payloads[state.tail & state.mask]
        payload.units, payload.requests = units, 1
        state.tail += 1
        notify_instance(state.now + scenario.dispatch, arrays.instances)
    else:
        state.queued_samples += units * scenario.unit_samples  # Triton also counts a request that it then rejects
        if queue.is_full(state, scenario, arrays, request.level):
            state.rejected += 1
            state.refusals += 1
            state.refused = 1
            if number < len(arrays.requests):
                arrays.requests[number].execution = REJECTED
        else:
            queue.append(state, arrays, request)
            _notify_of_arrival(state, scenario, arrays.instances)


@inlined
def _complete(state: State, scenario: ScenarioRow, tables: Tables, request: Request) -> None:
    """Set the number, size, shape and level of the next request to arrive."""
    request.number, request.units, request.shape, request.level = state.arrived, 1, 0, 0
    if scenario.mix_from < scenario.mix_to:
        mixed = next_mixed_request(state, scenario, tables)
        request.units, request.shape = mixed.units, mixed.shape
        if state.has_levels:
            request.level = mixed.level


@inlined
def _notify_of_arrival(state: State, scenario: ScenarioRow, instances: Records) -> None:
    """Notify the batcher of a request in the queue, if that may matter."""
    if _has_slot(state, scenario, instances):
        enough = state.queued_samples >= state.next_preferred
        state.notified = enough or state.saturated or _is_stale(state) or state.polling or not scenario.fixed_shapes


@inlined
def form_payload(state: State, scenario: ScenarioRow, arrays: Arrays) -> bool:
    """Let the batcher form or extend a payload. Return whether it runs again at once; otherwise it sleeps."""
    state.refused, state.unanswered = state.refused + state.unanswered, 0
    if state.saturated or _is_stale(state):
        state.current, state.current_size, state.saturated, state.next_preferred = NONE, 0, False, 0
    state.polling = False
    state.batcher_at = state.now + IDLE_WAIT
    if queue.queued(state) == 0 and state.slot_deadline < 0:
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
    if state.has_levels and state.timeout > 0 and not blocked:
        reached = queue.reached_level(state, scenario, arrays)
    queue.expire(state, scenario, arrays, reached, blocked)
    if blocked or queue.queued(state) == 0:
        return True
    if state.alike:
        pending, wait = choose_alike(state, scenario, arrays)
        other_shape = False
    else:
        pending, wait, other_shape = choose_different(state, scenario, arrays)
    if wait > 0:
        state.batcher_at = state.now + wait + scenario.wake
        return False
    if pending > 0 and state.current < 0:
        _start_payload(state, scenario, arrays)
    if other_shape:
        arrays.payloads[state.current & state.mask].closed = True
    if pending == 0 and not state.saturated:
        state.polling = True
        queue.wake_at_timeout(state, scenario, arrays, reached)
        return False
    _extend_payload(state, scenario, arrays, pending)
    return True


@inlined
def _is_stale(state: State) -> bool:
    """Return whether the batcher can no longer extend its current payload."""
    return state.current >= 0 and (state.current < state.head or state.current == state.unmergeable)


@inlined
def _has_slot(state: State, scenario: ScenarioRow, instances: Records) -> bool:
    """Return whether the batcher may form a payload.

    With prefetch up to 2n payloads may wait for the n instances, otherwise one for each idle instance.
    """
    if scenario.prefetch:
        return bool(state.tail - state.head < 2 * len(instances))
    idle = 0
    for j in range(len(instances)):
        if instances[j].state == SLEEPING or instances[j].state == WAKING:
            idle += 1
    return bool(state.tail - state.head < idle)


@inlined
def _start_payload(state: State, scenario: ScenarioRow, arrays: Arrays) -> None:
    """Queue an empty payload for the instances. The batcher extends it."""
    state.current = state.tail
    state.tail += 1
    payload = arrays.payloads[state.current & state.mask]
    payload.oldest, payload.requests, payload.shape, payload.closed = FOREVER, 0, 0, False
    notify_instance(state.now + scenario.dispatch, arrays.instances)


@inlined
def _extend_payload(state: State, scenario: ScenarioRow, arrays: Arrays, pending: int) -> None:
    """Move the next ``pending`` requests of the queue into the current payload."""
    payload = arrays.payloads[state.current & state.mask]
    if state.alike:
        first = arrays.flight[state.queue_place, state.queue_head & state.mask]
        payload.oldest = min(payload.oldest, first.arrived)
        state.queue_head += pending
        state.formed += pending
        state.current_size += pending
        state.queued_samples -= pending * scenario.unit_samples
    else:
        for _ in range(pending):
            request = arrays.flight[state.payload_place, state.formed & state.mask]
            queue.take_next(state, arrays, request)
            state.formed += 1
            state.current_size += request.units
            state.queued_samples -= request.units * scenario.unit_samples
            payload.oldest = min(payload.oldest, request.arrived)
            payload.shape = request.shape  # if shapes matter, all have this one
    payload.units = state.current_size
    payload.requests += pending
