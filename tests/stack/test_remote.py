"""A server that runs already is left as it was, whatever happens to who tunes on it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer import model_config, runtime
from optimizer.client.connection import Connection
from optimizer.deploy.embedded import EmbeddedTarget
from optimizer.deploy.listener import listener_pid
from optimizer.deploy.remote.target import RemoteTarget
from optimizer.deploy.tritonserver import free_port
from optimizer.errors import DeploymentError, EnvironmentFault, ServerCrashed, ServerFault
from optimizer.model_source import ModelSource
from optimizer.sources.pipeline import read_source
from optimizer.trial import Candidate
from tests.production import Production
from tests.repositories import stored, write_ensemble, write_sleeper

TUNED = Candidate(16, True, 500, (4, 8), 2)


@pytest.fixture(scope="module")
def production(mlp: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Production]:
    with contextlib.closing(Production(mlp, tmp_path_factory.mktemp("production") / "log")) as server:
        yield server


def attached(production: Production, keep: Path) -> RemoteTarget:
    return RemoteTarget(production.grpc, production.source, keep=keep)


def kept_in(folder: Path) -> list[str]:
    """What is left there to be put back."""
    return sorted(path.name for path in folder.iterdir())


BEFORE = ("from its repository", "with an override", "not loaded")


@pytest.fixture
def before(request: pytest.FixtureRequest, production: Production) -> ModelConfig | None:
    """What the operator had it serve."""
    production.unload(production.model)
    if request.param != "not loaded":
        production.load(production.model)
    if request.param == "with an override":
        config = production.serving()
        assert config is not None
        production.load(production.model, model_config.apply(Candidate(32, True, 7), config))
    return production.serving()


@pytest.mark.parametrize("before", BEFORE, indirect=True)
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
    assert kept_in(tmp_path) == []


@pytest.mark.parametrize("before", BEFORE[1:], indirect=True)
def test_what_a_killed_process_left_is_put_back_by_the_next(
    production: Production, before: ModelConfig | None, tmp_path: Path
) -> None:
    killed = attached(production, tmp_path)
    with killed.deploy(TUNED):
        pass
    killed._open.close()  # as the kernel does: the lock goes, nothing else happens
    assert production.serving() != before
    told: list[str] = []
    other = replace(production.source, name="other")
    with pytest.raises(EnvironmentFault, match="has no model 'other'"):  # whichever model the next one is about
        RemoteTarget(production.grpc, other, keep=tmp_path, say=told.append)
    assert told == [f"putting back what a run that was killed has changed on the server at {production.server.grpc}"]
    assert production.serving() == before
    assert kept_in(tmp_path) == []


SLOW_SECONDS = 2.0  # longer than an interrupt waits to be acknowledged
INTERRUPTED = """\
import contextlib, sys, time
from pathlib import Path
from optimizer import interrupts
from optimizer.client.connection import Connection
from optimizer.deploy.remote.target import RemoteTarget
from optimizer.trial import Candidate
from tests.repositories import stored

interrupts.install()
source = stored(Path(sys.argv[1]))("sleeper")
try:
    with contextlib.closing(RemoteTarget(Connection(sys.argv[2]), source, keep=Path(sys.argv[3]))) as target:
        with target.deploy(Candidate(4)):
            print("deployed", flush=True)
            while True:  # pause() would miss a signal that comes just before it
                time.sleep(0.01)
except KeyboardInterrupt:
    interrupts.acknowledge()
    print("interrupted")
