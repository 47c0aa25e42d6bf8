"""Certificates for servers on loopback, and a proxy that terminates TLS in front of a plain server."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import trustme

from optimizer.core.endpoint import Tls


class Certificates:
    """Certificates in ``folder``: one for 127.0.0.1 and one for another host, both signed by ``ca``.

    ``other_ca`` has signed neither of them.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        authority = trustme.CA()
        self.ca, self.other_ca = folder / "ca.pem", folder / "other_ca.pem"
        authority.cert_pem.write_to_path(str(self.ca))
        trustme.CA().cert_pem.write_to_path(str(self.other_ca))
        self.own = self._issued(authority, folder / "own.pem", "127.0.0.1", "localhost")
        self.other_host = self._issued(authority, folder / "elsewhere.pem", "triton.example.org")

    @property
    def tls(self) -> Tls:
        """Return the TLS settings of a client."""
        return Tls(self.ca)

    @staticmethod
    def _issued(authority: trustme.CA, path: Path, *names: str) -> Path:
        """Write the key and the certificate to one file."""
        authority.issue_cert(*names).private_key_and_cert_chain_pem.write_to_path(str(path))
        return path


@contextlib.contextmanager
def tls_proxy(to: str, certificate: Path) -> Iterator[str]:
    """Yield the ``host:port`` of a proxy that accepts TLS and forwards to ``to`` without it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    host, _, port = to.rpartition(":")

    def serve(accepted: socket.socket) -> None:
        with (
            contextlib.suppress(OSError),
            context.wrap_socket(accepted, server_side=True) as outside,
            socket.create_connection((host, int(port))) as inside,
        ):
            back = threading.Thread(target=_pump, args=(inside, outside), daemon=True)
            back.start()
            _pump(outside, inside)
            back.join()

    def accept() -> None:
        with contextlib.suppress(OSError):  # closed: the end
            while True:
                threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Forward bytes from ``source`` to ``sink`` until one of them closes, then shut both down."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    for endpoint in (source, sink):
        with contextlib.suppress(OSError):
            endpoint.shutdown(socket.SHUT_RDWR)
