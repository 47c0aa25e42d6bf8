"""The nodes of a cluster whose measurements would not be comparable, or that cannot measure, are left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from types import SimpleNamespace
from typing import Any, cast

import pytest

from optimizer.core.errors import BadInputError, EnvironmentFault
from optimizer.core.notes import NodeLeftOut, SeparateCpus
from optimizer.core.stopwatch import Stopwatch
from optimizer.machine.cpus import CpuPlacement
from optimizer.machine.hardware import Fingerprint, Hardware
from optimizer.options.run_options import RunOptions
from optimizer.study.distributed.messages import TaskBundle
from optimizer.study.distributed.worker import WorkerInfo
from optimizer.study.distributed.worker_pool import TrialShare, WorkerPool

pytest.importorskip("ray")

HARDWARE = Hardware((), "a CPU", 4, 1 << 30)
PLACEMENT = CpuPlacement(frozenset({0, 1, 2}), frozenset({3}), SeparateCpus("0-2", "3"))
FINGERPRINT = Fingerprint("a CPU", 4, (), "embedded", "2.51.0", ())
BUNDLE = cast("TaskBundle", None)  # only the workers read it


class RayError(Exception):
    """The base class of Ray's errors."""


class RayTaskError(RayError):
    """A method of an actor has raised ``cause``."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


@dataclass
class Node:
    """A node with the results, or the errors, of the methods of its worker."""

    start: WorkerInfo | Exception
    prepare: Fingerprint | Exception = FINGERPRINT


@dataclass
class LocalRay:
    """The part of Ray that the pool uses, with an actor of one node after another; each call returns at once."""

    started: list[Node]
    results: dict[object, Any] = field(default_factory=dict)
    exceptions = SimpleNamespace(RayTaskError=RayTaskError, RayError=RayError)

    def nodes(self) -> list[dict[str, Any]]:
        alive = {"Alive": True, "Resources": {"CPU": 4.0}}
        ids = enumerate(f"{number:056x}" for number in range(1, len(self.started) + 1))
        return [{**alive, "NodeID": node_id, "NodeManagerHostname": f"host{number}"} for number, node_id in ids]

    def remote(self, _: type) -> Any:
        waiting = iter(self.started)
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: self._actor(next(waiting))))

    def _actor(self, node: Node) -> Any:
        returned: dict[str, Any] = {"start": node.start, "prepare": node.prepare, "take_events": [], "close": None}
        return SimpleNamespace(
            **{name: SimpleNamespace(remote=self._call(value)) for name, value in returned.items()}
        )

    def _call(self, value: Any) -> Callable[..., object]:
        def call(*_: Any) -> object:
            reference = object()
            self.results[reference] = value
            return reference

        return call

    def put(self, value: Any) -> Any:
        return value

    def wait(self, calls: Sequence[Any], num_returns: int, timeout: float) -> tuple[Sequence[Any], Sequence[Any]]:
        return calls[:num_returns], calls[num_returns:]

    def get(self, reference: object) -> Any:
        value = self.results[reference]
        if isinstance(value, Exception):
            raise RayTaskError(value)
        return value

    def kill(self, actor: Any) -> None: ...


def info(number: int, hardware: Hardware = HARDWARE, version: str = "") -> WorkerInfo:
    version = version or metadata.version("tritune")
    return WorkerInfo(f"host{number}", version, hardware, "", PLACEMENT, None, None)


def pool_of(*nodes: Node) -> WorkerPool:
    return WorkerPool(LocalRay(list(nodes)), RunOptions("m"), TrialShare(4, 0), Stopwatch(), lambda _: None)


def hosts(pool: WorkerPool) -> list[str]:
    return [worker.host for worker in pool.ready()]


def test_a_node_with_another_version_of_tune_is_left_out() -> None:
    pool = pool_of(Node(info(0, version="0.0.1")), Node(info(1)))
    assert pool.start(None).host == "host1"
    pool.prepare(BUNDLE)
    assert hosts(pool) == ["host1"]
    here = metadata.version("tritune")
    reason = f"has tritune 0.0.1, this machine has {here}; install the same version there"
    assert pool.notes == [NodeLeftOut("host0", reason)]


@pytest.mark.parametrize(
    ("preferred", "used"),
    [(None, ["host0", "host2"]), (replace(FINGERPRINT, cpu_count=8), ["host1"])],
    ids=["the most common hardware", "the hardware of the run"],
)
def test_only_nodes_of_one_hardware_measure(preferred: Fingerprint | None, used: list[str]) -> None:
    other = replace(HARDWARE, cpu_count=8)
    pool = pool_of(Node(info(0)), Node(info(1, other)), Node(info(2)))
    pool.start(preferred)
    pool.prepare(BUNDLE)
    pool.poll_events()
    assert hosts(pool) == used
    left_out = [note for note in pool.notes if isinstance(note, NodeLeftOut)]
    assert {note.host for note in left_out} == {"host0", "host1", "host2"} - set(used)
    assert all(note.reason.endswith(": measurements there would not be comparable") for note in left_out)


def test_a_node_with_another_server_is_left_out() -> None:
    pool = pool_of(Node(info(0)), Node(info(1), replace(FINGERPRINT, server="2.52.0")))
    pool.start(None)
    assert pool.prepare(BUNDLE) == FINGERPRINT
    pool.poll_events()
    assert hosts(pool) == ["host0"]
    reason = "measurements there would not be comparable (server 2.52.0 there, 2.51.0 here)"
    assert pool.notes == [NodeLeftOut("host1", reason)]


def test_without_a_node_that_can_measure_the_reason_of_the_last_one_is_named() -> None:
    missing = ModuleNotFoundError("No module named 'optimizer'")
    pool = pool_of(Node(missing), Node(info(1, version="0.0.1")))
    with pytest.raises(EnvironmentFault, match=r"^--cluster: no node can be used: host1 is left out: has tritune 0"):
        pool.start(None)
    reasons = [note.reason for note in pool.notes if isinstance(note, NodeLeftOut)]
    assert reasons[0] == "tritune is not installed; pip install 'tritune[ray]' there"


def test_a_fault_of_the_task_on_a_node_is_one_of_the_user() -> None:
    pool = pool_of(Node(info(0), BadInputError("m: the file is empty")))
    pool.start(None)
    with pytest.raises(BadInputError, match=r"^m: the file is empty$"):
        pool.prepare(BUNDLE)
