"""The discrete-event loop of the dynamic batcher, compiled to machine code by Numba.

Import this module only where something is simulated: the import loads the compiler. Times are in ns.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from optimizer.simulator.compilation import Floats, Ints, compiled, compiled_once
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
MIX_FROM = 23  # range of ``units`` and ``shapes``; empty: all requests have one unit and one shape
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
POLICY_COLUMNS = 3

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

# Variables start with these numbers of a fixed type: a literal has a type of its own, for which Numba compiles the
# functions that get it once more.
ZERO: Any = np.int64(0)
NONE: Any = np.int64(-1)

FOREVER = 2**62
IDLE_WAIT = 500_000_000  # after this time the batcher runs even if it was not notified
PREEMPTION = 32_000  # mean time for which a batcher that runs too early keeps the instance from being idle: measured
FEWEST_TO_JUDGE = 30  # arrivals; fewer show no trend
REFUSED_PAUSE = 100_000  # a client whose request was refused sends again no sooner than this after it arrived
MOST_REFUSED = 20  # refused requests for each wanted one, after which a closed loop ends in any case

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
        units: Sizes of successive requests, used cyclically, the lists of all points with a mix concatenated.
        shapes: Numbers of the shapes of successive requests, like ``units``.
        levels: Priorities of successive requests, like ``units``.
        policies: Queue policies [levels, POLICY_COLUMNS] of the priority levels of all points concatenated.
    """

    preferred: Ints
    services: Floats
    factors: Floats
    gaps: Ints
    arrivals: Ints
    units: Ints
    shapes: Ints
    levels: Ints
    policies: Ints


class Scratch(NamedTuple):
    """Arrays that every point uses, with undefined content.

    ``flight[place, fact]`` are ring buffers of the requests in each place. ``payloads[row]`` are ring buffers of the
    payloads that wait for an instance.
    """

    flight: Ints
    payloads: Ints
    latencies: Ints
    hit: Ints
    following: Ints
    held: Ints


