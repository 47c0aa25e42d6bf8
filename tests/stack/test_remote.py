"""A running server is left as it was, even if the process that tunes on it is killed."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer.config import model_config
from optimizer.config.model_source import ModelSource
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Connection, Endpoint
from optimizer.core.errors import DeploymentError, EnvironmentFault, ServerCrashed, ServerFault
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.remote_address import listener_pid
from optimizer.deploy.remote_target import RemoteTarget
from optimizer.machine.process_telemetry import ProcessTelemetry
from optimizer.measure.model_statistics import read_statistics
from optimizer.measure.server_calls import open_client
from optimizer.model.repository import read_repository_model, read_source
from tests.command_fixtures import HANG_SECONDS, RUN_SECONDS, Sandbox, eventually
from tests.remote_server import RunningServer
from tests.repositories import skip_without_python_models, stored, write_ensemble, write_sleeper

TUNED = Candidate(16, True, 500, (4, 8))


@pytest.fixture(scope="module")
def production(mlp: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with contextlib.closing(RunningServer(mlp, tmp_path_factory.mktemp("production") / "log")) as server:
        yield server


def attached(production: RunningServer, keep: Path) -> RemoteTarget:
    return RemoteTarget(production.grpc, production.source, state_folder=keep)


def saved_states(folder: Path) -> list[str]:
    """Return the saved state of the server."""
    return sorted(path.name for path in folder.iterdir())


BEFORE = ("from its repository", "with an override", "not loaded")


@pytest.fixture
def before(request: pytest.FixtureRequest, production: RunningServer) -> ModelConfig | None:
    """Return the configurations that the server had before."""
    production.unload(production.model)
    if request.param != "not loaded":
        production.load(production.model)
    if request.param == "with an override":
        config = production.serving()
        assert config is not None
        production.load(production.model, model_config.apply(Candidate(32, True, 7), config))
    return production.serving()


@pytest.mark.parametrize(
    ("before", "is_fresh"), [*zip(BEFORE, (True, False, False), strict=True)], indirect=["before"]
)
def test_the_former_configuration_is_restored(
    production: RunningServer, before: ModelConfig | None, tmp_path: Path, *, is_fresh: bool
) -> None:
    target = attached(production, tmp_path)
    with contextlib.closing(target), target.deploy(TUNED, fresh=is_fresh) as endpoint:
        now = production.serving()
        assert now is not None
        assert model_config.differences(TUNED, now) == []
        assert endpoint.server_pid == listener_pid(production.server.grpc)
        assert psutil.Process(endpoint.server_pid).name() == "tritonserver"
    assert production.serving() == before
    assert saved_states(tmp_path) == []


def test_the_copy_of_the_repository_needs_only_the_configuration(production: RunningServer, tmp_path: Path) -> None:
    """The model of the server is in a bucket, for example."""
    copy = tmp_path / "models" / production.model
    copy.mkdir(parents=True)
    (copy / "config.pbtxt").write_text(model_config.to_text(production.source.config))
    source = read_repository_model(copy.parent, production.model, gpu=False, is_embedded=False)
    with (
        contextlib.closing(RemoteTarget(production.grpc, source, state_folder=tmp_path / "keep")) as target,
        target.deploy(TUNED),
    ):
        now = production.serving()
        assert now is not None
        assert model_config.differences(TUNED, now) == []


@pytest.mark.parametrize("before", ["with an override"], indirect=True)
def test_the_next_target_restores_after_a_killed_process(
    production: RunningServer, before: ModelConfig | None, tmp_path: Path
) -> None:
    killed = attached(production, tmp_path)
    with killed.deploy(TUNED):
        pass
    killed._open.close()  # as when the process is killed: only the lock is released
    assert production.serving() != before
    messages: list[str] = []
    other = replace(production.source, name="other")
    with pytest.raises(EnvironmentFault, match="has no model 'other'"):  # the next target is for another model
        RemoteTarget(production.grpc, other, state_folder=tmp_path, on_progress=messages.append)
    assert messages == [f"restoring what an earlier run has changed on the server at {production.server.grpc}"]
    assert production.serving() == before
    assert saved_states(tmp_path) == []


SLOW_SECONDS = 2.0  # longer than the time after which a second interrupt is accepted
INTERRUPTED = """\
import contextlib, sys, time
from pathlib import Path
from optimizer.core import interrupts
from optimizer.core.endpoint import Connection
from optimizer.deploy.remote_target import RemoteTarget
from optimizer.core.candidate import Candidate
from tests.repositories import stored

