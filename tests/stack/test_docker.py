"""Containers of servers that die, do not start or were left over, and perf_analyzer in a container."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from optimizer.config.model_source import ModelSource
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import SharedMemory
from optimizer.core.errors import BadInputError, EnvironmentFault, ServerCrashed, ServerFault
from optimizer.core.process import COMMAND_LOG
from optimizer.core.trial import LoadPoint
from optimizer.deploy.docker_container import ContainerRunner
from optimizer.deploy.docker_engine import connect
from optimizer.deploy.docker_target import DockerTarget
from optimizer.deploy.target_settings import TargetSettings
from optimizer.machine.process_telemetry import ProcessTelemetry
from optimizer.measure.explained_failures import SharedMemoryLoadGenerator
from optimizer.measure.load_client.generators import ClosedLoopGenerator
from optimizer.measure.perf_analyzer import PerfAnalyzer
from optimizer.options.run_options import RunOptions
from tests.podman import Engine, containers_of

if TYPE_CHECKING:
    from docker import DockerClient

BATCHING = Candidate(max_batch_size=16, dynamic_batching=True)
LEAVES_ONE = """
import sys, time
from pathlib import Path
from optimizer.core.process_owner import this_process
from optimizer.deploy.docker_container import Container
from optimizer.deploy.docker_container import ContainerSettings
from optimizer.deploy.docker_engine import connect
base_url, image, log = sys.argv[1:]
Container(connect(base_url), image, ["sleep", "600"], ContainerSettings(host_network=True), log=Path(log))
print(this_process(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def client(engine: Engine) -> Iterator[DockerClient]:
    with contextlib.closing(connect(engine.base_url)) as client:
        yield client


@pytest.fixture
def make(mlp: ModelSource, engine: Engine, tmp_path: Path) -> Iterator[Callable[..., DockerTarget]]:
    with contextlib.ExitStack() as undo:

        def made(image: str = engine.image, **settings: Any) -> DockerTarget:
            log = tmp_path / "tritonserver.log"
            options = RunOptions(mlp.name, docker_image=image, **settings)
            target = DockerTarget(mlp, options, TargetSettings(log), base_url=engine.base_url)
            return undo.enter_context(contextlib.closing(target))

        yield made


def test_a_container_that_dies_while_measuring_is_reported_and_replaced(
    make: Callable[..., DockerTarget], client: DockerClient, engine: Engine, mlp_requests: Path, tmp_path: Path
) -> None:
    """perf_analyzer runs in a container of its own."""
    target = make()
    tool = PerfAnalyzer(
        Path("perf_analyzer"),
        ContainerRunner(engine.image, engine.base_url),
        tmp_path / "perf_analyzer.log",
        input_data=mlp_requests,
        window_ms=200,
        repeat=False,
    )
    with target.deploy(BATCHING) as endpoint, ProcessTelemetry().record(endpoint) as samples:
        measured = tool.measure(endpoint, LoadPoint(1, 4))
    assert measured.throughput_infer_per_sec
    assert measured.latency_p95_ms
    assert (tmp_path / "perf.csv").exists()
    assert samples.server_memory_bytes is not None
    assert endpoint.memory_bytes is not None
    counted = endpoint.memory_bytes()
    assert counted is not None
    assert min(samples.server_memory_bytes, counted) > 2**20
    started = (tmp_path / COMMAND_LOG).read_text()
    assert f"{engine.image} tritonserver --id=" in started
    assert "--publish=127.0.0.1::8001" in started

    (name,) = containers_of(client)

    def killed_while_measured() -> None:
        with target.deploy(BATCHING) as endpoint:
            client.containers.get(name).kill()
            tool.measure(endpoint, LoadPoint(1, 4))

    with pytest.raises(ServerCrashed, match="tritonserver died"):
        killed_while_measured()
    with target.deploy(BATCHING):
        assert containers_of(client) != [name]
    target.close()
    assert containers_of(client) == []


def test_a_container_gets_the_variables_of_the_user(
    make: Callable[..., DockerTarget], client: DockerClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    with make(docker_env=("PLUGINS=/plugins/a b", "HF_TOKEN")).deploy(BATCHING):
        (name,) = containers_of(client)
        variables = client.containers.get(name).attrs["Config"]["Env"]
    assert {"PLUGINS=/plugins/a b", "HF_TOKEN=secret"} <= set(variables)
    started = (tmp_path / COMMAND_LOG).read_text()
    assert "'--env=PLUGINS=/plugins/a b' --env=HF_TOKEN " in started
    assert "secret" not in started


def test_a_container_uses_the_shared_memory_of_this_machine_only_with_ipc_host(
    make: Callable[..., DockerTarget], mlp_requests: Path, tmp_path: Path
) -> None:
    shared = SharedMemory("system")
    generator = ClosedLoopGenerator(log=tmp_path / "client.log", input_data=mlp_requests, shared_memory=shared)
    with make(shared_memory="system").deploy(BATCHING) as endpoint:
        assert (
            SharedMemoryLoadGenerator(generator, shared)
            .measure(endpoint, LoadPoint(1, 4), 0.5)
            .throughput_infer_per_sec
        )
    with make().deploy(BATCHING) as endpoint, pytest.raises(BadInputError, match="--ipc host"):
        SharedMemoryLoadGenerator(generator, shared).measure(endpoint, LoadPoint(1, 4), 0.5)


def test_a_container_that_ends_at_its_start_is_removed_and_its_cause_reported(
    make: Callable[..., DockerTarget], client: DockerClient
) -> None:
    target = make(server_args=("--no-such-option",))
    with pytest.raises(ServerFault, match=r"did not start: .*unrecognized option '--no-such-option'"):
        target.deploy(BATCHING).__enter__()
    assert containers_of(client) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image": "tritune-test-nothing:1"}, "has no image tritune-test-nothing:1; pull it: docker pull tritune"),
        ({"docker_gpus": "all"}, "cannot give containers GPUs"),
    ],
    ids=["image", "gpus"],
)
def test_a_missing_image_and_missing_gpus_are_reported_in_one_line(
    settings: dict[str, str], message: str, make: Callable[..., DockerTarget], client: DockerClient
) -> None:
    target = make(**settings)
    with pytest.raises(EnvironmentFault, match=message) as caught:
        target.deploy(BATCHING).__enter__()
    assert "\n" not in str(caught.value)
    assert containers_of(client) == []


def test_the_next_target_removes_the_container_of_a_killed_process(
    make: Callable[..., DockerTarget], client: DockerClient, engine: Engine, tmp_path: Path
) -> None:
    left = subprocess.Popen(
        [sys.executable, "-c", LEAVES_ONE, engine.base_url, engine.image, str(tmp_path / "left.log")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert left.stdout is not None
    owner = left.stdout.readline().strip()
    assert len(containers_of(client, owner)) == 1
    left.send_signal(signal.SIGKILL)
    left.wait()
    make()
    assert containers_of(client, owner) == []
