"""gRPC calls over one HTTP/2 connection, fast enough for the open loop, and the socket of the connection.

The package hpack encodes and decodes header blocks. Frames and flow control are implemented here, because the package
h2 takes several times the CPU time and reaches less than half the rate (benchmarks/open_loop_rate.md).
"""

from __future__ import annotations

import socket
import ssl
import struct
import sys
from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote_to_bytes

import hpack

INFER_METHOD = "/inference.GRPCInferenceService/ModelInfer"
STREAM_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM = ACK = 0x01
END_HEADERS, PADDED, PRIORITY = 0x04, 0x08, 0x20
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 1, 2, 3, 4, 5
REFUSED_STREAM, MAX_REFUSALS = 7, 1000  # an HTTP/2 error: nothing was processed; then it counts as an error
DEFAULT_WINDOW, MAX_WINDOW = 2**16 - 1, 2**31 - 1
DEFAULT_FRAME, MAX_FRAME = 2**14, 2**24 - 1
CLIENT_SETTINGS = (
    (HEADER_TABLE_SIZE, 0),  # so that each header block can be decoded without those before it
    (ENABLE_PUSH, 0),
    (INITIAL_WINDOW_SIZE, MAX_WINDOW),
    (MAX_FRAME_SIZE, MAX_FRAME),
)
NO_STATUS = "the answer has no gRPC status that can be read; give the address of tritonserver itself, not of a proxy"
CLOSED_EARLY = (
    "a proxy or the server closes the connection after some time or some requests: raise this limit (in nginx it is "
    "keepalive_requests), or give the address of tritonserver itself"
)
NO_TRITONSERVER = "the server's answers are not those of a tritonserver; is a proxy in between?"
_FRAME = struct.Struct(">IBI")  # length (24 bits) and type, flags, stream
_SETTING = struct.Struct(">HI")
_NUMBER = struct.Struct(">I")
_PREFIX = struct.Struct(">BI")  # of a gRPC message: whether it is compressed, length