interrupts.install()
source = stored(Path(sys.argv[1]))("sleeper")
try:
    with contextlib.closing(RemoteTarget(Connection(sys.argv[2]), source, state_folder=Path(sys.argv[3]))) as target:
        with target.deploy(Candidate(4)):
            print("deployed", flush=True)
            while True:  # pause() would miss a signal that comes just before it
                time.sleep(0.01)
except KeyboardInterrupt:
    interrupts.acknowledge()
    print("interrupted")
"""


def test_a_model_that_loads_slowly_is_restored_despite_interrupts(tmp_path: Path) -> None:
    skip_without_python_models()
    write_sleeper(tmp_path / "models", milliseconds=1, loading_seconds=SLOW_SECONDS)
    source, keep = stored(tmp_path / "models")("sleeper"), tmp_path / "keep"
    with contextlib.closing(RunningServer(source, tmp_path / "log")) as server:
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
    assert not [name for name in saved_states(keep) if name.endswith(".json")]


@pytest.fixture
def two_versions(tmp_path: Path) -> Iterator[RunningServer]:
    """Yield a server with two versions of the model ``sleeper``, both loaded."""
    skip_without_python_models()
    folder = write_sleeper(tmp_path / "models", milliseconds=1)
    shutil.copytree(folder / "1", folder / "2")
    with (folder / "config.pbtxt").open("a") as config:
        config.write("version_policy { all { } }\n")
    with contextlib.closing(RunningServer(stored(tmp_path / "models")("sleeper"), tmp_path / "log")) as server:
        server.load("sleeper")
        yield server


def test_the_requests_of_all_versions_are_counted(two_versions: RunningServer) -> None:
    samples = InferInput("x", [1, 4], "FP32").set_data_from_numpy(np.zeros((1, 4), np.float32))
    with InferenceServerClient(two_versions.server.grpc) as client:
        client.infer("sleeper", [samples])
        client.infer("sleeper", [samples], model_version="1")

    def counts() -> set[int]:
        endpoints = [Endpoint("sleeper", Candidate(8), remote=at) for at in (two_versions.grpc, two_versions.http)]
        return {int(total.inference_count) for total in map(read_statistics, endpoints) if total is not None}

    assert eventually(lambda: counts() == {2}, HANG_SECONDS)


def test_a_model_is_loaded_while_any_version_is(two_versions: RunningServer) -> None:
    config = two_versions.serving()
    assert config is not None
    config.version_policy.specific.versions.append(1)
    two_versions.load("sleeper", config)
    for connection in (two_versions.grpc, two_versions.http):
        with contextlib.closing(open_client(connection)) as client:
            assert client.index() == {"sleeper": True}
    two_versions.unload("sleeper")
    for connection in (two_versions.grpc, two_versions.http):
        with contextlib.closing(open_client(connection)) as client:
            assert client.index() == {"sleeper": False}


@contextlib.contextmanager
def other_client(production: RunningServer) -> Iterator[None]:
    """Send requests one after another while the context is open."""
    ended, sent = threading.Event(), threading.Event()
    samples = InferInput("input", [1, 64], "FP32").set_data_from_numpy(np.zeros((1, 64), np.float32))

    def send() -> None:
        with contextlib.closing(InferenceServerClient(production.server.grpc)) as client:
            while not ended.is_set():
                client.infer(production.model, [samples])
                sent.set()

    thread = threading.Thread(target=send)
    thread.start()
    try:
        assert sent.wait(HANG_SECONDS)
        yield
    finally:
        ended.set()
        thread.join()


def test_requests_of_other_clients_are_reported_before_the_first_change(
    production: RunningServer, tmp_path: Path
) -> None:
    production.load(production.model)
    messages: list[str] = []
    with other_client(production):
        RemoteTarget(production.grpc, production.source, state_folder=tmp_path, on_progress=messages.append).close()
    (message,) = messages
    assert re.match(rf"WARNING: the server at {production.server.grpc} gets [\d,]+ requests/s of other", message)
    messages.clear()
    RemoteTarget(production.grpc, production.source, state_folder=tmp_path, on_progress=messages.append).close()
    assert messages == []


@pytest.mark.parametrize("served", [None, Candidate(32, True, 7)])
def test_a_baseline_that_the_server_did_not_have_is_reported_once(
    served: Candidate | None, production: RunningServer, tmp_path: Path
) -> None:
    production.unload(production.model)  # it may have the configuration of another test
    production.load(production.model)
    config = production.serving()
    assert config is not None
    if served is not None:
        production.load(production.model, model_config.apply(served, config))
    messages: list[str] = []
    baseline = model_config.candidate_of(production.source.config)
    target = RemoteTarget(production.grpc, production.source, state_folder=tmp_path, on_progress=messages.append)
    with contextlib.closing(target):
        for candidate in (TUNED, baseline, baseline):
            with target.deploy(candidate):
                pass
    assert len(messages) == (served is not None)
    for message in messages:
        assert message.startswith(f"WARNING: the server at {production.server.grpc} had other settings than ")
        assert "dynamic_batching is on, wanted off" in message


def test_a_second_target_on_the_same_server_is_refused(production: RunningServer, tmp_path: Path) -> None:
    with (
        contextlib.closing(attached(production, tmp_path)),
        pytest.raises(EnvironmentFault, match=r"the server at .*: process .* is tuning on it; wait"),
    ):
        attached(production, tmp_path)


def test_an_unreadable_saved_state_is_reported_with_its_path(production: RunningServer, tmp_path: Path) -> None:
    with contextlib.closing(attached(production, tmp_path)) as target:
        kept = target._state_file.path
    kept.write_text("{")
    with pytest.raises(EnvironmentFault, match=f"{kept}: cannot be read .*; check what .*, then remove that file"):
        attached(production, tmp_path)


def test_a_model_that_the_server_lacks_is_reported(production: RunningServer, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"has no model 'other' in its repository \(mlp\)"):
        RemoteTarget(production.grpc, replace(production.source, name="other"), state_folder=tmp_path)
    assert saved_states(tmp_path) == []


def test_an_address_without_a_server_is_reported(mlp: ModelSource, tmp_path: Path) -> None:
    with socket.socket() as taken:  # it does not listen, and no other program can take its port
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ServerFault, match=rf"no tritonserver responds at {address} \(.*refused\); start it"):
            RemoteTarget(Connection(address), mlp, state_folder=tmp_path)
    assert saved_states(tmp_path) == []


@pytest.mark.parametrize("mode", ["none", "poll"])
def test_a_server_that_manages_its_models_is_refused_unchanged(mode: str, mlp: ModelSource, tmp_path: Path) -> None:
    options = (f"--model-control-mode={mode}", *(["--repository-poll-secs=60"] if mode == "poll" else []))
    with contextlib.closing(RunningServer(mlp, tmp_path / "log", *options)) as production:
        before = production.serving()
        assert before is not None
        with pytest.raises(EnvironmentFault, match="by itself; start it with --model-control-mode=explicit"):
            attached(production, tmp_path / "keep")
        assert production.serving() == before
        assert saved_states(tmp_path / "keep") == []


def test_a_server_that_dies_ends_the_run_with_the_path_of_its_state(mlp: ModelSource, tmp_path: Path) -> None:
    with contextlib.closing(RunningServer(mlp, tmp_path / "log")) as production:
        production.load(production.model)
        target = attached(production, tmp_path / "keep")
        with pytest.raises(ServerFault, match="no longer answers"), target.deploy(TUNED):  # noqa: PT012
            production.server.stop()
            raise ServerCrashed("no answer")
        message = r"mlp on .*: not restored: no tritonserver responds at .*; its state is saved in .*, and"
        with pytest.raises(ServerFault, match=message) as caught:
            target.close()
        (kept,) = (tmp_path / "keep").iterdir()
        assert str(kept) in str(caught.value)
        target.close()


def test_a_run_whose_server_dies_names_the_cause_and_the_commands_that_go_on(
    mlp: ModelSource, sandbox: Sandbox, tmp_path: Path
) -> None:
    with contextlib.closing(RunningServer(mlp, tmp_path / "log")) as production:
        production.load(production.model)
        words = ("--target", "remote", "--url", production.server.grpc, "--sla-p95", "500ms", "--budget", "60s")
        run = sandbox.fork(*words, "--measurement-interval", "100ms", "mlp")
        tables = sandbox.working_folder / "results" / "mlp"
        is_measured = eventually(
            lambda: any(len(path.read_text().splitlines()) > 1 for path in tables.glob("*/trials.csv")), 120
        )
        production.server.stop()
        _, errors = run.communicate(timeout=RUN_SECONDS)
    saved = re.search(r"its state is saved in (\S+),", errors)
    assert saved is not None, errors
    Path(saved[1]).unlink()  # this server does not start again
    assert is_measured
    assert run.returncode == 3
    (folder,) = tables.iterdir()
    cause, restored, kept = [line for line in errors.splitlines() if line.startswith("tune: ")]
    assert re.search("no longer answers|does not answer|no tritonserver responds", cause)  # measuring or loading
    assert "not restored" in restored
    assert "not restored" not in cause
    assert kept.startswith("tune: the measurements are kept; to continue: tune --resume ")
    assert sandbox.working_folder / kept.rpartition(" ")[2] == folder
    assert json.loads((folder / "run.json").read_text())["reason"] == cause.removeprefix("tune: ")


def test_the_embedded_server_is_found_by_its_port(embedded: EmbeddedTarget) -> None:
    with embedded.deploy(Candidate(8)) as endpoint:
        pid = listener_pid(endpoint.grpc)
        assert pid is not None
        assert psutil.Process(pid).name() == "tritonserver"
    assert listener_pid("192.0.2.1:8001") is None


def pass_on(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


@pytest.fixture
def tunnel(production: RunningServer) -> Iterator[str]:
    """Return the local end of a tunnel to the server, as ``ssh -L`` makes one, which this process serves."""
    host, _, port = production.server.grpc.rpartition(":")
    with contextlib.ExitStack() as sockets:
        listening = sockets.enter_context(socket.create_server(("127.0.0.1", 0)))

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    near = sockets.enter_context(listening.accept()[0])
                    far = sockets.enter_context(socket.create_connection((host, int(port))))
                    for ends in ((near, far), (far, near)):
                        threading.Thread(target=pass_on, args=ends, daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


def test_the_process_of_a_tunnel_is_not_measured(production: RunningServer, tunnel: str, tmp_path: Path) -> None:
    """Otherwise its memory would be the limit that is emitted for the server."""
    production.load(production.model)
    target = RemoteTarget(Connection(tunnel), production.source, state_folder=tmp_path)
    with contextlib.closing(target), target.deploy(TUNED) as endpoint, ProcessTelemetry().record(endpoint) as usage:
        now = production.serving()
        assert now is not None
        assert model_config.differences(TUNED, now) == []
    assert endpoint.server_pid is None
    assert usage.server_memory_bytes is None
    assert usage.other_cpu_share is None


# -- several models -------------------------------------------------------------------------------------------------

COUNT, SIZE, WHOLE = "first/instance_group_count", "first/max_batch_size", "chain/max_batch_size"
SMALL = Candidate(2, True, 300, (), 1, ((COUNT, 2), (SIZE, 4)))
LARGE = Candidate(16, True, 300, (4,), 1, ((WHOLE, 16), (COUNT, 1), (SIZE, 32)))
KILLED = """\
import os, sys
from pathlib import Path
from optimizer.core.endpoint import Connection
from optimizer.deploy.remote_target import RemoteTarget
from optimizer.model.repository import read_source
from tests.repositories import stored
from tests.stack.test_remote import SMALL

