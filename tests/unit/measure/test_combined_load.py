"""Test the combined measurements and output checks of several models under load at the same time."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace

import pytest

from objectives import model_stats
from objectives.metrics import Measurement
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import DeploymentError, MeasurementError
from optimizer.core.notes import Note, OutputsNotCompared
from optimizer.core.trial import LoadPoint
from optimizer.measure.combined_load import ConcurrentLoadGenerator, ServerProcessesLoadGenerator, combine_models
from optimizer.measure.load_client.open_loop import LateError
from optimizer.measure.output_check import CombinedOutputCheck
from tests.conftest import measurement

TWO_MODELS = Endpoint("a", Candidate(8), concurrent_models=(Endpoint("b", Candidate(4)),))
LOAD = LoadPoint(1, 8)


@dataclass
class MeetingLoadGenerator:
    """A load generator with a fixed result that waits until the other one is called too."""

    answer: Measurement | None
    meeting: threading.Barrier
    requested: list[str] = field(default_factory=list)
    loads: list[LoadPoint] = field(default_factory=list)
    late: int = 0  # measurements that late requests void

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        self.requested.append(endpoint.model)
        self.loads.append(load)
        self.meeting.wait(60)
        self.late -= 1
        if self.late >= 0:
            raise LateError("late")
        if self.answer is None:
            raise MeasurementError("no figures")
        return self.answer

    def measure_windows(self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int) -> list[Measurement]:
        return [self.measure(endpoint, load, seconds)]

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> Measurement | None:
        self.meeting.wait(60)
        return self.answer


def generators_of_two_models(
    a: Measurement | None, b: Measurement | None
) -> tuple[ConcurrentLoadGenerator, MeetingLoadGenerator, MeetingLoadGenerator]:
    meeting = threading.Barrier(2)
    first, second = MeetingLoadGenerator(a, meeting), MeetingLoadGenerator(b, meeting)
    return ConcurrentLoadGenerator({"a": first, "b": second}, {"a": 1.0, "b": 1.0}), first, second


def test_throughputs_are_added_and_the_worst_latency_counts() -> None:
    first_model = replace(measurement(100, 5), begin_unix_seconds=10.2, end_unix_seconds=11.2)
    second_model = replace(measurement(40, 12), begin_unix_seconds=10.1, end_unix_seconds=11.1)
    joint, first, second = generators_of_two_models(first_model, second_model)
    for outcome in (
        joint.measure(TWO_MODELS, LOAD),
        *joint.measure_windows(TWO_MODELS, LOAD, 1.0, 3),
        joint.warm_up(TWO_MODELS, LOAD),
    ):
        assert outcome is not None
        assert outcome.throughput_infer_per_sec == 140
        assert outcome.latency_p95_ms == 12
        assert (outcome.begin_unix_seconds, outcome.end_unix_seconds) == (10.1, 11.2)
        assert outcome.stable
        by_model = model_stats.from_text(outcome.by_model)
        assert {name: values.throughput_infer_per_sec for name, values in by_model.items()} == {"a": 100, "b": 40}
        assert [values.latency_p95_ms for values in by_model.values()] == [5, 12]
    assert (first.requested, second.requested) == (["a"] * 2, ["b"] * 2)


def test_the_counters_of_all_models_are_kept_if_each_has_them() -> None:
    first_model = replace(measurement(100, 5), step_stats="a:0:100:100:0:0:0 step:2:100:10:1:2:3")
    second_model = replace(measurement(40, 12), step_stats="b:1:40:20:4:5:6")
    joint, *_ = generators_of_two_models(first_model, second_model)
    counted = joint.measure(TWO_MODELS, LOAD).step_stats
    assert counted == "a:0:100:100:0:0:0 step:2:100:10:1:2:3 b:1:40:20:4:5:6"
    joint, *_ = generators_of_two_models(first_model, replace(second_model, step_stats=""))
    assert joint.measure(TWO_MODELS, LOAD).step_stats == ""


@pytest.mark.parametrize(("share", "requests"), [(3.0, (3, 24)), (0.5, (1, 4)), (0.1, (1, 1))])
def test_each_model_gets_its_share_of_the_load_and_at_least_one_request(
    share: float, requests: tuple[int, int]
) -> None:
    joint, first, second = generators_of_two_models(measurement(100, 5), measurement(40, 12))
    for load in (LoadPoint(4, 1), LoadPoint(4, 8)):
        replace(joint, shares={"a": 1.0, "b": share}).measure(TWO_MODELS, load)
    assert first.loads == [LoadPoint(4, 1), LoadPoint(4, 8)]
    assert second.loads == [LoadPoint(4, concurrency) for concurrency in requests]


def test_a_rate_is_that_of_all_models_together() -> None:
    joint, first, second = generators_of_two_models(measurement(100, 5), measurement(40, 12))
    replace(joint, shares={"a": 1.0, "b": 3.0}).measure(TWO_MODELS, LoadPoint(4, request_rate=80.0))
    assert (first.loads, second.loads) == ([LoadPoint(4, request_rate=20.0)], [LoadPoint(4, request_rate=60.0)])


def test_a_measurement_that_late_requests_void_is_repeated_for_all_models() -> None:
    joint, first, second = generators_of_two_models(measurement(100, 5), measurement(40, 12))
    first.late = 1
    assert joint.measure(TWO_MODELS, LOAD).throughput_infer_per_sec == 140
    assert len(first.loads) == len(second.loads) == 2
    first.late = 2
    with pytest.raises(LateError):
        joint.measure(TWO_MODELS, LOAD)


def test_an_overload_of_one_model_is_one_of_all() -> None:
    measured = measurement(100, 5)
    assert combine_models([measured, replace(measured, overloaded=True)]).overloaded
    assert (
        combine_models([replace(measured, late_request_share=share) for share in (0.1, 0.2)]).late_request_share
        == 0.2
    )


def test_missing_figures_are_unknown_and_one_unstable_model_makes_all_unstable() -> None:
    measured = measurement(100, 5)
    joint = combine_models([measured, Measurement(reason="only 2 of 3 windows")])
    assert joint.throughput_infer_per_sec is None
    assert joint.latency_p95_ms is None
    assert joint.begin_unix_seconds is None
    assert (joint.stable, joint.reason) == (False, "only 2 of 3 windows")
    assert combine_models([measured, measured]).batch_stats == ""


def test_a_failure_of_one_is_raised_and_a_warm_up_needs_both() -> None:
    joint, _, _ = generators_of_two_models(measurement(100, 5), None)
    with pytest.raises(MeasurementError, match="no figures"):
        joint.measure(TWO_MODELS, LOAD)
    assert joint.warm_up(TWO_MODELS, LOAD) is None


# -- server processes --------------------------------------------------------------------------------------------

TWO_SERVERS = Endpoint("a", Candidate(8), grpc="first", replicas=(Endpoint("a", Candidate(8), grpc="second"),))
FAST = replace(measurement(300, 5), requests=300, measure_seconds=1.0, latency_p99_ms=7.0)
SLOW = replace(measurement(100, 9), requests=100, measure_seconds=1.1, latency_p99_ms=None)


@dataclass
class ServerLoadGenerator:
    """A load generator with a fixed result, perhaps a late one, that remembers its loads."""

    answer: Measurement
    late_seconds: float = 0.0
    loads: list[tuple[str, int]] = field(default_factory=list)

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        self.loads.append((endpoint.grpc, load.concurrency))
        time.sleep(self.late_seconds)
        return self.answer

    def measure_windows(self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int) -> list[Measurement]:
        return [self.measure(endpoint, load, seconds)] * count

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> Measurement | None:
        return None


def generators_of_servers(*answers: Measurement) -> tuple[ServerProcessesLoadGenerator, list[ServerLoadGenerator]]:
    generators = [ServerLoadGenerator(answer) for answer in answers]
    return ServerProcessesLoadGenerator(lambda number: generators[number - 1]), generators


def test_each_server_gets_its_share_and_latencies_are_weighted_means() -> None:
    joint, generators = generators_of_servers(
        replace(FAST, begin_unix_seconds=10.2, end_unix_seconds=11.2),
        replace(SLOW, begin_unix_seconds=10.1, end_unix_seconds=11.1),
    )
    outcome = joint.measure(TWO_SERVERS, LoadPoint(1, 7), 1.0)
    assert [generator.loads for generator in generators] == [[("first", 4)], [("second", 3)]]
    assert (outcome.throughput_infer_per_sec, outcome.requests, outcome.measure_seconds) == (400, 400, 1.1)
    assert outcome.latency_p95_ms == pytest.approx(0.75 * 5 + 0.25 * 9)
    assert (outcome.begin_unix_seconds, outcome.end_unix_seconds) == (10.1, 11.2)
    assert outcome.latency_p99_ms is None, "one server lacks it"
    assert outcome.stable
    assert joint.warm_up(TWO_SERVERS, LOAD) is None
    assert len(joint.measure_windows(TWO_SERVERS, LOAD, 1.0, 2)) == 2


def test_the_counters_of_all_servers_are_added() -> None:
    first, second = (replace(one, step_stats=f"a:2:{one.requests}:10:4:5:6") for one in (FAST, SLOW))
    joint, _ = generators_of_servers(first, second)
    assert joint.measure(TWO_SERVERS, LOAD, 1.0).step_stats == "a:4:400:20:8:10:12"
    joint, _ = generators_of_servers(first, SLOW)
    assert joint.measure(TWO_SERVERS, LOAD, 1.0).step_stats == ""


def test_one_server_is_measured_as_without_others() -> None:
    joint, generators = generators_of_servers(FAST)
    assert joint.measure(replace(TWO_SERVERS, replicas=()), LoadPoint(1, 1), 1.0) == FAST
    assert generators[0].loads == [("first", 1)]


def test_what_cannot_be_divided_or_did_not_overlap_has_no_values() -> None:
    with pytest.raises(MeasurementError, match="1 cannot be divided among 2 servers; raise the concurrency"):
        generators_of_servers(FAST, SLOW)[0].measure(TWO_SERVERS, LoadPoint(1, 1))
    with pytest.raises(MeasurementError, match="not measured at the same time"):
        generators_of_servers(FAST, replace(SLOW, measure_seconds=5.0))[0].measure(TWO_SERVERS, LOAD)
    short = replace(FAST, measure_seconds=0.1)
    joint, generators = generators_of_servers(short, short)
    generators[1].late_seconds = 0.3
    with pytest.raises(MeasurementError, match="one began later"):
        joint.measure(TWO_SERVERS, LOAD)
    with pytest.raises(MeasurementError, match="answered no request"):
        generators_of_servers(FAST, Measurement(reason="none"))[0].measure(TWO_SERVERS, LOAD)


class StubOutputCheck:
    def __init__(self, note: Note | None = None) -> None:
        self.needs_reference, self.note, self.wrong = True, note, False

    def record_reference(self, endpoint: Endpoint) -> None:
        self.needs_reference = False

    def check(self, endpoint: Endpoint) -> None:
        if self.wrong:
            raise DeploymentError(f"{endpoint.model} differs")


def test_the_outputs_of_each_model_are_checked() -> None:
    first, second = StubOutputCheck(), StubOutputCheck(OutputsNotCompared("it failed"))
    output_checks = CombinedOutputCheck({"a": first, "b": second})
    assert output_checks.needs_reference
    output_checks.record_reference(TWO_MODELS)
    assert not output_checks.needs_reference
    assert str(output_checks.note) == "b: outputs were not compared with the baseline's: it failed"
    output_checks.check(TWO_MODELS)
    second.wrong = True
    with pytest.raises(DeploymentError, match="b differs"):
        output_checks.check(TWO_MODELS)
