"""The discrete-event loop of the dynamic batcher, compiled to machine code by Numba.

Import this module only where something is simulated: the import loads the compiler. Times are in ns. Compiled
functions must be in the file of those that call them: Numba would not compile the callers again when they change.
"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import numpy as np

from optimizer.simulator.compilation import CompiledOnce, Floats, Ints, compiled, inlined, record_type
from optimizer.simulator.scenario import REJECTED as WAS_REJECTED
from optimizer.simulator.scenario import TIMED_OUT as HAS_TIMED_OUT

# Requests and batches have sizes in units: a request, or a number of samples that divides all requests of a mix.

# columns of ``points``
SAMPLES = 0  # samples of a unit
LIMIT = 1  # the most units in a batch
INSTANCES = 2
BATCHING = 3  # dynamic batching; 0: each request is a payload
DELAY = 4
FIXED = 5  # fixed input shapes: not every arrival wakes the batcher, and all requests may share a batch
PREFETCH = 6
SIZES_FROM = 7  # range of ``preferred``
SIZES_TO = 8
SERVICE = 9  # index in ``services`` of the time of one unit on one busy instance
STRIDE = 10  # columns of that table of service times
CONCURRENCY = 11  # 0: an open loop
ARRIVALS_FROM = 12  # range of ``arrivals``
ARRIVALS_TO = 13
WARM_UP = 14  # requests that complete before the interval starts
WANTED = 15  # requests that complete in the interval
SEND = 16
RECEIVE = 17
CLIENT = 18
SPACING = 19
WAKE = 20
DISPATCH = 21
RELEASE = 22
MIX_FROM = 23  # range of ``mix``; empty: all requests have one unit and one shape
MIX_TO = 24
QUEUE_LIMIT = 25  # the most requests in the batcher's queue; 0: no limit
TIMEOUT = 26  # time in the queue after which a request expires; 0: none does
REJECTS = 27  # expired requests are rejected, otherwise they are moved behind those that have not expired
MISSED = 28  # millionths of the ended executions after which the batcher runs before the instance is idle
LEVELS = 29  # priority levels with queues of their own; 0 and 1: a single queue
POLICIES = 30  # index in ``policies`` of the first level's policy
COLUMNS = 31

# columns of ``policies``, as QUEUE_LIMIT, TIMEOUT and REJECTS
LEVEL_LIMIT = 0
LEVEL_TIMEOUT = 1
LEVEL_REJECTS = 2

# rows of ``mix``
MIX_UNITS = 0
MIX_SHAPE = 1
MIX_LEVEL = 2

# columns of ``results``
DURATION = 0
REQUESTS = 1
EXECUTIONS = 2
LATENCY = 3  # sum over requests
P50 = 4
P90 = 5
P95 = 6
P99 = 7
QUEUE = 8  # sum over requests
BUSY = 9  # integral over time of the number of busy instances
OVERLOADED = 10
COMPLETED_UNITS = 11
REJECTED = 12
TIMED_OUT = 13
RESULTS = 14

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
INSTANCE_ROWS = 8

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


class Tables(NamedTuple):
    """The tables that all points share.

    Attributes:
        preferred: Preferred batch sizes in samples, the lists of all points concatenated.
        services: Service times in ns, the tables of all points concatenated.
        factors: Factors on the service times of successive executions, used cyclically.
        gaps: Additional distances between successive arrivals in ns, used cyclically.
        arrivals: Send times of open loops in ns, the lists of all points concatenated.
        mix: Sizes, shapes and priorities [rows, requests] of successive requests, used cyclically, the lists of
            all points with a mix concatenated.
        policies: Queue policies [levels, columns] of the priority levels of all points concatenated.
    """

    preferred: Ints
    services: Floats
    factors: Floats
    gaps: Ints
    arrivals: Ints
    mix: Ints
    policies: Ints


class Arrays(NamedTuple):
    """The arrays of the simulation of a point.

    Attributes:
        tables: The tables that all points share.
        flight: Requests [PLACES, FACTS, ring]: ring buffers of those in each place.
        payloads: Payloads [PAYLOAD_ROWS, ring] that wait for an instance: ring buffers.
        latencies: Latencies in ns [requests] of the measured requests.
        hit: The largest preferred size [units + 1] up to a size, see ``_tabulate``.
        following: The next preferred size [units + 1], see ``_tabulate``.
        held: Send times [instances, requests] of the requests in the batch of each instance.
        instances: The instances [INSTANCE_ROWS, instances].
        progress: Their executions [PROGRESS_ROWS, instances].
        executions: Output, the log of executions [rows, EXECUTION_COLUMNS].
        requests: Output, the log of requests [rows, REQUEST_COLUMNS].
    """

    tables: Tables
    flight: Ints
    payloads: Ints
    latencies: Ints
    hit: Ints
    following: Ints
    held: Ints
    instances: Ints
    progress: Floats
    executions: Ints
    requests: Ints


class State:
    """The state of the simulation of a point: the fields of a NumPy record, all 0 at first.

    The interval starts and ends when the same instance ends an execution, so that it contains whole cycles.

    An open loop overloads the server if during the last third of the arrivals the queue is never empty and grows: its
    minimum length in the second half of this third exceeds that in the first half. A queue that fits into one more
    batch for each instance and the batcher can be requests that wait for a preferred size.
    """

    # the point
    alike: bool  # requests leave each place in the order in which they were sent, so they can stay where they are
    has_levels: bool  # the queue has several priority levels
    timeout: int  # the longest one of a request in the queue; 0: no request expires
    largest: int  # preferred size in samples
    mask: int  # maps a number to its place in a ring buffer
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
    total: int  # of an open loop
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
    frozen: int  # the head, if an instance could not merge it
    saturated: bool  # the current payload is closed
    next_preferred: int  # samples in the queue at which an arrival wakes the batcher
    batcher_at: int  # when it runs
    slot_deadline: int  # when the wait for a slot ends and expired requests are rejected; NONE: there is no wait
    polling: bool  # it tries again and again until the current payload is executed
    overtaken: bool  # it has taken the CPU of an instance that is not idle yet; it has only one
    notified: bool  # it is notified now
    # the instances
    naps: int
    busy: int
    runs: int  # executions
    last_end: int
    last_ender: int
    # the interval
    measuring: bool
    opened: int
    anchor: int  # the instance that ended an execution when it started
    at_anchor: bool
    measured: int
    units_measured: int
    batches: int
    latency_sum: int
    queue_sum: int
    busy_area: int
    rejected_before: int
    timed_out_before: int
    # whether the server is overloaded
    least_waiting: int
    earlier_waiting: int
    overloaded: bool


STATE_RECORD = record_type(State)


@CompiledOnce
def simulate_scenarios(
    points: Ints,
    tables: Tables,
    in_flight: int,
    most_measured: int,
    results: Floats,
    executions: Ints,
    requests: Ints,
) -> None:
    """Simulate each row of ``points`` and write the same row of ``results``.

    Args:
        points: [points, COLUMNS] as listed above.
        tables: Sizes, times and arrivals to which the points refer.
        in_flight: The largest number of requests that any point has in flight.
        most_measured: The largest number of requests that the interval of any point can hold.
        results: Output, [points, RESULTS].
        executions: Output, the log of executions as far as it has rows; may be empty.
        requests: Output, the log of requests as far as it has rows; may be empty.
    """
    limit = max(np.max(points[:, LIMIT]), 1)
    ring = 1
    while ring < in_flight + 2:
        ring *= 2
    flight = np.empty((PLACES, FACTS, ring), np.int64)
    payloads = np.empty((PAYLOAD_ROWS, ring), np.int64)
    latencies = np.empty(most_measured, np.int64)
    hit, following = np.empty(limit + 1, np.int64), np.empty(limit + 1, np.int64)
    held = np.empty((max(np.max(points[:, INSTANCES]), 1), min(limit, ring)), np.int64)
    for row in range(points.shape[0]):
        point = points[row]
        instances = np.zeros((INSTANCE_ROWS, point[INSTANCES]), np.int64)
        instances[WHEN, :] = FOREVER
        instances[ASLEEP, :] = np.arange(point[INSTANCES])
        progress = np.zeros((PROGRESS_ROWS, point[INSTANCES]))
        arrays = Arrays(
            tables, flight, payloads, latencies, hit, following, held, instances, progress, executions, requests
        )
        states = np.zeros(1, STATE_RECORD)
        _simulate_point(states[0], point, arrays)
        _write_results(states[0], latencies, results[row])


@compiled
def _simulate_point(s: State, point: Ints, a: Arrays) -> None:
    """Run the event loop, from the first request to the end of the interval."""
    s.largest = _tabulate(
        a.tables.preferred[point[SIZES_FROM] : point[SIZES_TO]], point[SAMPLES], point[LIMIT], a.hit, a.following
    )
    s.mask = a.flight.shape[2] - 1
    _compare_requests(s, point, a.tables.policies)
    _send_first(s, point, a)
    while True:
        ended, ender, woken, waker = _next_events(a.instances)
        due = a.flight[IN_TRANSIT, ARRIVED, s.arrived & s.mask] if s.arrived < s.issued else FOREVER
        time = min(min(ended, due), min(s.batcher_at, woken))
        if time > s.now:
            if _is_over(s, point):
                break
            _advance(s, point, time)
        taker = NONE  # the instance that takes a payload
        s.notified, s.refused = False, 0
        if ended == s.now:
            if a.instances[STATE, ender] == EXECUTING:
                _answer(s, point, a, ender)
            if _is_ready(s, point, a.instances, ender):
                taker = ender
        elif due == s.now:
            _arrive(s, point, a)
        elif s.batcher_at == s.now:
            while _form_payload(s, point, a):
                pass
        else:
            taker = waker
        if taker >= 0:
            _take_payload(s, point, a, taker)
        if s.notified:
            s.batcher_at = min(s.batcher_at, s.now + (0 if s.polling else point[WAKE]))
        if s.refused > 0:
            _answer_refused(s, point, a)


@inlined
def _compare_requests(s: State, point: Ints, policies: Ints) -> None:
    """Find out whether requests differ for the batcher, by size, shape, priority or expiry."""
    s.has_levels, s.timeout, has_limits = point[LEVELS] > 1, point[TIMEOUT], point[QUEUE_LIMIT] > 0
    if s.has_levels:
        for level in range(point[LEVELS]):
            s.timeout = max(s.timeout, policies[point[POLICIES] + level, LEVEL_TIMEOUT])
            has_limits = has_limits or policies[point[POLICIES] + level, LEVEL_LIMIT] > 0
    s.alike = point[MIX_FROM] == point[MIX_TO] and s.timeout == 0 and not has_limits
    s.queue_place, s.payload_place = (IN_TRANSIT, IN_TRANSIT) if s.alike else (IN_QUEUE, IN_PAYLOAD)


@inlined
def _next_events(instances: Ints) -> tuple[int, int, int, int]:
    """Return when the next instance ends or is ready, and which; when the next one wakes up, and which."""
    ended = woken = FOREVER
    ender = waker = NONE
    for j in range(instances.shape[1]):
        if instances[STATE, j] == WAKING:
            if instances[WHEN, j] < woken:
                woken, waker = instances[WHEN, j], j
        elif instances[WHEN, j] < ended:
            ended, ender = instances[WHEN, j], j
    return ended, ender, woken, waker


@inlined
def _is_over(s: State, point: Ints) -> bool:
    """Return whether the interval has ended. The time is then not advanced."""
    if s.completed + s.refusals >= s.total:
        return True
    if not s.measuring or s.measured < point[WANTED] or s.last_end != s.now:
        return False
    return bool(s.at_anchor or s.measured >= 2 * point[WANTED])


@inlined
def _advance(s: State, point: Ints, time: int) -> None:
    """Advance the time. If the warm-up is over, the interval starts first."""
    if not s.measuring and s.completed >= point[WARM_UP] and s.last_end == s.now:
        s.measuring = True
        s.opened, s.anchor = s.now, s.last_ender
        s.rejected_before, s.timed_out_before = s.rejected, s.timed_out
    if s.measuring:
        s.busy_area += s.busy * (time - s.now)
    s.now = time
    s.at_anchor = False


# -- requests --------------------------------------------------------------------------------------------------------


@inlined
def _send_first(s: State, point: Ints, a: Arrays) -> None:
    """Send the first requests: one of each client in a closed loop, and all in an open loop."""
    s.last_arrival = s.last_response = -point[SPACING]
    s.current = s.frozen = s.anchor = s.last_ender = s.slot_deadline = NONE
    s.batcher_at = IDLE_WAIT
    s.naps = point[INSTANCES]
    s.measuring = point[WARM_UP] == 0
    if point[CONCURRENCY] > 0:
        s.total, initial = FOREVER, point[CONCURRENCY]
    else:
        s.total = initial = point[ARRIVALS_TO] - point[ARRIVALS_FROM]
    for i in range(initial):
        _send(s, point, a, 0 if point[CONCURRENCY] > 0 else a.tables.arrivals[point[ARRIVALS_FROM] + i])


@inlined
def _send(s: State, point: Ints, a: Arrays, sent: int) -> None:
    i = s.issued & s.mask
    gap = point[SPACING] + a.tables.gaps[s.issued % len(a.tables.gaps)]
    s.last_arrival = max(sent + point[SEND], s.last_arrival + gap)
    a.flight[IN_TRANSIT, SENT, i], a.flight[IN_TRANSIT, ARRIVED, i] = sent, s.last_arrival
    s.issued += 1


@inlined
def _arrive(s: State, point: Ints, a: Arrays) -> None:
    """Put the next request into the queue or, without dynamic batching, into a payload of its own."""
    flight, requests = a.flight, a.requests
    transit = flight[IN_TRANSIT]
    i, units = s.arrived & s.mask, 1
    if not s.alike:
        shape = 0
        place = point[MIX_FROM] + s.arrived % max(point[MIX_TO] - point[MIX_FROM], 1)
        if point[MIX_FROM] < point[MIX_TO]:
            units, shape = a.tables.mix[MIX_UNITS, place], a.tables.mix[MIX_SHAPE, place]
        transit[NUMBER, i], transit[UNITS, i], transit[SHAPE, i] = s.arrived, units, shape
        transit[LEVEL, i] = a.tables.mix[MIX_LEVEL, place] if s.has_levels else 0
    if s.arrived < len(requests):
        requests[s.arrived, 0], requests[s.arrived, 1] = transit[SENT, i], s.now
        requests[s.arrived, 2], requests[s.arrived, 3] = units, 0 if s.alike else transit[SHAPE, i]
    s.arrived += 1
    _watch_queue(s, point)
    if point[BATCHING] == 0:
        if not s.alike:
            _move(transit, i, flight[s.payload_place], s.formed & s.mask)
        s.formed += 1
        payload = s.tail & s.mask
        a.payloads[PAYLOAD_UNITS, payload], a.payloads[PAYLOAD_REQUESTS, payload] = units, 1
        s.tail += 1
        _notify_instance(s.now + point[DISPATCH], a.instances)
    else:
        s.queued_samples += units * point[SAMPLES]  # Triton also counts a request that it then rejects
        if _is_queue_full(s, point, a, transit[LEVEL, i]):
            s.rejected += 1
            s.refusals += 1
            s.refused = 1
            if s.arrived <= len(requests):
                requests[s.arrived - 1, EXECUTION] = WAS_REJECTED
        else:
            _enqueue(s, point, a, i)


@inlined
def _watch_queue(s: State, point: Ints) -> None:
    """Compare the shortest queue in the two last sixths of the arrivals."""
    waiting = s.arrived - s.started - s.refusals
    if s.arrived == s.total - s.total // 3:
        s.least_waiting = waiting
    elif s.arrived == s.total - s.total // 6:
        s.earlier_waiting, s.least_waiting = s.least_waiting, waiting
    elif s.arrived == s.total:
        grows = 0 < s.earlier_waiting < s.least_waiting > point[LIMIT] * (point[INSTANCES] + 1)
        s.overloaded = grows and s.total >= MIN_ARRIVALS


@inlined
def _is_queue_full(s: State, point: Ints, a: Arrays, level: int) -> bool:
    """Return whether the queue, or that of the priority ``level``, has no place for another request."""
    limit = point[QUEUE_LIMIT]
    waiting = _queued(s)
    if s.has_levels:
        limit = a.tables.policies[point[POLICIES] + level - 1, LEVEL_LIMIT]
        waiting = _count_level(a.flight[s.queue_place], s.queue_head, s.queue_tail, level)
        waiting += _count_level(a.flight[DELAYED], s.delayed_head, s.delayed_tail, level)
    return bool(0 < limit <= waiting)


@inlined
def _enqueue(s: State, point: Ints, a: Arrays, i: int) -> None:
    """Put the request at place ``i`` of ``transit`` into the queue, and notify the batcher if that may matter."""
    if s.has_levels:
        _insert(a.flight[IN_TRANSIT], i, a.flight[s.queue_place], s.queue_head, s.queue_tail)
    elif not s.alike:
        _move(a.flight[IN_TRANSIT], i, a.flight[s.queue_place], s.queue_tail & s.mask)
    s.queue_tail += 1
    if _has_slot(s, point, a.instances):
        enough = s.queued_samples >= s.next_preferred
        s.notified = enough or s.saturated or _is_stale(s) or s.polling or point[FIXED] == 0


@inlined
def _answer_refused(s: State, point: Ints, a: Arrays) -> None:
    """Answer the requests that are refused now. In a closed loop, each client sends its next request."""
    for _ in range(s.refused):
        s.last_response = max(s.now + point[RECEIVE], s.last_response + point[SPACING])
        if point[CONCURRENCY] > 0:
            _send(s, point, a, max(s.last_response + point[CLIENT], s.now + REFUSED_PAUSE))
    if point[CONCURRENCY] > 0 and s.refusals >= MAX_REFUSED * (point[WARM_UP] + point[WANTED]):
        s.total = 0  # give up


# -- the batcher -----------------------------------------------------------------------------------------------------


@inlined
def _form_payload(s: State, point: Ints, a: Arrays) -> bool:
    """Let the batcher form or extend a payload. Return whether it runs again at once; otherwise it sleeps."""
    payloads = a.payloads
    s.refused, s.unanswered = s.refused + s.unanswered, 0
    if s.saturated or _is_stale(s):
        s.current, s.current_size, s.saturated, s.next_preferred = NONE, 0, False, 0
    s.polling = False
    s.batcher_at = s.now + IDLE_WAIT
    if _queued(s) == 0 and s.slot_deadline < 0:
        return False
    blocked = not _has_slot(s, point, a.instances)
    if blocked:  # a notification does not extend the wait
        if s.slot_deadline < 0:
            s.slot_deadline = s.now + IDLE_WAIT
        s.batcher_at = s.slot_deadline
        if s.now < s.slot_deadline:
            return False
    s.slot_deadline = s.now + IDLE_WAIT if blocked else -1
    reached = point[LEVELS]  # the lowest priority level whose timeout applies
    if s.has_levels and s.timeout > 0:
        if not blocked:
            reached = _reached_level(s, point, a)
        _expire_levels(s, point, a, reached, blocked)
    elif s.timeout > 0:
        _expire(s, point, a, blocked)
    if blocked or _queued(s) == 0:
        return True
    if s.alike:
        pending, wait = _form(s, point, a)
        other_shape = False
    else:
        pending, wait, other_shape = _form_different(s, point, a)
    if wait > 0:
        s.batcher_at = s.now + wait + point[WAKE]
        return False
    if pending > 0 and s.current < 0:
        s.current = s.tail
        s.tail += 1
        own = s.current & s.mask
        payloads[PAYLOAD_OLDEST, own] = FOREVER
        payloads[PAYLOAD_REQUESTS, own] = payloads[PAYLOAD_SHAPE, own] = payloads[PAYLOAD_CLOSED, own] = 0
        _notify_instance(s.now + point[DISPATCH], a.instances)
    if other_shape:
        payloads[PAYLOAD_CLOSED, s.current & s.mask] = 1
    if pending == 0 and not s.saturated:
        s.polling = True
        _wake_at_timeout(s, point, a, reached)
        return False
    _extend_payload(s, point, a, pending)
    return True


@inlined
def _queued(s: State) -> int:
    """Return the number of requests in the queue, with those that have expired."""
    return s.queue_tail - s.queue_head + s.delayed_tail - s.delayed_head


@inlined
def _is_stale(s: State) -> bool:
    """Return whether the batcher can no longer extend its current payload."""
    return s.current >= 0 and (s.current < s.head or s.current == s.frozen)


@inlined
def _has_slot(s: State, point: Ints, instances: Ints) -> bool:
    """Return whether the batcher may form a payload.

    With prefetch up to 2n payloads may wait for the n instances, otherwise one for each idle instance.
    """
    if point[PREFETCH] != 0:
        return bool(s.tail - s.head < 2 * instances.shape[1])
    idle = 0
    for j in range(instances.shape[1]):
        if instances[STATE, j] == SLEEPING or instances[STATE, j] == WAKING:
            idle += 1
    return bool(s.tail - s.head < idle)


@inlined
def _form(s: State, point: Ints, a: Arrays) -> tuple[int, int]:
    """Decide how the batcher extends its current payload from the queue.

    This is the loop over the queue of Triton's ``GetDynamicBatch`` in closed form, as all requests are alike. Return
    the number of requests that join the payload, and the time to wait instead (0: do not wait).
    """
    limit, samples, size = point[LIMIT], point[SAMPLES], s.current_size
    take = min(s.queue_tail - s.queue_head, limit - size)
    more = s.queue_tail - s.queue_head > take  # the next request does not fit
    total = size + take
    best = 0
    closed = False
    if a.hit[total] > size:
        best = a.hit[total] - size
    else:
        # The first request beyond the largest preferred size selects the batch without it. Triton does not compare
        # the first request of a new payload, and treats a selected batch of 0 requests as none.
        beyond = max(s.largest // samples + 1 - size, 1)
        if size + beyond == 1:
            beyond = 2
        examined = take + (1 if more else 0)
        if beyond <= examined:
            closed = True
            best = beyond - 1
            if best == 0 and examined > beyond:
                best = 1
    oldest = a.flight[s.queue_place, ARRIVED, s.queue_head & s.mask]
    return _decide(s, point, a, take, total, best, closed, more, oldest, FOREVER)


@inlined
def _form_different(s: State, point: Ints, a: Arrays) -> tuple[int, int, bool]:
    """Decide as ``_form`` does, for requests that differ in size, shape or expiry.

    This is the loop of Triton's ``GetDynamicBatch``. In addition return whether a request of another shape comes
    next, which closes the payload for good.
    """
    flight, mask = a.flight, s.mask
    samples, timeout, size = point[SAMPLES], point[TIMEOUT], s.current_size
    shape = a.payloads[PAYLOAD_SHAPE, s.current & mask]
    units_taken = count = best = 0
    closed = send = other_shape = False
    oldest = expiry = FOREVER
    queue_head, delayed_head = s.queue_head, s.delayed_head
    for _ in range(_queued(s)):
        is_fresh = _is_fresh_next(flight, queue_head, s.queue_tail, delayed_head, s.delayed_tail)
        where, i = (IN_QUEUE, queue_head & mask) if is_fresh else (DELAYED, delayed_head & mask)
        units, arrived = flight[where, UNITS, i], flight[where, ARRIVED, i]
        if size + units_taken > 0:
            if (size + units_taken + units) * samples > s.largest and best == 0:
                best, closed = count, True
            if size + units_taken + units > point[LIMIT]:
                send = True
                break
            if point[FIXED] == 0 and flight[where, SHAPE, i] != shape:
                send = other_shape = True
                break
        else:
            shape = flight[where, SHAPE, i]
        units_taken += units
        count += 1
        queue_head, delayed_head = queue_head + is_fresh, delayed_head + (not is_fresh)
        if s.has_levels:
            timeout = a.tables.policies[point[POLICIES] + flight[where, LEVEL, i] - 1, LEVEL_TIMEOUT]
        oldest = min(oldest, arrived)
        if timeout > 0 and is_fresh:
            expiry = min(expiry, arrived + timeout)
        if a.hit[size + units_taken] == size + units_taken:
            best = count
    pending, wait = _decide(s, point, a, count, size + units_taken, best, closed, send, oldest, expiry)
    return pending, wait, other_shape


@inlined
def _decide(
    s: State,
    point: Ints,
    a: Arrays,
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
        s: The state.
        point: The point.
        a: The arrays.
        count: Requests that the batcher has looked at and that fit.
        total: Units of the payload with all of them.
        best: Requests with which the payload has a preferred size; 0 if there is none.
        closed: Whether the payload with ``best`` requests takes no others.
        send: Whether the next request does not fit, or has another shape.
        oldest: The earliest arrival among ``count`` requests.
        expiry: The first time at which one of them expires.
    """
    samples, delay, size = point[SAMPLES], point[DELAY], s.current_size
    late = delay > 0 and s.now - oldest >= delay
    s.saturated = closed
    if best > 0 and not late:
        s.saturated = closed or delay == 0
        return best, 0
    if count == 0:
        return 0, 0
    if send or total * samples >= s.largest:
        s.saturated = True
        return count, 0
    if late or delay == 0:
        return count, 0
    s.next_preferred = a.following[total] - size * samples
    if not closed and size > 0 and a.hit[size] != size:
        return count, 0
    wait = min(oldest + delay, expiry) - s.now
    return count, wait // 1000 * 1000  # Triton waits for whole microseconds


