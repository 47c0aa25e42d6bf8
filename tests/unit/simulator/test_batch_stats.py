"""Executions by batch size as text, and the service times that follow from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectives import batch_stats
from objectives.metrics import Measurement
from objectives.sla import Sla
from optimizer.config.problem import Problem
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import Candidate
from optimizer.core.trial import LoadPoint, Point, Trial
from optimizer.search.candidate_selector import CandidateSelector
from optimizer.simulator.calibration import observe_point

ENTRIES = st.tuples(st.integers(1, 2**31 - 1), st.integers(1, 10**9 - 1), st.integers(0, 10**15 - 1))
REPORTED = Measurement(
    100.0,
    latency_avg_ms=40.0,
    latency_p95_ms=60.0,
    queue_ms=20.0,
    compute_input_ms=0.5,
    compute_infer_ms=5.0,
    compute_output_ms=0.5,
    mean_batch_size=4.0,
    requests=50,
    stable=True,
)


@given(st.lists(ENTRIES))
def test_statistics_are_read_as_they_were_written(entries: list[batch_stats.BatchStatistic]) -> None:
    assert batch_stats.from_text(batch_stats.to_text(entries)) == tuple(entries)


@pytest.mark.parametrize(
    "text",
    ["8", "8:3", "8:3:9:1", "0:3:9", "8:0:9", "8:-3:9", "8:3:-9", "8:3:9.5", "8:3:", ":3:9", "a:b:c", "08:3:9",
     "8:3:9,4:1:2", "8 :3:9", "٨:3:9", f"8:3:{10**15}", f"8:{10**9}:9", f"{10**10}:3:9", "9" * 5000],
)  # fmt: skip
def test_invalid_statistics_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="not a list of size:executions:compute_ns, such as 8:90:72000"):
        batch_stats.from_text(f"4:2:50 {text}")


def test_several_recordings_are_summed_by_batch_size() -> None:
    assert batch_stats.sum_by_size([((8, 2, 900), (4, 1, 100)), (), ((12, 1, 50), (8, 3, 600))]) == (
        (4, 1, 100),
        (8, 5, 1500),
        (12, 1, 50),
    )


def point(measurement: Measurement, request_batch_size: int = 2) -> Point:
    return Point(0, Candidate(8, True, instance_count=2), LoadPoint(request_batch_size, 6), measurement)


def test_the_observed_time_is_that_of_the_executions_not_of_the_windows() -> None:
    """Executions are counted over the whole launch, requests only in its windows."""
    seen = observe_point(point(replace(REPORTED, batch_stats="4:40:200000000 8:5:50000000")))
    assert seen is not None
    assert seen.wall_s == pytest.approx((4 * 40 + 8 * 5) / 100)
    assert seen.batches == (
        batch_stats.BatchStatistic(4, 40, 200_000_000),
        batch_stats.BatchStatistic(8, 5, 50_000_000),
    )
    assert (seen.instance_count, seen.concurrency, seen.request_batch_size) == (2, 6, 2)
    assert seen == observe_point(point(replace(REPORTED, batch_stats="4:40:200000000 8:5:50000000", requests=None)))


def test_batches_without_a_compute_time_give_no_service_time() -> None:
    seen = observe_point(point(replace(REPORTED, batch_stats="4:40:200000000 8:5:0")))
    assert seen is not None
    assert seen.batches == (batch_stats.BatchStatistic(4, 40, 200_000_000),)
    assert seen.wall_s == pytest.approx(2.0), "their samples were served too"


WITHOUT_BATCHES = {
    "no time by size": replace(REPORTED, batch_stats="4:40:0"),
    "no time": replace(REPORTED, compute_infer_ms=0.0, compute_input_ms=0.0, compute_output_ms=0.0),
    "no batch size": replace(REPORTED, mean_batch_size=0.0),
    "no throughput": replace(REPORTED, throughput_infer_per_sec=0.0),
    "no requests": replace(REPORTED, requests=None),
}


@pytest.mark.parametrize("case", WITHOUT_BATCHES)
def test_without_batches_there_is_no_observation(case: str) -> None:
    assert observe_point(point(WITHOUT_BATCHES[case])) is None


@pytest.mark.parametrize("case", WITHOUT_BATCHES)
def test_the_search_goes_on_without_observations(case: str) -> None:
    space = SearchSpace((1, 8), (0, 500), instance_count=(1, 2))
    guide = CandidateSelector(Problem("m", space, 1, 16, sla=Sla.from_bounds({"p95": 100.0})))
    tried = Candidate(8, True)
    decision = guide.decide([Trial(0, tried, ((LoadPoint(1, 4), WITHOUT_BATCHES[case]),))], {tried})
    assert decision is not None
    assert decision.candidate != tried
