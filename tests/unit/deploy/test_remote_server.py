"""Tests of a running server: the rate of requests of other clients, and the process that listens."""

from __future__ import annotations

import contextlib
import itertools
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2 as messages

from optimizer.core.endpoint import Connection
from optimizer.core.errors import ServerFault
from optimizer.deploy.remote_address import SERVER_PROGRAM, is_tunnel, listener_pid, other_machine_address
from optimizer.deploy.remote_server import OBSERVED_SECONDS, RemoteServer
from optimizer.options.run_options import RunOptions
from tests.inference_server import TRITON_SERVICE, serving_grpc


@contextlib.contextmanager
def serve_counted_requests(
    step: int, *, is_ready: bool = True, gives_statistics: bool = True
) -> Iterator[RemoteServer]:
    """Serve a model whose second version has ``step`` more requests each time that the statistics are read."""
    counts = itertools.count(100, step)

    def statistics(request: messages.ModelStatisticsRequest, _: object) -> messages.ModelStatisticsResponse:
        response = messages.ModelStatisticsResponse()
        response.model_stats.add(name=request.name, version="1")
        response.model_stats.add(name=request.name, version="2").inference_stats.success.count = next(counts)
        return response

    def ready(*_: object) -> messages.ModelReadyResponse:
        return messages.ModelReadyResponse(ready=is_ready)

    methods = {
        "ModelReady": grpc.unary_unary_rpc_method_handler(
            ready, messages.ModelReadyRequest.FromString, messages.ModelReadyResponse.SerializeToString
        ),
        "ModelStatistics": grpc.unary_unary_rpc_method_handler(
            statistics,
            messages.ModelStatisticsRequest.FromString,
            messages.ModelStatisticsResponse.SerializeToString,
        ),
    }
    if not gives_statistics:
        del methods["ModelStatistics"]
    with (
        serving_grpc(grpc.method_handlers_generic_handler(TRITON_SERVICE, methods)) as address,
        contextlib.closing(RemoteServer(Connection(address))) as remote,
    ):
        yield remote


def test_requests_of_other_clients_are_noticed() -> None:
    with serve_counted_requests(50) as server:
        began = time.monotonic()
        rate = server.requests_per_second(["m"])
        assert 50 / (time.monotonic() - began) <= rate <= 50 / OBSERVED_SECONDS


@pytest.mark.parametrize(
    ("step", "is_ready", "gives_statistics"), [(0, True, True), (50, False, True), (50, True, False)]
)
def test_an_unused_server_has_no_rate(step: int, is_ready: bool, gives_statistics: bool) -> None:
    with serve_counted_requests(step, is_ready=is_ready, gives_statistics=gives_statistics) as server:
        assert server.requests_per_second(["m"]) == 0


def test_a_model_may_answer_the_requests_in_its_queue_as_long_as_a_load_may_take() -> None:
    """The server has a model that is UNLOADING until its requests are answered."""
    answering = messages.RepositoryIndexResponse()
    answering.models.add(name="m", state="UNLOADING")
    methods = {
        "RepositoryModelUnload": grpc.unary_unary_rpc_method_handler(
            lambda *_: messages.RepositoryModelUnloadResponse(),
            messages.RepositoryModelUnloadRequest.FromString,
            messages.RepositoryModelUnloadResponse.SerializeToString,
        ),
        "RepositoryIndex": grpc.unary_unary_rpc_method_handler(
            lambda *_: answering,
            messages.RepositoryIndexRequest.FromString,
            messages.RepositoryIndexResponse.SerializeToString,
        ),
    }
    load_seconds = 0.5
    with (
        serving_grpc(grpc.method_handlers_generic_handler(TRITON_SERVICE, methods)) as address,
        contextlib.closing(RemoteServer(Connection(address), load_seconds)) as remote,
    ):
        began = time.monotonic()
        with pytest.raises(ServerFault, match=rf"m on {address} was not unloaded within 0\.5 s; if it still"):
            remote.unload("m")
        assert time.monotonic() - began >= load_seconds


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_tunnel_is_not_taken_for_the_server(host: str) -> None:
    """Its memory and CPU time are not those of the server, which may be on another machine."""
    with socket.create_server(("127.0.0.1", 0)) as tunnel:
        address = f"{host}:{tunnel.getsockname()[1]}"
        assert listener_pid(address) is None
        assert is_tunnel(address)
        assert other_machine_address(RunOptions("mlp", target="remote", url=address)) == address
    assert not is_tunnel(address), "nothing listens"
    assert other_machine_address(RunOptions("mlp", target="remote", url=address)) == ""


def test_the_process_of_a_server_is_found_by_the_name_of_its_program(tmp_path: Path) -> None:
    """A program of that name listens."""
    program = tmp_path / SERVER_PROGRAM
    program.symlink_to(sys.executable)
    code = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); "
        "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([program, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = f"localhost:{server.stdout.readline().strip()}"
        assert listener_pid(address) == server.pid
        assert not is_tunnel(address)
        assert listener_pid(address.replace("localhost", "192.0.2.1")) is None
        server.communicate()
