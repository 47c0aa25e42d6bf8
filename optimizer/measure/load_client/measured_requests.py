"""The parts that both loops share: planned load, measurement of requests, also by priority, windows, and failures."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from objectives.arrays import FloatArray, IntArray
from objectives.latency_sketch import count_over, sketch_latencies
from objectives.metrics import LATENCY, METRICS, QUANTILES, TIMINGS, Measurement, Metric, Timing
from objectives.priority_stats import PriorityStatistic, to_text
from objectives.response_times import median_request
from objectives.sla import Sla
from optimizer.core.errors import RequestFailed
from optimizer.core.measurement_windows import MeasurementWindow, describe_instability
from optimizer.core.trial import LoadPoint
from optimizer.measure.load_client.client_files import NEVER, ResponseRecord, SendRecord
from optimizer.measure.load_client.responses import StreamOutput, StreamTimes
from optimizer.measure.server_errors import is_rejection, without_traceback

Mask: TypeAlias = npt.NDArray[np.bool_]


class RequestOutcome(IntEnum):
    """How a request ended: the server served it, or it failed for one of three reasons."""

    SERVED = 0
    REJECTED = 1
    TIMED_OUT = 2
    FAILED = 3


FAILURES = (RequestOutcome.REJECTED, RequestOutcome.TIMED_OUT, RequestOutcome.FAILED)

ONE_SAMPLE: IntArray = np.ones(1, dtype=np.int64)
ALIKE: IntArray = np.empty(0, dtype=np.int64)  # all requests have the default priority

LEAD_IN_SECONDS = 0.2  # sent but not counted: connection, caches and queue reach their steady state
SATURATED_CPU_SHARE = 0.9  # share of a core: the client has one thread
MAX_COMPARED_QUANTILE = 0.95  # level of the highest quantile that is compared between windows
MIN_STREAMED_REQUESTS = 20  # requests of a model that streams in each window
CLIENT_CPU_ADVICE = "reserve CPUs for it with --client-cpus, or stop other programs"


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """The load that a client was to send, and the bounds that its requests are counted against.

    Attributes:
        load: The load.
        seconds: The time for which requests were planned. In an open loop it includes the lead-in.
        sizes: The samples of the requests, in turn.
        token_output: Output whose elements are tokens, see ``responses``.
        priorities: The priorities of the requests, in turn.
        lead_in_seconds: The first part of the time of an open loop, which does not count.
        sla: The latency bounds.
    """

    load: LoadPoint
    seconds: float
    sizes: IntArray = field(default_factory=lambda: ONE_SAMPLE)
    token_output: str = ""
    priorities: IntArray = field(default_factory=lambda: ALIKE)
    lead_in_seconds: float = LEAD_IN_SECONDS
    sla: Sla = field(default_factory=Sla)


class TimedRequests(Protocol):
    """The requests of a time with their times. ``latencies_ms`` and ``sizes`` (samples) have an element for each."""

    @property
    def latencies_ms(self) -> FloatArray: ...

    @property
    def sizes(self) -> IntArray: ...

    @property
    def answered(self) -> Mask:
        """Which of them were answered. The latency of another one is a lower bound."""

    @property
    def stream_times(self) -> StreamTimes | None:
        """The times of the responses of a model that streams."""


def make_measurement(
    requests: TimedRequests, answered: IntArray, seconds: float, sla: Sla, reason: str, output: StreamOutput | None
) -> Measurement:
    """Return the measurement over ``seconds``, in which ``requests`` were due.

    Without any request it counts, with a throughput of 0. Otherwise a pause of the server would not lower the
    throughput.

    Args:
        requests: The requests, whose times and goodput it has.
        answered: The samples of each request whose answer counts for the throughput.
        seconds: The time.
        sla: The latency bounds.
        reason: Why the measurement is not stable; empty if it is.
        output: The responses of a model that streams.
    """
    if not len(requests.latencies_ms):
        return Measurement(0.0, goodput_infer_per_sec=0.0, requests=0, stable=not reason, reason=reason)
    fields: dict[str, Any] = output.fields(seconds) if output else {}
    if requests.stream_times:
        fields["response_times_ms"] = median_request(requests.stream_times.arrivals_ms.tolist())
    for timing in TIMINGS:
        fields |= timing_fields(timing, known_times(requests, timing), sla)
    in_time = within_bounds(requests, sla) & requests.answered
    return Measurement(
        throughput_infer_per_sec=float(answered.sum()) / seconds,
        goodput_infer_per_sec=float(requests.sizes[in_time].sum()) / seconds,
        requests=len(answered),
        stable=not reason,
        reason=reason,
        **fields,
    )


def timing_fields(timing: Timing, times_ms: FloatArray, sla: Sla) -> dict[str, Any]:
    """Return the fields of a Measurement with statistics, counts above the bounds and sketch; none without times."""
    if not len(times_ms):
        return {}
    return {
        timing.field_of("avg"): float(times_ms.mean()),
        **{timing.field_of(name): quantile(times_ms, level) for name, level in QUANTILES.items()},
        timing.over_field: count_over(times_ms, sla.bounds_ms(timing)),
        timing.sketch_field: sketch_latencies(times_ms),
    }


def known_times(requests: TimedRequests, timing: Timing) -> FloatArray:
    """Return the ``timing`` of each request that has one."""
    if timing is LATENCY:
        return requests.latencies_ms
    times_ms = requests.stream_times.by_timing()[timing] if requests.stream_times else np.empty(0)
    return times_ms[~np.isnan(times_ms)]


def within_bounds(requests: TimedRequests, sla: Sla) -> Mask:
    """Return which requests are within all latency bounds; a bound on a time that a request lacks does not matter."""
    in_time = np.ones(len(requests.latencies_ms), dtype=np.bool_)
    times_ms = {
        LATENCY: requests.latencies_ms,
        **(requests.stream_times.by_timing() if requests.stream_times else {}),
    }
    for timing, request_times_ms in times_ms.items():
        in_time &= ~(request_times_ms > min(sla.bounds_ms(timing), default=math.inf))
    return in_time


def describe_disagreement(
    windows: Callable[[Metric], list[MeasurementWindow]], sla: Sla, spread_limit: float, *, is_streaming: bool
) -> str:
    """Return why the windows disagree; an empty string if they agree or their differences do not matter.

    This compares the throughputs and, for each bound, the statistic that it limits. Above p95 it compares the p95,
    because few requests determine a higher quantile of a window. Different latencies do not matter if all of them
    meet the bound or all miss it, unless they keep rising. Without bounds this compares the p95s of the latency. The
    p95s of a model that streams depend on the lengths of the responses, so only a rise counts.
    """
    bounds = [(METRICS[bound.metric], bound.bound) for bound in sla.latencies]
    for bounded, bound_ms in bounds or [(METRICS["latency-p95"], math.inf if is_streaming else 0.0)]:
        is_rare = (bounded.quantile or 0.0) > MAX_COMPARED_QUANTILE
        metric = METRICS[(bounded.timing or LATENCY).metric("p95")] if is_rare else bounded
        judged = windows(metric)
        times_ms = [window.latency_ms for window in judged]
        one_side = max(times_ms) <= bound_ms or min(times_ms) > bound_ms > 0
        rising = all(before < after for before, after in pairwise(times_ms))
        limit = math.inf if one_side and not rising else None
        if reason := describe_instability(judged, spread_limit, limit, metric.short_name):
            return reason
    return ""


def window_time_ms(requests: TimedRequests, metric: Metric) -> float:
    """Return the value of ``metric``, a statistic of a time, in a window; 0 if no request has that time."""
    times_ms = known_times(requests, metric.timing or LATENCY)
    if not len(times_ms):
        return 0.0
    return float(times_ms.mean()) if metric.quantile is None else quantile(times_ms, metric.quantile)


def quantile(values: FloatArray, share: float) -> float:
    """Return the smallest value that at least ``share`` of the values do not exceed."""
    return float(np.quantile(values, share, method="inverted_cdf"))


def with_times(measurements: Sequence[Measurement], record: SendRecord, edges_ns: FloatArray) -> list[Measurement]:
    """Return ``measurements`` of equal parts of a time with their times, if the time of the load's start is known.

    ``edges_ns`` are the edges of the parts, ascending, in ns after the start of the load.
    """
    if record.start_unix_ns is None:
        return list(measurements)
    edges = [round((record.start_unix_ns + edge_ns) / 1e9, 3) for edge_ns in edges_ns.tolist()]
    return [
        replace(measurement, begin_unix_seconds=begin, end_unix_seconds=end)
        for measurement, (begin, end) in zip(measurements, pairwise(edges), strict=True)
    ]


def with_priorities(
    measurements: Sequence[Measurement],
    record: SendRecord,
    planned: PlannedLoad,
    times_ns: IntArray,
    edges_ns: FloatArray,
) -> list[Measurement]:
    """Return ``measurements`` of equal parts of a time with the statistics of each priority.

    Args:
        measurements: One measurement for each part.
        record: All requests, failed ones included, of a server that was not overloaded.
        planned: The load; if its priorities are ALIKE, the measurements are returned unchanged.
        times_ns: When each request counts; outside of all parts for one that does not.
        edges_ns: The edges of the parts, ascending, in ns after the start of the load.
    """
    if not len(planned.priorities):
        return list(measurements)
    outcomes, count = request_outcomes(record), len(record.planned_ns)
    ended_ns = np.where(record.answered_ns == NEVER, record.ended_ns, record.answered_ns)
    latencies_ms = (ended_ns - record.planned_ns) / 1e6
    sizes, priorities = np.resize(planned.sizes, count), np.resize(planned.priorities, count)
    edges_before = np.searchsorted(edges_ns, times_ns, side="right")
    part_numbers = np.where(times_ns == edges_ns[-1], len(measurements), edges_before) - 1
    seconds = float(edges_ns[-1] - edges_ns[0]) / len(measurements) / 1e9
    result = []
    for part, measurement in enumerate(measurements):
        statistics = []
        for priority in np.unique(priorities).tolist():
            selected = (part_numbers == part) & (priorities == priority)
            served = selected & (outcomes == RequestOutcome.SERVED)
            rejected, timed_out, failed = (
                int(np.count_nonzero(selected & (outcomes == outcome))) for outcome in FAILURES
            )
            rate = float(sizes[served].sum()) / seconds
            sketch = sketch_latencies(latencies_ms[served])
            count_served = int(served.sum())
            statistics.append(PriorityStatistic(priority, count_served, rejected, timed_out, failed, rate, sketch))
        result.append(replace(measurement, by_priority=to_text(statistics)))
    return result


# -- failed requests --------------------------------------------------------------------------------------------

_TIMEOUT = re.compile("request timeout expired|deadline exceeded", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class FailedRequests:
    """The failed requests of a load.

    ``planned_ns`` and ``ended_ns`` are nanoseconds after its start. ``message`` is that of the most frequent failure.
    """

    planned_ns: IntArray
    ended_ns: IntArray
    outcomes: IntArray
    message: str

    def check_some_served(self, served: int, load: object) -> None:
        """Raise RequestFailed with the most frequent message if every request failed."""
        if not served and len(self.outcomes):
            raise RequestFailed(f"every request failed at {load}: {without_traceback(self.message)}")

    def ended_until(self, end_ns: float, longest_wait_ns: float) -> IntArray:
        """Return ``ended_ns``, but ``end_ns`` for a request that had already waited longer than ``longest_wait_ns``.

        Otherwise a request that hangs until the client stops would be counted nowhere.
        """
        timed_out = self.outcomes == RequestOutcome.TIMED_OUT
        hangs = timed_out & (self.ended_ns > end_ns) & (self.planned_ns < end_ns - longest_wait_ns)
        return np.where(hangs, int(end_ns), self.ended_ns)

    def added_to(
        self, measurements: Sequence[Measurement], times_ns: IntArray, edges_ns: FloatArray
    ) -> list[Measurement]:
        """Return the measurements of equal parts of a time with the failed requests of each.

        Args:
            measurements: The measurements of the served requests, one for each part.
            times_ns: When each failed request counts: ``planned_ns``, or that of ``ended_until``.
            edges_ns: The edges of the parts, ascending.
        """
        counts = np.stack([np.histogram(times_ns[self.outcomes == outcome], edges_ns)[0] for outcome in FAILURES])
        return [
            replace(measurement, rejected_requests=rejected, timed_out_requests=timed_out, failed_requests=failed)
            for measurement, (rejected, timed_out, failed) in zip(measurements, counts.T.tolist(), strict=True)
        ]


def split_failures(record: SendRecord, sizes: IntArray) -> tuple[SendRecord, IntArray, FailedRequests | None]:
    """Return the record and the samples of the requests that did not fail, and those that failed.

    The latter are None, and the former all requests, if the first failure has ended the load. A request that the
    client stopped waiting for has timed out, unless the server was overloaded: then the client stopped early.
    ``sizes`` are the samples of the requests, in turn.
    """
    if record.failures is None:
        return record, sizes, None
    outcomes = request_outcomes(record)
    served = outcomes == RequestOutcome.SERVED
    failed = ~served
    ended_ns = np.where(record.answered_ns == NEVER, record.ended_ns, record.answered_ns)
    message = max(record.failures, key=lambda text: len((record.failures or {})[text]), default="no answer in time")
    return (
        replace(
            record,
            planned_ns=record.planned_ns[served],
            sent_ns=record.sent_ns[served],
            answered_ns=record.answered_ns[served],
            responses=record.responses and _responses_to(record.responses, served),
        ),
        np.resize(sizes, len(outcomes))[served],
        FailedRequests(record.planned_ns[failed], ended_ns[failed], outcomes[failed], message),
    )


def request_outcomes(record: SendRecord) -> IntArray:
    """Return the outcome of each request; SERVED for all if failures were not counted."""
    outcomes = np.full(len(record.planned_ns), RequestOutcome.SERVED)
    if record.failures is None:
        return outcomes
    if not record.overload:
        outcomes[(record.sent_ns != NEVER) & (record.answered_ns == NEVER)] = RequestOutcome.TIMED_OUT
    for message, requests in record.failures.items():
        outcomes[np.array(requests, dtype=np.int64)] = failure_outcome(message)
    return outcomes


def failure_outcome(message: str) -> RequestOutcome:
    """Return the outcome of a request that failed with the server's ``message``."""
    if is_rejection(message):
        return RequestOutcome.REJECTED
    return RequestOutcome.TIMED_OUT if _TIMEOUT.search(message) else RequestOutcome.FAILED


def _responses_to(responses: ResponseRecord, selected: Mask) -> ResponseRecord:
    """Return the responses to the ``selected`` requests."""
    counts = np.diff(responses.offsets)
    is_selected = np.repeat(selected, counts)
    return replace(
        responses,
        offsets=np.concatenate(([0], np.cumsum(counts[selected]))),
        arrived_ns=responses.arrived_ns[is_selected],
        messages=tuple(np.array(responses.messages, dtype=object)[is_selected]),
    )
