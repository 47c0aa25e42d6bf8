"""Test the load on a model that streams on the real server: failures, requests without responses, a killed server."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest

from objectives.sla import Sla
from optimizer.core.candidate import Candidate
from optimizer.core.errors import DeploymentError, MeasurementError, ServerCrashed
from optimizer.core.trial import LoadPoint
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.target_settings import TargetSettings
from optimizer.measure.load_client.client_files import NEVER
from optimizer.measure.load_client.generators import ClosedLoopGenerator, OpenLoopGenerator
from optimizer.measure.load_client.measured_requests import MIN_STREAMED_REQUESTS
from optimizer.measure.load_client.responses import StreamedRequests
from optimizer.measure.load_client.streaming_client import StreamingClient
from optimizer.measure.output_check import BaselineOutputCheck, infer_streamed
from optimizer.model.repository import read_repository_model
from tests.load_clients import KeptRecords
from tests.repositories import write_streamer
from tests.stack.test_open_loop import counted, once_loaded, tell_server
from tests.stack_fixtures import embedded_model

Generator: TypeAlias = ClosedLoopGenerator | OpenLoopGenerator

CANDIDATE = Candidate(8, dynamic_batching=True)
CLOSED, OPEN = LoadPoint(1, concurrency=4), LoadPoint(1, request_rate=30.0)
GENERATORS = [(ClosedLoopGenerator, CLOSED), (OpenLoopGenerator, OPEN)]


@pytest.fixture(scope="module")
def streamer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTarget]:
    folder = tmp_path_factory.mktemp("streamer")
    write_streamer(folder / "models", 10.0)
    with embedded_model(folder, "streamer") as target:
        yield target


def asking_for(folder: Path, *counts: int) -> Path:
    """Write input data whose requests ask for these numbers of responses."""
    path = folder / "counts.json"
    path.write_text(json.dumps({"data": [{"count": [count]} for count in counts]}))
    return path


def new(kind: type[Generator], folder: Path, *counts: int) -> Generator:
    return kind(
        log=folder / "client.log",
        input_data=asking_for(folder, *counts),
        sla=Sla.from_bounds({"p95": 5000.0}),
        is_streaming=True,
    )


@pytest.mark.parametrize(("kind", "load"), GENERATORS)
def test_every_response_arrives_at_its_own_request(
    kind: type[Generator],
    load: LoadPoint,
    streamer: EmbeddedTarget,
    tmp_path: Path,
) -> None:
    counts, client = (5, 0, 17, 1), KeptRecords()
    with streamer.deploy(CANDIDATE) as endpoint:
        before, _ = counted(endpoint)
        result = replace(new(kind, tmp_path, *counts), run_client=client).measure(endpoint, load, 1.0)
        requests = counted(endpoint)[0] - before
    (record,) = client.records
    assert np.all(record.answered_ns != NEVER), "the requests in flight at the end are drained"
    assert abs(requests - len(record.sent_ns) - StreamingClient._warm_ups) <= load.concurrency
    assert record.responses is not None
    streamed = StreamedRequests.decode(record.responses)
    assert streamed.responses.tolist() == np.resize(counts, len(record.sent_ns)).tolist()
    assert result.ttft_p50_ms is not None
    assert result.ttft_p50_ms >= 10


def test_an_error_in_the_middle_of_a_stream_fails_the_measurement(streamer: EmbeddedTarget, tmp_path: Path) -> None:
    with streamer.deploy(CANDIDATE) as endpoint:
        generator = new(OpenLoopGenerator, tmp_path, 2, 2, 2, 2, -3)
        with pytest.raises(MeasurementError, match=r"a request failed at .*: no response after 3") as caught:
            generator.measure(endpoint, OPEN, 1.0)
        assert not isinstance(caught.value, ServerCrashed)
        generator = new(OpenLoopGenerator, tmp_path, 2)
        assert generator.measure(endpoint, OPEN, 0.5).requests, "the server serves other requests"


def test_a_server_killed_while_it_streams_is_reported(streamer: EmbeddedTarget, tmp_path: Path) -> None:
    generator = new(ClosedLoopGenerator, tmp_path, 20)
    with (
        streamer.deploy(CANDIDATE, fresh=True) as endpoint,
        once_loaded(endpoint, 10, lambda: tell_server(endpoint, signal.SIGKILL)),
        pytest.raises(ServerCrashed, match="no longer answers"),
    ):
        generator.measure_windows(endpoint, CLOSED, 10.0, 3)


def test_requests_of_one_length_do_not_end_in_waves(streamer: EmbeddedTarget, tmp_path: Path) -> None:
    concurrency, responses, client = 20, 40, KeptRecords()
    with streamer.deploy(CANDIDATE) as endpoint:
        generator = replace(new(ClosedLoopGenerator, tmp_path, responses), run_client=client)
        windows = generator.measure_windows(endpoint, LoadPoint(1, concurrency=concurrency), 0.5, 8)
    assert len(windows) == 8
    assert min(window.requests or 0 for window in windows) >= MIN_STREAMED_REQUESTS
    (record,) = client.records
    shortest_ns = 1e7 * responses  # the model waits 10 ms before each response
    assert np.ptp(record.sent_ns[:concurrency]) > shortest_ns / 2, "the first requests are sent one after the other"
    ended_ns = np.sort(record.answered_ns)
    limits_ns = [ended_ns - shortest_ns / 20, ended_ns + shortest_ns / 20]
    before, after = (np.searchsorted(ended_ns, limit_ns) for limit_ns in limits_ns)
    assert np.median(after - before) < concurrency / 2, "few requests end within a tenth of a request's duration"


def test_a_rate_above_the_capacity_is_an_overload(tmp_path: Path) -> None:
    """One instance with one request at a time, and none ends before the overload is declared."""
    write_streamer(tmp_path / "models", 10.0)
    program = tmp_path / "models" / "streamer" / "1" / "model.py"
    program.write_text(
        program.read_text().replace(
            "threading.Thread(target=self.respond, args=(request, request.get_response_sender())).start()",
            "self.respond(request, request.get_response_sender())",
        )
    )
    source = read_repository_model(tmp_path / "models", "streamer", gpu=False)
    target = EmbeddedTarget(source, TargetSettings(tmp_path / "tritonserver.log"))
    with contextlib.closing(target), target.deploy(CANDIDATE) as endpoint:
        generator = OpenLoopGenerator(
            log=tmp_path / "client.log",
            input_data=asking_for(tmp_path, 150),
            sla=Sla.from_bounds({"ttft-p95": 100.0}),
            is_streaming=True,
        )
        result = generator.measure(endpoint, LoadPoint(1, request_rate=60.0), 8.0)
    assert result.overloaded
    assert result.throughput_infer_per_sec is not None
    assert 0 < result.throughput_infer_per_sec < 25


def test_the_outputs_are_those_of_the_baseline_however_they_are_split(
    streamer: EmbeddedTarget, tmp_path: Path
) -> None:
    check = BaselineOutputCheck(
        tmp_path / "reference.npz",
        input_data=asking_for(tmp_path, 1, 4, 0, 7),
        shapes=(),
        request_batch_size=1,
        infer=infer_streamed,
    )
    with streamer.deploy(Candidate(1)) as endpoint:
        check.record_reference(endpoint)
    assert check.note is None
    with streamer.deploy(CANDIDATE) as endpoint:
        check.check(endpoint)
    write_streamer(tmp_path / "models", 1.0)
    program = tmp_path / "models" / "streamer" / "1" / "model.py"
    program.write_text(program.read_text().replace("[[number, count]]", "[[number, count + (number > 4)]]"))
    source = read_repository_model(tmp_path / "models", "streamer", gpu=False)
    other = EmbeddedTarget(source, TargetSettings(tmp_path / "tritonserver.log"))
    with (
        contextlib.closing(other),
        other.deploy(CANDIDATE) as endpoint,
        pytest.raises(DeploymentError, match=r"numbers by 1 \(8 instead of 7\), but must be equal"),
    ):
        check.check(endpoint)
