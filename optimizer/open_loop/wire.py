"""Unary gRPC calls on one HTTP/2 connection, without the socket: bytes in, bytes out.

As much of RFC 9113 as it takes to send requests to a tritonserver and to tell that they were answered; what an answer
says is not looked at. gRPC's Python library takes four times the CPU time for a call, of cores that the server may
share: beside it, a library is late at rates that the server still serves (benchmarks/open_loop_rate.md).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from urllib.parse import unquote_to_bytes

from optimizer.open_loop.header_block import literal, literals

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM = ACK = 0x01
END_HEADERS, PADDED, PRIORITY = 0x04, 0x08, 0x20
HEADER_TABLE_SIZE, ENABLE_PUSH, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 1, 2, 4, 5
DEFAULT_WINDOW, MOST_WINDOW = 2**16 - 1, 2**31 - 1
MOST_FRAME = 2**24 - 1
OUR_SETTINGS = (
    (HEADER_TABLE_SIZE, 0),
    (ENABLE_PUSH, 0),
    (INITIAL_WINDOW_SIZE, MOST_WINDOW),
    (MAX_FRAME_SIZE, MOST_FRAME),
)
METHOD_POST, SCHEME_HTTP, SCHEME_HTTPS = b"\x83", b"\x86", b"\x87"  # of the static table
NO_STATUS = "the answer has no gRPC status that can be read; give the address of tritonserver itself, not of a proxy"
_FRAME = struct.Struct(">IBI")  # length and type, flags, stream
_SETTING = struct.Struct(">HI")
_NUMBER = struct.Struct(">I")


class Connection:
    """``outbox`` is to be written to the server; what comes from it is given to ``receive``.

    Calls are numbered from 0; each has ``headers``. ``encrypted``: the bytes go over TLS. Both raise ConnectionError
    where the server breaks off, or does not keep to the protocol.
    """

    def __init__(
        self, authority: str, method: str, headers: Mapping[str, str] | None = None, *, encrypted: bool = False
    ) -> None:
        self.outbox = bytearray(PREFACE)
        self.outbox += _frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*setting) for setting in OUR_SETTINGS))
        self.outbox += _frame(WINDOW_UPDATE, 0, 0, _NUMBER.pack(MOST_WINDOW - DEFAULT_WINDOW))
        self._headers = METHOD_POST + (SCHEME_HTTPS if encrypted else SCHEME_HTTP)
        self._headers += literal(b":path", method.encode()) + literal(b":authority", authority.encode())
        self._headers += literal(b"te", b"trailers") + literal(b"content-type", b"application/grpc")
        for name, value in (headers or {}).items():
            self._headers += literal(name.encode(), value.encode())
        self._inbox = b""
        self._calls = 0
        self._block, self._ends_call = b"", False  # of headers, until their last frame
        self._window = DEFAULT_WINDOW  # bytes that the server takes on the connection,
        self._stream_window, self._largest_frame = DEFAULT_WINDOW, 2**14  # and of a new call
        self._unsent: dict[int, memoryview] = {}  # by stream: what no window was open for yet,
        self._windows: dict[int, int] = {}  # and how far its own is open
        self._taken = 0  # bytes received since the server was last told that they were taken

    def request(self, message: bytes) -> int:
        """The number of a new call with ``message``."""
        number, stream = self._calls, 2 * self._calls + 1
        self._calls += 1
        self.outbox += _frame(HEADERS, END_HEADERS, stream, self._headers)
        self._unsent[stream] = memoryview(b"\0" + _NUMBER.pack(len(message)) + message)
        self._windows[stream] = self._stream_window
        self._send()
        return number

    def receive(self, data: bytes) -> list[tuple[int, str]]:
        """The calls that end with ``data``: number, and what went wrong or nothing."""
        inbox, at = self._inbox + data, 0
        ended: list[tuple[int, str]] = []
        while len(inbox) - at >= _FRAME.size:
            word, flags, stream = _FRAME.unpack_from(inbox, at)
            end = at + _FRAME.size + (word >> 8)
            if len(inbox) < end:
                break
            error = self._frame(word & 0xFF, flags, stream, inbox[at + _FRAME.size : end])
            if error is not None:
                ended.append((stream // 2, error))
            at = end
        self._inbox = inbox[at:]
        return ended

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> str | None:
        """Why the call of ``stream`` failed, empty where it succeeded, None where it has not ended."""
        if kind == DATA:
            self._take(len(payload))
            return NO_STATUS if flags & END_STREAM else None
        if kind in (HEADERS, CONTINUATION):
            return self._header_frame(kind, flags, stream, payload)
        if kind == RST_STREAM:
            self._forget(stream)
            code = _number(payload)  # 0 follows an answer: no more of the request is needed
            return f"the server reset the request (HTTP/2 error {code})" if code else None
        if kind == SETTINGS and not flags & ACK:
            self._settings(payload)
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
            raise ConnectionError(f"the server ended the connection (HTTP/2 error {_number(payload[4:])})")
        return None

    def _header_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> str | None:
        if kind == HEADERS:
            if flags & (PADDED | PRIORITY):
                raise ConnectionError("the server's answers are not those of a tritonserver; is a proxy in between?")
            self._block, self._ends_call = b"", bool(flags & END_STREAM)
        self._block += payload
        if not flags & END_HEADERS or not self._ends_call:
            return None
        self._forget(stream)
        try:
            fields = literals(self._block)
        except IndexError:
            raise ConnectionError("the server sent headers that cannot be read") from None
        status = fields.get(b"grpc-status")
        if status is None:
            return NO_STATUS
        message = unquote_to_bytes(fields.get(b"grpc-message", b"")).decode(errors="replace")
        return "" if status == b"0" else message or f"gRPC status {status.decode(errors='replace')}"

    def _settings(self, payload: bytes) -> None:
        for name, value in _SETTING.iter_unpack(payload):
            if name == INITIAL_WINDOW_SIZE:
                for stream in self._unsent:
                    self._windows[stream] += value - self._stream_window
                self._stream_window = value
            elif name == MAX_FRAME_SIZE:
                self._largest_frame = value
        self._send()

    def _send(self) -> None:
        """What the windows let through of what is still to be sent, the oldest call first."""
        for stream, rest in list(self._unsent.items()):
            while rest and (size := min(len(rest), self._window, self._windows[stream], self._largest_frame)) > 0:
                self.outbox += _frame(DATA, END_STREAM if size == len(rest) else 0, stream, rest[:size])
                self._unsent[stream] = rest = rest[size:]
                self._windows[stream] -= size
                self._window -= size
            if not rest:
                self._forget(stream)
            if not self._window:
                return

    def _forget(self, stream: int) -> None:
        self._unsent.pop(stream, None)
        self._windows.pop(stream, None)

    def _take(self, size: int) -> None:
        """Opens the connection's window again once half of it is used; that of a call is never used up."""
        self._taken += size
        if self._taken > MOST_WINDOW // 2:
            self.outbox += _frame(WINDOW_UPDATE, 0, 0, _NUMBER.pack(self._taken))
            self._taken = 0


def _frame(kind: int, flags: int, stream: int, payload: bytes | memoryview) -> bytes:
    return _FRAME.pack(len(payload) << 8 | kind, flags, stream) + payload


def _number(payload: bytes) -> int:
    """A 32-bit number; of its first bit HTTP/2 makes no use."""
    return int(_NUMBER.unpack_from(payload)[0]) & MOST_WINDOW
