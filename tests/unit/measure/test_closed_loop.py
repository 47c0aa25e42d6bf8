"""Test the closed loop of the load client: requests in flight, windows, exact counts, failures, hanging servers."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc.service_pb2 import ModelInferRequest

from objectives import latency_sketch
from objectives.confidence import SequentialTest
from objectives.metrics import Measurement
from objectives.sequential import LOOKS
from objectives.server_spread import server_spreads
from objectives.sla import Constraint, Sla, Verdict
from objectives.verdict import judge_sla
from optimizer.confirmation.windows import server_windows
from optimizer.core.candidate import Candidate
from optimizer.core.errors import MeasurementError, ServerCrashed
from optimizer.core.measurement_windows import MAX_SPREAD
from optimizer.core.trial import FreshServer, LoadPoint, Trial
from optimizer.measure.load_client.client import WARM_UP_SECONDS, WARM_UPS, ClosedLoopClient
from optimizer.measure.load_client.client_files import ALL_ANSWERED_FILE, NEVER, SendPlan, SendRecord
from optimizer.measure.load_client.closed_loop import (
    CLOSED_LOOP_LEAD_IN_SECONDS,
    NoAnswersError,
    summarize_closed_loop,
)
from optimizer.measure.load_client.generators import ClosedLoopGenerator, OpenLoopGenerator
from optimizer.measure.load_client.measured_requests import SATURATED_CPU_SHARE, PlannedLoad
from optimizer.measure.load_client.open_loop import LateError
from optimizer.model.input_data import MAX_SENT_BYTES, to_json
from optimizer.store.trials_table import TrialsTable
from tests.conftest import not_none
from tests.inference_server import Array, FakeInferenceServer
from tests.load_clients import KeptRecords, SimulatedNetwork, planned_task, run_in_this_process

LOAD = LoadPoint(request_batch_size=2, concurrency=3)
SIZES = np.array([2])
ANSWER_SECONDS = 60.0  # only a client that sends nothing to the other server takes so long
MS = 1_000_000


# -- the measurement from a record ----------


def record(answered_ms: np.ndarray, latency_ms: float | np.ndarray, **facts: Any) -> SendRecord:
    """Return a record of requests answered ``answered_ms`` after the lead-in, ``latency_ms`` after they were sent."""
    answered = ((1000 * CLOSED_LOOP_LEAD_IN_SECONDS + answered_ms) * MS).astype(np.int64)
    sent = (answered - latency_ms * np.full(len(answered), MS)).astype(np.int64)
    return SendRecord(sent, sent, answered, int(answered.max()) + MS, **facts)


def windows_of(send_record: SendRecord, seconds: float, count: int, *bounds_ms: float) -> list[Measurement]:
    sla = Sla(tuple(Constraint("latency-p95", bound_ms) for bound_ms in bounds_ms))
    return summarize_closed_loop(send_record, PlannedLoad(LOAD, seconds, SIZES, sla=sla), math.inf, count)


def test_a_request_belongs_to_the_window_in_which_it_was_answered() -> None:
    answered_ms = np.array([10.0, 499.0, 501.0, 999.0, 998.0, 997.0])
    first, second = windows_of(record(answered_ms, 400.0), 1.0, 2)
    assert (first.requests, second.requests) == (2, 4)
    assert first.throughput_infer_per_sec == pytest.approx(2 * 2 / 0.5)
    assert second.throughput_infer_per_sec == pytest.approx(4 * 2 / 0.5)
    assert second.latency_p50_ms == pytest.approx(400.0)
    assert first.requests_over_ms == second.requests_over_ms == "", "there are no bounds"
    assert first.latency_sketch
    assert second.latency_sketch


def test_windows_follow_each_other_in_time() -> None:
    start_ns = 1_700_000_000 * 10**9
    windows = windows_of(record(np.arange(0.0, 1000.0), 3.0, start_unix_ns=start_ns), 1.0, 4)
    begin = start_ns / 1e9 + CLOSED_LOOP_LEAD_IN_SECONDS
    assert [window.begin_unix_seconds for window in windows] == [begin, begin + 0.25, begin + 0.5, begin + 0.75]
    assert [window.end_unix_seconds for window in windows] == [begin + 0.25, begin + 0.5, begin + 0.75, begin + 1]
    assert all(window.begin_unix_seconds is None for window in windows_of(record(np.arange(9.0), 3.0), 1.0, 4))


def test_answers_of_the_lead_in_and_after_the_end_do_not_count() -> None:
    (result,) = windows_of(record(np.array([-1.0, 5.0, 999.0, 1000.0, 1200.0]), 3.0), 1.0, 1)
    assert result.requests == 2


def test_requests_above_each_bound_are_counted_exactly() -> None:
    latencies_ms = np.linspace(0.1, 40.0, 400)
    first, second = windows_of(record(np.linspace(0, 999, 400), latencies_ms), 1.0, 2, 20.0, 12.5)
    for window, window_latencies_ms in ((first, latencies_ms[:200]), (second, latencies_ms[200:])):
        for bound_ms in (20.0, 12.5):
            counted = latency_sketch.requests_over(window.requests_over_ms, bound_ms)
            assert counted == int(np.sum(np.round(window_latencies_ms, 6) > bound_ms))
        assert latency_sketch.requests_over(window.requests_over_ms, 13.0) is None


@pytest.mark.parametrize("pause", [0, 3, 7])
def test_a_window_without_answers_counts_as_a_pause_of_the_server(pause: int, tmp_path: Path) -> None:
    """The server answers 100 requests in each window of half a second but one; the late ones end in the next."""
    answered_ms = np.concatenate([np.linspace(0, 499, 100) + 500 * place for place in range(8) if place != pause])
    windows = windows_of(record(answered_ms, 3.0), 4.0, 8, 20.0)
    assert [window.throughput_infer_per_sec for window in windows] == [0.0 if n == pause else 400.0 for n in range(8)]
    assert (windows[pause].requests, windows[pause].stable, windows[pause].latency_p95_ms) == (0, True, None)
    trial, table = Trial(0, Candidate(8)), TrialsTable(tmp_path / "trials.csv", "m", {})
    for server in range(1, LOOKS[0] + 1):
        for window in windows:
            fresh = FreshServer(server, 0.005)
            table.append(trial, LOAD, window, fresh)
            trial = trial.with_row(LOAD, window, fresh)
    servers = server_windows(trial, LOAD)
    assert table.read() == [trial], "no window was left out"
    assert [len(windows_of_server) for windows_of_server in servers] == [8] * LOOKS[0]

    def verdict(bounds: dict[str, float]) -> Verdict:
        sla = Sla.from_bounds(bounds)
        return judge_sla(
            servers, sla, server_spreads([servers], sla.bounded_latencies), SequentialTest(0.005)
        ).verdict

    assert verdict({"throughput": 350.0}) is not Verdict.PASS, "7 of 8 windows served 400"
    assert verdict({"throughput": 250.0}) is Verdict.PASS
    assert verdict({"p95": 20.0}) is Verdict.PASS
    assert verdict({"avg": 20.0}) is Verdict.PASS


def test_no_answers_are_an_error() -> None:
    with pytest.raises(NoAnswersError, match=r"no request was answered within 1 s at concurrency 3$"):
        windows_of(record(np.array([-100.0]), 3.0), 1.0, 2)


def test_a_failed_request_is_reported_with_the_servers_message() -> None:
    with pytest.raises(MeasurementError, match=r"^a request failed at concurrency 3: no such model$"):
        windows_of(record(np.array([5.0]), 3.0, error="no such model"), 1.0, 1)


def test_a_request_that_the_queue_refused_names_the_option_that_permits_it() -> None:
    refused = record(np.array([5.0]), 3.0, error="[request id: <id_unknown>] Request timeout expired")
    expected = r"Request timeout expired; `tune --max-error-rate SHARE` permits the queue to refuse a share .*$"
    with pytest.raises(MeasurementError, match=expected):
        windows_of(refused, 1.0, 1)


@pytest.mark.parametrize(("cpu_share", "stable"), [(SATURATED_CPU_SHARE, True), (0.97, False)])
def test_windows_of_a_saturated_client_do_not_count_whatever_their_latencies_are(
    cpu_share: float, stable: bool
) -> None:
    """Some windows meet the bound and others miss it; their own latencies must not decide which of them count."""
    latencies_ms = np.repeat([3.0, 40.0, 3.0, 40.0], 125)
    send_record = record(np.linspace(0, 999, 500), latencies_ms, cpu_share=cpu_share)
    windows = windows_of(send_record, 1.0, 4, 20.0)
    assert [window.latency_p95_ms for window in windows] == [3.0, 40.0, 3.0, 40.0]
    assert {window.stable for window in windows} == {stable}
    assert all(stable or "used 97 % of a core" in window.reason for window in windows)


@pytest.mark.parametrize(("p95s_ms", "stable"), [((18.0, 22.0, 19.0), True), ((12.0, 30.0, 15.0), False)])
def test_thirds_that_disagree_about_the_bound_are_not_stable(p95s_ms: tuple[float, ...], stable: bool) -> None:
    send_record = record(np.linspace(0, 999, 600), np.repeat(p95s_ms, 200))
    sla = Sla.from_bounds({"p95": 20.0})
    (result,) = summarize_closed_loop(send_record, PlannedLoad(LOAD, 1.0, SIZES, sla=sla), MAX_SPREAD)
    assert result.stable is stable
    assert result.stable is (result.reason == "")


# -- the client against a server in this process ----------


class CountingModel:
    """A model that counts the requests and those in flight, and answers after ``seconds``."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.requests, self.in_flight, self.most = seconds, 0, 0, 0
        self._lock = threading.Lock()

    def __call__(self, feeds: dict[str, Array]) -> Mapping[str, Array]:
        with self._lock:
            self.requests += 1
            self.in_flight += 1
            self.most = max(self.most, self.in_flight)
        time.sleep(self.seconds)
        with self._lock:
            self.in_flight -= 1
        return {"y": feeds["x"]}


