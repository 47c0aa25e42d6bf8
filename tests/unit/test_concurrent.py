"""Several models under load at once: what is told of them together."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest

from objectives.metrics import Measurement
from optimizer.answers.guards import Guards
from optimizer.errors import DeploymentError, MeasurementError
from optimizer.interfaces import Endpoint
from optimizer.load.concurrent import ConcurrentModels, together
from optimizer.trial import Candidate, LoadPoint
from tests.conftest import measurement

BOTH = Endpoint("a", Candidate(8), beside=(Endpoint("b", Candidate(4)),))
LOAD = LoadPoint(1, 8)


@dataclass
class Recorded:
    """A load generator that knows its answer, and waits until the other one is asked too."""

    answer: Measurement | None
    meeting: threading.Barrier
    asked: list[str] = field(default_factory=list)

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        self.asked.append(endpoint.model)
        self.meeting.wait(10)
        if self.answer is None:
            raise MeasurementError("no figures")
        return self.answer

    def windows(self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int) -> list[Measurement]:
        return [self.measure(endpoint, load, seconds)]

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> Measurement | None:
        self.meeting.wait(10)
        return self.answer


def pair(a: Measurement | None, b: Measurement | None) -> tuple[ConcurrentModels, Recorded, Recorded]:
    meeting = threading.Barrier(2)
    first, second = Recorded(a, meeting), Recorded(b, meeting)
    return ConcurrentModels({"a": first, "b": second}), first, second


def test_both_at_once_throughputs_added_the_worst_latency() -> None:
    joint, first, second = pair(measurement(100, 5), measurement(40, 12))
    for found in (joint.measure(BOTH, LOAD), *joint.windows(BOTH, LOAD, 1.0, 3), joint.warm_up(BOTH, LOAD)):
        assert found is not None
        assert found.throughput_infer_per_sec == 140
        assert found.latency_p95_ms == 12
        assert found.stable
    assert (first.asked, second.asked) == (["a", "a"], ["b", "b"])


def test_what_one_does_not_tell_is_unknown_and_one_that_is_not_stable_decides() -> None:
    known = measurement(100, 5)
    joint = together([known, Measurement(reason="only 2 of 3 windows")])
    assert joint.throughput_infer_per_sec is None
    assert joint.latency_p95_ms is None
    assert (joint.stable, joint.reason) == (False, "only 2 of 3 windows")
    assert together([known, known]).batch_stats == ""


def test_a_failure_of_one_is_raised_and_a_glance_needs_both() -> None:
    joint, _, _ = pair(measurement(100, 5), None)
    with pytest.raises(MeasurementError, match="no figures"):
        joint.measure(BOTH, LOAD)
    assert joint.warm_up(BOTH, LOAD) is None


class Guarded:
    def __init__(self, note: str = "") -> None:
        self.needs_reference, self.note, self.wrong = True, note, False

    def reference(self, endpoint: Endpoint) -> None:
        self.needs_reference = False

    def check(self, endpoint: Endpoint) -> None:
        if self.wrong:
            raise DeploymentError(f"{endpoint.model} differs")


def test_the_answers_of_each_are_compared() -> None:
    first, second = Guarded(), Guarded("it was not asked")
    guards = Guards({"a": first, "b": second})
    assert guards.needs_reference
    guards.reference(BOTH)
    assert not guards.needs_reference
    assert guards.note == "b: it was not asked"
    guards.check(BOTH)
    second.wrong = True
    with pytest.raises(DeploymentError, match="b differs"):
        guards.check(BOTH)
