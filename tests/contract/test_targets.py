"""The contract of targets.

A new target needs a class that inherits ``TargetContract``, with the fixtures ``target`` and
``closable_target``, and an entry of ``MODULES``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import psutil
import pytest

from optimizer.config import model_config
from optimizer.config.model_source import ModelSource
from optimizer.core.candidate import SERVER_PROCESSES, Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import DeploymentError, TuneError
from optimizer.core.interfaces import Target
from optimizer.core.trial import LoadPoint, Trial
from optimizer.deploy import docker_target, embedded_target, local_target, remote_target, runtime
from optimizer.deploy.docker_engine import connect
from optimizer.deploy.docker_target import DockerTarget
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.local_target import LocalTarget, find_installation
from optimizer.deploy.remote_target import RemoteTarget
from optimizer.deploy.several_servers import ServerProcesses
from optimizer.deploy.target_factory import TargetModule
from optimizer.deploy.target_settings import TargetSettings
from optimizer.measure.server_calls import open_client
from optimizer.options.run_options import TARGETS, RunOptions, TargetName
from optimizer.store.recording import RecordedServer
from tests.conftest import measurement
from tests.podman import Engine, containers_of
from tests.repositories import skip_without_python_models, stored, write_sleeper
from tests.stack_fixtures import leftovers
from tests.user_installation import write_installation

GOOD = (
    Candidate(max_batch_size=64),
    Candidate(max_batch_size=16, dynamic_batching=True),
    Candidate(16, True, 500, (4, 8), 2),
)
SERVER = "TRITUNE_TEST_SERVER"  # environment variable with which benchmarks/older_servers.py names another server
LIMIT, POOL = "server.rate-limit", "server.pinned-memory-pool-byte-size"
UNDEPLOYABLE = Candidate(8, True, 0, (16,))  # a preferred size above max_batch_size


class TargetContract:
    closed = GOOD[0]  # the candidate that was deployed before the target is closed

    @pytest.fixture
    def target(self) -> Target:
        raise NotImplementedError

    def test_a_fresh_server_runs_exactly_the_candidate(self, target: Target) -> None:
        with target.deploy(GOOD[2], fresh=True) as endpoint:
            assert endpoint.candidate == GOOD[2]
            assert self.serving(target, endpoint) in (GOOD[2], None)

    def test_after_a_failure_the_next_candidate_is_served(self, target: Target) -> None:
        """A candidate that cannot be served is a deployment error, before the first candidate and after it."""
        for candidate in (GOOD[0], GOOD[2]):
            with pytest.raises(DeploymentError) as caught, target.deploy(UNDEPLOYABLE):
                pass
            assert str(caught.value)
            assert "\n" not in str(caught.value)
            with target.deploy(candidate) as endpoint:
                assert endpoint.candidate == candidate
                assert self.serving(target, endpoint) in (candidate, None)

    def test_an_error_inside_the_context_passes_through(self, target: Target) -> None:
        with pytest.raises(TuneError, match="mine"), target.deploy(GOOD[0]):
            raise TuneError("mine")

    @pytest.fixture
    def closable_target(self) -> Target:
        """Return a target that the test may close."""
        raise NotImplementedError

    def test_close_leaves_nothing_and_can_be_called_twice(self, closable_target: Target) -> None:
        before = self.remaining()
        with closable_target.deploy(self.closed):
            pass
        closable_target.close()
        closable_target.close()
        assert self.remaining() <= before

    def remaining(self) -> set[str]:
        return leftovers()

    def serving(self, target: Target, endpoint: Endpoint) -> Candidate | None:
        """Return the configuration that the server reports; None if it cannot be queried."""
        return served_candidate(endpoint)


class TestRecordedTable(TargetContract):
    @pytest.fixture
    def target(self, closable_target: Target) -> Target:
        return closable_target

    @pytest.fixture
    def closable_target(self) -> Target:
        trials = [
            Trial(number, candidate, ((LoadPoint(1, 1), measurement(100, 5)),))
            for number, candidate in enumerate(GOOD)
        ]
        return RecordedServer([*trials, Trial(9, UNDEPLOYABLE, status="failed", reason="refused")])

    def serving(self, target: Target, endpoint: Endpoint) -> Candidate | None:
        return None


def served_candidate(endpoint: Endpoint) -> Candidate:
    """Return the configuration that the server reports, without the preferred size that Triton adds."""
    with contextlib.closing(open_client(endpoint.connection)) as client:
        candidate = model_config.candidate_of(client.config(endpoint.model))
    if candidate.preferred_batch_sizes == (candidate.max_batch_size,):
        return replace(candidate, preferred_batch_sizes=())
    return candidate


class TestEmbeddedTarget(TargetContract):
    @pytest.fixture
    def target(self, embedded: EmbeddedTarget) -> Target:
        return embedded

    @pytest.fixture
    def closable_target(self, mlp: ModelSource, tmp_path: Path) -> Target:
        return EmbeddedTarget(mlp, TargetSettings(tmp_path / "tritonserver.log"))


def make_processes(source: ModelSource, folder: Path, count: int) -> ServerProcesses:
    logs = [folder / f"tritonserver-{number}.log" for number in range(count)]
    return ServerProcesses([EmbeddedTarget(source, TargetSettings(log)) for log in logs])


@pytest.fixture(scope="module")
def processes(mlp: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcesses]:
    with contextlib.closing(make_processes(mlp, tmp_path_factory.mktemp("servers"), 2)) as target:
        yield target


class TestServerProcesses(TargetContract):
    """Two servers, of which a candidate without ``server_processes`` needs only one."""

    closed = replace(GOOD[0], fields=((SERVER_PROCESSES, 2),))

    @pytest.fixture
    def target(self, processes: ServerProcesses) -> Target:
        return processes

    @pytest.fixture
    def closable_target(self, mlp: ModelSource, tmp_path: Path) -> Target:
        return make_processes(mlp, tmp_path, 2)

    @pytest.mark.parametrize("fresh", [False, True])
    def test_each_server_runs_exactly_the_candidate(self, processes: ServerProcesses, fresh: bool) -> None:
        candidate = replace(GOOD[2], fields=((SERVER_PROCESSES, 2),))
        with processes.deploy(candidate, fresh=fresh) as endpoint:
            assert len({server.server_pid for server in endpoint.servers}) == 2
            for server in endpoint.servers:
                assert server.candidate == candidate
                assert served_candidate(server) == GOOD[2]
            pids = [server.server_pid for server in endpoint.servers]
        with processes.deploy(GOOD[2]) as alone:
            assert alone.replicas == ()
            assert not psutil.pid_exists(pids[1] or 0), "a server that the candidate does not need is stopped"


@pytest.fixture(scope="module")
def make_local(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], LocalTarget]:
    skip_without_python_models()
    folder = tmp_path_factory.mktemp("local")
    write_sleeper(folder / "models", milliseconds=1)
    source = stored(folder / "models")("sleeper")
    program = os.environ.get(SERVER) or write_installation(folder / "triton", runtime.ensure(print))
    installation = find_installation(str(program))
    return lambda: LocalTarget(source, installation, TargetSettings(folder / "tritonserver.log"))


@pytest.fixture(scope="module")
def local(make_local: Callable[[], LocalTarget]) -> Iterator[LocalTarget]:
    with contextlib.closing(make_local()) as target:
        yield target


class TestLocalTarget(TargetContract):
    """A user's tritonserver: the pinned one with only its Python backend, or the one that SERVER names."""

    @pytest.fixture
    def target(self, local: LocalTarget) -> Target:
        return local

    @pytest.fixture
    def closable_target(self, make_local: Callable[[], LocalTarget]) -> Target:
        return make_local()

    def test_the_server_restarts_with_the_options_of_a_candidate(self, target: Target) -> None:
        limited = replace(GOOD[0], fields=((LIMIT, "execution_count"),))
        for candidate in (limited, GOOD[0]):
            with target.deploy(candidate) as endpoint:
                assert self.serving(target, endpoint) == GOOD[0]
                (server,) = psutil.Process(endpoint.server_pid).children()
                assert ("--rate-limit=execution_count" in server.cmdline()) is (candidate == limited)

    def test_refused_options_are_a_deployment_error_and_the_next_candidate_is_served(self, target: Target) -> None:
        refused = replace(GOOD[0], fields=((POOL, "abc"),))
        message = "did not start with --pinned-memory-pool-byte-size=abc: "
        with pytest.raises(DeploymentError, match=message) as caught, target.deploy(refused):
            pass
        assert "\n" not in str(caught.value)
        with target.deploy(GOOD[0]) as endpoint:
            assert self.serving(target, endpoint) == GOOD[0]

    def serving(self, target: Target, endpoint: Endpoint) -> Candidate | None:
        assert isinstance(target, LocalTarget)
        assert target.server_version == runtime.TRITON_VERSION or SERVER in os.environ
        return served_candidate(endpoint)


