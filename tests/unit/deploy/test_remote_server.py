"""The rate of requests of other clients, read from the statistics of a running server."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from tritonclient.grpc import service_pb2 as messages

from optimizer.core.endpoint import Connection
from optimizer.deploy.remote_server import OBSERVED_SECONDS, RemoteServer


@contextlib.contextmanager
def counting(step: int, *, is_ready: bool = True, gives_statistics: bool = True) -> Iterator[RemoteServer]:
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
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("inference.GRPCInferenceService", methods)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with contextlib.closing(RemoteServer(Connection(f"127.0.0.1:{port}"))) as remote:
        yield remote
    server.stop(None).wait()


def test_requests_of_other_clients_are_noticed() -> None:
    with counting(50) as server:
        began = time.monotonic()
        rate = server.requests_per_second(["m"])
        assert 50 / (time.monotonic() - began) <= rate <= 50 / OBSERVED_SECONDS


@pytest.mark.parametrize(
    ("step", "is_ready", "gives_statistics"), [(0, True, True), (50, False, True), (50, True, False)]
)
def test_an_unused_server_has_no_rate(step: int, is_ready: bool, gives_statistics: bool) -> None:
    with counting(step, is_ready=is_ready, gives_statistics=gives_statistics) as server:
        assert server.requests_per_second(["m"]) == 0
