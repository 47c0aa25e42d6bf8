"""Sends requests at planned times and notes when each was sent and answered: one process, thread and connection.

    python -m optimizer.open_loop.client FOLDER

FOLDER holds a job; the record is left there (exchange.py). Nothing spins, since the server may need the core: the
thread sleeps until a request is due or an answer has come.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from optimizer.open_loop.encrypted import Encrypted
from optimizer.open_loop.exchange import HEADERS, NEVER, Job, Record
from optimizer.open_loop.overload import OverloadWatch
from optimizer.open_loop.wire import Connection

METHOD = "/inference.GRPCInferenceService/ModelInfer"
CONNECT_SECONDS = 10.0
WARM_UPS, WARM_UP_SECONDS = 2, 15.0  # requests sent alone, and the longest that one may take
WATCH_SECONDS = 0.05
START_SECONDS = 0.02  # from the end of the preparations to the first request
BEHIND_SECONDS = 0.5  # a client that is so late has lost the plan
BURST = 16  # of requests that are due so many are sent before answers are looked for
READ_BYTES = 2**20
PR_SET_TIMERSLACK = 29


class Client:
    """Sends ``messages`` in turn, at ``planned_ns`` after the start, until all are answered or something is wrong."""

    def __init__(
        self, job: Job, messages: list[bytes], planned_ns: list[int], headers: Mapping[str, str] | None = None
    ) -> None:
        self._job, self._messages, self._planned_ns = job, messages, planned_ns
        self._sent_ns = [NEVER] * len(planned_ns)
        self._answered_ns = [NEVER] * len(planned_ns)
        self._connection = Connection(job.address, METHOD, headers, encrypted=job.tls is not None)
        self._start_ns = 0
        self._due = self._oldest = 0  # the next request, and the oldest one that is not answered
        self._answers = 0
        self._overload = self._error = ""
        self._hangs = False

    def run(self) -> Record:
        cpu_seconds = 0.0
        try:
            with connect(self._job.address, self._job.tls) as self._socket:
                watch = OverloadWatch(max(self._job.latency_bound_ms / 1000, self._warm_up()))
                gc.collect()
                gc.freeze()
                gc.disable()
                cpu_seconds = time.process_time()
                self._start_ns = time.monotonic_ns() + int(1e9 * START_SECONDS)
                self._send_and_receive(watch)
                cpu_seconds = time.process_time() - cpu_seconds
        except TimeoutError as error:
            self._error, self._hangs = str(error), True
        except OSError as error:
            self._error = error.strerror or str(error)
        return self._record(cpu_seconds)

    def _now_ns(self) -> int:
        return time.monotonic_ns() - self._start_ns

    def _warm_up(self) -> float:
        """The seconds that a request alone takes, as the last one did."""
        for number in range(WARM_UPS):
            started = time.monotonic()
            self._connection.request(self._messages[0])
            while self._answers == number:
                if time.monotonic() - started > WARM_UP_SECONDS:
                    raise TimeoutError(f"no answer to a request alone within {WARM_UP_SECONDS:g} s")
                self._exchange(WATCH_SECONDS)
        return time.monotonic() - started

    def _send_and_receive(self, watch: OverloadWatch) -> None:
        watch_ns = 0
        while not self._error:
            now_ns = self._now_ns()
            if now_ns >= watch_ns:
                if self._is_over(now_ns, watch):
                    return
                watch_ns = now_ns + int(1e9 * WATCH_SECONDS)
            next_ns = min(watch_ns, self._send_due())
            self._exchange(max(0.0, (next_ns - self._now_ns()) / 1e9))

    def _send_due(self) -> int:
        """When the next request is due, after those that are due now."""
        end = min(self._due + BURST, len(self._planned_ns))
        while self._due < end and self._planned_ns[self._due] <= (now_ns := self._now_ns()):
            self._connection.request(self._messages[self._due % len(self._messages)])
            self._flush()
            self._sent_ns[self._due] = now_ns
            self._due += 1
        return self._planned_ns[self._due] if self._due < len(self._planned_ns) else sys.maxsize

    def _exchange(self, seconds: float) -> None:
        """Write what is to be written, and read what comes within ``seconds``."""
        self._flush()
        waiting = [self._socket] if self._connection.outbox else []
        readable, _, _ = select.select([self._socket], waiting, [], seconds)
        if not readable:
            return
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:  # of what is encrypted only a part has come
            return
        if not data:
            raise ConnectionError("the server closed the connection")
        now_ns = self._now_ns()
        for call, error in self._connection.receive(data):
            self._error = self._error or error
            self._answers += 1
            if call >= WARM_UPS:
                self._answered_ns[call - WARM_UPS] = now_ns

    def _flush(self) -> None:
        outbox = self._connection.outbox
        if outbox:
            with contextlib.suppress(BlockingIOError):
                del outbox[: self._socket.send(outbox)]

    def _is_over(self, now_ns: int, watch: OverloadWatch) -> bool:
        total = len(self._planned_ns)
        while self._oldest < self._due and self._answered_ns[self._oldest] != NEVER:
            self._oldest += 1
        if self._oldest == total:
            return True
        waiting_ns = now_ns - self._sent_ns[self._oldest] if self._oldest < self._due else 0
        self._overload = watch.reason(now_ns / 1e9, self._due, self._answers - WARM_UPS, waiting_ns / 1e9)
        # neither a client that is late nor the last answers are waited for without end
        patience_seconds = BEHIND_SECONDS if self._due < total else watch.patience_seconds
        late_ns = now_ns - self._planned_ns[min(self._due, total - 1)]
        return bool(self._overload) or late_ns > 1e9 * patience_seconds

    def _record(self, cpu_seconds: float) -> Record:
        ended_ns = self._now_ns() if self._start_ns else 0
        return Record(
            np.array(self._planned_ns, np.int64),
            np.array(self._sent_ns, np.int64),
            np.array(self._answered_ns, np.int64),
            ended_ns,
            self._overload,
            self._error,
            self._hangs,
            cpu_seconds / ended_ns * 1e9 if ended_ns else 0.0,
        )


def connect(address: str, tls: Mapping[str, str | None] | None = None) -> socket.socket | Encrypted:
    """A connection to ``host:port`` that never blocks; ``tls`` as in Job. Raises OSError."""
    host, _, port = address.rpartition(":")
    connected = socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if tls is not None:
        return Encrypted.over(connected, host.strip("[]"), tls)
    connected.setblocking(False)
    return connected


def main() -> None:
    folder = Path(sys.argv[1])
    headers = json.loads(os.environ.pop(HEADERS, "{}"))
    # else the kernel wakes a sleeper up to 50 µs late, to wake several at once
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
    Client(*Job.read(folder), headers).run().write(folder)


if __name__ == "__main__":
    main()