"""


def test_interrupts_do_not_keep_a_model_that_loads_slowly_from_being_put_back(tmp_path: Path) -> None:
    if runtime.running_python() not in runtime.NUMPY_WHEELS:
        pytest.skip("the server serves no models in Python here")
    write_sleeper(tmp_path / "models", milliseconds=1, loading_seconds=SLOW_SECONDS)
    source, keep = stored(tmp_path / "models")("sleeper"), tmp_path / "keep"
    with contextlib.closing(Production(source, tmp_path / "log")) as server:
        server.load("sleeper")
        before = server.serving()
        command = [sys.executable, "-c", INTERRUPTED, str(source.repository), server.server.grpc, str(keep)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "deployed\n"
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
                process.send_signal(signum)
            assert process.stdout.read() == "interrupted\n"
        assert process.returncode == 0
        assert server.serving() == before
    assert not [name for name in kept_in(keep) if name.endswith(".json")]


def test_two_at_once_do_not_share_a_server(production: Production, tmp_path: Path) -> None:
    with (
        contextlib.closing(attached(production, tmp_path)),
        pytest.raises(EnvironmentFault, match=r"the server at .*: process .* is at work on it; wait"),
    ):
        attached(production, tmp_path)


def test_a_kept_file_that_is_none_is_named(production: Production, tmp_path: Path) -> None:
    with contextlib.closing(attached(production, tmp_path)) as target:
        kept = target._kept.path
    kept.write_text("{")
    with pytest.raises(EnvironmentFault, match=f"{kept}: cannot be read .*; see to what .*, then remove that file"):
        attached(production, tmp_path)


def test_a_model_that_it_does_not_have_is_named(production: Production, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"has no model 'other' in its repository \(mlp\)"):
        RemoteTarget(production.grpc, replace(production.source, name="other"), keep=tmp_path)
    assert kept_in(tmp_path) == []


def test_where_nobody_answers_that_is_said(mlp: ModelSource, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ServerFault, match=rf"no tritonserver answers at {address} \(.*refused\); start it"):
        RemoteTarget(Connection(address), mlp, keep=tmp_path)
    assert kept_in(tmp_path) == []


@pytest.mark.parametrize("mode", ["none", "poll"])
def test_a_server_that_manages_its_models_is_refused_unchanged(mode: str, mlp: ModelSource, tmp_path: Path) -> None:
    options = (f"--model-control-mode={mode}", *(["--repository-poll-secs=60"] if mode == "poll" else []))
    with contextlib.closing(Production(mlp, tmp_path / "log", *options)) as production:
        before = production.serving()
        assert before is not None
        with pytest.raises(EnvironmentFault, match="by itself; start it with --model-control-mode=explicit"):
            attached(production, tmp_path / "keep")
        assert production.serving() == before
        assert kept_in(tmp_path / "keep") == []


def test_a_server_that_dies_meanwhile_ends_it_and_says_what_to_see_to(mlp: ModelSource, tmp_path: Path) -> None:
    with contextlib.closing(Production(mlp, tmp_path / "log")) as production:
        production.load(production.model)
        target = attached(production, tmp_path / "keep")
        with pytest.raises(ServerFault, match="no longer answers"), target.deploy(TUNED):  # noqa: PT012
            production.server.stop()
            raise ServerCrashed("no answer")
        told = r"mlp on .*: not as it was: no tritonserver answers at .*; what it served is kept in .*, and"
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


# -- several models -------------------------------------------------------------------------------------------------

COUNT, SIZE, WHOLE = "first/instance_group_count", "first/max_batch_size", "chain/max_batch_size"
SMALL = Candidate(2, True, 300, (), 1, ((COUNT, 2), (SIZE, 4)))
LARGE = Candidate(16, True, 300, (4,), 1, ((WHOLE, 16), (COUNT, 1), (SIZE, 32)))
KILLED = """\
import os, sys
from pathlib import Path
from optimizer.client.connection import Connection
from optimizer.deploy.remote.target import RemoteTarget
from optimizer.sources.pipeline import read_source
from tests.repositories import stored
from tests.stack.test_remote import SMALL

source = read_source(stored(Path(sys.argv[1])), "chain", batcher="second")
with RemoteTarget(Connection(sys.argv[2]), source, keep=Path(sys.argv[3])).deploy(SMALL):
    os.kill(os.getpid(), 9)
