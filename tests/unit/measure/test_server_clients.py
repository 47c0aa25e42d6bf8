"""Test the clients of a server: headers, TLS files, interrupts, and the causes of faults, without secrets in them."""

from __future__ import annotations

import contextlib
import http.server
import json
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelStreamInferResponse

from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Connection, Endpoint, ProtocolName, Tls
from optimizer.core.errors import BadInputError, DeploymentError, EnvironmentFault, ServerCrashed
from optimizer.core.process import run_command
from optimizer.deploy.remote_server import ServerState, ServerStateFile
from optimizer.measure import server_calls, server_errors
from optimizer.measure.connection_diagnosis import diagnose_connection
from optimizer.measure.grpc_client import GrpcClient
from optimizer.measure.load_client.http2 import TlsSocket, connect
from optimizer.measure.perf_analyzer import connection_arguments
from optimizer.measure.server_calls import open_client, responds
from optimizer.measure.server_client import CallError
from tests.certificates import Certificates, tls_proxy
from tests.inference_server import serving_grpc

SECRET = "Bearer 5d41402abc4b"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


# -- servers ----------


@contextlib.contextmanager
def grpc_server(certificate: Path | None = None, client_ca: Path | None = None) -> Iterator[str]:
    """A server that denies every call and includes the received header in its message."""

    def deny(_: bytes, context: grpc.ServicerContext) -> bytes:
        sent = dict(context.invocation_metadata()).get("authorization", "nothing")
        context.abort(grpc.StatusCode.UNAUTHENTICATED, f"not with {sent}")
        return b""

    class Denying(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, _: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(deny)

    credentials = None
    if certificate is not None:
        pair = (certificate.read_bytes(), certificate.read_bytes())
        trusted = None if client_ca is None else client_ca.read_bytes()
        credentials = grpc.ssl_server_credentials([pair], trusted, client_ca is not None)
    with serving_grpc(Denying(), credentials=credentials) as address:
        yield address


@contextlib.contextmanager
def http_server(status: int = 401, page: bytes = b"") -> Iterator[str]:
    """A server that answers each request with ``status`` and ``page``, or else Triton's error with the header."""

    class Denying(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = page or json.dumps({"error": f"not with {self.headers.get('authorization')}"}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Denying) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@contextlib.contextmanager
def refusing_address() -> Iterator[str]:
    """An address that refuses connections; its port is bound, so that no other process can listen on it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


# -- headers ----------


@pytest.mark.parametrize(
    ("name", "value", "expected_text"),
    [
        ("a b", "x", "header a b: not a header name; write NAME:VALUE"),
        ("a\n", "x", r"header a\\n: not a header name"),
        ("key", "sesame\r\nother: x", "header key: the value has control or non-ASCII characters"),
        ("key", "sésame", "header key: the value has control or non-ASCII characters"),
        ("key", "sesame" * 2000, "headers of more than 8,192 characters"),
    ],
)
def test_an_invalid_header_is_refused_without_showing_its_value(name: str, value: str, expected_text: str) -> None:
    with pytest.raises(BadInputError, match=expected_text) as caught:
        Connection("host:8001", headers={name: value})
    assert "sesame" not in str(caught.value)


def test_header_values_appear_in_no_text() -> None:
    connection = Connection("host:8001", headers={"Authorization": SECRET, "other": "5d41"})
    assert "5d41" not in repr(connection)
    assert connection.redact(f"you sent {SECRET}, 5d41") == "you sent ***, ***"
    assert connection.sent_headers == {"authorization": SECRET, "other": "5d41"}
    assert (Connection("[::1]:80").host, Connection("[::1]:80").port) == ("::1", 80)


def test_the_logged_command_has_no_header_values(tmp_path: Path, certificates: Certificates) -> None:
    connection = Connection("host:8001", headers={"Authorization": SECRET}, tls=certificates.tls)
    words = connection_arguments(connection)
    assert words[-2:] == ["-H", f"authorization:{SECRET}"]
    done = run_command(
        [sys.executable, "-c", "import sys; print(sys.argv[-1])", *words], timeout_seconds=60, log=tmp_path / "log"
    )
    assert done.output.strip() == f"authorization:{SECRET}"
    written = (tmp_path / "commands.log").read_text()
    assert SECRET not in written
    assert written.rstrip().endswith("-H 'authorization:***'")


# -- servers that deny access ----------


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_denied_call_is_reported_without_the_secret(protocol: ProtocolName) -> None:
    with grpc_server() if protocol == "grpc" else http_server() as address:
        connection = Connection(address, protocol, {"Authorization": SECRET})
        with contextlib.closing(open_client(connection)) as client:
            calls: list[Callable[[], object]] = [
                client.check,
                partial(client.config, "m"),
                partial(client.statistics, "m"),
            ]
            for call in calls:
                with pytest.raises(CallError, match=r"^not with \*\*\*$") as caught:
                    call()
                assert caught.value.failure == "denied"
            assert responds(client)
        with pytest.raises(DeploymentError, match=r"failed a request: not with \*\*\*$"):
            server_calls.model_metadata(Endpoint("m", Candidate(1), remote=connection))


def test_a_page_of_another_http_server_is_reported_in_one_line() -> None:
    with (
        http_server(404, b"<html>\n<h1>Not found</h1></html>") as address,
        contextlib.closing(open_client(Connection(address, "http"))) as client,
        pytest.raises(
            CallError, match=r"^HTTP status 404 without an answer of a tritonserver; check the address"
        ) as caught,
    ):
        client.config("m")
    assert caught.value.failure == "refused"
    assert "html" not in str(caught.value)


def test_a_request_whose_response_is_an_error_is_received_to_its_end() -> None:
    """Older servers crash if a request is cancelled at the wrong moment."""
    cancelled = []

    def respond(_: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        yield ModelStreamInferResponse(error_message="it fails").SerializeToString()
        time.sleep(0.3)
        cancelled.append(not context.is_active())
        yield ModelStreamInferResponse().SerializeToString()

    class Streaming(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, _: Any) -> Any:
            return grpc.stream_stream_rpc_method_handler(respond)

    request = ModelInferRequest(model_name="m").SerializeToString()
    with (
        serving_grpc(Streaming()) as address,
        contextlib.closing(GrpcClient(Connection(address))) as client,
        pytest.raises(CallError, match="it fails"),
    ):
        client.stream([request], in_flight=2, timeout_seconds=60)
    assert cancelled == [False]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_an_unreachable_server_is_a_crash_during_a_measurement(protocol: ProtocolName) -> None:
    with refusing_address() as address:
        connection = Connection(address, protocol)
        with contextlib.closing(open_client(connection)) as client:
            assert not responds(client, 2)
        with pytest.raises(ServerCrashed, match="the server died during a request"):
            server_calls.model_metadata(Endpoint("m", Candidate(1), remote=connection))


def test_a_proxy_without_a_server_counts_as_unreachable() -> None:
    with http_server(502) as address, contextlib.closing(open_client(Connection(address, "http"))) as client:
        assert not responds(client)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_proxies_of_the_environment_are_not_used(protocol: ProtocolName, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_grpc_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with refusing_address() as proxy, grpc_server() if protocol == "grpc" else http_server() as address:
        for name in ("grpc_proxy", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, f"http://{proxy}")
        connection = Connection(address, protocol)
        with contextlib.closing(open_client(connection)) as client:
            assert responds(client)
        endpoint, message = Endpoint("m", Candidate(1), remote=connection), ModelInferRequest().SerializeToString()
        with pytest.raises(DeploymentError, match="the server failed a request"):
            server_calls.infer(endpoint, [message], in_flight=1, timeout_seconds=60)


def test_a_wrong_connection_is_diagnosed(certificates: Certificates) -> None:
    grpc_name, http_name = "gRPC, not HTTP", "HTTP, not gRPC"
    with (
        grpc_server() as plain,
        grpc_server(certificates.own) as secured,
        grpc_server(certificates.own, certificates.ca) as mutual,
        http_server() as web,
        tls_proxy(web, certificates.own) as secured_web,
        tls_proxy(web, certificates.other_host) as other_host,
        refusing_address() as refusing,
    ):
        trusted, other_ca = certificates.tls, Tls(certificates.other_ca)
        with_client_certificate = Tls(certificates.ca, certificates.own, certificates.own)
        for connection, expected_text in (
            (Connection(plain), ""),
            (Connection(secured, tls=trusted), ""),
            (Connection(mutual, tls=with_client_certificate), ""),
            (Connection(web, "http"), ""),
            (Connection(secured_web, "http", tls=trusted), ""),
            (Connection(secured), f"expects TLS; connect with --url grpcs://{secured}"),
            (Connection(mutual), "expects TLS"),
            (Connection(secured_web, "http"), f"expects TLS; connect with --url https://{secured_web}"),
            (Connection(plain, tls=trusted), f"does not use TLS; connect with --url grpc://{plain}"),
            (Connection(web, "http", tls=trusted), "does not use TLS"),
            (Connection(secured, tls=other_ca), "is not trusted"),
            (Connection(secured_web, "http", tls=other_ca), "is not trusted"),
            (Connection(other_host, "http", tls=trusted), "is for another host"),
            (
                Connection(mutual, tls=trusted),
                "closes the connection after the TLS handshake; if it requires a client certificate, give --ssl-grpc",
            ),
            (Connection(web), f"speaks {http_name}; give its gRPC port, or --url http://{web}"),
            (Connection(plain, "http"), f"speaks {grpc_name}; give its HTTP port, or --url grpc://{plain}"),
            (Connection(refusing), "(connection refused); start it, or give its address"),
            (Connection("no-such-host.invalid:8001"), "unknown host no-such-host.invalid; check --url"),
        ):
            result = diagnose_connection(connection)
            assert expected_text in result if expected_text else result == "", (connection, result)


# -- files ----------


def test_unusable_tls_files_are_named(certificates: Certificates, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no certificate")
    (tmp_path / "cut").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    certificate, ca = certificates.own, certificates.ca
    for files, expected_text in (
        (Tls(tmp_path / "none"), "none: no such file; check the path"),
        (Tls(tmp_path / "text"), "text: not a valid PEM file; give a file with PEM certificates"),
        (Tls(tmp_path / "cut"), "cut: not a valid PEM file"),
        (Tls(ca, certificate), "own.pem: a client certificate needs its private key; give both"),
        (
            Tls(ca, certificate, certificates.other_host),
            "own.pem with the key .*elsewhere.pem: not a certificate and its private key",
        ),
        (Tls(ca, certificate, ca), "not a certificate and its private key"),
    ):
        for connection in (Connection("host:1", tls=files), Connection("host:1", "http", tls=files)):
            with pytest.raises(BadInputError, match=expected_text):
                open_client(connection)


# -- the open loop's TLS --------------------------------------------------------------------------------------------


def test_a_tls_socket_transfers_without_blocking(certificates: Certificates) -> None:
    """Send more in both directions than socket buffers and TLS records hold."""
    import select

    sent = bytes(range(256)) * 20_000
    listening = socket.create_server(("127.0.0.1", 0))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.own)
    context.set_alpn_protocols(["h2"])

    def echo() -> None:
        with context.wrap_socket(listening.accept()[0], server_side=True) as server:
            for _ in range(0, len(sent), 1 << 14):
                server.sendall(server.recv(1 << 14))
            while data := server.recv(1 << 14):
                server.sendall(data)

    with listening:
        threading.Thread(target=echo, daemon=True).start()
        files = {"ca": str(certificates.ca), "cert": None, "key": None}
        with contextlib.closing(connect(f"127.0.0.1:{listening.getsockname()[1]}", files)) as channel:
            assert isinstance(channel, TlsSocket)
            with pytest.raises(BlockingIOError):
                channel.recv(1)
            outbox, got = bytearray(sent), b""
            while len(got) < len(sent):
                readable, _, _ = select.select([channel], [channel] if outbox else [], [], 5)
                with contextlib.suppress(BlockingIOError):
                    del outbox[: channel.send(outbox)]
                if readable:
                    with contextlib.suppress(BlockingIOError):
                        got += channel.recv(1 << 20)
    assert got == sent


def test_the_open_loop_checks_the_certificate(certificates: Certificates) -> None:
    with grpc_server(certificates.own) as address, pytest.raises(ssl.SSLCertVerificationError):
        connect(address, {"ca": str(certificates.other_ca), "cert": None, "key": None})


# -- the stored state of a remote server ----------


def test_a_stored_server_state_is_read_back(tmp_path: Path) -> None:
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    config = ModelConfig(name="first", max_batch_size=8)
    config.dynamic_batching.max_queue_delay_microseconds = 2**40
    state = ServerState({"first": config, "chain": None}, frozenset({"first", "other"}))
    state_file = ServerStateFile(tmp_path / "keep", "[::1]:8001")
    with state_file.lock_server():
        assert state_file.read() is None
        state_file.write(state)
        read_state = state_file.read()
        assert read_state == state
        assert read_state is not None
        assert list(read_state.configs) == ["first", "chain"]
        state_file.remove()
    assert list((tmp_path / "keep").iterdir()) == []


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"configs": 1}', '{"configs": {"a": 1}}', '{"configs": {"a": {"b": 1}}, "ready": []}'],
)
def test_another_file_is_no_server_state(text: str, tmp_path: Path) -> None:
    state_file = ServerStateFile(tmp_path, "host:8001")
    state_file.path.write_text(text)
    with pytest.raises(EnvironmentFault, match=r"host_8001.json: cannot be read .*, then remove that file"):
        state_file.read()


NO_SHARED_MEMORY = (
    "load failed for model 'faulty': version 1 is at UNAVAILABLE state: Internal: Unable to initialize shared memory "
    "key 'triton_python_backend_shm_region_1' to requested size (1048576 bytes). Error: Cannot allocate memory;"
)
NO_STUB = "Stub process 'faulty_0_0' is not healthy."
NO_ARRAY = "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8.00 GiB for an array\n\nAt:\n  model.py(3)"


@pytest.mark.parametrize(
    ("message", "lacks_memory", "model_died"),
    [
        (NO_SHARED_MEMORY, True, False),
        ("std::bad_alloc", True, False),
        (NO_STUB, False, True),
        (NO_ARRAY, False, False),
    ],
)
def test_lack_of_memory_and_dead_models_are_recognised(message: str, lacks_memory: bool, model_died: bool) -> None:
    assert server_errors.lacks_memory(message) is lacks_memory
    assert server_errors.model_died(message) is model_died


@pytest.mark.parametrize(
    ("message", "lacks"),
    [
        ("pytorch: CUDA out of memory. Tried to allocate 8.39 GiB. GPU 0 has a total capacity of 79.11 GiB", True),
        ("pytorch: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", True),
        ("CUDA failure 2: out of memory ; GPU=0 ; hostname=a", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 939524096", True),
        ("pytorch: CUDA error: device-side assert triggered", False),
        (NO_ARRAY, False),
    ],
)
def test_lack_of_gpu_memory_is_recognised(message: str, lacks: bool) -> None:
    assert server_errors.lacks_gpu_memory(message) is lacks


def test_a_message_is_one_line_without_a_traceback() -> None:
    assert server_errors.without_traceback(NO_ARRAY).endswith("Unable to allocate 8.00 GiB for an array")
    assert server_errors.without_traceback("Internal: no file /a.tar.gz.;\n") == "Internal: no file /a.tar.gz"


CONSTRUCTORS = {
    "grpc": tritonclient.grpc.InferenceServerClient.__init__.__code__,
    "http": tritonclient.http.InferenceServerClient.__init__.__code__,
}


@pytest.mark.parametrize("protocol", CONSTRUCTORS)
def test_an_interrupted_construction_prints_no_traceback(
    protocol: ProtocolName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The destructor of a client that is only partly constructed raises AttributeError."""
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    interrupted = []

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is CONSTRUCTORS[protocol]:
            interrupted.append(protocol)
            signal.raise_signal(signal.SIGINT)

    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            open_client(Connection("localhost:1", protocol)).identity()
    finally:
        sys.setprofile(None)
    assert interrupted == [protocol]
    assert not ignored