@inlined
def _tabulate(preferred: Ints, samples: int, limit: int, hit: Ints, following: Ints) -> int:
    """Tabulate the ascending preferred sizes (in samples) by the number m of units in a batch.

    ``hit[m]`` is the largest number of units up to m whose samples are a preferred size, or 0. ``following[m]`` is
    the next preferred size above m units, or the smallest one. Returns the largest preferred size.
    """
    k = 0
    hit[0] = 0
    for m in range(limit + 1):
        if m > 0:
            hit[m] = hit[m - 1]
        while k < len(preferred) and preferred[k] <= m * samples:
            if preferred[k] == m * samples:
                hit[m] = m
            k += 1
        following[m] = preferred[k % len(preferred)] if len(preferred) > 0 else 0
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
def _extend_payload(s: State, point: Ints, a: Arrays, pending: int) -> None:
    """Move the next ``pending`` requests of the queue into the current payload."""
    payloads = a.payloads
    samples, mask, queue, batched = point[SAMPLES], s.mask, a.flight[s.queue_place], a.flight[s.payload_place]
    own = s.current & s.mask
    if s.alike:
        payloads[PAYLOAD_OLDEST, own] = min(payloads[PAYLOAD_OLDEST, own], queue[ARRIVED, s.queue_head & mask])
        s.queue_head += pending
        s.formed += pending
        s.current_size += pending
        s.queued_samples -= pending * samples
    else:
        delayed = a.flight[DELAYED]
        for _ in range(pending):
            i = s.formed & mask
            if _is_fresh_next(a.flight, s.queue_head, s.queue_tail, s.delayed_head, s.delayed_tail):
                _move(queue, s.queue_head & mask, batched, i)
                s.queue_head += 1
            else:
                _move(delayed, s.delayed_head & mask, batched, i)
                s.delayed_head += 1
            s.formed += 1
            s.current_size += batched[UNITS, i]
            s.queued_samples -= batched[UNITS, i] * samples
            payloads[PAYLOAD_OLDEST, own] = min(payloads[PAYLOAD_OLDEST, own], batched[ARRIVED, i])
            payloads[PAYLOAD_SHAPE, own] = batched[SHAPE, i]  # if shapes matter, all have this one
    payloads[PAYLOAD_UNITS, own] = s.current_size
    payloads[PAYLOAD_REQUESTS, own] += pending


