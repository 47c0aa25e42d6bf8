"""``tune serve`` on the real server: it serves the recommendation until a signal, and nothing is left."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from threading import Event
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pytest
from tritonclient import grpc, http
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from optimizer.core.candidate import SERVER_PROCESSES
from optimizer.deploy import runtime
from optimizer.deploy.target_settings import free_port
from optimizer.options.run_options import RunOptions
from tests.command_fixtures import HANG_SECONDS, Sandbox, Tune, eventually
from tests.emitted_files import recommendation_of
from tests.forked_tune import ForkedTune
from tests.repositories import (
    ENSEMBLE_CONFIG,
    SLEEPER_CONFIG,
    doubler,
    write_ensemble,
    write_model,
    write_python_model,
    write_sleeper,
)
from tests.run_folders import write_run
from tests.user_installation import write_installation

CURRENT = """\
name: "doubler"
platform: "onnxruntime_onnx"
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
instance_group { kind: KIND_CPU }
"""
WAITING_PROGRAM = """\
import time
import uuid
from pathlib import Path

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        Path(FOLDER, f"{uuid.uuid4()}.batch").touch()
        while not Path(FOLDER, "go").exists():
            time.sleep(0.02)
        inputs = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]) for x in inputs]
"""


def write_recommendation(sandbox: Sandbox, processes: int) -> Path:
    """Write a model repository, and a run in it that recommends the configuration of ``config_text``."""
    folder = sandbox.working_folder
    write_model(folder / "models", "doubler", CURRENT, doubler())
    options = RunOptions("doubler", model_repository=str(folder / "models"))
    return write_run(folder, options=options, fields={SERVER_PROCESSES: [1, processes]})


@contextmanager
def serving(sandbox: Sandbox, *words: str | Path) -> Iterator[tuple[ForkedTune, dict[str, Any]]]:
    """Start ``tune serve`` and yield it with its document, when it is ready."""
    process = sandbox.fork("serve", "--json", *words)
    try:
        text = ""
        while not text.endswith("\n}\n"):
            line = process.stdout.readline()
            assert line, process.stderr.read()
            text += line
        yield process, json.loads(text)
    finally:
        process.kill()


def end(process: ForkedTune, sandbox: Sandbox) -> tuple[int, list[str]]:
    """Wait for the end and return the exit code and the lines of standard error; check that nothing is left."""
    _, errors = process.communicate(timeout=HANG_SECONDS)
    assert sandbox.processes() == []
    assert sandbox.shared_memory(process.pid) == []
    return process.returncode, errors.splitlines()


def test_the_recommendation_is_served_and_watched_until_ctrl_c(sandbox: Sandbox, tune: Tune) -> None:
    run, port = write_recommendation(sandbox, 1), free_port()
    with serving(sandbox, run, "--grpc-port", str(port)) as (process, shown):
        (server,) = shown["servers"]
        assert server["grpc"] == f"127.0.0.1:{port}"
        with InferenceServerClient(server["grpc"]) as client:
            config = client.get_model_config("doubler").config
            recommended = recommendation_of(run).configs["doubler"]
            assert config.max_batch_size == recommended.max_batch_size == 8
            assert config.dynamic_batching.max_queue_delay_microseconds == 100
            assert list(config.dynamic_batching.preferred_batch_size) == [4]
            assert [group.count for group in config.instance_group] == [2]
            values = np.arange(8, dtype=np.float32).reshape(2, 4)
            request = InferInput("x", [2, 4], "FP32")
            request.set_data_from_numpy(values)
            answer = client.infer("doubler", [request]).as_numpy("y")
            assert np.array_equal(answer, 2 * values)
            watched = watched_at_work(tune, run, server["metrics"], lambda: client.infer("doubler", [request]))
        assert watched["verdict"] == "UNDECIDED", "there are too few requests"
        assert "p95 in the server" in {check["name"] for check in watched["checks"]}
        refused = tune("runs", "--delete", run, "--yes")
        assert (refused.code, len(refused.errors)) == (3, 1)
        assert f"process {process.pid} on " in refused.errors[0]
        assert " uses this run" in refused.errors[0]
        process.send_signal(signal.SIGINT)
        code, lines = end(process, sandbox)
    assert (code, lines[-3::2]) == (0, ["serving until Ctrl-C", "stopped"])
    assert Path(shown["logs"], "tritonserver.log").stat().st_size
    assert tune("runs", "--delete", run, "--yes").code == 0
    assert not run.exists()


def watched_at_work(tune: Tune, run: Path, metrics: str, send: Callable[[], object]) -> dict[str, Any]:
    """Call ``send`` again and again, and return the document of ``tune watch`` meanwhile."""
    ended = Event()

    def send_until_the_end() -> None:
        while not ended.wait(0.02):
            send()

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send_until_the_end)
        try:
            watched = tune("watch", run, "--url", metrics, "--interval", "200ms", "--intervals", "2", "--json")
        finally:
            ended.set()
        sending.result(HANG_SECONDS)
    document: dict[str, Any] = json.loads(watched.stdout)
    return document


def write_waiting_run(sandbox: Sandbox) -> Path:
    """Write a run of a model that writes a file for each batch, and completes it when there is a file ``go``."""
    folder = sandbox.working_folder
    write_python_model(folder / "models", "waiting", WAITING_PROGRAM.replace("FOLDER", repr(str(folder))))
    batching = "dynamic_batching { preferred_batch_size: 4 max_queue_delay_microseconds: 100 }\n"
    config = f'name: "waiting"\n{SLEEPER_CONFIG.replace("count: 1", "count: 2")}{batching}'
    options = RunOptions("", model_repository=str(folder / "models"))
    return write_run(folder, "waiting", configs={"waiting": config}, options=options)


def infer_waiting(module: ModuleType, address: str) -> bool:
    """Send a request of the largest batch with a client of tritonclient; return whether the outputs are right."""
    values = np.arange(32, dtype=np.float32).reshape(8, 4)
    request = module.InferInput("x", [8, 4], "FP32")
    request.set_data_from_numpy(values)
    patience = {"network_timeout": HANG_SECONDS} if module is http else {}
    with module.InferenceServerClient(address, **patience) as client:
        return np.array_equal(client.infer("waiting", [request]).as_numpy("y"), values)


@contextmanager
def requests_in_flight(sandbox: Sandbox, server: dict[str, str]) -> Iterator[list[Future[bool]]]:
    """Send a request over gRPC and one over HTTP, and yield when each is in an instance of the model."""
    clients = [(grpc, server["grpc"]), (http, server["http"].removeprefix("http://"))]
    with ThreadPoolExecutor(len(clients)) as pool:
        futures = [pool.submit(infer_waiting, *client) for client in clients]
        assert eventually(lambda: len(list(sandbox.working_folder.glob("*.batch"))) == len(clients), HANG_SECONDS)
        yield futures


def press_ctrl_c(process: ForkedTune) -> None:
    """Press Ctrl-C and wait until ``tune serve`` completes the requests in flight."""
    process.send_signal(signal.SIGINT)
    assert any(line.startswith("completing the requests in flight") for line in process.stderr)


def test_requests_in_flight_complete_at_ctrl_c(sandbox: Sandbox) -> None:
    """An idle HTTP connection, which Triton itself would wait for, and further SIGTERMs do not matter."""
    with serving(sandbox, write_waiting_run(sandbox)) as (process, shown):
        (server,) = shown["servers"]
        idle = HTTPConnection(server["http"].removeprefix("http://"))
        idle.request("GET", "/v2/health/live")
        assert idle.getresponse().read() == b""
        with requests_in_flight(sandbox, server) as futures:
            press_ctrl_c(process)
            process.send_signal(signal.SIGTERM)
            with InferenceServerClient(server["grpc"]) as client:
                assert eventually(lambda: not client.is_model_ready("waiting"), HANG_SECONDS)
            with pytest.raises(InferenceServerException, match="no available versions"):
                infer_waiting(grpc, server["grpc"])
            assert not any(future.done() for future in futures)
            (sandbox.working_folder / "go").touch()
            assert [future.result(HANG_SECONDS) for future in futures] == [True, True]
        assert end(process, sandbox) == (0, ["stopped"])
        idle.close()


def test_a_file_next_to_the_models_that_is_removed_meanwhile_does_not_matter(sandbox: Sandbox) -> None:
    """Triton cannot list its models while the link to such a file leads nowhere."""
    folder = sandbox.working_folder
    write_ensemble(folder / "models", 1.0)
    words = folder / "models" / "words.txt"
    words.write_text("a\n")
    batching = "dynamic_batching { preferred_batch_size: 4 max_queue_delay_microseconds: 100 }\n"
    configs = {
        "chain": f'name: "chain"\n{ENSEMBLE_CONFIG}',
        "first": f'name: "first"\n{SLEEPER_CONFIG.replace("count: 1", "count: 2")}{batching}',
        "second": f'name: "second"\n{SLEEPER_CONFIG}',
    }
    run = write_run(folder, "chain", configs=configs, options=RunOptions("", model_repository=str(folder / "models")))
    with serving(sandbox, run) as (process, _):
        words.unlink()
        press_ctrl_c(process)
        assert end(process, sandbox) == (0, ["stopped"])


@pytest.mark.parametrize("ends", ["by a second Ctrl-C", "at the timeout", "with the server"])
def test_requests_that_do_not_complete_are_ended(ends: str, sandbox: Sandbox) -> None:
    timeout = "1s" if ends == "at the timeout" else "1h"
    with serving(sandbox, write_waiting_run(sandbox), "--exit-timeout", timeout) as (process, shown):
        with requests_in_flight(sandbox, shown["servers"][0]) as futures:
            press_ctrl_c(process)
            if ends == "by a second Ctrl-C":
                process.send_signal(signal.SIGINT)
            elif ends == "with the server":
                (server,) = server_processes(process)
                server.kill()
            assert all(future.exception(HANG_SECONDS) for future in futures)
        code, lines = end(process, sandbox)
    if ends == "with the server":
        assert (code, lines[0]) == (
            3,
            "tune: tritonserver died (SIGKILL) while completing the requests in flight",
        )
    else:
        assert (code, lines) == (0, ["stopped; requests and streams that were still open have failed"])


def server_processes(process: ForkedTune) -> list[psutil.Process]:
    """Return the processes of tritonserver below ``process``."""
    below = psutil.Process(process.pid).children(recursive=True)
    return [running for running in below if running.name() == "tritonserver"]


def test_a_server_process_that_dies_ends_all_with_its_log(sandbox: Sandbox) -> None:
    with serving(sandbox, write_recommendation(sandbox, 2)) as (process, shown):
        assert len({address for server in shown["servers"] for address in server.values()}) == 6
        with InferenceServerClient(shown["servers"][1]["grpc"]) as client:
            name = client.get_server_metadata().name
        (server,) = (running for running in server_processes(process) if f"--id={name}" in running.cmdline())
        server.kill()
        code, lines = end(process, sandbox)
    assert code == 3
    assert lines[-2] == "tune: server process 2 of 2: tritonserver died (SIGKILL) while serving"
    assert lines[-1] == f"tune: log: {shown['logs']}/tritonserver-2.log"


def test_a_model_process_that_dies_ends_the_server(sandbox: Sandbox) -> None:
    """Triton does not replace it, and fails all requests that it gets."""
    with serving(sandbox, write_recommendation(sandbox, 1)) as (process, _):
        stubs = [
            running
            for running in psutil.Process(process.pid).children(recursive=True)
            if "triton_python_backend_stub" in " ".join(running.cmdline()[:1])
        ]
        assert len(stubs) == 2, "one for each instance"
        stubs[0].kill()
        code, lines = end(process, sandbox)
    assert code == 3
    assert lines[-2].startswith("tune: the process of a model has died, and Triton does not replace it")


def test_a_server_of_the_user_is_served_until_sigterm(sandbox: Sandbox, tmp_path: Path) -> None:
    """It gets no option that its ``--help`` does not list."""
    folder = sandbox.working_folder
    write_sleeper(folder / "models", 1.0)
    program = write_installation(tmp_path / "installation", runtime.ensure(print))
    *preparation, start = program.read_text().splitlines()
    helping = f'[ "$1" = --help ] && {start.removeprefix("exec ")} 2>&1 | grep -v metrics-config && exit'
    program.write_text("\n".join([*preparation, helping, start, ""]))
    options = RunOptions("", target="local", tritonserver=str(program), model_repository=str(folder / "models"))
    batching = "dynamic_batching { preferred_batch_size: 4 max_queue_delay_microseconds: 100 }\n"
    config = f'name: "sleeper"\n{SLEEPER_CONFIG.replace("count: 1", "count: 2")}{batching}'
    run = write_run(folder, "sleeper", configs={"sleeper": config}, options=options)
    with serving(sandbox, run) as (process, shown):
        with InferenceServerClient(shown["servers"][0]["grpc"]) as client:
            assert [group.count for group in client.get_model_config("sleeper").config.instance_group] == [2]
        process.send_signal(signal.SIGTERM)
        assert end(process, sandbox)[0] == 0
    (command,) = (
        line for line in Path(shown["logs"], "commands.log").read_text().splitlines() if "--metrics-port" in line
    )
    assert "metrics-config" not in command


def test_a_model_whose_configuration_has_changed_is_refused(sandbox: Sandbox, tune: Tune) -> None:
    run = write_recommendation(sandbox, 1)
    config = sandbox.working_folder / "models" / "doubler" / "config.pbtxt"
    config.write_text(CURRENT + "version_policy { all {} }\n")
    (line,) = tune("serve", run).errors
    assert "the configuration of doubler has changed since the run; restore config.pbtxt" in line
    shutil.rmtree(sandbox.working_folder / "models" / "doubler")
    (line,) = tune("serve", run).errors
    assert "doubler" in line
