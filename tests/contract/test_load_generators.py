"""The contract of LoadGenerator. A new one adds one class with ``generator`` and ``endpoint`` fixtures."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from objectives.metrics import Measurement
from objectives.sla import Sla
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import MeasurementError
from optimizer.core.interfaces import LoadGenerator
from optimizer.core.request_sizes import parse_size_distribution
from optimizer.core.trial import LoadPoint, Trial
from optimizer.deploy import perf_analyzer_release, runtime
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.target_settings import TargetSettings, free_port
from optimizer.measure.load_client.arrivals import parse_arrivals
from optimizer.measure.load_client.generators import ClosedLoopGenerator, OpenLoopGenerator, SequenceGenerator
from optimizer.measure.perf_analyzer import PerfAnalyzer
from optimizer.model.input_data import to_json
from optimizer.model.repository import read_repository_model
from optimizer.store.recording import RecordedServer
from tests.conftest import measurement
from tests.repositories import write_streamer, write_sums
from tests.stack_fixtures import embedded_model

CANDIDATE = Candidate(max_batch_size=64, dynamic_batching=True)
LOAD = LoadPoint(request_batch_size=2, concurrency=4)
WINDOW_MS = 100  # a closed loop keeps all CPUs busy
ROUNDING_SECONDS = 0.001


class LoadGeneratorContract:
    load = LOAD
    has_times = True  # of the begin and the end of a measurement

    @pytest.fixture
    def generator(self) -> LoadGenerator:
        raise NotImplementedError

    @pytest.fixture
    def endpoint(self) -> Endpoint | Iterator[Endpoint]:
        raise NotImplementedError

    def test_a_measurement_is_complete_and_consistent(self, generator: LoadGenerator, endpoint: Endpoint) -> None:
        generator.warm_up(endpoint, self.load)
        started = time.time()
        result = generator.measure(endpoint, self.load)
        ended = time.time()
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
        assert result.errors is None, "a failed request is an error, unless they are to be counted"
        if result.goodput_infer_per_sec is not None:
            assert result.latency_sketch, (
                "only a client that keeps each latency counts the requests within the bounds"
            )
            assert result.goodput_infer_per_sec <= (result.throughput_infer_per_sec or 0.0)
        assert (result.begin_unix_seconds is not None) is self.has_times
        if result.begin_unix_seconds is not None:
            assert result.end_unix_seconds is not None
            assert started - ROUNDING_SECONDS <= result.begin_unix_seconds < result.end_unix_seconds
            assert result.end_unix_seconds <= ended + ROUNDING_SECONDS
        self.check(result)

    def check(self, result: Measurement) -> None:
        """Assert what else holds for a measurement of this load generator."""

    def test_an_unreachable_endpoint_is_a_measurement_error(
        self, generator: LoadGenerator, endpoint: Endpoint
    ) -> None:
        nowhere = f"127.0.0.1:{free_port()}"
        gone = replace(endpoint, model="gone", candidate=Candidate(3), grpc=nowhere, http=nowhere)
        with pytest.raises(MeasurementError) as caught:
            generator.measure(gone, self.load)
        assert "\n" not in str(caught.value)


class TestRecordedTable(LoadGeneratorContract):
    has_times = False

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
        and the next request, so the load has 16 in flight.
        """
        load = replace(LOAD, concurrency=16)
        result = generator.measure(endpoint, load, 0.9)  # longer than the moments in which others take the CPUs
        assert result.throughput_infer_per_sec is not None
        assert result.latency_avg_ms is not None
        in_flight = result.throughput_infer_per_sec / load.request_batch_size * result.latency_avg_ms / 1000
        assert 0.6 * load.concurrency < in_flight < 1.6 * load.concurrency

    def check(self, result: Measurement) -> None:
        """The mean batch size comes from the statistics of the server."""
        assert result.mean_batch_size is not None
        assert LOAD.request_batch_size <= result.mean_batch_size <= LOAD.request_batch_size * LOAD.concurrency


class PerfAnalyzerContract(ClosedLoopContract):
    """The contract of each release of perf_analyzer that starts here. ``tests/newer_glibc.sh`` starts both."""

    @pytest.fixture(params=[runtime.PINNED_PERF_ANALYZER, perf_analyzer_release.NEWER_VERSION])
    def release(self, request: pytest.FixtureRequest, perf_analyzer: PerfAnalyzer) -> PerfAnalyzer:
        """Return perf_analyzer in one version, which the runtime of the fixture does not choose."""
        if request.param == runtime.PINNED_PERF_ANALYZER:
            return replace(perf_analyzer, binary=runtime.ensure(print).pinned_perf_analyzer, window_ms=WINDOW_MS)
        perf_analyzer_release.ensure_newer(print)
        if problem := perf_analyzer_release.newer_problem():
            pytest.skip(f"no perf_analyzer {request.param}: {problem}")
        binary = perf_analyzer_release.newer_perf_analyzer()
        assert binary is not None
        return replace(perf_analyzer, binary=binary, window_ms=WINDOW_MS)


