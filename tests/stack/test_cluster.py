"""Tests for a run on a Ray cluster on this machine with real servers."""

from __future__ import annotations

import csv
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command_fixtures import HANG_SECONDS, RUN_SECONDS, Sandbox, eventually, run_tune
from tests.forked_tune import ForkedTune
from tests.local_cluster import LocalCluster, local_cluster
from tests.repositories import skip_without_python_models, write_sleeper

PROFILE = """\
model: {repository: models, name: sleeper}
load: {max_concurrency: 1}
space:
  max_batch_size: [2, 4, 8]
  max_queue_delay_microseconds: [off, 0, 1000]
  instance_group_count: [1]
"""
STUDY = ("--sla-p95", "500ms", "--search", "random", "--no-output-check", "--cluster", "auto")


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Start two nodes, each with room for one trial."""
    with local_cluster(nodes=2) as cluster:
        yield cluster


@pytest.fixture
def steady(sandbox: Sandbox, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """Return a sandbox whose commands find the cluster."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    skip_without_python_models()
    write_sleeper(sandbox.working_folder / "models", milliseconds=8)
    (sandbox.working_folder / "steady.yaml").write_text(PROFILE)
    return sandbox


def table(sandbox: Sandbox) -> str:
    tables = list((sandbox.working_folder / "results").glob("*/*/trials.csv"))
    return tables[0].read_text() if tables else ""


def wait_for_a_row(sandbox: Sandbox, process: ForkedTune) -> None:
    before = table(sandbox).count("\n")
    more = max(before, 1)  # the header
    assert eventually(lambda: table(sandbox).count("\n") > more or process.poll() is not None, HANG_SECONDS)
    assert process.poll() is None, process.communicate()


def rows(sandbox: Sandbox) -> list[dict[str, str]]:
    return list(csv.DictReader(table(sandbox).rpartition("\n")[0].splitlines()))


def interrupt(process: ForkedTune) -> None:
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=HANG_SECONDS)
    assert (process.returncode, stderr) == (130, ""), stdout


@pytest.mark.timeout(2400)  # several waits of at most RUN_SECONDS and HANG_SECONDS
def test_no_measurement_is_lost_with_workers_and_nodes(cluster: LocalCluster, steady: Sandbox) -> None:
    """A worker is killed, the run is interrupted and resumed, a node is killed; lost trials are repeated."""
    first = steady.fork(*STUDY, "--budget", "10m", "--max-trials", "5", "steady.yaml")
    wait_for_a_row(steady, first)
    assert eventually(lambda: cluster.workers(0), HANG_SECONDS)  # the row may be the other worker's
    (killed,) = cluster.workers(0)
    killed.kill()
    wait_for_a_row(steady, first)
    interrupt(first)
    assert eventually(lambda: cluster.servers() == [], HANG_SECONDS)
    before = table(steady)

    (run,) = (steady.working_folder / "results").glob("*/*")
    second = steady.fork("--resume", run)
    wait_for_a_row(steady, second)
    cluster.raylet(1).kill()
    confirmed = eventually(lambda: any(row["confirmation"] for row in rows(steady)), RUN_SECONDS)
    interrupt(second)
    assert confirmed
    assert eventually(lambda: cluster.servers() == [], HANG_SECONDS)
    assert table(steady).startswith(before)
    measured = [row for row in rows(steady) if not row["confirmation"]]
    assert len({row["trial"] for row in measured}) == 5
    settings = ("max_batch_size", "dynamic_batching", "max_queue_delay_us", "preferred_batch_sizes")
    assert len({tuple(row[name] for name in settings) for row in measured}) == 5
    assert all(row["throughput_infer_per_sec"] for row in measured)
    info = json.loads(Path(run, "run.json").read_text())
    assert (info["status"], info["result"]["trials"]) == ("interrupted", 5)
    assert not Path(run, "running.txt").exists()
    assert eventually(lambda: not steady.processes(), HANG_SECONDS)  # the supervisors end after their servers


def test_a_model_that_needs_a_gpu_is_refused(steady: Sandbox) -> None:
    config = steady.working_folder / "models/sleeper/config.pbtxt"
    config.write_text(config.read_text().replace("KIND_CPU", "KIND_GPU"))
    ended = run_tune(steady, *STUDY, "steady.yaml")
    assert ended.code == 3
    assert ended.stderr_lines == [
        "tune: sleeper: its instances are KIND_GPU, and trials have no GPU: no node of the cluster has one"
    ]
