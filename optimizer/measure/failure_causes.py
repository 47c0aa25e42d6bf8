"""The causes of failures: why a server cannot be reached, and what its error messages say."""

from __future__ import annotations

import re
import socket
import ssl
from typing import Literal, TypeAlias

from optimizer.core.endpoint import Connection
from optimizer.core.safe_text import one_line, shorten
from optimizer.measure.server_client import tls_context
from optimizer.options.addresses import SSL_FLAGS

OTHER_HOST = (62, 64)  # OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH
TIMEOUT_SECONDS = 3.0
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
        if error.verify_code in OTHER_HOST:
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
    flags = SSL_FLAGS[connection.protocol]
    return (
        f"the server at {connection.address} closes the connection after the TLS handshake; "
        f"if it requires a client certificate, give {flags['cert']} and {flags['key']}"
    )


def _wrong_protocol(connection: Connection, detected: DetectedProtocol) -> str:
    if detected not in ("grpc", "http") or detected == connection.protocol:
        return ""
    address, secure = connection.address, "s" if connection.tls else ""
    expected, actual = _PROTOCOL_NAMES[connection.protocol], _PROTOCOL_NAMES[detected]
    return (
        f"the server at {address} speaks {actual}, not {expected}; "
        f"give its {expected} port, or --url {detected}{secure}://{address}"
    )


def _connect(connection: Connection) -> socket.socket:
    return socket.create_connection((connection.host, connection.port), TIMEOUT_SECONDS)


def _connect_tls(connection: Connection, context: ssl.SSLContext) -> ssl.SSLSocket:
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
    """Return the protocol of the server's response to an HTTP/1.1 request: a gRPC server sends an HTTP/2 frame."""
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


# -- error messages of a server ---------------------------------------------------------------------------------


def model_died(message: str) -> bool:
    """Return whether the message says that the stub process of a Python model died; the server itself is alive."""
    return re.search(r"stub process\b.{0,200}\bis (not healthy|unhealthy)", message, re.IGNORECASE) is not None


def is_rejection(message: str) -> bool:
    """Return whether the message says that Triton rejected a request because its queue was full."""
    return "exceeds maximum queue size" in message.lower()


def is_refused_by_queue(message: str) -> bool:
    """Return whether the message says that Triton refused a request: its queue was full, or it waited there too long.

    Fewer requests in flight may all be served.
    """
    return is_rejection(message) or "request timeout expired" in message.lower()


def lacks_memory(message: str) -> bool:
    """Return whether the message says that the server or one of its backends could not allocate memory.

    A failed allocation inside a Python model does not count, since that is memory of its own process.
    """
    return re.search(r"\b(cannot allocate memory|std::bad_alloc)\b", message, re.IGNORECASE) is not None


def lacks_gpu_memory(message: str) -> bool:
    """Return whether a message of PyTorch, CUDA, cuBLAS or ONNX Runtime says that a GPU has too little free memory.

    All processes of the server share that memory.
    """
    pattern = r"\bCUDA\b.{0,40}\bout of memory\b|\bcudaErrorMemoryAllocation\b|\bCUBLAS_STATUS_ALLOC_FAILED\b"
    return re.search(f"{pattern}|Failed to allocate memory for requested buffer", message, re.IGNORECASE) is not None


def hides_cause(message: str) -> bool:
    """Return whether the message says that Triton cannot read a model, for a reason that only its log has."""
    return "failed to poll from model repository" in message


def without_traceback(message: str) -> str:
    """Return the server's message on one line, without the Python traceback that a backend appends."""
    return shorten(re.split(r"\s+At:\s", message)[0])


def missing_module(message: str) -> str:
    """Return the top-level name of the module that a Python model could not import; empty for other errors."""
    match = re.search(r"ModuleNotFoundError: No module named '(\w+)", message)
    return match[1] if match else ""
