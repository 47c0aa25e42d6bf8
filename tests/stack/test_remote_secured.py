"""A server with TLS and required headers: it can be measured, refusals are one line, and no secret is stored."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from objectives.sla import Sla
from optimizer.config.model_source import ModelSource
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Connection, Endpoint, Tls
from optimizer.core.errors import BadInputError, EnvironmentFault, MeasurementError
from optimizer.core.trial import LoadPoint
from optimizer.deploy import runtime
from optimizer.deploy.remote_target import RemoteTarget
from optimizer.measure.load_client.arrivals import ConstantArrivals
from optimizer.measure.load_client.generators import ClosedLoopGenerator, OpenLoopGenerator
from optimizer.measure.model_statistics import read_statistics
from optimizer.measure.output_check import BaselineOutputCheck
from optimizer.measure.perf_analyzer import LocalRunner, PerfAnalyzer
from optimizer.measure.server_calls import all_servers_respond
from tests.certificates import Certificates, tls_proxy
from tests.remote_server import SECRET, RunningServer, secured

TUNED = Candidate(16, True, 500, (4, 8))
LOAD = LoadPoint(1, 4)
LATE_AS_MS = 1000.0  # a bound that a busy machine meets, too: these tests are about access


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def production(
    mlp: ModelSource, certificates: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    with contextlib.closing(secured(mlp, tmp_path_factory.mktemp("production") / "log", certificates)) as server:
        server.load(server.model)
        yield server


@pytest.fixture
def generators(
    production: RunningServer, tmp_path: Path
) -> tuple[PerfAnalyzer, OpenLoopGenerator, ClosedLoopGenerator]:
    installed, logs, data = runtime.ensure(print), tmp_path / "logs", production.source.input_data
    assert data is not None
    logs.mkdir()
    return (
        PerfAnalyzer(
            installed.perf_analyzer,
            LocalRunner(installed.perf_analyzer_libraries),
            logs / "perf_analyzer.log",
            input_data=data,
            window_ms=100,
        ),
        OpenLoopGenerator(
            log=logs / "open_loop.log",
            arrivals=ConstantArrivals(),
            input_data=data,
            sla=Sla.from_bounds({"p95": LATE_AS_MS}),
        ),
        ClosedLoopGenerator(log=logs / "closed_loop.log", input_data=data),
    )


def endpoint(connection: Connection) -> Endpoint:
    return Endpoint("mlp", Candidate(64), remote=connection)


def test_every_client_reaches_a_server_with_tls_and_headers(
    production: RunningServer,
    certificates: Certificates,
    generators: tuple[PerfAnalyzer, OpenLoopGenerator, ClosedLoopGenerator],
    tmp_path: Path,
) -> None:
    """The answers are the same over gRPC with TLS, HTTP, and HTTPS that a proxy terminates."""
    perf_analyzer, open_loop, closed_loop = generators
    guard = BaselineOutputCheck(
        tmp_path / "reference.npz", input_data=perf_analyzer.input_data, shapes=(), request_batch_size=1
    )
    guard.record_reference(endpoint(production.grpc))
    assert guard.note is None
    with tls_proxy(production.http.address, certificates.own) as proxy:
        https = replace(production.http, address=proxy, tls=certificates.tls)
        for at in map(endpoint, (production.grpc, production.http, https)):
            assert all_servers_respond(at)
            guard.check(at)
            before, result, after = (
                read_statistics(at),
                perf_analyzer.measure(at, LOAD, seconds=0.4),
                read_statistics(at),
            )
            assert result.throughput_infer_per_sec
            assert result.mean_batch_size == 1
            assert before is not None
            assert after is not None
            assert after.inference_count > before.inference_count
        # long, because a client that is late for half of the last third voids the measurement
        paced = open_loop.measure(endpoint(production.grpc), LoadPoint(1, request_rate=100), seconds=3.0)
        assert paced.throughput_infer_per_sec == pytest.approx(100, rel=0.1)
        before = read_statistics(endpoint(production.grpc))
        windows = closed_loop.measure_windows(endpoint(production.grpc), LOAD, 0.2, 2)
        after = read_statistics(endpoint(production.grpc))
        assert before is not None
        assert after is not None
        assert 0 < sum(window.requests or 0 for window in windows) < after.inference_count - before.inference_count
        untrusted = replace(production.grpc, tls=Tls(certificates.other_ca))
        with pytest.raises(MeasurementError, match="certificate verify failed"):
            closed_loop.measure_windows(endpoint(untrusted), LOAD, 0.2, 2)
        with pytest.raises(
            BadInputError, match=f"needs gRPC, but {proxy} is an HTTP port; give the gRPC port with --url"
        ):
            open_loop.measure(endpoint(https), LoadPoint(1, request_rate=100), seconds=0.5)
        served = production.serving()
        for connection in (production.grpc, https):
            with contextlib.closing(
                RemoteTarget(connection, production.source, state_folder=tmp_path / "keep")
            ) as target:
                with target.deploy(TUNED) as changed:
                    guard.check(changed)
                assert production.serving() != served
            assert production.serving() == served
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
    assert "***" in (tmp_path / "logs" / "commands.log").read_text()


def test_a_refused_connection_is_reported_in_one_line_and_changes_nothing(
    production: RunningServer, certificates: Certificates, tmp_path: Path
) -> None:
    before, grpc, http = production.serving(), production.grpc, production.http
    wrong = {"triton-grpc-protocol-key": "guessed-9a7b"}
    with (
        tls_proxy(http.address, certificates.own) as proxy,
        tls_proxy(http.address, certificates.other_host) as other_host,
    ):
        https = replace(http, address=proxy, tls=certificates.tls)
        for connection, message in (
            (replace(grpc, headers={}), "expects the header triton-grpc-protocol-key.* give --header"),
            (replace(grpc, headers=wrong), "expects the header triton-grpc-protocol-key"),
            (replace(grpc, tls=None), f"expects TLS; connect with --url grpcs://{grpc.address}"),
            (replace(grpc, tls=Tls(certificates.other_ca)), "is not trusted .* give its CA with --ssl-grpc-root"),
            (replace(grpc, address=http.address), f"does not use TLS; connect with --url grpc://{http.address}"),
            (Connection(http.address), f"speaks HTTP, not gRPC; .*--url http://{http.address}"),
            (replace(http, headers={}), "expects the header key"),
            (replace(http, headers={"key": SECRET}), "expects the header tritune"),
            (replace(http, tls=certificates.tls), f"does not use TLS; connect with --url http://{http.address}"),
            (replace(https, tls=None), f"expects TLS; connect with --url https://{proxy}"),
            (replace(https, tls=Tls(certificates.other_ca)), "is not trusted"),
            (replace(https, address=other_host), "is for another host"),
        ):
            with pytest.raises(EnvironmentFault, match=message) as caught:
                RemoteTarget(connection, production.source, state_folder=tmp_path / "keep")
            assert "\n" not in str(caught.value)
            assert SECRET not in str(caught.value)
            assert "guessed-9a7b" not in str(caught.value)
    assert production.serving() == before
    assert list((tmp_path / "keep").iterdir()) == []
