"""Test the measurement from an open-loop record: latencies, late requests, overloads and stability."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from objectives.metrics import Measurement
from objectives.sla import Sla
from optimizer.core.errors import MeasurementError
from optimizer.core.measurement_windows import MAX_SPREAD
from optimizer.core.trial import LoadPoint
from optimizer.measure.load_client.client_files import NEVER, SendPlan, SendRecord, StreamPlan, write_record
from optimizer.measure.load_client.generators import OpenLoopGenerator
from optimizer.measure.load_client.measured_requests import LEAD_IN_SECONDS, PlannedLoad
from optimizer.measure.load_client.open_loop import LATE_MS, LateError, lateness_note, summarize_open_loop
from tests.inference_server import FakeInferenceServer
from tests.load_clients import SimulatedClient

RATE, SECONDS = 1000.0, 2.0 + LEAD_IN_SECONDS
LOAD = LoadPoint(request_batch_size=4, request_rate=RATE)
SIZES = np.array([4])
PLANNED = np.arange(round(RATE * SECONDS))
COUNTED = PLANNED >= RATE * LEAD_IN_SECONDS
MS = 1_000_000
START_NS = 1_700_000_000 * 10**9


def record(latency_ms: float | np.ndarray = 5.0, late_ms: float | np.ndarray = 0.0) -> SendRecord:
    """Return a record of requests sent ``late_ms`` and answered ``latency_ms`` after their planned times."""
    planned = (PLANNED * 1e9 / RATE).astype(np.int64)
    answered = (planned + latency_ms * np.full(len(planned), MS)).astype(np.int64)
    sent = (planned + late_ms * np.full(len(planned), MS)).astype(np.int64)
    return SendRecord(planned, sent, answered, int(answered.max()))


def summarize(send_record: SendRecord, bound_ms: float = 20.0, spread_limit: float = MAX_SPREAD) -> Measurement:
    sla = Sla.from_bounds({"p95": bound_ms}) if bound_ms else Sla()
    (result,) = summarize_open_loop(send_record, PlannedLoad(LOAD, SECONDS, SIZES, sla=sla), spread_limit)
    return result


def test_latency_counts_from_the_planned_time() -> None:
    result = summarize(record(latency_ms=np.where(np.arange(len(PLANNED)) % 10 == 0, 9.0, 3.0), late_ms=0.9))
    assert (result.latency_p50_ms, result.latency_p90_ms) == (3.0, 3.0)
    assert (result.latency_p95_ms, result.latency_p99_ms) == (9.0, 9.0)
    assert result.latency_avg_ms == pytest.approx(3.6)
    assert result.requests == 2000
    assert result.throughput_infer_per_sec == pytest.approx(4000)
    assert (result.stable, result.reason) == (True, "")


@pytest.mark.parametrize("parts", [1, 2])
def test_throughput_counts_the_samples_that_were_answered(parts: int) -> None:
    sizes = np.array([1, 1, 1, 9])  # requests with nine samples are never answered
    send_record = record()
    send_record.answered_ns[np.resize(sizes, len(PLANNED)) == 9] = NEVER
    results = summarize_open_loop(send_record, PlannedLoad(LOAD, SECONDS, sizes), math.inf, parts)
    assert len(results) == parts
    for result in results:
        assert result.throughput_infer_per_sec == pytest.approx(750, rel=0.01)
        assert result.requests == pytest.approx(1500 / parts, abs=1)


@pytest.mark.parametrize(("serves", "throughput"), [(500, 500), (950, 950), (1100, 1000)])
def test_a_rate_above_the_capacity_shows_the_capacity_although_all_requests_are_answered(
    serves: float, throughput: float
) -> None:
    """The server answers ``serves`` requests a second, one after the other, and the client waits for all answers."""
    send_record = record()
    starts = np.maximum(send_record.planned_ns, 1e9 * PLANNED / serves)
    answered = (starts + 1e9 / serves).astype(np.int64)
    result = summarize(replace(send_record, answered_ns=answered, ended_ns=int(answered.max())), bound_ms=1e4)
    assert not result.overloaded
    assert result.requests == 2000
    assert result.throughput_infer_per_sec == pytest.approx(4 * throughput, rel=0.002)


def test_the_lead_in_does_not_count() -> None:
    assert summarize(record(latency_ms=np.where(COUNTED, 3.0, 300.0))).latency_p99_ms == 3.0


def judge_bounds(send_record: SendRecord, **bounds_ms: float) -> Measurement:
    (result,) = summarize_open_loop(
        send_record, PlannedLoad(LOAD, SECONDS, SIZES, sla=Sla.from_bounds(bounds_ms)), MAX_SPREAD
    )
    return result


def paused(pause: int, *starts: int, latency_ms: float = 3.0) -> SendRecord:
    """Return a record of a client that pauses for ``pause`` ms at each of ``starts`` (ms after the lead-in) and then
    sends the overdue requests at once; each takes ``latency_ms`` after that."""
    lateness = np.zeros(len(PLANNED))
    for start in starts:
        first = round(RATE * LEAD_IN_SECONDS) + start
        lateness[first : first + pause] = np.arange(pause, 0, -1)
    return record(latency_ms + lateness, lateness)


def test_late_requests_are_counted_and_do_not_void_a_bound_that_is_met() -> None:
    result = judge_bounds(paused(41, 1000), p95=20.0)
    assert result.stable, result.reason
    assert result.late_request_share == pytest.approx(0.02)
    assert result.send_lateness_p99_ms == 21.0
    assert (result.latency_p95_ms, result.latency_p99_ms) == (3.0, 24.0), "latency includes the lateness"
    assert judge_bounds(record(), p95=20.0).late_request_share == 0


def test_lateness_that_decides_the_verdict_voids_the_measurement() -> None:
    expected_text = (
        r"at 1,000 requests/s 2\.0 % were sent more than 1 ms late, by up to 41 ms; p99 <= 20 ms is missed, "
        r"but could be met without that lateness; lower the rate"
    )
    with pytest.raises(LateError, match=expected_text):
        judge_bounds(paused(41, 1000), p99=20.0)


def test_a_bound_that_is_missed_without_lateness_too_is_a_result() -> None:
    result = judge_bounds(paused(41, 1000, latency_ms=25.0), p95=20.0)
    assert result.latency_p95_ms == 25.0
    assert result.late_request_share == pytest.approx(0.02)


def test_one_bound_that_is_missed_in_any_case_is_a_result() -> None:
    assert judge_bounds(paused(41, 1000), p99=20.0, p50=2.0).latency_p50_ms == 3.0


def test_requests_that_queue_behind_late_ones_could_have_been_faster() -> None:
    """After a pause of 60 ms its requests arrive together, and those of the next 60 ms queue behind them."""
    ms_since_pause = np.arange(len(PLANNED)) - 1000
    is_paused, is_behind = (
        (ms_since_pause >= 0) & (ms_since_pause < 60),
        (ms_since_pause >= 60) & (ms_since_pause < 120),
    )
    lateness = np.where(is_paused, 60.0 - ms_since_pause, 0.0)
    latency = np.where(is_paused, 110.0 - 0.5 * ms_since_pause, np.where(is_behind, 60.0, 3.0))
    send_record = record(latency, lateness)
    assert np.mean(latency[COUNTED] > 20) == pytest.approx(0.06)
    assert np.mean(lateness[COUNTED] > LATE_MS) < 0.05
    with pytest.raises(LateError, match="could be met"):
        judge_bounds(send_record, p95=20.0)
    on_time = judge_bounds(replace(send_record, sent_ns=send_record.planned_ns), p95=20.0)
    assert on_time.latency_p95_ms == 60.0, "the same latencies of requests that were sent on time are the server's"


def test_a_client_that_sends_less_than_the_rate_voids_a_bound_that_is_met() -> None:
    growing = 0.05 * np.arange(len(PLANNED))  # it sends 950 requests a second instead of 1,000
    with pytest.raises(LateError, match=r"cannot keep up: .*by up to 110 ms"):
        judge_bounds(record(growing + 3.0, growing), p95=500.0)


def test_a_pause_of_the_client_at_the_end_is_not_a_lower_rate() -> None:
    remaining_ms = (PLANNED[-1] + 1.0) - PLANNED
    pause = np.where(remaining_ms <= 60, remaining_ms, 0.0)
    assert judge_bounds(record(pause + 3.0, pause), p95=20.0).stable


def test_windows_that_differ_only_by_lateness_agree() -> None:
    result = judge_bounds(paused(61, 300), p95=20.0)
    assert result.stable, result.reason
    slower = record(paused(61, 300).answered_ns / MS - PLANNED)
    assert judge_bounds(slower, p95=20.0).reason == "unstable: p95 between 3 and 31 ms"


@pytest.mark.parametrize(("pause", "stable"), [(5, True), (61, False)])
def test_without_a_bound_a_p95_that_is_mostly_lateness_is_not_stable(pause: int, stable: bool) -> None:
    result = judge_bounds(paused(pause, *range(100, 2000, 300), latency_ms=9.0))
    assert result.stable is stable
    assert stable or result.reason == "unstable: p95 56 ms, of which late sending may be 47 ms"


def test_a_note_counts_late_requests_and_their_lateness() -> None:
    assert lateness_note([Measurement(requests=100), judge_bounds(record(), p95=20.0)]) is None
    note = str(lateness_note([judge_bounds(record(), p95=20.0), judge_bounds(paused(41, 1000), p95=20.0)]))
    assert note.startswith("the load generator sent 1 % of the requests more than 1 ms late, in one measurement ")
    assert "21 ms" in note


def test_a_client_that_lost_its_plan_voids_the_measurement() -> None:
    send_record = record()
    lost = PLANNED > 900
    send_record = replace(
        send_record,
        sent_ns=np.where(lost, NEVER, send_record.sent_ns),
        answered_ns=np.where(lost, NEVER, send_record.answered_ns),
        ended_ns=1400 * MS,
    )
    with pytest.raises(LateError, match=r"cannot keep up: .* were sent more than 1 ms late"):
        summarize(send_record)


def overloaded(cpu_share: float = 0.3) -> SendRecord:
    """Return a record where half of the requests until 1.2 s are answered in order and a tenth was sent late."""
    send_record = record(late_ms=np.where(np.arange(len(PLANNED)) % 10 == 0, 50.0, 0.0))
    sent, answered = PLANNED < 1200, PLANNED < 600
    return replace(
        send_record,
        sent_ns=np.where(sent, send_record.sent_ns, NEVER),
        answered_ns=np.where(answered, 2 * send_record.planned_ns + 1, NEVER),
        ended_ns=1200 * MS,
        overload="overloaded: 600 requests unanswered after 1.2 s, the oldest for 0.60 s",
        cpu_share=cpu_share,
    )


def test_an_overload_counts_the_age_of_unanswered_requests() -> None:
    result = summarize(overloaded())
    assert not result.stable
    assert result.overloaded
    assert result.reason.startswith("overloaded: 600 requests")
    assert result.throughput_infer_per_sec == pytest.approx(4 * 500 / 1.0)  # the answers within the second
    assert result.requests == 500
    assert result.latency_p95_ms == pytest.approx(575, abs=2)
    assert result.latency_p50_ms == pytest.approx(350, abs=2)


def test_parts_follow_each_other_in_time() -> None:
    planned = PlannedLoad(LOAD, SECONDS, SIZES, sla=Sla())
    parts = summarize_open_loop(replace(record(), start_unix_ns=START_NS), planned, math.inf, 4)
    begin = START_NS / 1e9 + LEAD_IN_SECONDS
    assert [part.begin_unix_seconds for part in parts] == [begin, begin + 0.5, begin + 1.0, begin + 1.5]
    assert [part.end_unix_seconds for part in parts] == [begin + 0.5, begin + 1.0, begin + 1.5, begin + 2.0]
    assert summarize(record()).begin_unix_seconds is None


def test_answers_after_the_planned_time_show_the_capacity() -> None:
    """A request takes half a second, and the client waits for 20 s before it gives up."""
    numbers = np.arange(len(PLANNED))
    slow = replace(
        record(),
        answered_ns=np.where(numbers < 40, 500 * MS * (numbers + 1), NEVER),
        ended_ns=20_000 * MS + 1,
        overload="overloaded: 2,160 requests unanswered after 20.0 s, the oldest for 19.96 s",
    )
    result = summarize(replace(slow, start_unix_ns=START_NS))
    assert result.throughput_infer_per_sec == pytest.approx(4 * 2, rel=0.02)
    assert result.begin_unix_seconds == START_NS / 1e9 + LEAD_IN_SECONDS
    assert result.end_unix_seconds == START_NS / 1e9 + 20, "the time in which the answers were counted"


def test_a_saturated_client_voids_an_overload() -> None:
    with pytest.raises(LateError, match="used 97 % of a core"):
        summarize(overloaded(cpu_share=0.97))


def test_no_answers_are_an_error() -> None:
    silent = replace(overloaded(), answered_ns=np.full(len(PLANNED), NEVER))
    with pytest.raises(MeasurementError, match=r"no request was answered within 1\.2 s at 1,000 requests/s"):
        summarize(silent)


def test_a_failed_request_is_reported_with_the_servers_message() -> None:
    with pytest.raises(MeasurementError, match="a request failed at 1,000 requests/s: no such model"):
        summarize(replace(record(), error="no such model"))


THIRD = 2000 // 3


def record_of_thirds(*p95s_ms: float) -> SendRecord:
    latencies = np.concatenate([np.zeros(200), *([ms] * THIRD for ms in p95s_ms), [p95s_ms[-1]] * 2])
    return record(latency_ms=latencies)


@pytest.mark.parametrize(
    ("p95s_ms", "stable"),
    [
        ((18, 22, 19), True),  # close to each other
        ((5, 12, 6), True),  # different, but all meet the bound
        ((60, 25, 90), True),  # different, but all miss it
        ((12, 30, 15), False),
        ((4, 8, 16), False),  # meets the bound, but keeps rising
    ],
)
def test_thirds_that_disagree_about_the_bound_are_not_stable(p95s_ms: tuple[float, ...], stable: bool) -> None:
    result = summarize(record_of_thirds(*p95s_ms))
    assert result.stable is stable
    assert result.stable is (result.reason == "")
    assert summarize(record_of_thirds(*p95s_ms), spread_limit=math.inf).stable


def test_thirds_are_compared_with_each_bound() -> None:
    """All miss the bound on p50, but they disagree about that on p99."""
    sla = Sla.from_bounds({"p50": 5.0, "p99": 80.0})
    (result,) = summarize_open_loop(
        record_of_thirds(20, 90, 60), PlannedLoad(LOAD, SECONDS, SIZES, sla=sla), MAX_SPREAD
    )
    assert result.reason == "unstable: p95 between 20 and 90 ms"


def test_thirds_are_compared_with_the_quantile_of_the_bound() -> None:
    """All have the same p95, but they disagree about the bound on p50."""
    latencies = np.concatenate([np.zeros(200), *([ms, ms, ms, 30.0] * (THIRD // 4) for ms in (4.0, 12.0, 4.0))])
    send_record = record(latency_ms=np.resize(latencies, len(PLANNED)))
    sla = Sla.from_bounds({"p50": 8.0})
    (result,) = summarize_open_loop(send_record, PlannedLoad(LOAD, SECONDS, SIZES, sla=sla), MAX_SPREAD)
    assert result.reason == "unstable: p50 between 4 and 12 ms"


@dataclass
class PausingServer:
    """A server that takes 1 ms for a request, but stops for 0.9 s once, so that all later requests wait."""

    requests: int = 0
    free_seconds: float = 0.0

    def __call__(self, arrived_seconds: float) -> float:
        self.requests += 1
        self.free_seconds = max(self.free_seconds, arrived_seconds) + (0.9 if self.requests == 40 else 0.001)
        return self.free_seconds


@pytest.mark.parametrize(("bounds", "overloaded"), [({"p50": 5.0}, True), ({"p50": 5.0, "p99": 2000.0}, False)])
def test_a_pause_is_no_overload_if_the_largest_bound_permits_it(
    bounds: dict[str, float], overloaded: bool, random_requests: Path, tmp_path: Path
) -> None:
    client = SimulatedClient(PausingServer())
    generator = OpenLoopGenerator(
        log=tmp_path / "log", input_data=random_requests, sla=Sla.from_bounds(bounds), run_client=client
    )
    with FakeInferenceServer(lambda feeds: feeds).serving() as endpoint:
        result = generator.measure(endpoint, LoadPoint(1, request_rate=50.0), 2.0)
    assert result.overloaded is overloaded
    assert result.latency_p50_ms == pytest.approx(1.0)
    assert result.latency_p99_ms is not None
    assert result.latency_p99_ms > 500


@pytest.mark.parametrize("seconds", [0.001, 0.5])
def test_a_warm_up_without_a_rate_has_one_request_in_flight(
    seconds: float, random_requests: Path, tmp_path: Path
) -> None:
    """A request counts even if it takes longer than the warm-up."""
    client = SimulatedClient(lambda arrived_seconds: arrived_seconds + seconds)
    generator = OpenLoopGenerator(log=tmp_path / "log", input_data=random_requests, run_client=client)
    with FakeInferenceServer(lambda feeds: feeds).serving() as endpoint:
        result = generator.warm_up(endpoint, LoadPoint(4, concurrency=1))
    assert result is not None
    assert result.throughput_infer_per_sec == pytest.approx(4 / seconds, rel=0.01)
    assert result.latency_p95_ms == pytest.approx(1000 * seconds, rel=0.01)


def test_a_record_is_divided_into_windows_in_order() -> None:
    growing = np.concatenate([np.zeros(200), np.repeat([5.0, 10.0, 15.0, 20.0], 500)])
    windows = summarize_open_loop(
        record(latency_ms=growing), PlannedLoad(LOAD, SECONDS, SIZES, sla=Sla.from_bounds({"p95": 30.0})), math.inf, 4
    )
    assert [window.latency_p95_ms for window in windows] == [5.0, 10.0, 15.0, 20.0]
    assert [window.requests for window in windows] == [500] * 4
    assert all(window.stable and window.throughput_infer_per_sec == pytest.approx(4000) for window in windows)


def test_an_overload_gives_one_window() -> None:
    (result,) = summarize_open_loop(
        overloaded(), PlannedLoad(LOAD, SECONDS, SIZES, sla=Sla.from_bounds({"p95": 20.0})), math.inf, 4
    )
    assert not result.stable


def test_a_window_without_planned_requests_counts() -> None:
    """A low rate may have no request in a window."""
    early = PLANNED < RATE * (LEAD_IN_SECONDS + 1.0)
    send_record = record()
    sparse_record = SendRecord(
        send_record.planned_ns[early], send_record.sent_ns[early], send_record.answered_ns[early], 2300 * MS
    )
    first, second = summarize_open_loop(sparse_record, PlannedLoad(LOAD, SECONDS, SIZES), math.inf, 2)
    assert first.requests == 1000
    assert first.throughput_infer_per_sec == pytest.approx(4000)
    assert (second.requests, second.throughput_infer_per_sec, second.stable) == (0, 0.0, True)


def test_the_pause_after_the_last_request_counts() -> None:
    """A low rate may have no request in the last seconds, and the client ends with the last answer."""
    early = PLANNED < RATE * (LEAD_IN_SECONDS + 1.0)
    send_record = record()
    times = (send_record.planned_ns[early], send_record.sent_ns[early], send_record.answered_ns[early])
    result = summarize(SendRecord(*times, ended_ns=int(times[2].max())), spread_limit=math.inf)
    assert result.requests == 1000
    assert result.throughput_infer_per_sec == pytest.approx(2000)
    assert result.goodput_infer_per_sec == pytest.approx(2000)


def test_a_time_without_planned_requests_is_an_error() -> None:
    early = PLANNED < RATE * LEAD_IN_SECONDS
    send_record = record()
    sent = SendRecord(
        send_record.planned_ns[early],
        send_record.sent_ns[early],
        send_record.answered_ns[early],
        send_record.ended_ns,
    )
    with pytest.raises(MeasurementError, match="no request was due"):
        summarize(sent)


def test_without_a_bound_thirds_must_agree() -> None:
    assert not summarize(record_of_thirds(5, 12, 6), bound_ms=0.0).stable


def test_a_third_without_a_request_is_not_stable() -> None:
    send_record = record()
    is_kept = (PLANNED < 860) | (PLANNED >= 1540)
    thinned_record = SendRecord(
        send_record.planned_ns[is_kept],
        send_record.sent_ns[is_kept],
        send_record.answered_ns[is_kept],
        send_record.ended_ns,
    )
    assert not summarize(thinned_record).stable


@pytest.mark.parametrize("stream", [None, StreamPlan(30.0, fewest_requests=8)])
def test_plan_and_record_are_read_back_from_their_files(stream: StreamPlan | None, tmp_path: Path) -> None:
    plan = SendPlan(("a:8001", "b:8001"), 20.0, concurrency=3, seconds=1.5, stream=stream, sequence_lengths=(2, 1))
    messages = [b"one", b"", b"three\0"]
    plan.write(tmp_path, messages, [0, 5])
    assert SendPlan.read(tmp_path) == (plan, messages, [0, 5])
    times, fields = ([0, 5], [1, 6], [7, NEVER]), {"ended_ns": 9, "error": "é\x1b", "hangs": True, "cpu_share": 0.3}
    write_record(tmp_path, times, fields)
    read_record = SendRecord.read(tmp_path)
    assert [read_record.planned_ns.tolist(), read_record.sent_ns.tolist(), read_record.answered_ns.tolist()] == list(
        times
    )
    assert (
        read_record.ended_ns,
        read_record.overload,
        read_record.error,
        read_record.hangs,
        read_record.cpu_share,
    ) == (9, "", "é\x1b", True, 0.3)
