"""Ways to run the load client in tests.

It runs in this process on a simulated network, as a process whose records are kept, or not at all.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import itertools
import math
import struct
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import MeasurementError
from optimizer.core.stopwatch import Stopwatch
from optimizer.core.trial import LoadPoint
from optimizer.measure.load_client.base_generator import LoadClientGenerator
from optimizer.measure.load_client.client import ClosedLoopClient, LoadClient, OpenLoopClient, ServerSocket
from optimizer.measure.load_client.client_files import ALL_ANSWERED_FILE, SendPlan, SendRecord
from optimizer.measure.load_client.client_process import ClientTask, run_client_process
from optimizer.measure.load_client.http2 import DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE
from optimizer.measure.load_client.streaming_client import StreamingClosedLoopClient, StreamingOpenLoopClient

Serve: TypeAlias = Callable[[float], float]
Respond: TypeAlias = Callable[[float], Sequence[tuple[float, bytes]]]
SUCCESS = b"\x88\x00\x0bgrpc-status\x010"  # header block with HTTP status 200 and gRPC status 0
MESSAGE_PREFIX = struct.Struct(">BI")  # of each message in gRPC: whether it is compressed, and its length
FRAME = struct.Struct(">IBI")  # length (24 bits) and type, flags, stream


def failure(message: str) -> bytes:
    """Return the header block that ends a call with gRPC status 3 and ``message``, of at most 100 characters."""
    return SUCCESS[:-1] + b"3" + b"\x00\x0cgrpc-message" + bytes([len(message)]) + message.encode()


class SimulatedSocket:
    """The connection to a server that answers each call at the time that ``serve`` returns for its arrival."""

    def __init__(self, network: SimulatedNetwork, address: str) -> None:
        self._network, self._address, self._received = network, address, b""
        # a heap of (time in ns, number in the order of the calls, stream, type of frame, response or header block)
        self._answers: list[tuple[int, int, int, int, bytes]] = []
        self._numbers = itertools.count()  # frames of the same time keep their order

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
                message = received[start + FRAME.size + MESSAGE_PREFIX.size : end]
                self._network.calls.append((self._address, message))
                arrived_seconds = self._network.now_ns / 1e9
                for seconds, response in self._network.respond(arrived_seconds):
                    self._answer(seconds, stream, DATA, response)
                answered_seconds = self._network.serve(arrived_seconds)
                if math.isfinite(answered_seconds):
                    end_of_call = failure(error) if (error := self._network.fail(message)) else SUCCESS
                    self._answer(answered_seconds, stream, HEADERS, end_of_call)
            start = end
        self._received = received[start:]
        return len(data)

    @property
    def next_answer_ns(self) -> float:
        return self._answers[0][0] if self._answers else math.inf

    def recv(self, size: int, /) -> bytes:
        assert self.next_answer_ns <= self._network.now_ns, "nothing can be read"
        answers = b""
        while self.next_answer_ns <= self._network.now_ns:
            *_, stream, kind, content = self._answers[0]
            flags = END_STREAM | END_HEADERS if kind == HEADERS else 0
            payload = content if kind == HEADERS else MESSAGE_PREFIX.pack(0, len(content)) + content
            if len(answers) + FRAME.size + len(payload) > size:
                break
            heapq.heappop(self._answers)
            answers += FRAME.pack(len(payload) << 8 | kind, flags, stream) + payload
        return answers

    def _answer(self, seconds: float, stream: int, kind: int, content: bytes) -> None:
        heapq.heappush(self._answers, (round(1e9 * seconds), next(self._numbers), stream, kind, content))

    def close(self) -> None: ...


class SimulatedNetwork:
    """A ``Network`` whose time passes only while the client waits.

    ``serve`` is called with the time at which a request arrives, in seconds, and returns when it is answered; inf
    if it never is. Warm-up requests are served too. ``fail`` is called with the request, and returns the message of
    its failure; "" if it succeeds. ``respond`` is called as ``serve`` is, and returns the responses of a model that
    streams, each with its time. ``calls`` has the address of the server and the request of each call.
    """

    def __init__(
        self, serve: Serve, fail: Callable[[bytes], str] = lambda _: "", respond: Respond = lambda _: ()
    ) -> None:
        self.serve, self.fail, self.respond, self.now_ns = serve, fail, respond, 0
        self.calls: list[tuple[str, bytes]] = []
        self._sockets: list[SimulatedSocket] = []

    def monotonic_ns(self) -> int:
        return self.now_ns

    def connect(self, address: str, tls: Mapping[str, str | None] | None) -> SimulatedSocket:
        self._sockets.append(SimulatedSocket(self, address))
        return self._sockets[-1]

    def wait(
        self, reading: Collection[ServerSocket], writing: Collection[ServerSocket], seconds: float
    ) -> Collection[ServerSocket]:
        if not writing:
            until_ns = self.now_ns + math.ceil(1e9 * seconds)
            next_ns = min([until_ns, *(connected.next_answer_ns for connected in self._sockets)])
            self.now_ns = max(self.now_ns, round(next_ns))
        return [connected for connected in self._sockets if connected.next_answer_ns <= self.now_ns]


def run_in_this_process(load_client: LoadClient, folder: Path) -> SendRecord:
    """Run a client in this process and return its record."""
    run_without_reading(load_client, folder)
    return SendRecord.read(folder)


def run_without_reading(load_client: LoadClient, folder: Path) -> None:
    """Run a client in this process. Turn on the garbage collector again, which it turns off."""
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
            record = run_in_this_process(kind(*SendPlan.read(folder), None, SimulatedNetwork(self.serve)), folder)
            task.requests.all_answered = (folder / ALL_ANSWERED_FILE).exists()
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


def planned_task(
    generator: LoadClientGenerator,
    endpoint: Endpoint,
    load: LoadPoint,
    seconds: float | None = None,
    windows: int = 0,
) -> ClientTask:
    """Return the task of the client process of ``generator``, for ``windows`` of ``seconds`` if they are given."""
    client = UnstartedClient()
    generator = replace(generator, run_client=client)
    with contextlib.suppress(MeasurementError):
        if windows and seconds:
            generator.measure_windows(endpoint, load, seconds, windows)
        else:
            generator.measure(endpoint, load, seconds)
    (task,) = client.tasks
    return task
