"""What every Target keeps. A new target adds one class with a ``target`` fixture."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from optimizer import model_config, runtime
from optimizer.client.calls import open_client
from optimizer.client.connection import Connection
from optimizer.deploy import local
from optimizer.deploy.docker.engine import OWNER, connect
from optimizer.deploy.docker.target import DockerTarget
from optimizer.deploy.embedded import EmbeddedTarget
from optimizer.deploy.leftovers import this_process
from optimizer.deploy.local import LocalTarget
from optimizer.deploy.recorded import RecordedTable
from optimizer.deploy.remote.target import RemoteTarget
from optimizer.errors import DeploymentError, TuneError
from optimizer.interfaces import Target
from optimizer.model_source import ModelSource
from optimizer.trial import Candidate, LoadPoint, Trial
from tests.certificates import Certificates
from tests.conftest import measurement
from tests.own_server import write_installation
from tests.podman import Engine
from tests.production import Production, secured
from tests.repositories import stored, write_sleeper

GOOD = (
    Candidate(max_batch_size=64),
    Candidate(max_batch_size=16, dynamic_batching=True),
    Candidate(16, True, 500, (4, 8), 2),
)
SERVER = "TRITUNE_TEST_SERVER"  # in the environment: benchmarks/older_servers.py names others with it
LIMIT, POOL = "server.rate-limit", "server.pinned-memory-pool-byte-size"
UNDEPLOYABLE = Candidate(8, True, 0, (16,))  # a preferred size above max_batch_size


def leftovers() -> set[str]:
    """Processes that we started, our shared memory and temporary folders; what is below them comes and goes."""
    found = {path.name for path in Path("/dev/shm").glob(f"tritune_{str(this_process()).replace('-', '_')}_*")}
    found |= {path.name for path in Path(tempfile.gettempdir()).glob(f"tritune-{this_process()}-*")}
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found.add(f"{process.name()} {process.pid}")
    return found


class TargetContract:
    @pytest.fixture
    def target(self) -> Target:
        raise NotImplementedError

    @pytest.mark.parametrize("candidate", GOOD, ids=str)
    def test_serves_exactly_the_candidate(self, target: Target, candidate: Candidate) -> None:
        with target.deploy(candidate) as endpoint:
            assert endpoint.candidate == candidate
            assert self.serving(target, endpoint.model) in (candidate, None)

    @pytest.mark.parametrize("candidate", GOOD, ids=str)
    def test_serves_it_from_a_written_config_too(self, target: Target, candidate: Candidate) -> None:
        with target.deploy_as_written(candidate) as endpoint:
            assert endpoint.candidate == candidate
            assert self.serving(target, endpoint.model) in (candidate, None)

    def test_a_candidate_that_cannot_be_served_is_a_deployment_error(self, target: Target) -> None:
        with pytest.raises(DeploymentError) as caught, target.deploy(UNDEPLOYABLE):
            pass
        assert str(caught.value)
        assert "\n" not in str(caught.value)

    def test_after_a_failure_the_next_candidate_is_served(self, target: Target) -> None:
        for candidate in (GOOD[0], GOOD[2]):
            with contextlib.suppress(DeploymentError), target.deploy(UNDEPLOYABLE):
                pass
            with target.deploy(candidate) as endpoint:
                assert self.serving(target, endpoint.model) in (candidate, None)

    def test_an_error_inside_passes_through(self, target: Target) -> None:
        with pytest.raises(TuneError, match="mine"), target.deploy(GOOD[0]):
            raise TuneError("mine")

    @pytest.fixture
    def another(self) -> Target:
        """One that the test may close."""
        raise NotImplementedError

    def test_close_leaves_nothing_and_may_be_called_twice(self, another: Target) -> None:
        before = self.left()
        with another.deploy(GOOD[0]):
            pass
        another.close()
        another.close()
        assert self.left() <= before

    def left(self) -> set[str]:
        return leftovers()

    def serving(self, target: Target, model: str) -> Candidate | None:
        """What is served by the target's own account; None where there is none to ask."""
        raise NotImplementedError


