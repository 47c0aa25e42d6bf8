"""What is made of the requests' times: latencies from the plan, and measurements that are void or not stable."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from objectives.metrics import Measurement
from optimizer.errors import MeasurementError
from optimizer.load.windows import SPREAD_LIMIT
from optimizer.open_loop.exchange import NEVER, Job, Record
from optimizer.open_loop.judgement import LEAD_IN_SECONDS, LateError, judge
from optimizer.trial import LoadPoint

RATE, SECONDS = 1000.0, 2.0 + LEAD_IN_SECONDS
LOAD = LoadPoint(request_batch_size=4, request_rate=RATE)
SIZES = np.array([4])
PLANNED = np.arange(round(RATE * SECONDS))
COUNTED = PLANNED >= RATE * LEAD_IN_SECONDS
MS = 1_000_000


def record(latency_ms: float | np.ndarray = 5.0, late_ms: float | np.ndarray = 0.0) -> Record:
    """All answered ``latency_ms`` after the plan, and sent ``late_ms`` after it."""
    planned = (PLANNED * 1e9 / RATE).astype(np.int64)
    answered = (planned + latency_ms * np.full(len(planned), MS)).astype(np.int64)
    sent = (planned + late_ms * np.full(len(planned), MS)).astype(np.int64)
    return Record(planned, sent, answered, int(answered.max()))


def judged(happened: Record, bound_ms: float = 20.0, spread_limit: float = SPREAD_LIMIT) -> Measurement:
    (found,) = judge(happened, LOAD, SECONDS, bound_ms, spread_limit, sizes=SIZES)
    return found


def test_latency_counts_from_the_plan() -> None:
    found = judged(record(latency_ms=np.where(np.arange(len(PLANNED)) % 10 == 0, 9.0, 3.0), late_ms=0.9))
    assert (found.latency_p50_ms, found.latency_p90_ms) == (3.0, 3.0)
    assert (found.latency_p95_ms, found.latency_p99_ms) == (9.0, 9.0)
    assert found.latency_avg_ms == pytest.approx(3.6)
    assert found.requests == 2000
    assert found.throughput_infer_per_sec == pytest.approx(4000)
    assert (found.stable, found.reason) == (True, "")


@pytest.mark.parametrize("parts", [1, 2])
def test_throughput_counts_the_samples_that_were_answered(parts: int) -> None:
    sizes = np.array([1, 1, 1, 9])  # each request of nine is never answered
    happened = record()
    happened.answered_ns[np.resize(sizes, len(PLANNED)) == 9] = NEVER
    for found in judge(happened, LOAD, SECONDS, 0.0, math.inf, parts, sizes):
        assert found.throughput_infer_per_sec == pytest.approx(750, rel=0.01)
        assert found.requests == pytest.approx(1500 / parts, abs=1)


def test_the_lead_in_does_not_count() -> None:
    assert judged(record(latency_ms=np.where(COUNTED, 3.0, 300.0))).latency_p99_ms == 3.0


@pytest.mark.parametrize(("share", "void"), [(0.009, False), (0.011, True)])
def test_more_than_a_hundredth_sent_late_voids_the_measurement(share: float, void: bool) -> None:
    late = np.where(COUNTED & (np.cumsum(COUNTED) <= share * 2000), 5.2, 0.1)
    if not void:
        assert judged(record(late_ms=late)).stable
        return
    with pytest.raises(LateError, match=r"at 1,000 requests/s 1\.1% were sent more than 5 ms late .* lower the rate"):
        judged(record(late_ms=late))


def test_what_is_late_depends_on_the_bound() -> None:
    assert judged(record(latency_ms=30, late_ms=24.9), bound_ms=100.0).stable
    with pytest.raises(LateError):
        judged(record(latency_ms=30, late_ms=25.1), bound_ms=100.0)


def test_a_client_that_lost_its_plan_voids_the_measurement() -> None:
    happened = record()
    lost = PLANNED > 900
    happened = replace(
        happened,
        sent_ns=np.where(lost, NEVER, happened.sent_ns),
        answered_ns=np.where(lost, NEVER, happened.answered_ns),
        ended_ns=1400 * MS,
    )
    with pytest.raises(LateError):
        judged(happened)


def overloaded(cpu_share: float = 0.3) -> Record:
    """Half of what was sent until 1.2 s is answered, in order; a tenth was sent late, the server having the CPU."""
    happened = record(late_ms=np.where(np.arange(len(PLANNED)) % 10 == 0, 50.0, 0.0))
    sent, answered = PLANNED < 1200, PLANNED < 600
    return replace(
        happened,
        sent_ns=np.where(sent, happened.sent_ns, NEVER),
        answered_ns=np.where(answered, 2 * happened.planned_ns + 1, NEVER),
        ended_ns=1200 * MS,
        overload="overloaded: 600 requests unanswered after 1.2 s, the oldest for 0.60 s",
        cpu_share=cpu_share,
    )


def test_an_overload_is_measured_with_the_age_of_what_is_unanswered() -> None:
    found = judged(overloaded())
    assert not found.stable
    assert found.reason.startswith("overloaded: 600 requests")
    assert found.throughput_infer_per_sec == pytest.approx(4 * 500 / 1.0)  # as many answers came in the second
    assert found.requests == 500
    assert found.latency_p95_ms == pytest.approx(575, abs=2)
    assert found.latency_p50_ms == pytest.approx(350, abs=2)


def test_a_backlog_may_be_the_clients_own() -> None:
    with pytest.raises(LateError, match="used 97% of a core"):
        judged(overloaded(cpu_share=0.97))


def test_without_an_answer_there_is_no_measurement() -> None:
    silent = replace(overloaded(), answered_ns=np.full(len(PLANNED), NEVER))
    with pytest.raises(MeasurementError, match=r"no request was answered within 1\.2 s at 1,000 requests/s"):
        judged(silent)


def test_a_failed_request_is_told_with_the_servers_words() -> None:
    with pytest.raises(MeasurementError, match="a request failed at 1,000 requests/s: no such model"):
        judged(replace(record(), error="no such model"))


THIRD = 2000 // 3


def in_thirds(*p95s_ms: float) -> Record:
    latencies = np.concatenate([np.zeros(200), *([ms] * THIRD for ms in p95s_ms), [p95s_ms[-1]] * 2])
    return record(latency_ms=latencies)


@pytest.mark.parametrize(
    ("p95s_ms", "stable"),
    [
        ((18, 22, 19), True),  # close to each other
        ((5, 12, 6), True),  # apart, but all meet the bound
        ((60, 25, 90), True),  # apart, but all miss it
        ((12, 30, 15), False),
        ((4, 8, 16), False),  # meets the bound, but not for long
    ],
)
def test_thirds_that_disagree_about_the_bound_are_not_stable(p95s_ms: tuple[float, ...], stable: bool) -> None:
    found = judged(in_thirds(*p95s_ms))
    assert found.stable is stable
    assert found.stable is (found.reason == "")
    assert judged(in_thirds(*p95s_ms), spread_limit=math.inf).stable


def test_a_stretch_is_cut_into_windows_in_the_order_of_time() -> None:
    growing = np.concatenate([np.zeros(200), np.repeat([5.0, 10.0, 15.0, 20.0], 500)])
    found = judge(record(latency_ms=growing), LOAD, SECONDS, 30.0, math.inf, 4, SIZES)
    assert [one.latency_p95_ms for one in found] == [5.0, 10.0, 15.0, 20.0]
    assert [one.requests for one in found] == [500] * 4
    assert all(one.stable and one.throughput_infer_per_sec == pytest.approx(4000) for one in found)


def test_of_an_overload_there_is_one_window() -> None:
    (found,) = judge(overloaded(), LOAD, SECONDS, 20.0, math.inf, 4, SIZES)
    assert not found.stable


def test_a_stretch_in_which_nothing_falls_due_is_told() -> None:
    early = PLANNED < RATE * LEAD_IN_SECONDS
    happened = record()
    sent = Record(happened.planned_ns[early], happened.sent_ns[early], happened.answered_ns[early], happened.ended_ns)
    with pytest.raises(MeasurementError, match="no request fell due"):
        judged(sent)


def test_without_a_bound_thirds_must_agree() -> None:
    assert not judged(in_thirds(5, 12, 6), bound_ms=0.0).stable


def test_a_third_without_a_request_is_not_stable() -> None:
    happened = record()
    kept = (PLANNED < 860) | (PLANNED >= 1540)
    thinned = Record(happened.planned_ns[kept], happened.sent_ns[kept], happened.answered_ns[kept], happened.ended_ns)
    assert not judged(thinned).stable


def test_files_between_the_processes(tmp_path: Path) -> None:
    job, messages = Job("127.0.0.1:8001", 20.0), [b"one", b"", b"three\0"]
    job.write(tmp_path, messages, np.array([0, 5], np.int64))
    assert Job.read(tmp_path) == (job, messages, [0, 5])
    written = replace(overloaded(), error="é\x1b")
    written.write(tmp_path)
    again = Record.read(tmp_path)
    assert np.array_equal(again.answered_ns, written.answered_ns)
    assert (again.overload, again.error, again.ended_ns, again.cpu_share) == (
        written.overload,
        "é\x1b",
        1200 * MS,
        0.3,
    )