# -- expiry ----------------------------------------------------------------------------------------------------------


@inlined
def _reached_level(s: State, point: Ints, a: Arrays) -> int:
    """Return the lowest priority level whose timeout Triton applies while it forms a batch.

    It looks at a level only if all requests of the levels above fit in the batch.
    """
    flight = a.flight
    mask, size, shape = s.mask, s.current_size, a.payloads[PAYLOAD_SHAPE, s.current & s.mask]
    for level in range(1, point[LEVELS]):
        policy = point[POLICIES] + level - 1
        timeout, rejects = a.tables.policies[policy, LEVEL_TIMEOUT], a.tables.policies[policy, LEVEL_REJECTS] != 0
        for place in (IN_QUEUE, DELAYED):
            is_fresh = place == IN_QUEUE
            first, last = (s.queue_head, s.queue_tail) if is_fresh else (s.delayed_head, s.delayed_tail)
            for k in range(first, last):
                i = k & mask
                if flight[place, LEVEL, i] != level:
                    continue
                if is_fresh and rejects and 0 < timeout < s.now - flight[place, ARRIVED, i]:
                    continue
                if size == 0:
                    shape = flight[place, SHAPE, i]
                size += flight[place, UNITS, i]
                if size > point[LIMIT] or (point[FIXED] == 0 and flight[place, SHAPE, i] != shape):
                    return level
    return int(point[LEVELS])