class TestRecordedTable(TargetContract):
    @pytest.fixture
    def target(self, another: Target) -> Target:
        return another

    @pytest.fixture
    def another(self) -> Target:
        trials = [
            Trial(number, candidate, ((LoadPoint(1, 1), measurement(100, 5)),))
            for number, candidate in enumerate(GOOD)
        ]
        return RecordedTable([*trials, Trial(9, UNDEPLOYABLE, status="failed", reason="refused")])

    def serving(self, target: Target, model: str) -> Candidate | None:
        return None


def told_by(connection: Connection, model: str) -> Candidate:
    """What the server tells, without the preferred size that Triton writes where none is given."""
    with contextlib.closing(open_client(connection)) as client:
        found = model_config.candidate_of(client.config(model))
    if found.preferred_batch_sizes == (found.max_batch_size,):
        return replace(found, preferred_batch_sizes=())
    return found


class TestEmbeddedTarget(TargetContract):
    @pytest.fixture
    def target(self, embedded: EmbeddedTarget) -> Target:
        return embedded

    @pytest.fixture
    def another(self, mlp: ModelSource, tmp_path: Path) -> Target:
        return EmbeddedTarget(mlp, log=tmp_path / "tritonserver.log", say=print)

    def serving(self, target: Target, model: str) -> Candidate | None:
        assert isinstance(target, EmbeddedTarget)
        return told_by(Connection(target.grpc_address), model)


@pytest.fixture(scope="module")
def make_local(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], LocalTarget]:
    if runtime.running_python() not in runtime.NUMPY_WHEELS:
        pytest.skip("the server serves no models in Python here")
    folder = tmp_path_factory.mktemp("local")
    write_sleeper(folder / "models", milliseconds=1)
    source = stored(folder / "models")("sleeper")
    given = os.environ.get(SERVER) or write_installation(folder / "triton", runtime.ensure(print))
    installation = local.find(str(given))
    return lambda: LocalTarget(source, installation, log=folder / "tritonserver.log")


@pytest.fixture(scope="module")
def local_target(make_local: Callable[[], LocalTarget]) -> Iterator[LocalTarget]:
    with contextlib.closing(make_local()) as target:
        yield target


class TestLocalTarget(TargetContract):
    """On a tritonserver of the user's own: the pinned one, with its Python backend alone, or another in SERVER."""

    @pytest.fixture
    def target(self, local_target: LocalTarget) -> Target:
        return local_target

    @pytest.fixture
    def another(self, make_local: Callable[[], LocalTarget]) -> Target:
        return make_local()

    def test_it_starts_anew_with_the_options_of_a_candidate(self, target: Target) -> None:
        limited = replace(GOOD[0], fields=((LIMIT, "execution_count"),))
        for candidate in (limited, GOOD[0]):
            with target.deploy(candidate) as endpoint:
                assert self.serving(target, endpoint.model) == GOOD[0]
                (server,) = psutil.Process(endpoint.server_pid).children()
                assert ("--rate-limit=execution_count" in server.cmdline()) is (candidate == limited)

    def test_options_that_it_refuses_are_a_deployment_error_and_the_next_is_served(self, target: Target) -> None:
        refused = replace(GOOD[0], fields=((POOL, "abc"),))
        told = "did not start with --pinned-memory-pool-byte-size=abc: "
        with pytest.raises(DeploymentError, match=told) as caught, target.deploy(refused):
            pass
        assert "\n" not in str(caught.value)
        with target.deploy(GOOD[0]) as endpoint:
            assert self.serving(target, endpoint.model) == GOOD[0]

    def serving(self, target: Target, model: str) -> Candidate | None:
        assert isinstance(target, LocalTarget)
        assert target.server_version == runtime.TRITON_VERSION or SERVER in os.environ
        return told_by(Connection(target.grpc_address), model)