@pytest.fixture
def generator(random_requests: Path, tmp_path: Path) -> ClosedLoopGenerator:
    return ClosedLoopGenerator(
        log=tmp_path / "client.log", input_data=random_requests, sla=Sla.from_bounds({"p95": 60_000.0})
    )


def test_the_concurrency_is_kept_and_all_requests_are_answered(generator: ClosedLoopGenerator) -> None:
    model, client = CountingModel(seconds=0.02), KeptRecords()
    with FakeInferenceServer(model).serving() as endpoint:
        result = replace(generator, run_client=client).measure(endpoint, LOAD, seconds=0.8)
    assert model.most == LOAD.concurrency
    assert model.in_flight == 0
    assert not_none(result.latency_avg_ms) >= 20
    assert result.throughput_infer_per_sec == pytest.approx(not_none(result.requests) * LOAD.request_batch_size / 0.8)
    (send_record,) = client.records
    assert np.all(send_record.answered_ns != NEVER)
    sent = np.searchsorted(send_record.sent_ns, send_record.sent_ns, side="right")
    answered = np.searchsorted(np.sort(send_record.answered_ns), send_record.sent_ns, side="right")
    assert set((sent - answered).tolist()) == {LOAD.concurrency}, "each request that is sent replaces an answered one"


def test_windows_are_cut_from_one_load(generator: ClosedLoopGenerator) -> None:
    model = CountingModel(seconds=0.002)
    with FakeInferenceServer(model).serving() as endpoint:
        windows = generator.measure_windows(endpoint, LOAD, 0.2, 4)
    assert len(windows) == 4
    assert len((generator.log.parent / "commands.log").read_text().splitlines()) == 1, "one start of the client"
    counted = sum(window.requests or 0 for window in windows)
    assert 0 < counted < model.requests - WARM_UPS, "requests of the lead-in and of the end do not count"
    # a machine that pauses for a whole window leaves it without answers
    answered = [window for window in windows if window.requests]
    assert all(window.latency_sketch and window.requests_over_ms == "60000:0" for window in answered)
    assert {path.name for path in generator.log.parent.iterdir()} == {"client.log", "commands.log"}


