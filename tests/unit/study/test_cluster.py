"""Tests for the cluster without Ray: shares of nodes, CPUs, packed tasks, messages and connection errors."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from objectives.metrics import Measurement
from optimizer.cli.run import read_run_arguments
from optimizer.core.candidate import Candidate
from optimizer.core.errors import BadInputError, EnvironmentFault
from optimizer.core.trial import LoadPoint, Trial
from optimizer.machine.cpus import CpuTopology
from optimizer.machine.hardware import Hardware
from optimizer.options.addresses import parse_cluster_address
from optimizer.options.run_options import RunOptions
from optimizer.study import task
from optimizer.study.distributed.driver import UnfinishedTrials
from optimizer.study.distributed.messages import LoadMeasured, LogLine, Outbox, pack, unpack
from optimizer.study.distributed.ray_study import connected, connection_error
from optimizer.study.distributed.worker import hold_cpus
from optimizer.study.distributed.worker_pool import ClusterNode, TrialShare, read_nodes, share_of
from tests.repositories import doubler, write_model

SMALL, LARGE = ClusterNode("a", "small", 4, 0), ClusterNode("b", "large", 16, 0)
WITH_GPUS = ClusterNode("c", "gpus", 16, 4)
CPUS = frozenset(range(8))
TWO_NODES = CpuTopology(
    tuple(frozenset({first, first + 1}) for first in range(0, 8, 2)), (frozenset(range(4)), frozenset(range(4, 8)))
)
CONFIG = """\
backend: "onnxruntime"
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
"""


# -- the share of a trial -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "cpus", "share", "counts"),
    [
        ([SMALL, LARGE], None, TrialShare(4, 0), [1, 4]),
        ([SMALL, LARGE], 8, TrialShare(8, 0), [0, 2]),
        ([SMALL, WITH_GPUS], None, TrialShare(4, 1), [0, 4]),
        ([SMALL, WITH_GPUS], 2, TrialShare(2, 0), [2, 8]),
        ([ClusterNode("d", "many", 2, 8)], None, TrialShare(1, 1), [2]),
    ],
)
def test_a_trial_takes_a_gpu_or_cpus(
    nodes: list[ClusterNode], cpus: int | None, share: TrialShare, counts: list[int]
) -> None:
    assert share_of(nodes, cpus) == share
    assert [share.count_on(node) for node in nodes] == counts


@pytest.mark.parametrize(("nodes", "cpus", "message"), [([], None, "no node"), ([SMALL, LARGE], 17, "has 16")])
def test_a_share_that_no_node_has_is_refused(nodes: list[ClusterNode], cpus: int | None, message: str) -> None:
    with pytest.raises(EnvironmentFault, match=message):
        share_of(nodes, cpus)


def test_dead_nodes_and_nodes_without_cpus_are_ignored() -> None:
    alive = {"NodeID": "a", "Alive": True, "NodeManagerHostname": "small", "Resources": {"CPU": 4.0, "memory": 1.0}}
    dead = {**alive, "NodeID": "x", "Alive": False, "Resources": {}}
    head = {**alive, "NodeID": "y", "Resources": {"memory": 1.0}}
    assert read_nodes([dead, alive, head]) == [SMALL]


# -- CPUs -----------------------------------------------------------------------------------------------------


def test_two_trials_never_get_the_same_cpus(tmp_path: Path) -> None:
    held = [hold_cpus(count, TWO_NODES, tmp_path, 0) for count in (3, 4, 1, 1)]
    assert [reserved and set(reserved) for reserved in held] == [{0, 1, 2}, {4, 5, 6, 7}, {3}, None]
    assert held[1] is not None
    for lock in held[1].values():
        lock.close()
    again = hold_cpus(4, TWO_NODES, tmp_path, 0)
    assert again is not None
    assert set(again) == {4, 5, 6, 7}


def test_the_cpus_of_a_killed_process_are_free_again(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from optimizer.study.distributed.worker import hold_cpus
from optimizer.machine.cpus import CpuTopology
held = hold_cpus(8, {TWO_NODES!r}, Path({str(tmp_path)!r}), 0)
print(sorted(held), flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == f"{sorted(CPUS)}\n"
        assert hold_cpus(1, TWO_NODES, tmp_path, 0) is None
        other.kill()
        other.wait()
    assert hold_cpus(8, TWO_NODES, tmp_path, 0) is not None


# -- messages -------------------------------------------------------------------------------------------------


def test_a_task_arrives_with_its_files(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    write_model(repository, "twice", CONFIG, doubler())
    intervals = tmp_path / "intervals.txt"
    intervals.write_text("1000\n2000\n")
    samples = tmp_path / "samples.json"
    samples.write_text('{"data": [{"x": [1, 2, 3, 4]}]}')
    options = RunOptions("twice", {"p95": 5.0}, str(repository), input_data=str(samples))
    packed_task = task.prepare_task(options, Hardware((), "a CPU", 4, 1 << 30), print)
    bundle = pickle.loads(pickle.dumps(pack(packed_task, replace(options, request_times=str(intervals)))))
    unpacked_task, arrivals = unpack(bundle, tmp_path / "node")
    assert unpacked_task.problem == packed_task.problem
    assert unpacked_task.comparisons() == packed_task.comparisons()
    assert unpacked_task.source.models == packed_task.source.models
    for name in ("1/model.onnx", "config.pbtxt"):
        copied = unpacked_task.source.folder("twice") / name
        assert copied.is_relative_to(tmp_path / "node")
        assert copied.read_bytes() == (repository / "twice" / name).read_bytes()
    assert unpacked_task.input_data.read_bytes() == packed_task.input_data.read_bytes()
    assert Path(arrivals).read_text() == intervals.read_text()
    assert unpacked_task.input_data.is_relative_to(tmp_path / "node")


def test_a_full_disk_on_a_node_is_reported(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    write_model(repository, "twice", CONFIG, doubler())
    packed_task = task.prepare_task(
        RunOptions("twice", {"p95": 5.0}, str(repository)), Hardware((), "a CPU", 4, 1), print
    )
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFault, match="no space for the model"):
        unpack(pack(packed_task, RunOptions("twice")), tmp_path / "file")


def test_events_arrive_in_order() -> None:
    outbox, trial, load = Outbox(), Trial(3, Candidate(8)), LoadPoint(1, 4)
    assert outbox.take(0) == []
    outbox.send_line("fetching")
    outbox.append(trial, load, Measurement(100.0))
    outbox.trial_finished(trial, None)
    first, second, _ = outbox.take(0)
    assert (first, second) == (LogLine("fetching"), LoadMeasured(trial, load, Measurement(100.0), None))
    assert outbox.take(0) == []


def test_running_trials_are_known_after_a_crash(tmp_path: Path) -> None:
    unfinished = UnfinishedTrials(tmp_path)
    assert unfinished.read() == set()
    unfinished.write([7, 3])
    assert UnfinishedTrials(tmp_path).read() == {3, 7}
    unfinished.write([])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "running.txt").write_text("not numbers")
    assert unfinished.read() == set()


# -- arguments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("auto", "auto"),
        ("ray://head", "ray://head:10001"),
        ("ray://10.0.0.1:1234/", "ray://10.0.0.1:1234"),
        ("ray://[::1]:99", "ray://[::1]:99"),
    ],
)
def test_an_address_is_read(text: str, address: str) -> None:
    assert parse_cluster_address(text) == address


@pytest.mark.parametrize("text", ["", "local", "10.0.0.1:6379", "ray://", "ray://h:0", "ray://h:70000", "ray://a b"])
def test_a_bad_address_is_refused(text: str) -> None:
    with pytest.raises(BadInputError, match=r"--cluster .*: write auto .* or ray://HOST:PORT"):
        read_run_arguments([f"--cluster={text}", "m"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--cluster-cpus 2", "works only with --cluster; add --cluster, or remove --cluster-cpus"),
        ("--cluster auto --cluster-cpus 0", "whole number from 1 to"),
        ("--cluster auto --target remote", "take embedded or local"),
        ("--cluster auto --target docker --docker-image i", "take embedded or local"),
        ("--cluster auto --server-cpus 0", "leave it out"),
        ("--cluster auto --perf-analyzer-image i", "leave it out"),
    ],
)
def test_options_that_exclude_a_cluster_are_refused(words: str, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        read_run_arguments([*words.split(), "m"])


def test_another_version_of_ray_is_reported_in_one_line() -> None:
    error = RuntimeError(
        "Version mismatch: The cluster was started with:\n    Ray: 2.9.0\n    Python: 3.9.1\nThis process on 10.0.0.2"
        " was started with:\n    Ray: 2.60.0\n    Python: 3.11.7\n"
    )
    assert connection_error(error) == (
        "the cluster has Ray 2.9.0 on Python 3.9.1, this machine has Ray 2.60.0 on Python 3.11.7; install the "
        "cluster's versions here"
    )


def test_a_machine_without_a_cluster_is_reported() -> None:
    assert "start one with `ray start --head`" in connection_error(
        ConnectionError("Could not find any running Ray instance. Please")
    )


def test_an_unreachable_address_is_reported() -> None:
    with (
        pytest.raises(EnvironmentFault, match=r"--cluster ray://127\.0\.0\.1:1: no answer .* Ray Client"),
        connected("ray://127.0.0.1:1"),
    ):
        pass
