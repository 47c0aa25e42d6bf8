"""What every Target keeps. A new target adds one class with a ``target`` fixture."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from optimizer import model_config
from optimizer.deploy.client import open_client
from optimizer.deploy.connection import Connection
from optimizer.deploy.embedded import EmbeddedTarget
from optimizer.deploy.recorded import RecordedTable
from optimizer.deploy.remote import RemoteTarget
from optimizer.errors import DeploymentError, TuneError
from optimizer.interfaces import Target
from optimizer.model_source import ModelSource
from optimizer.trial import Candidate, LoadPoint, Trial
from tests.certificates import Certificates
from tests.conftest import measurement
from tests.production import Production, secured

GOOD = (
    Candidate(max_batch_size=64),
    Candidate(max_batch_size=16, dynamic_batching=True),
    Candidate(16, True, 500, (4, 8), 2),
)
UNDEPLOYABLE = Candidate(8, True, 0, (16,))  # a preferred size above max_batch_size


def leftovers() -> set[str]:
    """Processes that we started, shared memory and temporary folders; what is below them comes and goes."""
    found = {path.name for path in Path("/dev/shm").glob("tritune_*")}
    found |= {path.name for path in Path(tempfile.gettempdir()).glob("tritune-*")}
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
