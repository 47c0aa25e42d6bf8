"""A Ray cluster on this machine whose nodes report more CPUs than exist."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil

NODE_CPUS = 64  # as Ray counts them: all workers then share the machine's CPUs
STORE_BYTES = 80 << 20
MARK = "TRITUNE_TEST_CLUSTER"  # in the environment of all processes of a cluster


@dataclass
class LocalCluster:
    """A running cluster. ``address`` is the value of RAY_ADDRESS for ``--cluster auto``."""

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
        """Return the processes of tune's workers on a node."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [child for child in self.raylet(node).children() if _name(child).startswith("ray::Worker")]
        return []

    def servers(self) -> list[psutil.Process]:
        """Return the running tritonservers of this cluster."""
        servers = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.name() == "tritonserver" and process.environ().get(MARK) == self.mark:
                    servers.append(process)
        return servers


@contextlib.contextmanager
def local_cluster(nodes: int) -> Iterator[LocalCluster]:
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", MARK: uuid.uuid4().hex}  # no usage reports
    from ray.cluster_utils import Cluster

    head = {"num_cpus": NODE_CPUS, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = LocalCluster(Cluster(initialize_head=True, head_node_args=head), os.environ[MARK])
    cluster.nodes.append(cluster.ray.head_node)
    try:
        for _ in range(nodes - 1):
            cluster.add_node()
        yield cluster
    finally:
        cluster.ray.shutdown()


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return ""
