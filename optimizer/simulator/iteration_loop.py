"""The discrete-event loop of continuous batching, compiled to machine code by Numba.

Import this module only where something is simulated: the import loads the compiler. Times are in seconds.
"""

from __future__ import annotations

import math

import numpy as np

from optimizer.simulator.compilation import Floats, Ints, compiled, compiled_once

# columns of ``scenarios``
SLOTS = 0  # the most running sequences of an instance
INSTANCES = 1
CONCURRENCY = 2
DELAY = 3  # time that a prompt waits in Triton's batcher for others
FULL = 4  # number of prompts at which they wait no longer
FIXED = 5  # time of any pass
SEQUENCE = 6  # further time of a pass for one running sequence
POWER = 7  # exponent of the number of running sequences, by which the further time grows
PROMPT = 8  # time for each token of the prompts of a pass, with their filling
ROUND_TRIP = 9  # mean time of a request outside of its instance
PROMPT_LIMIT = 10  # the most tokens of several prompts in a pass, with their filling; 0: no limit
KV_TOKENS = 11  # the most tokens of the running sequences of an instance; 0: no limit
SEND = 12  # time to send a response, the last part of a pass
RANDOM = 13  # share of the requests that any instance takes; the others go to the instances in turn
WARM_UP = 14  # requests that end before the interval starts
WANTED = 15  # requests that end in the interval
REPEATS = 16  # simulations with other requests
COLUMNS = 17

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
MOST_PASSES = 5  # that are simulated together while other instances may change the speed


