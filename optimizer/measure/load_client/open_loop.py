"""Turn the record of an open loop into measurements, or void them if the client sent too late."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from objectives.arrays import FloatArray, IntArray
from objectives.metrics import Measurement, Metric, four_digits
from optimizer.core.errors import MeasurementError, RequestFailed
from optimizer.core.measurement_windows import MIN_WINDOWS, MeasurementWindow
from optimizer.core.notes import LateRequests
from optimizer.core.trial import LoadPoint
from optimizer.measure.load_client.client_files import NEVER, SendRecord
from optimizer.measure.load_client.measured_requests import (
    CLIENT_CPU_ADVICE,
    LEAD_IN_SECONDS,
    ONE_SAMPLE,
    SATURATED_CPU_SHARE,
    FailedRequests,
    Mask,
    PlannedLoad,
    describe_disagreement,
    make_measurement,
    quantile,
    split_failures,
    window_time_ms,
    with_priorities,
    with_times,
)
from optimizer.measure.load_client.responses import StreamedRequests, StreamOutput, StreamTimes
from optimizer.measure.server_errors import why_request_failed

LATE_MS = 1.0  # a request that is sent later than this after its planned time counts as late
# if the median request of the last third is later than this share of the time, the client sends less than the rate
BEHIND_SHARE = 0.01
MAX_LATE_SHARE = 0.01  # share of the requests; more late ones may look like an overload of the server


class LateError(MeasurementError):
    """Raised if requests were sent so late that it is open whether the server meets the bounds."""


def lateness_note(measured: Iterable[Measurement]) -> LateRequests | None:
    """Return a note on the late requests of all measurements together; None if there are none."""
    measurements = [each for each in measured if each.late_request_share is not None and each.requests]
    late = sum((each.late_request_share or 0.0) * (each.requests or 0) for each in measurements)
    if not late:
        return None
    share = late / sum(each.requests or 0 for each in measurements)
    worst = max(measurements, key=lambda each: each.send_lateness_p99_ms or 0.0)
    return LateRequests(share, LATE_MS, worst.send_lateness_p99_ms or 0.0)


@dataclass(frozen=True, slots=True)
class SentRequests:
    """The requests planned between the end of the lead-in and ``end_seconds``, in planned order.

    ``latencies_ms`` count from the planned send time to the answer. For an unanswered request it is the time until
    the client stopped reading answers, a lower bound. ``sizes`` are samples per request. ``stream_times`` are
    those of a model that streams; its time to first response counts from the planned send time too.
    """

    planned_seconds: FloatArray
    late_by_ms: FloatArray
    latencies_ms: FloatArray
    answered: Mask
    sizes: IntArray
    end_seconds: float
    begin_seconds: float = LEAD_IN_SECONDS
    stream_times: StreamTimes | None = None

    @classmethod
    def of(
        cls,
        record: SendRecord,
        seconds: float,
        sizes: IntArray = ONE_SAMPLE,
        responses: StreamedRequests | None = None,
        lead_in_seconds: float = LEAD_IN_SECONDS,
    ) -> SentRequests:
        """Return the counted requests of ``record``.

        ``seconds`` is the planned time including the lead-in; request ``i`` has ``sizes[i % len(sizes)]`` samples.
        ``responses`` are those of a model that streams, whose client chose the time that counts.
        """
        planned, ended_ns, answered = record.planned_ns, record.ended_ns, record.answered_ns
        begin_ns, end_ns = lead_in_seconds * 1e9, seconds * 1e9
        if record.overload or np.any(record.sent_ns == NEVER):  # otherwise the pause after the last answer counts too
            end_ns = min(ended_ns, end_ns)
        if record.responses:
            begin_ns, end_ns = record.responses.begin_ns, record.responses.end_ns
            if record.overload:  # perhaps just after the beginning, when hardly any request has been sent
                begin_ns = min(begin_ns, end_ns // 2)
        stream_times = None
        if responses:
            stream_times = responses.times(planned, np.where(answered == NEVER, ended_ns, NEVER))
            answered = responses.ended_ns(answered)
        counted = (planned >= begin_ns) & (planned < end_ns)
        planned, sent, answered = planned[counted], record.sent_ns[counted], answered[counted]
        late_by = np.where(sent == NEVER, ended_ns, sent) - planned
        latencies = np.where(answered == NEVER, ended_ns, answered) - planned
        samples = np.resize(sizes, len(counted))[counted]
        return cls(
            planned / 1e9,
            late_by / 1e6,
            latencies / 1e6,
            answered != NEVER,
            samples,
            end_ns / 1e9,
            begin_ns / 1e9,
            stream_times and stream_times.take(counted),
        )

    @property
    def span_seconds(self) -> float:
        """The time that counts."""
        return self.end_seconds - self.begin_seconds

    @property
    def late_share(self) -> float:
        """The share of the requests that were sent more than LATE_MS after their planned time, 0 to 1."""
        return float(np.mean(self.late_by_ms > LATE_MS))

    def on_time(self) -> SentRequests:
        """Return the requests with a lower estimate of the latencies that they would have had if none had been late.

        Late requests arrive in a burst, and requests that are sent before the burst is answered queue behind it. If
        arrivals are late by at most ``d``, no departure from a first-in-first-out queue is late by more than ``d``.
        So each request of the burst or behind it loses the largest lateness of the burst.
        """
        late = self.late_by_ms > LATE_MS
        planned_ms = 1e3 * self.planned_seconds
        late_until_ms = np.maximum.accumulate(np.where(late, planned_ms + self.latencies_ms, -np.inf))
        delayed = late | (planned_ms + self.late_by_ms < late_until_ms)
        burst = np.cumsum(delayed & ~np.roll(delayed, 1))
        largest_ms = np.zeros(len(delayed) + 1)
        np.maximum.at(largest_ms, burst[delayed], self.late_by_ms[delayed])
        saved_ms = np.where(delayed, largest_ms[burst], 0.0)
        stream_times = self.stream_times
        if stream_times:
            stream_times = replace(stream_times, ttft_ms=np.maximum(stream_times.ttft_ms - saved_ms, 0.0))
        latencies_ms = np.where(delayed, np.maximum(self.latencies_ms - saved_ms, 0.0), self.latencies_ms)
        return replace(self, latencies_ms=latencies_ms, late_by_ms=np.zeros(len(delayed)), stream_times=stream_times)

    def parts(self, count: int) -> list[SentRequests]:
        """Divide the time into ``count`` equal parts and return the requests of each."""
        # in whole nanoseconds, so that a request at an edge is in the same part as among the priorities and failures
        edges_ns = np.linspace(1e9 * self.begin_seconds, 1e9 * self.end_seconds, count + 1)[1:-1]
        edges = np.searchsorted(np.rint(1e9 * self.planned_seconds), edges_ns)
        return [
            replace(
                self,
                planned_seconds=self.planned_seconds[begin:end],
                late_by_ms=self.late_by_ms[begin:end],
                latencies_ms=self.latencies_ms[begin:end],
                answered=self.answered[begin:end],
                sizes=self.sizes[begin:end],
                stream_times=self.stream_times and self.stream_times.take(slice(begin, end)),
            )
            for begin, end in pairwise([0, *edges.tolist(), len(self.planned_seconds)])
        ]

    def windows(self, rate: float, metric: Metric, failed_seconds: FloatArray) -> list[MeasurementWindow]:
        """Return one window per third of the time, with ``metric``, a statistic of a time.

        The throughput is ``rate`` times the share of answered requests: random arrivals do not change it.
        ``failed_seconds`` are the planned times of the failed requests, which count as unanswered.
        """
        edges = np.linspace(self.begin_seconds, self.end_seconds, MIN_WINDOWS + 1)
        failed = np.histogram(failed_seconds, edges)[0].tolist()
        return [
            MeasurementWindow(
                rate * float(part.answered.sum()) / (len(part.answered) + failed_count),
                window_time_ms(part, metric),
            )
            if len(part.latencies_ms)
            else MeasurementWindow(0.0, 0.0)
            for part, failed_count in zip(self.parts(MIN_WINDOWS), failed, strict=True)
        ]


def summarize_open_loop(
    record: SendRecord, planned: PlannedLoad, spread_limit: float, parts: int = 1
) -> list[Measurement]:
    """Return the measurements of ``parts`` equal parts of the time; a single one if the server was overloaded.

    A measurement is not stable if the server was overloaded, or if thirds of the time disagree by more than
    ``spread_limit`` and are not all on one side of each bound. These thirds are compared without lateness,
    since they show whether the server is in a steady state. The measurements of a server that was not overloaded have
    the requests of each priority.

    A model that streams may be overloaded before any request has ended. Its capacity in requests per second is then
    estimated from the first responses.

    Raises RequestFailed if a request failed, MeasurementError if none was answered, and LateError if late requests
    void the measurement.
    """
    load = planned.load
    if record.error:
        raise RequestFailed(f"a request failed at {load}: {why_request_failed(record.error)}")
    served, sizes, failed = split_failures(record, planned.sizes)
    responses = StreamedRequests.decode(served.responses, planned.token_output) if served.responses else None
    requests = SentRequests.of(served, planned.seconds, sizes, responses, planned.lead_in_seconds)
    if failed:
        failed.check_some_served(len(requests.planned_seconds), load)
    responded_ns = responses.first_ns if responses and record.overload else served.answered_ns
    _check_answered(responded_ns, record, requests, planned)
    sent = requests  # with those that failed: few that were served do not show whether the client kept up
    if failed:
        sent = SentRequests.of(record, planned.seconds, planned.sizes, lead_in_seconds=planned.lead_in_seconds)
    _check_kept_up(record, sent, load)
    own_sizes = replace(planned, sizes=sizes)
    if record.overload:
        measurements = [_capacity(served, responded_ns, requests, responses, own_sizes)]
    else:
        measurements = _measured_parts(served, requests, failed, own_sizes, spread_limit, parts)
    edges_ns = np.linspace(1e9 * requests.begin_seconds, 1e9 * requests.end_seconds, len(measurements) + 1)
    counted_ns = edges_ns
    if record.overload and not responses:  # all responses until the client stopped reading are its capacity
        counted_ns = np.array([edges_ns[0], record.ended_ns])
    measurements = with_times(measurements, record, counted_ns)
    if failed:
        measurements = failed.added_to(measurements, failed.planned_ns, edges_ns)
    if record.overload:
        return measurements
    return with_priorities(measurements, record, planned, record.planned_ns, edges_ns)


def _check_answered(responded_ns: IntArray, record: SendRecord, requests: SentRequests, planned: PlannedLoad) -> None:
    """Raise MeasurementError if there was no response at all, or if no request was due in the measured time."""
    rate = str(planned.load)
    if not np.any(responded_ns != NEVER):
        raise MeasurementError(f"no request was answered within {record.ended_ns / 1e9:.1f} s at {rate}")
    if not len(requests.planned_seconds):
        raise MeasurementError(f"no request was due within {planned.seconds:.3g} s at {rate}")


def _capacity(
    record: SendRecord,
    responded_ns: IntArray,
    requests: SentRequests,
    responses: StreamedRequests | None,
    planned: PlannedLoad,
) -> Measurement:
    """Return the measurement of an overloaded server from its requests that did not fail.

    The responses belong to requests that were sent long ago. All responses until the client stopped reading are its
    capacity, also those after the planned time. Those of a model that streams are counted in the measured time.
    """
    begin_ns, end_ns = (
        requests.begin_seconds * 1e9,
        requests.end_seconds * 1e9 if responses else float(record.ended_ns),
    )
    answered = np.resize(planned.sizes, len(responded_ns))[(responded_ns >= begin_ns) & (responded_ns < end_ns)]
    output = responses.output_between(begin_ns, end_ns) if responses else None
    seconds = (end_ns - begin_ns) / 1e9
    return replace(_measurement(requests, answered, seconds, planned, record.overload, output), overloaded=True)


def _measured_parts(
    record: SendRecord,
    requests: SentRequests,
    failed: FailedRequests | None,
    planned: PlannedLoad,
    spread_limit: float,
    parts: int,
) -> list[Measurement]:
    """Return the measurements of a server that was not overloaded, without its failed requests.

    If the rate exceeds the capacity, the queue grows, and the last requests are answered after the time. So the
    throughput of a measurement in one part is at most that of the answers within the time, which shows the capacity.
    Windows are too short for that: a request counts in the one in which it was planned. So do requests of a model
    that streams.
    """
    on_time, load, sla = requests.on_time(), planned.load, planned.sla
    _check_verdict(requests, on_time, planned)
    samples_rate = load.request_rate * load.request_batch_size
    failed_seconds = failed.planned_ns / 1e9 if failed else np.empty(0)
    reason = describe_disagreement(
        lambda metric: on_time.windows(samples_rate, metric, failed_seconds),
        sla,
        spread_limit,
        is_streaming=requests.stream_times is not None,
    )
    reason = reason or ("" if sla else _lateness_in_p95(requests, on_time, spread_limit))
    span_seconds = requests.span_seconds / parts
    measurements = [
        _measurement(part, part.sizes[part.answered], span_seconds, planned, reason) for part in requests.parts(parts)
    ]
    if parts > 1 or requests.stream_times is not None:
        return measurements
    (measured,) = measurements
    begin_ns, end_ns = 1e9 * requests.begin_seconds, 1e9 * requests.end_seconds
    in_time = (record.answered_ns >= begin_ns) & (record.answered_ns < end_ns)
    samples = np.resize(planned.sizes, len(in_time))[in_time].sum()
    throughput = min(measured.throughput_infer_per_sec or 0.0, float(samples) / span_seconds)
    return [replace(measured, throughput_infer_per_sec=throughput)]


def _measurement(
    requests: SentRequests,
    answered: IntArray,
    seconds: float,
    planned: PlannedLoad,
    reason: str,
    output: StreamOutput | None = None,
) -> Measurement:
    """Return the measurement over ``seconds``; ``answered`` holds the samples of each answered request.

    ``output`` counts the responses of a model that streams, by default those to ``requests``.
    """
    stream_times = requests.stream_times
    output = stream_times.output if stream_times and output is None else output
    measurement = make_measurement(requests, answered, seconds, planned.sla, reason, output)
    if not len(requests.latencies_ms):
        return measurement  # no request was due, as it happens at a low rate
    return replace(
        measurement,
        late_request_share=round(requests.late_share, 6),
        send_lateness_p99_ms=round(quantile(requests.late_by_ms, 0.99), 6),
    )


def _check_kept_up(record: SendRecord, requests: SentRequests, load: LoadPoint) -> None:
    """Raise LateError if the client sent fewer requests a second than planned. ``requests`` are all that it sent.

    An overloaded server may have taken the client's CPU time, and the overload counts. If the client used up a core,
    the backlog may be its own.
    """
    if record.overload:
        behind = record.cpu_share > SATURATED_CPU_SHARE and requests.late_share > MAX_LATE_SHARE
    else:
        last = requests.parts(MIN_WINDOWS)[-1].late_by_ms
        median_ms = quantile(last, 0.5) if len(last) else 0.0
        behind = median_ms > 1e3 * BEHIND_SHARE * requests.span_seconds or bool(np.any(record.sent_ns == NEVER))
    if behind:
        raise LateError(
            f"the load generator cannot keep up: {_describe_lateness(requests, load)} (it used "
            f"{100 * record.cpu_share:.0f} % of a core); lower the rate, {CLIENT_CPU_ADVICE}"
        )


def _check_verdict(requests: SentRequests, on_time: SentRequests, planned: PlannedLoad) -> None:
    """Raise LateError if a bound is missed that could be met without the lateness of requests."""
    measured, at_best = (
        _measurement(each, each.sizes[each.answered], each.span_seconds, planned, "") for each in (requests, on_time)
    )
    missed = planned.sla.missed(measured)
    if missed and missed.is_met(at_best):
        raise LateError(
            f"the load generator was late: {_describe_lateness(requests, planned.load)}; {missed} is missed, "
            f"but could be met without that lateness; lower the rate, {CLIENT_CPU_ADVICE}"
        )


def _describe_lateness(requests: SentRequests, load: LoadPoint) -> str:
    return (
        f"at {load} {100 * requests.late_share:.1f} % were sent more than "
        f"{LATE_MS:g} ms late, by up to {four_digits(float(requests.late_by_ms.max()))} ms"
    )


def _lateness_in_p95(requests: SentRequests, on_time: SentRequests, spread_limit: float) -> str:
    """Return why the p95 depends more on the client's lateness than on the server, or an empty string."""
    p95_ms, at_best_ms = (quantile(each.latencies_ms, 0.95) for each in (requests, on_time))
    if p95_ms - at_best_ms <= spread_limit * at_best_ms or math.isinf(spread_limit):
        return ""
    late_ms = four_digits(p95_ms - at_best_ms)
    return f"unstable: p95 {four_digits(p95_ms)} ms, of which late sending may be {late_ms} ms"
