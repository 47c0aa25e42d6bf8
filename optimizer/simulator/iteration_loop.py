"""The discrete-event loop of continuous batching, compiled to machine code by Numba.

Import this module only where something is simulated: the import loads the compiler. Times are in seconds.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from optimizer.simulator.event_loop import compiled

Ints: TypeAlias = npt.NDArray[Any]  # int64
Floats: TypeAlias = npt.NDArray[Any]  # float64

# columns of ``scenarios``
SLOTS = 0  # running sequences of an instance
INSTANCES = 1
CONCURRENCY = 2
DELAY = 3  # time that a prompt waits in Triton's batcher for others
FULL = 4  # prompts that do not wait any longer
FIXED = 5  # time of any pass
SEQUENCE = 6  # further time of a pass for one running sequence
POWER = 7  # exponent of the number of running sequences, by which the further time grows
PROMPT = 8  # time for each token of a prompt, with the filling
ROUND_TRIP = 9  # time of a request outside of the instance, half of it before the request is queued
PASS_TOKENS = 10  # the most tokens of several prompts in a pass, with the filling; 0: no limit
KV_TOKENS = 11  # the most tokens of the running sequences of an instance; 0: no limit
RANDOM = 12  # share of the requests that any instance may take; the others go to the instances in turn
WARM_UP = 13  # requests that end before the interval starts
WANTED = 14  # requests that end in the interval
REPEATS = 15  # of the simulation, with other requests
SEND = 16  # time to send a response, part of the time of a sequence
COLUMNS = 17

# columns of ``results``
TOKENS_PER_SECOND = 0
TOGETHER = 1  # mean running sequences of a pass
OCCUPIED = 2  # share of the slots that are in use
LATENCIES = 3  # of this column and the next ones: average, p50, p90, p95 and p99 of each kind of latency
KINDS = 3  # time to the first response, inter-token latency, latency
STATISTICS = 5
RESULTS = LATENCIES + KINDS * STATISTICS

# sums over the repeats
SECONDS, TOKENS, PASSES, SEQUENCES, RUNNING, MEASURED, WITH_ITL = range(7)
TOTALS = 7

NEVER = np.inf
MOST_FURTHER = 4  # passes that are simulated together while other instances may change the speed


@compiled
def simulate_scenarios(
    scenarios: Floats, factors: Floats, prompts: Ints, outputs: Ints, delays: Floats, results: Floats
) -> None:
    """Simulate each row of ``scenarios`` in a closed loop, and write its row of ``results``.

    Args:
        scenarios: [scenarios, COLUMNS].
        factors: [scenarios, instances], on the time of a pass that begins while 1, 2, … instances are busy.
        prompts: [ring], tokens of successive prompts; used cyclically.
        outputs: [ring], tokens of successive outputs.
        delays: [ring], factors of mean 1 on the way to the server of successive requests.
        results: [scenarios, RESULTS].
    """
    for i in range(len(scenarios)):
        scenario, result = scenarios[i], results[i]
        wanted, repeats = int(scenario[WANTED]), int(scenario[REPEATS])
        times, totals = np.empty((KINDS, wanted * repeats)), np.zeros(TOTALS)
        for repeat in range(repeats):
            offset = repeat * (len(prompts) // repeats)
            _simulate(scenario, factors[i], prompts, outputs, delays, offset, times, totals)
        seconds = totals[SECONDS]
        result[TOKENS_PER_SECOND] = totals[TOKENS] / seconds
        result[TOGETHER] = totals[SEQUENCES] / totals[PASSES] if totals[PASSES] > 0 else 1.0
        result[OCCUPIED] = min(1.0, totals[RUNNING] / seconds / scenario[INSTANCES] / scenario[SLOTS])
        _summarize(times, wanted * repeats, int(totals[WITH_ITL]), result)


@compiled
def _simulate(
    cell: Floats,
    factors: Floats,
    prompts: Ints,
    outputs: Ints,
    delays: Floats,
    offset: int,
    times: Floats,
    totals: Floats,
) -> None:
    """Add one simulation to ``times`` [KINDS, requests] and ``totals`` [TOTALS]. ``offset`` is its first request."""
    instances, concurrency, ring = int(cell[INSTANCES]), int(cell[CONCURRENCY]), len(prompts)
    slots = min(int(cell[SLOTS]), concurrency)
    delay, full = cell[DELAY], int(cell[FULL])
    fixed, prompt_token, one_way = cell[FIXED], cell[PROMPT], cell[ROUND_TRIP] / 2
    pass_tokens, kv_tokens = int(cell[PASS_TOKENS]), int(cell[KV_TOKENS])
    pass_s = fixed + cell[SEQUENCE] * np.arange(slots + 1) ** cell[POWER]  # by running sequences
    send = cell[SEND]
    warm_up, wanted = int(cell[WARM_UP]), int(cell[WANTED])
    total = warm_up + wanted + concurrency

    sent, first = np.empty(total), np.empty(total)
    # requests on the way to the server, in the order of their arrival
    arriving, arrives = np.empty(total, np.int64), np.empty(total)
    head = tail = 0
    # requests in Triton's batcher and in the queue of each instance; at most ``concurrency`` exist at a time
    batcher = np.empty(concurrency, np.int64)
    in_batcher, due = 0, NEVER
    queue, queue_head = np.empty((instances, concurrency), np.int64), np.zeros(instances, np.int64)
    queued = np.zeros(instances, np.int64)
    # running sequences of each instance with the tokens that they lack
    running, lacking = np.empty((instances, slots), np.int64), np.empty((instances, slots), np.int64)
    count, kept_tokens = np.zeros(instances, np.int64), np.zeros(instances, np.int64)
    steps, ends = np.zeros(instances, np.int64), np.full(instances, NEVER)
    speed = np.ones(instances)
    begun, admitted = np.zeros(instances), np.zeros(instances, np.int64)
    is_sending = np.zeros(instances, np.bool_)
    next_instance = busy = 0

    base, with_itl = int(totals[MEASURED]), int(totals[WITH_ITL])
    ended = measured = 0
    opened = closed = now = sending = tokens = passes = sequences = area = 0.0
    # the first requests are spread over the time that one takes alone
    alone = pass_s[1] * factors[0] * np.mean(outputs)
    for i in range(concurrency):
        sent[i] = alone * i / concurrency
        arriving[i], arrives[i] = i, sent[i] + one_way
    issued = tail = concurrency

    while measured < wanted:
        j = 0
        for other in range(1, instances):
            if ends[other] < ends[j]:
                j = other
        arrival = arrives[head] if head < tail else NEVER
        flush, started = 0, -1
        if ends[j] <= arrival and ends[j] <= due and not is_sending[j]:  # the passes of an instance are computed
            now = ends[j]
            sending = send * speed[j]
            ends[j] = now + sending * (count[j] - 1)
            is_sending[j] = True
            if warm_up <= ended:
                tokens += admitted[j] + steps[j] * count[j]
                passes += steps[j]
                sequences += steps[j] * count[j]
                area += (now - max(begun[j], opened)) * count[j]
            for k in range(count[j]):
                lacking[j, k] -= steps[j]
                if lacking[j, k] > 0:
                    continue
                request, at = running[j, k], now + sending * k
                length = outputs[(request + offset) % ring]
                kept_tokens[j] -= prompts[(request + offset) % ring] + length
                ended += 1
                if ended == warm_up:
                    opened = at
                elif ended > warm_up and measured < wanted:
                    times[0, base + measured] = first[request] - sent[request] + one_way
                    times[2, base + measured] = at - sent[request] + one_way
                    if length > 1:
                        times[1, with_itl] = (at - first[request]) / (length - 1)
                        with_itl += 1
                    measured += 1
                    closed = at
                if issued < total:
                    sent[issued] = at + one_way
                    arrives_at = sent[issued] + one_way * delays[(issued + offset) % ring]
                    _insert(issued, arrives_at, arriving, arrives, head, tail)
                    issued += 1
                    tail += 1
            k = 0
            while k < count[j]:
                if lacking[j, k] > 0:
                    k += 1
                    continue
                count[j] -= 1  # the last sequence moves to the free slot
                running[j, k], lacking[j, k] = running[j, count[j]], lacking[j, count[j]]
        elif ends[j] <= arrival and ends[j] <= due:  # all responses of the passes are sent
            now = ends[j]
            is_sending[j] = False
            busy -= 1
            started = j
        elif arrival <= due:  # a request arrives
            now = arrival
            request = arriving[head]
            head += 1
            batcher[in_batcher] = request
            in_batcher += 1
            if delay <= 0 or in_batcher >= full:
                flush = in_batcher
            elif in_batcher == 1:
                due = now + delay
        else:  # the oldest prompt in the batcher has waited long enough
            now = due
            flush = in_batcher
        if flush > 0:
            # an instance takes all of them; Triton wakes the one that has waited longest for requests
            j = next_instance
            draw = delays[(batcher[0] * 7 + offset + 3) % ring]
            if instances > 1 and math.exp(-draw) < cell[RANDOM]:
                j = int(math.exp(-delays[(batcher[0] * 5 + offset + 11) % ring]) * instances)
            else:
                next_instance = (next_instance + 1) % instances
            for k in range(flush):
                queue[j, (queue_head[j] + queued[j]) % concurrency] = batcher[k]
                queued[j] += 1
            in_batcher, due = 0, NEVER
            if ends[j] == NEVER:
                started = j
        if started < 0:
            continue

        # an instance admits requests and begins its next passes
        j = started
        ends[j] = NEVER
        new = longest = 0
        while queued[j] > 0 and count[j] < slots:
            request = queue[j, queue_head[j]]
            length = prompts[(request + offset) % ring]
            longest = max(longest, length)
            if new > 0 and pass_tokens > 0 and longest * (new + 1) > pass_tokens:
                break
            needed = length + outputs[(request + offset) % ring]
            if kv_tokens > 0 and count[j] > 0 and kept_tokens[j] + needed > kv_tokens:
                break
            queue_head[j] = (queue_head[j] + 1) % concurrency
            queued[j] -= 1
            kept_tokens[j] += needed
            running[j, count[j]] = request
            lacking[j, count[j]] = outputs[(request + offset) % ring] - 1
            count[j] += 1
            new += 1
        if count[j] == 0:
            continue
        busy += 1
        factor = speed[j] = factors[busy - 1]
        begins = begun[j] = now
        admitted[j] = new
        if new > 0:
            begins += factor * (fixed + prompt_token * longest * new)
            for k in range(count[j] - new, count[j]):
                first[running[j, k]] = begins
        least = lacking[j, 0]
        for k in range(1, count[j]):
            least = min(least, lacking[j, k])
        if least == 0:  # outputs of one token end with the prompts; the others wait for their next pass
            steps[j] = 0
            ends[j] = begins
            continue
        step = factor * pass_s[count[j]]
        further = least - 1
        if count[j] == slots:  # nothing can be admitted until a sequence ends; other instances may become idle
            if instances > 1:
                further = min(further, MOST_FURTHER)
        elif further > 0:  # nothing can be admitted before the next request may arrive
            horizon = min(arrives[head] if head < tail else NEVER, due)
            for other in range(instances):
                horizon = min(horizon, ends[other] + one_way)
            if horizon < begins + step * (further + 1):
                further = max(0, int((horizon - begins) / step))
        steps[j] = 1 + further
        ends[j] = begins + step * steps[j] - factor * send * (count[j] - 1)

    totals[SECONDS] += closed - opened
    totals[TOKENS] += tokens
    totals[PASSES] += passes
    totals[SEQUENCES] += sequences
    totals[RUNNING] += area
    totals[MEASURED] += wanted
    totals[WITH_ITL] = with_itl


@compiled
def _summarize(times: Floats, requests: int, with_itl: int, result: Floats) -> None:
    """Write the statistics of ``times`` [KINDS, requests] to ``result``."""
    for kind in range(KINDS):
        number = with_itl if kind == 1 else requests
        column = LATENCIES + kind * STATISTICS
        if number == 0:
            result[column : column + STATISTICS] = np.nan
            continue
        ordered = np.sort(times[kind, :number])
        result[column] = np.mean(ordered)
        for place, level in enumerate((0.5, 0.9, 0.95, 0.99)):
            result[column + 1 + place] = ordered[int(level * (number - 1) + 0.5)]


@compiled
def _insert(request: int, at: float, arriving: Ints, arrives: Floats, head: int, tail: int) -> None:
    """Insert a request into those on the way, which are in the order of their arrival."""
    place = tail
    while place > head and arrives[place - 1] > at:
        arriving[place], arrives[place] = arriving[place - 1], arrives[place - 1]
        place -= 1
    arriving[place], arrives[place] = request, at
