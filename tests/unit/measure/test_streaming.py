"""Test the measurement of responses that stream: first responses, gaps, tokens, lead-in, and what counts."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc.service_pb2 import ModelInferResponse, ModelStreamInferResponse

from objectives import latency_sketch
from objectives.metrics import Measurement
from objectives.sla import Sla
from optimizer.core.errors import DeploymentError, MeasurementError, ServerCrashed
from optimizer.core.measurement_windows import MAX_SPREAD, MIN_WINDOWS
from optimizer.core.stopwatch import Stopwatch
from optimizer.core.trial import LoadPoint
from optimizer.measure.load_client.client import WATCH_SECONDS
from optimizer.measure.load_client.client_files import (
    MAX_LEAD_IN_SECONDS,
    MIN_LEAD_IN_SECONDS,
    NEVER,
    SendPlan,
    SendRecord,
    StreamPlan,
    open_responses,
    write_record,
    write_response_times,
)
from optimizer.measure.load_client.client_process import ClientTask
from optimizer.measure.load_client.closed_loop import summarize_closed_loop
from optimizer.measure.load_client.generators import ClosedLoopGenerator, OpenLoopGenerator
from optimizer.measure.load_client.measured_requests import MIN_STREAMED_REQUESTS, PlannedLoad
from optimizer.measure.load_client.open_loop import summarize_open_loop
from optimizer.measure.load_client.responses import StreamedRequests
from optimizer.measure.load_client.streaming_client import (
    MAX_UNEVENNESS,
    StreamingClosedLoopClient,
    StreamingOpenLoopClient,
)
from optimizer.measure.output_comparison import ReferenceOutputs, Tolerance, concatenate, read_outputs
from tests.conftest import not_none
from tests.inference_server import FakeInferenceServer
from tests.load_clients import SimulatedClient, SimulatedNetwork, planned_task, run_in_this_process

MS = 1_000_000
CLOSED, OPEN = LoadPoint(1, concurrency=2), LoadPoint(1, request_rate=10.0)
SLA = Sla.from_bounds({"p95": 500.0, "ttft-p95": 20.0, "itl-p95": 12.0})


def response(*values: int, name: str = "tokens") -> bytes:
    """Return a response with an output ``name`` of these elements; an empty one without values."""
    message = ModelStreamInferResponse()
    message.infer_response.model_name = "m"
    message.infer_response.parameters["triton_final_response"].bool_param = not values
    if values:
        message.infer_response.outputs.add(name=name, datatype="INT32", shape=[1, len(values)])
        message.infer_response.raw_output_contents.append(np.array(values, np.int32).tobytes())
    return bytes(message.SerializeToString())


def record(
    folder: Path,
    requests: Sequence[tuple[float, float, Sequence[tuple[float, bytes]]]],
    counted_ms: tuple[float, float],
    error: str = "",
) -> SendRecord:
    """Return the record of (sent, end of the call, (arrival, message)...) in ms."""
    sent, ended, _ = zip(*requests, strict=True)
    times_ns = [[NEVER if ms < 0 else round(ms * MS) for ms in column] for column in (sent, sent, ended)]
    arrivals = sorted((ms, i, message) for i, request in enumerate(requests) for ms, message in request[2])
    write_record(folder, times_ns, {"ended_ns": round(max(counted_ms[1], *ended) * MS), "error": error})
    with open_responses(folder) as responses:
        responses.writelines(message for _, _, message in arrivals)
    write_response_times(
        folder,
        (round(counted_ms[0] * MS), round(counted_ms[1] * MS)),
        [i for _, i, _ in arrivals],
        [round(ms * MS) for ms, _, _ in arrivals],
        [len(message) for _, _, message in arrivals],
    )
    return SendRecord.read(folder)


def closed_loop_of(
    folder: Path, requests: Sequence[tuple[float, float, Sequence[tuple[float, bytes]]]]
) -> Measurement:
    """Return the measurement of a closed loop of 1 s with the requests of a ``record``."""
    (result,) = summarize_closed_loop(
        record(folder, requests, (0, 1000)), PlannedLoad(CLOSED, 1.0, sla=SLA), math.inf
    )
    return result


def steady_responses(begin_ms: float, first_ms: float, gap_ms: float, count: int) -> list[tuple[float, bytes]]:
    return [(begin_ms + first_ms + gap_ms * i, response(i, i)) for i in range(count)]


def test_responses_are_read_in_the_order_of_their_requests(tmp_path: Path) -> None:
    send_record = record(
        tmp_path,
        [(0, 90, steady_responses(0, 10, 20, 3)), (5, 6, []), (10, 80, steady_responses(10, 5, 30, 2))],
        (0, 100),
    )
    responses = not_none(send_record.responses)
    assert responses.offsets.tolist() == [0, 3, 3, 5]
    assert responses.arrived_ns.tolist() == [10 * MS, 30 * MS, 50 * MS, 15 * MS, 45 * MS]
    streamed = StreamedRequests.decode(responses, "tokens")
    assert streamed.responses.tolist() == [3, 0, 2]
    assert streamed.tokens.tolist() == [6, 0, 4]
    assert streamed.first_ns.tolist() == [10 * MS, NEVER, 15 * MS]
    assert streamed.last_ns.tolist() == [50 * MS, NEVER, 45 * MS]


def test_each_timing_has_its_own_statistics_and_counts(tmp_path: Path) -> None:
    requests = [(100.0 * i, 100.0 * i + 95, steady_responses(100 * i, 10 + i, 10 + i, 5)) for i in range(10)]
    result = closed_loop_of(tmp_path, requests)
    assert result.requests == 10
    assert result.latency_p50_ms == pytest.approx(5 * 14.0)
    assert result.ttft_p50_ms == pytest.approx(14.0)
    assert result.ttft_avg_ms == pytest.approx(14.5)
    assert result.itl_p99_ms == pytest.approx(19.0)
    assert latency_sketch.requests_over(result.requests_over_ms, 500.0) == 0
    assert latency_sketch.requests_over(result.requests_over_ttft_ms, 20.0) == 0
    assert latency_sketch.requests_over(result.requests_over_itl_ms, 12.0) == 7
    assert result.responses_per_sec == pytest.approx(50.0)
    assert result.output_tokens_per_sec == pytest.approx(50.0), "one token each"
    assert latency_sketch.pooled_quantile_ms([result.ttft_sketch], 1.0) == pytest.approx(19.0, 0.01)


def test_the_responses_of_the_request_with_the_median_latency_are_recorded(tmp_path: Path) -> None:
    requests = [(100.0 * i, 100.0 * i + 95, steady_responses(100 * i, 10, 10 + i, 4)) for i in range(3)]
    requests.append((50.0, 60.0, []))
    (tmp_path / "closed").mkdir()
    (result,) = summarize_closed_loop(
        record(tmp_path / "closed", requests, (0, 1000)), PlannedLoad(CLOSED, 1.0, sla=SLA), math.inf
    )
    assert result.response_times_ms == "10 21 32 43"
    (tmp_path / "open").mkdir()
    requests = [(100.0, -1.0, steady_responses(100, 5, 10, 3)), (200.0, 260.0, steady_responses(200, 20, 10, 3))]
    (result,) = summarize_open_loop(record(tmp_path / "open", requests, (0, 1000)), PlannedLoad(OPEN, 1.0), math.inf)
    assert result.response_times_ms == "20 30 40", "the other request has not ended"


def test_tokens_are_the_elements_of_the_named_output(tmp_path: Path) -> None:
    send_record = record(tmp_path, [(0, 90, steady_responses(0, 10, 10, 5))], (0, 1000))
    (result,) = summarize_closed_loop(send_record, PlannedLoad(CLOSED, 1.0, token_output="tokens", sla=SLA), math.inf)
    assert result.responses_per_sec == 5.0
    assert result.output_tokens_per_sec == 10.0
    with pytest.raises(MeasurementError, match=r"no response has the output ids, .* it has tokens"):
        summarize_closed_loop(send_record, PlannedLoad(CLOSED, 1.0, token_output="ids", sla=SLA), math.inf)


def test_an_empty_final_response_does_not_count(tmp_path: Path) -> None:
    requests = [(0.0, 300.0, [*steady_responses(0, 10, 10, 3), (300.0, response())])]
    result = closed_loop_of(tmp_path, requests)
    assert result.responses_per_sec == 3.0
    assert result.latency_p50_ms == pytest.approx(30.0), "it ends with the last response that has outputs"
    assert result.itl_p50_ms == pytest.approx(10.0)


def test_requests_without_a_time_are_left_out_of_it(tmp_path: Path) -> None:
    requests = [
        (0.0, 40.0, []),
        (0.0, 60.0, steady_responses(0, 50, 0, 1)),
        (0.0, 70.0, steady_responses(0, 20, 40, 2)),
    ]
    result = closed_loop_of(tmp_path, requests)
    assert result.requests == 3
    assert result.latency_p50_ms == pytest.approx(50.0)
    assert result.ttft_avg_ms == pytest.approx(35.0)
    assert (result.itl_avg_ms, result.itl_p99_ms) == (40.0, 40.0)


def test_no_responses_at_all_leave_the_times_unknown(tmp_path: Path) -> None:
    result = closed_loop_of(tmp_path, [(0, 40, [])])
    assert (result.requests, result.responses_per_sec) == (1, 0.0)
    assert (result.ttft_p95_ms, result.itl_p95_ms, result.ttft_sketch, result.requests_over_ttft_ms) == (
        None,
        None,
        "",
        "",
    )
    assert not SLA.is_met(result)


def test_a_long_request_counts_where_it_ends_and_its_responses_where_they_arrive(tmp_path: Path) -> None:
    requests = [(0.0, 1500.0, steady_responses(0, 100, 200, 8)), (600.0, 2500.0, steady_responses(600, 100, 900, 2))]
    send_record = record(tmp_path, requests, (500, 2500))
    (result,) = summarize_closed_loop(send_record, PlannedLoad(CLOSED, 0.1, sla=SLA), math.inf)
    assert result.requests == 1, "the other one was in flight at the end"
    assert result.ttft_p50_ms == pytest.approx(100.0), "its first response arrived before the window"
    assert result.responses_per_sec == 4.0


def test_windows_are_longer_if_few_requests_have_ended(tmp_path: Path) -> None:
    """Requests of one length end in waves, here 10 of them each 400 ms."""
    requests = [
        (400.0 * i, 400.0 * i + 399, steady_responses(400 * i, 99, 100, 4)) for i in range(10) for _ in range(10)
    ]
    send_record = record(tmp_path, requests, (0, 4000))
    parts = summarize_closed_loop(send_record, PlannedLoad(CLOSED, 0.1, sla=SLA), math.inf, 40)
    assert [part.requests for part in parts] == [20] * 5, "most of the 40 parts would have no request"
    assert {part.output_tokens_per_sec for part in parts} == {100.0}
    few = record(tmp_path, requests[:15], (0, 4000))
    assert [
        part.requests for part in summarize_closed_loop(few, PlannedLoad(CLOSED, 0.1, sla=SLA), math.inf, 40)
    ] == [15]


def test_a_closed_loop_without_an_ended_request_is_not_repeated(random_requests: Path, tmp_path: Path) -> None:
    send_record = record(tmp_path, [(0, -1, steady_responses(0, 100, 200, 5))], (500, 45_500))
    launches = []

    def run_client(
        task: ClientTask, log: Path, cpus: frozenset[int] | None, stopwatch: Stopwatch
    ) -> tuple[SendRecord, float]:
        launches.append(task)
        return send_record, 45.0

    generator = ClosedLoopGenerator(
        log=tmp_path / "log", input_data=random_requests, is_streaming=True, run_client=run_client
    )
    with (
        FakeInferenceServer(lambda feeds: feeds).serving() as endpoint,
        pytest.raises(MeasurementError, match=r"^no request ended within 45 s at .*--output-tokens") as raised,
    ):
        generator.measure(endpoint, CLOSED, 1.0)
    assert not isinstance(raised.value, ServerCrashed)
    assert len(launches) == 1


def test_the_open_loop_counts_from_the_planned_time(tmp_path: Path) -> None:
    requests = [(100.0 * i, 100.0 * i + 60, steady_responses(100 * i, 20, 10, 4)) for i in range(20)]
    send_record = record(tmp_path, requests, (1000, 2000))
    late = SendRecord(
        send_record.planned_ns - 5 * MS,
        send_record.sent_ns,
        send_record.answered_ns,
        send_record.ended_ns,
        responses=send_record.responses,
    )
    (result,) = summarize_open_loop(
        late, PlannedLoad(OPEN, 1.0, sla=Sla.from_bounds({"ttft-p95": 500.0})), MAX_SPREAD
    )
    assert result.stable, result.reason
    assert result.requests == 9, "that of 0.995 s belongs to the lead-in"
    assert result.ttft_p95_ms == pytest.approx(25.0)
    assert result.latency_p95_ms == pytest.approx(55.0)
    assert result.itl_p95_ms == pytest.approx(10.0)
    assert result.responses_per_sec == pytest.approx(36.0)


def test_a_request_that_ends_after_the_time_of_an_open_loop_counts(tmp_path: Path) -> None:
    requests = [(100.0 * i, 100.0 * i + 360, steady_responses(100 * i, 20, 100, 4)) for i in range(10)]
    (result,) = summarize_open_loop(record(tmp_path, requests, (0, 1000)), PlannedLoad(OPEN, 1.0, sla=SLA), math.inf)
    assert result.throughput_infer_per_sec == 10.0


def test_an_overload_counts_the_waiting_time_of_requests_without_a_response(tmp_path: Path) -> None:
    requests = [(100.0 * i, -1.0, steady_responses(100 * i, 50, 10, 4) if i < 5 else []) for i in range(10)]
    send_record = record(tmp_path, requests, (0, 1000))
    overloaded = SendRecord(
        send_record.planned_ns,
        send_record.sent_ns,
        np.where(np.arange(10) < 5, send_record.sent_ns + 90 * MS, NEVER),
        send_record.ended_ns,
        overload="overloaded",
        responses=send_record.responses,
    )
    (result,) = summarize_open_loop(overloaded, PlannedLoad(OPEN, 1.0, sla=SLA), MAX_SPREAD)
    assert result.overloaded
    assert result.ttft_p99_ms == pytest.approx(500.0)
    assert result.responses_per_sec == pytest.approx(20.0)


def overloaded(send_record: SendRecord) -> SendRecord:
    return replace(send_record, overload="overloaded")


def test_an_overload_before_any_request_has_ended_shows_the_rate_of_first_responses(tmp_path: Path) -> None:
    requests = [(20.0 * i, -1.0, steady_responses(20 * i, 30 * i, 100, 3) if i < 20 else []) for i in range(50)]
    send_record = overloaded(record(tmp_path, requests, (0, 1000)))
    (result,) = summarize_open_loop(send_record, PlannedLoad(OPEN, 20.0, sla=SLA), MAX_SPREAD)
    assert (result.overloaded, result.stable) == (True, False)
    assert result.throughput_infer_per_sec == pytest.approx(20.0)
    assert result.output_tokens_per_sec == pytest.approx(54.0), "six others arrive after the end"
    assert result.ttft_p99_ms == pytest.approx(600.0), "the request of 400 ms still waits"


def test_an_overload_soon_after_the_lead_in_is_judged_by_the_second_half_of_the_time(tmp_path: Path) -> None:
    requests = [(20.0 * i, 20.0 * i + 5, steady_responses(20 * i, 5, 0, 1)) for i in range(50)]
    send_record = overloaded(record(tmp_path, requests, (995, 1000)))
    (result,) = summarize_open_loop(send_record, PlannedLoad(OPEN, 20.0, sla=SLA), MAX_SPREAD)
    assert result.throughput_infer_per_sec == pytest.approx(50.0)


def test_an_overload_without_a_first_response_is_an_error(tmp_path: Path) -> None:
    send_record = overloaded(record(tmp_path, [(20.0 * i, -1.0, []) for i in range(50)], (0, 1000)))
    with pytest.raises(MeasurementError, match=r"no request was answered within 1\.0 s at 10 requests/s"):
        summarize_open_loop(send_record, PlannedLoad(OPEN, 20.0, sla=SLA), MAX_SPREAD)


def test_rising_first_responses_are_not_stable_although_the_latencies_are(tmp_path: Path) -> None:
    bounds = Sla.from_bounds({"ttft-p95": 30.0})
    flat_requests = [(10.0 * i, 10.0 * i + 90, steady_responses(10 * i, 20, 10, 7)) for i in range(90)]
    (result,) = summarize_closed_loop(
        record(tmp_path, flat_requests, (0, 1000)), PlannedLoad(CLOSED, 1.0, sla=bounds), MAX_SPREAD
    )
    assert result.stable, result.reason
    rising_requests = [
        (10.0 * i, 10.0 * i + 90, [(10 * i + 10 + i, response(1)), (10 * i + 89, response(1))]) for i in range(90)
    ]
    (result,) = summarize_closed_loop(
        record(tmp_path, rising_requests, (0, 1000)), PlannedLoad(CLOSED, 1.0, sla=bounds), MAX_SPREAD
    )
    assert "p95" in result.reason


@pytest.mark.parametrize(
    ("kind", "load", "fewest"),
    [
        (OpenLoopGenerator, OPEN, 0),
        (ClosedLoopGenerator, CLOSED, MIN_WINDOWS * MIN_STREAMED_REQUESTS),
        (ClosedLoopGenerator, LoadPoint(1, concurrency=100), 300),
    ],
)
def test_only_a_closed_loop_waits_for_a_number_of_requests(
    kind: type[ClosedLoopGenerator | OpenLoopGenerator],
    load: LoadPoint,
    fewest: int,
    random_requests: Path,
    tmp_path: Path,
) -> None:
    generator = kind(log=tmp_path / "log", input_data=random_requests, is_streaming=True)
    with FakeInferenceServer(lambda feeds: feeds).serving() as endpoint:
        stream = planned_task(generator, endpoint, load, 0.5, windows=8).plan.stream
    assert stream is not None
    assert (stream.fewest_requests, stream.windows, stream.window_requests) == (fewest, 8, MIN_STREAMED_REQUESTS)


@dataclass
class UnevenServer:
    """A server that takes 50 ms on average for a request, with exponential durations, and pauses once.

    ``pause_seconds`` begin after ``pause_at_seconds``; a request that is in flight then takes so much longer.
    """

    pause_seconds: float = 0.0
    pause_at_seconds: float = 5.0
    durations: random.Random = field(default_factory=lambda: random.Random(1))

    def __call__(self, arrived_seconds: float) -> float:
        ended_seconds = arrived_seconds + self.durations.expovariate(1 / 0.05)
        return ended_seconds + (self.pause_seconds if ended_seconds > self.pause_at_seconds >= arrived_seconds else 0)


def uneven_windows(server: UnevenServer, input_data: Path, log: Path) -> list[Measurement]:
    """Return the measurements of a closed loop in eight windows of 0.5 s."""
    generator = ClosedLoopGenerator(
        log=log, input_data=input_data, is_streaming=True, run_client=SimulatedClient(server)
    )
    with FakeInferenceServer(lambda feeds: feeds).serving() as endpoint:
        return generator.measure_windows(endpoint, CLOSED, 0.5, 8)


@pytest.mark.parametrize("server", [UnevenServer(), UnevenServer(pause_seconds=0.6)])
def test_a_closed_loop_continues_until_each_window_has_enough_requests(
    server: UnevenServer, random_requests: Path, tmp_path: Path
) -> None:
    """Eight windows of 0.5 s have 20 requests on average, so some have fewer."""
    windows = uneven_windows(server, random_requests, tmp_path / "log")
    requests = [window.requests or 0 for window in windows]
    assert len(requests) == 8
    assert min(requests) >= MIN_STREAMED_REQUESTS
    assert sum(requests) < MAX_UNEVENNESS * 8 * MIN_STREAMED_REQUESTS, "it ends as soon as the sparsest has enough"


def test_a_closed_loop_does_not_wait_for_a_window_without_requests(random_requests: Path, tmp_path: Path) -> None:
    """After a long pause all windows would have to be longer than it."""
    windows = uneven_windows(UnevenServer(pause_seconds=6.0), random_requests, tmp_path / "log")
    assert 1 < len(windows) < 8
    assert min(window.requests or 0 for window in windows) >= MIN_STREAMED_REQUESTS
    most = MAX_UNEVENNESS * 8 * MIN_STREAMED_REQUESTS
    assert sum(window.requests or 0 for window in windows) == pytest.approx(most, rel=0.05)


# -- when the lead-in of the client ends -------------------------------------------------------------------------


def closed_loop_record(folder: Path, concurrency: int, seconds: Sequence[float], then: float) -> SendRecord:
    """Return the record of a closed loop of 1 s on a server that takes these times, and ``then`` for each later one.

    The first request is the one that is sent alone.
    """
    durations = itertools.chain(seconds, itertools.repeat(then))
    network = SimulatedNetwork(lambda arrived: arrived + next(durations))
    plan = SendPlan(("a:1",), 0.0, concurrency=concurrency, seconds=1.0, stream=StreamPlan())
    return run_in_this_process(StreamingClosedLoopClient(plan, [b""], (), None, network), folder)


def begin_seconds(send_record: SendRecord) -> float:
    """Return when the lead-in ended, after the start."""
    return not_none(send_record.responses).begin_ns / 1e9


@pytest.mark.parametrize(
    ("alone", "first", "then", "expected"),
    [
        (0.01, [0.1, 2.0, 0.1], 0.1, 2.0),
        (0.01, [0.1, 0.1, 0.1], 0.1, MIN_LEAD_IN_SECONDS),
        (0.9, [0.1, 0.1, 0.1], 0.1, 0.9),  # over which the first requests are spread
        (0.01, [60.0], 1.0, MAX_LEAD_IN_SECONDS),
    ],
    ids=["when the first requests have ended", "at the minimum", "when all have begun", "at the limit"],
)
def test_the_lead_in_of_a_closed_loop_ends(
    alone: float, first: list[float], then: float, expected: float, tmp_path: Path
) -> None:
    begin = begin_seconds(closed_loop_record(tmp_path, 3, [alone, *first], then))
    assert expected <= begin < expected + 3 * WATCH_SECONDS


def test_the_first_requests_of_a_closed_loop_are_spread_over_the_duration_of_one(tmp_path: Path) -> None:
    sent_ns = closed_loop_record(tmp_path, 4, [0.4], 5.0).sent_ns
    assert sent_ns[:4] / 1e9 == pytest.approx([0.0, 0.1, 0.2, 0.3], abs=WATCH_SECONDS)


def test_an_overload_in_the_lead_in_counts_from_the_start(tmp_path: Path) -> None:
    plan = SendPlan(("a:1",), 0.0, seconds=1.0, stream=StreamPlan(lead_in_requests=2))
    durations = itertools.chain([0.01], itertools.repeat(math.inf))
    network = SimulatedNetwork(lambda arrived: arrived + next(durations))
    client = StreamingOpenLoopClient(plan, [b""], [0, MS, 0], None, network)
    send_record = run_in_this_process(client, tmp_path)
    assert send_record.overload
    assert begin_seconds(send_record) == 0
    assert not_none(send_record.responses).end_ns == send_record.ended_ns


def test_the_lead_in_of_an_open_loop_waits_for_the_requests_sent_beside_the_first_ones(tmp_path: Path) -> None:
    """The tenth request ends after 1.45 s, and the last one that was sent by then, at 1.4 s, after 1.85 s."""
    planned_ns = [100 * MS * i for i in range(30)] + [0, 50 * MS]
    plan = SendPlan(("a:1",), 10_000.0, seconds=1.0, stream=StreamPlan(lead_in_requests=30))
    durations = itertools.chain([0.01] + [0.05] * 9 + [0.55] + [0.45] * 5, itertools.repeat(0.01))
    network = SimulatedNetwork(lambda arrived: arrived + next(durations))
    client = StreamingOpenLoopClient(plan, [b""], planned_ns, None, network)
    send_record = run_in_this_process(client, tmp_path)
    begin = begin_seconds(send_record)
    assert 1.85 <= begin < 1.85 + 2 * WATCH_SECONDS
    measured_ns = send_record.planned_ns[-2:] - round(1e9 * begin)
    assert measured_ns.tolist() == [0, 50 * MS]
    assert len(send_record.planned_ns) == pytest.approx(19 + 2, abs=1), "the rest of the lead-in is left out"


# -- the concatenation of responses for the output check ----------------------------------------------------------


def test_responses_are_joined_in_their_order() -> None:
    parts = [(1, 2), (3,)]
    messages = [ModelStreamInferResponse.FromString(response(*part)).infer_response for part in parts]
    outputs = read_outputs(concatenate([message.SerializeToString() for message in messages]))
    assert outputs["tokens"].values.tolist() == [1, 2, 3]
    assert read_outputs(concatenate([])) == {}
    other = ModelInferResponse()
    other.outputs.add(name="tokens", datatype="FP32", shape=[0])
    other.raw_output_contents.append(b"")
    with pytest.raises(DeploymentError, match="output tokens is INT32 in one response and FP32 in another"):
        concatenate([messages[0].SerializeToString(), other.SerializeToString()])


@pytest.mark.parametrize(
    ("message", "error_text"),
    [(b"\xff", "no ModelInferResponse"), (ModelInferResponse(raw_output_contents=[b"1"]), "0 outputs, .* of 1")],
)
def test_an_invalid_response_fails_the_deployment(message: Any, error_text: str) -> None:
    with pytest.raises(DeploymentError, match=error_text):
        concatenate([message if isinstance(message, bytes) else message.SerializeToString()])


def test_responses_of_only_one_deployment_are_a_difference() -> None:
    tokens_response = ModelStreamInferResponse.FromString(response(1, 2)).infer_response.SerializeToString()
    for baseline, candidate, problem in (
        (tokens_response, [], "tokens is missing"),
        (None, [tokens_response], "tokens is not expected"),
    ):
        reference = ReferenceOutputs((b"",), (concatenate([baseline] if baseline else []),), 0.1, 0.0)
        assert reference.compare([0], [concatenate(candidate)], Tolerance()).problem.startswith(problem)
    nothing = ReferenceOutputs((b"",), (concatenate([]),), 0.1, 0.0)
    assert not nothing.compare([0], [concatenate([])], Tolerance()).problem