@inlined
def _expire(s: State, point: Ints, a: Arrays, blocked: bool) -> None:
    """Reject or delay the requests whose time in the queue has expired; if the batcher is blocked, delay none."""
    rejects, queue = point[REJECTS] != 0, a.flight[s.queue_place]
    while (rejects or not blocked) and s.queue_head < s.queue_tail:
        i = s.queue_head & s.mask
        if s.now <= queue[ARRIVED, i] + s.timeout:
            break
        s.queue_head += 1
        if rejects:
            _time_out(s, point, a, i, blocked)
        else:
            _move(queue, i, a.flight[DELAYED], s.delayed_tail & s.mask)
            s.delayed_tail += 1


@inlined
def _expire_levels(s: State, point: Ints, a: Arrays, reached: int, blocked: bool) -> None:
    """Reject or delay the requests of the priority levels up to ``reached`` whose time in the queue has expired.

    If the batcher is blocked, delay none.
    """
    queue, delayed, mask = a.flight[s.queue_place], a.flight[DELAYED], s.mask
    kept = s.queue_head
    for k in range(s.queue_head, s.queue_tail):
        i = k & mask
        policy = point[POLICIES] + queue[LEVEL, i] - 1
        rejects, limit_ns = a.tables.policies[policy, LEVEL_REJECTS] != 0, a.tables.policies[policy, LEVEL_TIMEOUT]
        has_expired = queue[LEVEL, i] <= reached and 0 < limit_ns < s.now - queue[ARRIVED, i]
        if not has_expired or (blocked and not rejects):
            if kept != k:
                _move(queue, i, queue, kept & mask)
            kept += 1
        elif rejects:
            _time_out(s, point, a, i, blocked)
        else:
            _insert(queue, i, delayed, s.delayed_head, s.delayed_tail)
            s.delayed_tail += 1
    s.queue_tail = kept


