"""Test failed requests: their kinds, their numbers in each window, and that they are never counted as served."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from objectives.metrics import METRICS, Measurement
from objectives.priority_stats import from_text
from objectives.sla import Sla
from optimizer.core.errors import MeasurementError
from optimizer.core.trial import LoadPoint
from optimizer.measure.load_client.client import MAX_MESSAGES, OTHER_MESSAGES, WARM_UPS, ClosedLoopClient
from optimizer.measure.load_client.client_files import NEVER, ResponseRecord, SendPlan, SendRecord
from optimizer.measure.load_client.closed_loop import CLOSED_LOOP_LEAD_IN_SECONDS, summarize_closed_loop
from optimizer.measure.load_client.measured_requests import (
    PlannedLoad,
    RequestOutcome,
    failure_outcome,
    split_failures,
)
from optimizer.measure.load_client.open_loop import LateError, summarize_open_loop
from optimizer.measure.server_errors import is_refused_by_queue
from tests.load_clients import SimulatedNetwork, run_in_this_process

FULL = "[request id: <id_unknown>] Exceeds maximum queue size"
EXPIRED = "[request id: <id_unknown>] Request timeout expired"
CLOSED, OPEN = LoadPoint(2, concurrency=3), LoadPoint(2, request_rate=100.0)
SIZES = np.array([2])
MS = 1_000_000
SLA = Sla.from_bounds({"p95": 5.0})


def record(count: int, failures: Any, latency_ms: float = 4.0) -> SendRecord:
    """Return a record of ``count`` requests in one second after the lead-in, of which each third takes 8 ms."""
    sent = 1000 * CLOSED_LOOP_LEAD_IN_SECONDS * MS + np.linspace(0, 990, count) * MS
    latencies = np.where(np.arange(count) % 3 == 0, 2 * latency_ms, latency_ms) * MS
    sent_ns, answered_ns = sent.astype(np.int64), (sent + latencies).astype(np.int64)
    return SendRecord(sent_ns, sent_ns, answered_ns, int(answered_ns.max()) + MS, failures=failures)


def two_windows(send_record: SendRecord) -> list[Measurement]:
    """Return the measurements of the two halves of a closed loop."""
    return summarize_closed_loop(send_record, PlannedLoad(CLOSED, 1.0, SIZES, sla=SLA), math.inf, 2)


@pytest.mark.parametrize(
    ("message", "outcome"),
    [
        (FULL, RequestOutcome.REJECTED),
        (EXPIRED, RequestOutcome.TIMED_OUT),
        ("Deadline Exceeded", RequestOutcome.TIMED_OUT),
        ("no such input", RequestOutcome.FAILED),
    ],
)
def test_the_message_decides_the_outcome(message: str, outcome: RequestOutcome) -> None:
    assert failure_outcome(message) == outcome


@pytest.mark.parametrize(("message", "expected"), [(FULL, True), (EXPIRED, True), ("no such input", False)])
def test_the_queue_refuses_requests_by_their_number_and_by_their_wait(message: str, expected: bool) -> None:
    assert is_refused_by_queue(message) is expected


def test_failed_requests_of_a_closed_loop_are_counted_in_their_window_and_not_served() -> None:
    send_record = record(100, {FULL: [0, 1, 99], EXPIRED: [2], "x": [60, 61]})
    first, second = two_windows(send_record)
    assert (first.rejected_requests, first.timed_out_requests, first.failed_requests) == (2, 1, 0)
    assert (second.rejected_requests, second.timed_out_requests, second.failed_requests) == (1, 0, 2)
    assert (first.requests or 0) + (second.requests or 0) == 94
    assert first.throughput_infer_per_sec == pytest.approx(2 * (first.requests or 0) / 0.5)
    uncounted = two_windows(replace(send_record, failures=None))
    assert uncounted[0].errors is None
    assert METRICS["error-rate"].value(uncounted[0]) is None


def test_failed_requests_of_an_open_loop_are_counted_by_their_planned_time() -> None:
    (result,) = summarize_open_loop(record(100, {FULL: [1, 2]}), PlannedLoad(OPEN, 2.0, SIZES, sla=SLA), math.inf)
    assert (result.requests, result.errors) == (98, 2)
    assert METRICS["error-rate"].value(result) == pytest.approx(2.0)


def test_the_throughput_of_an_open_loop_is_of_the_sizes_of_the_requests_that_did_not_fail() -> None:
    smaller_failed = record(100, {FULL: list(range(0, 100, 2))})
    planned = PlannedLoad(OPEN, 2.5, np.array([2, 8]), lead_in_seconds=0.5)
    (result,) = summarize_open_loop(smaller_failed, planned, math.inf)
    assert result.throughput_infer_per_sec == 50 * 8 / 2.0


def test_a_late_request_among_many_that_the_server_rejects_is_no_backlog_of_the_client() -> None:
    on_time = record(100, {FULL: [*range(1, 90), *range(91, 100)]})
    send_record = replace(on_time, sent_ns=on_time.planned_ns + 41 * MS * (np.arange(100) == 90))
    (result,) = summarize_open_loop(send_record, PlannedLoad(OPEN, 2.0, SIZES), math.inf)
    assert (result.requests, result.rejected_requests) == (2, 98)
    send_record = replace(on_time, sent_ns=on_time.planned_ns + 41 * MS * (np.arange(100) >= 70))
    with pytest.raises(LateError, match="cannot keep up"):
        summarize_open_loop(send_record, PlannedLoad(OPEN, 2.0, SIZES), math.inf)


def test_a_request_that_the_client_gave_up_has_timed_out() -> None:
    send_record = record(100, {})
    send_record.answered_ns[-1] = NEVER
    (result,) = summarize_open_loop(send_record, PlannedLoad(OPEN, 2.0, SIZES, sla=SLA), math.inf)
    assert (result.requests, result.timed_out_requests) == (99, 1)
    (overloaded,) = summarize_open_loop(
        replace(send_record, overload="overloaded"), PlannedLoad(OPEN, 2.0, SIZES, sla=SLA), math.inf
    )
    assert overloaded.timed_out_requests == 0


def test_a_request_that_hangs_in_a_closed_loop_has_timed_out() -> None:
    """One sent shortly before the end may have been answered soon, so it is left out like the others in flight."""
    send_record = replace(record(100, {}), ended_ns=10_000 * MS)
    send_record.answered_ns[[10, 99]] = NEVER
    send_record.sent_ns[99] = send_record.planned_ns[99] = 1000 * CLOSED_LOOP_LEAD_IN_SECONDS * MS + 995 * MS
    first, second = two_windows(send_record)
    assert (first.timed_out_requests, second.timed_out_requests) == (0, 1)


def test_failures_in_one_third_of_an_open_loop_are_no_steady_state() -> None:
    (steady,) = summarize_open_loop(
        record(120, {FULL: list(range(1, 120, 4))}), PlannedLoad(OPEN, 1.5, SIZES, sla=SLA), 0.1
    )
    assert steady.stable, steady.reason
    (burst,) = summarize_open_loop(
        record(120, {FULL: list(range(81, 111))}), PlannedLoad(OPEN, 1.5, SIZES, sla=SLA), 0.1
    )
    assert not burst.stable
    assert "unstable" in burst.reason


def test_a_window_in_which_all_failed_serves_nothing() -> None:
    send_record = record(100, {FULL: list(range(40, 100))})
    _, second = two_windows(send_record)
    assert (second.throughput_infer_per_sec, second.goodput_infer_per_sec, second.errors) == (0.0, 0.0, 50)
    assert SLA.violation(second) == math.inf


def test_if_every_request_fails_the_message_is_the_error() -> None:
    for summarize, load in ((summarize_closed_loop, CLOSED), (summarize_open_loop, OPEN)):
        with pytest.raises(MeasurementError, match=r"every request failed at .*Exceeds maximum queue size"):
            summarize(record(10, {FULL: list(range(10))}), PlannedLoad(load, 1.0, SIZES, sla=SLA), math.inf)


def test_goodput_counts_the_samples_within_all_latency_bounds() -> None:
    send_record = record(99, None)  # a third takes 8 ms, the others 4 ms
    for bounds, share in (({"p95": 5.0}, 2 / 3), ({"p50": 9.0}, 1.0), ({"p50": 9.0, "avg": 5.0}, 2 / 3), ({}, 1.0)):
        (result,) = summarize_closed_loop(
            send_record, PlannedLoad(CLOSED, 1.0, SIZES, sla=Sla.from_bounds(bounds)), math.inf
        )
        assert result.goodput_infer_per_sec == pytest.approx(share * (result.throughput_infer_per_sec or 0.0))
        (result,) = summarize_open_loop(
            send_record, PlannedLoad(OPEN, 2.0, SIZES, sla=Sla.from_bounds(bounds)), math.inf
        )
        assert result.goodput_infer_per_sec == pytest.approx(share * (result.throughput_infer_per_sec or 0.0))


def test_a_bound_on_a_percentile_is_on_all_requests() -> None:
    send_record = record(1000, {FULL: list(range(1, 41, 1))}, latency_ms=1.0)
    (result,) = summarize_closed_loop(send_record, PlannedLoad(CLOSED, 1.0, SIZES, sla=SLA), math.inf)
    assert Sla.from_bounds({"p95": 3.0}).is_met(result), "4 % failed"
    assert not Sla.from_bounds({"p99": 1000.0}).is_met(result), "more than 1 % failed"
    assert Sla.from_bounds({"avg": 3.0}).is_met(result)


def test_the_client_counts_failures_by_message_without_those_of_the_warm_up(tmp_path: Path) -> None:
    """A queue policy may reject a request of the warm-up too."""
    plan = SendPlan(("a:1",), 0.0, concurrency=1, seconds=0.5, counts_failures=True)

    def failing_network() -> SimulatedNetwork:
        messages = itertools.chain([FULL] * WARM_UPS, (f"message {number}" for number in itertools.count()))
        return SimulatedNetwork(lambda arrived: arrived + 0.02, lambda _: next(messages))

    counted = run_in_this_process(ClosedLoopClient(plan, [b""], (), None, failing_network()), tmp_path)
    assert not counted.error
    failures = dict(counted.failures or {})
    assert failures.pop(OTHER_MESSAGES)[:2] == [MAX_MESSAGES, MAX_MESSAGES + 1]
    assert failures == {f"message {number}": [number] for number in range(MAX_MESSAGES)}
    strict_plan = replace(plan, counts_failures=False)
    ended = run_in_this_process(ClosedLoopClient(strict_plan, [b""], (), None, failing_network()), tmp_path)
    assert (ended.error, ended.failures) == (FULL, None)


def test_responses_of_failed_requests_are_left_out() -> None:
    """The first and the second of three requests with 2, 0 and 3 responses fail."""
    messages = (b"a", b"b", b"c", b"d", b"e")
    responses = ResponseRecord(np.array([0, 2, 2, 5]), np.arange(5) * MS, messages, 0, 10 * MS)
    times = np.array([0, 1, 2]) * MS
    send_record = SendRecord(times, times, times + 9 * MS, 20 * MS, responses=responses, failures={FULL: [0, 1, 1]})
    served, sizes, failed = split_failures(send_record, SIZES)
    assert served.responses is not None
    assert served.responses.messages == (b"c", b"d", b"e")
    assert served.responses.offsets.tolist() == [0, 3]
    assert served.responses.arrived_ns.tolist() == [2 * MS, 3 * MS, 4 * MS]
    assert sizes.tolist() == [2]
    assert failed is not None
    assert failed.outcomes.tolist() == [RequestOutcome.REJECTED, RequestOutcome.REJECTED]


def test_without_counts_the_error_rate_is_unknown() -> None:
    assert Measurement(requests=5).errors is None
    assert METRICS["error-rate"].value(Measurement(requests=5)) is None


def test_each_priority_has_its_own_requests_and_failures() -> None:
    """Every fourth request has priority 1, and 5 of these are rejected; all windows together have every request."""
    send_record = record(100, {FULL: [0, 4, 8, 12, 16], EXPIRED: [1]})
    priorities = np.array([1, 2, 2, 2])
    for summarize, load, seconds in ((summarize_closed_loop, CLOSED, 1.0), (summarize_open_loop, OPEN, 1.5)):
        windows = summarize(
            send_record, PlannedLoad(load, seconds, SIZES, priorities=priorities, sla=SLA), math.inf, 2
        )
        statistics = [from_text(window.by_priority) for window in windows]
        assert [of_priority.priority for of_priority in itertools.chain(*statistics)] == [1, 2, 1, 2]
        for window, (first, second) in zip(windows, statistics, strict=True):
            assert (first.rejected, second.rejected) == (window.rejected_requests, 0)
            assert (first.timed_out, second.timed_out) == (0, window.timed_out_requests)
            assert first.served + second.served == window.requests
            total = first.throughput_infer_per_sec + second.throughput_infer_per_sec
            assert total == pytest.approx(window.throughput_infer_per_sec, rel=0.02)
        (without_priorities,) = summarize(send_record, PlannedLoad(load, seconds, SIZES, sla=SLA), math.inf)
        assert without_priorities.by_priority == ""
