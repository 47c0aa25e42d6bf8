"""What every LoadGenerator keeps. A new one adds one class with ``generator`` and ``endpoint`` fixtures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from optimizer.deploy.embedded import EmbeddedTarget
from optimizer.deploy.recorded import RecordedTable
from optimizer.deploy.tritonserver import free_port
from optimizer.errors import MeasurementError
from optimizer.interfaces import Endpoint, LoadGenerator
from optimizer.load.perf_analyzer import PerfAnalyzer
from optimizer.model_source import ModelSource
from optimizer.open_loop.generator import OpenLoop
from optimizer.trial import Candidate, LoadPoint, Trial
from tests.conftest import measurement

pytestmark = pytest.mark.alone

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
        found = generator.measure(endpoint, self.load)
        assert found.throughput_infer_per_sec is not None
        assert found.throughput_infer_per_sec > 0
        latencies = [found.latency_p50_ms, found.latency_p90_ms, found.latency_p95_ms, found.latency_p99_ms]
        assert all(latency is not None and latency > 0 for latency in latencies)
        assert latencies == sorted(latencies)  # type: ignore[type-var]
        assert found.latency_avg_ms is not None
        assert found.requests is not None
        assert found.requests > 0
        assert found.measure_seconds is not None
        assert found.stable is (found.reason == "")

    def test_an_endpoint_that_is_not_there_is_a_measurement_error(
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
        return RecordedTable([Trial(0, CANDIDATE, ((LOAD, measurement(800, 5)),))])

    @pytest.fixture
    def endpoint(self) -> Endpoint:
        return Endpoint("recorded", CANDIDATE)


class TestPerfAnalyzerGrpc(LoadGeneratorContract):
    @pytest.fixture
    def generator(self, perf_analyzer: PerfAnalyzer) -> LoadGenerator:
        return perf_analyzer

    @pytest.fixture
    def endpoint(self, embedded: EmbeddedTarget) -> Iterator[Endpoint]:
        with embedded.deploy(CANDIDATE) as endpoint:
            yield endpoint

    def test_throughput_counts_inferences_not_requests(self, generator: LoadGenerator, endpoint: Endpoint) -> None:
        """Little's law: requests in flight = request rate x latency."""
        found = generator.measure(endpoint, LOAD)
        assert found.throughput_infer_per_sec is not None
        assert found.latency_avg_ms is not None
        in_flight = found.throughput_infer_per_sec / LOAD.request_batch_size * found.latency_avg_ms / 1000
        assert in_flight == pytest.approx(LOAD.concurrency, rel=0.25)

    def test_the_servers_statistics_give_the_mean_batch(self, generator: LoadGenerator, endpoint: Endpoint) -> None:
        found = generator.measure(endpoint, LOAD)
        assert found.mean_batch_size is not None
        assert LOAD.request_batch_size <= found.mean_batch_size <= LOAD.request_batch_size * LOAD.concurrency


class TestPerfAnalyzerHttp(TestPerfAnalyzerGrpc):
    @pytest.fixture
    def generator(self, perf_analyzer: PerfAnalyzer) -> LoadGenerator:
        return replace(perf_analyzer, protocol="http")


class TestOpenLoop(LoadGeneratorContract):
    load = LoadPoint(request_batch_size=2, request_rate=200.0)

    @pytest.fixture
    def generator(self, mlp: ModelSource, tmp_path: Path) -> LoadGenerator:
        return OpenLoop(tmp_path / "client.log", input_data=str(mlp.input_data), latency_bound_ms=100.0)

    @pytest.fixture
    def endpoint(self, embedded: EmbeddedTarget) -> Iterator[Endpoint]:
        with embedded.deploy(CANDIDATE) as endpoint:
            yield endpoint

    def test_what_is_sent_is_what_is_answered(self, generator: LoadGenerator, endpoint: Endpoint) -> None:
        found = generator.measure(endpoint, self.load, seconds=1.0)
        assert found.throughput_infer_per_sec == pytest.approx(2 * 200, rel=0.2)
        assert found.mean_batch_size is not None
        assert found.mean_batch_size >= 2
