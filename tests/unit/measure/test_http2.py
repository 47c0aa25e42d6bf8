"""Test the load client's HTTP/2 connections against gRPC's own server, and how they assemble streamed responses."""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import grpc
import hpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc.service_pb2 import ModelStreamInferResponse

from optimizer.measure.load_client.client import ClosedLoopClient
from optimizer.measure.load_client.client_files import (
    NEVER,
    RESPONSES_FILE,
    SendPlan,
    SendRecord,
    StreamPlan,
)
from optimizer.measure.load_client.http2 import (
    DATA,
    INFER_METHOD,
    NO_STATUS,
    PADDED,
    STREAM_METHOD,
    Http2Connection,
    StreamingConnection,
    call_error,
    connect,
    split_messages,
)
from optimizer.measure.load_client.streaming_client import StreamingClosedLoopClient, error_text
from tests.inference_server import serving_grpc
from tests.load_clients import SimulatedNetwork, run_in_this_process, run_without_reading

Handler = Callable[[bytes, grpc.ServicerContext], bytes]
UNLIMITED = (("grpc.max_receive_message_length", -1),)


class InferService(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers ModelInfer with the result of ``handler`` for the serialized request."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return grpc.unary_unary_rpc_method_handler(self._handler) if details.method == INFER_METHOD else None


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Return a function that serves a handler until the test ends and returns the address."""
    with contextlib.ExitStack() as servers:

        def start(handler: Handler, *options: tuple[str, int]) -> str:
            return servers.enter_context(serving_grpc(InferService(handler), options=(*UNLIMITED, *options)))

        yield start


def call_errors(
    address: str, messages: list[bytes], method: str = INFER_METHOD, headers: Mapping[str, str] | None = None
) -> dict[int, str]:
    """Send all messages at once and return the error message of each call (empty: success)."""
    return exchange(Http2Connection(address, method, headers), address, messages)


def exchange(connection: Http2Connection, address: str, messages: list[bytes]) -> dict[int, str]:
    """Send all messages at once over ``connection`` until their calls end; return the error of each call."""
    ended: dict[int, str] = {}
    deadline = time.monotonic() + 60
    with contextlib.closing(connect(address)) as connected:
        for message in messages:
            connection.request(message)
        while len(ended) < len(messages) and time.monotonic() < deadline:
            outgoing = [connected] if connection.outbox else []
            readable, writable, _ = select.select([connected], outgoing, [], 1)
            if writable:
                del connection.outbox[: connected.send(connection.outbox)]
            if readable:
                data = connected.recv(1000)  # frames in pieces
                assert data
                ended.update(connection.receive(data))
    return ended


def test_every_call_arrives_whole_and_is_answered(serve: Callable[..., str]) -> None:
    received: list[bytes] = []

    def record_and_answer(message: bytes, _: grpc.ServicerContext) -> bytes:
        received.append(message)
        return message[:5000]

    # none, one frame, several frames, more than the flow control of a call and of the connection let through at once
    messages = [bytes([i]) * size for i, size in enumerate([0, 1, 100, 16_383, 16_384, 70_000, 3_000_000, 10])]
    assert call_errors(serve(record_and_answer), messages) == dict.fromkeys(range(len(messages)), "")
    assert sorted(received) == sorted(messages)


def test_many_calls_at_once_are_all_answered(serve: Callable[..., str]) -> None:
    address = serve(lambda message, _: message)
    assert call_errors(address, [b"x" * 600] * 500) == dict.fromkeys(range(500), "")


def test_no_more_calls_are_open_than_the_server_permits(serve: Callable[..., str], tmp_path: Path) -> None:
    """The server refuses more of them, as nginx does above 128."""

    def answer(message: bytes, _: grpc.ServicerContext) -> bytes:
        time.sleep(0.01)
        return message

    address = serve(answer, ("grpc.max_concurrent_streams", 4))
    plan = SendPlan((address,), 1000.0, concurrency=16, seconds=0.5)
    run_in_this_process(ClosedLoopClient(plan, [b"x" * 600]), tmp_path)
    send_record = SendRecord.read(tmp_path)
    assert send_record.error == ""
    assert len(send_record.answered_ns) >= 16
    assert NEVER not in send_record.answered_ns


def test_large_answers_do_not_close_the_window(serve: Callable[..., str]) -> None:
    address = serve(lambda _, __: b"y" * 1_000_000)
    assert call_errors(address, [b""] * 20) == dict.fromkeys(range(20), "")


def test_a_failed_call_has_the_message_of_the_server(serve: Callable[..., str]) -> None:
    def fail(message: bytes, context: grpc.ServicerContext) -> bytes:
        if message:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"größer als 3 % {message.decode()}" + "." * 200)
        return b""

    errors = call_errors(serve(fail), [b"", b"abc", b""])
    assert errors == {0: "", 1: "größer als 3 % abc" + "." * 200, 2: ""}


def test_each_call_has_the_headers(serve: Callable[..., str]) -> None:
    headers = {"authorization": "x" * 300, "next": "1"}

    def check(_: bytes, context: grpc.ServicerContext) -> bytes:
        assert headers.items() <= dict(context.invocation_metadata()).items()
        return b""

    assert call_errors(serve(check), [b""] * 3, headers=headers) == dict.fromkeys(range(3), "")


def test_an_unknown_method_fails(serve: Callable[..., str]) -> None:
    errors = call_errors(serve(lambda message, _: message), [b"a"], method="/other/Method")
    assert errors == {0: "Method not found!"}


def test_the_error_of_a_connection_that_is_limited_names_the_limit(serve: Callable[..., str]) -> None:
    def answer(message: bytes, _: grpc.ServicerContext) -> bytes:
        time.sleep(2)
        return message

    address = serve(answer, ("grpc.max_connection_age_ms", 100))
    with pytest.raises(ConnectionError, match="closes the connection after some time or some requests"):
        call_errors(address, [b"a"])


def test_an_answer_that_is_not_http2_ends_no_call() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        connected = connect(address)
        served, _ = listening.accept()
        with contextlib.closing(connected), served:
            served.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            served.shutdown(socket.SHUT_WR)
            connection = Http2Connection(address, INFER_METHOD)
            select.select([connected], [], [], 5)
            # read as a frame of 4,740,180 bytes, which never comes: nothing ends, and the connection is closed
            assert connection.receive(connected.recv(100)) == []


def test_the_status_of_a_call_is_read_from_its_trailers() -> None:
    status = b"\x00\x0bgrpc-status\x013"
    assert call_error(b"\x88\x00\x0bgrpc-status\x010") == ""
    assert call_error(status) == "gRPC status 3"
    assert call_error(b"\x88") == NO_STATUS
    encoded = hpack.Encoder().encode({"grpc-status": "3", "grpc-message": "too large%21"}, huffman=True)
    assert call_error(encoded) == "too large!"
    for invalid in (status[:5], b"\xff\xff\xff"):
        with pytest.raises(ConnectionError, match="headers that cannot be read"):
            call_error(invalid)


MESSAGES = st.lists(st.binary(max_size=300), max_size=12)


def prefixed(messages: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack(">BI", 0, len(message)) + message for message in messages)


def split_at(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[begin:end] for begin, end in pairwise(edges)]


def frame(payload: bytes, call: int, flags: int = 0) -> bytes:
    return struct.pack(">IBI", len(payload) << 8 | DATA, flags, 2 * call + 1) + payload


@given(MESSAGES, st.binary(max_size=4))
def test_the_rest_is_what_follows_the_last_message(messages: list[bytes], rest: bytes) -> None:
    assert split_messages(prefixed(messages) + rest) == (messages, rest)


@given(MESSAGES, MESSAGES, st.lists(st.integers(0), max_size=8), st.lists(st.integers(0), max_size=8))
def test_any_split_into_frames_and_reads_gives_the_same_messages(
    first: list[bytes], second: list[bytes], frame_cuts: list[int], read_cuts: list[int]
) -> None:
    """The frames of two calls alternate, and the reads end anywhere, even in the header of a frame."""
    connection = StreamingConnection("server:8001", STREAM_METHOD)
    first_frames, second_frames = (split_at(prefixed(messages), frame_cuts) for messages in (first, second))
    sent = b"".join(frame(a, 0) + frame(b, 1) for a, b in zip(first_frames, second_frames, strict=True))
    for read in split_at(sent, read_cuts):
        assert connection.receive(read) == []
    for call, messages in enumerate((first, second)):
        assert [message for number, message in connection.messages if number == call] == messages


def test_compressed_messages_and_padded_frames_are_refused() -> None:
    with pytest.raises(ConnectionError, match="compresses"):
        split_messages(b"\x01\0\0\0\x01x")
    with pytest.raises(ConnectionError, match="not those of a tritonserver"):
        StreamingConnection("server:8001", STREAM_METHOD).receive(frame(b"\0", 0, PADDED))


@pytest.mark.parametrize("text", ["no memory", "größer als 3 %", "x" * 127, "x" * 128, "x" * 70_000])
def test_the_error_of_a_response_is_read(text: str) -> None:
    response = ModelStreamInferResponse(error_message=text)
    response.infer_response.id = "7"
    assert error_text(response.SerializeToString()) == text


def test_the_client_writes_each_response_to_a_file_and_keeps_none_in_memory(tmp_path: Path) -> None:
    """The last request takes so long that the client writes its record before all responses have arrived."""
    message, count = bytes(2**16), 400
    gap_seconds = itertools.chain([0.001, 0.001], itertools.repeat(0.1))  # between the responses to each request

    def respond(arrived_seconds: float) -> list[tuple[float, bytes]]:
        gap = next(gap_seconds)
        return [(arrived_seconds + gap * number, message) for number in range(1, count + 1)]

    duration_seconds = itertools.chain([0.4, 0.4], itertools.repeat(40.0))  # count times the gap
    network = SimulatedNetwork(lambda arrived_seconds: arrived_seconds + next(duration_seconds), respond=respond)
    plan = SendPlan(("server:8001",), 0.0, concurrency=1, seconds=1.0, stream=StreamPlan())
    tracemalloc.start()
    run_without_reading(StreamingClosedLoopClient(plan, [b""], (), None, network), tmp_path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 20 * len(message)
    responses = SendRecord.read(tmp_path).responses
    assert responses is not None
    assert count < len(responses.messages) < 2 * count
    assert set(responses.messages) == {message}
    assert np.diff(responses.arrived_ns[:count]) == pytest.approx(1e6)
    stored_bytes = (tmp_path / RESPONSES_FILE).stat().st_size
    assert stored_bytes > len(responses.messages) * len(message), "a later response is not read"


class StreamingService(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers a request ``n`` with the numbers 0 to n - 1, each as many bytes as it says."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return grpc.stream_stream_rpc_method_handler(self._respond) if details.method == STREAM_METHOD else None

    def _respond(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for request in requests:
            for number in range(int(request)):
                yield b"%d " % number + b"x" * 1000 * number
            if int(request) == 3:
                context.abort(grpc.StatusCode.INTERNAL, "three")


def test_the_responses_of_calls_at_the_same_time_arrive_whole_and_in_order() -> None:
    counts = [5, 0, 40, 1, 3]
    with serving_grpc(StreamingService()) as address:
        connection = StreamingConnection(address, STREAM_METHOD)
        ended = exchange(connection, address, [b"%d" % count for count in counts])
    assert ended == {0: "", 1: "", 2: "", 3: "", 4: "three"}
    for call, count in enumerate(counts):
        messages = [message for number, message in connection.messages if number == call]
        assert messages == [b"%d " % number + b"x" * 1000 * number for number in range(count)]
