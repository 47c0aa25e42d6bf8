"""The simulated batcher: schedules computed by hand, laws of queueing theory, and a literal copy of Triton's loop."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optimizer.core.candidate import Candidate
from optimizer.core.request_sizes import SizeDistribution
from optimizer.simulator.dynamic_batcher.clients import REFUSED_PAUSE
from optimizer.simulator.dynamic_batcher.instances import preempted_ns
from optimizer.simulator.dynamic_batcher.interval import partition
from optimizer.simulator.dynamic_batcher.records import REJECTED, TIMED_OUT
from optimizer.simulator.scenario import (
    RING_LENGTH,
    ClosedLoopLoad,
    MeasurementInterval,
    OpenLoopLoad,
    Overheads,
    Scenario,
    ServiceTimes,
    SimulatedLoad,
    SimulationResult,
)
from optimizer.simulator.simulate import lognormal_jitter, simulate_many, trace
from tests.simulation import (
    ALL_REQUESTS,
    MS,
    TYPICAL_OVERHEADS,
    TYPICAL_TIMES,
    US,
    batcher,
    constant,
    constant_load,
    leveled,
    linear_times,
    poisson_load,
    simulate,
    with_policy,
)


def executions(
    candidate: Candidate, arrivals_ms: Sequence[float], service_ms: float = 10, **options: Any
) -> list[tuple[float, int]]:
    """Return (start in ms, requests) of each execution of an open loop without overheads."""
    load = OpenLoopLoad(np.array(arrivals_ms) * MS)
    log = trace(Scenario(candidate, load, constant(service_ms * MS), **options), interval=ALL_REQUESTS)
    return list(zip((log.start_s / MS).round(6).tolist(), log.requests.tolist(), strict=True))


# --- by hand: the model takes 10 ms for any batch, one instance unless said otherwise ---


def test_without_delay_a_lone_request_starts_at_once_and_the_next_batch_grows_until_it_is_full() -> None:
    assert executions(batcher(4), [0, 1, 2, 3, 4, 5]) == [(0, 1), (10, 4), (20, 1)]


def test_with_a_delay_a_partial_batch_waits_for_all_of_it_though_the_instance_is_idle() -> None:
    assert executions(batcher(4, 5000), [0, 1]) == [(5, 2)]
    assert executions(batcher(4, 5000), [0, 1, 2, 3]) == [(3, 4)]


def test_a_preferred_size_ends_the_wait() -> None:
    assert executions(batcher(8, 9000, 2), [0, 1, 20]) == [(1, 2), (29, 1)]
    assert executions(batcher(8, 9000, 4, 8), [0, 1, 2, 3]) == [(3, 4)]


def test_a_request_that_leads_beyond_the_largest_preferred_size_sends_those_before_it() -> None:
    assert executions(batcher(8, 5000, 3), [0], request_batch_size=2) == [(5, 1)]
    assert executions(batcher(8, 5000, 3), [0, 1], request_batch_size=2) == [(1, 1), (11, 1)]


def test_a_waiting_batch_of_the_largest_preferred_size_takes_one_more() -> None:
    """Triton does this: server issue 8141."""
    assert executions(batcher(8, 5000, 4), [0] * 4 + [1] * 4 + [2, 6]) == [(0, 4), (10, 5), (20, 1)]
    assert executions(batcher(8, 0, 4), [0] * 4 + [1] * 4 + [2, 6]) == [(0, 4), (10, 4), (20, 2)]


@pytest.mark.parametrize(
    ("options", "second"),
    [
        pytest.param({}, 1, id="fixed shapes: two requests do not wake the batcher that waits for three"),
        pytest.param({"fixed_shapes": False}, 3, id="varying shapes: each request wakes it"),
        pytest.param({"prefetch": False}, 3, id="no prefetch: the batch is formed as the instance becomes idle"),
    ],
)
def test_requests_join_a_late_batch_only_if_they_wake_the_batcher(options: dict[str, Any], second: int) -> None:
    schedule = executions(batcher(4, 1000), [0, 2, 4, 5], **options)
    assert schedule[0] == (1, 1)
    assert schedule[1] == (11, second)


def test_a_queue_policy_turns_prefetching_off() -> None:
    limited = replace(batcher(4, 1000), fields=(("dynamic_batching.default_queue_policy.max_queue_size", 100),))
    assert executions(limited, [0, 2, 4, 5]) == [(1, 1), (11, 3)]


def test_an_idle_instance_joins_batches_that_are_older_than_the_delay() -> None:
    arrivals = [0, 2, 2, 3, 4, 4]  # the first leaves after 1 ms, 2 + 1 and 2 requests wait as two batches
    assert executions(batcher(8, 1000, 2), arrivals) == [(1, 1), (11, 5)]
    assert executions(batcher(4, 1000, 2), arrivals) == [(1, 1), (11, 3), (21, 2)]


def test_batches_are_formed_ahead_up_to_two_for_each_instance() -> None:
    # two full batches wait; the requests after them are in no batch until one leaves, so they form one together
    arrivals = [0, *[1] * 4, *[2] * 2, *[3] * 2]
    assert executions(batcher(2), arrivals) == [(0, 1), (10, 2), (20, 2), (30, 2), (40, 2)]
    slow = Overheads(wake_s=12 * MS)  # the batcher runs at 12 and 24 ms
    job = Scenario(batcher(4), OpenLoopLoad(np.array([0, *[13] * 4, 14, 15, 16]) * MS), constant(100 * MS), slow)
    assert trace(job, interval=ALL_REQUESTS).requests.tolist() == [1, 4, 3]


def test_two_instances_take_turns() -> None:
    assert executions(batcher(4, instances=2), [0, 1, 2, 3]) == [(0, 1), (1, 1), (10, 2)]
    log = trace(
        Scenario(batcher(4, instances=2), OpenLoopLoad(np.array([0, 1, 2, 3]) * MS), constant(10 * MS)),
        interval=ALL_REQUESTS,
    )
    assert log.instance.tolist() == [0, 1, 0]


def test_without_dynamic_batching_requests_are_served_one_by_one() -> None:
    assert executions(Candidate(8), [0, 1, 2]) == [(0, 1), (10, 1), (20, 1)]
    assert executions(Candidate(0, instance_count=2), [0, 1, 2]) == [(0, 1), (1, 1), (10, 1)]


def test_the_remaining_work_goes_on_at_the_speed_of_the_instances_now_busy() -> None:
    halves = ServiceTimes(np.array([[10 * MS, 20 * MS]]))
    log = trace(
        Scenario(Candidate(1, instance_count=2), OpenLoopLoad(np.array([0, 5]) * MS), halves), interval=ALL_REQUESTS
    )
    # alone for 5 ms, at half speed to 15 ms, then the other alone again
    assert log.end_s == pytest.approx([15 * MS, 20 * MS])


def test_each_overhead_is_a_part_of_the_latency() -> None:
    over = Overheads(
        send_s=1 * MS, receive_s=2 * MS, client_s=3 * MS, wake_s=4 * MS, dispatch_s=5 * MS, release_s=6 * MS
    )
    log = trace(Scenario(batcher(1), ClosedLoopLoad(1), constant(10 * MS), over), interval=MeasurementInterval(0, 2))
    # sent, 1 ms there, 4 ms to wake, 5 ms to dispatch, 10 ms computed, 2 ms back, 3 ms until the next
    assert log.sent_s == pytest.approx([0, 25 * MS])
    assert log.start_s == pytest.approx([10 * MS, 35 * MS])
    one_client = simulate(batcher(1), ClosedLoopLoad(1), constant(10 * MS), over)
    assert one_client.latency_p50_s == pytest.approx(22 * MS)
    assert one_client.queue_avg_s == pytest.approx(9 * MS)
    assert one_client.compute_avg_s == pytest.approx(10 * MS)
    assert one_client.utilization == pytest.approx(10 / 25)
    assert simulate(Candidate(1), ClosedLoopLoad(1), constant(10 * MS), over).latency_p50_s == pytest.approx(18 * MS)
    # The requests of two clients are served in turn: 10 ms and 6 ms each.
    two_clients = simulate(Candidate(1), ClosedLoopLoad(2), constant(10 * MS), over)
    assert two_clients.throughput_infer_per_sec == pytest.approx(1 / (16 * MS))


def test_arrivals_and_responses_keep_their_distance() -> None:
    spaced = Overheads(spacing_s=1 * MS)
    log = trace(Scenario(Candidate(1), OpenLoopLoad(np.zeros(3)), constant(1 * MS), spaced), interval=ALL_REQUESTS)
    assert log.arrived_s == pytest.approx([0, 1 * MS, 2 * MS])
    three = simulate(
        batcher(3, 9000), ClosedLoopLoad(3), constant(10 * MS), spaced
    )  # 10, 11, 12 ms and 2, 1, 0 of queue
    assert three.latency_p50_s == pytest.approx(12 * MS)
    assert three.throughput_infer_per_sec == pytest.approx(3 / (12 * MS))


def test_a_gap_delays_all_later_arrivals() -> None:
    job = Scenario(batcher(4), OpenLoopLoad(np.zeros(4)), constant(10 * MS), Overheads(spacing_s=1 * MS))
    slow = np.array([0, 5, 0, 0]) * MS
    assert trace(job, gaps_s=slow, interval=ALL_REQUESTS).arrived_s == pytest.approx(np.array([0, 6, 7, 8]) * MS)


def test_a_trace_reaches_back_to_the_first_request() -> None:
    log = trace(Scenario(batcher(8), ClosedLoopLoad(64), constant(1 * MS)), interval=MeasurementInterval(5000, 10))
    assert log.execution[0] == 0
    assert len(log.arrived_s) >= sum(log.requests) >= 5010
    assert (np.diff(log.arrived_s) >= 0).all()


def test_quantiles_are_taken_as_by_perf_analyzer() -> None:
    """Latencies are 1, 2, ... 10 ms, as 10 requests are served one by one; quantile q is element int(q * 9 + 0.5)."""
    result = simulate(Candidate(1), OpenLoopLoad(np.zeros(10)), constant(1 * MS), interval=ALL_REQUESTS)
    assert result.latency_p50_s == pytest.approx(6 * MS)
    assert result.latency_p90_s == pytest.approx(9 * MS)
    assert result.latency_p95_s == pytest.approx(10 * MS)
    assert result.latency_avg_s == pytest.approx(5.5 * MS)
    assert result.requests == 10
    assert result.duration_s == pytest.approx(10 * MS)


# --- the same loop, taken literally ---


@dataclass(eq=False)
class Request:
    sent: int
    arrived: int
    number: int = -1
    samples: int = 1
    shape: int = 0
    level: int = 0


@dataclass(eq=False)
class Level:
    """The queue of a priority level. The policy is (max_queue_size, timeout in µs, action)."""

    policy: tuple[int, int, str]
    fresh: deque[Request] = field(default_factory=deque)
    delayed: deque[Request] = field(default_factory=deque)

    def take_expired(self, now: int) -> list[Request]:
        expired = []
        while self.policy[1] and self.fresh and now > self.fresh[0].arrived + 1000 * self.policy[1]:
            expired.append(self.fresh.popleft())
        return expired


@dataclass(eq=False)
class Payload:
    requests: list[Request] = field(default_factory=list)
    executing: bool = False
    closed: bool = False

    @property
    def samples(self) -> int:
        return sum(request.samples for request in self.requests)


@dataclass(frozen=True)
class Setting:
    """A scenario in ns. ``service[k - 1]`` is the time of k requests; instances do not slow each other.

    With a ``mix`` it is the time of k samples. The queue policy is (max_queue_size, timeout in µs, action).
    ``levels`` has the policy of each priority level; one without limit and timeout is the default policy. If
    ``overtakes``, the batcher runs before an instance that has notified it of the end of an execution is idle.
    """

    candidate: Candidate
    service: list[int]
    each: int = 1
    mix: SizeDistribution | None = None
    shares: tuple[float, ...] = (1.0,)
    policy: tuple[int, int, str] = (0, 0, "REJECT")
    levels: tuple[tuple[int, int, str], ...] = ()
    overtakes: bool = False
    fixed: bool = True
    prefetch: bool = True
    concurrency: int = 0
    arrivals: tuple[int, ...] = ()
    send: int = 0
    receive: int = 0
    client: int = 0
    spacing: int = 0
    wake: int = 0
    dispatch: int = 0
    release: int = 0
    gaps: tuple[int, ...] = (0,)

    def job(self) -> Scenario:
        times = np.repeat(np.array(self.service, float)[:, None] / 1e9, self.candidate.instance_count, axis=1)
        latencies = (self.send, self.receive, self.client, self.spacing, self.wake, self.dispatch, self.release)
        candidate, level_fields = with_policy(self.candidate, *self.policy), dict[str, int | str]()
        for level, (limit, timeout_us, action) in enumerate(self.levels, 1):
            if limit or timeout_us:
                level_fields |= {
                    f"max_queue_size_{level}": limit,
                    f"default_timeout_microseconds_{level}": timeout_us,
                }
                level_fields[f"timeout_action_{level}"] = action
        return Scenario(
            leveled(candidate, len(self.levels), **level_fields) if self.levels else candidate,
            ClosedLoopLoad(self.concurrency) if self.concurrency else OpenLoopLoad(np.array(self.arrivals) / 1e9),
            ServiceTimes(times, self.each),
            Overheads(*(latency / 1e9 for latency in latencies)),
            self.each,
            self.fixed,
            None if any(self.policy[:2]) or self.levels else self.prefetch,
            self.mix,
            self.shares,
            missed_share=1.0 if self.overtakes else 0.0,
            priorities=SizeDistribution(((1, len(self.levels), 1.0),)) if self.levels else None,
        )


class Triton:
    """A literal copy of dynamic_batch_scheduler.cc, scheduler_utils.cc, instance_queue.cc and rate_limiter.cc.

    Where Triton's batcher forms no batch and does not wait, it tries again at once, until an instance takes the
    current payload, a request arrives or one expires. Here it runs at these times (``polling``).
    """

    def __init__(self, setting: Setting) -> None:
        self.s, self.c = setting, setting.candidate
        self.now = 0
        self.limit = max(1, self.c.max_batch_size)
        self.delay = 1000 * self.c.max_queue_delay_us if self.c.dynamic_batching else 0
        self.preferred = sorted(set(self.c.preferred_batch_sizes or (self.limit,)))
        policies = {
            level: policy if any(policy[:2]) else setting.policy for level, policy in enumerate(setting.levels, 1)
        }
        self.levels = [Level(policy) for policy in (policies or {0: setting.policy}).values()]
        self.queued_samples = 0
        self.prefetch = setting.prefetch and not (setting.levels or any(setting.policy[:2]))
        self.unanswered: list[Request] = []
        self.rejected: dict[int, int] = {}  # number to time
        self.timed_out: dict[int, int] = {}
        self.slot_deadline: int | None = None
        self.polling = False
        self.mix = *setting.job().mix(), setting.job().priority_mix()
        self.payloads: deque[Payload] = deque()
        self.current = Payload()
        self.saturated, self.next_preferred, self.batcher_at = False, 0, 500_000_000
        self.due: list[Request] = []
        self.arrived = 0
        self.issued, self.last_arrival, self.last_response = 0, -setting.spacing, -setting.spacing
        for sent in setting.arrivals or [0] * setting.concurrency:
            self.issue(sent)
        self.sleeping = deque(range(self.c.instance_count))
        self.waking: dict[int, int] = {}
        self.running: dict[int, tuple[int, Payload]] = {}
        self.releasing: dict[int, int] = {}
        self.overtaken: dict[int, int] = {}
        self.run_of: dict[int, int] = {}
        self.log: list[tuple[int, int, list[int]]] = []  # instance, start, requests

    def issue(self, sent: int) -> None:
        gap = self.s.gaps[self.issued % len(self.s.gaps)]
        self.last_arrival = max(sent + self.s.send, self.last_arrival + self.s.spacing + gap)
        self.due.append(Request(sent, self.last_arrival))
        self.issued += 1

    def run(self, count: int, until: int) -> list[tuple[int, int, list[int]]]:
        """Return the executions, at least ``count``, after all events up to ``until``."""
        while len(self.log) < count or self.now <= until:
            events = [(end, 0, j) for j, (end, _) in self.running.items()]
            events += [(end, 0, j) for j, end in {**self.releasing, **self.overtaken}.items()]
            events += [(self.due[0].arrived, 1, 0)] if self.due else []
            events += [(self.batcher_at, 2, 0)]
            events += [(at, 3, j) for j, at in self.waking.items()]
            self.now, kind, j = min(events)
            (self.instance_event, self.arrival, self.batcher_thread, self.instance_woken)[kind](j)
        return self.log

    # clients

    def arrival(self, _: int) -> None:
        request = self.due.pop(0)
        request.number, self.arrived = self.arrived, self.arrived + 1
        request.samples, request.shape, request.level = (int(ring[request.number % RING_LENGTH]) for ring in self.mix)
        if not self.c.dynamic_batching:
            self.enqueue(Payload([request]))
            return
        self.queued_samples += request.samples
        level = self.levels[max(request.level - 1, 0)]
        if 0 < level.policy[0] <= len(level.fresh) + len(level.delayed):
            self.rejected[request.number] = self.now
            self.refuse([request])
            return
        level.fresh.append(request)
        wake = self.slot_available()
        if self.s.fixed:
            enough = self.queued_samples >= self.next_preferred
            wake &= self.saturated or self.current.executing or self.polling or enough
        if wake:
            self.wake_batcher()

    def refuse(self, requests: list[Request]) -> None:
        for _request in requests:
            self.last_response = max(self.now + self.s.receive, self.last_response + self.s.spacing)
            if self.s.concurrency:
                self.issue(max(self.last_response + self.s.client, self.now + REFUSED_PAUSE))

    # instances

    def instance_event(self, j: int) -> None:
        if j in self.running:
            _, payload = self.running.pop(j)
            for _request in payload.requests if self.s.concurrency else ():
                self.last_response = max(self.now + self.s.receive, self.last_response + self.s.spacing)
                self.issue(self.last_response + self.s.client)
            self.releasing[j] = self.now + self.s.release
            if self.s.release:
                return
        if self.overtaken.pop(j, None) is None:
            del self.releasing[j]
            if self.s.overtakes and self.c.dynamic_batching and not self.prefetch and not self.overtaken:
                idle_at = self.now + preempted_ns(self.run_of[j], self.now)
                self.overtaken[j], self.batcher_at = idle_at, self.now
                return
            self.wake_batcher()
        self.dequeue(j)

    def instance_woken(self, j: int) -> None:
        del self.waking[j]
        self.dequeue(j)

    def dequeue(self, j: int) -> None:
        if not self.payloads:
            self.sleeping.append(j)
            return
        payload = self.payloads.popleft()
        payload.executing = True
        while self.delay > 0 and self.limit > 1 and self.payloads and not payload.closed:
            front = self.payloads[0]
            if front.closed or not self.now - min(r.arrived for r in front.requests) > self.delay:
                break
            front.executing = True
            if payload.samples + front.samples > self.limit:
                break
            if not self.s.fixed and payload.requests[0].shape != front.requests[0].shape:
                break
            payload.requests += front.requests
            self.payloads.popleft()
        self.wake_batcher()
        self.running[j] = self.now + self.s.service[payload.samples // self.s.each - 1], payload
        self.run_of[j] = len(self.log)
        self.log.append((j, self.now, [request.number for request in payload.requests]))

    def enqueue(self, payload: Payload) -> None:
        self.payloads.append(payload)
        if self.sleeping:
            self.waking[self.sleeping.popleft()] = self.now + self.s.dispatch

    def slot_available(self) -> bool:
        if self.prefetch:
            return len(self.payloads) < 2 * self.c.instance_count
        return len(self.sleeping) + len(self.waking) - len(self.payloads) > 0

    # the batcher's thread

    def wake_batcher(self) -> None:
        if self.c.dynamic_batching:
            self.batcher_at = min(self.batcher_at, self.now + (0 if self.polling else self.s.wake))

    def batcher_thread(self, _: int) -> None:
        while True:
            self.refuse(self.unanswered)
            self.unanswered, self.polling = [], False
            if self.saturated or self.current.executing:
                self.current, self.saturated, self.next_preferred = Payload(), False, 0
            if not self.waiting() and self.slot_deadline is None:
                self.batcher_at = self.now + 500_000_000
                return
            if not self.slot_available():
                if self.slot_deadline is not None and self.now >= self.slot_deadline:
                    self.slot_deadline = None
                    for level in self.levels:
                        if level.policy[2] == "REJECT":
                            self.reject(level.take_expired(self.now))
                    self.refuse(self.unanswered)
                    self.unanswered = []
                if self.slot_deadline is None:
                    self.slot_deadline = self.now + 500_000_000
                self.batcher_at = self.slot_deadline
                return
            self.slot_deadline = None
            wait_us, pending = self.dynamic_batch()
            if not self.waiting():
                continue
            if wait_us > 0:
                self.batcher_at = self.now + 1000 * wait_us + self.s.wake
                return
            if not pending and not self.saturated:
                self.polling = True
                self.batcher_at = self.now + 500_000_000
                for level in self.reached:
                    if level.policy[1] and level.fresh:
                        expiry = level.fresh[0].arrived + 1000 * level.policy[1]
                        self.batcher_at = min(self.batcher_at, expiry + 1)
                return
            fresh = not self.current.requests
            for _ in range(pending):
                first = next(level.fresh or level.delayed for level in self.levels if level.fresh or level.delayed)
                self.current.requests.append(first.popleft())
                self.queued_samples -= self.current.requests[-1].samples
            if pending and fresh:
                self.enqueue(self.current)

    def waiting(self) -> bool:
        return any(level.fresh or level.delayed for level in self.levels)

    def reject(self, expired: list[Request]) -> None:
        self.unanswered += expired
        self.timed_out.update((request.number, self.now) for request in expired)

    def at_cursor(self) -> Iterator[tuple[Request, int | None]]:
        """Yield the requests with the times at which they expire. The policy of a level is applied on the way."""
        self.reached: list[Level] = []
        for level in self.levels:
            self.reached.append(level)
            expired = level.take_expired(self.now)
            if level.policy[2] == "DELAY":
                level.delayed += expired
            else:
                self.reject(expired)
                self.queued_samples -= sum(request.samples for request in expired)
            timeout = 1000 * level.policy[1]
            yield from [(request, request.arrived + timeout if timeout else None) for request in level.fresh]
            yield from [(request, None) for request in level.delayed]

    def dynamic_batch(self) -> tuple[int, int]:
        """Return (time to wait in µs, requests to take)."""
        size = self.current.samples
        pending = best = count = best_count = 0
        send_now = False
        shape = self.current.requests[0].shape if self.current.requests else None
        seen: list[Request] = []
        expiries: list[int] = []
        for request, expiry in self.at_cursor():
            each = request.samples
            if size + pending == 0:
                shape = request.shape
            else:
                if size + pending + each > self.preferred[-1] and best == 0:
                    best, best_count, self.saturated = pending, count, True
                if size + pending + each > self.limit:
                    send_now = True
                    break
                if not self.s.fixed and request.shape != shape:
                    self.current.closed = send_now = True
                    break
            pending += each
            count += 1
            seen.append(request)
            if expiry is not None:
                expiries.append(expiry)
            if size + pending in self.preferred:
                best, best_count = pending, count
        age = self.now - min((request.arrived for request in seen), default=0)
        late = self.delay != 0 and age >= self.delay
        if best != 0 and not late:
            if self.delay == 0:
                self.saturated = True
            return 0, best_count
        if count == 0:
            return 0, 0
        if send_now or size + pending >= self.preferred[-1]:
            self.saturated = True
            return 0, count
        if late or self.delay == 0:
            return 0, count
        above = [p for p in self.preferred if p > size + pending]
        self.next_preferred = (above[0] if above else self.preferred[0]) - size
        if not self.saturated and size != 0 and size not in self.preferred:
            return 0, count
        wait = self.delay - age
        return min([wait, *(expiry - self.now for expiry in expiries)]) // 1000, count


@st.composite
def settings_of_triton(draw: st.DrawFn, *, differing: bool = False) -> Setting:
    """Draw a setting; ``differing``: with mixed sizes, several shapes or a queue policy, each of them possibly."""
    each = draw(st.sampled_from([1, 1, 2, 3]))
    limit = draw(st.integers(each, 10 * each))
    dynamic = draw(st.sampled_from([True, True, True, False]))
    preferred = draw(st.lists(st.integers(1, limit), max_size=3, unique=True)) if dynamic else []
    delay = draw(st.sampled_from([0, 1, 7, 20, 100])) if dynamic else 0
    instances = draw(st.integers(1, 3))
    times = draw(st.lists(st.integers(1, 60), min_size=limit // each, max_size=limit // each))
    step = draw(st.sampled_from([1000, 137]))  # on whole microseconds many things coincide
    latency = st.sampled_from([0, 0, step, 3 * step, 11 * step])
    closed = draw(st.booleans())
    gaps = draw(st.lists(st.sampled_from([0, 0, 1, 2, 5, 30]), min_size=1, max_size=40))
    mix, policy, levels = None, (0, 0, "REJECT"), list[tuple[int, int, str]]()
    shares: tuple[float, ...] = (1.0,)
    if differing:
        shares = draw(st.sampled_from([(1.0,), (3.0, 1.0), (1.0, 1.0, 2.0)]))
        policies = st.tuples(
            st.sampled_from([0, 0, 1, 2, 5]), st.sampled_from([0, 0, 3, 15, 60]), st.sampled_from(["REJECT", "DELAY"])
        )
        policy = draw(policies)
        levels = draw(st.lists(policies, min_size=2, max_size=3)) if dynamic and draw(st.booleans()) else []
        if each == 1 and draw(st.booleans()):
            largest = draw(st.integers(1, limit))
            mix = SizeDistribution(((1, largest, 1.0), (largest, largest, draw(st.sampled_from([0.2, 2.0])))))
    return Setting(
        Candidate(limit, dynamic, delay, tuple(sorted(preferred)), instances),
        [step * time for time in sorted(times)],
        each,
        mix,
        shares,
        policy,
        tuple(levels),
        overtakes=differing and draw(st.sampled_from([False, False, True])),
        fixed=draw(st.booleans()),
        prefetch=draw(st.sampled_from([True, True, False])),
        concurrency=draw(st.integers(1, 25)) if closed else 0,
        arrivals=() if closed else tuple(step * int(t) for t in np.cumsum(gaps)),
        send=draw(latency),
        receive=draw(latency),
        client=draw(latency),
        spacing=draw(latency),
        wake=draw(latency),
        dispatch=draw(latency),
        release=draw(latency),
        gaps=draw(st.sampled_from([(0,), (0, 0, 40 * step), (step, 0, 9 * step, 2 * step, 0)])),
    )


REPEATABLE = settings().derandomize  # the examples are the same each time, unless --long is given


def check_against_triton(setting: Setting) -> None:
    log = trace(setting.job(), gaps_s=np.array(setting.gaps) / 1e9, interval=MeasurementInterval(0, 60))
    starts = (log.start_s * 1e9).round().astype(int).tolist()
    batches = [np.flatnonzero(log.execution == e).tolist() for e in range(len(starts))]
    reference = Triton(setting)
    until = round(1e9 * max([log.arrived_s[-1], *log.end_s[~np.isnan(log.end_s)]]))
    if setting.arrivals:
        until += 2_000_000_000  # the last requests may expire while the batcher waits
    expected = reference.run(len(starts), until)[: len(starts)]
    assert list(zip(log.instance.tolist(), starts, batches, strict=True)) == [
        (instance, start, sorted(requests)) for instance, start, requests in expected
    ]
    for outcome, numbers in ((REJECTED, reference.rejected), (TIMED_OUT, reference.timed_out)):
        refused = set(np.flatnonzero(log.execution == outcome).tolist())
        assert {number for number, at in numbers.items() if at < until} <= refused <= numbers.keys()
    assert max(log.samples, default=0) <= setting.candidate.max_batch_size
    assert log.requests.tolist() == [len(batch) for batch in batches]
    assert log.samples.tolist() == [int(log.request_samples[batch].sum()) for batch in batches]
    if setting.arrivals:
        ended = sum(log.requests) + (log.execution == REJECTED).sum() + (log.execution == TIMED_OUT).sum()
        assert ended == len(setting.arrivals)
        assert not np.isnan(log.end_s).any()
    if not setting.fixed and setting.candidate.dynamic_batching:
        assert all(len(set(log.request_shape[batch].tolist())) == 1 for batch in batches)


@settings(max_examples=150 if REPEATABLE else 400, deadline=None, suppress_health_check=list(HealthCheck))
@given(settings_of_triton())
def test_the_compiled_loop_agrees_with_the_reference_implementation(setting: Setting) -> None:
    check_against_triton(setting)


@settings(max_examples=250 if REPEATABLE else 600, deadline=None, suppress_health_check=list(HealthCheck))
@given(settings_of_triton(differing=True))
def test_the_compiled_loop_agrees_for_requests_that_differ_and_for_queue_policies(setting: Setting) -> None:
    check_against_triton(setting)


# --- laws ---


def random_candidate(seed: int) -> Candidate:
    chance = np.random.default_rng(seed)
    limit = int(chance.choice([1, 2, 4, 8, 16]))
    sizes = tuple(sorted({int(size) for size in chance.integers(1, limit + 1, chance.integers(0, 3))}))
    if chance.random() < 0.2:
        return Candidate(limit, instance_count=int(chance.integers(1, 5)))
    return Candidate(limit, True, int(chance.choice([0, 500, 3000])), sizes, int(chance.integers(1, 5)))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.booleans())
def test_little_s_law_holds_in_a_closed_loop(seed: int, concurrency: int, fixed: bool) -> None:
    """The clients are the completions per second times the time from one send to the next."""
    result = simulate(
        random_candidate(seed),
        ClosedLoopLoad(concurrency),
        TYPICAL_TIMES,
        TYPICAL_OVERHEADS,
        fixed_shapes=fixed,
        jitter=lognormal_jitter(0.1, seed),
        interval=MeasurementInterval(500, 6000),
    )
    assert result.throughput_infer_per_sec * (result.latency_avg_s + 20 * US) == pytest.approx(concurrency, rel=0.02)
    assert 0 < result.utilization <= 1
    assert 0 <= result.queue_avg_s < result.latency_avg_s
    assert result.latency_p50_s <= result.latency_p90_s <= result.latency_p95_s <= result.latency_p99_s


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_the_throughput_of_an_open_loop_below_capacity_is_its_rate(seed: int) -> None:
    candidate = random_candidate(seed)
    rate = 0.5 / TYPICAL_TIMES.seconds[0, candidate.instance_count - 1] * candidate.instance_count
    result = simulate(
        candidate, poisson_load(rate, 3000, seed), TYPICAL_TIMES, TYPICAL_OVERHEADS, interval=MeasurementInterval(0)
    )
    assert not result.overloaded
    assert result.requests == 3000
    assert result.throughput_infer_per_sec == pytest.approx(3000 / result.duration_s)
    assert result.throughput_infer_per_sec == pytest.approx(rate, rel=0.1)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8, 0.9])
@pytest.mark.parametrize("candidate", [Candidate(1), Candidate(0), batcher(1), batcher(1, 1000)])
def test_one_instance_without_batching_is_an_m_d_1_queue(candidate: Candidate, load: float) -> None:
    service = 2 * MS
    result = simulate(candidate, poisson_load(load / service, 400_000), constant(service))
    expected = service + load * service / (2 * (1 - load))
    assert result.latency_avg_s == pytest.approx(expected, rel=0.03)
    assert result.utilization == pytest.approx(load, rel=0.02)


def test_instances_that_share_one_processor_are_a_processor_sharing_queue() -> None:
    """In M/G/1-PS the mean time in the system is service / (1 - load), for any distribution of service times."""
    service, load, instances = 2 * MS, 0.5, 40
    shared = ServiceTimes(np.array([[service * busy for busy in range(1, instances + 1)]]))
    arrivals = poisson_load(load / service, 200_000, 2)
    for relative_std in (0.0, 0.8):
        result = simulate(
            Candidate(1, instance_count=instances), arrivals, shared, jitter=lognormal_jitter(relative_std, 3)
        )
        assert result.latency_avg_s == pytest.approx(service / (1 - load), rel=0.04)


@pytest.mark.parametrize("instances", [1, 2, 3])
def test_at_saturation_every_batch_is_full(instances: int) -> None:
    times = linear_times(1 * MS, 0.1 * MS, 8, instances)
    for candidate in (batcher(8, instances=instances), batcher(8, 2000, instances=instances)):
        result = simulate(candidate, ClosedLoopLoad(64 * instances), times)
        assert result.mean_batch_size == 8
        assert result.throughput_infer_per_sec == pytest.approx(instances * 8 / (1.8 * MS), rel=0.001)
        assert result.utilization == pytest.approx(1)


def test_an_open_loop_above_capacity_says_so() -> None:
    capacity = 8 / (1.8 * MS)
    times = linear_times(1 * MS, 0.1 * MS, 8)
    for rate, overloaded in ((0.5, False), (0.9, False), (1.05, True), (1.5, True), (5.0, True)):
        for arrivals in (
            constant_load(rate * capacity, 3000),
            poisson_load(rate * capacity, 6000, 5),
        ):
            result = simulate(batcher(8), arrivals, times)
            assert result.overloaded is overloaded, rate
            assert result.throughput_infer_per_sec == pytest.approx(min(rate, 1) * capacity, rel=0.05)


def test_requests_that_wait_for_a_preferred_size_are_no_overload() -> None:
    """A few requests nearly always wait for a preferred size, and their smallest number varies by chance."""
    candidate = batcher(8, 1000, 4, instances=2)
    times = linear_times(1 * MS, 0.01 * MS, 8, 2, contention=0.4)
    capacity = simulate(candidate, ClosedLoopLoad(64), times).throughput_infer_per_sec
    jitter = lognormal_jitter(0.1, 99)
    flagged = [
        share
        for share in np.linspace(0.6, 0.9, 31)
        if simulate(candidate, poisson_load(share * capacity, 20_000, 7), times, jitter=jitter).overloaded
    ]
    assert not flagged


def test_more_never_hurts_where_nothing_contends() -> None:
    times = constant(2 * MS, 16, 8)
    rates = [
        simulate(Candidate(16), ClosedLoopLoad(c), times, TYPICAL_OVERHEADS).throughput_infer_per_sec
        for c in range(1, 12)
    ]
    assert rates == sorted(rates)
    for candidate in (batcher(16), Candidate(16)):
        loads = [
            simulate(replace(candidate, instance_count=n), ClosedLoopLoad(32), times, TYPICAL_OVERHEADS)
            for n in range(1, 9)
        ]
        rates = [result.throughput_infer_per_sec for result in loads]
        assert all(after >= 0.98 * before for before, after in pairwise(rates))
    slower = [simulate(batcher(16), ClosedLoopLoad(32), constant(s * MS, 16)).latency_p95_s for s in (1, 2, 3)]
    assert slower == sorted(slower)


def test_samples_and_requests_are_distinguished() -> None:
    single = simulate(batcher(8, 1000), ClosedLoopLoad(6), TYPICAL_TIMES, TYPICAL_OVERHEADS)
    coarse = ServiceTimes(TYPICAL_TIMES.seconds, step=100)  # the same times for a hundred times the samples
    bulk = simulate(batcher(800, 1000), ClosedLoopLoad(6), coarse, TYPICAL_OVERHEADS, request_batch_size=100)
    assert bulk.throughput_infer_per_sec == pytest.approx(100 * single.throughput_infer_per_sec)
    assert bulk.latency_p95_s == single.latency_p95_s
    assert bulk.mean_batch_size == pytest.approx(100 * single.mean_batch_size)


def test_one_late_request_separates_clients_that_shared_a_batch() -> None:
    """Both states are stable, and one is a third faster."""
    candidate, times = batcher(8, 5000), linear_times(20 * MS, 0.5 * MS, 8)
    together = simulate(candidate, ClosedLoopLoad(4), times, TYPICAL_OVERHEADS)
    assert together.mean_batch_size == 4
    late = np.array([0.0, 0.0, 9 * MS, 9 * MS] + [0.0] * 9999)
    parted = simulate(candidate, ClosedLoopLoad(4), times, TYPICAL_OVERHEADS, gaps_s=late)
    assert parted.mean_batch_size == 2
    assert parted.throughput_infer_per_sec < 0.75 * together.throughput_infer_per_sec


# --- how it is called ---


def many_jobs() -> list[Scenario]:
    loads: list[SimulatedLoad] = [
        ClosedLoopLoad(1),
        ClosedLoopLoad(7),
        ClosedLoopLoad(30),
        poisson_load(300, 500),
        constant_load(900, 700),
    ]
    return [
        Scenario(random_candidate(seed), load, TYPICAL_TIMES, TYPICAL_OVERHEADS)
        for seed in range(20)
        for load in loads
    ]


def test_equal_input_gives_equal_output_alone_and_in_threads() -> None:
    jobs, jitter = many_jobs(), lognormal_jitter(0.2, 7)
    together = simulate_many(jobs, jitter=jitter)
    assert [simulate_many([job], jitter=jitter)[0] for job in jobs] == together
    assert simulate_many(jobs, jitter=jitter, threads=3) == together
    assert simulate_many(jobs[:2], jitter=jitter, threads=8) == together[:2]
    assert simulate_many([]) == []
    assert simulate_many(jobs, jitter=lognormal_jitter(0.2, 8)) != together


def test_jitter_has_the_requested_mean_and_spread() -> None:
    drawn = lognormal_jitter(0.3)
    assert drawn.mean() == pytest.approx(1, abs=0.02)
    assert drawn.std() == pytest.approx(0.3, abs=0.03)
    steady, noisy = (
        simulate(Candidate(1), poisson_load(300, 5000), constant(2 * MS), jitter=jitter)
        for jitter in (None, lognormal_jitter(0.5))
    )
    assert noisy.latency_p99_s > steady.latency_p99_s


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (
            Scenario(batcher(4), ClosedLoopLoad(1), TYPICAL_TIMES, request_batch_size=5),
            "requests of 5 samples are refused",
        ),
        (
            Scenario(Candidate(0), ClosedLoopLoad(1), TYPICAL_TIMES, request_batch_size=2),
            "requests of 2 samples are refused",
        ),
        (Scenario(batcher(32), ClosedLoopLoad(32), TYPICAL_TIMES), "up to 16 samples, but a batch can have 32"),
        (
            Scenario(batcher(4, instances=5), ClosedLoopLoad(9), TYPICAL_TIMES),
            "up to 4 busy instances, but 5 can be busy",
        ),
        (
            Scenario(batcher(4), ClosedLoopLoad(1), ServiceTimes(TYPICAL_TIMES.seconds, step=3)),
            "in steps of 3 samples",
        ),
        (Scenario(batcher(4), ClosedLoopLoad(0), TYPICAL_TIMES), "load: no requests"),
        (Scenario(batcher(4), OpenLoopLoad(np.array([])), TYPICAL_TIMES), "load: no requests"),
        (Scenario(batcher(4), OpenLoopLoad(np.array([1.0, 0.5])), TYPICAL_TIMES), "not ascending"),
        (Scenario(batcher(4, instances=0), ClosedLoopLoad(1), TYPICAL_TIMES), "instance_count: must be at least 1"),
    ],
)
def test_a_scenario_that_cannot_be_simulated_is_refused(job: Scenario, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate_many([job])


def test_bad_numbers_are_refused() -> None:
    for seconds in (np.zeros((2, 2)), np.ones(3), np.full((1, 1), math.nan), np.ones((0, 2))):
        with pytest.raises(ValueError, match="service times"):
            ServiceTimes(seconds)
    with pytest.raises(ValueError, match="wake_s is -1"):
        Overheads(wake_s=-1)
    with pytest.raises(ValueError, match="jitter"):
        simulate(batcher(1), ClosedLoopLoad(1), TYPICAL_TIMES, jitter=np.zeros(3))
    with pytest.raises(ValueError, match="gaps"):
        simulate(batcher(1), ClosedLoopLoad(1), TYPICAL_TIMES, gaps_s=np.array([-1.0]))
    with pytest.raises(ValueError, match="no request is left to measure"):
        simulate(batcher(1), OpenLoopLoad(np.zeros(5)), TYPICAL_TIMES, interval=MeasurementInterval(5))


def test_service_times_need_cover_no_more_than_can_happen() -> None:
    assert simulate(batcher(64, instances=9), ClosedLoopLoad(3), TYPICAL_TIMES).requests >= 2000


@pytest.mark.parametrize("measured_sizes", [2, 3, 16])
def test_service_times_are_extended_on_their_line(measured_sizes: int) -> None:
    line = np.outer(3e-3 + 5e-4 * np.arange(1, 41), [1.0, 1.5])
    times = ServiceTimes(line[:measured_sizes], step=2)
    assert times.up_to(2 * measured_sizes) is times
    assert times.up_to(79).step == 2
    assert times.up_to(79).seconds == pytest.approx(line)
    assert ServiceTimes(line[:1]).up_to(3).seconds == pytest.approx(np.outer([1.0, 1.5, 2.0], line[0]))


@given(st.lists(st.integers(0, 20), min_size=1), st.data())
def test_numbers_are_partitioned_at_a_rank(numbers: list[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(numbers) - 1))
    rank = data.draw(st.integers(start, len(numbers) - 1))
    values = np.array(numbers)
    partition(values, start, rank)
    assert values[rank] == sorted(numbers[start:])[rank - start]
    assert max(values[start : rank + 1]) == values[rank] == min(values[rank:])
    assert sorted(values[start:]) == sorted(numbers[start:])
    assert values[:start].tolist() == numbers[:start]


def test_any_percentile_is_estimated_from_the_simulated_ones() -> None:
    result = SimulationResult(1.0, 5.0, 7.0, 23.0, 30.0, 46.0, 0.0, 5.0, 1.0, 1.0, 100, 1.0, False)
    names = (
        "latency-p50",
        "latency-p80",
        "latency-p90",
        "latency-p95",
        "latency-p97",
        "latency-p99",
        "latency-p99.9",
    )
    estimated = [result.latency_s(name) for name in names]
    assert estimated == sorted(estimated)
    assert result.latency_s("latency-p95") == 30.0
    assert result.latency_s("latency-avg") == 5.0
    assert estimated[-1] == pytest.approx(46 + (46 - 30) * math.log(10) / math.log(5)), "the exponential continues"
