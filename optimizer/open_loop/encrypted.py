"""TLS below HTTP/2, for a client that never blocks."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping
from pathlib import Path

from optimizer.client import tls
from optimizer.client.connection import Tls


class Encrypted:
    """As much of a socket as the client uses. What would block raises BlockingIOError, as there."""

    def __init__(self, channel: ssl.SSLSocket) -> None:
        self._channel = channel

    @classmethod
    def over(cls, connected: socket.socket, host: str, files: Mapping[str, str | None]) -> Encrypted:
        """Checks the certificate of the server at ``host``; ``files`` are by the fields of Tls. Raises OSError."""
        context = tls.context(Tls(**{name: None if file is None else Path(file) for name, file in files.items()}))
        context.set_alpn_protocols(["h2"])
        channel = context.wrap_socket(connected, server_hostname=host)
        channel.setblocking(False)
        return cls(channel)

    def __enter__(self) -> Encrypted:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def fileno(self) -> int:
        return self._channel.fileno()

    def send(self, data: bytes | bytearray) -> int:
        """Record after record, as many as the socket takes."""
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
        """Every record that has come: for those that are kept here already, nobody would be woken."""
        parts: list[bytes] = []
        try:
            while part := self._channel.recv(size):
                parts.append(part)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if not parts:
                raise BlockingIOError from None
        return b"".join(parts)
