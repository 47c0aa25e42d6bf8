"""The server is not reachable from other machines, cannot be sent code, and its folders are private."""

from __future__ import annotations

import stat
import urllib.error
import urllib.request
from dataclasses import replace

import psutil
import pytest

from optimizer.core.candidate import Candidate
from optimizer.core.trial import LoadPoint
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.machine.cpu_usage import process_tree
from optimizer.measure.perf_analyzer import PerfAnalyzer
from tests.stack_fixtures import embedded, mlp, perf_analyzer

__all__ = ["embedded", "mlp", "perf_analyzer"]
CANDIDATE = Candidate(64, dynamic_batching=True)


def test_the_server_listens_on_loopback_alone(embedded: EmbeddedTarget) -> None:
    with embedded.deploy(CANDIDATE) as endpoint:
        assert endpoint.server_pid is not None
        listening = [
            connection.laddr.ip.removeprefix("::ffff:")
            for pid in process_tree(endpoint.server_pid)
            for connection in psutil.Process(pid).net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert set(listening) == {"127.0.0.1"}
        assert len(listening) == 2, "gRPC and HTTP"


@pytest.mark.parametrize("call", ["models/{model}/load", "models/{model}/unload", "index"])
def test_a_web_page_cannot_load_a_model(call: str, embedded: EmbeddedTarget) -> None:
    """A web page may send a plain-text request without own headers to loopback."""
    with embedded.deploy(CANDIDATE) as endpoint:
        url = f"http://{endpoint.http}/v2/repository/{call.format(model=endpoint.model)}"
        request = urllib.request.Request(url, data=b"{}", headers={"Content-Type": "text/plain"}, method="POST")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=240)
        assert refused.value.code == 403


def test_perf_analyzer_measures_over_http_without_the_header(
    embedded: EmbeddedTarget, perf_analyzer: PerfAnalyzer
) -> None:
    with embedded.deploy(CANDIDATE) as endpoint:
        measured = replace(perf_analyzer, protocol="http", repeat=False).measure(endpoint, LoadPoint(1, 2))
    assert (measured.throughput_infer_per_sec or 0) > 0


def test_the_folder_of_the_server_is_private(embedded: EmbeddedTarget) -> None:
    assert stat.S_IMODE(embedded._folder.path.stat().st_mode) == 0o700
