"""The event loop of the simulator, compiled. Times are whole nanoseconds, batches are counted in requests.

It follows ``dynamic_batch_scheduler.cc``, ``instance_queue.cc`` and ``rate_limiter.cc`` of the Triton core. All
requests of a run carry the same number of samples and are served first in, first out without skipping, so that
every queue is a range of request numbers:

    0 .. started   taken by an instance
    .. formed      in payloads that wait for an instance
    .. arrived     in the batcher's queue
    .. issued      sent, or due to be sent

Everything compiled is in this file: a change of any other file would not renew the stored machine code.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from optimizer.batcher.compiled import compiled

Ints: TypeAlias = npt.NDArray[Any]  # int64
Floats: TypeAlias = npt.NDArray[Any]  # float64

# columns of ``points``
SAMPLES = 0  # of a request
LIMIT = 1  # the most requests in a batch
INSTANCES = 2
BATCHING = 3  # 0: each request is a payload
DELAY = 4
FIXED = 5  # input shapes do not vary, so not every arrival wakes the batcher
PREFETCH = 6
SIZES_FROM = 7  # range of ``preferred``
SIZES_TO = 8
SERVICE = 9  # where in ``services`` the time of one request on one busy instance is
STRIDE = 10  # columns of that table
CONCURRENCY = 11  # 0: an open loop
ARRIVALS_FROM = 12  # range of ``arrivals``
ARRIVALS_TO = 13
WARM_UP = 14  # requests to complete before the window opens
WANTED = 15  # requests to complete in the window
SEND = 16
RECEIVE = 17
CLIENT = 18
SPACING = 19
WAKE = 20
DISPATCH = 21
RELEASE = 22
COLUMNS = 23

# columns of ``results``
DURATION = 0
REQUESTS = 1
EXECUTIONS = 2
LATENCY = 3  # the sum over requests
P50 = 4
P90 = 5
P95 = 6
P99 = 7
QUEUE = 8  # the sum over requests
BUSY = 9  # the integral of the number of busy instances
OVERLOADED = 10
RESULTS = 11

# columns of the two logs
EXECUTION_COLUMNS = 5  # instance, start, end, first request, requests
REQUEST_COLUMNS = 2  # sent, arrived

FOREVER = 2**62
IDLE_WAIT = 500_000_000  # the batcher looks again after so long, whether notified or not
FEWEST_TO_JUDGE = 30  # arrivals: from fewer no trend is told

SLEEPING = 0
WAKING = 1
EXECUTING = 2
RELEASING = 3


@compiled
def simulate_points(
    points: Ints,
    preferred: Ints,
    services: Floats,
    factors: Floats,
    delays: Ints,
    gaps: Ints,
    arrivals: Ints,
    in_flight: int,
    most_measured: int,
    results: Floats,
    executions: Ints,
    requests: Ints,
) -> None:
    """Run each row of ``points`` and write the same row of ``results``.

    ``preferred``, ``services`` (ns) and ``arrivals`` (send times, ns) hold the arrays of all points end to end.
    ``factors`` multiply the service times of successive executions, ``delays`` (ns) come on top of the way in of
    successive requests, ``gaps`` (ns) on top of the distance to the one before; all three are used in a ring.
    ``in_flight`` is the most requests that any point has under way, ``most_measured`` the most that its window can
    hold. The logs are filled as far as they reach; empty ones cost nothing.
    """
    instances = 1
    limit = 1
    for row in range(points.shape[0]):
        instances = max(instances, points[row, INSTANCES])
        limit = max(limit, points[row, LIMIT])
    ring = 1
    while ring < in_flight + 2:
        ring *= 2
    sent_at = np.empty(ring, np.int64)
    arrive_at = np.empty(ring, np.int64)
    payloads = np.empty(ring, np.int64)
    latencies = np.empty(most_measured, np.int64)
    hit = np.empty(limit + 1, np.int64)
    following = np.empty(limit + 1, np.int64)
    held = np.empty((instances, min(limit, ring)), np.int64)
    for row in range(points.shape[0]):
        _simulate_point(
            points[row],
            preferred,
            services,
            factors,
            delays,
            gaps,
            arrivals,
            sent_at,
            arrive_at,
            payloads,
            latencies,
            hit,
            following,
            held,
            results[row],
            executions,
            requests,
        )


@compiled
def _simulate_point(
    point: Ints,
    preferred: Ints,
    services: Floats,
    factors: Floats,
    delays: Ints,
    gaps: Ints,
    arrivals: Ints,
    sent_at: Ints,
    arrive_at: Ints,
    payloads: Ints,
    latencies: Ints,
    hit: Ints,
    following: Ints,
    held: Ints,
    result: Floats,
    executions: Ints,
    requests: Ints,
) -> None:
    """One point. The arrays from ``sent_at`` to ``held`` are scratch space, its content of no matter.

    ``sent_at`` and ``arrive_at`` are rings over requests, ``payloads`` is one over payloads (requests in each).
    """
    samples, limit, n = point[SAMPLES], point[LIMIT], point[INSTANCES]
    batching, delay, fixed, prefetch = point[BATCHING] != 0, point[DELAY], point[FIXED] != 0, point[PREFETCH] != 0
    concurrency, warm_up, wanted = point[CONCURRENCY], point[WARM_UP], point[WANTED]
    send, receive, client, spacing = point[SEND], point[RECEIVE], point[CLIENT], point[SPACING]
    wake, dispatch, release = point[WAKE], point[DISPATCH], point[RELEASE]
    service, stride = point[SERVICE], point[STRIDE]
    mask = len(sent_at) - 1

    largest = _tabulate(preferred[point[SIZES_FROM] : point[SIZES_TO]], samples, limit, hit, following)

    # requests
    started = formed = arrived = completed = issued = 0
    last_arrival = -spacing
    if concurrency > 0:
        total, initial = FOREVER, concurrency
    else:
        total = initial = point[ARRIVALS_TO] - point[ARRIVALS_FROM]
    for i in range(initial):
        sent = arrivals[point[ARRIVALS_FROM] + i] if concurrency == 0 else 0
        last_arrival = max(sent + send, last_arrival + spacing + gaps[issued % len(gaps)])
        _issue(sent, last_arrival + delays[issued % len(delays)], arrived, issued, sent_at, arrive_at, mask)
        issued += 1
    last_response = -spacing

    # payloads head..tail wait for an instance; the batcher may still add to ``current``
    head = tail = 0
    current = -1  # not queued yet
    frozen = -1  # the head, if an instance refused to merge it
    current_size = 0
    saturated = False
    next_preferred = 0
    batcher_at = IDLE_WAIT

    # instances
    state = np.zeros(n, np.int64)
    when = np.full(n, FOREVER, np.int64)  # of its next event
    asleep = np.arange(n).astype(np.int64)  # order of falling asleep
    naps = n
    size = np.zeros(n, np.int64)
    since = np.zeros(n, np.int64)
    left = np.zeros(n, np.float64)  # share of the execution still to do at ``since``
    factor = np.ones(n, np.float64)
    run = np.zeros(n, np.int64)  # number of its execution
    waited = np.zeros(n, np.int64)  # sum over its requests
    busy = 0

    # the window: it opens and closes as the same instance ends an execution, so that it holds whole cycles
    measuring = warm_up == 0
    opened = 0
    anchor = -1
    at_anchor = False
    last_ender = -1
    measured = runs = batches = latency_sum = queue_sum = busy_area = last_end = 0

    # an open loop overloads the server if over the last third of the arrivals the queue is never empty and grows:
    # its least length in the second half of them is above that in the first
    third, sixth = total - total // 3, total - total // 6
    least_waiting = earlier_waiting = 0
    overloaded = False

    now = 0
    while True:
        ended = woken = FOREVER
        ender = waker = -1
        for j in range(n):
            if state[j] == WAKING:
                if when[j] < woken:
                    woken, waker = when[j], j
            elif when[j] < ended:
                ended, ender = when[j], j
        due = arrive_at[arrived & mask] if arrived < issued else FOREVER
        time = min(min(ended, due), min(batcher_at, woken))

        if time > now:
            if completed >= total:
                break
            if measuring:
                if measured >= wanted and last_end == now and (at_anchor or measured >= 2 * wanted):
                    break
            elif completed >= warm_up and last_end == now:
                measuring = True
                opened, anchor = now, last_ender
            if measuring:
                busy_area += busy * (time - now)
            now = time
            at_anchor = False

        taker = -1  # the instance that looks for a payload
        notified = False  # the batcher is
        if ended == now:  # an instance finishes an execution, or is ready for the next
            j = ender
            if state[j] == EXECUTING:
                busy -= 1
                _rescale(busy + 1, busy, now, j, state, when, size, since, left, factor, services, service, stride)
                count = size[j]
                completed += count
                last_end, last_ender = now, j
                at_anchor = at_anchor or j == anchor or anchor < 0
                if measuring:
                    batches += 1
                    queue_sum += waited[j]
                for i in range(count):
                    last_response = max(now + receive, last_response + spacing)
                    if measuring:
                        latency = last_response - held[j, i]
                        latencies[measured] = latency
                        latency_sum += latency
                        measured += 1
                    if concurrency > 0:
                        sent = last_response + client
                        last_arrival = max(sent + send, last_arrival + spacing + gaps[issued % len(gaps)])
                        at = last_arrival + delays[issued % len(delays)]
                        _issue(sent, at, arrived, issued, sent_at, arrive_at, mask)
                        issued += 1
                if run[j] < len(executions):
                    executions[run[j], 2] = now
                state[j] = RELEASING
                when[j] = now + release
            if state[j] == RELEASING and when[j] == now:
                notified = batching
                taker = j
        elif due == now:  # a request arrives
            i = arrived & mask
            if arrived < len(requests):
                requests[arrived, 0] = sent_at[i]
                requests[arrived, 1] = arrive_at[i]
            arrived += 1
            if arrived == third:
                least_waiting = arrived - started
            elif arrived == sixth:
                earlier_waiting, least_waiting = least_waiting, arrived - started
            elif arrived == total:
                overloaded = 0 < earlier_waiting < least_waiting and total >= FEWEST_TO_JUDGE
            if batching:
                if _slot(n, state, head, tail, prefetch):
                    stale = current >= 0 and (current < head or current == frozen)
                    notified = not fixed or saturated or stale or (arrived - formed) * samples >= next_preferred
            else:
                payloads[tail & mask] = 1
                tail += 1
                formed += 1
                _notify_instance(now + dispatch, state, when, asleep)
        elif batcher_at == now:  # the batcher runs
            while True:
                if saturated or (current >= 0 and (current < head or current == frozen)):
                    current, current_size, saturated, next_preferred = -1, 0, False, 0
                if formed == arrived or not _slot(n, state, head, tail, prefetch):
                    batcher_at = now + IDLE_WAIT
                    break
                oldest = arrive_at[formed & mask]
                pending, wait, saturated, next_preferred = _form(
                    arrived - formed,
                    current_size,
                    limit,
                    largest,
                    samples,
                    delay,
                    oldest + delay - now,
                    hit,
                    following,
                    next_preferred,
                )
                if wait > 0:
                    batcher_at = now + wait + wake
                    break
                if pending > 0:
                    current_size += pending
                    formed += pending
                    if current < 0:
                        current = tail
                        tail += 1
                        _notify_instance(now + dispatch, state, when, asleep)
                    payloads[current & mask] = current_size
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
                count = payloads[head & mask]
                head += 1
                if delay > 0 and limit * samples > 1:
                    while head < tail and now - arrive_at[(started + count) & mask] > delay:
                        frozen = head
                        if count + payloads[head & mask] > limit:
                            break
                        count += payloads[head & mask]
                        head += 1
                waited[j] = 0
                for i in range(count):
                    held[j, i] = sent_at[(started + i) & mask]
                    waited[j] += now - arrive_at[(started + i) & mask]
                size[j] = count
                started += count
                least_waiting = min(least_waiting, arrived - started)
                busy += 1
                _rescale(busy - 1, busy, now, j, state, when, size, since, left, factor, services, service, stride)
                factor[j] = factors[runs % len(factors)]
                span = services[service + (count - 1) * stride + busy - 1] * factor[j]
                state[j], since[j], left[j] = EXECUTING, now, 1.0
                when[j] = now + max(int(span + 0.5), 1)
                run[j] = runs
                if runs < len(executions):
                    executions[runs, 0], executions[runs, 1], executions[runs, 2] = j, now, -1
                    executions[runs, 3], executions[runs, 4] = started - count, count
                runs += 1
                notified = batching
        if notified:
            batcher_at = min(batcher_at, now + wake)

    result[DURATION] = last_end - opened
    result[REQUESTS] = measured
    result[EXECUTIONS] = batches
    result[LATENCY] = latency_sum
    last = measured - 1
    for column, percent in ((P99, 99.0), (P95, 95.0), (P90, 90.0), (P50, 50.0)):
        # as perf_analyzer takes it: the element nearest to that share of the way, halves upwards
        rank = int(percent / 100.0 * (measured - 1) + 0.5)
        result[column] = _select(latencies, last, rank) if measured > 0 else np.nan
        last = rank
    result[QUEUE] = queue_sum
    result[BUSY] = busy_area
    result[OVERLOADED] = 1.0 if overloaded else 0.0


@compiled
def _issue(sent: int, at: int, arrived: int, issued: int, sent_at: Ints, arrive_at: Ints, mask: int) -> None:
    """Put a request among those on the way, ``arrived .. issued``, in the order of arrival."""
    k = issued
    while k > arrived and arrive_at[(k - 1) & mask] > at:
        sent_at[k & mask], arrive_at[k & mask] = sent_at[(k - 1) & mask], arrive_at[(k - 1) & mask]
        k -= 1
    sent_at[k & mask], arrive_at[k & mask] = sent, at


@compiled
def _tabulate(preferred: Ints, samples: int, limit: int, hit: Ints, following: Ints) -> int:
    """Write for each number of requests in a batch how it stands to the ascending preferred sizes (in samples).

    ``hit``: the largest number up to it whose samples are a preferred size, or 0. ``following``: the next
    preferred size above it, else the smallest. Returns the largest preferred size.
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
    """Whether the batcher may form a payload: up to 2n wait ahead of the instances, else one for each idle one."""
    if prefetch:
        return tail - head < 2 * n
    idle = 0
    for j in range(n):
        if state[j] == SLEEPING or state[j] == WAKING:
            idle += 1
    return tail - head < idle


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
    """What the batcher does with ``waiting`` requests and a payload of ``size`` that may grow.

    The loop over the queue of ``GetDynamicBatch`` in closed form, since all requests are alike. ``remaining`` is
    the time until the oldest has waited for the delay. Returns how many requests join the payload, how long to
    wait instead if that is not 0, whether the payload is closed, and how many samples are worth waking up for.
    """
    take = min(waiting, limit - size)
    more = waiting > take  # and the next does not fit
    total = size + take
    best = 0
    closed = False
    if hit[total] > size:
        best = hit[total] - size
    else:
        # the first request beyond the largest preferred size marks the batch without it; the first of a new
        # payload is not compared, and a mark of nothing is taken for none
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
    return take, remaining // 1000 * 1000, closed, next_preferred  # it waits for whole microseconds


@compiled
def _notify_instance(at: int, state: Ints, when: Ints, asleep: Ints) -> None:
    """Wake the instance that has slept longest; nothing where none sleeps."""
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
    but: int,
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
    """As the number of busy instances changes, what is left of each execution goes on at the new speed."""
    for j in range(len(state)):
        if state[j] != EXECUTING or j == but:
            continue
        row = service + (size[j] - 1) * stride
        old, new = services[row + before - 1] * factor[j], services[row + after - 1] * factor[j]
        if old != new:
            left[j] = max(left[j] - (now - since[j]) / old, 0.0)
            since[j] = now
            when[j] = now + int(left[j] * new + 0.5)


@compiled
def _select(values: Ints, last: int, k: int) -> int:
    """The k-th smallest of ``values[: last + 1]``, which is moved to place k, none before it being larger."""
    start = 0
    while start < last:
        low, middle, high = values[start], values[(start + last) // 2], values[last]
        pivot = max(min(low, middle), min(max(low, middle), high))
        i, j = start, last
        while i <= j:
            while values[i] < pivot:
                i += 1
            while values[j] > pivot:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if k <= j:
            last = j
        elif k >= i:
            start = i
        else:
            break
    found: int = values[k]
    return found
