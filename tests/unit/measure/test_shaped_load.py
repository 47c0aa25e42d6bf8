"""Test the plan of the open-loop generator for a load shape or a trace: whole periods, and the order of messages."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelMetadataResponse

from objectives.metrics import Measurement
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import MeasurementError
from optimizer.core.measurement_windows import MAX_SPREAD
from optimizer.core.request_sizes import parse_priorities, parse_size_distribution
from optimizer.core.trial import LoadPoint
from optimizer.measure.load_client.arrivals import RecordedArrivals, RecordedClasses, parse_arrivals
from optimizer.measure.load_client.base_generator import Messages
from optimizer.measure.load_client.client_files import SendPlan, SendRecord
from optimizer.measure.load_client.generators import OpenLoopGenerator
from optimizer.measure.load_client.measured_requests import PlannedLoad
from optimizer.measure.load_client.open_loop import summarize_open_loop
from tests.inference_server import FakeInferenceServer
from tests.load_clients import planned_task

METADATA = ModelMetadataResponse()
ENDPOINT = Endpoint("m", Candidate(8), grpc="a:1")


@pytest.fixture
def open_loop(random_requests: Path, tmp_path: Path) -> OpenLoopGenerator:
    return OpenLoopGenerator(log=tmp_path / "log", input_data=random_requests)


def planned_seconds(generator: OpenLoopGenerator, rate: float, seconds: float | None, count: int = 1) -> float:
    """Return for how long requests are planned."""
    with FakeInferenceServer(lambda feeds: feeds).serving() as endpoint:
        task = planned_task(generator, endpoint, LoadPoint(1, request_rate=rate), seconds, count if seconds else 0)
    return task.plan.seconds


def distinct_requests(generator: OpenLoopGenerator, request_batch_size: float) -> list[ModelInferRequest]:
    """Return the requests that are sent, each once, the classes of a trace or the priorities one after the other."""
    with FakeInferenceServer(lambda feeds: feeds).serving() as endpoint:
        task = planned_task(generator, endpoint, LoadPoint(request_batch_size, request_rate=10.0))
    return [ModelInferRequest.FromString(message) for message in task.requests.messages]


def size_of(request: ModelInferRequest) -> int:
    """Return the number of samples of a request."""
    return int(request.inputs[0].shape[0])


def priority_of(request: ModelInferRequest) -> int:
    """Return the priority of a request; 0 for the default."""
    return int(request.parameters["priority"].uint64_param)


@pytest.mark.parametrize(
    ("text", "seconds", "count", "expected"),
    [
        ("poisson", 0.5, 8, 4.2),
        ("poisson", None, 1, 3 * 0.72 + 0.2),
        ("spike:1s", None, 1, 3 * 1 + 1),
        ("spike:0.5s", None, 1, 3 * 1.0 + 0.5),
        ("spike:0.1s", None, 1, 3 * 0.8 + 0.2),
        ("spike:1s", 0.5, 8, 8 * 1 + 1),
        ("spike:1s", 1.0, 8, 8 * 1 + 1),
        ("ramp:10s", 0.5, 3, 3 * 10 + 2),
        ("diurnal:0.4s", 0.5, 3, 3 * 0.8 + 0.4),
    ],
)
def test_each_window_has_whole_periods(
    open_loop: OpenLoopGenerator,
    text: str,
    seconds: float | None,
    count: int,
    expected: float,
) -> None:
    generator = replace(open_loop, arrivals=parse_arrivals(text))
    assert planned_seconds(generator, 1000.0, seconds, count) == pytest.approx(expected)


def test_a_long_test_has_fewer_windows_at_a_high_rate(open_loop: OpenLoopGenerator) -> None:
    generator = replace(open_loop, arrivals=parse_arrivals("diurnal:60s"))
    assert planned_seconds(generator, 5000.0, 60.0, 8) == pytest.approx(6 * 60 + 2)
    with pytest.raises(MeasurementError, match=r"^50,000 requests/s for 60 s, .* more than 2,000,000 requests"):
        generator.measure_windows(ENDPOINT, LoadPoint(1, request_rate=50_000.0), 60.0, 8)


def test_a_shape_is_not_judged_by_a_short_warm_up(open_loop: OpenLoopGenerator) -> None:
    generator = replace(open_loop, arrivals=parse_arrivals("spike"))
    assert generator.warm_up(ENDPOINT, LoadPoint(1, request_rate=100.0)) is None


def test_requests_get_messages_of_their_kind_in_turn() -> None:
    messages = Messages([b"a", b"b", b"c", b"d"], np.array([1, 1, 1, 8]), METADATA, np.array([0, 0, 0, 1]))
    numbers = np.array([1, 0, 0, 1, 0, 0, 0])
    assert messages.order(numbers).tolist() == [3, 0, 1, 3, 2, 0, 1]


def test_each_kind_of_a_trace_has_messages(open_loop: OpenLoopGenerator) -> None:
    classes = RecordedClasses(((1, 0), (4, 2), (8, 1)), np.array([0] * 970 + [1] * 29 + [2]), (2, 99, 101))
    generator = replace(open_loop, arrivals=RecordedArrivals(np.ones(1000), classes))
    numbers = Counter((size_of(request), priority_of(request)) for request in distinct_requests(generator, 1.2))
    assert set(numbers) == set(classes.classes)
    total = numbers.total()
    assert numbers[1, 0] == round(0.97 * total)
    assert numbers[4, 2] == round(0.029 * total)
    assert numbers[8, 1] == 1, "one request in 1,000 is rarer than any of those that are sent in turn"


def test_each_kind_of_a_trace_has_entries_of_all_parts_of_a_file(
    open_loop: OpenLoopGenerator, tmp_path: Path
) -> None:
    """Otherwise a class would have the short texts of a sorted file, and another class the long ones."""
    data = tmp_path / "data.json"
    data.write_text(json.dumps({"data": [{"x": [number, number]} for number in range(1000)]}))
    classes = RecordedClasses(((1, 0), (2, 0)), np.array([0] * 4 + [1] * 4), (2, 99))
    generator = replace(open_loop, arrivals=RecordedArrivals(np.ones(8), classes), input_data=data)
    requests = distinct_requests(generator, 1.5)
    sent = [(size_of(one), np.frombuffer(one.raw_input_contents[0], np.float32)) for one in requests]
    assert {entry for _, entries in sent for entry in entries} == set(range(1000))
    assert Counter(size for size, _ in sent) == {1: 500, 2: 500}
    for size in (1, 2):
        entries = np.concatenate([entries for sent_size, entries in sent if sent_size == size])
        assert min(entries) < 250
        assert max(entries) >= 750


def test_a_trace_without_sizes_has_the_size_of_the_load(open_loop: OpenLoopGenerator) -> None:
    generator = replace(
        open_loop, arrivals=RecordedArrivals(np.ones(2), RecordedClasses(((0, 1), (0, 2)), np.array([0, 1]), (2, 3)))
    )
    requests = distinct_requests(generator, 4)
    assert {(size_of(request), priority_of(request)) for request in requests} == {(4, 1), (4, 2)}


def test_each_priority_has_requests_of_all_sizes(open_loop: OpenLoopGenerator) -> None:
    """Otherwise the latencies of a rare priority would be those of a single size."""
    mix, shares = parse_size_distribution("1*9|8*1"), parse_priorities("1*1|3*99")
    sent = distinct_requests(replace(open_loop, request_mix=mix, priorities=shares), 1.7)
    rare, frequent = ([size_of(one) for one in sent if priority_of(one) == level] for level in (1, 3))
    assert rare == frequent
    assert Counter(rare) == {1: round(0.9 * len(rare)), 8: round(0.1 * len(rare))}


def test_the_plan_sends_messages_in_the_given_order(tmp_path: Path) -> None:
    SendPlan(("a:1",), 0.0).write(tmp_path, [b"one", b"two"], [5, 6, 7], [1, 1, 0])
    plan, messages, planned = SendPlan.read(tmp_path)
    assert (messages, planned) == ([b"two", b"two", b"one"], [5, 6, 7])
    assert plan.period_seconds == 0
    SendPlan(("a:1",), 0.0, period_seconds=2.0).write(tmp_path, [b"one", b"two"], [5])
    plan, messages, _ = SendPlan.read(tmp_path)
    assert (plan.period_seconds, messages) == (2.0, [b"one", b"two"])


def measure_shaped_load(
    text: str, lead_in: float, seconds: float, rate: float = 3000.0, seed: int = 0
) -> Measurement:
    """Return the measurement of a server that serves 5,000 requests a second, one at a time."""
    load = LoadPoint(1, request_rate=rate)
    planned = parse_arrivals(text).plan(load.request_rate, lead_in + seconds, seed)
    answered, free = np.empty_like(planned), 0.0
    for i, arrival in enumerate(planned):
        free = answered[i] = max(free, arrival) + 0.0002
    planned_ns, answered_ns = ((1e9 * times).astype(np.int64) for times in (planned, answered))
    record = SendRecord(planned_ns, planned_ns, answered_ns, int(answered_ns.max()) + 1)
    (measured,) = summarize_open_loop(
        record, PlannedLoad(load, lead_in + seconds, lead_in_seconds=lead_in), MAX_SPREAD
    )
    return measured


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("text", "rate"),
    [("spike:4x:10%:4s", 3000.0), ("ramp:0..2:4s", 3500.0), ("ramp:2..0:4s", 3500.0), ("diurnal:2x:4s", 3500.0)],
)
def test_windows_of_whole_periods_agree(text: str, rate: float, seed: int) -> None:
    """Their p95 is that of the queue at the peak, which exceeds the capacity."""
    measured = measure_shaped_load(text, 2.0, 12.0, rate, seed)
    assert measured.stable, measured.reason
    assert measured.latency_p95_ms is not None
    assert measured.latency_p95_ms > 20
    assert measured.throughput_infer_per_sec == pytest.approx(rate, rel=0.05)


def test_windows_of_parts_of_a_period_disagree() -> None:
    assert measure_shaped_load("spike:4x:10%:4s", 0.2, 4.0).reason.startswith("unstable: p95 between")
