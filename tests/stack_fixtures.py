"""Fixtures of the real server: targets of two small models, a load without end, and the leftovers of a target."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from optimizer.config import model_config
from optimizer.config.model_source import ModelSource
from optimizer.core.endpoint import Endpoint
from optimizer.core.files import cache_folder
from optimizer.core.process_owner import this_process
from optimizer.core.trial import LoadPoint
from optimizer.deploy import runtime
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.target_settings import TargetSettings
from optimizer.measure.load_client.generators import OpenLoopGenerator
from optimizer.measure.perf_analyzer import LocalRunner, PerfAnalyzer
from optimizer.measure.server_calls import infer
from optimizer.model.builders import build
from optimizer.model.repository import read_repository_model
from tests.generated_requests import write_requests
from tests.load_clients import planned_task
from tests.repositories import write_sleeper

SLEEP_MS = 10.0  # of each batch of ``sleeper``: at most 100 requests a second, one at a time
ANSWER_SECONDS = 600.0  # only a server that hangs takes so long


@pytest.fixture(scope="session")
def mlp() -> ModelSource:
    """Return the model with one thread an instance, because several wait for each request in busy loops."""
    source = build("mlp", {}, cache=cache_folder(), max_batch_size=64, kind="KIND_CPU", on_progress=print)
    config = model_config.copy(source.config)
    config.parameters["intra_op_thread_count"].string_value = "1"
    return replace(source, config=config)


@pytest.fixture(scope="session")
def mlp_requests(mlp: ModelSource) -> Path:
    assert mlp.input_data is not None
    return mlp.input_data


@pytest.fixture(scope="module")
def embedded(mlp: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTarget]:
    target = EmbeddedTarget(mlp, TargetSettings(tmp_path_factory.mktemp("server") / "tritonserver.log"))
    yield target
    target.close()


@contextlib.contextmanager
def embedded_model(folder: Path, name: str) -> Iterator[EmbeddedTarget]:
    """Yield a target that serves the model ``name`` of ``folder/models`` on an embedded server."""
    source = read_repository_model(folder / "models", name, gpu=False)
    with contextlib.closing(EmbeddedTarget(source, TargetSettings(folder / "tritonserver.log"))) as target:
        yield target


@pytest.fixture(scope="module")
def sleeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTarget]:
    folder = tmp_path_factory.mktemp("sleeper")
    write_sleeper(folder / "models", SLEEP_MS)
    with embedded_model(folder, "sleeper") as target:
        yield target


@pytest.fixture
def random_requests(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return random requests to the model of the target that the test uses: ``sleeper``, or else ``embedded``."""
    name = "sleeper" if "sleeper" in request.fixturenames else "embedded"
    target: EmbeddedTarget = request.getfixturevalue(name)
    return write_requests(target.source.config, tmp_path_factory.mktemp("requests"))


@pytest.fixture
def perf_analyzer(mlp_requests: Path, tmp_path: Path) -> PerfAnalyzer:
    installed = runtime.ensure(print)
    return PerfAnalyzer(
        installed.perf_analyzer,
        LocalRunner(installed.perf_analyzer_libraries),
        tmp_path / "perf_analyzer.log",
        input_data=mlp_requests,
    )


@contextlib.contextmanager
def served(endpoint: Endpoint, source: ModelSource, load: LoadPoint, log: Path) -> Iterator[None]:
    """Send requests to the model of ``source`` within the context, one at a time to each server.

    They are at most ``load.request_rate`` a second; a slow machine lowers the rate. A load client would give the load
    up, or end before the context does.
    """
    generator = OpenLoopGenerator(log=log, input_data=write_requests(source.config, log.parent))
    (message, *_) = planned_task(generator, endpoint, load).requests.messages
    over = threading.Event()

    def messages() -> Iterator[bytes]:
        while not over.wait(len(endpoint.servers) / load.request_rate):
            yield message

    with ThreadPoolExecutor(len(endpoint.servers)) as pool:
        senders = [
            pool.submit(infer, server, messages(), in_flight=1, timeout_seconds=ANSWER_SECONDS)
            for server in endpoint.servers
        ]
        try:
            yield
        finally:
            over.set()
    for sender in senders:
        sender.result()


def leftovers() -> set[str]:
    """Return the child processes, shared memory and temporary folders of this process, without their contents."""
    names = {path.name for path in Path("/dev/shm").glob(f"tritune_{str(this_process()).replace('-', '_')}_*")}
    names |= {path.name for path in Path(tempfile.gettempdir()).glob(f"tritune-{this_process()}-*")}
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            names.add(f"{process.name()} {process.pid}")
    return names