class TestRemoteTarget(TargetContract):
    """On a server that runs already, and serves the model."""

    @pytest.fixture
    def target(self, another: Target) -> Iterator[Target]:
        with contextlib.closing(another):
            yield another

    @pytest.fixture
    def another(self, embedded: EmbeddedTarget, tmp_path: Path) -> Target:
        with embedded.deploy(Candidate(max_batch_size=32)):
            return RemoteTarget(Connection(embedded.grpc_address), embedded.source, keep=tmp_path)

    def left(self) -> set[str]:
        """The server goes on, with shared memory of its own."""
        return {name for name in leftovers() if not name.startswith("tritune_")}

    def serving(self, target: Target, model: str) -> Candidate | None:
        assert isinstance(target, RemoteTarget)
        assert target.server_version == runtime.TRITON_VERSION
        return told_by(target.connection, model)


@pytest.fixture(scope="module")
def production(mlp: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Production]:
    """Behind TLS and headers, and serves the model."""
    folder = tmp_path_factory.mktemp("production")
    with contextlib.closing(secured(mlp, folder / "log", Certificates(folder))) as server:
        server.load(server.model)
        yield server


@contextlib.contextmanager
def attached(production: Production, connection: Connection, keep: Path) -> Iterator[RemoteTarget]:
    before = production.serving()
    with contextlib.closing(RemoteTarget(connection, production.source, keep=keep)) as target:
        yield target
    assert production.serving() == before


@pytest.fixture(scope="module")
def over_http(production: Production, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteTarget]:
    """One for all, since what it puts back takes a load each time."""
    with attached(production, production.http, tmp_path_factory.mktemp("keep")) as target:
        yield target


@pytest.fixture(scope="module")
def over_tls(production: Production, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteTarget]:
    with attached(production, production.grpc, tmp_path_factory.mktemp("keep")) as target:
        yield target


class TestRemoteTargetOverHttp(TestRemoteTarget):
    """With headers."""

    @pytest.fixture
    def target(self, over_http: RemoteTarget) -> Target:
        return over_http

    @pytest.fixture
    def another(self, production: Production, tmp_path: Path) -> Target:
        return RemoteTarget(production.http, production.source, keep=tmp_path)


class TestRemoteTargetOverTls(TestRemoteTarget):
    """gRPC, with a header."""

    @pytest.fixture
    def target(self, over_tls: RemoteTarget) -> Target:
        return over_tls

    @pytest.fixture
    def another(self, production: Production, tmp_path: Path) -> Target:
        return RemoteTarget(production.grpc, production.source, keep=tmp_path)


@pytest.mark.skipif(SERVER not in os.environ, reason=f"the pinned server again, unless {SERVER} names another")
class TestRemoteTargetOnAServerOfYourOwn(TestRemoteTarget):
    """Of whatever version."""

    @pytest.fixture
    def another(self, local_target: LocalTarget, tmp_path: Path) -> Target:
        with local_target.deploy(Candidate(max_batch_size=32)):
            return RemoteTarget(Connection(local_target.grpc_address), local_target.source, keep=tmp_path)

    def serving(self, target: Target, model: str) -> Candidate | None:
        assert isinstance(target, RemoteTarget)
        assert target.server_version
        return told_by(target.connection, model)


@pytest.mark.alone  # counts the containers of all
class TestDockerTarget(TargetContract):
    """On a server in a container, where an engine runs."""

    @pytest.fixture(autouse=True)
    def _ask(self, engine: Engine) -> None:
        self.base_url = engine.base_url

    @pytest.fixture(scope="class")
    def target(self, mlp: ModelSource, engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
        log = tmp_path_factory.mktemp("server") / "tritonserver.log"
        with contextlib.closing(DockerTarget(mlp, image=engine.image, log=log, base_url=engine.base_url)) as target:
            yield target

    @pytest.fixture
    def another(self, mlp: ModelSource, engine: Engine, tmp_path: Path) -> Target:
        log = tmp_path / "tritonserver.log"
        return DockerTarget(mlp, image=engine.image, log=log, base_url=engine.base_url)

    def left(self) -> set[str]:
        """Containers too."""
        with contextlib.closing(connect(self.base_url)) as client:
            return leftovers() | {one.name for one in client.containers.list(all=True, filters={"label": OWNER})}

    def serving(self, target: Target, model: str) -> Candidate | None:
        assert isinstance(target, DockerTarget)
        return told_by(Connection(target.grpc_address), model)