@inlined
def _time_out(s: State, point: Ints, a: Arrays, i: int, blocked: bool) -> None:
    """Reject the request at place ``i`` of the queue because it has expired."""
    s.timed_out += 1
    s.refusals += 1
    s.unanswered += 1
    if not blocked:  # otherwise Triton still counts it
        s.queued_samples -= a.flight[s.queue_place, UNITS, i] * point[SAMPLES]
    if a.flight[s.queue_place, NUMBER, i] < len(a.requests):
        a.requests[a.flight[s.queue_place, NUMBER, i], EXECUTION] = HAS_TIMED_OUT


@inlined
def _wake_at_timeout(s: State, point: Ints, a: Arrays, reached: int) -> None:
    """Let the batcher run when the first request expires whose timeout applies."""
    queue, mask = a.flight[s.queue_place], s.mask
    if s.has_levels and s.timeout > 0:
        for k in range(s.queue_head, s.queue_tail):
            level = queue[LEVEL, k & mask]
            limit_ns = a.tables.policies[point[POLICIES] + level - 1, LEVEL_TIMEOUT]
            if limit_ns > 0 and level <= reached:
                s.batcher_at = min(s.batcher_at, queue[ARRIVED, k & mask] + limit_ns + 1)
    elif s.timeout > 0 and s.queue_head < s.queue_tail:
        s.batcher_at = min(s.batcher_at, queue[ARRIVED, s.queue_head & mask] + s.timeout + 1)


