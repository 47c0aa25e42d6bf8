"""``tune --load rate`` and ``tune verify --target remote``: batches that all take as long, a mix of request sizes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from optimizer import runtime
from optimizer.sources.repository import read_repository_model
from tests.command_fixtures import Run, playing_in, run_tune
from tests.production import Production
from tests.repositories import write_sleeper

pytestmark = pytest.mark.alone

BATCH_MS = 4
SLA_MS = 30.0
ALONE_PER_SECOND = 1000 / BATCH_MS  # requests that one instance serves without batches
SAMPLES = 1.5  # of a request, on average
PROFILE = """\
model: {repository: models, name: sleeper}
load: {max_concurrency: 16}
request: {batch_size: 1*3|3*1}
space:
  max_queue_delay_microseconds: [off, 0]
  instance_group_count: [1]
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    if runtime.running_python() not in runtime.NUMPY_WHEELS:
        pytest.skip("the server serves no models in Python here")
    with playing_in(tmp_path_factory.mktemp("rate")) as playground:
        write_sleeper(playground.here / "models", milliseconds=BATCH_MS)
        (playground.here / "steady.yaml").write_text(PROFILE)
        arguments = ["--load", "rate", "--sla-p90", f"{SLA_MS:g}ms", "--budget", "85s", "--max-trials", "2"]
        arguments += ["--measurement-interval", "100ms", "--confidence", "80%", "--arrivals", "constant"]
        yield Run(playground, run_tune(playground, *arguments, "--json", "steady.yaml", timeout=280))


def test_the_highest_rate_that_meets_the_bound_is_found(found: Run) -> None:
    assert found.ended.stderr == ""
    assert found.ended.code == 0
    recommended = found.document["recommended"]
    assert recommended["dynamic_batching"], "one after another they are half as fast, or slower"
    assert recommended["latency_p90_ms"] <= SLA_MS
    assert recommended["concurrency"] == 0
    assert recommended["request_rate"] > 1.5 * ALONE_PER_SECOND
    assert recommended["request_batch_size"] == SAMPLES
    sent = SAMPLES * recommended["request_rate"]
    assert recommended["throughput_infer_per_sec"] == pytest.approx(sent, rel=0.2)


def test_what_serves_requests_one_by_one_is_overloaded_above_its_capacity(found: Run) -> None:
    alone = [row for row in found.rows() if row["trial"] == "0"]
    beyond = [row for row in alone if float(row["request_rate"]) > 1.5 * ALONE_PER_SECOND]
    assert all(row["stable"] == "false" or float(row["latency_p90_ms"]) > SLA_MS for row in beyond)
    assert found.document["baseline"]["request_rate"] < 1.2 * ALONE_PER_SECOND


def test_on_a_server_that_is_slower_it_does_not_hold(found: Run, tmp_path: Path) -> None:
    """``--target remote``: what that server served is served again at the end."""
    models = tmp_path / "models"
    write_sleeper(models, milliseconds=6 * BATCH_MS)
    slower = Production(read_repository_model(models, "sleeper", gpu=False), tmp_path / "log")
    with contextlib.closing(slower):
        slower.load("sleeper")
        before = slower.serving()
        address = slower.server.grpc
        ended = run_tune(found.playground, "verify", "--json", "--target", "remote", "--url", address, found.folder)
        assert slower.serving() == before
    assert ended.stderr == ""
    assert ended.code == 1
    verified = json.loads(ended.stdout)
    assert not verified["holds"]
    assert not verified["verdict_holds"]
    assert verified["reason"]
    assert f"measured on the server at {address}" in verified["notes"][0]
    assert (found.playground.here / verified["results_dir"] / "verify.json").exists()
