"""Requests to a server: inference, metadata of a model, whether the server responds, and why it cannot be reached."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from optimizer.core.endpoint import Connection, Endpoint
from optimizer.core.errors import DeploymentError, ServerCrashed
from optimizer.core.safe_text import one_line
from optimizer.measure.server_client import (
    CALL_SECONDS,
    CallError,
    ServerClient,
    is_refused_by_queue,
    lacks_gpu_memory,
    model_died,
    tls_context,
    without_traceback,
)
from optimizer.options.addresses import SSL_FLAGS

if TYPE_CHECKING:
    from tritonclient.grpc.service_pb2 import ModelMetadataResponse

PROBE_SECONDS = 5.0  # even under the heaviest load a server answers within a fraction of this
SINGLE_ATTEMPTS = 3
_Responses = TypeVar("_Responses")


def open_client(connection: Connection) -> ServerClient:
    """Return a client for the connection's protocol, without sending anything.

    Raises BadInputError if the TLS files cannot be used.
    """
    if connection.protocol == "grpc":
        from optimizer.measure.grpc_client import GrpcClient  # takes 0.4 s

        return GrpcClient(connection)
    from optimizer.measure.http_client import HttpClient

    return HttpClient(connection)


def infer(endpoint: Endpoint, messages: Iterable[bytes], *, in_flight: int, timeout_seconds: float) -> list[bytes]:
    """Send ``messages``, at most ``in_flight`` at a time, and return the responses in the same order.

    Both are serialized: ModelInferRequest and ModelInferResponse.

    Raises:
        DeploymentError: The server failed a request; the message is the server's.
        ServerCrashed: The server or its model died, or left a request unanswered for ``timeout_seconds``.
    """
    with _client(endpoint) as client:
        return client.infer(messages, in_flight=in_flight, timeout_seconds=timeout_seconds)


def stream(
    endpoint: Endpoint, messages: Iterable[bytes], *, in_flight: int, timeout_seconds: float
) -> list[list[bytes]]:
    """Send ``messages`` to a decoupled model as ``infer`` does, and return all responses with outputs to each.

    Raises the same errors.
    """
    with _client(endpoint) as client:
        return client.stream(messages, in_flight=in_flight, timeout_seconds=timeout_seconds)


def send_as_queue_permits(send: Callable[[int], _Responses], in_flight: int) -> _Responses:
    """Return ``send(in_flight)``, with half of ``in_flight`` each time that the queue of the model refuses a request.

    Triton's batcher may sleep until even a single request expires, so one at a time is tried SINGLE_ATTEMPTS times.
    Raises the error of the last attempt, or any other error of ``send``.
    """
    singles = 0
    while True:
        singles += in_flight == 1
        try:
            return send(in_flight)
        except DeploymentError as error:
            if singles == SINGLE_ATTEMPTS or not is_refused_by_queue(str(error)):
                raise
            in_flight = max(1, in_flight // 2)


def with_model_name(message: bytes, model: str) -> bytes:
    """Return the serialized ModelInferRequest ``message`` with ``model`` as its model name."""
    from tritonclient.grpc.service_pb2 import ModelInferRequest

    request = ModelInferRequest.FromString(message)
    if request.model_name == model:
        return message
    request.model_name = model
    return bytes(request.SerializeToString())


def model_metadata(endpoint: Endpoint) -> ModelMetadataResponse:
    """Return the names, types and shapes of the model's inputs and outputs. Raises DeploymentError."""
    with _client(endpoint) as client:
        return client.metadata(endpoint.model)


@contextmanager
def _client(endpoint: Endpoint) -> Iterator[ServerClient]:
    """Yield a client of ``endpoint``. Raise ServerCrashed or DeploymentError for a CallError of the context."""
    with closing(open_client(endpoint.connection)) as client:
        try:
            yield client
        except CallError as error:
            message = without_traceback(str(error))
            if error.failure == "overdue":
                address = endpoint.connection.address
                raise ServerCrashed(f"the server at {address} did not answer a request in time") from error
            if error.failure == "unreachable" or model_died(str(error)):
                raise ServerCrashed(f"the server died during a request: {message}") from error
            raise DeploymentError(
                f"the server failed a request: {message}", lacks_gpu_memory=lacks_gpu_memory(message)
            ) from error


def reports_live(client: ServerClient) -> bool:
    """Return whether the server reports within PROBE_SECONDS that it is live."""
    try:
        client.check(PROBE_SECONDS)
    except CallError:
        return False
    return True


def responds(client: ServerClient, timeout_seconds: float = CALL_SECONDS) -> bool:
    """Return whether the server responds, even if it denies or refuses the health check."""
    try:
        client.check(timeout_seconds)
    except CallError as error:
        return error.failure in ("denied", "refused")
    return True


def all_servers_respond(endpoint: Endpoint) -> bool:
    """Return whether each server of ``endpoint`` responds within PROBE_SECONDS."""
    return not unresponsive_server(endpoint)


def unresponsive_server(endpoint: Endpoint, seconds: float = PROBE_SECONDS) -> str:
    """Return the name of the first server that does not respond within ``seconds``; an empty string if all do."""
    servers = endpoint.servers
    for number, server in enumerate(servers, 1):
        with closing(open_client(server.connection)) as client:
            if not responds(client, seconds):
                return f"server process {number} of {len(servers)}" if endpoint.replicas else "the server"
    return ""


# -- why a server cannot be reached: the wrong address, protocol, TLS setting or certificate -----------------------

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