# -- ring buffers ----------------------------------------------------------------------------------------------------


@inlined
def _move(source: Ints, i: int, target: Ints, k: int) -> None:
    for fact in range(FACTS):
        target[fact, k] = source[fact, i]


@inlined
def _insert(source: Ints, i: int, queue: Ints, head: int, tail: int) -> None:
    """Put a request behind all others of its priority level or a higher one."""
    mask, place = queue.shape[1] - 1, tail
    while place > head and queue[LEVEL, (place - 1) & mask] > source[LEVEL, i]:
        _move(queue, (place - 1) & mask, queue, place & mask)
        place -= 1
    _move(source, i, queue, place & mask)


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
def _take_payload(s: State, point: Ints, a: Arrays, j: int) -> None:
    """Let instance ``j`` execute the payload that waits longest, or sleep if there is none."""
    instances, progress = a.instances, a.progress
    batched = a.flight[s.payload_place]
    if s.head == s.tail:
        instances[STATE, j], instances[WHEN, j], instances[ASLEEP, j] = SLEEPING, FOREVER, s.naps
        s.naps += 1
        return
    count, together = _merge_payloads(s, point, a.payloads)
    instances[WAITED, j] = 0
    for i in range(together):
        place = (s.started + i) & s.mask
        a.held[j, i] = batched[SENT, place]
        instances[WAITED, j] += s.now - batched[ARRIVED, place]
        if len(a.requests) > 0:
            number = s.started + i if s.alike else batched[NUMBER, place]
            if number < len(a.requests):
                a.requests[number, EXECUTION] = s.runs
    instances[SIZE, j], instances[MEMBERS, j] = count, together
    s.started += together
    s.least_waiting = min(s.least_waiting, s.arrived - s.started - s.refusals)
    s.busy += 1
    _rescale(s, point, a, s.busy - 1, j)
    progress[FACTOR, j] = a.tables.factors[s.runs % len(a.tables.factors)]
    span = a.tables.services[point[SERVICE] + (count - 1) * point[STRIDE] + s.busy - 1] * progress[FACTOR, j]
    instances[STATE, j], instances[SINCE, j], progress[LEFT, j] = EXECUTING, s.now, 1.0
    instances[WHEN, j] = s.now + max(int(span + 0.5), 1)
    instances[RUN, j] = s.runs
    if s.runs < len(a.executions):
        row = a.executions[s.runs]
        row[0], row[1], row[2], row[3], row[4] = j, s.now, -1, count, together
    s.runs += 1
    s.notified = point[BATCHING] != 0


