"""The client process: send requests over gRPC and record when each was sent and answered.

There is one connection to each server; a request goes to the server with the fewest unanswered ones.

In an open loop requests are sent at planned times. In a closed loop a fixed number of requests is kept in flight.
Started by the load generators as ``python -m optimizer.measure.load_client.client FOLDER``. It starts before every
measurement, so it imports neither numpy nor other packages that load slowly.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from optimizer.measure.load_client.client_files import (
    ALL_ANSWERED_FILE,
    HEADERS_VARIABLE,
    NEVER,
    SendPlan,
    write_record,
)
from optimizer.measure.load_client.http2 import INFER_METHOD, Http2Connection, connect
from optimizer.measure.load_client.overload import PATIENCE_FACTOR, OverloadDetector

# requests that are sent alone before the plan, and the time limit of each, which a large latency bound extends
WARM_UPS, WARM_UP_SECONDS = 2, 15.0
WATCH_SECONDS = 0.05
START_SECONDS = 0.02  # from the end of the preparations to the first request
BEHIND_SECONDS = 0.5  # a client that is later than this has lost the plan
MAX_DRAIN_SECONDS = 5.0  # before the connection is closed
STALL_SECONDS = 10.0  # without an answer in a closed loop: the server hangs
BURST = 16  # the number of due requests to send before reading answers
READ_BYTES = 2**20
PR_SET_TIMERSLACK = 29
MAX_MESSAGES, OTHER_MESSAGES = 20, "another error"  # failed requests are counted by their message


class ServerSocket(Protocol):
    """The part of a non-blocking socket that a client uses; ``recv`` raises BlockingIOError if no data is there."""

    def fileno(self) -> int: ...

    def send(self, data: bytes | bytearray, /) -> int: ...

    def recv(self, size: int, /) -> bytes: ...

    def close(self) -> None: ...


class Network(Protocol):
    """The clock of a client and its connections to the servers. Tests have one whose time is simulated."""

    def monotonic_ns(self) -> int:
        """Return the time since an arbitrary moment in nanoseconds."""

    def connect(self, address: str, tls: Mapping[str, str | None] | None) -> ServerSocket:
        """Return a connection to ``address``, as ``http2.connect``. Raises OSError."""

    def wait(
        self, reading: Collection[ServerSocket], writing: Collection[ServerSocket], seconds: float
    ) -> Collection[ServerSocket]:
        """Wait until one of these can be read or written, at most ``seconds``. Return those that can be read."""


class SystemNetwork:
    """The clock and the sockets of this machine."""

    monotonic_ns = staticmethod(time.monotonic_ns)
    connect = staticmethod(connect)

    @staticmethod
    def wait(
        reading: Collection[ServerSocket], writing: Collection[ServerSocket], seconds: float
    ) -> Collection[ServerSocket]:
        return select.select(reading, writing, [], seconds)[0]


SYSTEM_NETWORK = SystemNetwork()


class Channel:
    """The connection to one of the servers, and the calls on it.

    ``calls`` has, for each call on this connection, its number among the calls on all connections.
    """

    def __init__(self, address: str, http2: Http2Connection) -> None:
        self.address, self.http2 = address, http2
        self.socket: ServerSocket
        self.calls: list[int] = []
        self.ended = 0  # calls that were answered or failed

    @property
    def unanswered(self) -> int:
        """The number of calls that have not ended."""
        return len(self.calls) - self.ended


class LoadClient:
    """Sends ``messages`` in turn to the servers and records the times; subclasses decide when to send.

    Ends when the load is complete, a request fails, the server is overloaded or hangs, or the client is too late.
    """

    _connection_type, _method = Http2Connection, INFER_METHOD
    _warm_ups = WARM_UPS
    _drain_seconds = MAX_DRAIN_SECONDS

    def __init__(
        self,
        plan: SendPlan,
        messages: list[bytes],
        planned_ns: Sequence[int] = (),
        headers: Mapping[str, str] | None = None,
        network: Network = SYSTEM_NETWORK,
    ) -> None:
        self._network = network
        self._plan, self._messages, self._planned_ns = plan, messages, list(planned_ns)
        self._warm_ups *= len(plan.addresses)
        self._channels = [
            Channel(address, self._connection_type(address, self._method, headers, encrypted=plan.tls is not None))
            for address in plan.addresses
        ]
        self._sockets: dict[ServerSocket, Channel] = {}
        self._calls = 0
        self._free_slots = [bytes.fromhex(slot) for slot in plan.output_slots]  # that no request in flight uses
        self._used_slots: dict[int, bytes] = {}  # slots by the number of the call
        self._sent_ns: list[int] = []
        self._answered_ns: list[int] = []  # NEVER for a request without an answer
        self._start_ns = 0
        self._answers = 0
        self._cpu_seconds = 0.0
        self._ended_ns = 0
        self._overload = self._error = ""
        self._failures: dict[str, list[int]] = {}  # requests by the message of their failure
        self._hangs = False

    def run(self, folder: Path) -> None:
        """Apply the load and write the record to ``folder``; failures are fields of the record."""
        try:
            with contextlib.ExitStack() as sockets:
                for channel in self._channels:
                    channel.socket = self._network.connect(channel.address, self._plan.tls)
                    sockets.callback(channel.socket.close)
                    self._sockets[channel.socket] = channel
                detector = OverloadDetector(self._acceptable_seconds(), self._plan.period_seconds)
                gc.collect()
                gc.freeze()
                gc.disable()
                cpu_seconds = time.process_time()
                self._start_ns = self._network.monotonic_ns() + int(1e9 * START_SECONDS)
                try:
                    self._send_and_receive(detector)
                finally:
                    self._cpu_seconds, self._ended_ns = time.process_time() - cpu_seconds, self._now_ns()
                self._finish(folder, detector)
                self._drain(min(2 * detector.patience_seconds, self._drain_seconds))
                if not self._in_flight:
                    folder.joinpath(ALL_ANSWERED_FILE).touch()
                return
        except TimeoutError as error:
            self._error, self._hangs = str(error), True
        except OSError as error:
            self._error = error.strerror or str(error)
        self._write_record(folder)

    def _send_due(self) -> int:
        """Send the requests that are due and return when the next one is, in nanoseconds after the start."""
        raise NotImplementedError

    def _is_over(self, now_ns: int, detector: OverloadDetector) -> bool:
        """Return whether the load ends now. Called every WATCH_SECONDS. Raises TimeoutError if the server hangs."""
        raise NotImplementedError

    def _planned(self) -> list[int]:
        """Return when the requests were planned, in nanoseconds after the start."""
        raise NotImplementedError

    def _finish(self, folder: Path, detector: OverloadDetector) -> None:
        """Wait for the answers that count and write the record."""
        raise NotImplementedError

    def _drain(self, seconds: float) -> None:
        """Wait at most ``seconds`` for the answers that are missing, which count no more.

        Closing the connection cancels unanswered requests, and a cancellation at the wrong moment crashes
        tritonserver before 24.12 (https://github.com/triton-inference-server/server/pull/7840).
        """
        deadline_ns = self._now_ns() + int(1e9 * seconds)
        with contextlib.suppress(OSError):
            while self._in_flight and (remaining_ns := deadline_ns - self._now_ns()) > 0:
                self._exchange(remaining_ns / 1e9)

    @property
    def _in_flight(self) -> int:
        """The number of unanswered requests, including those of the warm-up."""
        return len(self._sent_ns) + self._warm_ups - self._answers

    def _now_ns(self) -> int:
        """Return the nanoseconds since the start of the load; those of the clock until that start is set."""
        return self._network.monotonic_ns() - self._start_ns

    @property
    def _longest_alone_seconds(self) -> float:
        """How long a request that is sent alone may take before the server counts as hanging."""
        return max(WARM_UP_SECONDS, PATIENCE_FACTOR * self._plan.latency_bound_ms / 1000)

    def _acceptable_seconds(self) -> float:
        """Send the warm-up requests and return the acceptable latency for the overload detector."""
        return max(self._plan.latency_bound_ms / 1000, self._warm_up())

    def _warm_up_messages(self) -> list[bytes]:
        """Return the requests that are sent alone before the load."""
        return [self._messages[0]] * self._warm_ups

    def _warm_up(self) -> float:
        """Send the warm-up requests, each alone, and return the latency of the last one in seconds."""
        for number, message in enumerate(self._warm_up_messages()):
            started_ns = self._now_ns()
            self._request(message)
            while self._answers == number:
                if self._now_ns() - started_ns > 1e9 * (limit := self._longest_alone_seconds):
                    raise TimeoutError(f"the server did not answer a single request within {limit:g} s")
                self._exchange(WATCH_SECONDS)
        return (self._now_ns() - started_ns) / 1e9

    def _send_and_receive(self, detector: OverloadDetector) -> None:
        """Send requests when they are due and handle answers, until the load is over or a request fails."""
        watch_ns = 0
        while not self._error:
            now_ns = self._now_ns()
            if now_ns >= watch_ns:
                if self._is_over(now_ns, detector):
                    return
                watch_ns = now_ns + int(1e9 * WATCH_SECONDS)
            next_ns = min(watch_ns, self._send_due())
            self._exchange(max(0.0, (next_ns - self._now_ns()) / 1e9))

    def _send(self, now_ns: int) -> None:
        """Append the next request to the outbox and record ``now_ns`` as its time."""
        self._request(self._messages[len(self._sent_ns) % len(self._messages)])
        self._record_sent(now_ns)

    def _request(self, message: bytes) -> None:
        """Start a call with ``message`` and, if one is free, an output slot."""
        channel = self._next_channel()
        if self._free_slots:
            self._used_slots[self._calls] = slot = self._free_slots.pop()
            message += slot
        channel.calls.append(self._calls)
        channel.http2.request(message)
        self._calls += 1

    def _next_channel(self) -> Channel:
        """Return the channel with the fewest unanswered requests; those with equal numbers take turns."""
        channels = self._channels
        if len(channels) == 1:
            return channels[0]
        channel = min(channels, key=lambda channel: channel.unanswered)
        channels.remove(channel)
        channels.append(channel)
        return channel

    def _record_sent(self, now_ns: int) -> None:
        """Record that the next request was sent at ``now_ns`` and is unanswered."""
        self._sent_ns.append(now_ns)
        self._answered_ns.append(NEVER)

    def _exchange(self, seconds: float) -> None:
        """Write the outbox and handle the answers that arrive within ``seconds``."""
        self._flush()
        waiting = [channel.socket for channel in self._channels if channel.http2.outbox]
        for ready in self._network.wait(self._sockets, waiting, seconds):
            try:
                data = ready.recv(READ_BYTES)
            except BlockingIOError:  # the TLS record is incomplete
                continue
            if not data:
                raise ConnectionError("the server closed the connection")
            self._receive(self._sockets[ready], data, self._now_ns())

    def _receive(self, channel: Channel, data: bytes, now_ns: int) -> None:
        """Record ``now_ns`` as the time of the answers that end with ``data``."""
        self._end_calls(channel, channel.http2.receive(data), now_ns)

    def _end_calls(self, channel: Channel, ended: Sequence[tuple[int, str]], now_ns: int) -> None:
        """Record the end of calls of ``channel``, given with their number there and their error."""
        warm_ups = self._warm_ups
        for channel_number, error in ended:
            call = channel.calls[channel_number]
            channel.ended += 1
            if error:
                self._note_failure(call, error)
            self._answers += 1
            if call in self._used_slots:
                self._free_slots.append(self._used_slots.pop(call))
            if call >= warm_ups:
                self._record_answer(call - warm_ups, now_ns)

    def _note_failure(self, call: int, message: str) -> None:
        """Count a failed call if the plan says so, unless it is one of the warm-up; otherwise it ends the load."""
        if not self._plan.counts_failures:
            self._error = self._error or message
        elif call >= self._warm_ups:
            is_kept = message in self._failures or len(self._failures) < MAX_MESSAGES
            self._failures.setdefault(message if is_kept else OTHER_MESSAGES, []).append(call - self._warm_ups)

    def _record_answer(self, number: int, now_ns: int) -> None:
        """Record that request ``number`` was answered at ``now_ns``."""
        self._answered_ns[number] = now_ns

    def _flush(self) -> None:
        """Write as much of each outbox as its socket accepts."""
        for channel in self._channels:
            if outbox := channel.http2.outbox:
                with contextlib.suppress(BlockingIOError):
                    del outbox[: channel.socket.send(outbox)]

    def _write_record(self, folder: Path) -> None:
        """Write the record: the times of each request, and how the load ended."""
        planned_ns = self._planned()
        unsent = [NEVER] * (len(planned_ns) - len(self._sent_ns))
        facts = {
            "ended_ns": self._ended_ns,
            "overload": self._overload,
            "error": self._error,
            "hangs": self._hangs,
            "cpu_share": self._cpu_seconds / self._ended_ns * 1e9 if self._ended_ns else 0.0,
            "failures": self._failures if self._plan.counts_failures else None,
            "start_unix_ns": time.time_ns() - self._now_ns() if self._start_ns else None,
        }
        write_record(folder, (planned_ns, self._sent_ns + unsent, self._answered_ns + unsent), facts)


class OpenLoopClient(LoadClient):
    """Sends requests at ``planned_ns`` after the start, even while earlier ones are unanswered."""

    _oldest = 0  # the oldest unanswered request

    def _planned(self) -> list[int]:
        return self._planned_ns

    def _finish(self, folder: Path, detector: OverloadDetector) -> None:
        self._write_record(folder)

    def _send_due(self) -> int:
        first, total = len(self._sent_ns), len(self._planned_ns)
        for planned_ns in self._planned_ns[first : first + BURST]:
            if planned_ns > (now_ns := self._now_ns()):
                return planned_ns
            self._send(now_ns)
            self._flush()
        return self._planned_ns[len(self._sent_ns)] if len(self._sent_ns) < total else sys.maxsize

    def _is_over(self, now_ns: int, detector: OverloadDetector) -> bool:
        sent, total = len(self._sent_ns), len(self._planned_ns)
        while self._oldest < sent and self._answered_ns[self._oldest] != NEVER:
            self._oldest += 1
        if self._oldest == total:
            return True
        waiting_ns = now_ns - self._sent_ns[self._oldest] if self._oldest < sent else 0
        self._overload = detector.reason(now_ns / 1e9, sent, self._answers - self._warm_ups, waiting_ns / 1e9)
        # limit both the lateness of the client and the wait for the last answers
        patience_seconds = BEHIND_SECONDS if sent < total else detector.patience_seconds
        late_ns = now_ns - self._planned_ns[min(sent, total - 1)]
        return bool(self._overload) or late_ns > 1e9 * patience_seconds


class ClosedLoopClient(LoadClient):
    """Keeps ``concurrency`` requests in flight for the plan's ``seconds``, then waits for the last answers."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._end_ns = int(1e9 * self._plan.seconds)
        self._last_progress, self._progressed_at_ns = 0, 0  # ``_progress`` at the last check, and when it had grown

    @property
    def _progress(self) -> int:
        """A number that grows as long as the server does not hang."""
        return self._answers

    def _planned(self) -> list[int]:
        return self._sent_ns

    def _finish(self, folder: Path, detector: OverloadDetector) -> None:
        while self._in_flight and not self._error:
            self._exchange(WATCH_SECONDS)
            self._check_progress(self._now_ns(), detector)
        self._write_record(folder)

    def _send_due(self) -> int:
        now_ns = self._now_ns()
        if now_ns < self._end_ns:
            for _ in range(self._target_in_flight(now_ns) - self._in_flight):
                self._send(now_ns)
        return self._end_ns if now_ns < self._end_ns else sys.maxsize

    def _target_in_flight(self, now_ns: int) -> int:
        """Return how many requests should be in flight now."""
        return self._plan.concurrency

    def _is_over(self, now_ns: int, detector: OverloadDetector) -> bool:
        self._check_progress(now_ns, detector)
        return now_ns >= self._end_ns

    def _check_progress(self, now_ns: int, detector: OverloadDetector) -> None:
        """Raise TimeoutError if the server has not answered any request for a long time."""
        if self._progress > self._last_progress:
            self._last_progress, self._progressed_at_ns = self._progress, now_ns
        waited_seconds = (now_ns - self._progressed_at_ns) / 1e9
        if waited_seconds > max(STALL_SECONDS, detector.patience_seconds):
            raise TimeoutError(f"no answer within {waited_seconds:.0f} s")


def main(
    closed_loop: type[ClosedLoopClient] = ClosedLoopClient, open_loop: type[OpenLoopClient] = OpenLoopClient
) -> None:
    """Send the plan in the folder that the command line names and write the record there."""
    folder = Path(sys.argv[1])
    headers = json.loads(os.environ.pop(HEADERS_VARIABLE, "{}"))
    # otherwise the kernel wakes a sleeping process up to 50 µs late, to wake several at once
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
    plan, messages, planned_ns = SendPlan.read(folder)
    client = (closed_loop if plan.concurrency else open_loop)(plan, messages, planned_ns, headers)
    client.run(folder)


if __name__ == "__main__":
    main()
