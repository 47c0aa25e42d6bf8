"""Why a server is not reached: looked at from below gRPC and HTTP, whose own errors seldom tell."""

from __future__ import annotations

import socket
import ssl
from typing import Literal, TypeAlias

from optimizer.client import tls
from optimizer.client.connection import Connection
from optimizer.untrusted import one_line

SECONDS = 3.0
_ALERT = b"\x15\x03"  # how TLS answers what is none
_HTTP2_SETTINGS = b"\x04"  # the type of the frame that gRPC begins with; after three bytes of length

_NAMES = {"grpc": "gRPC", "http": "HTTP"}

Spoken: TypeAlias = Literal["grpc", "http", "tls", ""]


def trouble(connection: Connection) -> str:
    """In one line with its mend, what is wrong with the way to the server; empty where nothing is found to be.

    Raises BadInputError where the files for TLS cannot be used.
    """
    at, scheme = connection.address, connection.protocol
    try:
        spoken = _spoken(connection, _connected(connection))
        if connection.tls is None:
            if spoken == "tls" or (not spoken and _takes_tls(connection)):
                return f"the server at {at} speaks TLS; connect with it: --url {scheme}s://{at}"
        elif spoken in ("grpc", "http"):
            return f"the server at {at} speaks no TLS; connect without it: --url {scheme}://{at}"
        else:
            spoken = _spoken(connection, _secured(connection, tls.context(connection.tls)))
            if not spoken and connection.tls.cert is None:
                return _wants_certificate(at)
    except socket.gaierror:
        return f"no host is called {one_line(connection.host)}; see to --url"
    except ssl.SSLCertVerificationError as error:
        told = error.verify_message.rstrip(".")
        if "mismatch" in told:
            return f"the certificate of the server at {at} is for another host ({told}); give the name that it is for"
        return f"the certificate of the server at {at} is not trusted ({told}); give the CA that signed it: --tls-ca"
    except ssl.SSLError as error:
        why = error.reason or str(error)
        if "CERTIFICATE" in why and connection.tls is not None and connection.tls.cert is None:
            return _wants_certificate(at)
        return f"no TLS with the server at {at}: {why}; see to its certificate and to --tls-cert"
    except OSError as error:
        why = (error.strerror or str(error) or "it does not answer").lower()
        return f"no tritonserver answers at {at} ({why}); start it, or give its address by --url"
    return _wrong_protocol(connection, spoken)


def _wants_certificate(at: str) -> str:
    return f"the server at {at} breaks off after the TLS handshake: give the client's --tls-cert and --tls-key"


def _wrong_protocol(connection: Connection, spoken: Spoken) -> str:
    if spoken not in ("grpc", "http") or spoken == connection.protocol:
        return ""
    at, secure = connection.address, "s" if connection.tls else ""
    ours, theirs = _NAMES[connection.protocol], _NAMES[spoken]
    return f"the server at {at} speaks {theirs}, not {ours}; give its {ours} port, or --url {spoken}{secure}://{at}"


def _connected(connection: Connection) -> socket.socket:
    return socket.create_connection((connection.host, connection.port), SECONDS)


def _secured(connection: Connection, context: ssl.SSLContext) -> ssl.SSLSocket:
    context.set_alpn_protocols(["h2"] if connection.protocol == "grpc" else ["http/1.1"])
    return context.wrap_socket(_connected(connection), server_hostname=connection.host)


def _takes_tls(connection: Connection) -> bool:
    """Whatever its certificate."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        _secured(connection, context).close()
    except OSError as error:
        return isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or "")
    return True


def _spoken(connection: Connection, channel: socket.socket) -> Spoken:
    """By the answer to a request that both protocols know: to HTTP/1.1 gRPC answers with a frame of its own."""
    with channel:
        channel.sendall(f"GET /v2/health/live HTTP/1.1\r\nHost: {connection.address}\r\n\r\n".encode())
        try:
            answer = channel.recv(16)
        except ssl.SSLError:
            raise
        except OSError:
            return ""
    if answer.startswith(b"HTTP/1."):
        return "http"
    if answer.startswith(_ALERT):
        return "tls"
    return "grpc" if answer[3:4] == _HTTP2_SETTINGS else ""
