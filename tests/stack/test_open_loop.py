"""Test the open-loop load generator on the real server: rates, overloads, pauses and failing servers."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from objectives.sla import Sla
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import MeasurementError, ServerCrashed
from optimizer.core.process import SUPERVISOR
from optimizer.core.request_sizes import parse_size_distribution
from optimizer.core.trial import LoadPoint
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.measure.load_client.arrivals import ConstantArrivals
from optimizer.measure.load_client.client import BEHIND_SECONDS, WARM_UPS
from optimizer.measure.load_client.client_files import NEVER
from optimizer.measure.load_client.generators import OpenLoopGenerator
from optimizer.measure.load_client.measured_requests import LEAD_IN_SECONDS
from optimizer.measure.load_client.open_loop import LateError
from optimizer.measure.model_statistics import read_statistics
from tests.command_fixtures import eventually
from tests.load_clients import KeptRecords
from tests.stack_fixtures import ANSWER_SECONDS, SLEEP_MS

MLP = Candidate(8, dynamic_batching=True)
ALONE = Candidate(8)


@pytest.fixture
def open_loop(random_requests: Path, tmp_path: Path) -> OpenLoopGenerator:
    return OpenLoopGenerator(
        log=tmp_path / "client.log", input_data=random_requests, sla=Sla.from_bounds({"p95": 50.0})
    )


@pytest.fixture
def lenient(random_requests: Path, tmp_path: Path) -> OpenLoopGenerator:
    """Return a load generator with a bound that even a slow machine meets."""
    return OpenLoopGenerator(
        log=tmp_path / "client.log", input_data=random_requests, sla=Sla.from_bounds({"p95": 2000.0})
    )


def at(rate: float, request_batch_size: int = 1) -> LoadPoint:
    return LoadPoint(request_batch_size, request_rate=rate)


@contextlib.contextmanager
def once_loaded(endpoint: Endpoint, requests: int, act: Callable[[], None]) -> Iterator[None]:
    """Call ``act`` in a thread once the server has answered ``requests`` more requests."""

    def answered() -> int:
        statistics = read_statistics(endpoint)
        return int(statistics.inference_stats.success.count) if statistics else 0

    before, over = answered(), threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            if answered() >= before + requests:
                act()
                return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def counted(endpoint: Endpoint) -> tuple[int, int]:
    """Return the numbers of requests and samples that the server has answered."""
    statistics = read_statistics(endpoint)
    assert statistics is not None
    return int(statistics.inference_stats.success.count), int(statistics.inference_count)


def test_a_mix_of_requests_is_sent_and_counted(embedded: EmbeddedTarget, lenient: OpenLoopGenerator) -> None:
    mix = parse_size_distribution("1*3|5")
    mixed = replace(lenient, request_mix=mix, arrivals=ConstantArrivals())
    with embedded.deploy(MLP) as endpoint:
        before = counted(endpoint)
        result = mixed.measure(endpoint, LoadPoint(2, request_rate=64.0), 4.0 - LEAD_IN_SECONDS)
        samples = 512 + WARM_UPS * int(mix.draw(256, np.random.default_rng(mixed.seed))[0])
        expected = before[0] + 256 + WARM_UPS, before[1] + samples
        eventually(lambda: counted(endpoint) == expected, ANSWER_SECONDS)  # counted after the answers are sent
        assert counted(endpoint) == expected
    assert result.throughput_infer_per_sec == pytest.approx(128, rel=0.1)


def tell_server(endpoint: Endpoint, signum: int) -> None:
    """Send a signal to every process of the server except its supervisor."""
    assert endpoint.server_pid is not None
    for process in psutil.Process(endpoint.server_pid).children(recursive=True):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signum)


def test_a_rate_is_kept_and_no_files_remain(
    lenient: OpenLoopGenerator, embedded: EmbeddedTarget, tmp_path: Path
) -> None:
    with embedded.deploy(MLP) as endpoint:
        result = lenient.measure(endpoint, at(300, request_batch_size=2), seconds=2.0)
    assert not result.overloaded, result.reason
    assert result.throughput_infer_per_sec == pytest.approx(600, rel=0.1)
    assert result.requests == pytest.approx(600, rel=0.1)
    assert (result.queue_ms or 0) > 0
    assert (result.compute_infer_ms or 0) > 0
    assert (result.latency_avg_ms or 0) > 0
    executions = [tuple(map(int, entry.split(":"))) for entry in result.batch_stats.split()]
    sent = 300 * (2.0 + LEAD_IN_SECONDS) + WARM_UPS
    missing = 2 * round(sent) - sum(size * count for size, count, _ in executions)
    assert 0 <= missing <= MLP.max_batch_size, "a batch is counted after its answers are sent, perhaps too late"
    assert {path.name for path in tmp_path.iterdir()} == {"client.log", "commands.log"}


def test_an_overloaded_server_is_recognised_and_recovers(
    open_loop: OpenLoopGenerator, lenient: OpenLoopGenerator, sleeper: EmbeddedTarget
) -> None:
    client = KeptRecords()
    open_loop = replace(open_loop, run_client=client)
    with sleeper.deploy(ALONE) as endpoint:
        open_loop.warm_up(endpoint, at(20))
        result = open_loop.measure(endpoint, at(300), seconds=20.0)
        assert result.overloaded
        assert result.reason.startswith("overloaded: ")
        assert not result.stable
        assert np.any(client.records[-1].sent_ns == NEVER), "it is not measured to the end"
        assert result.latency_p95_ms is not None
        assert result.latency_p95_ms > 300
        assert result.throughput_infer_per_sec is not None
        # less than twice the capacity: a client that was late may read answers of the lead-in after it
        assert 0 < result.throughput_infer_per_sec < 2 * 1000 / SLEEP_MS

        afterwards = lenient.measure(endpoint, at(20), seconds=2.0)
        assert not afterwards.overloaded, afterwards.reason
        assert afterwards.latency_p50_ms is not None
        assert result.latency_p50_ms is not None
        assert SLEEP_MS <= afterwards.latency_p50_ms < result.latency_p50_ms
        assert (afterwards.compute_infer_ms or 0) >= SLEEP_MS


def test_a_pause_of_the_server_counts_for_every_request_due_in_it(
    lenient: OpenLoopGenerator, sleeper: EmbeddedTarget
) -> None:
    """A closed loop sends nothing while the server pauses, so its figures hardly change."""
    pause_seconds, seconds = 0.6, 3.0
    open_loop = replace(lenient, arrivals=ConstantArrivals())

    with sleeper.deploy(ALONE) as endpoint:

        def pause() -> None:
            tell_server(endpoint, signal.SIGSTOP)
            time.sleep(pause_seconds)
            tell_server(endpoint, signal.SIGCONT)

        open_loop.warm_up(endpoint, at(20))
        with once_loaded(endpoint, 20, pause):
            result = open_loop.measure(endpoint, at(20), seconds=seconds)
    assert not result.overloaded
    assert result.latency_p50_ms is not None
    assert result.latency_p95_ms is not None
    assert result.latency_p50_ms < result.latency_p95_ms / 2
    # a third of the requests due in the pause waited for more than two thirds of it, and then in the queue
    assert result.latency_p95_ms >= 2 / 3 * 1000 * pause_seconds


def test_a_stopped_server_ends_the_measurement_soon(open_loop: OpenLoopGenerator, sleeper: EmbeddedTarget) -> None:
    with sleeper.deploy(ALONE) as endpoint:
        try:  # the time limit of the test is shorter than the measurement
            with (
                once_loaded(endpoint, 30, lambda: tell_server(endpoint, signal.SIGSTOP)),
                pytest.raises(ServerCrashed, match="no longer answers"),
            ):
                open_loop.measure(endpoint, at(40), seconds=3600.0)
        finally:  # if it continued, the requests that the client has cancelled could crash it in the next test
            tell_server(endpoint, signal.SIGKILL)


def test_a_dead_server_is_reported(open_loop: OpenLoopGenerator, embedded: EmbeddedTarget) -> None:
    with embedded.deploy(MLP) as endpoint:
        with (
            once_loaded(endpoint, 100, lambda: tell_server(endpoint, signal.SIGKILL)),
            pytest.raises(ServerCrashed, match="no longer answers"),
        ):
            open_loop.measure(endpoint, at(300), seconds=30.0)
        with pytest.raises(ServerCrashed, match="Connection refused; the server no longer answers"):
            open_loop.warm_up(endpoint, at(300))


def test_a_refused_request_is_reported(open_loop: OpenLoopGenerator, embedded: EmbeddedTarget) -> None:
    with embedded.deploy(MLP) as endpoint, pytest.raises(MeasurementError, match="batch-size must be <= 8"):
        open_loop.measure(endpoint, at(100, request_batch_size=9))


def tell_client(*signums: int, pause_seconds: float = 0.0) -> None:
    """Send the load generator's client these signals, ``pause_seconds`` apart."""
    for signum in signums:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if "optimizer.measure.load_client.client" in words and str(SUPERVISOR) not in words:
                    process.send_signal(signum)
        if signum != signums[-1]:
            time.sleep(pause_seconds)