class Http2Connection:
    """A client connection without I/O: write ``outbox`` to the server and pass its bytes to ``receive``.

    Each call has ``headers`` and a number, counted from 0. ``encrypted`` sets the scheme to https. Calls above the
    server's limit of calls at the same time wait until others end. So do calls that it refuses nevertheless: gRPC's
    server frees the place of a call shortly after its answer. Both methods raise ConnectionError if the server ends
    the connection or breaks the protocol.
    """

    def __init__(
        self, authority: str, method: str, headers: Mapping[str, str] | None = None, *, encrypted: bool = False
    ) -> None:
        self.outbox = bytearray(PREFACE)
        self.outbox += _frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*setting) for setting in CLIENT_SETTINGS))
        self.outbox += _frame(WINDOW_UPDATE, 0, 0, _NUMBER.pack(MAX_WINDOW - DEFAULT_WINDOW))
        fields = {":method": "POST", ":scheme": "https" if encrypted else "http", ":path": method}
        fields |= {":authority": authority, "te": "trailers", "content-type": "application/grpc", **(headers or {})}
        # sensitive fields enter no table, so the same block serves every call
        self._headers = hpack.Encoder().encode([(name, value, True) for name, value in fields.items()])
        self._inbox = b""
        self._calls, self._streams = 0, 0
        self._open: dict[int, tuple[int, bytes]] = {}  # stream -> number and request of a call that has not ended
        self._most_open = sys.maxsize  # calls that the server permits at the same time
        self._held: deque[tuple[int, bytes]] = deque()  # number and request of the calls that have to wait
        self._refusals = 0  # since the last call that ended
        self._block, self._ends_call = b"", False  # the header block that is being received
        self._window = DEFAULT_WINDOW  # bytes that the server accepts on the connection
        self._stream_window, self._max_frame = DEFAULT_WINDOW, DEFAULT_FRAME  # initial limits of a new call
        self._unsent: dict[int, memoryview] = {}  # stream -> the part of the request that waits for a window
        self._windows: dict[int, int] = {}  # stream -> its window, until its request is sent completely
        self._unacknowledged = 0  # bytes received since the last update of the connection's window

    def request(self, message: bytes) -> int:
        """Start a call with the serialized ``message`` and return its number."""
        number = self._calls
        self._calls += 1
        self._held.append((number, message))
        self._start_held()
        return number

    def _start_held(self) -> None:
        """Start as many of the held calls as the server permits. After a refusal it permits one when a call ends."""
        while self._held and len(self._open) < self._most_open and not (self._refusals and self._open):
            number, message = self._held.popleft()
            stream, self._streams = 2 * self._streams + 1, self._streams + 1
            self._open[stream] = number, message
            self.outbox += _frame(HEADERS, END_HEADERS, stream, self._headers)
            self._unsent[stream] = memoryview(b"\0" + _NUMBER.pack(len(message)) + message)
            self._windows[stream] = self._stream_window
            self._send()

    def receive(self, data: bytes) -> list[tuple[int, str]]:
        """Return the calls that ended with ``data``: their numbers and error messages (empty: success)."""
        inbox, start = self._inbox + data, 0
        ended: list[tuple[int, str]] = []
        while len(inbox) - start >= _FRAME.size:
            word, flags, stream = _FRAME.unpack_from(inbox, start)
            end = start + _FRAME.size + (word >> 8)
            if len(inbox) < end:
                break
            error = self._receive_frame(word & 0xFF, flags, stream, inbox[start + _FRAME.size : end])
            if error is not None:
                ended.append((self._number(stream), error))
                self._open.pop(stream, None)
                self._refusals = 0
            start = end
        self._inbox = inbox[start:]
        self._start_held()
        return ended

    def _receive_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> str | None:
        """Return the error of the call that ends with this frame, an empty string for success, or None."""
        if kind == DATA:
            self._acknowledge(len(payload))
            return NO_STATUS if flags & END_STREAM else None
        if kind in (HEADERS, CONTINUATION):
            return self._receive_headers(kind, flags, stream, payload)
        if kind == RST_STREAM:
            self._forget(stream)
            code = _number(payload)  # 0 follows a complete answer: the server needs no more of the request
            if code == REFUSED_STREAM and stream in self._open and self._refusals < MAX_REFUSALS:
                self._refusals += 1
                self._held.appendleft(self._open.pop(stream))
                return None
            return f"the server reset the request (HTTP/2 error {code})" if code else None
        if kind == SETTINGS and not flags & ACK:
            self._apply_settings(payload)
            self.outbox += _frame(SETTINGS, ACK, 0, b"")
        elif kind == PING and not flags & ACK:
            self.outbox += _frame(PING, ACK, 0, payload)
        elif kind == WINDOW_UPDATE:
            if stream == 0:
                self._window += _number(payload)
            elif stream in self._unsent:
                self._windows[stream] += _number(payload)
            self._send()
        elif kind == GOAWAY:
            code = _number(payload[4:])
            raise ConnectionError(f"the server ended the connection (HTTP/2 error {code})" if code else CLOSED_EARLY)
        return None

    def _receive_headers(self, kind: int, flags: int, stream: int, payload: bytes) -> str | None:
        """Return what ``_receive_frame`` returns for a frame of headers, of which only the trailers matter."""
        if kind == HEADERS:
            if flags & (PADDED | PRIORITY):
                raise ConnectionError(NO_TRITONSERVER)
            self._block, self._ends_call = b"", bool(flags & END_STREAM)
        self._block += payload
        if not flags & END_HEADERS or not self._ends_call:
            return None
        self._forget(stream)
        return call_error(self._block)

    def _apply_settings(self, payload: bytes) -> None:
        """Apply the server's limits to open calls and to later ones, and send data that they now permit."""
        for name, value in _SETTING.iter_unpack(payload):
            if name == INITIAL_WINDOW_SIZE:
                for stream in self._unsent:
                    self._windows[stream] += value - self._stream_window
                self._stream_window = value
            elif name == MAX_FRAME_SIZE:
                self._max_frame = value
            elif name == MAX_CONCURRENT_STREAMS:
                self._most_open = value
        self._send()

    def _send(self) -> None:
        """Append as much unsent data to the outbox as the windows allow, oldest call first."""
        for stream, unsent in list(self._unsent.items()):
            while unsent and (size := min(len(unsent), self._window, self._windows[stream], self._max_frame)) > 0:
                self.outbox += _frame(DATA, END_STREAM if size == len(unsent) else 0, stream, unsent[:size])
                self._unsent[stream] = unsent = unsent[size:]
                self._windows[stream] -= size
                self._window -= size
            if not unsent:
                self._forget(stream)
            if not self._window:
                return

    def _number(self, stream: int) -> int:
        """Return the number of the call on ``stream``, which has a smaller one if calls were refused and repeated."""
        return self._open[stream][0] if stream in self._open else stream // 2

    def _forget(self, stream: int) -> None:
        """Drop the part of the request on ``stream`` that was not sent."""
        self._unsent.pop(stream, None)
        self._windows.pop(stream, None)

    def _acknowledge(self, size: int) -> None:
        """Send a WINDOW_UPDATE for the connection once half of its window is used.

        A single call never uses up its own window.
        """
        self._unacknowledged += size
        if self._unacknowledged > MAX_WINDOW // 2:
            self.outbox += _frame(WINDOW_UPDATE, 0, 0, _NUMBER.pack(self._unacknowledged))
            self._unacknowledged = 0


