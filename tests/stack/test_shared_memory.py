"""Tests for shared memory on the real server: both load generators use it, and nothing is left in /dev/shm."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tritonclient.grpc import InferenceServerClient

from objectives.sla import Sla
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint, ProtocolName, SharedMemory
from optimizer.core.errors import BadInputError, EnvironmentFault, MeasurementError
from optimizer.core.interfaces import LoadGenerator
from optimizer.core.process_owner import this_process
from optimizer.core.trial import LoadPoint
from optimizer.deploy import runtime
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.measure.explained_failures import SharedMemoryLoadGenerator
from optimizer.measure.load_client.generators import ClosedLoopGenerator, OpenLoopGenerator
from optimizer.measure.perf_analyzer import LocalRunner, PerfAnalyzer
from optimizer.measure.server_calls import open_client
from optimizer.measure.shared_memory import check_is_shared, shared_region
from tests.command_fixtures import HANG_SECONDS, Sandbox, Tune, eventually
from tests.generated_requests import write_requests
from tests.repositories import WIDE_VALUES, doubler, write_model, write_wide
from tests.stack_fixtures import embedded_model

FOLDER = Path("/dev/shm")
WIDE = Candidate(8, dynamic_batching=True)
LOAD = LoadPoint(1, concurrency=4)
SHARED = SharedMemory("system")
SECONDS = 1.5


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTarget]:
    folder = tmp_path_factory.mktemp("wide")
    write_wide(folder / "models")
    with embedded_model(folder, "wide") as target:
        yield target


@pytest.fixture
def endpoint(wide: EmbeddedTarget) -> Iterator[Endpoint]:
    with wide.deploy(WIDE) as endpoint:
        yield endpoint


@pytest.fixture(params=["perf_analyzer", "perf_analyzer over http", "closed loop", "open loop"])
def generator(request: pytest.FixtureRequest, wide: EmbeddedTarget, tmp_path: Path) -> Any:
    installed, requests = runtime.ensure(print), write_requests(wide.source.config, tmp_path)
    perf_analyzer = PerfAnalyzer(
        installed.perf_analyzer,
        LocalRunner(installed.perf_analyzer_libraries),
        tmp_path / "client.log",
        requests,
        shared_memory=SHARED,
    )
    sla = Sla.from_bounds({"p95": 5000.0})
    settings: dict[str, Any] = {
        "log": tmp_path / "client.log",
        "input_data": requests,
        "sla": sla,
        "shared_memory": SHARED,
    }
    return {
        "perf_analyzer": perf_analyzer,
        "perf_analyzer over http": replace(perf_analyzer, protocol="http"),
        "closed loop": ClosedLoopGenerator(**settings),
        "open loop": OpenLoopGenerator(**settings),
    }[request.param]


def load_for(generator: LoadGenerator) -> LoadPoint:
    return LoadPoint(1, request_rate=20.0) if isinstance(generator, OpenLoopGenerator) else LOAD


def regions_of(endpoint: Endpoint) -> dict[str, int]:
    """Return the sizes of the regions that the server maps, by name."""
    with InferenceServerClient(endpoint.grpc) as client:
        return {name: region.byte_size for name, region in client.get_system_shared_memory_status().regions.items()}


def own_regions() -> set[str]:
    """Return the names of the load generators' regions in /dev/shm, without those of the server."""
    ours = f"tritune_{str(this_process()).replace('-', '_')}_"
    names = {path.name for path in FOLDER.glob(f"{ours}*_inputs")} | {
        path.name for path in FOLDER.glob(f"{ours}*_outputs")
    }
    return names | {path.name for path in (*FOLDER.glob("x_0_*"), FOLDER / "y") if path.exists()}


class Watch:
    """Notes the server's regions, and whether the outputs in them are right, while a load is applied."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self.regions: dict[str, int] = {}
        self.outputs = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.2):
            self.regions |= (regions := regions_of(self._endpoint))
            with contextlib.suppress(FileNotFoundError, ValueError):
                inputs = [np.fromfile(FOLDER / name, np.float32) for name in regions if not is_output(name)]
                outputs = [np.fromfile(FOLDER / name, np.float32) for name in regions if is_output(name)]
                sent = {row[0] for array in inputs for row in array.reshape(-1, WIDE_VALUES)}
                got = {row[0] for array in outputs for row in array.reshape(-1, WIDE_VALUES)} - {0.0}
                if sent and got:
                    assert got <= {value + value for value in sent}
                    self.outputs = max(self.outputs, len(got))


def is_output(name: str) -> bool:
    return name == "y" or name.endswith("_outputs")


def test_inputs_and_outputs_are_in_shared_memory(generator: Any, endpoint: Endpoint) -> None:
    load = replace(load_for(generator), request_batch_size=2)
    with Watch(endpoint) as watch:
        result = generator.measure(endpoint, load, SECONDS)
    assert result.throughput_infer_per_sec > 0
    assert 2 <= result.mean_batch_size <= WIDE.max_batch_size
    assert any(map(is_output, watch.regions))
    assert not all(map(is_output, watch.regions))
    assert watch.outputs, "the server wrote outputs into the region"
    if isinstance(generator, ClosedLoopGenerator):
        (size,) = [size for name, size in watch.regions.items() if is_output(name)]
        assert size == LOAD.concurrency * 2 * 4 * WIDE_VALUES, "each request in flight has its own place"
    assert regions_of(endpoint) == {}
    assert own_regions() == set()


def clients() -> list[psutil.Process]:
    """Return the client processes below this one."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            is_client = "optimizer.measure.load_client.client" in words or Path(words[0]).name == "perf_analyzer"
            if is_client and "supervisor.py" not in " ".join(words):
                found.append(process)
    return found


