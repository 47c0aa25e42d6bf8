"""Ways to run the load client in tests.

It runs in this process on a simulated network, as a process whose records are kept, or not at all.
"""

from __future__ import annotations

import gc
import heapq
import math
import struct
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from optimizer.core.errors import MeasurementError
from optimizer.core.stopwatch import Stopwatch
from optimizer.measure.load_client.client import ClosedLoopClient, LoadClient, OpenLoopClient, ServerSocket
from optimizer.measure.load_client.client_files import ALL_ANSWERED_FILE, SendPlan, SendRecord
from optimizer.measure.load_client.client_process import ClientTask, run_client_process
from optimizer.measure.load_client.http2 import DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE
from optimizer.measure.load_client.streaming_client import StreamingClosedLoopClient, StreamingOpenLoopClient

Serve: TypeAlias = Callable[[float], float]
SUCCESS = b"\x88\x00\x0bgrpc-status\x010"  # header block with HTTP status 200 and gRPC status 0
FRAME = struct.Struct(">IBI")  # length (24 bits) and type, flags, stream


class SimulatedSocket:
    """The connection to a server that answers each call at the time that ``serve`` returns for its arrival."""

    def __init__(self, network: SimulatedNetwork) -> None:
        self._network, self._received = network, b""
        self._answers: list[tuple[int, int]] = []  # a heap of (time in ns, stream)

    def fileno(self) -> int:
        return -1  # as a closed socket: it has no file

    def send(self, data: bytes | bytearray, /) -> int:
        received = self._received + bytes(data)
        start = len(PREFACE) if received.startswith(PREFACE) else 0
        while len(received) - start >= FRAME.size:
            word, flags, stream = FRAME.unpack_from(received, start)
            end = start + FRAME.size + (word >> 8)
            if len(received) < end:
                break
            if word & 0xFF == DATA and flags & END_STREAM:
                answered_seconds = self._network.serve(self._network.now_ns / 1e9)
                if math.isfinite(answered_seconds):
                    heapq.heappush(self._answers, (round(1e9 * answered_seconds), stream))
            start = end
        self._received = received[start:]
        return len(data)

    @property
    def next_answer_ns(self) -> float:
        return self._answers[0][0] if self._answers else math.inf

    def recv(self, size: int, /) -> bytes:
        assert self.next_answer_ns <= self._network.now_ns, "nothing can be read"
        answers = b""
        while self.next_answer_ns <= self._network.now_ns and len(answers) + FRAME.size + len(SUCCESS) <= size:
            _, stream = heapq.heappop(self._answers)
            answers += FRAME.pack(len(SUCCESS) << 8 | HEADERS, END_STREAM | END_HEADERS, stream) + SUCCESS
        return answers

    def close(self) -> None: ...


class SimulatedNetwork:
    """A ``Network`` whose time passes only while the client waits.

    ``serve`` is called with the time at which a request arrives, in seconds, and returns when it is answered; inf
    if it never is. Warm-up requests are served too.
    """

    def __init__(self, serve: Serve) -> None:
        self.serve, self.now_ns = serve, 0
        self._sockets: list[SimulatedSocket] = []

    def monotonic_ns(self) -> int:
        return self.now_ns

    def connect(self, address: str, tls: Mapping[str, str | None] | None) -> SimulatedSocket:
        self._sockets.append(SimulatedSocket(self))
        return self._sockets[-1]

    def wait(
        self, reading: Collection[ServerSocket], writing: Collection[ServerSocket], seconds: float
    ) -> Collection[ServerSocket]:
        if not writing:
            until_ns = self.now_ns + math.ceil(1e9 * seconds)
            next_ns = min([until_ns, *(connected.next_answer_ns for connected in self._sockets)])
            self.now_ns = max(self.now_ns, round(next_ns))
        return [connected for connected in self._sockets if connected.next_answer_ns <= self.now_ns]


def run_in_this_process(load_client: LoadClient, folder: Path) -> None:
    """Run a client in this process, and turn on the garbage collector again, which a client turns off."""
    try:
        load_client.run(folder)
    finally:
        gc.unfreeze()
        gc.enable()


@dataclass(frozen=True)
class SimulatedClient:
    """A ``RunClient``: it runs the client in this process on a simulated network.

    Its servers end each request without outputs, so that it refuses sequences and shared memory. A model that streams
    ends each request without a response.
    """

    serve: Serve

    def __call__(
        self, task: ClientTask, log: Path, cpus: frozenset[int] | None, stopwatch: Stopwatch
    ) -> tuple[SendRecord, float]:
        plan = task.plan
        assert not plan.sequence_lengths, "the simulated server keeps no state"
        assert not task.requests.output_slots, "the simulated server uses no shared memory"
        closed_loop, open_loop = (
            (StreamingClosedLoopClient, StreamingOpenLoopClient)
            if plan.stream
            else (ClosedLoopClient, OpenLoopClient)
        )
        kind: type[LoadClient] = closed_loop if plan.concurrency else open_loop
        with tempfile.TemporaryDirectory(dir=log.parent) as scratch:
            folder = Path(scratch)
            task.write(folder)
            run_in_this_process(kind(*SendPlan.read(folder), None, SimulatedNetwork(self.serve)), folder)
            task.requests.all_answered = (folder / ALL_ANSWERED_FILE).exists()
            record = SendRecord.read(folder)
        return record, record.ended_ns / 1e9


@dataclass(frozen=True)
class KeptRecords:
    """A ``RunClient``: it runs the client process and keeps its records, in their order."""

    records: list[SendRecord] = field(default_factory=list)

    def __call__(
        self, task: ClientTask, log: Path, cpus: frozenset[int] | None, stopwatch: Stopwatch
    ) -> tuple[SendRecord, float]:
        record, seconds = run_client_process(task, log, cpus, stopwatch)
        self.records.append(record)
        return record, seconds


@dataclass(frozen=True)
class UnstartedClient:
    """A ``RunClient`` that keeps the tasks and fails, so that a test can examine what would be sent."""

    tasks: list[ClientTask] = field(default_factory=list)

    def __call__(
        self, task: ClientTask, log: Path, cpus: frozenset[int] | None, stopwatch: Stopwatch
    ) -> tuple[SendRecord, float]:
        self.tasks.append(task)
        raise MeasurementError("not started")
