"""Turn the record of a closed loop into measurements."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from objectives.arrays import FloatArray, IntArray
from objectives.metrics import LATENCY, Measurement, Metric
from optimizer.core.errors import MeasurementError, RequestFailed
from optimizer.core.measurement_windows import MIN_WINDOWS, MeasurementWindow
from optimizer.measure.load_client.client_files import NEVER, SendRecord
from optimizer.measure.load_client.measured_requests import (
    CLIENT_CPU_ADVICE,
    MIN_STREAMED_REQUESTS,
    SATURATED_CPU_SHARE,
    Mask,
    PlannedLoad,
    RequestOutcome,
    describe_disagreement,
    make_measurement,
    request_outcomes,
    split_failures,
    window_time_ms,
    with_priorities,
    with_times,
)
from optimizer.measure.load_client.responses import StreamedRequests, StreamOutput, StreamTimes
from optimizer.measure.server_errors import why_request_failed

CLOSED_LOOP_LEAD_IN_SECONDS = 0.5  # also warms a fresh server up


class NoAnswersError(MeasurementError):
    """Raised if a closed loop got no answer in the time that counts."""


@dataclass(frozen=True, slots=True)
class AnsweredRequests:
    """The requests of a closed loop that were answered between ``begin_ns`` and ``end_ns``.

    A model that streams may need seconds for a request. In a steady state, the requests that end in a window are a
    fair sample of short and long ones: each request ends once. Those that are in flight at its begin count, so long
    requests are not left out, and those that are in flight at its end do not. All times of a request (latency, time
    to first response, inter-token latency) count where it ends; responses and tokens per second count all responses
    that arrive in the window.
    """

    answered_ns: IntArray
    latencies_ms: FloatArray
    sizes: IntArray
    begin_ns: float
    end_ns: float
    stream_times: StreamTimes | None = None
    responses: StreamedRequests | None = None

    @classmethod
    def of(cls, record: SendRecord, seconds: float, sizes: IntArray, token_output: str) -> AnsweredRequests:
        """Return the requests of ``record``, whose client chose the time that counts if the model streams.

        For other models it is ``seconds`` after the lead-in.
        """
        begin_ns = CLOSED_LOOP_LEAD_IN_SECONDS * 1e9
        end_ns = begin_ns + seconds * 1e9
        stream_times = responses = None
        ended_ns = record.answered_ns
        if record.responses:
            begin_ns, end_ns = float(record.responses.begin_ns), float(record.responses.end_ns)
            responses = StreamedRequests.decode(record.responses, token_output)
            ended_ns = responses.ended_ns(record.answered_ns)
        counted = (record.answered_ns >= begin_ns) & (record.answered_ns < end_ns)
        if responses:
            stream_times = responses.times(record.sent_ns, np.full(len(counted), NEVER)).take(counted)
        latencies_ms = (ended_ns - record.sent_ns)[counted] / 1e6
        samples = np.resize(sizes, len(counted))[counted]
        return cls(record.answered_ns[counted], latencies_ms, samples, begin_ns, end_ns, stream_times, responses)

    @property
    def answered(self) -> Mask:
        return np.ones(len(self.sizes), dtype=np.bool_)

    @property
    def seconds(self) -> float:
        """The time that counts."""
        return (self.end_ns - self.begin_ns) / 1e9

    @property
    def output(self) -> StreamOutput | None:
        """The responses that arrived in the time."""
        return self.responses.output_between(self.begin_ns, self.end_ns) if self.responses else None

    def parts(self, count: int) -> list[AnsweredRequests]:
        """Divide the time into ``count`` equal parts and return the requests that were answered in each."""
        length_ns = (self.end_ns - self.begin_ns) / count
        part_numbers = np.minimum(((self.answered_ns - self.begin_ns) / length_ns).astype(np.int64), count - 1)
        return [
            AnsweredRequests(
                self.answered_ns[part_numbers == part],
                self.latencies_ms[part_numbers == part],
                self.sizes[part_numbers == part],
                self.begin_ns + part * length_ns,
                self.begin_ns + (part + 1) * length_ns,
                self.stream_times and self.stream_times.take(part_numbers == part),
                self.responses,
            )
            for part in range(count)
        ]

    def most_parts(self, count: int, min_requests: int) -> int:
        """Return the largest number of equal parts up to ``count``, each with ``min_requests``; at least 1."""
        fits = (
            n for n in range(count, 1, -1) if all(len(part.answered_ns) >= min_requests for part in self.parts(n))
        )
        return next(fits, 1)

    def windows(self, metric: Metric) -> list[MeasurementWindow]:
        """Return one window per third of the time, with ``metric``, a statistic of a time.

        The throughput of a model that streams is that of its tokens, since few requests end in a window.
        """
        return [
            MeasurementWindow(
                (part.output.tokens if part.output else float(part.sizes.sum())) / part.seconds,
                window_time_ms(part, metric),
            )
            for part in self.parts(MIN_WINDOWS)
        ]


def summarize_answers(
    record: SendRecord, planned: PlannedLoad, spread_limit: float, parts: int = 1
) -> list[Measurement]:
    """Return one measurement of all answers, without a lead-in, also of those after the planned time.

    So a request counts even if it takes longer than this time. The model must not stream. Raises RequestFailed if a
    request failed.
    """
    if record.error or record.failures:
        raise RequestFailed(f"a request failed at {planned.load}: {why_request_failed(record.error)}")
    latencies_ms, sizes = (record.answered_ns - record.sent_ns) / 1e6, np.resize(planned.sizes, len(record.sent_ns))
    begin_ns, end_ns = float(record.sent_ns.min()), float(record.answered_ns.max())
    requests = AnsweredRequests(record.answered_ns, latencies_ms, sizes, begin_ns, end_ns)
    return [make_measurement(requests, sizes, requests.seconds, planned.sla, "", None)]


def summarize_closed_loop(
    record: SendRecord, planned: PlannedLoad, spread_limit: float, parts: int = 1
) -> list[Measurement]:
    """Return the measurements of ``parts`` equal parts of the planned ``seconds``, which begin after the lead-in.

    There are fewer and longer parts if the model streams and a part would have less than MIN_STREAMED_REQUESTS
    requests because the client stopped waiting for them. A request belongs to the part in which it was answered, and
    its latency counts from the actual send. A part without an answer has a throughput of 0: the server paused, and
    the late requests count where they end. If failed requests are counted, one that hangs beyond the end, for longer
    than any other latency and each bound on it, has timed out in the last part.

    A measurement is not stable if thirds of the time disagree by more than ``spread_limit`` and are not all on one
    side of each bound. It is not stable either if the client used up a core: its own backlog is then part of
    the latency. This does not depend on the latencies, because windows of a verdict must not be left out by their
    results.

    Raises RequestFailed if a request failed, NoAnswersError if none was answered.
    """
    load, sla = planned.load, planned.sla
    if record.error:
        raise RequestFailed(f"a request failed at {load}: {why_request_failed(record.error)}")
    served, sizes, failed = split_failures(record, planned.sizes)
    requests = AnsweredRequests.of(served, planned.seconds, sizes, planned.token_output)
    if failed:
        failed.check_some_served(len(requests.latencies_ms), load)
    is_streaming = requests.responses is not None
    if not len(requests.latencies_ms):
        verb = "ended" if is_streaming else "was answered"
        raise NoAnswersError(f"no request {verb} within {requests.seconds:.3g} s at {load}")
    if is_streaming:
        parts = requests.most_parts(parts, MIN_STREAMED_REQUESTS)
    reason = ""
    if record.cpu_share > SATURATED_CPU_SHARE:
        reason = (
            f"the load generator used {100 * record.cpu_share:.0f} % of a core, so the latency may be its own; "
            f"{CLIENT_CPU_ADVICE}"
        )
    elif not math.isinf(spread_limit):
        reason = describe_disagreement(requests.windows, sla, spread_limit, is_streaming=is_streaming)
    measurements = [
        make_measurement(part, part.sizes, part.seconds, sla, reason, part.output) for part in requests.parts(parts)
    ]
    edges_ns = np.linspace(requests.begin_ns, requests.end_ns, len(measurements) + 1)
    measurements = with_times(measurements, record, edges_ns)
    times_ns = record.answered_ns.copy()
    if failed:
        longest_ms = max(float(requests.latencies_ms.max()), *sla.bounds_ms(LATENCY), 0.0)
        failed_ns = failed.ended_until(requests.end_ns, 1e6 * longest_ms)
        measurements = failed.added_to(measurements, failed_ns, edges_ns)
        times_ns[request_outcomes(record) != RequestOutcome.SERVED] = failed_ns
    return with_priorities(measurements, record, planned, times_ns, edges_ns)