@pytest.mark.parametrize("generator", ["perf_analyzer", "closed loop", "open loop"], indirect=True)
def test_a_killed_client_leaves_nothing(generator: Any, wide: EmbeddedTarget, tmp_path: Path) -> None:
    """The regions stay registered if requests may be in flight, but no file is left."""
    with wide.deploy(WIDE, fresh=True) as endpoint:

        def kill() -> None:
            eventually(lambda: own_regions() and clients(), HANG_SECONDS)
            time.sleep(0.3)
            for process in clients():
                process.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        with contextlib.suppress(MeasurementError):  # perf_analyzer is started once more
            generator.measure(endpoint, load_for(generator), 3.0)
        killer.join()
        assert own_regions() == set()
        assert generator.measure(endpoint, load_for(generator), SECONDS).throughput_infer_per_sec > 0
        assert own_regions() == set()


VARIED_CONFIG = """\
backend: "onnxruntime"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: -1 }
output { name: "y" data_type: TYPE_FP32 dims: -1 }
instance_group { count: 1 kind: KIND_CPU }
parameters { key: "intra_op_thread_count" value { string_value: "1" } }
"""


@pytest.fixture(scope="module")
def varied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTarget]:
    folder = tmp_path_factory.mktemp("varied")
    write_model(folder / "models", "varied", VARIED_CONFIG, doubler(dims=("batch", "values")))
    with embedded_model(folder, "varied") as target:
        yield target


def test_too_small_outputs_are_bad_input(generator: Any, varied: EmbeddedTarget, tmp_path: Path) -> None:
    requests = write_requests(varied.source.config, tmp_path, "x:1000")
    generator = replace(generator, input_data=requests, shapes=("x:1000",))
    with varied.deploy(WIDE) as endpoint:
        for size, fits in ((4000, True), (3999, False)):
            shared = replace(SHARED, output_bytes=size)
            wrapped = SharedMemoryLoadGenerator(replace(generator, shared_memory=shared), shared)
            with (
                contextlib.nullcontext()
                if fits
                else pytest.raises(BadInputError, match="--output-shared-memory-size")
            ):
                wrapped.measure(endpoint, load_for(generator), 0.5)
        assert own_regions() == set()


def test_perf_analyzer_does_not_overwrite_memory_of_others(
    wide: EmbeddedTarget, endpoint: Endpoint, tmp_path: Path
) -> None:
    installed = runtime.ensure(print)
    perf_analyzer = PerfAnalyzer(
        installed.perf_analyzer,
        LocalRunner(installed.perf_analyzer_libraries),
        tmp_path / "client.log",
        write_requests(wide.source.config, tmp_path),
        shared_memory=SHARED,
    )
    theirs = FOLDER / "y"
    theirs.write_text("theirs")
    try:
        with pytest.raises(EnvironmentFault, match="/dev/shm/y: another program"):
            perf_analyzer.measure(endpoint, LOAD, SECONDS)
        assert theirs.read_text() == "theirs"
    finally:
        theirs.unlink()


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_check_removes_what_a_killed_run_left_on_the_server(protocol: ProtocolName, endpoint: Endpoint) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    left = f"tritune_{str(replace(this_process(), pid=process.pid)).replace('-', '_')}_1_inputs"
    connection = endpoint.connection_for_load(protocol)
    with contextlib.closing(open_client(connection)) as client:
        with shared_region(left, 4096):
            client.register_shared_memory(left, 4096)
        assert left in client.shared_memory()
        check_is_shared(replace(endpoint, remote=connection))
        assert left not in client.shared_memory()


def kill_during_a_sweep(sandbox: Sandbox, *load: str) -> None:
    """Start ``tune sweep``, kill it while a load is applied, and assert that no region and no process is left."""
    words = ("--shared-memory", "system", *load, "--measurement-interval", "5s", "--out", "killed", "models/wide")
    process = sandbox.fork("sweep", *words)
    try:
        assert eventually(lambda: named_regions(process.pid) or process.poll() is not None, HANG_SECONDS)
        assert process.poll() is None, process.communicate()
        time.sleep(0.3)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    assert eventually(lambda: not named_regions(process.pid), HANG_SECONDS)
    assert eventually(lambda: not sandbox.processes(), HANG_SECONDS)


def test_a_killed_tune_leaves_nothing_and_the_next_one_uses_shared_memory(tune: Tune, sandbox: Sandbox) -> None:
    """The next one also removes the temporary folders of the killed ones."""
    write_wide(sandbox.working_folder / "models")
    kill_during_a_sweep(sandbox, "--concurrency", "2")
    kill_during_a_sweep(sandbox, "--request-rate", "20")
    words = ("--shared-memory", "system", "--concurrency", "2", "--measurement-interval", "300ms")
    ended = tune("sweep", *words, "--json", "models/wide")
    assert (ended.code, ended.errors) == (0, [])
    (cell,) = json.loads(ended.stdout)["cells"]
    assert cell["throughput_infer_per_sec"] > 0
    (log,) = (sandbox.working_folder / "results").glob("*/*/logs/commands.log")
    assert "--shared-memory system --output-shared-memory-size 102400" in log.read_text()


def named_regions(pid: int) -> set[str]:
    names = {path.name for path in FOLDER.glob(f"tritune_{pid}_*_inputs")}
    return names | {path.name for path in FOLDER.glob("x_0_*")}
