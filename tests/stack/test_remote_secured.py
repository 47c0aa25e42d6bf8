"""A server behind TLS and headers: measured as any other, refused in one line, and its secret is nowhere kept."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from optimizer import runtime
from optimizer.answers.guard import OutputGuard
from optimizer.client.connection import Connection, Tls
from optimizer.deploy.remote.target import RemoteTarget
from optimizer.errors import BadInputError, EnvironmentFault
from optimizer.interfaces import Endpoint
from optimizer.load.perf_analyzer import PerfAnalyzer
from optimizer.load.server_statistics import is_alive, read_statistics
from optimizer.model_source import ModelSource
from optimizer.open_loop.arrivals import Constant
from optimizer.open_loop.generator import OpenLoop
from optimizer.trial import Candidate, LoadPoint
from tests.certificates import Certificates, tls_proxy
from tests.production import SECRET, Production, secured

TUNED = Candidate(16, True, 500, (4, 8), 2)
LOAD = LoadPoint(1, 4)
LATE_AS_MS = 1000.0  # bound on latency: this is about who gets through, not about how busy the machine is


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


@pytest.fixture
def generators(production: Production, tmp_path: Path) -> tuple[PerfAnalyzer, OpenLoop]:
    installed, logs, data = runtime.ensure(print), tmp_path / "logs", str(production.source.input_data)
    logs.mkdir()
    return (
        PerfAnalyzer(
            installed.perf_analyzer,
            installed.perf_analyzer_libraries,
            logs / "perf_analyzer.log",
            input_data=data,
            window_ms=100,
        ),
        OpenLoop(logs / "open_loop.log", Constant(), input_data=data, latency_bound_ms=LATE_AS_MS),
    )


def endpoint(connection: Connection) -> Endpoint:
    return Endpoint("mlp", Candidate(64), remote=connection)


@pytest.mark.alone
def test_everything_that_asks_a_server_gets_through(
    production: Production, certificates: Certificates, generators: tuple[PerfAnalyzer, OpenLoop], tmp_path: Path
) -> None:
    """Over gRPC with TLS, over HTTP, and over HTTPS, which ends before the server: the answers are the same."""
    perf_analyzer, open_loop = generators
    guard = OutputGuard(
        tmp_path / "reference.npz", input_data=perf_analyzer.input_data, shapes=(), request_batch_size=1
    )
    guard.reference(endpoint(production.grpc))
    assert guard.note == ""
    with tls_proxy(production.http.address, certificates.own) as proxy:
        https = replace(production.http, address=proxy, tls=certificates.tls)
        for at in map(endpoint, (production.grpc, production.http, https)):
            assert is_alive(at)
            guard.check(at)
            before, found, after = (
                read_statistics(at),
                perf_analyzer.measure(at, LOAD, seconds=0.4),
                read_statistics(at),
            )
            assert found.throughput_infer_per_sec
            assert found.mean_batch_size == 1
            assert before is not None
            assert after is not None
            assert after.inference_count > before.inference_count
        paced = open_loop.measure(endpoint(production.grpc), LoadPoint(1, request_rate=100), seconds=0.5)
        assert paced.throughput_infer_per_sec == pytest.approx(100, rel=0.1)
        with pytest.raises(BadInputError, match=f"sends over gRPC, and {proxy} is HTTP; give its gRPC port by --url"):
            open_loop.measure(endpoint(https), LoadPoint(1, request_rate=100), seconds=0.5)
        served = production.serving()
        with contextlib.closing(RemoteTarget(https, production.source, keep=tmp_path / "keep")) as target:
            with target.deploy(TUNED) as changed:
                guard.check(changed)
            assert production.serving() != served
        assert production.serving() == served
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
    assert "***" in (tmp_path / "logs" / "commands.log").read_text()


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
