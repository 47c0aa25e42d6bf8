"""The loads of servers in production that behave as expected after the recorded run of dlrm, or otherwise."""

from __future__ import annotations

import functools
import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from optimizer.results.finished_run import read_run
from optimizer.watch.expectation import Expectation, ExpectedAtRate, derive_expectation
from optimizer.watch.fit_check import Judgement
from optimizer.watch.server_metrics import ServedLoad
from optimizer.watch.watch_report import print_judgement

SAMPLE = Path(__file__).parent / "data" / "dlrm" / "sample"
ERROR = 0.01 / 8  # of each end of an interval: the run has one latency bound
INTERVALS, SECONDS = 12, 5.0
RATE = 1000.0  # requests per second of most loads
NOISE = (0.98, 1.01, 1.0, 0.99, 1.02, 1.0)  # of the loads in successive intervals


@functools.cache
def recorded_expectation() -> Expectation:
    return derive_expectation(read_run(SAMPLE))


def expectation_of(**changes: Any) -> Expectation:
    """Return the expectation as if the problem of the run had these ``changes``."""
    run = recorded_expectation().run
    return replace(recorded_expectation(), run=replace(run, problem=replace(run.problem, **changes)))


@functools.cache
def at(rate: float) -> ExpectedAtRate:
    expected = recorded_expectation().at(rate, 1, ERROR)
    assert expected is not None
    return expected


def loads(rate: float, servers: int = 1, **changes: Any) -> list[ServedLoad]:
    """Return the loads, in INTERVALS, of servers that behave as expected at ``rate`` requests per second together."""
    expected, size = at(rate / servers), recorded_expectation().request_samples
    requests = rate * SECONDS
    load = ServedLoad(
        SECONDS,
        requests,
        {},
        requests * size,
        requests * size / math.sqrt(expected.mean_batch_size.low * expected.mean_batch_size.high),
        requests * 3.0,
        requests * min(0.5 * expected.queue_ms.high, 5.0),
        requests * math.sqrt(expected.compute_ms.low * expected.compute_ms.high),
    )
    load = replace(load, **changes)
    noisy = ("requests", "samples", "executions", "request_ms", "queue_ms", "compute_ms")
    return [
        replace(load, **{name: factor * getattr(load, name) for name in noisy})
        for factor in (NOISE * math.ceil(INTERVALS / len(NOISE)))[:INTERVALS]
    ]


def printed(judgement: Judgement, width: int = 80) -> str:
    text = io.StringIO()
    print_judgement(Console(file=text, width=width), judgement)
    return text.getvalue()
