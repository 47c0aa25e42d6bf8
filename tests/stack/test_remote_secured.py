"""A server behind TLS and headers: measured as any other, refused in one line, and its secret is nowhere kept."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from optimizer import runtime
from optimizer.answers.guard import OutputGuard
from optimizer.answers.inference import infer
from optimizer.deploy.connection import Connection, Tls
from optimizer.deploy.remote import RemoteTarget
from optimizer.errors import EnvironmentFault
from optimizer.load.perf_analyzer import PerfAnalyzer
from optimizer.load.server_statistics import is_alive, read_statistics
from optimizer.model_source import ModelSource
from optimizer.open_loop.arrivals import Constant
from optimizer.open_loop.generator import OpenLoop
from optimizer.trial import Candidate, LoadPoint
from tests.certificates import Certificates, tls_proxy
from tests.production import SECRET, Production, secured

TUNED = Candidate(16, True, 500, (4, 8), 2)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def production(
    mlp: ModelSource, certificates: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Production]:
    with contextlib.closing(secured(mlp, tmp_path_factory.mktemp("production") / "log", certificates)) as server:
        server.load(server.model)
        yield server


def measured(connection: Connection, production: Production, folder: Path) -> list[bytes]:
    """By everything that asks a server; the answers to some requests."""
    installed, load = runtime.ensure(print), LoadPoint(1, 4)
    logs = folder / "logs"
    logs.mkdir()
    perf_analyzer = PerfAnalyzer(
        installed.perf_analyzer,
        installed.perf_analyzer_libraries,
        logs / "perf_analyzer.log",
        input_data=str(production.source.input_data),
        window_ms=100,
        patience=False,
    )
    guard = OutputGuard(
        folder / "reference.npz", input_data=str(production.source.input_data), shapes=(), request_batch_size=1
    )
    with (
        contextlib.closing(RemoteTarget(connection, production.source, keep=folder / "keep")) as target,
        target.deploy(TUNED) as endpoint,
    ):
        assert is_alive(endpoint)
        guard.reference(endpoint)
        assert guard.note == ""
        guard.check(endpoint)
        found = perf_analyzer.measure(endpoint, load, seconds=0.4)
        assert found.throughput_infer_per_sec
        assert found.mean_batch_size is not None
        if connection.protocol == "grpc":
            loop = OpenLoop(logs / "open_loop.log", Constant(), input_data=str(production.source.input_data))
            paced = loop.measure(endpoint, LoadPoint(1, request_rate=100), seconds=0.5)
            assert paced.throughput_infer_per_sec == pytest.approx(100, rel=0.1)
        statistics = read_statistics(endpoint)
        assert statistics is not None
        assert statistics.inference_count > 50
        assert guard._known is not None
        answers = infer(endpoint, guard._known.requests[:4], in_flight=2, timeout_seconds=10)
    for path in folder.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
    assert "***" in (logs / "commands.log").read_text()
    return answers


def test_everything_that_asks_a_server_gets_through(
    production: Production, certificates: Certificates, tmp_path: Path
) -> None:
    """Over gRPC with TLS, over HTTP, and over HTTPS, which ends before the server: the answers are the same."""
    before = production.serving()
    answers = []
    with tls_proxy(production.http.address, certificates.own) as proxy:
        https = replace(production.http, address=proxy, tls=certificates.tls)
        for name, connection in (("grpc", production.grpc), ("http", production.http), ("https", https)):
            (tmp_path / name).mkdir()
            answers.append(measured(connection, production, tmp_path / name))
            assert production.serving() == before
    assert [read(one) for one in answers[1]] == [read(one) for one in answers[0]]
    assert answers[1] == answers[2]


def read(answer: bytes) -> dict[str, list[float]]:
    from optimizer.answers.comparison import read_answer

    return {name: tensor.values.ravel().tolist() for name, tensor in read_answer(answer).items()}


def test_what_keeps_out_is_told_in_one_line_and_nothing_is_changed(
    production: Production, certificates: Certificates, tmp_path: Path
) -> None:
    before, grpc, http = production.serving(), production.grpc, production.http
    wrong = {"triton-grpc-protocol-key": "guessed-9a7b"}
    with (
        tls_proxy(http.address, certificates.own) as proxy,
        tls_proxy(http.address, certificates.elsewhere) as elsewhere,
    ):
        https = replace(http, address=proxy, tls=certificates.tls)
        for connection, told in (
            (replace(grpc, headers={}), "expects the header triton-grpc-protocol-key.* give --header"),
            (replace(grpc, headers=wrong), "expects the header triton-grpc-protocol-key"),
            (replace(grpc, tls=None), f"speaks TLS; connect with it: --url grpcs://{grpc.address}"),
            (replace(grpc, tls=Tls(certificates.other_ca)), "is not trusted .* the CA that signed it: --tls-ca"),
            (replace(grpc, address=http.address), f"speaks no TLS; connect without it: --url grpc://{http.address}"),
            (Connection(http.address), f"speaks HTTP, not gRPC; .*--url http://{http.address}"),
            (replace(http, headers={}), "expects the header key"),
            (replace(http, headers={"key": SECRET}), "expects the header tritune"),
            (replace(http, tls=certificates.tls), f"speaks no TLS; connect without it: --url http://{http.address}"),
            (replace(https, tls=None), f"speaks TLS; connect with it: --url https://{proxy}"),
            (replace(https, tls=Tls(certificates.other_ca)), "is not trusted"),
            (replace(https, address=elsewhere), "is for another host"),
        ):
            with pytest.raises(EnvironmentFault, match=told) as caught:
                RemoteTarget(connection, production.source, keep=tmp_path / "keep")
            assert "\n" not in str(caught.value)
            assert SECRET not in str(caught.value)
            assert "guessed-9a7b" not in str(caught.value)
    assert production.serving() == before
    assert list((tmp_path / "keep").iterdir()) == []
