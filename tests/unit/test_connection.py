"""Ways to a server: what is refused, what is told where none leads there, and secrets that stay secret."""

from __future__ import annotations

import contextlib
import http.server
import json
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from optimizer.answers import inference
from optimizer.client.calls import CallError, answers, open_client
from optimizer.client.connection import Connection, ProtocolName, Tls
from optimizer.client.reach import trouble
from optimizer.deploy.remote.kept_state import KeptState, ServerState
from optimizer.deploy.tritonserver import free_port
from optimizer.errors import BadInputError, DeploymentError, EnvironmentFault, ServerCrashed
from optimizer.interfaces import Endpoint
from optimizer.load.perf_connection import connecting
from optimizer.open_loop.client import connect
from optimizer.open_loop.encrypted import Encrypted
from optimizer.open_loop.header_block import literal, literals
from optimizer.process import run
from optimizer.trial import Candidate
from tests.certificates import Certificates, tls_proxy

SECRET = "Bearer 5d41402abc4b"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


# -- servers --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def grpc_server(certificate: Path | None = None, client_ca: Path | None = None) -> Iterator[str]:
    """One that denies everything, and tells what it was sent."""

    def deny(_: bytes, context: grpc.ServicerContext) -> bytes:
        sent = dict(context.invocation_metadata()).get("authorization", "nothing")
        context.abort(grpc.StatusCode.UNAUTHENTICATED, f"not with {sent}")
        return b""

    class Denying(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, _: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(deny)

    server = grpc.server(ThreadPoolExecutor(2), handlers=[Denying()])
    if certificate is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        pair = (certificate.read_bytes(), certificate.read_bytes())
        trusted = None if client_ca is None else client_ca.read_bytes()
        credentials = grpc.ssl_server_credentials([pair], trusted, client_ca is not None)
        port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@contextlib.contextmanager
def http_server(status: int = 401) -> Iterator[str]:
    class Denying(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = json.dumps({"error": f"not with {self.headers.get('authorization')}"}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Denying) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


# -- headers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("a b", "x", "header a b: not a name; write NAME:VALUE"),
        ("a\n", "x", r"header a\\n: not a name"),
        ("key", "sesame\r\nother: x", "header key: its value has characters that no header may have"),
        ("key", "sésame", "header key: its value has characters"),
        ("key", "sesame" * 2000, "headers of more than 8,192 characters"),
    ],
)
def test_a_header_that_cannot_be_sent_is_refused_and_its_value_not_shown(name: str, value: str, told: str) -> None:
    with pytest.raises(BadInputError, match=told) as caught:
        Connection("host:8001", headers={name: value})
    assert "sesame" not in str(caught.value)


def test_a_value_stands_in_no_text() -> None:
    connection = Connection("host:8001", headers={"Authorization": SECRET, "other": "5d41"})
    assert "5d41" not in repr(connection)
    assert connection.hide(f"you sent {SECRET}, 5d41") == "you sent ***, ***"
    assert connection.sent_headers == {"authorization": SECRET, "other": "5d41"}
    assert (Connection("[::1]:80").host, Connection("[::1]:80").port) == ("::1", 80)


def test_the_command_that_is_written_down_has_no_value(tmp_path: Path, certificates: Certificates) -> None:
    at = Connection("host:8001", headers={"Authorization": SECRET}, tls=certificates.tls)
    words = connecting(at)
    assert words[-2:] == ["-H", f"authorization:{SECRET}"]
    done = run(
        [sys.executable, "-c", "import sys; print(sys.argv[-1])", *words], timeout_seconds=10, log=tmp_path / "log"
    )
    assert done.output.strip() == f"authorization:{SECRET}"
    written = (tmp_path / "commands.log").read_text()
    assert SECRET not in written
    assert written.rstrip().endswith("-H 'authorization:***'")


@pytest.mark.parametrize("length", [0, 1, 126, 127, 128, 254, 255, 8000])
def test_headers_of_any_length(length: int) -> None:
    block = literal(b"authorization", b"x" * length) + literal(b"next", b"1")
    assert literals(block) == {b"authorization": b"x" * length, b"next": b"1"}


# -- servers that keep out ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_what_is_denied_is_told_without_the_secret(protocol: ProtocolName) -> None:
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
            assert answers(client)
        with pytest.raises(DeploymentError, match=r"failed a request: not with \*\*\*$"):
            inference.model_metadata(Endpoint("m", Candidate(1), remote=connection))


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_nobody_there_is_a_crash_while_measuring(protocol: ProtocolName) -> None:
    connection = Connection(f"127.0.0.1:{free_port()}", protocol)
    with contextlib.closing(open_client(connection)) as client:
        assert not answers(client, 2)
    with pytest.raises(ServerCrashed, match="the server died over a request"):
        inference.model_metadata(Endpoint("m", Candidate(1), remote=connection))


