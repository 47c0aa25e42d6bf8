"""A Ray cluster on this machine, of nodes with more CPUs than there are."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil

NODE_CPUS = 64  # as Ray counts them: then all workers share the machine, and measure on the same
STORE_BYTES = 80 << 20
MARK = "TRITUNE_TEST_CLUSTER"  # in the environment of all that a cluster starts


@dataclass
class LocalCluster:
    """``address`` is what RAY_ADDRESS is to be for ``--cluster auto``."""

    ray: Any
    mark: str
    nodes: list[Any] = field(default_factory=list)

    @property
    def address(self) -> str:
        return str(self.ray.address)

    def add_node(self) -> None:
        self.nodes.append(self.ray.add_node(num_cpus=NODE_CPUS, object_store_memory=STORE_BYTES))

    def raylet(self, node: int) -> psutil.Process:
        return psutil.Process(self.nodes[node].all_processes["raylet"][0].process.pid)

    def workers(self, node: int) -> list[psutil.Process]:
        """The processes of tune's workers on that node."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [one for one in self.raylet(node).children() if _name(one).startswith("ray::Worker")]
        return []

    def servers(self) -> list[psutil.Process]:
        """The tritonservers that workers have started and that still run."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.name() == "tritonserver" and process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found


@contextlib.contextmanager
def local_cluster(nodes: int) -> Iterator[LocalCluster]:
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", MARK: uuid.uuid4().hex}  # Ray reports to its maker
    from ray.cluster_utils import Cluster

    head = {"num_cpus": NODE_CPUS, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    found = LocalCluster(Cluster(initialize_head=True, head_node_args=head), os.environ[MARK])
    found.nodes.append(found.ray.head_node)
    try:
        for _ in range(nodes - 1):
            found.add_node()
        yield found
    finally:
        found.ray.shutdown()


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return ""
