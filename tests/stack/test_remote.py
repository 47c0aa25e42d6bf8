"""A server that runs already is left as it was, whatever happens to who tunes on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer import model_config
from optimizer.deploy.embedded import EmbeddedTarget
from optimizer.deploy.listener import listener_pid
from optimizer.deploy.remote import RemoteTarget
from optimizer.deploy.tritonserver import free_port
from optimizer.errors import EnvironmentFault, ServerCrashed, ServerFault
from optimizer.model_source import ModelSource
from optimizer.trial import Candidate
from tests.production import Production

TUNED = Candidate(16, True, 500, (4, 8), 2)


@pytest.fixture(scope="module")
def production(mlp: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Production]:
    with contextlib.closing(Production(mlp, tmp_path_factory.mktemp("production") / "log")) as server:
        yield server


def attached(production: Production, keep: Path) -> RemoteTarget:
    return RemoteTarget(production.server.grpc, production.model, keep=keep)


BEFORE = ("from its repository", "with an override", "not loaded")


@pytest.fixture(params=BEFORE)
def before(request: pytest.FixtureRequest, production: Production) -> ModelConfig | None:
    """What the operator had it serve."""
    production.client.load_model(production.model)
    if request.param == "with an override":
        config = production.serving()
        assert config is not None
        other = model_config.to_override_json(model_config.apply(Candidate(32, True, 7), config))
        production.client.load_model(production.model, config=other)
    if request.param == "not loaded":
        production.client.unload_model(production.model)
    return production.serving()


def test_what_was_served_is_served_again(production: Production, before: ModelConfig | None, tmp_path: Path) -> None:
    with contextlib.closing(attached(production, tmp_path)) as target:
        for deploy in (target.deploy, target.deploy_as_written):
            with deploy(TUNED) as endpoint:
                now = production.serving()
                assert now is not None
                assert model_config.differences(TUNED, now) == []
                assert endpoint.server_pid == listener_pid(production.server.grpc)
                assert psutil.Process(endpoint.server_pid).name() == "tritonserver"
    assert production.serving() == before
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_put_back_by_the_next(
    production: Production, before: ModelConfig | None, tmp_path: Path
) -> None:
    killed = attached(production, tmp_path)
    with killed.deploy(TUNED):
        pass
    killed._open.close()  # as the kernel does: the lock goes, nothing else happens
    assert production.serving() != before
    with contextlib.closing(attached(production, tmp_path)):
        assert production.serving() == before or before is None
    assert production.serving() == before
    assert list(tmp_path.iterdir()) == []


def test_two_at_once_do_not_share_a_model(production: Production, tmp_path: Path) -> None:
    with (
        contextlib.closing(attached(production, tmp_path)),
        pytest.raises(EnvironmentFault, match=f"{production.model} on .*: process .* is at work on it"),
    ):
        attached(production, tmp_path)


def test_a_kept_file_that_is_none_is_named(production: Production, tmp_path: Path) -> None:
    with contextlib.closing(attached(production, tmp_path)) as target:
        kept = target._kept
    kept.write_text("{")
    with pytest.raises(EnvironmentFault, match=f"{kept}: cannot be read .*; see to mlp on .*, then remove that file"):
        attached(production, tmp_path)


def test_a_model_that_it_does_not_have_is_named(production: Production, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"has no model 'other' in its repository \(mlp\)"):
        RemoteTarget(production.server.grpc, "other", keep=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_where_nobody_answers_that_is_said(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ServerFault, match=f"no tritonserver answers at {address}; start it"):
        RemoteTarget(address, "mlp", keep=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", ["none", "poll"])
def test_a_server_that_manages_its_models_is_refused_unchanged(mode: str, mlp: ModelSource, tmp_path: Path) -> None:
    options = (f"--model-control-mode={mode}", *(["--repository-poll-secs=60"] if mode == "poll" else []))
    with contextlib.closing(Production(mlp, tmp_path / "log", *options)) as production:
        before = production.serving()
        assert before is not None
        target = attached(production, tmp_path / "keep")
        with (
            contextlib.closing(target),
            pytest.raises(EnvironmentFault, match="by itself; start it with --model-control-mode=explicit"),
            target.deploy(TUNED),
        ):
            pass
        assert production.serving() == before
        assert list((tmp_path / "keep").iterdir()) == []


def test_a_server_that_dies_meanwhile_ends_it_and_says_what_to_see_to(mlp: ModelSource, tmp_path: Path) -> None:
    with contextlib.closing(Production(mlp, tmp_path / "log")) as production:
        production.client.load_model(production.model)
        target = attached(production, tmp_path / "keep")
        with pytest.raises(ServerFault, match="no longer answers"), target.deploy(TUNED):  # noqa: PT012
            production.server.stop()
            raise ServerCrashed("no answer")
        told = (
            r"mlp on .* is not as it was: the server at .* no longer answers; .*; what it served is kept in .*, and"
        )
        with pytest.raises(ServerFault, match=told) as caught:
            target.close()
        (kept,) = (tmp_path / "keep").iterdir()
        assert str(kept) in str(caught.value)
        target.close()


def test_the_embedded_server_is_found_by_its_port(embedded: EmbeddedTarget) -> None:
    with embedded.deploy(Candidate(8)):
        pid = listener_pid(embedded.grpc_address)
        assert pid is not None
        assert psutil.Process(pid).name() == "tritonserver"
    assert listener_pid("192.0.2.1:8001") is None
