"""Shared by all tests: made-up measurements, and tables of a server whose behaviour is known."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings

from objectives.metrics import METRICS, Measurement
from objectives.sla import Constraint
from optimizer.problem import Problem
from optimizer.space import Space
from optimizer.trial import Candidate, LoadPoint, Trial


def pytest_configure() -> None:
    """What the shell of a background job ignores, the commands under test must not inherit as ignored. Examples have
    no deadline: how fast the machine is just then is not what is tested."""
    settings.register_profile("tritune", deadline=None, max_examples=50)
    settings.load_profile("tritune")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)


def measurement(throughput: float, p95_ms: float, *, stable: bool = True) -> Measurement:
    return Measurement(
        throughput_infer_per_sec=throughput,
        latency_avg_ms=0.7 * p95_ms,
        latency_p50_ms=0.65 * p95_ms,
        latency_p90_ms=0.9 * p95_ms,
        latency_p95_ms=p95_ms,
        latency_p99_ms=1.3 * p95_ms,
        mean_batch_size=4.0,
        requests=1000,
        stable=stable,
        measure_seconds=0.01,
        reason="" if stable else "unstable: throughput between 1 and 2",
    )


def known_server(candidate: Candidate, concurrency: int, request_batch_size: int) -> Measurement:
    """A closed-loop server: batches cost 2 ms + 0.2 ms a sample, two instances run 1.5 times as fast as one."""
    largest = candidate.max_batch_size if candidate.dynamic_batching else request_batch_size
    batch = min(largest, concurrency * request_batch_size)
    speed = 1 + 0.5 * (min(candidate.instance_count, 2) - 1)
    batch_ms = (2 + 0.2 * batch) / speed
    rounds = concurrency * request_batch_size / batch
    latency = batch_ms * rounds + candidate.max_queue_delay_us / 1000
    return measurement(1000 * concurrency * request_batch_size / latency, latency)


def known_problem() -> Problem:
    """16 candidates, p95 <= 20 ms, one sample a request."""
    space = Space(
        max_batch_size=(1, 4, 16, 64),
        max_queue_delay_us=("off", 0, 1000),
        instance_count=(1, 2),
    )
    return Problem("known", space, 1, 64, (METRICS["throughput"],), (Constraint("latency-p95", 20.0),))


@pytest.fixture
def problem() -> Problem:
    return known_problem()


@pytest.fixture
def known_table(problem: Problem) -> list[Trial]:
    """Every candidate at every concurrency of the problem."""
    return [
        Trial(
            number,
            candidate,
            tuple((LoadPoint(1, c), known_server(candidate, c, 1)) for c in range(1, problem.max_concurrency + 1)),
        )
        for number, candidate in enumerate(problem.space.candidates())
    ]