@compiled_once
def simulate_points(
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
    instances = 1
    limit = 1
    for row in range(points.shape[0]):
        instances = max(instances, points[row, INSTANCES])
        limit = max(limit, points[row, LIMIT])
    ring = 1
    while ring < in_flight + 2:
        ring *= 2
    scratch = Scratch(
        np.empty((PLACES, FACTS, ring), np.int64),
        np.empty((PAYLOAD_ROWS, ring), np.int64),
        np.empty(most_measured, np.int64),
        np.empty(limit + 1, np.int64),
        np.empty(limit + 1, np.int64),
        np.empty((instances, min(limit, ring)), np.int64),
    )
    for row in range(points.shape[0]):
        _simulate_point(points[row], tables, scratch, results[row], executions, requests)


@compiled
def _simulate_point(
    point: Ints, tables: Tables, scratch: Scratch, result: Floats, executions: Ints, requests: Ints
) -> None:
    preferred, services, factors, gaps, arrivals, mixed_units, mixed_shapes, mixed_levels, policies = tables
    flight, payloads, latencies, hit, following, held = scratch
    samples, limit, n = point[SAMPLES], point[LIMIT], point[INSTANCES]
    batching, delay, fixed, prefetch = point[BATCHING] != 0, point[DELAY], point[FIXED] != 0, point[PREFETCH] != 0
    concurrency, warm_up, wanted = point[CONCURRENCY], point[WARM_UP], point[WANTED]
    send, receive, client, spacing = point[SEND], point[RECEIVE], point[CLIENT], point[SPACING]
    wake, dispatch, release = point[WAKE], point[DISPATCH], point[RELEASE]
    service, stride = point[SERVICE], point[STRIDE]
    mix_from, mix_length = point[MIX_FROM], point[MIX_TO] - point[MIX_FROM]
    mixed, queue_limit, timeout, rejects = mix_length > 0, point[QUEUE_LIMIT], point[TIMEOUT], point[REJECTS] != 0
    levels, policy_from = point[LEVELS], point[POLICIES]
    has_levels, has_limits = levels > 1, queue_limit > 0
    if has_levels:
        for level in range(levels):
            timeout = max(timeout, policies[policy_from + level, LEVEL_TIMEOUT])
            has_limits = has_limits or policies[policy_from + level, LEVEL_LIMIT] > 0
    # requests that are alike leave each place in the order in which they were sent, so they can stay where they are
    alike = not mixed and timeout == 0 and not has_limits
    transit, queue, delayed, batched = flight[IN_TRANSIT], flight[IN_QUEUE], flight[DELAYED], flight[IN_PAYLOAD]
    if alike:
        queue = batched = transit
    sent_at, arrive_at, queued_at = transit[SENT], transit[ARRIVED], queue[ARRIVED]
    batched_sent, batched_arrived = batched[SENT], batched[ARRIVED]
    payload_units, payload_requests = payloads[PAYLOAD_UNITS], payloads[PAYLOAD_REQUESTS]
    mask = flight.shape[2] - 1

    largest = _tabulate(preferred[point[SIZES_FROM] : point[SIZES_TO]], samples, limit, hit, following)

    # requests
    issued = arrived = started = formed = completed = refusals = rejected = timed_out = ZERO
    queue_head = queue_tail = delayed_head = delayed_tail = queued_samples = unanswered = ZERO
    last_arrival = -spacing
    if concurrency > 0:
        total, initial = FOREVER, concurrency
    else:
        total = initial = point[ARRIVALS_TO] - point[ARRIVALS_FROM]
    for i in range(initial):
        sent = arrivals[point[ARRIVALS_FROM] + i] if concurrency == 0 else 0
        last_arrival = max(sent + send, last_arrival + spacing + gaps[issued % len(gaps)])
        sent_at[issued & mask], arrive_at[issued & mask] = sent, last_arrival
        issued += 1
    last_response = -spacing

    # payloads head..tail wait for an instance; the batcher may still extend ``current``
    head = tail = ZERO
    current = NONE  # not queued yet
    frozen = NONE  # the head, if an instance could not merge it
    current_size = ZERO
    saturated = False
    next_preferred = ZERO
    batcher_at = IDLE_WAIT
    slot_deadline = -1  # when the wait for a slot ends and expired requests are rejected; -1: there is no wait
    polling = False  # the batcher tries again and again until ``current`` is executed
    overtaken = False  # whether the batcher has taken the CPU of an instance that is not idle yet; it has only one

    # instances
    state = np.zeros(n, np.int64)
    when = np.full(n, FOREVER, np.int64)  # time of the next event
    asleep = np.arange(n).astype(np.int64)  # order in which they fell asleep
    naps = n
    size = np.zeros(n, np.int64)
    members = np.zeros(n, np.int64)  # requests of the batch
    since = np.zeros(n, np.int64)
    left = np.zeros(n, np.float64)  # remaining share of the execution at ``since``
    factor = np.ones(n, np.float64)
    run = np.zeros(n, np.int64)  # number of the execution
    waited = np.zeros(n, np.int64)  # queue time, sum over the requests of the batch
    busy = ZERO

    # the interval starts and ends when the same instance ends an execution, so that it contains whole cycles
    measuring = warm_up == 0
    opened = ZERO
    anchor = NONE
    at_anchor = False
    last_ender = NONE
    measured = units_measured = runs = batches = latency_sum = queue_sum = busy_area = last_end = ZERO
    rejected_before = timed_out_before = ZERO

    # An open loop overloads the server if during the last third of the arrivals the queue is never empty and grows:
    # its minimum length in the second half of this third exceeds that in the first half. A queue that fits into one
    # more batch for each instance and the batcher can be requests that wait for a preferred size.
    third, sixth = total - total // 3, total - total // 6
    least_waiting = earlier_waiting = ZERO
    overloaded = False

    now = ZERO
    while True:
        ended, ender, woken, waker = _next_events(state, when)
        due = arrive_at[arrived & mask] if arrived < issued else FOREVER
        time = min(min(ended, due), min(batcher_at, woken))

        if time > now:
            if completed + refusals >= total:
                break
            if measuring:
                if measured >= wanted and last_end == now and (at_anchor or measured >= 2 * wanted):
                    break
            elif completed >= warm_up and last_end == now:
                measuring = True
                opened, anchor = now, last_ender
                rejected_before, timed_out_before = rejected, timed_out
            if measuring:
                busy_area += busy * (time - now)
            now = time
            at_anchor = False

        taker = NONE  # the instance that takes a payload
        notified = False  # whether the batcher is notified
        refused = ZERO  # requests that are answered without having been executed
        if ended == now:  # an instance finishes an execution, or is ready for the next
            j = ender
            if state[j] == EXECUTING:
                busy -= 1
                _rescale(busy + 1, busy, now, j, state, when, size, since, left, factor, services, service, stride)
                completed += members[j]
                last_end, last_ender = now, j
                at_anchor = at_anchor or j == anchor or anchor < 0
                if measuring:
                    batches += 1
                    queue_sum += waited[j]
                    units_measured += size[j]
                for i in range(members[j]):
                    last_response = max(now + receive, last_response + spacing)
                    if measuring:
                        latency = last_response - held[j, i]
                        latencies[measured] = latency
                        latency_sum += latency
                        measured += 1
                    if concurrency > 0:
                        sent = last_response + client
                        last_arrival = max(sent + send, last_arrival + spacing + gaps[issued % len(gaps)])
                        sent_at[issued & mask], arrive_at[issued & mask] = sent, last_arrival
                        issued += 1
                if run[j] < len(executions):
                    executions[run[j], 2] = now
                state[j] = RELEASING
                when[j] = now + release
            if state[j] == OVERTAKEN:
                overtaken, taker = False, j
            elif state[j] == RELEASING and when[j] == now:
                if batching and not prefetch and not overtaken and _is_missed(run[j], now, point[MISSED]):
                    overtaken = True
                    state[j], when[j], batcher_at = OVERTAKEN, now + _preempted_ns(run[j], now), now
                else:
                    notified, taker = batching, j
        elif due == now:  # a request arrives
            i, units = arrived & mask, 1
            if not alike:
                place = mix_from + arrived % max(mix_length, 1)
                units, shape = (mixed_units[place], mixed_shapes[place]) if mixed else (1, 0)
                transit[NUMBER, i], transit[UNITS, i], transit[SHAPE, i] = arrived, units, shape
                transit[LEVEL, i] = mixed_levels[place] if has_levels else 0
            if arrived < len(requests):
                requests[arrived, 0], requests[arrived, 1], requests[arrived, 2] = sent_at[i], now, units
                requests[arrived, 3] = 0 if alike else transit[SHAPE, i]
            arrived += 1
            if arrived == third:
                least_waiting = arrived - started - refusals
            elif arrived == sixth:
                earlier_waiting, least_waiting = least_waiting, arrived - started - refusals
            elif arrived == total:
                overloaded = 0 < earlier_waiting < least_waiting > limit * (n + 1) and total >= FEWEST_TO_JUDGE
            if batching:
                queued_samples += units * samples  # Triton also counts a request that it then rejects
                waiting = queue_tail - queue_head + delayed_tail - delayed_head
                if has_levels:
                    own_policy = policy_from + transit[LEVEL, i] - 1
                    queue_limit = policies[own_policy, LEVEL_LIMIT]
                    waiting = _count_level(queue, queue_head, queue_tail, transit[LEVEL, i])
                    waiting += _count_level(delayed, delayed_head, delayed_tail, transit[LEVEL, i])
                if 0 < queue_limit <= waiting:
                    rejected += 1
                    refusals += 1
                    refused = 1
                    if arrived <= len(requests):
                        requests[arrived - 1, 4] = WAS_REJECTED
                else:
                    if has_levels:
                        _insert(transit, i, queue, queue_head, queue_tail)
                    elif not alike:
                        _move(transit, i, queue, queue_tail & mask)
                    queue_tail += 1
                    if _slot(n, state, head, tail, prefetch):
                        stale = current >= 0 and (current < head or current == frozen)
                        enough = queued_samples >= next_preferred
                        notified = enough or saturated or stale or polling or not fixed
            else:
                if not alike:
                    _move(transit, i, batched, formed & mask)
                formed += 1
                payload_units[tail & mask], payload_requests[tail & mask] = units, 1
                tail += 1
                _notify_instance(now + dispatch, state, when, asleep)
        elif batcher_at == now:  # the batcher runs
            while True:
                refused, unanswered = refused + unanswered, ZERO
                if saturated or (current >= 0 and (current < head or current == frozen)):
                    current, current_size, saturated, next_preferred = NONE, ZERO, False, ZERO
                polling = False
                waiting = queue_tail - queue_head + delayed_tail - delayed_head
                batcher_at = now + IDLE_WAIT
                if waiting == 0 and slot_deadline < 0:
                    break
                blocked = not _slot(n, state, head, tail, prefetch)
                if blocked:  # a notification does not extend the wait
                    if slot_deadline < 0:
                        slot_deadline = now + IDLE_WAIT
                    batcher_at = slot_deadline
                    if now < slot_deadline:
                        break
                slot_deadline = now + IDLE_WAIT if blocked else -1
                reached = levels  # the lowest priority level whose timeout applies
                if has_levels and timeout > 0:
                    if not blocked:
                        shape = payloads[PAYLOAD_SHAPE, current & mask]
                        ends = queue_head, queue_tail, delayed_head, delayed_tail
                        reached = _reached_level(ends, current_size, shape, now, point, scratch, policies)
                    ends = queue_head, queue_tail, delayed_head, delayed_tail
                    queue_tail, delayed_tail, lost, lost_units = _expire_levels(
                        ends, reached, blocked, now, point, flight, policies, requests
                    )
                    timed_out += lost
                    refusals += lost
                    unanswered += lost
                    if not blocked:  # otherwise Triton still counts them
                        queued_samples -= lost_units * samples
                while not has_levels and timeout > 0 and (rejects or not blocked) and queue_head < queue_tail:
                    i = queue_head & mask
                    if now <= queued_at[i] + timeout:
                        break
                    queue_head += 1
                    if rejects:
                        timed_out += 1
                        refusals += 1
                        unanswered += 1
                        if not blocked:  # otherwise Triton still counts it
                            queued_samples -= queue[UNITS, i] * samples
                        if queue[NUMBER, i] < len(requests):
                            requests[queue[NUMBER, i], 4] = HAS_TIMED_OUT
                    else:
                        _move(queue, i, delayed, delayed_tail & mask)
                        delayed_tail += 1
                fresh, expired = queue_tail - queue_head, delayed_tail - delayed_head
                if blocked or fresh + expired == 0:
                    continue
                other_shape = False
                if alike:
                    pending, wait, saturated, next_preferred = _form(
                        fresh,
                        current_size,
                        limit,
                        largest,
                        samples,
                        delay,
                        queued_at[queue_head & mask] + delay - now,
                        hit,
                        following,
                        next_preferred,
                    )
                else:
                    shape = payloads[PAYLOAD_SHAPE, current & mask]
                    pending, wait, saturated, next_preferred, other_shape = _form_different(
                        queue_head,
                        fresh,
                        delayed_head,
                        expired,
                        current_size,
                        shape,
                        largest,
                        now,
                        next_preferred,
                        point,
                        scratch,
                        policies,
                    )
                if wait > 0:
                    batcher_at = now + wait + wake
                    break
                if pending > 0 and current < 0:
                    current = tail
                    tail += 1
                    payloads[PAYLOAD_OLDEST, current & mask] = FOREVER
                    payload_requests[current & mask] = payloads[PAYLOAD_SHAPE, current & mask] = 0
                    payloads[PAYLOAD_CLOSED, current & mask] = 0
                    _notify_instance(now + dispatch, state, when, asleep)
                own = current & mask
                if other_shape:
                    payloads[PAYLOAD_CLOSED, own] = 1
                if pending == 0 and not saturated:
                    polling = True
                    if has_levels and timeout > 0:
                        for k in range(queue_head, queue_tail):
                            limit_ns = policies[policy_from + queue[LEVEL, k & mask] - 1, LEVEL_TIMEOUT]
                            if limit_ns > 0 and queue[LEVEL, k & mask] <= reached:
                                batcher_at = min(batcher_at, queued_at[k & mask] + limit_ns + 1)
                    elif timeout > 0 and fresh > 0:
                        batcher_at = min(batcher_at, queued_at[queue_head & mask] + timeout + 1)
                    break
                if alike:
                    payloads[PAYLOAD_OLDEST, own] = min(payloads[PAYLOAD_OLDEST, own], queued_at[queue_head & mask])
                    queue_head += pending
                    formed += pending
                    current_size += pending
                    queued_samples -= pending * samples
                else:
                    for _ in range(pending):
                        i = formed & mask
                        if _is_fresh_next(flight, queue_head, queue_tail, delayed_head, delayed_tail):
                            _move(queue, queue_head & mask, batched, i)
                            queue_head += 1
                        else:
                            _move(delayed, delayed_head & mask, batched, i)
                            delayed_head += 1
                        formed += 1
                        current_size += batched[UNITS, i]
                        queued_samples -= batched[UNITS, i] * samples
                        payloads[PAYLOAD_OLDEST, own] = min(payloads[PAYLOAD_OLDEST, own], batched[ARRIVED, i])
                        payloads[PAYLOAD_SHAPE, own] = batched[SHAPE, i]  # if shapes matter, all have this one
                payload_units[own] = current_size
                payload_requests[own] += pending
        else:  # a notified instance wakes up
            taker = waker

        if taker >= 0:
            j = taker
            if head == tail:
                state[j] = SLEEPING
                when[j] = FOREVER
                asleep[j] = naps
                naps += 1
            else:
                count, together, head, frozen = _merge_payloads(head, tail, frozen, now, point, payloads)
                waited[j] = 0
                for i in range(together):
                    place = (started + i) & mask
                    held[j, i] = batched_sent[place]
                    waited[j] += now - batched_arrived[place]
                    if len(requests) > 0:
                        number = started + i if alike else batched[NUMBER, place]
                        if number < len(requests):
                            requests[number, 4] = runs
                size[j], members[j] = count, together
                started += together
                least_waiting = min(least_waiting, arrived - started - refusals)
                busy += 1
                _rescale(busy - 1, busy, now, j, state, when, size, since, left, factor, services, service, stride)
                factor[j] = factors[runs % len(factors)]
                span = services[service + (count - 1) * stride + busy - 1] * factor[j]
                state[j], since[j], left[j] = EXECUTING, now, 1.0
                when[j] = now + max(int(span + 0.5), 1)
                run[j] = runs
                if runs < len(executions):
                    executions[runs, 0], executions[runs, 1], executions[runs, 2] = j, now, -1
                    executions[runs, 3], executions[runs, 4] = count, together
                runs += 1
                notified = batching
        if notified:
            batcher_at = min(batcher_at, now + (0 if polling else wake))
        if refused > 0:
            for _ in range(refused):
                last_response = max(now + receive, last_response + spacing)
                if concurrency > 0:
                    sent = max(last_response + client, now + REFUSED_PAUSE)
                    last_arrival = max(sent + send, last_arrival + spacing + gaps[issued % len(gaps)])
                    sent_at[issued & mask], arrive_at[issued & mask] = sent, last_arrival
                    issued += 1
            if concurrency > 0 and refusals >= MOST_REFUSED * (warm_up + wanted):
                total = 0  # give up

    result[DURATION] = last_end - opened
    result[REQUESTS] = measured
    result[COMPLETED_UNITS] = units_measured
    result[REJECTED] = rejected - rejected_before
    result[TIMED_OUT] = timed_out - timed_out_before
    result[EXECUTIONS] = batches
    result[LATENCY] = latency_sum
    _write_percentiles(latencies, measured, result)
    result[QUEUE] = queue_sum
    result[BUSY] = busy_area
    result[OVERLOADED] = 1.0 if overloaded and refusals == 0 else 0.0


@compiled
def _next_events(state: Ints, when: Ints) -> tuple[int, int, int, int]:
    """Return when the next instance ends or is ready, and which; when the next one wakes up, and which."""
    ended = woken = FOREVER
    ender = waker = NONE
    for j in range(len(state)):
        if state[j] == WAKING:
            if when[j] < woken:
                woken, waker = when[j], j
        elif when[j] < ended:
            ended, ender = when[j], j
    return ended, ender, woken, waker


@compiled
def _merge_payloads(
    head: int, tail: int, frozen: int, now: int, point: Ints, payloads: Ints
) -> tuple[int, int, int, int]:
    """Merge payloads that have waited for longer than the delay into the one at ``head``, which an instance takes.

    Return the units and the requests of the batch, the new head, and the last payload that the instance looked at.
    """
    mask, limit = payloads.shape[1] - 1, point[LIMIT]
    front = head & mask
    units, requests = payloads[PAYLOAD_UNITS, front], payloads[PAYLOAD_REQUESTS, front]
    head += 1
    if point[DELAY] > 0 and limit * point[SAMPLES] > 1 and payloads[PAYLOAD_CLOSED, front] == 0:
        while head < tail:
            other = head & mask
            if payloads[PAYLOAD_CLOSED, other] != 0 or now - payloads[PAYLOAD_OLDEST, other] <= point[DELAY]:
                break
            frozen = head
            differs = point[FIXED] == 0 and payloads[PAYLOAD_SHAPE, front] != payloads[PAYLOAD_SHAPE, other]
            if differs or units + payloads[PAYLOAD_UNITS, other] > limit:
                break
            units += payloads[PAYLOAD_UNITS, other]
            requests += payloads[PAYLOAD_REQUESTS, other]
            head += 1
    return units, requests, head, frozen


@compiled
def _expire_levels(
    ends: tuple[int, int, int, int],
    reached: int,
    blocked: bool,
    now: int,
    point: Ints,
    flight: Ints,
    policies: Ints,
    requests: Ints,
) -> tuple[int, int, int, int]:
    """Reject or delay the requests of the levels up to ``reached`` whose time in the queue has expired.

    Return the new tails of the queue and of the delayed requests, and the rejected requests and their units. If the
    batcher is ``blocked``, no request is delayed.
    """
    queue_head, queue_tail, delayed_head, delayed_tail = ends
    queue, delayed, mask = flight[IN_QUEUE], flight[DELAYED], flight.shape[2] - 1
    kept, lost, lost_units = queue_head, ZERO, ZERO
    for k in range(queue_head, queue_tail):
        i = k & mask
        policy = point[POLICIES] + queue[LEVEL, i] - 1
        rejects, limit_ns = policies[policy, LEVEL_REJECTS] != 0, policies[policy, LEVEL_TIMEOUT]
        has_expired = queue[LEVEL, i] <= reached and 0 < limit_ns < now - queue[ARRIVED, i]
        if not has_expired or (blocked and not rejects):
            if kept != k:
                _move(queue, i, queue, kept & mask)
            kept += 1
        elif rejects:
            lost += 1
            lost_units += queue[UNITS, i]
            if queue[NUMBER, i] < len(requests):
                requests[queue[NUMBER, i], 4] = HAS_TIMED_OUT
        else:
            _insert(queue, i, delayed, delayed_head, delayed_tail)
            delayed_tail += 1
    return kept, delayed_tail, lost, lost_units


@compiled
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


@compiled
def _move(source: Ints, i: int, target: Ints, k: int) -> None:
    for fact in range(FACTS):
        target[fact, k] = source[fact, i]


@compiled
def _count_level(queue: Ints, head: int, tail: int, level: int) -> int:
    """Return the requests of a priority level between ``head`` and ``tail`` of a ring buffer."""
    mask, count = queue.shape[1] - 1, 0
    for k in range(head, tail):
        if queue[LEVEL, k & mask] == level:
            count += 1
    return count


@compiled
def _insert(source: Ints, i: int, queue: Ints, head: int, tail: int) -> None:
    """Put a request behind all others of its priority level or a higher one."""
    mask, place = queue.shape[1] - 1, tail
    while place > head and queue[LEVEL, (place - 1) & mask] > source[LEVEL, i]:
        _move(queue, (place - 1) & mask, queue, place & mask)
        place -= 1
    _move(source, i, queue, place & mask)


@compiled
def _reached_level(
    ends: tuple[int, int, int, int],
    size: int,
    shape: int,
    now: int,
    point: Ints,
    scratch: Scratch,
    policies: Ints,
) -> int:
    """Return the lowest priority level whose timeout Triton applies while it forms a batch.

    It looks at a level only if all requests of the levels above fit in the batch. ``ends`` are the head and the
    tail of the queue and of the delayed requests; ``size`` and ``shape`` are those of the payload that may grow.
    """
    limit, fixed, flight = point[LIMIT], point[FIXED] != 0, scratch.flight
    mask = flight.shape[2] - 1
    for level in range(1, point[LEVELS]):
        policy = point[POLICIES] + level - 1
        timeout, rejects = policies[policy, LEVEL_TIMEOUT], policies[policy, LEVEL_REJECTS] != 0
        for place in (IN_QUEUE, DELAYED):
            first, last = (ends[0], ends[1]) if place == IN_QUEUE else (ends[2], ends[3])
            for k in range(first, last):
                i = k & mask
                if flight[place, LEVEL, i] != level:
                    continue
                if place == IN_QUEUE and rejects and 0 < timeout < now - flight[place, ARRIVED, i]:
                    continue
                if size == 0:
                    shape = flight[place, SHAPE, i]
                size += flight[place, UNITS, i]
                if size > limit or (not fixed and flight[place, SHAPE, i] != shape):
                    return level
    return int(point[LEVELS])


@compiled
def _is_fresh_next(flight: Ints, queue_head: int, queue_tail: int, delayed_head: int, delayed_tail: int) -> bool:
    """Return whether the next request is one that has not expired: in each level these come first."""
    mask = flight.shape[2] - 1
    if queue_head >= queue_tail or delayed_head >= delayed_tail:
        return queue_head < queue_tail
    fresh, expired = flight[IN_QUEUE, LEVEL, queue_head & mask], flight[DELAYED, LEVEL, delayed_head & mask]
    return bool(fresh <= expired)


@compiled
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


@compiled
def _slot(n: int, state: Ints, head: int, tail: int, prefetch: bool) -> bool:
    """Return whether the batcher may form a payload.

    With prefetch up to 2n payloads may wait for the instances, otherwise one for each idle instance.
    """
    if prefetch:
        return tail - head < 2 * n
    idle = 0
    for j in range(n):
        if state[j] == SLEEPING or state[j] == WAKING:
            idle += 1
    return tail - head < idle


@compiled
def _is_missed(run: int, now: int, missed: int) -> bool:
    """Return whether the batcher runs too early at the end of this execution."""
    return 1e6 * _uniform(run, now) < missed


@compiled
def _preempted_ns(run: int, now: int) -> int:
    """Return how long an instance whose CPU the batcher takes is not idle, exponentially distributed."""
    return 1 + int(-math.log(1 - _uniform(now, run)) * PREEMPTION)


@compiled
def _uniform(a: int, b: int) -> float:
    """Return a hash of two numbers, at least 0 and less than 1. Its modulus is a prime next to a million."""
    modulus = 1_000_003
    a, b = a % modulus, b % modulus
    return ((a * a * 7919 + a * 104729 + b * 31) % modulus) / modulus


@compiled
def _form(
    waiting: int,
    size: int,
    limit: int,
    largest: int,
    samples: int,
    delay: int,
    remaining: int,
    hit: Ints,
    following: Ints,
    next_preferred: int,
) -> tuple[int, int, bool, int]:
    """Decide what the batcher does with ``waiting`` requests and a payload of ``size`` requests that may grow.

    This is the loop over the queue of Triton's ``GetDynamicBatch`` in closed form, as all requests are alike.
    ``remaining`` is the time until the oldest request has waited for the queue delay. Returns the number of requests
    that join the payload, the time to wait instead (0: do not wait), whether the payload is closed, and the number
    of samples at which the next arrival wakes the batcher.
    """
    take = min(waiting, limit - size)
    more = waiting > take  # the next request does not fit
    total = size + take
    best = 0
    closed = False
    if hit[total] > size:
        best = hit[total] - size
    else:
        # The first request beyond the largest preferred size selects the batch without it. Triton does not compare
        # the first request of a new payload, and treats a selected batch of 0 requests as none.
        beyond = max(largest // samples + 1 - size, 1)
        if size + beyond == 1:
            beyond = 2
        examined = take + (1 if more else 0)
        if beyond <= examined:
            closed = True
            best = beyond - 1
            if best == 0 and examined > beyond:
                best = 1
    late = delay > 0 and take > 0 and remaining <= 0
    if best > 0 and not late:
        return best, 0, closed or delay == 0, next_preferred
    if take == 0:
        return 0, 0, closed, next_preferred
    if more or total * samples >= largest:
        return take, 0, True, next_preferred
    if late or delay == 0:
        return take, 0, closed, next_preferred
    next_preferred = following[total] - size * samples
    if size > 0 and hit[size] != size:
        return take, 0, closed, next_preferred
    return take, remaining // 1000 * 1000, closed, next_preferred  # Triton waits for whole microseconds


@compiled
def _form_different(
    queue_head: int,
    fresh: int,
    delayed_head: int,
    expired: int,
    size: int,
    shape: int,
    largest: int,
    now: int,
    next_preferred: int,
    point: Ints,
    scratch: Scratch,
    policies: Ints,
) -> tuple[int, int, bool, int, bool]:
    """Decide as ``_form`` does, for requests that differ in size, shape or expiry.

    This is the loop of Triton's ``GetDynamicBatch``. ``size`` and ``shape`` are those of the payload that may grow.
    In addition returns whether a request of another shape comes next, which closes the payload for good.
    """
    samples, limit, delay, timeout = point[SAMPLES], point[LIMIT], point[DELAY], point[TIMEOUT]
    flight, hit, fixed = scratch.flight, scratch.hit, point[FIXED] != 0
    mask = flight.shape[2] - 1
    pending = count = best = 0
    closed = send = other_shape = False
    oldest = expiry = FOREVER
    queue_tail, delayed_tail = queue_head + fresh, delayed_head + expired
    for _ in range(fresh + expired):
        is_fresh = _is_fresh_next(flight, queue_head, queue_tail, delayed_head, delayed_tail)
        where, i = (IN_QUEUE, queue_head & mask) if is_fresh else (DELAYED, delayed_head & mask)
        units, arrived = flight[where, UNITS, i], flight[where, ARRIVED, i]
        if size + pending > 0:
            if (size + pending + units) * samples > largest and best == 0:
                best, closed = count, True
            if size + pending + units > limit:
                send = True
                break
            if not fixed and flight[where, SHAPE, i] != shape:
                send = other_shape = True
                break
        else:
            shape = flight[where, SHAPE, i]
        pending += units
        count += 1
        queue_head, delayed_head = queue_head + is_fresh, delayed_head + (not is_fresh)
        if point[LEVELS] > 1:
            timeout = policies[point[POLICIES] + flight[where, LEVEL, i] - 1, LEVEL_TIMEOUT]
        oldest = min(oldest, arrived)
        if timeout > 0 and is_fresh:
            expiry = min(expiry, arrived + timeout)
        if hit[size + pending] == size + pending:
            best = count
    late = delay > 0 and (count == 0 or now - oldest >= delay)
    if best > 0 and not late:
        return best, 0, closed or delay == 0, next_preferred, other_shape
    if count == 0:
        return 0, 0, closed, next_preferred, other_shape
    if send or (size + pending) * samples >= largest:
        return count, 0, True, next_preferred, other_shape
    if late or delay == 0:
        return count, 0, closed, next_preferred, other_shape
    next_preferred = scratch.following[size + pending] - size * samples
    if not closed and size > 0 and hit[size] != size:
        return count, 0, closed, next_preferred, other_shape
    wait = min(oldest + delay, expiry) - now
    return count, wait // 1000 * 1000, closed, next_preferred, other_shape


@compiled
def _notify_instance(at: int, state: Ints, when: Ints, asleep: Ints) -> None:
    """Wake the instance that has slept longest, if any sleeps."""
    chosen = -1
    for j in range(len(state)):
        if state[j] == SLEEPING and (chosen < 0 or asleep[j] < asleep[chosen]):
            chosen = j
    if chosen >= 0:
        state[chosen] = WAKING
        when[chosen] = at


@compiled
def _rescale(
    before: int,
    after: int,
    now: int,
    excluded: int,
    state: Ints,
    when: Ints,
    size: Ints,
    since: Ints,
    left: Floats,
    factor: Floats,
    services: Floats,
    service: int,
    stride: int,
) -> None:
    """Change the speed of the running executions as the number of busy instances changes, except ``excluded``."""
    for j in range(len(state)):
        if state[j] != EXECUTING or j == excluded:
            continue
        row = service + (size[j] - 1) * stride
        old, new = services[row + before - 1] * factor[j], services[row + after - 1] * factor[j]
        if old != new:
            left[j] = max(left[j] - (now - since[j]) / old, 0.0)
            since[j] = now
            when[j] = now + int(left[j] * new + 0.5)
