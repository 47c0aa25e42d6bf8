"""Test the times of the models that serve a request, and which of them limits the throughput."""

from __future__ import annotations

from dataclasses import replace

import pytest

from objectives import model_stats
from objectives.metrics import Measurement
from objectives.step_stats import StepStatistic, to_text
from optimizer.core.candidate import Candidate
from optimizer.core.trial import LoadPoint, Point
from optimizer.results.request_steps import limit_sentence, limiting_step, step_rows, step_times

MS = 1_000_000


def measured(*steps: StepStatistic, throughput: float = 200.0) -> Point:
    """Return a point of 100 requests of two samples: one second at 200 infer/s."""
    m = Measurement(throughput, step_stats=to_text(steps), stable=True)
    return Point(0, Candidate(8), LoadPoint(2, 8), m)


def step(model: str, instances: int, queue_ms: float, compute_ms: float, per_execution: int = 1) -> StepStatistic:
    """Return the counters of 100 requests with these mean times, executed in batches of ``per_execution``."""
    computed_ns = round(100 * compute_ms * MS)
    times_ns = (round(100 * queue_ms * MS), computed_ns, computed_ns // per_execution)
    return StepStatistic(model, instances, 100, 100 // per_execution, *times_ns)


ENSEMBLE = step("chain", 0, 0, 0)


def test_times_are_means_of_a_request_and_instances_share_the_busy_time() -> None:
    first, second = step_times(measured(ENSEMBLE, step("first", 2, 3, 10), step("second", 1, 9, 18, per_execution=2)))
    assert (first.model, first.queue_ms, first.compute_ms, first.own_ms) == ("first", 3, 10, 13)
    assert first.busy_share == pytest.approx(0.5)
    assert second.busy_share == pytest.approx(0.9)
    assert step_rows([second]) == [("second", "1", "90 %", "9.000", "18.000")]


def test_the_saturated_step_with_the_longest_queue_limits() -> None:
    steps = step_times(measured(ENSEMBLE, step("first", 1, 5, 8), step("second", 1, 30, 9), step("third", 8, 0, 70)))
    limit = limiting_step(steps)
    assert limit is not None
    assert limit.model == "second"
    assert limit_sentence(steps) == "second limits the throughput: its instance computed 90 % of the time."


def test_without_waiting_requests_the_longest_step_is_named() -> None:
    steps = step_times(measured(ENSEMBLE, step("first", 1, 0.1, 9), step("second", 1, 0, 1)))
    limit = limiting_step(steps)
    assert limit is not None
    assert (limit.model, limit.is_saturated) == ("first", False)
    assert limit_sentence(steps).endswith("Requests spend most time in first: 9.10 ms.")


@pytest.mark.parametrize(
    ("of_first", "expected"), [(step("first", 1, 5, 9), "first"), (step("first", 1, 0, 5), "caller")]
)
def test_a_model_that_calls_others_limits_only_if_none_of_them_does(of_first: StepStatistic, expected: str) -> None:
    steps = step_times(measured(step("caller", 2, 40, 19), of_first))
    limit = limiting_step(steps)
    assert limit is not None
    assert limit.model == expected
    (caller, first) = steps
    assert caller.calls_others
    assert not first.calls_others
    assert caller.own_ms == pytest.approx(40 + 19 - first.queue_ms - first.compute_ms)
    assert step_rows(steps)[0][0] == "caller (with its calls)"
    if expected == "caller":
        assert "its 2 instances computed or waited for the models that it calls 95 %" in limit_sentence(steps)


def test_each_model_under_load_has_the_times_of_its_own_requests() -> None:
    """The ensemble serves 100 requests of two samples a second, and the other model 25."""
    by_model = model_stats.to_text({"chain": Measurement(200.0), "other": Measurement(50.0)})
    alone = measured(ENSEMBLE, step("first", 2, 3, 10), step("other", 1, 30, 36), throughput=250.0)
    point = replace(alone, measurement=replace(alone.measurement, by_model=by_model))
    first, other = step_times(point)
    assert (first.model, first.queue_ms, other.model, other.queue_ms) == ("first", 3, "other", 30)
    assert [first.busy_share, other.busy_share] == pytest.approx([0.5, 0.9])
    assert not other.calls_others
    assert limit_sentence((first, other)) == "other limits the throughput: its instance computed 90 % of the time."


@pytest.mark.parametrize("point", [measured(), measured(ENSEMBLE, step("first", 1, 1, 1), throughput=0.0)])
def test_times_that_were_not_recorded_are_unknown(point: Point) -> None:
    assert step_times(point) == ()
    assert limiting_step(()) is None
    assert limit_sentence(()) == ""
