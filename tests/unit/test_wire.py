"""The gRPC client of the open loop against gRPC's own server."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from optimizer.open_loop.client import METHOD, connect
from optimizer.open_loop.header_block import literal, literals
from optimizer.open_loop.wire import Connection

Handler = Callable[[bytes, grpc.ServicerContext], bytes]
UNLIMITED = (("grpc.max_receive_message_length", -1),)


class Service(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers ModelInfer with what ``handler`` makes of the serialized request."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return grpc.unary_unary_rpc_method_handler(self._handler) if details.method == METHOD else None


@pytest.fixture
def serve() -> Iterator[Callable[[Handler], str]]:
    """Serves a handler until the test ends; gives the address."""
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


def results(address: str, messages: list[bytes], method: str = METHOD) -> dict[int, str]:
    """What became of each call, all sent at once."""
    connection = Connection(address, method)
    ended: dict[int, str] = {}
    deadline = time.monotonic() + 10
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

    found = results(serve(fail), [b"", b"abc", b""])
    assert found == {0: "", 1: "größer als 3 % abc" + "." * 200, 2: ""}


def test_an_unknown_method_fails(serve: Callable[[Handler], str]) -> None:
    found = results(serve(lambda message, _: message), [b"a"], method="/other/Method")
    assert found == {0: "Method not found!"}


def test_a_server_that_is_no_grpc_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        connected = connect(address)
        served, _ = listening.accept()
        with connected, served:
            served.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            served.shutdown(socket.SHUT_WR)
            connection = Connection(address, METHOD)
            select.select([connected], [], [], 5)
            # read as a frame of 4,740,180 bytes, which never comes: nothing ends, and the connection is closed
            assert connection.receive(connected.recv(100)) == []


def test_fields_of_a_header_block() -> None:
    long = b"v" * 300
    block = b"\x88"  # indexed: :status 200
    block += b"\x3f\xe1\x1f"  # the table's size
    block += b"\x5f\x10application/grpc"  # a name of the static table, to be indexed
    block += literal(b"grpc-status", b"0")
    block += b"\x40\x01a\x01b"  # to be indexed
    block += b"\x00\x04long\x7f\xad\x01" + long
    block += b"\x10\x01h\x81\x07"  # never to be indexed, Huffman's code
    assert literals(block) == {b"grpc-status": b"0", b"a": b"b", b"long": long, b"h": b""}
    for end in (2, 5, len(block) - 1):
        with pytest.raises(IndexError):
            literals(block[:end])