def test_a_model_slower_than_the_windows_is_measured_for_longer(generator: ClosedLoopGenerator) -> None:
    with FakeInferenceServer(CountingModel(seconds=0.5)).serving() as endpoint:
        result = generator.measure(endpoint, LOAD, seconds=0.1)
    assert not_none(result.latency_p50_ms) >= 500


@pytest.mark.parametrize(("bound_ms", "is_slow"), [(20.0, True), (30_000.0, False)])
def test_a_request_that_is_sent_alone_may_take_longer_than_a_large_bound(
    bound_ms: float, *, is_slow: bool, tmp_path: Path
) -> None:
    plan = SendPlan(("a:1",), bound_ms, concurrency=1, seconds=0.5)
    network = SimulatedNetwork(lambda arrived_seconds: arrived_seconds + WARM_UP_SECONDS + 1.0)
    send_record = run_in_this_process(ClosedLoopClient(plan, [b""], (), None, network), tmp_path)
    assert send_record.hangs == is_slow
    assert send_record.error == ("the server did not answer a single request within 15 s" if is_slow else "")


def test_requests_in_flight_are_answered_after_a_failure(generator: ClosedLoopGenerator, tmp_path: Path) -> None:
    """The end of the connection would cancel them, which can crash the server."""
    requests = itertools.count()

    def refuse_one(feeds: dict[str, Array]) -> Mapping[str, Array]:
        if next(requests) == WARM_UPS:
            raise RuntimeError("index out of range")
        time.sleep(0.2)
        return {"y": feeds["x"]}

    with FakeInferenceServer(refuse_one).serving() as endpoint:
        messages = planned_task(generator, endpoint, LOAD).requests.messages
        plan = SendPlan((endpoint.grpc,), 1.0, concurrency=3, seconds=30.0)
        send_record = run_in_this_process(ClosedLoopClient(plan, messages), tmp_path)
    assert "index out of range" in send_record.error
    assert np.any(send_record.answered_ns == NEVER), "they do not count"
    assert (tmp_path / ALL_ANSWERED_FILE).exists()


