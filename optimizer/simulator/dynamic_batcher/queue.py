"""The queue of the batcher: its order, its limits, and the requests that expire in it.

With priority levels it is ordered by level. Requests that have expired and are not rejected are delayed: they wait in
a second ring buffer, behind those of their level that have not expired.
"""

from __future__ import annotations

from optimizer.simulator.compilation import Records, inlined
from optimizer.simulator.dynamic_batcher.records import (
    DELAYED,
    IN_QUEUE,
    TIMED_OUT,
    Arrays,
    Request,
    ScenarioRow,
    State,
)


@inlined
def queued(state: State) -> int:
    """Return the number of requests in the queue, with those that have expired."""
    return state.queue_tail - state.queue_head + state.delayed_tail - state.delayed_head


@inlined
def is_full(state: State, scenario: ScenarioRow, arrays: Arrays, level: int) -> bool:
    """Return whether the queue, or that of the priority ``level``, has no room for another request."""
    limit = scenario.queue_limit
    waiting = queued(state)
    if state.has_levels:
        limit = arrays.tables.policies[scenario.policies_from + level - 1].limit
        waiting = _count_level(arrays.flight[state.queue_place], state.queue_head, state.queue_tail, level)
        waiting += _count_level(arrays.flight[DELAYED], state.delayed_head, state.delayed_tail, level)
    return bool(0 < limit <= waiting)


@inlined
def append(state: State, arrays: Arrays, request: Request) -> None:
    """Put a request that has arrived into the queue."""
    if state.has_levels:
        _insert(request, arrays.flight[state.queue_place], state.queue_head, state.queue_tail)
    elif not state.alike:
        copy(request, arrays.flight[state.queue_place, state.queue_tail & state.mask])
    state.queue_tail += 1


@inlined
def is_fresh_next(flight: Records, queue_head: int, queue_tail: int, delayed_head: int, delayed_tail: int) -> bool:
    """Return whether the next request is one that has not expired: in each level these come first."""
    mask = flight.shape[1] - 1
    if queue_head >= queue_tail or delayed_head >= delayed_tail:
        return queue_head < queue_tail
    fresh, expired = flight[IN_QUEUE, queue_head & mask], flight[DELAYED, delayed_head & mask]
    return bool(fresh.level <= expired.level)


@inlined
def take_next(state: State, arrays: Arrays, slot: Request) -> None:
    """Move the next request of a queue with requests that differ into ``slot``."""
    if is_fresh_next(arrays.flight, state.queue_head, state.queue_tail, state.delayed_head, state.delayed_tail):
        copy(arrays.flight[IN_QUEUE, state.queue_head & state.mask], slot)
        state.queue_head += 1
    else:
        copy(arrays.flight[DELAYED, state.delayed_head & state.mask], slot)
        state.delayed_head += 1


# -- expiry ----------------------------------------------------------------------------------------------------------


@inlined
def expire(state: State, scenario: ScenarioRow, arrays: Arrays, reached: int, blocked: bool) -> None:
    """Reject or delay the requests whose time in the queue has expired; if the batcher is blocked, delay none.

    With priority levels this applies to the levels up to ``reached``.
    """
    if state.timeout > 0:
        if state.has_levels:
            _expire_levels(state, scenario, arrays, reached, blocked)
        else:
            _expire_first(state, scenario, arrays, blocked)


@inlined
def _expire_first(state: State, scenario: ScenarioRow, arrays: Arrays, blocked: bool) -> None:
    """Expire the first requests of a queue without levels: they have waited longest."""
    while (scenario.rejects or not blocked) and state.queue_head < state.queue_tail:
        request = arrays.flight[IN_QUEUE, state.queue_head & state.mask]
        if state.now <= request.arrived + state.timeout:
            break
        state.queue_head += 1
        if scenario.rejects:
            _time_out(state, scenario, arrays, request, blocked)
        else:
            copy(request, arrays.flight[DELAYED, state.delayed_tail & state.mask])
            state.delayed_tail += 1


