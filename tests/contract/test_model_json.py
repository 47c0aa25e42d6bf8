"""The contract of targets for candidates that change model.json in the version folder of the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput

from optimizer.config.model_source import ModelSource, configured_candidate
from optimizer.core.candidate import Candidate, FieldValue
from optimizer.core.endpoint import Connection, Endpoint
from optimizer.core.errors import DeploymentError
from optimizer.core.interfaces import Target
from optimizer.deploy.docker_target import DockerTarget
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.remote_target import RemoteTarget
from optimizer.deploy.target_settings import TargetSettings
from optimizer.options.run_options import RunOptions
from tests.podman import Engine
from tests.remote_server import RunningServer
from tests.repositories import skip_without_python_models, stored, write_reader

FIELD = "model_json.limit"


def with_limit(limit: FieldValue | None) -> Candidate:
    """Return a candidate that sets the key ``limit``; None leaves the file as it is."""
    return Candidate(8, fields=() if limit is None else ((FIELD, limit),))


def served_limit(grpc: str) -> float:
    """Return the value of ``limit`` that the running model has read."""
    tensor = InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.zeros((1, 4), np.float32))
    with contextlib.closing(InferenceServerClient(grpc)) as client:
        answer = client.infer("reader", [tensor]).as_numpy("y")
    assert answer is not None
    return float(answer[0, 0])


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    skip_without_python_models()
    repository = tmp_path_factory.mktemp("models")
    write_reader(repository)
    return replace(stored(repository)("reader"), varies_model_json=True)


class ModelJsonContract:
    """Each target serves a candidate with its values of model.json, and others with the file as it was."""

    @pytest.fixture
    def target(self) -> Target:
        raise NotImplementedError

    def address(self, endpoint: Endpoint) -> str:
        return endpoint.grpc

    def test_the_model_reads_the_values_of_the_candidate(self, target: Target, reader: ModelSource) -> None:
        original = reader.folder("reader").joinpath("1", "model.json").read_text()
        for fresh, limit, expected in ((False, 128, 128), (False, None, 64), (True, 96.5, 96.5), (True, None, 64)):
            with target.deploy(with_limit(limit), fresh=fresh) as endpoint:
                assert served_limit(self.address(endpoint)) == expected
        assert reader.folder("reader").joinpath("1", "model.json").read_text() == original

    def test_a_refused_value_is_a_deployment_error_and_the_next_candidate_is_served(self, target: Target) -> None:
        with pytest.raises(DeploymentError, match="limit is negative"), target.deploy(with_limit(-1)):
            pass
        with target.deploy(with_limit(32)) as endpoint:
            assert served_limit(self.address(endpoint)) == 32


class TestEmbedded(ModelJsonContract):
    @pytest.fixture(scope="module")
    @classmethod
    def target(cls, reader: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
        log = tmp_path_factory.mktemp("server") / "tritonserver.log"
        with contextlib.closing(EmbeddedTarget(reader, TargetSettings(log))) as target:
            yield target


class TestDocker(ModelJsonContract):
    @pytest.fixture(scope="module")
    @classmethod
    def target(
        cls, reader: ModelSource, engine: Engine, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Target]:
        settings = TargetSettings(tmp_path_factory.mktemp("server") / "tritonserver.log")
        options = RunOptions("reader", docker_image=engine.image)
        with contextlib.closing(DockerTarget(reader, options, settings, base_url=engine.base_url)) as target:
            yield target


@pytest.fixture(scope="module")
def production(reader: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with contextlib.closing(RunningServer(reader, tmp_path_factory.mktemp("production") / "log")) as server:
        server.load("reader")
        yield server


class TestRemote(ModelJsonContract):
    @pytest.fixture(autouse=True)
    def _remember(self, production: RunningServer) -> None:
        self.production = production

    @pytest.fixture
    def connection(self, production: RunningServer) -> Connection:
        return production.grpc

    @pytest.fixture
    def target(self, production: RunningServer, connection: Connection, tmp_path: Path) -> Iterator[Target]:
        with contextlib.closing(RemoteTarget(connection, production.source, state_folder=tmp_path)) as target:
            yield target

    def address(self, endpoint: Endpoint) -> str:
        return self.production.grpc.address

    def test_the_file_of_the_server_is_restored(self, connection: Connection, tmp_path: Path) -> None:
        """The configuration alone does not show that the model has other files."""
        attached = RemoteTarget(connection, self.production.source, state_folder=tmp_path)
        with contextlib.closing(attached) as target, target.deploy(with_limit(128)):
            assert served_limit(self.production.grpc.address) == 128
        assert served_limit(self.production.grpc.address) == 64


class TestRemoteOverHttp(TestRemote):
    @pytest.fixture
    def connection(self, production: RunningServer) -> Connection:
        return production.http


def test_the_file_is_restored_after_a_kill(production: RunningServer, tmp_path: Path) -> None:
    killed = RemoteTarget(production.grpc, production.source, state_folder=tmp_path)
    with killed.deploy(with_limit(128)):
        pass
    killed._open.close()  # the lock of a killed process is free; its state file stays
    assert served_limit(production.grpc.address) == 128
    RemoteTarget(production.grpc, production.source, state_folder=tmp_path).close()
    assert served_limit(production.grpc.address) == 64


def test_the_baseline_has_the_values_of_the_file(reader: ModelSource) -> None:
    baseline = configured_candidate(reader, ["model_json.absent", FIELD])
    assert baseline.model_json == {"limit": 64}
