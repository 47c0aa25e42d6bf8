"""What a trial takes of a node for itself, and how many a node has room for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optimizer.errors import EnvironmentFault


@dataclass(frozen=True, slots=True)
class Node:
    """``id`` is Ray's; ``cpus`` and ``gpus`` are those that Ray counts, whoever holds them just now."""

    id: str
    host: str
    cpus: int
    gpus: int


@dataclass(frozen=True, slots=True)
class Share:
    """CPUs and GPUs of one trial."""

    cpus: int
    gpus: int

    def rooms(self, node: Node) -> int:
        """How many trials ``node`` has room for."""
        rooms = node.cpus // self.cpus
        return min(rooms, node.gpus // self.gpus) if self.gpus else rooms

    def __str__(self) -> str:
        cpus = f"{self.cpus} CPU{'s' if self.cpus > 1 else ''}"
        return f"1 GPU and {cpus}" if self.gpus else cpus


def read_nodes(told: Sequence[Mapping[str, Any]]) -> list[Node]:
    """Those of ``ray.nodes()`` that live and have CPUs."""
    found = []
    for one in told:
        resources = one.get("Resources") or {}
        host = str(one.get("NodeManagerHostname") or one.get("NodeManagerAddress"))
        node = Node(str(one["NodeID"]), host, int(resources.get("CPU", 0)), int(resources.get("GPU", 0)))
        if one["Alive"] and node.cpus:
            found.append(node)
    return found


def share_of(nodes: Sequence[Node], cpus: int | None) -> Share:
    """``cpus`` where they are given, and no GPU; else a GPU and as many CPUs as there are for each, where there are
    GPUs; else as many CPUs as the smallest node has.

    Raises EnvironmentFault where no node has that.
    """
    if not nodes:
        raise EnvironmentFault("--cluster: no node of the cluster has CPUs to give; `ray status` tells what it has")
    if cpus is not None:
        largest = max(node.cpus for node in nodes)
        if largest < cpus:
            raise EnvironmentFault(
                f"--cluster-cpus {cpus}: the largest node of the cluster has {largest}; ask for less"
            )
        return Share(cpus, 0)
    with_gpus = [node for node in nodes if node.gpus]
    if with_gpus:
        return Share(max(1, min(node.cpus // node.gpus for node in with_gpus)), 1)
    return Share(min(node.cpus for node in nodes), 0)
