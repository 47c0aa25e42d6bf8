"""``tune --load rate`` and ``tune verify --fresh --target remote`` on a server whose batches all take the same time.

The assertions hold on a machine of any speed: they compare the output with itself, with the given bound, and with the
time that the model sleeps, which is the shortest time of an execution.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from optimizer.model.repository import read_repository_model
from tests.command_fixtures import Run, open_sandbox, run_tune
from tests.remote_server import RunningServer
from tests.repositories import skip_without_python_models, write_sleeper

BATCH_MS = 25
SLA_MS = 100.0
SAMPLES = 1.5  # of a request, on average
MIN_REQUESTS = 100  # fewer may have more samples on average
PROFILE = """\
model: {repository: models, name: sleeper}
load: {max_concurrency: 16}
request: {batch_size: 1*3|3*1}
space:
  max_queue_delay_microseconds: [off, 0]
  instance_group_count: [1]
"""


@pytest.fixture(scope="module")
def rate_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    skip_without_python_models()
    with open_sandbox(tmp_path_factory.mktemp("rate")) as sandbox:
        write_sleeper(sandbox.working_folder / "models", milliseconds=BATCH_MS)
        (sandbox.working_folder / "steady.yaml").write_text(PROFILE)
        arguments = ["--load", "rate", "--sla-p90", f"{SLA_MS:g}ms", "--budget", "40s", "--max-trials", "2"]
        arguments += ["--measurement-interval", "100ms", "--confidence", "80%", "--request-distribution", "constant"]
        yield Run(sandbox, run_tune(sandbox, *arguments, "--json", "steady.yaml"))


def test_the_recommended_rate_meets_the_bound(rate_run: Run) -> None:
    rate_run.assert_found()
    recommended = rate_run.document["recommended"]
    assert recommended["latency_p90_ms"] <= SLA_MS
    assert recommended["concurrency"] == 0
    assert recommended["request_rate"] > 0
    assert recommended["request_batch_size"] == SAMPLES
    sent = SAMPLES * recommended["request_rate"]
    assert recommended["throughput_infer_per_sec"] == pytest.approx(sent, rel=0.2)
    rates = {float(row["request_rate"]) for row in rate_run.rows() if row["trial"] == str(recommended["trial"])}
    assert recommended["request_rate"] in rates


def test_each_row_of_the_table_is_consistent(rate_run: Run) -> None:
    rows = rate_run.rows()
    assert "0" in {row["trial"] for row in rows}  # a slow machine may have no time for a second trial
    for row in rows:
        assert not row["concurrency"]
        assert float(row["request_rate"]) > 0
        assert float(row["request_batch_size"]) == SAMPLES
        if not row["throughput_infer_per_sec"]:
            assert row["reason"]
            continue
        assert row["stable"] == ("false" if row["reason"] else "true")
        assert row["overloaded"] != "true" or row["stable"] == "false"
        assert 0 <= float(row["late_request_share"]) <= 1
        latencies = [float(row[f"latency_p{percent}_ms"]) for percent in (50, 90, 95, 99)]
        assert latencies == sorted(latencies)
        assert latencies[0] >= BATCH_MS


def test_without_dynamic_batching_each_execution_has_one_request(rate_run: Run) -> None:
    measured = [row for row in rate_run.rows() if row["trial"] == "0" and row["throughput_infer_per_sec"]]
    baseline = [row for row in measured if int(row["requests"]) >= MIN_REQUESTS]
    assert baseline
    for row in baseline:
        assert float(row["mean_batch_size"]) == pytest.approx(SAMPLES, rel=0.3)


@pytest.mark.alone  # other tests would disturb all windows, and the verdict would be UNDECIDED
def test_a_server_whose_executions_take_longer_than_the_bound_fails_the_verification(
    rate_run: Run, tmp_path: Path
) -> None:
    """``--target remote`` restores the former configuration of the server."""
    models = tmp_path / "models"
    write_sleeper(models, milliseconds=10 * SLA_MS)  # so that other programs on the CPUs cannot be the reason
    slower = RunningServer(read_repository_model(models, "sleeper", gpu=False), tmp_path / "log")
    with contextlib.closing(slower):
        slower.load("sleeper")
        before = slower.serving()
        address = slower.server.grpc
        ended = run_tune(
            rate_run.sandbox,
            "verify",
            "--fresh",
            "--budget",
            "50s",
            "--json",
            "--target",
            "remote",
            "--url",
            address,
            rate_run.folder,
        )
        assert slower.serving() == before
    assert ended.errors == []
    assert ended.code == 1
    verified = json.loads(ended.stdout)
    assert not verified["holds"]
    assert not verified["verdict_holds"]
    assert verified["reason"]
    assert f"measured on the server at {address}" in verified["notes"][0]
    assert (rate_run.sandbox.working_folder / verified["results_dir"] / "verify.json").exists()
