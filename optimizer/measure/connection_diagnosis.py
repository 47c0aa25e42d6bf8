"""Why a server cannot be reached: the wrong address, protocol, TLS setting or certificate."""

from __future__ import annotations

import socket
import ssl
from typing import Literal, TypeAlias

from optimizer.core.endpoint import Connection
from optimizer.core.safe_text import one_line
from optimizer.measure.server_client import tls_context
from optimizer.options.addresses import SSL_FLAGS

_OTHER_HOST_CODES = (62, 64)  # OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH
CONNECT_SECONDS = 3.0  # limit of each connection
_TLS_ALERT = b"\x15\x03"
_HTTP2_SETTINGS = b"\x04"  # type of the first frame of an HTTP/2 server, after three bytes of length

_PROTOCOL_NAMES = {"grpc": "gRPC", "http": "HTTP"}

DetectedProtocol: TypeAlias = Literal["grpc", "http", "tls", ""]


def diagnose_connection(connection: Connection) -> str:
    """Return in one line why the server cannot be reached and what to do; an empty string if no fault is found.

    Raises BadInputError if the TLS files cannot be used.
    """
    address, scheme, flags = connection.address, connection.protocol, SSL_FLAGS[connection.protocol]
    try:
        detected = _detect_protocol(connection, _connect(connection))
        if connection.tls is None:
            if detected == "tls" or (not detected and _accepts_tls(connection)):
                return f"the server at {address} expects TLS; connect with --url {scheme}s://{address}"
        elif detected in ("grpc", "http"):
            return f"the server at {address} does not use TLS; connect with --url {scheme}://{address}"
        else:
            detected = _detect_protocol(connection, _connect_tls(connection, tls_context(connection.tls)))
            if not detected and connection.tls.cert is None:
                return _certificate_required(connection)
    except socket.gaierror:
        return f"unknown host {one_line(connection.host)}; check --url"
    except ssl.SSLCertVerificationError as error:
        reason = error.verify_message.rstrip(".")
        if error.verify_code in _OTHER_HOST_CODES:
            return (
                f"the certificate of the server at {address} is for another host ({reason}); use that host in --url"
            )
        ca = flags["ca"]
        return f"the certificate of the server at {address} is not trusted ({reason}); give its CA with {ca}"
    except ssl.SSLError as error:
        reason = error.reason or str(error)
        if "CERTIFICATE" in reason and connection.tls is not None and connection.tls.cert is None:
            return _certificate_required(connection)
        return (
            f"the TLS handshake with the server at {address} failed ({reason}); check its certificate and "
            f"{flags['cert']}"
        )
    except OSError as error:
        reason = (error.strerror or str(error) or "no response").lower()
        return f"no tritonserver responds at {address} ({reason}); start it, or give its address with --url"
    return _wrong_protocol(connection, detected)


def _certificate_required(connection: Connection) -> str:
    """Return that the server may require a client certificate, which the connection does not have."""
    flags = SSL_FLAGS[connection.protocol]
    return (
        f"the server at {connection.address} closes the connection after the TLS handshake; "
        f"if it requires a client certificate, give {flags['cert']} and {flags['key']}"
    )


def _wrong_protocol(connection: Connection, detected: DetectedProtocol) -> str:
    """Return that the server speaks the other protocol of Triton; empty if it does not, or if that is unknown."""
    if detected not in ("grpc", "http") or detected == connection.protocol:
        return ""
    address, secure = connection.address, "s" if connection.tls else ""
    expected, actual = _PROTOCOL_NAMES[connection.protocol], _PROTOCOL_NAMES[detected]
    return (
        f"the server at {address} speaks {actual}, not {expected}; "
        f"give its {expected} port, or --url {detected}{secure}://{address}"
    )


def _connect(connection: Connection) -> socket.socket:
    return socket.create_connection((connection.host, connection.port), CONNECT_SECONDS)


def _connect_tls(connection: Connection, context: ssl.SSLContext) -> ssl.SSLSocket:
    """Return a connection after its TLS handshake. Raises OSError."""
    context.set_alpn_protocols(["h2"] if connection.protocol == "grpc" else ["http/1.1"])
    return context.wrap_socket(_connect(connection), server_hostname=connection.host)


def _accepts_tls(connection: Connection) -> bool:
    """Return whether the server makes a TLS handshake, without checking its certificate."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        _connect_tls(connection, context).close()
    except OSError as error:
        return isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or "")
    return True


def _detect_protocol(connection: Connection, channel: socket.socket) -> DetectedProtocol:
    """Return the protocol of the server's response to an HTTP/1.1 request; empty without a response.

    A gRPC server sends an HTTP/2 frame. Raises ssl.SSLError if the server ends the TLS connection.
    """
    with channel:
        channel.sendall(f"GET /v2/health/live HTTP/1.1\r\nHost: {connection.address}\r\n\r\n".encode())
        try:
            response = channel.recv(16)
        except ssl.SSLError:
            raise
        except OSError:
            return ""
    if response.startswith(b"HTTP/1."):
        return "http"
    if response.startswith(_TLS_ALERT):
        return "tls"
    return "grpc" if response[3:4] == _HTTP2_SETTINGS else ""