@pytest.mark.parametrize("load", [LOAD, LoadPoint(1, request_rate=400.0)])
def test_all_entries_of_a_data_file_are_sent(
    generator: ClosedLoopGenerator, load: LoadPoint, random_requests: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data.json"
    entries = ", ".join(f'{{"x": [{number}, {number}]}}' for number in range(301))
    data.write_text(f'{{"data": [{entries}]}}')
    sender = (
        OpenLoopGenerator(log=tmp_path / "client.log", input_data=random_requests) if load.request_rate else generator
    )
    sent_values: set[float] = set()

    def record_entries(feeds: dict[str, Array]) -> Mapping[str, Array]:
        sent_values.update(feeds["x"][:, 0].tolist())
        return {"y": feeds["x"]}

    with FakeInferenceServer(record_entries).serving() as endpoint:
        for seconds in (0.8, 8.0, 60.0):  # until the machine has had time for all of them
            with contextlib.suppress(LateError):  # on a busy machine
                replace(sender, input_data=data).measure(endpoint, load, seconds)
            if len(sent_values) == 301:
                break
    assert len(sent_values) == 301


@pytest.mark.parametrize(
    ("entry_count", "request_batch_size", "message_count"),
    [
        (3, 2, 3),  # they repeat after two passes
        (1031, 8, 258),  # two passes; they would repeat after 1,031 requests, which are eight passes
        (1031, 1, 1031),
    ],
)
def test_a_data_file_gives_few_requests_with_all_entries(
    generator: ClosedLoopGenerator, entry_count: int, request_batch_size: int, message_count: int, tmp_path: Path
) -> None:
    data = tmp_path / "data.json"
    data.write_text(json.dumps({"data": [{"x": [number, number]} for number in range(entry_count)]}))
    with FakeInferenceServer(lambda feeds: {"y": feeds["x"]}).serving() as endpoint:
        load = replace(LOAD, request_batch_size=request_batch_size)
        messages = planned_task(replace(generator, input_data=data), endpoint, load).requests.messages
    assert len(messages) == message_count
    sent = [np.frombuffer(ModelInferRequest.FromString(m).raw_input_contents[0], np.float32)[::2] for m in messages]
    times_sent = np.bincount(np.concatenate(sent).astype(int), minlength=entry_count)
    assert len(times_sent) == entry_count
    assert times_sent.min() >= 1
    assert times_sent.max() - times_sent.min() <= 1


def test_large_requests_from_a_few_entries_have_the_limit_of_generated_ones(
    generator: ClosedLoopGenerator, tmp_path: Path
) -> None:
    """41 entries give 41 different requests of 32 samples, which would take 105 MB."""
    data = tmp_path / "data.json"
    data.write_bytes(to_json([{"x": np.full(20_000, number, np.float32)} for number in range(41)]))
    with FakeInferenceServer(lambda feeds: feeds, inputs=(("x", "FP32", (-1, -1)),)).serving() as endpoint:
        load = replace(LOAD, request_batch_size=32)
        messages = planned_task(replace(generator, input_data=data), endpoint, load).requests.messages
    assert MAX_SENT_BYTES / 2 < sum(map(len, messages)) < 1.5 * MAX_SENT_BYTES


def test_a_large_first_entry_leaves_no_others_out(
    generator: ClosedLoopGenerator, random_requests: Path, tmp_path: Path
) -> None:
    large_value = {"content": [0] * 500_000, "shape": [500_000]}
    small_values = [{"content": [number], "shape": [1]} for number in range(299)]
    data = tmp_path / "data.json"
    data.write_text(json.dumps({"data": [{"x": value} for value in (large_value, *small_values)]}))
    with FakeInferenceServer(lambda feeds: feeds, inputs=(("x", "FP32", (-1, -1)),)).serving() as endpoint:
        open_loop = OpenLoopGenerator(log=tmp_path / "client.log", input_data=random_requests)
        for sender, load in ((generator, LoadPoint(1, 3)), (open_loop, LoadPoint(1, request_rate=100.0))):
            messages = planned_task(replace(sender, input_data=data), endpoint, load).requests.messages
            assert len(messages) == len(set(messages)) == 300


def test_a_server_that_stops_answering_is_reported(tmp_path: Path) -> None:
    requests = itertools.count(1)

    def hang(arrived_seconds: float) -> float:
        return arrived_seconds + 0.01 if next(requests) <= WARM_UPS + 5 else math.inf

    plan = SendPlan(("a:1",), 1.0, concurrency=3, seconds=30.0)
    send_record = run_in_this_process(ClosedLoopClient(plan, [b""], (), None, SimulatedNetwork(hang)), tmp_path)
    assert send_record.hangs
    assert send_record.error == "no answer within 10 s"
    assert np.sum(send_record.answered_ns != NEVER) == 5
    assert len(send_record.sent_ns) == 5 + plan.concurrency
    assert not (tmp_path / ALL_ANSWERED_FILE).exists()


def test_a_server_that_never_answers_counts_as_crashed(generator: ClosedLoopGenerator) -> None:
    no_times = np.array([], np.int64)
    silent_record = SendRecord(no_times, no_times, no_times, ended_ns=10**9)
    with (
        FakeInferenceServer(CountingModel()).serving() as endpoint,
        pytest.raises(ServerCrashed, match="no request was answered within"),
    ):
        replace(generator, run_client=lambda *_: (silent_record, 1.0)).measure(endpoint, LOAD, seconds=0.1)


def test_requests_go_to_the_server_with_the_fewest_unanswered_ones(generator: ClosedLoopGenerator) -> None:
    """A server that answers nothing keeps half of the requests in flight, and the other one gets all that follow."""
    concurrency, following = 4, 10
    counts, released = [0, 0], threading.Event()
    sent_to_stalled: list[int] = []

    def count_and_answer(feeds: dict[str, Array]) -> Mapping[str, Array]:
        counts[0] += 1
        if counts[0] == WARM_UPS + concurrency // 2 + following:
            sent_to_stalled.append(counts[1] - WARM_UPS)
            released.set()
        return {"y": feeds["x"]}

    def stall(feeds: dict[str, Array]) -> Mapping[str, Array]:
        counts[1] += 1
        assert counts[1] <= WARM_UPS or released.wait(ANSWER_SECONDS)
        return {"y": feeds["x"]}

    with (
        FakeInferenceServer(count_and_answer).serving() as answering,
        FakeInferenceServer(stall).serving() as stalled,
    ):
        load = LoadPoint(1, concurrency=concurrency)
        measured = generator.measure(replace(answering, replicas=(stalled,)), load, seconds=1.0)
    assert sent_to_stalled[0] <= concurrency // 2 <= counts[1] - WARM_UPS
    assert measured.requests
    assert measured.requests <= sum(counts)


def test_servers_with_equally_many_requests_take_turns(tmp_path: Path) -> None:
    plan = SendPlan(("a:1", "b:1", "c:1"), 0.0, concurrency=1, seconds=1.0)
    network = SimulatedNetwork(lambda arrived_seconds: arrived_seconds + 0.01)
    run_in_this_process(ClosedLoopClient(plan, [b""], (), None, network), tmp_path)
    assert [address for address, _ in network.calls[:90]] == ["a:1", "b:1", "c:1"] * 30
