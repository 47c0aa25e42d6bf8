"""The client process for models that stream: record the arrival of each response of each request.

Started as ``python -m optimizer.measure.load_client.streaming_client FOLDER``, see ``client``. Each request is a call
of ModelStreamInfer of its own. A request is answered when its call ends.

At first all requests of a closed loop are equally old, and the server of an open loop has few requests in flight. So
nothing counts until requests that were sent later have ended as well. This lead-in depends on the duration of the
requests, which only the client knows; therefore it decides when the time that counts begins.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from optimizer.measure.load_client.client import (
    BEHIND_SECONDS,
    WATCH_SECONDS,
    Channel,
    ClosedLoopClient,
    LoadClient,
    OpenLoopClient,
    main,
)
from optimizer.measure.load_client.client_files import (
    MAX_LEAD_IN_SECONDS,
    MIN_LEAD_IN_SECONDS,
    NEVER,
    open_responses,
    write_response_times,
)
from optimizer.measure.load_client.http2 import STREAM_METHOD, StreamingConnection
from optimizer.measure.load_client.overload import PATIENCE_FACTOR, OverloadDetector

ERROR_TAG = b"\x0a"  # field 1 of ModelStreamInferResponse, error_message
OPEN_LOOP_AWAITED = 10  # requests that have to end before the last ones of the lead-in are sent
LAST_ANSWERS_FACTOR, LAST_ANSWERS_SECONDS = 2, 30.0  # wait for the last answers: share of the longest request, limit
DRAIN_SECONDS = 20.0
# if the mean window has this multiple of the least number of requests, the server paused or many requests end at
# once, so that fewer, longer windows cost less time than waiting for the sparsest one
MAX_UNEVENNESS = 3
MAX_STARTING_SECONDS = 10.0  # limit of the time over which a closed loop sends its first requests


class StreamingClient(LoadClient):
    """Records the responses of each request; a base class next to one of the two loops.

    The lead-in ends when the first ``_awaited`` requests have ended and, in an open loop, also those that had been
    sent by then. It takes MIN_LEAD_IN_SECONDS to MAX_LEAD_IN_SECONDS.
    """

    _connection_type, _method = StreamingConnection, STREAM_METHOD
    _warm_ups = 1  # a request may take seconds
    _drain_seconds = DRAIN_SECONDS
    _responses: BinaryIO

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        assert self._plan.stream is not None, "this client is only started for a model that streams"
        self._stream = self._plan.stream
        # of each response, in the order of arrival; the message itself is written to a file at once
        self._requests, self._arrived_ns, self._sizes = array("q"), array("q"), array("q")
        self._begun_ns: list[int] = []  # the first response of each request, or its end without one
        self._begun_count, self._received_ns, self._longest_ns = 0, 0, 0
        self._alone_ns = 0  # the duration of a request that is sent alone
        # how often the lead-in still waits for all requests that were sent so far, and their number
        self._generations_left, self._awaited = 1, 0
        self._begin_ns = NEVER

    def run(self, folder: Path) -> None:
        """Apply the load, write each response to ``folder`` as it arrives, and then the record."""
        with open_responses(folder) as self._responses:
            super().run(folder)

    @property
    def _longest_alone_seconds(self) -> float:
        """How long no response may arrive to a request that is sent alone before the server counts as hanging."""
        return max(super()._longest_alone_seconds, PATIENCE_FACTOR * self._stream.first_response_bound_ms / 1000)

    def _acceptable_seconds(self) -> float:
        """Send one request alone to each server and return the acceptable time to first response.

        Without a bound on it, it is the acceptable latency of a whole request.
        """
        for number in range(self._warm_ups):
            started_ns = first_ns = self._received_ns = self._now_ns()
            self._request(self._messages[0])
            while self._answers == number:
                if self._now_ns() - self._received_ns > 1e9 * (limit := self._longest_alone_seconds):
                    raise TimeoutError(f"the server did not respond to a single request within {limit:g} s")
                self._exchange(WATCH_SECONDS)
                first_ns = self._received_ns if first_ns == started_ns else first_ns
        self._alone_ns = self._received_ns - started_ns
        if self._stream.first_response_bound_ms:
            return max(self._stream.first_response_bound_ms / 1000, (first_ns - started_ns) / 1e9)
        return max(self._plan.latency_bound_ms / 1000, self._alone_ns / 1e9)

    def _send(self, now_ns: int) -> None:
        super()._send(now_ns)
        self._begun_ns.append(NEVER)

    def _receive(self, channel: Channel, data: bytes, now_ns: int) -> None:
        """Record the responses in ``data`` and the calls that end with it."""
        assert isinstance(channel.http2, StreamingConnection), "_connection_type"
        ended, messages = channel.http2.receive(data), channel.http2.messages
        if ended or messages:
            self._received_ns = now_ns
        for channel_number, message in messages:
            call = channel.calls[channel_number]
            if message[:1] == ERROR_TAG:
                self._note_failure(call, error_text(message))
            elif call >= self._warm_ups:
                self._note_begun(call - self._warm_ups, now_ns)
                self._requests.append(call - self._warm_ups)
                self._arrived_ns.append(now_ns)
                self._sizes.append(len(message))
                self._responses.write(message)
        messages.clear()
        self._end_calls(channel, ended, now_ns)

    def _record_answer(self, number: int, now_ns: int) -> None:
        super()._record_answer(number, now_ns)
        self._note_begun(number, now_ns)
        self._longest_ns = max(self._longest_ns, now_ns - self._sent_ns[number])

    def _note_begun(self, request: int, now_ns: int) -> None:
        """Record ``now_ns`` as the time of the first response to ``request``, unless there was an earlier one."""
        if self._begun_ns[request] == NEVER:
            self._begun_ns[request] = now_ns
            self._begun_count += 1

    def _lead_in_has_ended(self, now_ns: int) -> bool:
        """Return whether the lead-in ends now. Called every WATCH_SECONDS until it does."""
        first = self._answered_ns[: self._awaited]
        if self._generations_left and len(first) == self._awaited and NEVER not in first:
            self._generations_left -= 1
            self._awaited = len(self._sent_ns)
        is_steady = not self._generations_left and now_ns >= 1e9 * MIN_LEAD_IN_SECONDS
        return is_steady or now_ns >= 1e9 * MAX_LEAD_IN_SECONDS

    def _write_record(self, folder: Path) -> None:
        super()._write_record(folder)
        begin_ns = max(0, self._begin_ns)  # an overload that ended the lead-in is judged by all requests
        self._responses.flush()
        counted_ns = begin_ns, self._counted_until()
        write_response_times(folder, counted_ns, self._requests, self._arrived_ns, self._sizes)

    def _counted_until(self) -> int:
        """Return the end of the time that counts, in nanoseconds after the start."""
        raise NotImplementedError


class StreamingOpenLoopClient(StreamingClient, OpenLoopClient):
    """Sends the requests of the lead-in until it ends, and then the others, whose planned times count from there.

    The server is overloaded if the first responses are late as answers are in ``OverloadDetector``: a whole request
    may take much longer with others than alone.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        lead_in_requests = self._stream.lead_in_requests
        self._measured_ns = self._planned_ns[lead_in_requests:]
        del self._planned_ns[lead_in_requests:]
        self._generations_left, self._awaited = 2, min(OPEN_LOOP_AWAITED, lead_in_requests)

    def _is_over(self, now_ns: int, detector: OverloadDetector) -> bool:
        sent, total = len(self._sent_ns), len(self._planned_ns)
        if self._begin_ns == NEVER and self._lead_in_has_ended(now_ns):
            self._begin_ns = now_ns
            self._planned_ns[sent:] = [now_ns + planned_ns for planned_ns in self._measured_ns]
            return False
        if self._begin_ns != NEVER and sent == total and not self._in_flight:
            return True
        while self._oldest < sent and self._begun_ns[self._oldest] != NEVER:
            self._oldest += 1
        waiting_ns = now_ns - self._sent_ns[self._oldest] if self._oldest < sent else 0
        self._overload = detector.reason(now_ns / 1e9, sent, self._begun_count, waiting_ns / 1e9)
        if self._overload or (sent == total and self._begin_ns == NEVER):
            return bool(self._overload)
        late_ns = now_ns - self._planned_ns[min(sent, total - 1)]
        return late_ns > (1e9 * BEHIND_SECONDS if sent < total else self._last_answers_ns(detector))

    def _last_answers_ns(self, detector: OverloadDetector) -> float:
        """Return how long to wait for the end of the last requests."""
        waiting_ns = max(1e9 * detector.patience_seconds, LAST_ANSWERS_FACTOR * self._longest_ns)
        return min(waiting_ns, 1e9 * LAST_ANSWERS_SECONDS)

    def _counted_until(self) -> int:
        if self._begin_ns == NEVER:
            return self._ended_ns
        planned_end_ns = self._begin_ns + int(1e9 * self._plan.seconds)
        has_ended = not self._overload and len(self._sent_ns) == len(self._planned_ns)
        return planned_end_ns if has_ended else min(self._ended_ns, planned_end_ns)


