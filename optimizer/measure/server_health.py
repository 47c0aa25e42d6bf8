"""Whether a server responds, why it cannot be reached, and the reason of a failure from its messages and log."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from optimizer.core.errors import BadInputError
from optimizer.core.interfaces import Connection, Tls
from optimizer.core.safe_text import one_line, read_bytes, read_tail
from optimizer.options.addresses import SSL_FLAGS

if TYPE_CHECKING:
    from tritonclient.grpc import InferenceServerClient


PROBE_SECONDS = 5.0  # even under the heaviest load a server answers within a fraction of this
LOG_BYTES = 2**16
MAX_CHARACTERS = 300
OTHER_HOST = (62, 64)  # OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH


def is_live(client: InferenceServerClient) -> bool:
    """Return whether the server reports within PROBE_SECONDS that it is live."""
    from tritonclient.utils import InferenceServerException

    try:
        return bool(client.is_server_live(client_timeout=PROBE_SECONDS))
    except InferenceServerException:
        return False


def model_died(message: str) -> bool:
    """Return whether the message says that the stub process of a Python model died; the server itself is alive."""
    return re.search(r"stub process\b.{0,200}\bis (not healthy|unhealthy)", message, re.IGNORECASE) is not None


def is_rejection(message: str) -> bool:
    """Return whether the message says that Triton rejected a request because its queue was full."""
    return "exceeds maximum queue size" in message.lower()


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


def without_traceback(message: str) -> str:
    """Return the server's message on one line, without the Python traceback that a backend appends."""
    return shorten(re.split(r"\s+At:\s", message)[0])


def missing_module(message: str) -> str:
    """Return the top-level name of the module that a Python model could not import; empty for other errors."""
    found = re.search(r"ModuleNotFoundError: No module named '(\w+)", message)
    return found[1] if found else ""


def last_error(log: Path, start: int = 0) -> str:
    """Return the last error in the server's log from byte ``start`` on; an empty string if there is none."""
    errors = [line for line in _lines(log, start) if line.startswith("E") or "error" in line.lower()]
    return _without_origin(errors[-1]) if errors else ""


def last_output(log: Path, start: int = 0) -> str:
    """Return the last line of the log from byte ``start`` on that a model's process wrote; empty if there is none."""
    lines = [line for line in _lines(log, start) if not re.match(r"[IWE]\d{4} |[|+]", line)]
    return shorten(lines[-1]) if lines else ""


def startup_failure(log: Path, start: int = 0) -> str:
    """Return the log's complaint about the command line, otherwise its last error or its last line."""
    return (
        _command_line_error(log, start)
        or last_error(log, start)
        or _without_origin((_lines(log, start) or ["it printed nothing"])[-1])
    )


def _command_line_error(log: Path, start: int) -> str:
    """Return the line before or after the usage message, which itself contains the word error many times."""
    lines = _lines(log, start)
    if not any(line.startswith("Usage: tritonserver") for line in lines):
        return ""
    messages = [line for line in lines if not line.startswith((" ", "\t", "Usage:")) and not line.endswith(":")]
    return shorten(messages[-1]) if messages else ""


def _lines(log: Path, start: int) -> list[str]:
    try:
        return [line for line in read_tail(log, LOG_BYTES, start).splitlines() if line.strip()]
    except OSError:
        return []


def _without_origin(line: str) -> str:
    """Return a log line without its time and source location."""
    return shorten(line.partition("] ")[2].strip('"') or line)


def shorten(text: str, most: int = MAX_CHARACTERS) -> str:
    """Return ``text`` on one printable line of at most ``most`` characters, with runs of spaces collapsed."""
    return one_line(" ".join(text.split()), most)


MAX_BYTES = 4 << 20
_HINT = "give a file with PEM certificates"


def tls_context(tls: Tls, create: Callable[..., Any] = ssl.create_default_context) -> ssl.SSLContext:
    """Return a TLS context that checks the server's certificate and host name.

    ``create`` makes the empty context; gevent has its own. Raises BadInputError if a file cannot be used.
    """
    context: ssl.SSLContext = create(cadata=None if tls.ca is None else _read_pem(tls.ca))
    if tls.cert is not None and tls.key is not None:
        _read_pem(tls.cert), _read_pem(tls.key)
        try:
            context.load_cert_chain(tls.cert, tls.key, password=lambda: _reject_password(tls.key))
        except (ssl.SSLError, OSError) as error:
            reason = getattr(error, "reason", None) or error.strerror or "it cannot be read"
            names = f"{one_line(str(tls.cert))} with the key {one_line(str(tls.key))}"
            raise BadInputError(f"{names}: not a certificate and its private key ({reason})") from None
    elif tls.cert is not None or tls.key is not None:
        file = one_line(str(tls.cert or tls.key))
        raise BadInputError(f"{file}: a client certificate needs its private key; give both")
    return context


def ca_file(tls: Tls) -> Path | None:
    """Return the file of trusted CAs, for clients whose own default differs from OpenSSL's."""
    if tls.ca is not None:
        return tls.ca
    default = ssl.get_default_verify_paths().cafile
    return None if default is None else Path(default)


def _read_pem(path: Path) -> str:
    try:
        text = read_bytes(path, MAX_BYTES, _HINT).decode("ascii", errors="replace")
        if "-----BEGIN " not in text:
            raise ValueError
        if "CERTIFICATE-----" in text:
            ssl.create_default_context(cadata=text)
    except (ValueError, ssl.SSLError):
        raise BadInputError(f"{one_line(str(path))}: not a valid PEM file; {_HINT}") from None
    return text


def _reject_password(key: Path | None) -> str:
    raise BadInputError(f"{one_line(str(key))}: the private key has a password; give a key without a password")


TIMEOUT_SECONDS = 3.0
_TLS_ALERT = b"\x15\x03"
_HTTP2_SETTINGS = b"\x04"  # type of the first frame of an HTTP/2 server, after three bytes of length

_NAMES = {"grpc": "gRPC", "http": "HTTP"}

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
    expected, actual = _NAMES[connection.protocol], _NAMES[detected]
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
