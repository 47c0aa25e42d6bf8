"""The instances of the model: which one takes a payload, and how long it executes it.

An instance without a payload sleeps until it is notified. The speed of an execution depends on the number of busy
instances.
"""

from __future__ import annotations

import math

from optimizer.simulator.compilation import Records, compiled, inlined
from optimizer.simulator.dynamic_batcher.cyclic_tables import next_factor
from optimizer.simulator.dynamic_batcher.interval import count_execution
from optimizer.simulator.dynamic_batcher.records import (
    EXECUTING,
    FOREVER,
    NONE,
    OVERTAKEN,
    RELEASING,
    SLEEPING,
    WAKING,
    Arrays,
    ScenarioRow,
    State,
)

# ns, mean time for which a batcher that runs too early keeps the instance from being idle: measured
PREEMPTION = 32_000


@inlined
def next_events(instances: Records) -> tuple[int, int, int, int]:
    """Return when the next instance ends or is ready, and which; when the next one wakes up, and which."""
    ended = wake_time = FOREVER
    ended_instance = woken_instance = NONE
    for j in range(len(instances)):
        if instances[j].state == WAKING:
            if instances[j].event_at < wake_time:
                wake_time, woken_instance = instances[j].event_at, j
        elif instances[j].event_at < ended:
            ended, ended_instance = instances[j].event_at, j
    return ended, ended_instance, wake_time, woken_instance


@inlined
def notify_instance(at: int, instances: Records) -> None:
    """Wake the instance that has slept longest, if any sleeps."""
    chosen = -1
    for j in range(len(instances)):
        is_asleep = instances[j].state == SLEEPING
        if is_asleep and (chosen < 0 or instances[j].asleep < instances[chosen].asleep):
            chosen = j
    if chosen >= 0:
        instances[chosen].state, instances[chosen].event_at = WAKING, at


@inlined
def take_payload(state: State, scenario: ScenarioRow, arrays: Arrays, j: int) -> None:
    """Let instance ``j`` execute the payload that waits longest, or sleep if there is none."""
    instance = arrays.instances[j]
    if state.head == state.tail:
        instance.state, instance.event_at, instance.asleep = SLEEPING, FOREVER, state.sleep_count
        state.sleep_count += 1
        return
    units, requests = _merge_payloads(state, scenario, arrays.payloads)
    waited = 0
    for i in range(requests):
        request = arrays.flight[state.payload_place, (state.started + i) & state.mask]
        arrays.sent_times[j, i] = request.sent
        waited += state.now - request.arrived
        if len(arrays.requests) > 0:
            number = state.started + i if state.alike else request.number
            if number < len(arrays.requests):
                arrays.requests[number].execution = state.runs
    instance.units, instance.requests, instance.waited = units, requests, waited
    state.started += requests
    state.least_waiting = min(state.least_waiting, state.arrived - state.started - state.refusals)
    _start_execution(state, scenario, arrays, j)
    state.notified = scenario.dynamic_batching


@inlined
def _merge_payloads(state: State, scenario: ScenarioRow, payloads: Records) -> tuple[int, int]:
    """Remove the first payload for an instance, and merge those into it that have waited for longer than the delay.

    Return the units and the requests of the batch.
    """
    front = payloads[state.head & state.mask]
    units, requests = front.units, front.requests
    state.head += 1
    if scenario.delay > 0 and scenario.limit * scenario.unit_samples > 1 and not front.closed:
        while state.head < state.tail:
            other = payloads[state.head & state.mask]
            if other.closed or state.now - other.oldest <= scenario.delay:
                break
            state.unmergeable = state.head
            differs = not scenario.fixed_shapes and front.shape != other.shape
            if differs or units + other.units > scenario.limit:
                break
            units += other.units
            requests += other.requests
            state.head += 1
    return units, requests


@inlined
def _start_execution(state: State, scenario: ScenarioRow, arrays: Arrays, j: int) -> None:
    """Let instance ``j`` execute its batch from now on."""
    instance = arrays.instances[j]
    state.busy += 1
    _rescale(state, scenario, arrays, state.busy - 1, j)
    instance.factor = next_factor(state, arrays.tables)
    row = scenario.services_from + (instance.units - 1) * scenario.services_stride
    span = arrays.tables.services[row + state.busy - 1] * instance.factor
    instance.state, instance.event_at = EXECUTING, state.now + max(int(span + 0.5), 1)
    instance.run, instance.begun = state.runs, state.now
    instance.since, instance.left = state.now, 1.0
    if state.runs < len(arrays.executions):
        log = arrays.executions[state.runs]
        log.instance, log.start, log.end = j, state.now, NONE
        log.units, log.requests = instance.units, instance.requests
    state.runs += 1


@inlined
def _rescale(state: State, scenario: ScenarioRow, arrays: Arrays, before: int, excluded: int) -> None:
    """Change the speed of the running executions except ``excluded``: ``before`` instances were busy."""
    services = arrays.tables.services
    for j in range(len(arrays.instances)):
        instance = arrays.instances[j]
        if instance.state != EXECUTING or j == excluded:
            continue
        row = scenario.services_from + (instance.units - 1) * scenario.services_stride
        old, new = services[row + before - 1] * instance.factor, services[row + state.busy - 1] * instance.factor
        if old != new:
            instance.left = max(instance.left - (state.now - instance.since) / old, 0.0)
            instance.since = state.now
            instance.event_at = state.now + int(instance.left * new + 0.5)


@inlined
def end_execution(state: State, scenario: ScenarioRow, arrays: Arrays, j: int) -> None:
    """End the execution of instance ``j``, which is then released."""
    instance = arrays.instances[j]
    state.busy -= 1
    _rescale(state, scenario, arrays, state.busy + 1, j)
    state.completed += instance.requests
    state.last_end, state.last_ended_instance = state.now, j
    state.is_at_cycle_end = state.is_at_cycle_end or j == state.cycle_instance or state.cycle_instance < 0
    count_execution(state, instance)
    if instance.run < len(arrays.executions):
        arrays.executions[instance.run].end = state.now
    instance.state, instance.event_at = RELEASING, state.now + scenario.release


@inlined
def is_ready(state: State, scenario: ScenarioRow, instances: Records, j: int) -> bool:
    """Return whether instance ``j``, whose time has come, takes a payload: not if the batcher overtakes it."""
    instance = instances[j]
    if instance.state == OVERTAKEN:
        state.overtaken = False
        return True
    if instance.event_at != state.now:
        return False
    may_overtake = scenario.dynamic_batching and not scenario.prefetch and not state.overtaken
    if may_overtake and _is_missed(instance.run, state.now, scenario.missed_wakes):
        state.overtaken = True
        instance.state, instance.event_at = OVERTAKEN, state.now + preempted_ns(instance.run, state.now)
        state.batcher_at = state.now
        return False
    state.notified = scenario.dynamic_batching
    return True


@inlined
def _is_missed(run: int, now: int, missed: int) -> bool:
    """Return whether the batcher runs too early at the end of this execution."""
    return 1e6 * _uniform(run, now) < missed


@compiled
def preempted_ns(run: int, now: int) -> int:
    """Return how long an instance whose CPU the batcher takes is not idle, exponentially distributed."""
    return 1 + int(-math.log(1 - _uniform(now, run)) * PREEMPTION)


@inlined
def _uniform(a: int, b: int) -> float:
    """Return a hash of two numbers, at least 0 and less than 1. Its modulus is a prime next to a million."""
    modulus = 1_000_003
    a, b = a % modulus, b % modulus
    return ((a * a * 7919 + a * 104729 + b * 31) % modulus) / modulus
