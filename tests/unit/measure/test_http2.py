"""Test the open-loop client's HTTP/2 connection against gRPC's own server."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import grpc
import hpack
import pytest

from optimizer.measure.load_client.client import METHOD
from optimizer.measure.load_client.http2 import NO_STATUS, Http2Connection, call_error, connect

Handler = Callable[[bytes, grpc.ServicerContext], bytes]
UNLIMITED = (("grpc.max_receive_message_length", -1),)


class Service(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers ModelInfer with the result of ``handler`` for the serialized request."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return grpc.unary_unary_rpc_method_handler(self._handler) if details.method == METHOD else None


@pytest.fixture
def serve() -> Iterator[Callable[[Handler], str]]:
    """Return a function that serves a handler until the test ends and returns the address."""
    servers = []

    def start(handler: Handler) -> str:
        server = grpc.server(ThreadPoolExecutor(4), options=UNLIMITED)
        server.add_generic_rpc_handlers((Service(handler),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.stop(None).wait()


def results(
    address: str, messages: list[bytes], method: str = METHOD, headers: Mapping[str, str] | None = None
) -> dict[int, str]:
    """Send all messages at once and return the error message of each call (empty: success)."""
    connection = Http2Connection(address, method, headers)
    ended: dict[int, str] = {}
    deadline = time.monotonic() + 60
    with connect(address) as connected:
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


def test_every_call_arrives_whole_and_is_answered(serve: Callable[[Handler], str]) -> None:
    seen: list[bytes] = []

    def note(message: bytes, _: grpc.ServicerContext) -> bytes:
        seen.append(message)
        return message[:5000]

    # none, one frame, several frames, more than the flow control of a call and of the connection let through at once
    messages = [bytes([i]) * size for i, size in enumerate([0, 1, 100, 16_383, 16_384, 70_000, 3_000_000, 10])]
    assert results(serve(note), messages) == dict.fromkeys(range(len(messages)), "")
    assert sorted(seen) == sorted(messages)


def test_many_calls_at_once(serve: Callable[[Handler], str]) -> None:
    address = serve(lambda message, _: message)
    assert results(address, [b"x" * 600] * 500) == dict.fromkeys(range(500), "")


def test_large_answers_do_not_close_the_window(serve: Callable[[Handler], str]) -> None:
    address = serve(lambda _, __: b"y" * 1_000_000)
    assert results(address, [b""] * 20) == dict.fromkeys(range(20), "")


def test_a_failure_has_the_servers_words(serve: Callable[[Handler], str]) -> None:
    def fail(message: bytes, context: grpc.ServicerContext) -> bytes:
        if message:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"größer als 3 % {message.decode()}" + "." * 200)
        return b""

    result = results(serve(fail), [b"", b"abc", b""])
    assert result == {0: "", 1: "größer als 3 % abc" + "." * 200, 2: ""}


def test_each_call_has_the_headers(serve: Callable[[Handler], str]) -> None:
    headers = {"authorization": "x" * 300, "next": "1"}

    def check(_: bytes, context: grpc.ServicerContext) -> bytes:
        assert headers.items() <= dict(context.invocation_metadata()).items()
        return b""

    assert results(serve(check), [b""] * 3, headers=headers) == dict.fromkeys(range(3), "")


def test_an_unknown_method_fails(serve: Callable[[Handler], str]) -> None:
    result = results(serve(lambda message, _: message), [b"a"], method="/other/Method")
    assert result == {0: "Method not found!"}


def test_a_server_that_is_no_grpc_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        connected = connect(address)
        served, _ = listening.accept()
        with connected, served:
            served.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            served.shutdown(socket.SHUT_WR)
            connection = Http2Connection(address, METHOD)
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