source = read_source(stored(Path(sys.argv[1])), "chain", batcher="second")
with RemoteTarget(Connection(sys.argv[2]), source, state_folder=Path(sys.argv[3])).deploy(SMALL):
    os.kill(os.getpid(), 9)
"""


@pytest.fixture(scope="module")
def chained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    skip_without_python_models()
    folder = tmp_path_factory.mktemp("chained")
    (folder / "models").mkdir()
    write_ensemble(folder / "models", milliseconds=1)
    source = read_source(stored(folder / "models"), "chain", batcher="second")
    with contextlib.closing(RunningServer(source, folder / "log")) as server:
        yield server


@pytest.fixture
def all_before(request: pytest.FixtureRequest, chained: RunningServer) -> dict[str, ModelConfig | None]:
    """Return the configurations of the ensemble and its steps; overrides are of the second step and the ensemble."""
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
    configs = chained.all_serving()
    assert (configs["chain"] is None) == (request.param == "not loaded")
    assert configs["first"] is not None
    return configs


def sizes(production: RunningServer) -> tuple[int, ...]:
    configs = production.all_serving().values()
    return tuple(0 if config is None else config.max_batch_size for config in configs)


@pytest.mark.parametrize("all_before", ["with an override"], indirect=True)
def test_an_ensemble_and_its_steps_are_served_and_restored(
    chained: RunningServer, all_before: dict[str, ModelConfig | None], tmp_path: Path
) -> None:
    refused = Candidate(8, True, preferred_batch_sizes=(16,))
    with contextlib.closing(attached(chained, tmp_path)) as target:
        for fresh, candidate, batch_sizes in (
            (False, SMALL, (4, 2, 2)),
            (True, LARGE, (32, 16, 16)),  # larger than the steps that the ensemble loads itself
        ):
            with target.deploy(candidate, fresh=fresh) as endpoint:
                assert (endpoint.model, endpoint.batcher) == ("chain", "second")
                assert endpoint.largest_request == batch_sizes[-1]
                assert sizes(chained) == batch_sizes
                second = chained.serving("second")
                assert second is not None
                assert second.dynamic_batching.max_queue_delay_microseconds == 300
        with pytest.raises(DeploymentError, match="failed to load 'second'"), target.deploy(refused):
            pass
    assert chained.all_serving() == all_before
    assert saved_states(tmp_path) == []


@pytest.mark.parametrize("all_before", ["not loaded"], indirect=True)
def test_several_models_are_restored_after_a_kill(
    chained: RunningServer, all_before: dict[str, ModelConfig | None], tmp_path: Path
) -> None:
    """The models are restored even if one of them was not loaded before."""
    where = [str(chained.source.repository), chained.server.grpc, str(tmp_path)]
    command = [sys.executable, "-c", KILLED, *where]
    assert subprocess.run(command, timeout=240).returncode == -signal.SIGKILL
    assert sizes(chained) == (4, 2, 2)
    chained.unload("chain")
    with contextlib.closing(attached(chained, tmp_path)):
        assert sizes(chained) == (8, 8, 8)
    assert chained.all_serving() == all_before
    assert not [name for name in saved_states(tmp_path) if name.endswith(".json")]


def test_an_ensemble_of_other_steps_is_refused_unchanged(chained: RunningServer, tmp_path: Path) -> None:
    for name in reversed(chained.source.models):
        chained.unload(name)
    other = ModelConfig()
    other.CopyFrom(chained.source.config)
    del other.ensemble_scheduling.step[1]
    source = replace(chained.source, config=other, composing={"first": chained.source.models["first"]}, batcher="")
    with pytest.raises(
        EnvironmentFault, match=r"chain on .* consists of first, second, but here of first; tune the model"
    ):
        RemoteTarget(chained.grpc, source, state_folder=tmp_path)
    assert [chained.serving(name) for name in chained.source.models] == [None] * 3
    assert saved_states(tmp_path) == []