class StreamingClosedLoopClient(StreamingClient, ClosedLoopClient):
    """Keeps ``concurrency`` requests in flight for the plan's ``seconds`` after the lead-in.

    The first requests are spread over the duration of a request that is sent alone. So requests of the same length do
    not all end at the same time. The load continues for at most ``longest_seconds`` until ``fewest_requests`` have
    ended, and ``window_requests`` in each window. It is not prolonged for a window if the windows have MAX_UNEVENNESS
    times as many on average. Then the client waits at most DRAIN_SECONDS for the requests in flight. Closing the
    connection cancels those that have not ended.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._end_ns = sys.maxsize
        self._awaited = self._plan.concurrency
        self._ends_ns: list[int] = []  # when requests ended, in this order

    @property
    def _progress(self) -> int:
        return self._answers + len(self._sizes)

    @property
    def _starting_ns(self) -> int:
        """The time over which the first requests are spread."""
        return min(self._alone_ns, int(1e9 * MAX_STARTING_SECONDS))

    def _target_in_flight(self, now_ns: int) -> int:
        concurrency = self._plan.concurrency
        return concurrency if now_ns >= self._starting_ns else 1 + concurrency * now_ns // self._starting_ns

    def _send_due(self) -> int:
        next_ns, now_ns = super()._send_due(), self._now_ns()
        is_starting = now_ns < self._starting_ns
        return min(next_ns, now_ns + self._starting_ns // self._plan.concurrency) if is_starting else next_ns

    def _is_over(self, now_ns: int, detector: OverloadDetector) -> bool:
        self._check_progress(now_ns, detector)
        if self._begin_ns == NEVER:
            if now_ns >= self._starting_ns and self._lead_in_has_ended(now_ns):
                self._begin_ns = now_ns
            return False
        seconds = (now_ns - self._begin_ns) / 1e9
        if seconds < self._plan.seconds:
            return False
        if seconds < self._stream.longest_seconds and not self._has_enough_requests(now_ns):
            return False
        self._end_ns = now_ns
        return True

    def _has_enough_requests(self, now_ns: int) -> bool:
        """Return whether enough requests would have ended in the time that counts if it ended at ``now_ns``."""
        stream, begin_ns = self._stream, self._begin_ns
        edges_ns = [begin_ns + (now_ns - begin_ns) * number / stream.windows for number in range(stream.windows + 1)]
        ended_before = [bisect_left(self._ends_ns, edge_ns) for edge_ns in edges_ns]
        ended = ended_before[-1] - ended_before[0]
        if ended < stream.fewest_requests:
            return False
        fewest_in_window = min(after - before for before, after in pairwise(ended_before))
        most = MAX_UNEVENNESS * stream.windows * stream.window_requests
        return fewest_in_window >= stream.window_requests or ended >= most

    def _record_answer(self, number: int, now_ns: int) -> None:
        super()._record_answer(number, now_ns)
        self._ends_ns.append(now_ns)

    def _finish(self, folder: Path, detector: OverloadDetector) -> None:
        deadline_ns = self._now_ns() + int(1e9 * self._drain_seconds)
        while self._in_flight and not self._error and self._now_ns() < deadline_ns:
            self._exchange(WATCH_SECONDS)
            self._check_progress(self._now_ns(), detector)
        self._write_record(folder)

    def _counted_until(self) -> int:
        return min(self._ended_ns, self._end_ns)


def error_text(message: bytes) -> str:
    """Return the error message that a serialized ModelStreamInferResponse starts with."""
    size, start = 0, 1
    for shift in range(0, 35, 7):  # the length has 7 bits in each byte, the lowest ones first
        byte = message[start]
        size |= (byte & 0x7F) << shift
        start += 1
        if byte < 0x80:
            break
    return message[start : start + size].decode(errors="replace")


if __name__ == "__main__":
    main(StreamingClosedLoopClient, StreamingOpenLoopClient)