class TestPerfAnalyzerGrpc(PerfAnalyzerContract):
    @pytest.fixture
    def generator(self, release: PerfAnalyzer) -> LoadGenerator:
        return release


class TestPerfAnalyzerHttp(PerfAnalyzerContract):
    @pytest.fixture
    def generator(self, release: PerfAnalyzer) -> LoadGenerator:
        return replace(release, protocol="http")


class TestClosedLoop(ClosedLoopContract):
    @pytest.fixture
    def generator(self, mlp_requests: Path, tmp_path: Path) -> LoadGenerator:
        return ClosedLoopGenerator(
            log=tmp_path / "client.log",
            input_data=mlp_requests,
            sla=Sla.from_bounds({"p95": 1000.0}),
            window_ms=WINDOW_MS,
        )


class TestOpenLoop(LoadGeneratorContract):
    load = LoadPoint(request_batch_size=2, request_rate=200.0)

    @pytest.fixture
    def generator(self, mlp_requests: Path, tmp_path: Path) -> LoadGenerator:
        return OpenLoopGenerator(
            log=tmp_path / "client.log",
            input_data=mlp_requests,
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


class TestShapedOpenLoop(TestOpenLoop):
    """The same contract with a load shape: the sent rate is the mean of whole periods."""

    @pytest.fixture
    def generator(self, mlp_requests: Path, tmp_path: Path) -> LoadGenerator:
        return OpenLoopGenerator(
            log=tmp_path / "client.log",
            input_data=mlp_requests,
            sla=Sla.from_bounds({"p95": 1000.0}),
            arrivals=parse_arrivals("spike:4x:10%:1s"),
        )

    def test_windows_are_whole_periods(self, generator: LoadGenerator, endpoint: Endpoint) -> None:
        windows = generator.measure_windows(endpoint, self.load, 0.1, 3)
        assert len(windows) == 3
        assert all(window.requests == pytest.approx(200, rel=0.4) for window in windows)


@dataclass(frozen=True)
class Step:
    """A step as the model ``sums`` received and answered it."""

    sequence: int
    is_start: bool
    is_end: bool
    x: float
    y: float


ENTRIES = 7  # of the input data; the entry i has the value i + 1
LENGTHS = parse_size_distribution("1..6")
FEWEST_STEPS = 100  # so that sequences of most lengths are among them


class SequenceContract(LoadGeneratorContract):
    load = LoadPoint(request_batch_size=1, concurrency=5)
    strategy: str

    @pytest.fixture(scope="class")
    @classmethod
    def log(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("sums") / "steps"

    @pytest.fixture(scope="class")
    @classmethod
    def served(cls, log: Path) -> Iterator[Endpoint]:
        write_sums(log.parent / "models", log, cls.strategy)
        source = read_repository_model(log.parent / "models", "sums", gpu=False)
        with (
            contextlib.closing(EmbeddedTarget(source, TargetSettings(log.with_name("tritonserver.log")))) as target,
            target.deploy(Candidate(4)) as endpoint,
        ):
            yield endpoint

    @pytest.fixture
    def endpoint(self, served: Endpoint, log: Path) -> Endpoint:
        log.write_text("")  # it may have the steps of another test
        return served

    @pytest.fixture
    def generator(self, tmp_path: Path) -> LoadGenerator:
        entries = [{"x": np.array([i + 1], np.float32)} for i in range(ENTRIES)]
        (tmp_path / "entries.json").write_bytes(to_json(entries))
        return SequenceGenerator(
            log=tmp_path / "client.log",
            input_data=tmp_path / "entries.json",
            sla=Sla.from_bounds({"p95": 1000.0}),
            sequence_length=LENGTHS,
        )

    def test_each_sequence_gets_the_answers_to_its_own_steps_in_order(
        self, generator: LoadGenerator, endpoint: Endpoint, log: Path
    ) -> None:
        loads = 0
        while loads < 2 or log.read_text().count("\n") <= FEWEST_STEPS:  # a slow machine needs more loads
            generator.measure(endpoint, self.load, 0.5)  # a load must not continue a sequence of the one before
            loads += 1
        steps = [
            Step(int(sequence), start == "1", end == "1", float(x), float(y))
            for sequence, start, end, x, y in map(str.split, log.read_text().splitlines())
        ]
        sequences: dict[int, list[Step]] = {}
        in_flight: set[int] = set()
        for step in steps:
            sequences.setdefault(step.sequence, []).append(step)
            in_flight |= {step.sequence}
            assert len(in_flight) <= self.load.concurrency
            in_flight -= {step.sequence} if step.is_end else set()
        assert not in_flight, "every sequence is ended"
        for steps_of_sequence in sequences.values():
            assert [step.is_start for step in steps_of_sequence] == [True] + [False] * (len(steps_of_sequence) - 1)
            assert [step.is_end for step in steps_of_sequence] == [False] * (len(steps_of_sequence) - 1) + [True]
            xs = [step.x for step in steps_of_sequence]
            assert [step.y for step in steps_of_sequence] == list(itertools.accumulate(xs))
            assert (len(steps_of_sequence) == 2 and set(xs) == {1.0}) or all(
                after == before % ENTRIES + 1 for before, after in itertools.pairwise(xs)
            ), "the inputs are consecutive entries; the warm-up repeats the first one"
        lengths = {len(steps_of_sequence) for steps_of_sequence in sequences.values()}
        assert max(lengths) == LENGTHS.largest
        assert len(lengths) > 3

    def test_the_throughput_counts_steps(self, generator: LoadGenerator, endpoint: Endpoint) -> None:
        result = generator.measure(endpoint, self.load, 1.0)
        assert result.throughput_infer_per_sec is not None
        assert result.latency_avg_ms is not None
        in_flight = result.throughput_infer_per_sec * result.latency_avg_ms / 1000
        assert 0.6 * self.load.concurrency < in_flight < 1.2 * self.load.concurrency
        assert result.mean_batch_size is not None
        assert 1 < result.mean_batch_size <= 4


class TestSequencesOldest(SequenceContract):
    strategy = "oldest { max_candidate_sequences: 16 }"


class TestSequencesDirect(SequenceContract):
    """Five sequences share four slots, so one waits until another ends."""

    strategy = "direct { }"


COUNTS = (3, 9, 1, 6)  # responses to the entries of the input data
INTERVAL_MS = 10.0
TTFT_MS, ITL_MS = 250_000.0, 100_000.0  # bounds that any machine meets


@pytest.fixture(scope="module")
def streamer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    folder = tmp_path_factory.mktemp("streamer")
    write_streamer(folder / "models", INTERVAL_MS)
    with (
        embedded_model(folder, "streamer") as target,
        target.deploy(Candidate(8, dynamic_batching=True)) as endpoint,
    ):
        yield endpoint


class StreamingContract(LoadGeneratorContract):
    """The model sends as many responses as a request asks for, one every INTERVAL_MS, each with two elements."""

    @pytest.fixture
    def endpoint(self, streamer: Endpoint) -> Endpoint:
        return streamer

    @pytest.fixture
    def generator(self, tmp_path: Path) -> LoadGenerator:
        entries = [{"count": np.array([count], np.int32)} for count in COUNTS]
        (tmp_path / "entries.json").write_bytes(to_json(entries))
        return self.make(
            log=tmp_path / "client.log",
            input_data=tmp_path / "entries.json",
            sla=Sla.from_bounds({"p95": 500_000.0, "ttft-p95": TTFT_MS, "itl-p95": ITL_MS}),
            is_streaming=True,
            token_output="numbers",
        )

    def make(self, **arguments: Any) -> LoadGenerator:
        raise NotImplementedError

    def check(self, result: Measurement) -> None:
        """Responses and their times are measured."""
        assert result.requests is not None
        assert result.requests >= 60
        assert result.ttft_p50_ms is not None
        assert result.ttft_p50_ms >= INTERVAL_MS
        assert result.itl_avg_ms is not None
        assert result.itl_avg_ms >= 0.9 * INTERVAL_MS, "a busy machine delivers several responses at once"
        assert result.latency_p99_ms is not None
        assert result.latency_p99_ms >= max(COUNTS) * INTERVAL_MS
        assert result.requests_over_ttft_ms == f"{TTFT_MS:.0f}:0"
        assert result.requests_over_itl_ms == f"{ITL_MS:.0f}:0"
        assert result.ttft_sketch
        assert result.itl_sketch

    def test_responses_and_tokens_per_second_agree_with_the_requests(
        self, generator: LoadGenerator, endpoint: Endpoint
    ) -> None:
        result = generator.measure(endpoint, self.load, 2.0)
        assert result.throughput_infer_per_sec is not None
        assert result.responses_per_sec is not None
        mean = sum(COUNTS) / len(COUNTS)
        assert result.responses_per_sec == pytest.approx(result.throughput_infer_per_sec * mean, rel=0.3)
        assert result.output_tokens_per_sec == pytest.approx(2 * result.responses_per_sec)

    def test_windows_are_cut_from_one_load(self, generator: LoadGenerator, endpoint: Endpoint) -> None:
        windows = generator.measure_windows(endpoint, self.load, 0.5, 3)
        assert len(windows) == 3
        assert all(window.requests and window.ttft_sketch for window in windows)


class TestStreamingClosedLoop(StreamingContract):
    load = LoadPoint(request_batch_size=1, concurrency=4)

    def make(self, **arguments: Any) -> LoadGenerator:
        return ClosedLoopGenerator(**arguments)


class TestStreamingOpenLoop(StreamingContract):
    load = LoadPoint(request_batch_size=1, request_rate=40.0)

    def make(self, **arguments: Any) -> LoadGenerator:
        return OpenLoopGenerator(**arguments)