@inlined
def _merge_payloads(s: State, point: Ints, payloads: Ints) -> tuple[int, int]:
    """Remove the first payload for an instance, and merge those into it that have waited for longer than the delay.

    Return the units and the requests of the batch.
    """
    limit, front = point[LIMIT], s.head & s.mask
    units, requests = payloads[PAYLOAD_UNITS, front], payloads[PAYLOAD_REQUESTS, front]
    s.head += 1
    if point[DELAY] > 0 and limit * point[SAMPLES] > 1 and payloads[PAYLOAD_CLOSED, front] == 0:
        while s.head < s.tail:
            other = s.head & s.mask
            if payloads[PAYLOAD_CLOSED, other] != 0 or s.now - payloads[PAYLOAD_OLDEST, other] <= point[DELAY]:
                break
            s.frozen = s.head
            differs = point[FIXED] == 0 and payloads[PAYLOAD_SHAPE, front] != payloads[PAYLOAD_SHAPE, other]
            if differs or units + payloads[PAYLOAD_UNITS, other] > limit:
                break
            units += payloads[PAYLOAD_UNITS, other]
            requests += payloads[PAYLOAD_REQUESTS, other]
            s.head += 1
    return units, requests


@inlined
def _rescale(s: State, point: Ints, a: Arrays, before: int, excluded: int) -> None:
    """Change the speed of the running executions except ``excluded``: ``before`` instances were busy."""
    instances, progress, services = a.instances, a.progress, a.tables.services
    for j in range(instances.shape[1]):
        if instances[STATE, j] != EXECUTING or j == excluded:
            continue
        row = point[SERVICE] + (instances[SIZE, j] - 1) * point[STRIDE]
        old, new = services[row + before - 1] * progress[FACTOR, j], services[row + s.busy - 1] * progress[FACTOR, j]
        if old != new:
            progress[LEFT, j] = max(progress[LEFT, j] - (s.now - instances[SINCE, j]) / old, 0.0)
            instances[SINCE, j] = s.now
            instances[WHEN, j] = s.now + int(progress[LEFT, j] * new + 0.5)