@inlined
def _expire_levels(state: State, scenario: ScenarioRow, arrays: Arrays, reached: int, blocked: bool) -> None:
    """Expire the requests of the priority levels up to ``reached``."""
    queue, mask = arrays.flight[IN_QUEUE], state.mask
    kept = state.queue_head
    for k in range(state.queue_head, state.queue_tail):
        request = queue[k & mask]
        policy = arrays.tables.policies[scenario.policies_from + request.level - 1]
        has_expired = request.level <= reached and 0 < policy.timeout < state.now - request.arrived
        if not has_expired or (blocked and not policy.rejects):
            if kept != k:
                copy(request, queue[kept & mask])
            kept += 1
        elif policy.rejects:
            _time_out(state, scenario, arrays, request, blocked)
        else:
            _insert(request, arrays.flight[DELAYED], state.delayed_head, state.delayed_tail)
            state.delayed_tail += 1
    state.queue_tail = kept


@inlined
def _time_out(state: State, scenario: ScenarioRow, arrays: Arrays, request: Request, blocked: bool) -> None:
    """Reject a request of the queue because it has expired."""
    state.timed_out += 1
    state.refusals += 1
    state.unanswered += 1
    if not blocked:  # otherwise Triton still counts it
        state.queued_samples -= request.units * scenario.unit_samples
    if request.number < len(arrays.requests):
        arrays.requests[request.number].execution = TIMED_OUT


@inlined
def reached_level(state: State, scenario: ScenarioRow, arrays: Arrays) -> int:
    """Return the lowest priority level whose timeout Triton applies while it forms a batch.

    It looks at a level only if all requests of the levels above fit in the batch.
    """
    mask, size, shape = state.mask, state.current_size, arrays.payloads[state.current & state.mask].shape
    for level in range(1, scenario.levels):
        policy = arrays.tables.policies[scenario.policies_from + level - 1]
        for place in (IN_QUEUE, DELAYED):
            is_fresh = place == IN_QUEUE
            first, last = state.queue_head, state.queue_tail
            if not is_fresh:
                first, last = state.delayed_head, state.delayed_tail
            for k in range(first, last):
                request = arrays.flight[place, k & mask]
                if request.level != level:
                    continue
                if is_fresh and policy.rejects and 0 < policy.timeout < state.now - request.arrived:
                    continue
                if size == 0:
                    shape = request.shape
                size += request.units
                if size > scenario.limit or (not scenario.fixed_shapes and request.shape != shape):
                    return level
    return int(scenario.levels)


@inlined
def wake_at_timeout(state: State, scenario: ScenarioRow, arrays: Arrays, reached: int) -> None:
    """Let the batcher run when the first request expires whose timeout applies."""
    if state.timeout == 0:
        return
    queue, mask = arrays.flight[IN_QUEUE], state.mask
    if state.has_levels:
        for k in range(state.queue_head, state.queue_tail):
            request = queue[k & mask]
            timeout = arrays.tables.policies[scenario.policies_from + request.level - 1].timeout
            if timeout > 0 and request.level <= reached:
                state.batcher_at = min(state.batcher_at, request.arrived + timeout + 1)
    elif state.queue_head < state.queue_tail:
        state.batcher_at = min(state.batcher_at, queue[state.queue_head & mask].arrived + state.timeout + 1)


# -- ring buffers ----------------------------------------------------------------------------------------------------


@inlined
def copy(request: Request, slot: Request) -> None:
    """Copy a request to another slot. Numba would copy a whole record byte by byte."""
    slot.sent, slot.arrived, slot.number = request.sent, request.arrived, request.number
    slot.units, slot.shape, slot.level = request.units, request.shape, request.level


@inlined
def _insert(request: Request, queue: Records, head: int, tail: int) -> None:
    """Put a request behind all others of its priority level or a higher one."""
    mask, slot = len(queue) - 1, tail
    while slot > head and queue[(slot - 1) & mask].level > request.level:
        copy(queue[(slot - 1) & mask], queue[slot & mask])
        slot -= 1
    copy(request, queue[slot & mask])


@inlined
def _count_level(queue: Records, head: int, tail: int, level: int) -> int:
    """Return the requests of a priority level between ``head`` and ``tail`` of a ring buffer."""
    mask, count = len(queue) - 1, 0
    for k in range(head, tail):
        if queue[k & mask].level == level:
            count += 1
    return count