"""


@pytest.fixture(scope="module")
def chained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Production]:
    if runtime.running_python() not in runtime.NUMPY_WHEELS:
        pytest.skip("the server serves no models in Python here")
    folder = tmp_path_factory.mktemp("chained")
    (folder / "models").mkdir()
    write_ensemble(folder / "models", milliseconds=1)
    source = read_source(stored(folder / "models"), "chain", batcher="second")
    with contextlib.closing(Production(source, folder / "log")) as server:
        yield server


@pytest.fixture
def all_before(request: pytest.FixtureRequest, chained: Production) -> dict[str, ModelConfig | None]:
    """The ensemble and its steps; an override is of the second step, and the ensemble's own."""
    for name in reversed(chained.source.models):
        chained.unload(name)
    if request.param == "not loaded":
        chained.load("first")
    else:
        chained.load("chain")
    if request.param == "with an override":
        second, chain = chained.serving("second"), chained.serving("chain")
        assert second is not None
        assert chain is not None
        chained.load("second", model_config.apply(Candidate(4, True, 7), second))
        chain.max_batch_size = 4
        chained.load("chain", chain)
    found = chained.all_serving()
    assert (found["chain"] is None) == (request.param == "not loaded")
    assert found["first"] is not None
    return found


def sizes(production: Production) -> tuple[int, ...]:
    found = production.all_serving().values()
    return tuple(0 if config is None else config.max_batch_size for config in found)


@pytest.mark.parametrize("all_before", ["with an override"], indirect=True)
def test_an_ensemble_and_its_steps_are_served_as_wanted_and_put_back(
    chained: Production, all_before: dict[str, ModelConfig | None], tmp_path: Path
) -> None:
    with contextlib.closing(attached(chained, tmp_path)) as target:
        for deploy, candidate, wanted in (
            (target.deploy, SMALL, (4, 2, 2)),
            (target.deploy_as_written, LARGE, (32, 16, 16)),  # larger than the steps that the ensemble loads itself
        ):
            with deploy(candidate) as endpoint:
                assert (endpoint.model, endpoint.batcher) == ("chain", "second")
                assert endpoint.largest_request == wanted[-1]
                assert sizes(chained) == wanted
                second = chained.serving("second")
                assert second is not None
                assert second.dynamic_batching.max_queue_delay_microseconds == 300
        with pytest.raises(DeploymentError), target.deploy(Candidate(8, True, preferred_batch_sizes=(16,))):
            pass
    assert chained.all_serving() == all_before
    assert kept_in(tmp_path) == []


@pytest.mark.parametrize("all_before", ["not loaded"], indirect=True)
def test_several_models_are_put_back_after_a_kill(
    chained: Production, all_before: dict[str, ModelConfig | None], tmp_path: Path
) -> None:
    """Also where one of them was, before the kill."""
    where = [str(chained.source.repository), chained.server.grpc, str(tmp_path)]
    command = [sys.executable, "-c", KILLED, *where]
    assert subprocess.run(command, timeout=60).returncode == -signal.SIGKILL
    assert sizes(chained) == (4, 2, 2)
    chained.unload("chain")
    with contextlib.closing(attached(chained, tmp_path)):
        assert sizes(chained) == (8, 8, 8)
    assert chained.all_serving() == all_before
    assert not [name for name in kept_in(tmp_path) if name.endswith(".json")]


def test_an_ensemble_of_other_steps_is_refused_unchanged(chained: Production, tmp_path: Path) -> None:
    for name in reversed(chained.source.models):
        chained.unload(name)
    other = ModelConfig()
    other.CopyFrom(chained.source.config)
    del other.ensemble_scheduling.step[1]
    source = replace(chained.source, config=other, composing={"first": chained.source.models["first"]}, batcher="")
    with pytest.raises(EnvironmentFault, match=r"chain on .* is made of first, second, here of first; tune the one"):
        RemoteTarget(chained.grpc, source, keep=tmp_path)
    assert [chained.serving(name) for name in chained.source.models] == [None] * 3
    assert kept_in(tmp_path) == []