@inlined
def _answer(s: State, point: Ints, a: Arrays, j: int) -> None:
    """End the execution of instance ``j``. In a closed loop, each client sends its next request."""
    instances = a.instances
    s.busy -= 1
    _rescale(s, point, a, s.busy + 1, j)
    s.completed += instances[MEMBERS, j]
    s.last_end, s.last_ender = s.now, j
    s.at_anchor = s.at_anchor or j == s.anchor or s.anchor < 0
    if s.measuring:
        s.batches += 1
        s.queue_sum += instances[WAITED, j]
        s.units_measured += instances[SIZE, j]
    for i in range(instances[MEMBERS, j]):
        s.last_response = max(s.now + point[RECEIVE], s.last_response + point[SPACING])
        if s.measuring:
            latency = s.last_response - a.held[j, i]
            a.latencies[s.measured] = latency
            s.latency_sum += latency
            s.measured += 1
        if point[CONCURRENCY] > 0:
            _send(s, point, a, s.last_response + point[CLIENT])
    if instances[RUN, j] < len(a.executions):
        a.executions[instances[RUN, j], 2] = s.now
    instances[STATE, j], instances[WHEN, j] = RELEASING, s.now + point[RELEASE]


@inlined
def _is_ready(s: State, point: Ints, instances: Ints, j: int) -> bool:
    """Return whether instance ``j``, whose time has come, takes a payload: not if the batcher overtakes it."""
    if instances[STATE, j] == OVERTAKEN:
        s.overtaken = False
        return True
    if instances[WHEN, j] != s.now:
        return False
    may_overtake = point[BATCHING] != 0 and point[PREFETCH] == 0 and not s.overtaken
    if may_overtake and _is_missed(instances[RUN, j], s.now, point[MISSED]):
        s.overtaken = True
        instances[STATE, j], instances[WHEN, j] = OVERTAKEN, s.now + _preempted_ns(instances[RUN, j], s.now)
        s.batcher_at = s.now
        return False
    s.notified = point[BATCHING] != 0
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
def _write_results(s: State, latencies: Ints, result: Floats) -> None:
    result[DURATION] = s.last_end - s.opened
    result[REQUESTS] = s.measured
    result[COMPLETED_UNITS] = s.units_measured
    result[REJECTED] = s.rejected - s.rejected_before
    result[TIMED_OUT] = s.timed_out - s.timed_out_before
    result[EXECUTIONS] = s.batches
    result[LATENCY] = s.latency_sum
    _write_percentiles(latencies, s.measured, result)
    result[QUEUE] = s.queue_sum
    result[BUSY] = s.busy_area
    result[OVERLOADED] = 1.0 if s.overloaded and s.refusals == 0 else 0.0


@inlined
def _write_percentiles(latencies: Ints, measured: int, result: Floats) -> None:
    """Write the percentiles of the first ``measured`` latencies by perf_analyzer's definition; NaN without any.

    A percentile is the element at the nearest rank, halves rounded up.
    """
    stop = measured
    for column, percent in ((P99, 99.0), (P95, 95.0), (P90, 90.0), (P50, 50.0)):
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