class StreamingConnection(Http2Connection):
    """A connection whose calls have any number of response messages.

    ``messages`` holds the serialized responses that ``receive`` completed, each with the number of its call, in the
    order of their arrival; the user empties it. All responses of a call have to fit into a window of 2 GiB.
    """

    def __init__(
        self, authority: str, method: str, headers: Mapping[str, str] | None = None, *, encrypted: bool = False
    ) -> None:
        super().__init__(authority, method, headers, encrypted=encrypted)
        self.messages: list[tuple[int, bytes]] = []
        self._incomplete: dict[int, bytes] = {}  # stream -> the start of a message

    def _receive_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> str | None:
        if kind == DATA:
            if flags & PADDED:
                raise ConnectionError(NO_TRITONSERVER)
            messages, incomplete = split_messages(self._incomplete.pop(stream, b"") + payload)
            self.messages += [(self._number(stream), message) for message in messages]
            if incomplete:
                self._incomplete[stream] = incomplete
        return super()._receive_frame(kind, flags, stream, payload)

    def _forget(self, stream: int) -> None:
        super()._forget(stream)
        self._incomplete.pop(stream, None)


def split_messages(data: bytes) -> tuple[list[bytes], bytes]:
    """Return the complete gRPC messages at the start of ``data``, without their prefixes, and the incomplete rest.

    Raises ConnectionError if a message is compressed, which the client does not accept.
    """
    messages, start = list[bytes](), 0
    while len(data) - start >= _PREFIX.size:
        compressed, size = _PREFIX.unpack_from(data, start)
        if compressed:
            raise ConnectionError("the server compresses its responses, which the load generator cannot read")
        end = start + _PREFIX.size + size
        if len(data) < end:
            break
        messages.append(data[start + _PREFIX.size : end])
        start = end
    return messages, data[start:]


@lru_cache(maxsize=64)
def call_error(block: bytes) -> str:
    """Return the error message in the trailers of a gRPC call; an empty string if the call succeeded.

    Cached, because all successful calls end with the same bytes. Raises ConnectionError for an invalid block.
    """
    decoder = hpack.Decoder()
    decoder.header_table_size = 0
    try:
        fields = dict(decoder.decode(block, raw=True))
    except hpack.HPACKError as error:
        raise ConnectionError(f"the server sent headers that cannot be read ({error})") from None
    return call_status(fields)


def call_status(trailers: Mapping[bytes, bytes]) -> str:
    """Return the error message in the decoded ``trailers``; an empty string if the call succeeded."""
    status = trailers.get(b"grpc-status")
    if status is None:
        return NO_STATUS
    message = unquote_to_bytes(trailers.get(b"grpc-message", b"")).decode(errors="replace")
    return "" if status == b"0" else message or f"gRPC status {status.decode(errors='replace')}"


def _frame(kind: int, flags: int, stream: int, payload: bytes | memoryview) -> bytes:
    """Return an HTTP/2 frame of the type ``kind``."""
    return _FRAME.pack(len(payload) << 8 | kind, flags, stream) + payload


def _number(payload: bytes) -> int:
    """Return the 32-bit number at the start of ``payload`` without its reserved first bit."""
    return int(_NUMBER.unpack_from(payload)[0]) & MAX_WINDOW


# -- the socket -------------------------------------------------------------------------------------------------

CONNECT_SECONDS = 10.0


def connect(address: str, tls: Mapping[str, str | None] | None = None) -> socket.socket | TlsSocket:
    """Return a non-blocking connection to ``host:port``, over TLS if ``tls`` is not None.

    ``tls`` maps the field names of ``Tls`` to paths. The certificate of the server is checked. Raises OSError.
    """
    host, port = address.rpartition(":")[::2]
    host = host.strip("[]")
    connected = socket.create_connection((host, int(port)), CONNECT_SECONDS)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if tls is None:
        connected.setblocking(False)
        return connected
    from optimizer.core.endpoint import Tls
    from optimizer.measure.server_client import tls_context

    context = tls_context(Tls(**{name: None if file is None else Path(file) for name, file in tls.items()}))
    context.set_alpn_protocols(["h2"])
    channel = context.wrap_socket(connected, server_hostname=host)
    channel.setblocking(False)
    return TlsSocket(channel)


class TlsSocket:
    """The part of a non-blocking socket's interface that the client uses, over TLS."""

    def __init__(self, channel: ssl.SSLSocket) -> None:
        self._channel = channel

    def close(self) -> None:
        self._channel.close()

    def fileno(self) -> int:
        return self._channel.fileno()

    def send(self, data: bytes | bytearray) -> int:
        """Send as many TLS records as the socket accepts. Raises BlockingIOError if it accepts none."""
        sent = 0
        with memoryview(data) as view:
            try:
                while sent < len(view):
                    sent += self._channel.send(view[sent:])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                if not sent:
                    raise BlockingIOError from None
        return sent

    def recv(self, size: int) -> bytes:
        """Return all complete TLS records, since ``select`` does not report records that OpenSSL has buffered.

        Raises BlockingIOError if there is none.
        """
        parts: list[bytes] = []
        try:
            while part := self._channel.recv(size):
                parts.append(part)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if not parts:
                raise BlockingIOError from None
        return b"".join(parts)
