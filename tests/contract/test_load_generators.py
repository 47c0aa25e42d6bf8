"""The contract of LoadGenerator. A new one adds one class with ``generator`` and ``endpoint`` fixtures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from objectives.sla import Sla
from optimizer.config.model_source import ModelSource
from optimizer.core.errors import MeasurementError
from optimizer.core.interfaces import Endpoint, LoadGenerator
from optimizer.core.trial import Candidate, LoadPoint, Trial
from optimizer.deploy.embedded_target import EmbeddedTarget, free_port
from optimizer.measure.load_client.generator import ClosedLoopGenerator, OpenLoopGenerator
from optimizer.measure.perf_analyzer import PerfAnalyzer
from optimizer.store.recording import RecordedServer
from tests.conftest import measurement

CANDIDATE = Candidate(max_batch_size=64, dynamic_batching=True)
LOAD = LoadPoint(request_batch_size=2, concurrency=4)


class LoadGeneratorContract:
    load = LOAD

    @pytest.fixture
    def generator(self) -> LoadGenerator:
        raise NotImplementedError

    @pytest.fixture
    def endpoint(self) -> Endpoint | Iterator[Endpoint]:
        raise NotImplementedError

    def test_a_measurement_is_complete_and_consistent(self, generator: LoadGenerator, endpoint: Endpoint) -> None:
        generator.warm_up(endpoint, self.load)
        result = generator.measure(endpoint, self.load)
        assert result.throughput_infer_per_sec is not None
        assert result.throughput_infer_per_sec > 0
        latencies = [result.latency_p50_ms, result.latency_p90_ms, result.latency_p95_ms, result.latency_p99_ms]
        assert all(latency is not None and latency > 0 for latency in latencies)
        assert latencies == sorted(latencies)  # type: ignore[type-var]
        assert result.latency_avg_ms is not None
        assert result.requests is not None
        assert result.requests > 0
        assert result.measure_seconds is not None
        assert result.stable is (result.reason == "")

    def test_an_unreachable_endpoint_is_a_measurement_error(
        self, generator: LoadGenerator, endpoint: Endpoint
    ) -> None:
        nowhere = f"127.0.0.1:{free_port()}"
        gone = replace(endpoint, model="gone", candidate=Candidate(3), grpc=nowhere, http=nowhere)
        with pytest.raises(MeasurementError) as caught:
            generator.measure(gone, self.load)
        assert "\n" not in str(caught.value)


class TestRecordedTable(LoadGeneratorContract):
    @pytest.fixture
    def generator(self) -> LoadGenerator:
        return RecordedServer([Trial(0, CANDIDATE, ((LOAD, measurement(800, 5)),))])

    @pytest.fixture
    def endpoint(self) -> Endpoint:
        return Endpoint("recorded", CANDIDATE)


class ClosedLoopContract(LoadGeneratorContract):
    @pytest.fixture
    def endpoint(self, embedded: EmbeddedTarget) -> Iterator[Endpoint]:
        with embedded.deploy(CANDIDATE) as endpoint:
            yield endpoint

    def test_throughput_counts_inferences_not_requests(self, generator: LoadGenerator, endpoint: Endpoint) -> None:
        """Little's law: requests in flight = request rate x latency.

        With a throughput in requests they would seem to be half as many. The client also holds some between an answer
        and the next request, so many are in flight here.
        """
        load = replace(LOAD, concurrency=16)
        result = generator.measure(endpoint, load)
        assert result.throughput_infer_per_sec is not None
        assert result.latency_avg_ms is not None
        in_flight = result.throughput_infer_per_sec / load.request_batch_size * result.latency_avg_ms / 1000
        assert 0.6 * load.concurrency < in_flight < 1.6 * load.concurrency

    def test_the_mean_batch_size_comes_from_the_server_statistics(
        self, generator: LoadGenerator, endpoint: Endpoint
    ) -> None:
        result = generator.measure(endpoint, LOAD)
        assert result.mean_batch_size is not None
        assert LOAD.request_batch_size <= result.mean_batch_size <= LOAD.request_batch_size * LOAD.concurrency


class TestPerfAnalyzerGrpc(ClosedLoopContract):
    @pytest.fixture
    def generator(self, perf_analyzer: PerfAnalyzer) -> LoadGenerator:
        return perf_analyzer


class TestPerfAnalyzerHttp(ClosedLoopContract):
    @pytest.fixture
    def generator(self, perf_analyzer: PerfAnalyzer) -> LoadGenerator:
        return replace(perf_analyzer, protocol="http")


class TestClosedLoop(ClosedLoopContract):
    @pytest.fixture
    def generator(self, mlp: ModelSource, tmp_path: Path) -> LoadGenerator:
        return ClosedLoopGenerator(
            log=tmp_path / "client.log",
            input_data=str(mlp.input_data),
            sla=Sla.from_bounds({"p95": 1000.0}),
        )


class TestOpenLoop(LoadGeneratorContract):
    load = LoadPoint(request_batch_size=2, request_rate=200.0)

    @pytest.fixture
    def generator(self, mlp: ModelSource, tmp_path: Path) -> LoadGenerator:
        return OpenLoopGenerator(
            log=tmp_path / "client.log",
            input_data=str(mlp.input_data),
            sla=Sla.from_bounds({"p95": 1000.0}),
        )

    @pytest.fixture
    def endpoint(self, embedded: EmbeddedTarget) -> Iterator[Endpoint]:
        with embedded.deploy(CANDIDATE) as endpoint:
            yield endpoint

    def test_the_throughput_is_the_sent_rate(self, generator: LoadGenerator, endpoint: Endpoint) -> None:
        result = generator.measure(endpoint, self.load, seconds=3.0)
        assert result.throughput_infer_per_sec == pytest.approx(2 * 200, rel=0.2)
        assert result.mean_batch_size is not None
        assert result.mean_batch_size >= 2
