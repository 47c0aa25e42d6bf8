"""Fixtures that all tests share: synthetic measurements, and tables of a server with known behaviour."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any, TextIO, TypeVar

import numpy as np
import pytest
from hypothesis import settings

from objectives.arrays import FloatArray
from objectives.latency_sketch import count_over, sketch_latencies
from objectives.metrics import METRICS, QUANTILES, Measurement
from objectives.sla import Sla
from optimizer.config.problem import Problem
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import Candidate
from optimizer.core.errors import TuneError
from optimizer.core.safe_text import read_tail
from optimizer.core.trial import LoadPoint, Trial

pytest_plugins = ["tests.file_kinds"]
ALONE = "alone"
T = TypeVar("T")
LOG_BYTES = 2**13  # of a log, in the report of a failed test


def pytest_configure(config: pytest.Config) -> None:
    """Restore the default signal handlers, give hypothesis examples no deadline and child processes no BLAS threads.

    The shell of a background job ignores signals, and commands under test would inherit that. Only ``--long`` draws
    new examples each time, so that a change is not blamed for a fault that another one made. The threads of OpenBLAS
    wait in busy loops, which takes 0.1 s of CPU time at each import of NumPy.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    repeatable = not config.getoption("--long")
    settings.register_profile("tritune", deadline=None, max_examples=50, derandomize=repeatable)
    settings.load_profile("tritune")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the tests marked long, as .ci/full does")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore files without a test marked alone if only such tests run, because importing all files takes 5 s."""
    if not _runs_tests_alone(config) or not collection_path.name.startswith("test_"):
        return None
    return f"mark.{ALONE}" not in collection_path.read_text(encoding="utf-8") or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests marked long unless ``--long`` is given."""
    if config.getoption("--long"):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


def _runs_tests_alone(config: pytest.Config) -> bool:
    return bool(config.getoption("markexpr") == ALONE)


def _only_computes(config: pytest.Config) -> bool:
    return bool(config.getoption("files") == "computing")  # of tests/file_kinds.py


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let a test wait with ``-m alone`` until no other process runs such a test or one that only computes.

    The files that only compute may run at the same time as all others, and wait for their turn before each test. The
    time of waiting does not count for the time limit of the test.
    """
    if not (_runs_tests_alone(item.config) or _only_computes(item.config)):
        return (yield)
    with _take_turn(item.config, is_exclusive=_runs_tests_alone(item.config)):
        return (yield)


def _take_turn(config: pytest.Config, *, is_exclusive: bool) -> TextIO:
    """Wait until no other process has an exclusive turn, or any turn if this one is exclusive; return the lock.

    A process that waits holds the gate, so that no other turn begins in the meantime.
    """
    assert config.cache, "pytest has a cache folder"
    folder = config.cache.mkdir("turns")  # the same in all processes
    turn = (folder / "turn").open("w")
    with (folder / "gate").open("w") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(turn, fcntl.LOCK_EX if is_exclusive else fcntl.LOCK_SH)
    return turn


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, pytest.TestReport]:
    """Add the end of the server's log to the report of an error that names it, such as the stack of a crash."""
    report: pytest.TestReport = yield
    error = call.excinfo.value if call.excinfo else None
    if report.failed and isinstance(error, TuneError) and error.log is not None and error.log.exists():
        report.sections.append((f"end of {error.log}", read_tail(error.log, LOG_BYTES)))
    return report


def not_none(value: T | None) -> T:
    """Return ``value``, which the test requires to exist."""
    assert value is not None
    return value


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


def latency_window(latencies_ms: FloatArray, throughput: float, bound_ms: float) -> Measurement:
    """Return a window whose requests have these latencies, with their quantiles, sketch and count over the bound."""
    quantiles_ms: Any = {f"latency_{name}_ms": float(np.quantile(latencies_ms, at)) for name, at in QUANTILES.items()}
    return Measurement(
        throughput,
        latency_avg_ms=float(latencies_ms.mean()),
        **quantiles_ms,
        requests=len(latencies_ms),
        requests_over_ms=count_over(latencies_ms, [bound_ms]),
        latency_sketch=sketch_latencies(latencies_ms),
        stable=True,
    )


def measure_known_server(candidate: Candidate, concurrency: int, request_batch_size: int) -> Measurement:
    """Return the measurement of a known server in a closed loop.

    A batch takes 2 ms and 0.2 ms for each sample; two instances are 1.5 times as fast as one.
    """
    largest = candidate.max_batch_size if candidate.dynamic_batching else request_batch_size
    batch = min(largest, concurrency * request_batch_size)
    speed = 1 + 0.5 * (min(candidate.instance_count, 2) - 1)
    batch_ms = (2 + 0.2 * batch) / speed
    rounds = concurrency * request_batch_size / batch
    latency = batch_ms * rounds + candidate.max_queue_delay_us / 1000
    return measurement(1000 * concurrency * request_batch_size / latency, latency)


def known_problem() -> Problem:
    """Return a problem of 16 candidates with p95 <= 20 ms and one sample per request."""
    space = SearchSpace(
        max_batch_size=(1, 4, 16, 64),
        max_queue_delay_us=("off", 0, 1000),
        instance_count=(1, 2),
    )
    return Problem("known", space, 1, 64, (METRICS["throughput"],), Sla.from_bounds({"p95": 20.0}))


@pytest.fixture
def problem() -> Problem:
    return known_problem()


@pytest.fixture
def known_table(problem: Problem) -> list[Trial]:
    """Return the measurements of every candidate at every concurrency of the problem."""
    return [
        Trial(
            number,
            candidate,
            tuple(
                (LoadPoint(1, c), measure_known_server(candidate, c, 1))
                for c in range(1, problem.max_concurrency + 1)
            ),
        )
        for number, candidate in enumerate(problem.space.candidates())
    ]
