"""A non-blocking connection to the server, with or without TLS."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping
from pathlib import Path

CONNECT_SECONDS = 10.0


def connect(address: str, tls: Mapping[str, str | None] | None = None) -> socket.socket | TlsSocket:
    """Return a non-blocking connection to ``host:port``; ``tls`` as in SendPlan. Raises OSError."""
    host, _, port = address.rpartition(":")
    connected = socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if tls is not None:
        return TlsSocket.over(connected, host.strip("[]"), tls)
    connected.setblocking(False)
    return connected


class TlsSocket:
    """The part of a non-blocking socket's interface that the client uses, over TLS."""

    def __init__(self, channel: ssl.SSLSocket) -> None:
        self._channel = channel

    @classmethod
    def over(cls, connected: socket.socket, host: str, files: Mapping[str, str | None]) -> TlsSocket:
        """Make the TLS handshake on ``connected`` and check the certificate of the server at ``host``.

        ``files`` maps the field names of ``Tls`` to paths. Raises OSError.
        """
        from optimizer.core.endpoint import Tls
        from optimizer.measure.tls import tls_context

        context = tls_context(Tls(**{name: None if file is None else Path(file) for name, file in files.items()}))
        context.set_alpn_protocols(["h2"])
        channel = context.wrap_socket(connected, server_hostname=host)
        channel.setblocking(False)
        return cls(channel)

    def __enter__(self) -> TlsSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def fileno(self) -> int:
        return self._channel.fileno()

    def send(self, data: bytes | bytearray) -> int:
        """Send as many TLS records as the socket accepts. Raises BlockingIOError if it accepts none."""
        sent = 0
        with memoryview(data) as rest:
            try:
                while sent < len(rest):
                    sent += self._channel.send(rest[sent:])
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