def test_a_proxy_that_has_no_server_is_nobody() -> None:
    with http_server(502) as address, contextlib.closing(open_client(Connection(address, "http"))) as client:
        assert not answers(client)


def test_the_way_that_is_wrong_is_told(certificates: Certificates) -> None:
    grpc_name, http_name = "gRPC, not HTTP", "HTTP, not gRPC"
    with (
        grpc_server() as plain,
        grpc_server(certificates.own) as secured,
        grpc_server(certificates.own, certificates.ca) as mutual,
        http_server() as web,
        tls_proxy(web, certificates.own) as secured_web,
        tls_proxy(web, certificates.elsewhere) as elsewhere,
    ):
        ours, others = certificates.tls, Tls(certificates.other_ca)
        own = Tls(certificates.ca, certificates.own, certificates.own)
        for connection, told in (
            (Connection(plain), ""),
            (Connection(secured, tls=ours), ""),
            (Connection(mutual, tls=own), ""),
            (Connection(web, "http"), ""),
            (Connection(secured_web, "http", tls=ours), ""),
            (Connection(secured), f"speaks TLS; connect with it: --url grpcs://{secured}"),
            (Connection(mutual), "speaks TLS"),
            (Connection(secured_web, "http"), f"speaks TLS; connect with it: --url https://{secured_web}"),
            (Connection(plain, tls=ours), f"speaks no TLS; connect without it: --url grpc://{plain}"),
            (Connection(web, "http", tls=ours), "speaks no TLS"),
            (Connection(secured, tls=others), "is not trusted"),
            (Connection(secured_web, "http", tls=others), "is not trusted"),
            (Connection(elsewhere, "http", tls=ours), "is for another host"),
            (
                Connection(mutual, tls=ours),
                "breaks off after the TLS handshake: give the client's --tls-cert and --tls-key",
            ),
            (Connection(web), f"speaks {http_name}; give its gRPC port, or --url http://{web}"),
            (Connection(plain, "http"), f"speaks {grpc_name}; give its HTTP port, or --url grpc://{plain}"),
            (Connection(f"127.0.0.1:{free_port()}"), "(connection refused); start it, or give its address by --url"),
            (Connection("no-such-host.invalid:8001"), "no host is called no-such-host.invalid; see to --url"),
        ):
            found = trouble(connection)
            assert told in found if told else found == "", (connection, found)


# -- files ----------------------------------------------------------------------------------------------------------


def test_files_for_tls_that_cannot_be_used_are_named(certificates: Certificates, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no certificate")
    (tmp_path / "cut").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    own, ca = certificates.own, certificates.ca
    for files, told in (
        (Tls(tmp_path / "none"), "none: cannot be read: No such file"),
        (Tls(tmp_path / "text"), "text: holds no PEM that can be read; give a file of certificates in PEM"),
        (Tls(tmp_path / "cut"), "cut: holds no PEM that can be read"),
        (Tls(ca, own), "own.pem: a certificate and its key go together; give both"),
        (Tls(ca, own, certificates.elsewhere), "own.pem with the key .*elsewhere.pem: not a certificate and its key"),
        (Tls(ca, own, ca), "not a certificate and its key"),
    ):
        for connection in (Connection("host:1", tls=files), Connection("host:1", "http", tls=files)):
            with pytest.raises(BadInputError, match=told):
                open_client(connection)


# -- the open loop's TLS --------------------------------------------------------------------------------------------


def test_bytes_over_tls_without_blocking(certificates: Certificates) -> None:
    """More in both directions than the sockets and the records hold."""
    import select
    import socket

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
        with connect(f"127.0.0.1:{listening.getsockname()[1]}", files) as channel:
            assert isinstance(channel, Encrypted)
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


# -- what is to be put back -----------------------------------------------------------------------------------------


def test_what_a_server_had_is_read_as_it_was_written(tmp_path: Path) -> None:
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    config = ModelConfig(name="first", max_batch_size=8)
    config.dynamic_batching.max_queue_delay_microseconds = 2**40
    state = ServerState({"first": config, "chain": None}, frozenset({"first", "other"}))
    kept = KeptState(tmp_path / "keep", "[::1]:8001")
    with kept.alone():
        assert kept.read() is None
        kept.write(state)
        again = kept.read()
        assert again == state
        assert again is not None
        assert list(again.configs) == ["first", "chain"]
        kept.remove()
    assert list((tmp_path / "keep").iterdir()) == []


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"configs": 1}', '{"configs": {"a": 1}}', '{"configs": {"a": {"b": 1}}, "ready": []}'],
)
def test_what_is_no_such_file_is_refused(text: str, tmp_path: Path) -> None:
    kept = KeptState(tmp_path, "host:8001")
    kept.path.write_text(text)
    with pytest.raises(EnvironmentFault, match=r"host_8001.json: cannot be read .*, then remove that file"):
        kept.read()