@compiled_once
def simulate_scenarios(
    scenarios: Floats, factors: Floats, prompts: Ints, outputs: Ints, delays: Floats, results: Floats
) -> None:
    """Simulate each row of ``scenarios`` in a closed loop, and write its row of ``results``.

    Args:
        scenarios: [scenarios, COLUMNS].
        factors: [scenarios, instances], on the time of a pass that begins while 1, 2, … instances are busy.
        prompts: [ring], tokens of successive prompts; used cyclically.
        outputs: [ring], tokens of successive outputs.
        delays: [ring], exponentially distributed numbers of mean 1.
        results: [scenarios, RESULTS].
    """
    for i in range(len(scenarios)):
        scenario, result = scenarios[i], results[i]
        requests, repeats = int(scenario[WANTED]), int(scenario[REPEATS])
        times, totals = np.empty((KINDS, requests * repeats)), np.zeros(TOTALS)
        for repeat in range(repeats):
            _simulate(scenario, factors[i], prompts, outputs, delays, repeat * len(prompts) // repeats, times, totals)
        seconds, passes = totals[SECONDS], max(totals[PASSES], 1.0)
        result[TOKENS_PER_S] = totals[TOKENS] / seconds
        result[TOGETHER] = max(totals[SEQUENCES] / passes, 1.0)
        result[OCCUPIED] = min(totals[RUNNING] / seconds / scenario[INSTANCES] / scenario[SLOTS], 1.0)
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
    scenario: Floats,
    factors: Floats,
    prompts: Ints,
    outputs: Ints,
    delays: Floats,
    offset: int,
    times: Floats,
    totals: Floats,
) -> None:
    """Add one simulation to ``times`` [KINDS, requests] and ``totals``. ``offset`` is its place in the rings."""
    instances, concurrency, ring = int(scenario[INSTANCES]), int(scenario[CONCURRENCY]), len(prompts)
    slots = min(int(scenario[SLOTS]), concurrency)
    delay, full = scenario[DELAY], int(scenario[FULL])
    pass_s = scenario[FIXED] + scenario[SEQUENCE] * np.arange(slots + 1) ** scenario[POWER]  # by running sequences
    one_way, send = scenario[ROUND_TRIP] / 2, scenario[SEND]
    warm_up, wanted = int(scenario[WARM_UP]), int(scenario[WANTED])
    total = warm_up + wanted + concurrency

    sent, first = np.empty(total), np.empty(total)
    # requests on the way to the server, in the order of their arrival
    arriving, arrives = np.empty(total, np.int64), np.empty(total)
    head = tail = 0
    # requests in Triton's batcher and in the queue of each instance; at most ``concurrency`` exist at a time
    batcher, in_batcher, due = np.empty(concurrency, np.int64), 0, NEVER
    queue, queue_head = np.empty((instances, concurrency), np.int64), np.zeros(instances, np.int64)
    queued, next_instance = np.zeros(instances, np.int64), 0
    # running sequences of each instance, and the tokens that they lack
    running, lacking = np.empty((instances, slots), np.int64), np.empty((instances, slots), np.int64)
    count, kept_tokens = np.zeros(instances, np.int64), np.zeros(instances, np.int64)
    # the passes that an instance computes together, with the prompts before them, and their end
    passes, admitted = np.zeros(instances, np.int64), np.zeros(instances, np.int64)
    begun, ends, factor = np.zeros(instances), np.full(instances, NEVER), np.ones(instances)
    is_sending, busy = np.zeros(instances, np.bool_), 0

    ended = 0
    measured, with_between = int(totals[MEASURED]), int(totals[WITH_BETWEEN])
    enough = measured + wanted
    opened = closed = 0.0
    # the first requests are spread over the time that one takes alone
    alone = pass_s[1] * factors[0] * np.mean(outputs)
    for i in range(concurrency):
        sent[i] = alone * i / concurrency
        arriving[i], arrives[i] = i, sent[i] + one_way
    issued = tail = concurrency

    while measured < enough:
        j = int(np.argmin(ends))
        arrival = arrives[head] if head < tail else NEVER
        flush = False
        if ends[j] <= arrival and ends[j] <= due and not is_sending[j]:  # the last pass is computed
            now = ends[j]
            sending = send * factor[j]
            is_sending[j], ends[j] = True, now + sending * (count[j] - 1)
            if ended >= warm_up:
                totals[TOKENS] += admitted[j] + passes[j] * count[j]
                totals[PASSES] += passes[j]
                totals[SEQUENCES] += passes[j] * count[j]
                totals[RUNNING] += (now - max(begun[j], opened)) * count[j]
            for k in range(count[j]):
                lacking[j, k] -= passes[j]
                if lacking[j, k] > 0:
                    continue
                request, end = running[j, k], now + sending * k
                length = outputs[(request + offset) % ring]
                kept_tokens[j] -= prompts[(request + offset) % ring] + length
                ended += 1
                if ended == warm_up:
                    opened = end
                elif ended > warm_up and measured < enough:
                    times[FIRST_RESPONSE, measured] = first[request] - sent[request] + one_way
                    times[WHOLE, measured] = end - sent[request] + one_way
                    if length > 1:
                        times[BETWEEN, with_between] = (end - first[request]) / (length - 1)
                        with_between += 1
                    measured += 1
                    closed = end
                if issued < total:
                    sent[issued] = end + one_way
                    at = sent[issued] + one_way * delays[(issued + offset) % ring]
                    _insert(issued, at, arriving, arrives, head, tail)
                    issued += 1
                    tail += 1
            k = 0
            while k < count[j]:
                if lacking[j, k] > 0:
                    k += 1
                else:  # the last sequence moves to the free slot
                    count[j] -= 1
                    running[j, k], lacking[j, k] = running[j, count[j]], lacking[j, count[j]]
            continue
        if ends[j] <= arrival and ends[j] <= due:  # all responses are sent
            now = ends[j]
            is_sending[j], ends[j] = False, NEVER
            busy -= 1
        else:
            if arrival <= due:  # a request arrives
                now = arrival
                batcher[in_batcher] = arriving[head]
                head += 1
                in_batcher += 1
                if in_batcher == 1:
                    due = now + delay
                flush = delay <= 0 or in_batcher >= full
            else:  # the oldest prompt in the batcher has waited long enough
                now, flush = due, True
            if not flush:
                continue
            # Triton wakes the instance that has waited longest for requests, with few exceptions
            place = batcher[0] + offset
            if instances > 1 and math.exp(-delays[(7 * place + 3) % ring]) < scenario[RANDOM]:
                j = int(math.exp(-delays[(5 * place + 11) % ring]) * instances)
            else:
                j, next_instance = next_instance, (next_instance + 1) % instances
            for k in range(in_batcher):
                queue[j, (queue_head[j] + queued[j]) % concurrency] = batcher[k]
                queued[j] += 1
            in_batcher, due = 0, NEVER
            if ends[j] < NEVER:
                continue

        # the instance admits requests and begins its next passes
        new = longest = 0
        while queued[j] > 0 and count[j] < slots:
            request = queue[j, queue_head[j]]
            length = prompts[(request + offset) % ring]
            needed = length + outputs[(request + offset) % ring]
            if new > 0 and 0 < scenario[PROMPT_LIMIT] < max(longest, length) * (new + 1):
                break
            if count[j] > 0 and 0 < scenario[KV_TOKENS] < kept_tokens[j] + needed:
                break
            longest = max(longest, length)
            queue_head[j] = (queue_head[j] + 1) % concurrency
            queued[j] -= 1
            kept_tokens[j] += needed
            running[j, count[j]] = request
            lacking[j, count[j]] = outputs[(request + offset) % ring] - 1
            count[j] += 1
            new += 1
        if count[j] == 0:
            continue
        factor[j] = factors[busy]
        busy += 1
        begun[j], admitted[j] = now, new
        if new > 0:
            now += factor[j] * (scenario[FIXED] + scenario[PROMPT] * longest * new)
            for k in range(count[j] - new, count[j]):
                first[running[j, k]] = now
        passes[j] = np.min(lacking[j, : count[j]])
        if passes[j] == 0:  # outputs of one token end with the prompts; the others wait for their next pass
            ends[j] = now
            continue
        step = factor[j] * pass_s[count[j]]
        if count[j] == slots:  # no request can be admitted before a sequence ends
            if instances > 1:
                passes[j] = min(passes[j], MOST_PASSES)
        elif passes[j] > 1:  # nothing changes before the next request may arrive
            horizon = min(arrives[head] if head < tail else NEVER, due, np.min(ends) + one_way)
            if horizon < now + step * passes[j]:
                passes[j] = 1 + max(0, int((horizon - now) / step))
        ends[j] = now + step * passes[j] - factor[j] * send * (count[j] - 1)

    totals[SECONDS] += closed - opened
    totals[MEASURED], totals[WITH_BETWEEN] = measured, with_between


@compiled
def _insert(request: int, at: float, arriving: Ints, arrives: Floats, head: int, tail: int) -> None:
    """Insert a request into those on the way, which are in the order of their arrival."""
    place = tail
    while place > head and arrives[place - 1] > at:
        arriving[place], arrives[place] = arriving[place - 1], arrives[place - 1]
        place -= 1
    arriving[place], arrives[place] = request, at
