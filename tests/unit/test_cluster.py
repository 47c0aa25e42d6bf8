"""A cluster without Ray: who gets what of a node, which CPUs those are, what travels, what is told."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from objectives.metrics import Measurement
from optimizer import task
from optimizer.arguments.cluster import read_address
from optimizer.arguments.run import read_run_arguments
from optimizer.cluster.connect import connected, told
from optimizer.cluster.events import Measured, Outbox, Said
from optimizer.cluster.held_cpus import hold
from optimizer.cluster.parcel import pack, unpack
from optimizer.cluster.share import Node, Share, read_nodes, share_of
from optimizer.cluster.unfinished import Unfinished
from optimizer.errors import BadInputError, EnvironmentFault
from optimizer.machine.cpus import Topology
from optimizer.machine.hardware import Hardware
from optimizer.options import RunOptions
from optimizer.trial import Candidate, LoadPoint, Trial
from tests.repositories import doubler, write_model

SMALL, LARGE = Node("a", "small", 4, 0), Node("b", "large", 16, 0)
WITH_GPUS = Node("c", "gpus", 16, 4)
CPUS = frozenset(range(8))
TWO_NODES = Topology(
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
    ("nodes", "asked", "share", "rooms"),
    [
        ([SMALL, LARGE], None, Share(4, 0), [1, 4]),
        ([SMALL, LARGE], 8, Share(8, 0), [0, 2]),
        ([SMALL, WITH_GPUS], None, Share(4, 1), [0, 4]),
        ([SMALL, WITH_GPUS], 2, Share(2, 0), [2, 8]),
        ([Node("d", "many", 2, 8)], None, Share(1, 1), [2]),
    ],
)
def test_a_trial_takes_a_gpu_or_cpus(nodes: list[Node], asked: int | None, share: Share, rooms: list[int]) -> None:
    found = share_of(nodes, asked)
    assert found == share
    assert [found.rooms(node) for node in nodes] == rooms


@pytest.mark.parametrize(("nodes", "asked", "told"), [([], None, "no node"), ([SMALL, LARGE], 17, "has 16")])
def test_what_no_node_has_is_told(nodes: list[Node], asked: int | None, told: str) -> None:
    with pytest.raises(EnvironmentFault, match=told):
        share_of(nodes, asked)


def test_dead_nodes_and_those_without_cpus_are_none() -> None:
    alive = {"NodeID": "a", "Alive": True, "NodeManagerHostname": "small", "Resources": {"CPU": 4.0, "memory": 1.0}}
    dead = {**alive, "NodeID": "x", "Alive": False, "Resources": {}}
    head = {**alive, "NodeID": "y", "Resources": {"memory": 1.0}}
    assert read_nodes([dead, alive, head]) == [SMALL]


# -- its CPUs -----------------------------------------------------------------------------------------------------


def test_two_trials_never_get_the_same_cpus(tmp_path: Path) -> None:
    held = [hold(count, TWO_NODES, tmp_path, 0) for count in (3, 4, 1, 1)]
    cpus = [one.cpus if one else None for one in held]
    assert cpus == [frozenset({0, 1, 2}), frozenset({4, 5, 6, 7}), frozenset({3}), None]
    assert held[1] is not None
    held[1].release()
    again = hold(4, TWO_NODES, tmp_path, 0)
    assert again is not None
    assert again.cpus == frozenset({4, 5, 6, 7})


def test_the_cpus_of_a_killed_process_are_free_again(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from optimizer.cluster.held_cpus import hold
from tests.unit.test_cluster import TWO_NODES
held = hold(8, TWO_NODES, Path({str(tmp_path)!r}), 0)
print(sorted(held.cpus), flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == f"{sorted(CPUS)}\n"
        assert hold(1, TWO_NODES, tmp_path, 0) is None
        other.kill()
        other.wait()
    assert hold(8, TWO_NODES, tmp_path, 0) is not None


# -- what travels -------------------------------------------------------------------------------------------------


def test_a_task_arrives_with_its_files(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    write_model(repository, "twice", CONFIG, doubler())
    intervals = tmp_path / "intervals.txt"
    intervals.write_text("1000\n2000\n")
    samples = tmp_path / "samples.json"
    samples.write_text('{"data": [{"x": [1, 2, 3, 4]}]}')
    options = RunOptions("twice", {"p95": 5.0}, str(repository), input_data=str(samples))
    what = task.prepare(options, Hardware((), "a CPU", 4, 1 << 30), print)
    parcel = pickle.loads(pickle.dumps(pack(what, replace(options, arrivals=str(intervals)))))
    found, arrivals = unpack(parcel, tmp_path / "node")
    assert found.problem == what.problem
    assert found.comparisons() == what.comparisons()
    assert found.source.models == what.source.models
    for name in ("1/model.onnx", "config.pbtxt"):
        there = found.source.folder("twice") / name
        assert there.is_relative_to(tmp_path / "node")
        assert there.read_bytes() == (repository / "twice" / name).read_bytes()
    assert Path(found.input_data).read_bytes() == Path(what.input_data).read_bytes()
    assert Path(arrivals).read_text() == intervals.read_text()
    assert Path(found.input_data).is_relative_to(tmp_path / "node")


def test_a_node_without_room_says_so(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    write_model(repository, "twice", CONFIG, doubler())
    what = task.prepare(RunOptions("twice", {"p95": 5.0}, str(repository)), Hardware((), "a CPU", 4, 1), print)
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFault, match="no room for the model"):
        unpack(pack(what, RunOptions("twice")), tmp_path / "file")


def test_what_is_told_comes_in_order() -> None:
    outbox, trial, load = Outbox(), Trial(3, Candidate(8)), LoadPoint(1, 4)
    assert outbox.take(0) == []
    outbox.say("fetching")
    outbox.append(trial, load, Measurement(100.0))
    outbox.trial_finished(trial, None)
    first, second, _ = outbox.take(0)
    assert (first, second) == (Said("fetching"), Measured(trial, load, Measurement(100.0), None))
    assert outbox.take(0) == []


def test_which_trials_run_is_known_after_a_crash(tmp_path: Path) -> None:
    unfinished = Unfinished(tmp_path)
    assert unfinished.read() == set()
    unfinished.write([7, 3])
    assert Unfinished(tmp_path).read() == {3, 7}
    unfinished.write([])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "running.txt").write_text("none of ours")
    assert unfinished.read() == set()


# -- how it is asked for --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("auto", "auto"),
        ("ray://head", "ray://head:10001"),
        ("ray://10.0.0.1:1234/", "ray://10.0.0.1:1234"),
        ("ray://[::1]:99", "ray://[::1]:99"),
    ],
)
def test_an_address_is_read(given: str, address: str) -> None:
    assert read_address(given) == address


@pytest.mark.parametrize("given", ["", "local", "10.0.0.1:6379", "ray://", "ray://h:0", "ray://h:70000", "ray://a b"])
def test_an_address_that_is_none_is_told(given: str) -> None:
    with pytest.raises(BadInputError, match=r"--cluster .*: write auto .* or ray://HOST:PORT"):
        read_run_arguments([f"--cluster={given}", "m"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--cluster-cpus 2", "give --cluster too"),
        ("--cluster auto --cluster-cpus 0", "whole number of 1 or more"),
        ("--cluster auto --target remote", "take embedded or local"),
        ("--cluster auto --target docker --docker-image i", "take embedded or local"),
        ("--cluster auto --server-cpus 0", "leave it out"),
        ("--cluster auto --perf-analyzer-image i", "leave it out"),
    ],
)
def test_what_does_not_go_with_a_cluster_is_told(words: str, told: str) -> None:
    with pytest.raises(BadInputError, match=told):
        read_run_arguments([*words.split(), "m"])


def test_another_version_is_told_in_a_line() -> None:
    error = RuntimeError(
        "Version mismatch: The cluster was started with:\n    Ray: 2.9.0\n    Python: 3.9.1\nThis process on 10.0.0.2"
        " was started with:\n    Ray: 2.60.0\n    Python: 3.11.7\n"
    )
    assert told(error) == (
        "the cluster has Ray 2.9.0 on Python 3.9.1, and here it is Ray 2.60.0 on Python 3.11.7; install the "
        "cluster's here"
    )


def test_no_cluster_here_is_told() -> None:
    assert "`ray start --head` begins one" in told(ConnectionError("Could not find any running Ray instance. Please"))


def test_no_such_address_is_told() -> None:
    with (
        pytest.raises(EnvironmentFault, match=r"--cluster ray://127\.0\.0\.1:1: nobody answers .* Ray Client"),
        connected("ray://127.0.0.1:1"),
    ):
        pass
