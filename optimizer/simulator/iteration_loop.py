"""The discrete-event loop of continuous batching, compiled to machine code by Numba.

Import this module only where something is simulated: the import loads the compiler. Times are in seconds.
"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import numpy as np

from optimizer.simulator.compilation import CompiledOnce, Floats, Ints, Records, compiled, inlined, record_type

# columns of ``results``
TOKENS_PER_S = 0
TOGETHER = 1  # mean running sequences of a pass
OCCUPIED = 2  # share of the slots that are in use
LATENCIES = 3  # first one of the average, p50, p90, p95 and p99 of each kind
FIRST_RESPONSE, BETWEEN, WHOLE = 0, 1, 2  # kinds of latencies
KINDS = 3
LEVELS = (0.5, 0.9, 0.95, 0.99)
RESULTS = LATENCIES + KINDS * (1 + len(LEVELS))

# sums over the repeats
SECONDS, TOKENS, PASSES, SEQUENCES, RUNNING, MEASURED, WITH_BETWEEN = 0, 1, 2, 3, 4, 5, 6
TOTALS = 7

NEVER = np.inf
NONE = cast(int, np.int64(-1))  # instead of an instance; a literal would have another type
MAX_PASSES = 5  # passes that are simulated together while other instances may change the speed


class ScenarioRow(NamedTuple):
    """A scenario as the loop reads it: a NumPy record with these fields. Times are in seconds.

    Attributes:
        slots: The most running sequences of an instance.
        instances: Instances of the model.
        concurrency: Requests in flight.
        delay: Time that a prompt waits in Triton's batcher for others.
        full_batch: Number of prompts at which they wait no longer.
        fixed: Time of any pass.
        sequence: Further time of a pass for one running sequence.
        power: Exponent of the number of running sequences, by which the further time grows.
        prompt: Time for each token of the prompts of a pass, with their filling.
        round_trip: Mean time of a request outside of its instance.
        prompt_limit: The most tokens of several prompts in a pass, with their filling; 0: no limit.
        kv_tokens: The most tokens of the running sequences of an instance; 0: no limit.
        send: Time to send a response, the last part of a pass.
        random_share: Share of the requests that any instance takes; the others go to the instances in turn.
        warm_up_requests: Requests that end before the interval starts.
        measured_requests: Requests that end in the interval.
        repeats: Simulations with other requests.
    """

    slots: int
    instances: int
    concurrency: int
    delay: float
    full_batch: int
    fixed: float
    sequence: float
    power: float
    prompt: float
    round_trip: float
    prompt_limit: int
    kv_tokens: int
    send: float
    random_share: float
    warm_up_requests: int
    measured_requests: int
    repeats: int


class Stream(NamedTuple):
    """The requests of all simulations: rings of the same length, used cyclically.

    Attributes:
        prompts: Tokens of successive prompts.
        outputs: Tokens of successive outputs.
        delays: Exponentially distributed numbers of mean 1.
    """

    prompts: Ints
    outputs: Ints
    delays: Floats


class Requests(NamedTuple):
    """The requests of a simulation.

    Attributes:
        sent: Time at which each request was sent.
        first: Time of its first response.
        arriving: Requests on the way to the server, in the order of their arrival.
        arrives: Time at which they arrive.
        batcher: Requests in Triton's batcher.
    """

    sent: Floats
    first: Floats
    arriving: Ints
    arrives: Floats
    batcher: Ints


class Instances(NamedTuple):
    """The instances of a simulation; the first index of each array, except ``pass_s``, is the instance.

    Attributes:
        queue: Ring buffer of the requests in its queue.
        queue_head: Slot of the oldest of them.
        queued: Number of them.
        running: Requests of the running sequences.
        lacking: Tokens that these lack.
        active: Number of running sequences.
        kept_tokens: Their tokens, in the KV cache.
        passes: Passes that are computed together.
        admitted: Requests whose prompts are computed before these passes.
        begun: When the passes began.
        ends: When the next event ends: the passes, or the sending of their responses; NEVER if it is idle.
        factor: On the time of the passes.
        is_sending: Whether it sends the responses of the last pass.
        pass_s: Time of a pass by the number of running sequences.
    """

    queue: Ints
    queue_head: Ints
    queued: Ints
    running: Ints
    lacking: Ints
    active: Ints
    kept_tokens: Ints
    passes: Ints
    admitted: Ints
    begun: Floats
    ends: Floats
    factor: Floats
    is_sending: Ints
    pass_s: Floats


class State:
    """The state of a simulation: the fields of a NumPy record, all 0 at first."""

    offset: int  # index of the first request in the rings
    now: float
    # requests: how many were sent, have ended, were measured
    issued: int
    ended: int
    measured: int
    with_between: int  # measured ones with more than one token
    enough: int  # measured ones at which the simulation ends
    # requests on the way to the server are from head to tail
    head: int
    tail: int
    # the batcher
    in_batcher: int
    due: float  # when the oldest prompt has waited long enough; NEVER without one
    # the instances
    next_instance: int
    busy: int
    # the interval
    opened: float
    closed: float


SCENARIO_RECORD = record_type(ScenarioRow)
STATE_RECORD = record_type(State)


@CompiledOnce
def simulate_scenarios(
    scenarios: Records, factors: Floats, prompts: Ints, outputs: Ints, delays: Floats, results: Floats
) -> None:
    """Simulate each row of ``scenarios`` in a closed loop, and write its row of ``results``.

    Args:
        scenarios: [scenarios] records of the type SCENARIO_RECORD.
        factors: [scenarios, instances], on the time of a pass that begins while 1, 2, … instances are busy.
        prompts: [ring], tokens of successive prompts; used cyclically.
        outputs: [ring], tokens of successive outputs.
        delays: [ring], exponentially distributed numbers of mean 1.
        results: [scenarios, RESULTS].
    """
    stream = Stream(prompts, outputs, delays)
    for i in range(len(scenarios)):
        scenario, result = scenarios[i], results[i]
        requests, repeats = scenario.measured_requests, scenario.repeats
        times, totals = np.empty((KINDS, requests * repeats)), np.zeros(TOTALS)
        for repeat in range(repeats):
            states = np.zeros(1, STATE_RECORD)
            states[0].offset = repeat * len(prompts) // repeats
            _simulate(states[0], scenario, factors[i], stream, times, totals)
        seconds, passes = totals[SECONDS], max(totals[PASSES], 1.0)
        result[TOKENS_PER_S] = totals[TOKENS] / seconds
        result[TOGETHER] = max(totals[SEQUENCES] / passes, 1.0)
        result[OCCUPIED] = min(totals[RUNNING] / seconds / scenario.instances / scenario.slots, 1.0)
        column = LATENCIES
        for kind in range(KINDS):
            count = int(totals[WITH_BETWEEN]) if kind == BETWEEN else requests * repeats
            ordered = np.sort(times[kind, :count])
            result[column] = np.mean(ordered) if count > 0 else np.nan
            column += 1
            for level in LEVELS:
                result[column] = ordered[int(level * (count - 1) + 0.5)] if count > 0 else np.nan
                column += 1


@compiled
def _simulate(
    state: State, scenario: ScenarioRow, factors: Floats, stream: Stream, times: Floats, totals: Floats
) -> None:
    """Add one simulation to ``times`` [KINDS, requests] and ``totals``."""
    number, concurrency = scenario.instances, scenario.concurrency
    slots = min(scenario.slots, concurrency)
    total = scenario.warm_up_requests + scenario.measured_requests + concurrency
    requests = Requests(
        np.empty(total), np.empty(total), np.empty(total, np.int64), np.empty(total), np.empty(concurrency, np.int64)
    )
    instances = Instances(
        np.empty((number, concurrency), np.int64),
        np.zeros(number, np.int64),
        np.zeros(number, np.int64),
        np.empty((number, slots), np.int64),
        np.empty((number, slots), np.int64),
        np.zeros(number, np.int64),
        np.zeros(number, np.int64),
        np.zeros(number, np.int64),
        np.zeros(number, np.int64),
        np.zeros(number),
        np.full(number, NEVER),
        np.ones(number),
        np.zeros(number, np.bool_),
        scenario.fixed + scenario.sequence * np.arange(slots + 1) ** scenario.power,
    )
    state.due = NEVER
    state.measured, state.with_between = int(totals[MEASURED]), int(totals[WITH_BETWEEN])
    state.enough = state.measured + scenario.measured_requests
    _send_first(state, scenario, requests, instances.pass_s[1] * factors[0] * np.mean(stream.outputs))
    while state.measured < state.enough:
        j = int(np.argmin(instances.ends))
        end, arrival = instances.ends[j], requests.arrives[state.head] if state.head < state.tail else NEVER
        if end > arrival or end > state.due:
            j = _advance_batcher(state, scenario, stream, requests, instances)
            if j < 0 or instances.ends[j] < NEVER:
                continue
        elif instances.is_sending[j]:
            state.now = end
            instances.is_sending[j], instances.ends[j] = False, NEVER
            state.busy -= 1
        else:
            _end_passes(state, scenario, stream, requests, instances, times, totals, j)
            continue
        longest = _admit(state, scenario, stream, instances, j)
        if instances.active[j] > 0:
            _begin_passes(state, scenario, factors, requests, instances, longest, j)
    totals[SECONDS] += state.closed - state.opened
    totals[MEASURED], totals[WITH_BETWEEN] = state.measured, state.with_between


@inlined
def _send_first(state: State, scenario: ScenarioRow, requests: Requests, alone: float) -> None:
    """Send the first requests, spread over the time ``alone`` that one takes alone."""
    concurrency = scenario.concurrency
    for i in range(concurrency):
        requests.sent[i] = alone * i / concurrency
        requests.arriving[i], requests.arrives[i] = i, requests.sent[i] + scenario.round_trip / 2
    state.issued = state.tail = concurrency


@inlined
def _advance_batcher(
    state: State, scenario: ScenarioRow, stream: Stream, requests: Requests, instances: Instances
) -> int:
    """Let a request arrive, or the wait of the oldest prompt end.

    Return the instance that gets the prompts in the batcher; NONE if they wait for others.
    """
    arrival = requests.arrives[state.head] if state.head < state.tail else NEVER
    if arrival <= state.due:
        state.now = arrival
        requests.batcher[state.in_batcher] = requests.arriving[state.head]
        state.head += 1
        state.in_batcher += 1
        if state.in_batcher == 1:
            state.due = state.now + scenario.delay
        if scenario.delay > 0 and state.in_batcher < scenario.full_batch:
            return NONE
    else:
        state.now = state.due
    j = _take_instance(state, scenario, stream, requests.batcher[0], len(instances.ends))
    concurrency = instances.queue.shape[1]
    for k in range(state.in_batcher):
        instances.queue[j, (instances.queue_head[j] + instances.queued[j]) % concurrency] = requests.batcher[k]
        instances.queued[j] += 1
    state.in_batcher, state.due = 0, NEVER
    return j


@inlined
def _take_instance(state: State, scenario: ScenarioRow, stream: Stream, request: int, number: int) -> int:
    """Return the instance of ``number`` for the batch that begins with ``request``.

    Triton wakes the instance that has waited longest for requests, with few exceptions.
    """
    delays, position = stream.delays, request + state.offset
    if number > 1 and math.exp(-delays[(7 * position + 3) % len(delays)]) < scenario.random_share:
        return int(math.exp(-delays[(5 * position + 11) % len(delays)]) * number)
    j = state.next_instance
    state.next_instance = (j + 1) % number
    return j


@inlined
def _admit(state: State, scenario: ScenarioRow, stream: Stream, instances: Instances, j: int) -> int:
    """Admit requests from the queue of instance ``j``. Return the tokens of the longest prompt among them."""
    concurrency, slots, ring = instances.queue.shape[1], instances.running.shape[1], len(stream.prompts)
    new = longest = 0
    while instances.queued[j] > 0 and instances.active[j] < slots:
        request, count = instances.queue[j, instances.queue_head[j]], instances.active[j]
        length, output = (
            stream.prompts[(request + state.offset) % ring],
            stream.outputs[(request + state.offset) % ring],
        )
        if new > 0 and 0 < scenario.prompt_limit < max(longest, length) * (new + 1):
            break
        if count > 0 and 0 < scenario.kv_tokens < instances.kept_tokens[j] + length + output:
            break
        longest = max(longest, length)
        instances.queue_head[j] = (instances.queue_head[j] + 1) % concurrency
        instances.queued[j] -= 1
        instances.kept_tokens[j] += length + output
        instances.running[j, count], instances.lacking[j, count] = request, output - 1
        instances.active[j] += 1
        new += 1
    instances.admitted[j] = new
    return longest


@inlined
def _begin_passes(
    state: State,
    scenario: ScenarioRow,
    factors: Floats,
    requests: Requests,
    instances: Instances,
    longest: int,
    j: int,
) -> None:
    """Begin the passes of instance ``j`` up to the next one that may change its running sequences."""
    count, new, slots = instances.active[j], instances.admitted[j], instances.running.shape[1]
    factor = instances.factor[j] = factors[state.busy]
    state.busy += 1
    instances.begun[j] = now = state.now
    if new > 0:
        now += factor * (scenario.fixed + scenario.prompt * longest * new)
        for k in range(count - new, count):
            requests.first[instances.running[j, k]] = now
    passes = instances.lacking[j, 0]
    for k in range(1, count):
        passes = min(passes, instances.lacking[j, k])
    if passes == 0:  # outputs of one token end with the prompts; the others wait for their next pass
        instances.passes[j], instances.ends[j] = 0, now
        return
    step = factor * instances.pass_s[count]
    if count == slots:  # no request can be admitted before a sequence ends
        if len(instances.ends) > 1:
            passes = min(passes, MAX_PASSES)
    elif passes > 1:  # nothing changes before the next request may arrive
        horizon = min(requests.arrives[state.head] if state.head < state.tail else NEVER, state.due)
        for end in instances.ends:
            horizon = min(horizon, end + scenario.round_trip / 2)
        if horizon < now + step * passes:
            passes = 1 + max(0, int((horizon - now) / step))
    instances.passes[j] = passes
    instances.ends[j] = now + step * passes - factor * scenario.send * (count - 1)


@inlined
def _end_passes(
    state: State,
    scenario: ScenarioRow,
    stream: Stream,
    requests: Requests,
    instances: Instances,
    times: Floats,
    totals: Floats,
    j: int,
) -> None:
    """End the passes of instance ``j``, which begins to send the responses of the last one."""
    now, count, passes = instances.ends[j], instances.active[j], instances.passes[j]
    sending = scenario.send * instances.factor[j]
    instances.is_sending[j], instances.ends[j] = True, now + sending * (count - 1)
    if state.ended >= scenario.warm_up_requests:
        totals[TOKENS] += instances.admitted[j] + passes * count
        totals[PASSES] += passes
        totals[SEQUENCES] += passes * count
        totals[RUNNING] += (now - max(instances.begun[j], state.opened)) * count
    for k in range(count):
        instances.lacking[j, k] -= passes
        if instances.lacking[j, k] <= 0:
            request = instances.running[j, k]
            index = (request + state.offset) % len(stream.prompts)
            instances.kept_tokens[j] -= stream.prompts[index] + stream.outputs[index]
            _end_request(state, scenario, stream, requests, times, request, now + sending * k)
    kept = 0
    while kept < instances.active[j]:
        if instances.lacking[j, kept] > 0:
            kept += 1
        else:  # the last sequence moves to the free slot
            last = instances.active[j] = instances.active[j] - 1
            instances.running[j, kept] = instances.running[j, last]
            instances.lacking[j, kept] = instances.lacking[j, last]


@inlined
def _end_request(
    state: State, scenario: ScenarioRow, stream: Stream, requests: Requests, times: Floats, request: int, end: float
) -> None:
    """Count ``request``, whose last response is sent at ``end``, and let its client send the next one."""
    ring, one_way = len(stream.outputs), scenario.round_trip / 2
    length = stream.outputs[(request + state.offset) % ring]
    state.ended += 1
    if state.ended == scenario.warm_up_requests:
        state.opened = end
    elif state.ended > scenario.warm_up_requests and state.measured < state.enough:
        times[FIRST_RESPONSE, state.measured] = requests.first[request] - requests.sent[request] + one_way
        times[WHOLE, state.measured] = end - requests.sent[request] + one_way
        if length > 1:
            times[BETWEEN, state.with_between] = (end - requests.first[request]) / (length - 1)
            state.with_between += 1
        state.measured += 1
        state.closed = end
    if state.issued < len(requests.sent):
        requests.sent[state.issued] = end + one_way
        at = requests.sent[state.issued] + one_way * stream.delays[(state.issued + state.offset) % ring]
        _insert(state, requests, state.issued, at)
        state.issued += 1


@inlined
def _insert(state: State, requests: Requests, request: int, at: float) -> None:
    """Insert ``request``, which arrives ``at`` this time, into those on the way."""
    arriving, arrives = requests.arriving, requests.arrives
    slot = state.tail
    while slot > state.head and arrives[slot - 1] > at:
        arriving[slot], arrives[slot] = arriving[slot - 1], arrives[slot - 1]
        slot -= 1
    arriving[slot], arrives[slot] = request, at
    state.tail += 1
