"""The choice of the requests that join the batcher's current payload: Triton's ``GetDynamicBatch``.

It depends on the largest batch, the preferred sizes, the queue delay, and the shapes of the requests.
"""

from __future__ import annotations

from optimizer.simulator.compilation import Ints, inlined
from optimizer.simulator.dynamic_batcher.queue import is_fresh_next, queued
from optimizer.simulator.dynamic_batcher.records import DELAYED, FOREVER, IN_QUEUE, Arrays, ScenarioRow, State


@inlined
def choose_alike(state: State, scenario: ScenarioRow, arrays: Arrays) -> tuple[int, int]:
    """Decide how the batcher extends its current payload from the queue.

    This is the loop over the queue of Triton's ``GetDynamicBatch`` in closed form, as all requests are alike. Return
    the number of requests that join the payload, and the time to wait instead (0: do not wait).
    """
    limit, size = scenario.limit, state.current_size
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
        beyond = max(state.largest_units + 1 - size, 1)
        if size + beyond == 1:
            beyond = 2
        examined = take + (1 if more else 0)
        if beyond <= examined:
            closed = True
            best = beyond - 1
            if best == 0 and examined > beyond:
                best = 1
    oldest = arrays.flight[state.queue_place, state.queue_head & state.mask].arrived
    return _decide(state, scenario, arrays, take, total, best, closed, more, oldest, FOREVER)


@inlined
def choose_different(state: State, scenario: ScenarioRow, arrays: Arrays) -> tuple[int, int, bool]:
    """Decide as ``choose_alike`` does, for requests that differ in size, shape or expiry.

    This is the loop of Triton's ``GetDynamicBatch``. In addition return whether a request of another shape comes
    next, which closes the payload for good.
    """
    mask, samples, timeout, size = state.mask, scenario.unit_samples, scenario.timeout, state.current_size
    shape = arrays.payloads[state.current & mask].shape
    units_taken = count = best = 0
    closed = send = other_shape = False
    oldest = expiry = FOREVER
    queue_head, delayed_head = state.queue_head, state.delayed_head
    for _ in range(queued(state)):
        is_fresh = is_fresh_next(arrays.flight, queue_head, state.queue_tail, delayed_head, state.delayed_tail)
        place, i = (IN_QUEUE, queue_head & mask) if is_fresh else (DELAYED, delayed_head & mask)
        request = arrays.flight[place, i]
        if size + units_taken > 0:
            if (size + units_taken + request.units) * samples > state.largest and best == 0:
                best, closed = count, True
            if size + units_taken + request.units > scenario.limit:
                send = True
                break
            if not scenario.fixed_shapes and request.shape != shape:
                send = other_shape = True
                break
        else:
            shape = request.shape
        units_taken += request.units
        count += 1
        queue_head, delayed_head = queue_head + is_fresh, delayed_head + (not is_fresh)
        if state.has_levels:
            timeout = arrays.tables.policies[scenario.policies_from + request.level - 1].timeout
        oldest = min(oldest, request.arrived)
        if timeout > 0 and is_fresh:
            expiry = min(expiry, request.arrived + timeout)
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
def tabulate_preferred_sizes(
    preferred: Ints, samples: int, limit: int, preferred_up_to: Ints, next_preferred_size: Ints
) -> int:
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