def test_a_client_that_loses_its_plan_voids_the_measurement(
    lenient: OpenLoopGenerator, sleeper: EmbeddedTarget
) -> None:
    def pause() -> None:
        tell_client(signal.SIGSTOP, signal.SIGCONT, pause_seconds=2 * BEHIND_SECONDS)

    with (
        sleeper.deploy(ALONE) as endpoint,
        once_loaded(endpoint, WARM_UPS + 20, pause),
        pytest.raises(LateError, match=r"cannot keep up: at 40 requests/s .* were sent more than 1 ms late"),
    ):
        lenient.measure(endpoint, at(40), seconds=5.0)


def test_a_client_that_is_late_for_a_moment_voids_nothing(
    lenient: OpenLoopGenerator, sleeper: EmbeddedTarget
) -> None:
    def pause() -> None:
        tell_client(signal.SIGSTOP, signal.SIGCONT, pause_seconds=BEHIND_SECONDS / 5)

    with sleeper.deploy(ALONE) as endpoint, once_loaded(endpoint, WARM_UPS + 20, pause):
        result = replace(lenient, arrivals=ConstantArrivals()).measure(endpoint, at(40), seconds=3.0)
    assert result.requests == 40 * 3
    assert result.throughput_infer_per_sec == pytest.approx(40, rel=0.01)  # it may end with the last answer
    assert result.late_request_share is not None
    assert 0 < result.late_request_share < 1
    assert result.send_lateness_p99_ms is not None
    assert result.send_lateness_p99_ms > 1
    assert result.latency_p99_ms is not None
    assert result.latency_p99_ms > result.send_lateness_p99_ms


def test_a_killed_client_is_reported_and_leaves_no_files(
    lenient: OpenLoopGenerator, sleeper: EmbeddedTarget, tmp_path: Path
) -> None:
    with sleeper.deploy(MLP) as endpoint:
        with (
            once_loaded(endpoint, WARM_UPS + 20, lambda: tell_client(signal.SIGKILL)),
            pytest.raises(MeasurementError, match="the load generator's client ended with SIGKILL") as caught,
        ):
            lenient.measure(endpoint, at(100), seconds=5.0)
        assert not isinstance(caught.value, ServerCrashed)
        assert {path.name for path in tmp_path.iterdir()} == {"client.log", "commands.log"}
    with sleeper.deploy(
        MLP, fresh=True
    ) as endpoint:  # the end of the client has cancelled requests, see OpenLoopClient
        assert lenient.measure(endpoint, at(100), seconds=1.0).requests