class TestRemoteTarget(TargetContract):
    """A running server that serves the model."""

    @pytest.fixture
    def target(self, closable_target: Target) -> Iterator[Target]:
        with contextlib.closing(closable_target):
            yield closable_target

    @pytest.fixture
    def closable_target(self, embedded: EmbeddedTarget, tmp_path: Path) -> Target:
        with embedded.deploy(Candidate(max_batch_size=32)) as endpoint:
            return RemoteTarget(endpoint.connection, embedded.source, state_folder=tmp_path)

    def remaining(self) -> set[str]:
        """The server keeps running, and keeps its shared memory."""
        return {name for name in leftovers() if not name.startswith("tritune_")}

    def serving(self, target: Target, endpoint: Endpoint) -> Candidate | None:
        assert isinstance(target, RemoteTarget)
        assert target.server_version == runtime.TRITON_VERSION
        return served_candidate(endpoint)


@pytest.mark.skipif(SERVER not in os.environ, reason=f"the pinned server again, unless {SERVER} names another")
class TestRemoteTargetOnAnotherVersion(TestRemoteTarget):
    """Any version is accepted."""

    @pytest.fixture
    def closable_target(self, local: LocalTarget, tmp_path: Path) -> Target:
        with local.deploy(Candidate(max_batch_size=32)) as endpoint:
            return RemoteTarget(endpoint.connection, local.source, state_folder=tmp_path)

    def serving(self, target: Target, endpoint: Endpoint) -> Candidate | None:
        assert isinstance(target, RemoteTarget)
        assert target.server_version
        return served_candidate(endpoint)


