"""The open loop on the real server: rates that are kept, overloads, pauses, and servers that fail."""

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

from optimizer.deploy.embedded import EmbeddedTarget
from optimizer.errors import MeasurementError, ServerCrashed
from optimizer.interfaces import Endpoint
from optimizer.load.server_statistics import read_statistics
from optimizer.machine import cpus
from optimizer.model_source import ModelSource
from optimizer.open_loop.arrivals import Constant
from optimizer.open_loop.client import WARM_UPS
from optimizer.open_loop.generator import OpenLoop
from optimizer.open_loop.judgement import LEAD_IN_SECONDS, LateError
from optimizer.process import SUPERVISOR, SupervisedProcess
from optimizer.requests.sizes import parse_dim
from optimizer.sources.repository import read_repository_model
from optimizer.trial import Candidate, LoadPoint
from tests.repositories import write_sleeper

pytestmark = pytest.mark.alone

MLP = Candidate(8, dynamic_batching=True)
ALONE = Candidate(8)
SLEEP_MS = 10.0  # of one request after the other: 100 a second at most


@pytest.fixture
def open_loop(tmp_path: Path) -> OpenLoop:
    return OpenLoop(tmp_path / "client.log", latency_bound_ms=50.0)


@pytest.fixture(scope="module")
def sleeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTarget]:
    folder = tmp_path_factory.mktemp("sleeper")
    write_sleeper(folder / "models", SLEEP_MS)
    source = read_repository_model(folder / "models", "sleeper", gpu=False)
    with contextlib.closing(EmbeddedTarget(source, log=folder / "tritonserver.log", say=print)) as target:
        yield target


def at(rate: float, request_batch_size: int = 1) -> LoadPoint:
    return LoadPoint(request_batch_size, request_rate=rate)


@contextlib.contextmanager
def once_loaded(endpoint: Endpoint, requests: int, act: Callable[[], None]) -> Iterator[None]:
    """``act``, in a thread, when the server has answered so many requests more."""

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
    """Requests and samples that the server has answered."""
    statistics = read_statistics(endpoint)
    assert statistics is not None
    return int(statistics.inference_stats.success.count), int(statistics.inference_count)


def test_a_mix_of_requests_is_sent_and_counted(embedded: EmbeddedTarget, open_loop: OpenLoop) -> None:
    mix = parse_dim("1*3|5")
    mixed = replace(open_loop, request_mix=mix, arrivals=Constant())
    with embedded.deploy(MLP) as endpoint:
        before = counted(endpoint)
        found = mixed.measure(endpoint, LoadPoint(2, request_rate=256.0), 1.0 - LEAD_IN_SECONDS)
        requests, samples = (after - then for after, then in zip(counted(endpoint), before, strict=True))
    assert requests == 256 + WARM_UPS
    assert samples == 512 + WARM_UPS * mix.draw(256, np.random.default_rng(mixed.seed))[0]
    assert found.throughput_infer_per_sec == pytest.approx(512, rel=0.1)


def tell_server(endpoint: Endpoint, signum: int) -> None:
    """Every process of the server, but not its supervisor."""
    assert endpoint.server_pid is not None
    for process in psutil.Process(endpoint.server_pid).children(recursive=True):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signum)


def test_a_rate_is_kept_and_nothing_is_left(open_loop: OpenLoop, embedded: EmbeddedTarget, tmp_path: Path) -> None:
    with embedded.deploy(MLP) as endpoint:
        found = open_loop.measure(endpoint, at(300, request_batch_size=2), seconds=2.0)
    assert found.stable, found.reason
    assert found.throughput_infer_per_sec == pytest.approx(600, rel=0.1)
    assert found.requests == pytest.approx(600, rel=0.1)
    assert found.queue_ms is not None
    assert found.compute_infer_ms is not None
    assert found.latency_avg_ms is not None
    assert found.latency_avg_ms > found.queue_ms + found.compute_infer_ms
    executions = [tuple(map(int, entry.split(":"))) for entry in found.batch_stats.split()]
    sent = 300 * (2.0 + LEAD_IN_SECONDS) + WARM_UPS
    assert sum(size * count for size, count, _ in executions) == pytest.approx(2 * sent)
    assert {path.name for path in tmp_path.iterdir()} == {"client.log", "commands.log"}


def test_an_overloaded_server_is_recognised_and_recovers(open_loop: OpenLoop, sleeper: EmbeddedTarget) -> None:
    with sleeper.deploy(ALONE) as endpoint:
        open_loop.warm_up(endpoint, at(20))
        found = open_loop.measure(endpoint, at(300), seconds=20.0)
        assert found.reason.startswith("overloaded: ")
        assert not found.stable
        assert found.measure_seconds is not None
        assert found.measure_seconds <= 3.0
        assert found.latency_p95_ms is not None
        assert found.latency_p95_ms > 300
        assert found.throughput_infer_per_sec == pytest.approx(1000 / SLEEP_MS, rel=0.4)

        afterwards = open_loop.measure(endpoint, at(20), seconds=2.0)
        assert afterwards.stable, afterwards.reason
        assert afterwards.latency_p50_ms == pytest.approx(SLEEP_MS, rel=1.0)


