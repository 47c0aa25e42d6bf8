"""The data of the compiled simulation: NumPy records with named fields. Times are in ns.

A record is declared as a class, whose annotated fields become the fields of the NumPy type next to it. The loop
reads and writes them as attributes of an element of a record array. This module does not load the compiler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np

from optimizer.simulator.compilation import Floats, Ints, Records, record_type

FOREVER = 2**62
# This number has a fixed type: a literal has a type of its own, for which Numba compiles the functions that get it
# once more.
NONE = cast(int, np.int64(-1))

REJECTED, TIMED_OUT = -2, -3  # instead of the number of an execution; NONE if it has not begun

# where a request is before its execution: the first index of ``Arrays.flight``
IN_TRANSIT = 0
IN_QUEUE = 1
DELAYED = 2  # behind this queue, because it expired
IN_PAYLOAD = 3
PLACES = 4

# states of an instance
SLEEPING = 0
WAKING = 1
EXECUTING = 2
RELEASING = 3
OVERTAKEN = 4  # the batcher, notified of the end of the execution, runs before the instance is idle


class ScenarioRow(NamedTuple):
    """A scenario as the loop reads it.

    Requests and batches have sizes in units: a request, or a number of samples that divides all requests of a mix.

    Attributes:
        unit_samples: Samples of a unit.
        limit: The most units in a batch.
        instances: Instances of the model.
        dynamic_batching: Whether there is a batcher. Otherwise each request is a payload.
        delay: Time that a request waits in the batcher for others.
        fixed_shapes: Whether all requests may share a batch. Then not every arrival wakes the batcher.
        prefetch: Whether the batcher forms payloads ahead of idle instances.
        preferred_from: First index of the preferred sizes in ``Tables.preferred``.
        preferred_to: The index after the last one.
        services_from: Index in ``Tables.services`` of the time of one unit on one busy instance.
        services_stride: Columns of that table of service times.
        concurrency: Clients of a closed loop; 0: an open loop.
        arrivals_from: First index of an open loop's send times in ``Tables.arrivals``.
        arrivals_to: The index after the last one.
        warm_up_requests: Requests that complete before the interval starts.
        measured_requests: Requests that complete in the interval.
        send, receive, client, spacing, wake, dispatch, release: As the fields of ``Overheads``.
        mix_from: First index of the requests in ``Tables.mix``.
        mix_to: The index after the last one; ``mix_from`` if all requests have one unit and one shape.
        queue_limit: The most requests in the batcher's queue; 0: no limit.
        timeout: Time in the queue after which a request expires; 0: none does.
        rejects: Whether expired requests are rejected. Otherwise they move behind those that have not expired.
        missed_wakes: Millionths of the ended executions after which the batcher runs before the instance is idle.
        levels: Priority levels with queues of their own; 0 and 1: a single queue.
        policies_from: Index of the first level's policy in ``Tables.policies``.
    """

    unit_samples: int
    limit: int
    instances: int
    dynamic_batching: bool
    delay: int
    fixed_shapes: bool
    prefetch: bool
    preferred_from: int
    preferred_to: int
    services_from: int
    services_stride: int
    concurrency: int
    arrivals_from: int
    arrivals_to: int
    warm_up_requests: int
    measured_requests: int
    send: int
    receive: int
    client: int
    spacing: int
    wake: int
    dispatch: int
    release: int
    mix_from: int
    mix_to: int
    queue_limit: int
    timeout: int
    rejects: bool
    missed_wakes: int
    levels: int
    policies_from: int


class QueuePolicy(NamedTuple):
    """The policy of a queue.

    Attributes:
        limit: The most requests in the queue; 0: no limit.
        timeout: Time in the queue after which a request expires; 0: none does.
        rejects: Whether expired requests are rejected. Otherwise they move behind those that have not expired.
    """

    limit: int
    timeout: int
    rejects: bool


class MixedRequest:
    """A request of a mix of requests that differ."""

    units: int
    shape: int
    level: int  # priority, 1 is the highest


class Request:
    """A request before its execution. If all are alike, only the first two fields are set."""

    sent: int
    arrived: int
    number: int
    units: int
    shape: int
    level: int  # priority, 1 is the highest; 0 if there is a single queue


class Payload:
    """Requests that an instance will execute as one batch."""

    units: int
    requests: int
    oldest: int  # the earliest arrival
    shape: int
    closed: bool  # a request of another shape came next: no instance merges this payload with another one


class Instance:
    """An instance of the model."""

    state: int  # SLEEPING, WAKING, EXECUTING, RELEASING or OVERTAKEN
    event_at: int  # time of the next event
    asleep: int  # order in which they fell asleep
    # its execution
    run: int  # number
    units: int
    requests: int
    waited: int  # time in the queue, summed over the requests
    begun: int
    factor: float  # on its service time
    since: int  # when the number of busy instances last changed the speed of the execution
    left: float  # share of the execution that remained then


class State:
    """The state of the simulation of a scenario, all 0 at first.

    The interval starts and ends when the same instance ends an execution, so that it contains whole cycles.
    """

    # the scenario
    alike: bool  # requests leave each place in the order in which they were sent, so they can stay where they are
    has_levels: bool  # the queue has several priority levels
    timeout: int  # the longest one of a request in the queue; 0: no request expires
    largest: int  # preferred size in samples
    largest_units: int  # the most units that do not exceed it
    mask: int  # maps a number to its slot in a ring buffer
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
    total: int  # requests of an open loop
    last_arrival: int
    last_response: int
    # the next elements of the tables
    gap_index: int
    factor_index: int
    mix_index: int
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
    unmergeable: int  # the head, if an instance could not merge it
    saturated: bool  # the current payload is closed
    next_preferred: int  # samples in the queue at which an arrival wakes the batcher
    batcher_at: int  # when it runs
    slot_deadline: int  # when the wait for a slot ends and expired requests are rejected; NONE: there is no wait
    polling: bool  # it tries again and again until the current payload is executed
    overtaken: bool  # it has taken the CPU of an instance that is not idle yet; it has only one
    notified: bool  # it is notified now
    # the instances
    sleep_count: int
    busy: int
    runs: int  # executions
    last_end: int
    last_ended_instance: int
    # the interval
    measuring: bool
    opened: int
    cycle_instance: int  # the instance that ended an execution when it started
    is_at_cycle_end: bool
    measured: int
    units_measured: int
    batches: int
    latency_sum: int
    queue_sum: int
    compute_sum: int
    busy_area: int
    rejected_before: int
    timed_out_before: int
    # whether the server is overloaded
    least_waiting: int
    earlier_waiting: int
    overloaded: bool


@dataclass(slots=True)
class ResultRow:
    """The result of the interval.

    Attributes:
        duration: Length of the interval.
        requests: Requests that completed.
        units: Their units.
        executions: Executions that ended.
        latency: Latency, summed over the requests.
        latency_p50, latency_p90, latency_p95, latency_p99: Percentiles of the latency; NaN without requests.
        queue: Time in the queue, summed over the requests.
        compute: Time of their executions, summed over the requests.
        busy: Integral over time of the number of busy instances.
        overloaded: Whether the queue of an open loop only grows.
        rejected: Requests that a full queue rejected.
        timed_out: Requests that expired and were rejected.
    """

    duration: int
    requests: int
    units: int
    executions: int
    latency: int
    latency_p50: float
    latency_p90: float
    latency_p95: float
    latency_p99: float
    queue: int
    compute: int
    busy: int
    overloaded: bool
    rejected: int
    timed_out: int


class ExecutionRow:
    """A row of the log of executions. Without requests it is unused."""

    instance: int
    start: int
    end: int  # NONE: it has not ended
    units: int
    requests: int


class RequestRow:
    """A row of the log of requests, as in ``SimulationTrace``. If ``arrived`` is NONE, it is unused."""

    sent: int
    arrived: int
    units: int
    shape: int
    execution: int


SCENARIO_RECORD = record_type(ScenarioRow)
POLICY_RECORD = record_type(QueuePolicy)
MIX_RECORD = record_type(MixedRequest)
REQUEST_RECORD = record_type(Request)
PAYLOAD_RECORD = record_type(Payload)
INSTANCE_RECORD = record_type(Instance)
STATE_RECORD = record_type(State)
RESULT_RECORD = record_type(ResultRow)
EXECUTION_ROW_RECORD = record_type(ExecutionRow)
REQUEST_ROW_RECORD = record_type(RequestRow)


class Tables(NamedTuple):
    """The tables that all scenarios share.

    Attributes:
        preferred: Preferred batch sizes in samples, the lists of all scenarios concatenated.
        services: Service times in ns, the tables of all scenarios concatenated.
        factors: Factors on the service times of successive executions, used cyclically.
        gaps: Additional distances between successive arrivals in ns, used cyclically.
        arrivals: Send times of open loops in ns, the lists of all scenarios concatenated.
        mix: Records ``MixedRequest`` of successive requests, used cyclically, the lists of all scenarios with a mix
            concatenated.
        policies: Records ``QueuePolicy`` of the priority levels of all scenarios concatenated.
    """

    preferred: Ints
    services: Floats
    factors: Floats
    gaps: Ints
    arrivals: Ints
    mix: Records
    policies: Records


class Arrays(NamedTuple):
    """The arrays of the simulation of a scenario.

    Attributes:
        tables: The tables that all scenarios share.
        flight: Records ``Request`` [PLACES, ring]: ring buffers of those in each place.
        payloads: Records ``Payload`` [ring] that wait for an instance: a ring buffer.
        latencies: Latencies in ns [requests] of the measured requests.
        preferred_up_to: The largest preferred size [units + 1] up to a size, see ``tabulate_preferred_sizes``.
        next_preferred_size: The next preferred size [units + 1], see there.
        sent_times: Send times [instances, requests] of the requests in the batch of each instance.
        instances: Records ``Instance`` [instances].
        executions: Output, the log of executions: records ``ExecutionRow``.
        requests: Output, the log of requests: records ``RequestRow``.
    """

    tables: Tables
    flight: Records
    payloads: Records
    latencies: Ints
    preferred_up_to: Ints
    next_preferred_size: Ints
    sent_times: Ints
    instances: Records
    executions: Records
    requests: Records