class TestDockerTarget(TargetContract):
    """A server in a container; skipped if there is no engine."""

    @pytest.fixture(autouse=True)
    def _ask(self, engine: Engine) -> None:
        self.base_url = engine.base_url

    @pytest.fixture(scope="class")
    @classmethod
    def target(cls, mlp: ModelSource, engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
        settings = TargetSettings(tmp_path_factory.mktemp("server") / "tritonserver.log")
        options = RunOptions(mlp.name, docker_image=engine.image)
        with contextlib.closing(DockerTarget(mlp, options, settings, base_url=engine.base_url)) as target:
            yield target

    @pytest.fixture
    def closable_target(self, mlp: ModelSource, engine: Engine, tmp_path: Path) -> Target:
        settings = TargetSettings(tmp_path / "tritonserver.log")
        options = RunOptions(mlp.name, docker_image=engine.image)
        return DockerTarget(mlp, options, settings, base_url=engine.base_url)

    def remaining(self) -> set[str]:
        """Return also the containers."""
        with contextlib.closing(connect(self.base_url)) as client:
            return leftovers() | set(containers_of(client))


MODULES: dict[TargetName, TargetModule] = {
    "embedded": embedded_target,
    "local": local_target,
    "docker": docker_target,
    "remote": remote_target,
}


def test_every_target_is_covered_by_the_contract() -> None:
    assert {f"Test{name.capitalize()}Target" for name in TARGETS} <= set(globals())
    assert set(MODULES) == set(TARGETS)
    assert all(module is import_module(f"optimizer.deploy.{name}_target") for name, module in MODULES.items())