def test_a_pause_counts_for_every_request_that_was_due_in_it(sleeper: EmbeddedTarget, tmp_path: Path) -> None:
    """A closed loop sends nothing while the server pauses, and so hardly sees it."""
    pause_seconds, seconds = 0.3, 2.0
    open_loop = OpenLoop(tmp_path / "client.log", Constant(), latency_bound_ms=50.0)

    with sleeper.deploy(ALONE) as endpoint:

        def pause() -> None:
            tell_server(endpoint, signal.SIGSTOP)
            time.sleep(pause_seconds)
            tell_server(endpoint, signal.SIGCONT)

        open_loop.warm_up(endpoint, at(40))
        with once_loaded(endpoint, 30, pause):
            found = open_loop.measure(endpoint, at(40), seconds=seconds)
    assert not found.reason.startswith("overloaded")
    assert found.latency_p50_ms is not None
    assert found.latency_p95_ms is not None
    assert found.latency_p50_ms < 100
    # of the requests due in the pause a third waited for more than two thirds of it, and the queue comes on top
    assert found.latency_p95_ms >= 2 / 3 * 1000 * pause_seconds


def test_a_server_that_stops_is_given_up_soon(open_loop: OpenLoop, sleeper: EmbeddedTarget) -> None:
    with sleeper.deploy(ALONE) as endpoint:
        stopped: list[float] = []

        def stop() -> None:
            tell_server(endpoint, signal.SIGSTOP)
            stopped.append(time.monotonic())

        try:
            with once_loaded(endpoint, 30, stop), pytest.raises(ServerCrashed, match="no longer answers"):
                open_loop.measure(endpoint, at(40), seconds=30.0)
            assert time.monotonic() - stopped[0] < 3.0 + 5.0  # the server has 5 s to say that it lives
        finally:
            tell_server(endpoint, signal.SIGCONT)


def test_a_server_that_dies_is_told(open_loop: OpenLoop, embedded: EmbeddedTarget) -> None:
    with embedded.deploy(MLP) as endpoint:
        with (
            once_loaded(endpoint, 100, lambda: tell_server(endpoint, signal.SIGKILL)),
            pytest.raises(ServerCrashed, match="no longer answers"),
        ):
            open_loop.measure(endpoint, at(300), seconds=30.0)
        with pytest.raises(ServerCrashed):
            open_loop.warm_up(endpoint, at(300))


def test_a_request_that_the_server_refuses_is_told(open_loop: OpenLoop, embedded: EmbeddedTarget) -> None:
    with embedded.deploy(MLP) as endpoint, pytest.raises(MeasurementError, match="batch-size must be <= 8"):
        open_loop.measure(endpoint, at(100, request_batch_size=9))


def test_a_client_that_cannot_keep_up_voids_the_measurement(
    mlp: ModelSource, embedded: EmbeddedTarget, tmp_path: Path
) -> None:
    one = frozenset({min(cpus.available())})
    open_loop = OpenLoop(tmp_path / "client.log", latency_bound_ms=5.0, cpus=one, input_data=str(mlp.input_data))
    with embedded.deploy(MLP) as endpoint, contextlib.ExitStack() as neighbours:
        for _ in range(6):
            busy = SupervisedProcess(["sh", "-c", "while :; do :; done"], log=tmp_path / "busy.log", cpus=one)
            neighbours.enter_context(busy)
        with pytest.raises(LateError, match=r"cannot keep up: at 1,000 requests/s .* sent more than 1\.25 ms late"):
            open_loop.measure(endpoint, at(1000), seconds=1.0)


def test_a_client_that_is_killed_is_told_and_leaves_nothing(
    open_loop: OpenLoop, sleeper: EmbeddedTarget, tmp_path: Path
) -> None:
    def kill_client() -> None:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if "optimizer.open_loop.client" in words and str(SUPERVISOR) not in words:
                    process.kill()

    with sleeper.deploy(MLP) as endpoint:
        with (
            once_loaded(endpoint, WARM_UPS + 20, kill_client),
            pytest.raises(MeasurementError, match="the load generator's client ended with SIGKILL") as caught,
        ):
            open_loop.measure(endpoint, at(100), seconds=5.0)
        assert not isinstance(caught.value, ServerCrashed)
        assert [path.name for path in tmp_path.iterdir()] == ["client.log", "commands.log"]
        assert open_loop.measure(endpoint, at(100), seconds=1.0).requests
