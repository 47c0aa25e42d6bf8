"""The flags of a run on a Ray cluster."""

from __future__ import annotations

import argparse
import re
from typing import TypedDict

from optimizer.arguments.values import shown, whole
from optimizer.errors import BadInputError

AUTO, SCHEME, PORT = "auto", "ray://", 10001
ON_NODES = ("embedded", "local")  # targets whose server ends with the worker that started it


class ClusterOptions(TypedDict):
    """As ``RunOptions`` has them."""

    cluster: str | None
    cluster_cpus: int | None


def add_cluster(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("on a Ray cluster (see docs/cluster.md)")
    group.add_argument("--cluster", metavar="ADDRESS", help="auto (this machine's), or ray://host:port")
    group.add_argument("--cluster-cpus", metavar="N", help="CPUs of a trial, and no GPU (a GPU, else a whole node)")


def cluster(given: argparse.Namespace) -> ClusterOptions:
    """Raises BadInputError, also for what does not go with a cluster."""
    address = cluster_address(given)
    cpus = None if given.cluster_cpus is None else whole("--cluster-cpus", given.cluster_cpus, 1)
    if address is None and cpus is not None:
        raise BadInputError(f"--cluster-cpus {cpus} is about trials on a cluster: give --cluster too")
    if address is not None:
        if given.target not in (None, *ON_NODES):
            raise BadInputError(
                f"--cluster: each trial starts a server of its own there, and --target {given.target} does not; "
                f"take {' or '.join(ON_NODES)}"
            )
        if given.join is not None:
            raise BadInputError("--cluster runs trials side by side in one study: leave --join out")
        for flag, value in (("--server-cpus", given.server_cpus), ("--client-cpus", given.client_cpus)):
            if value is not None:
                raise BadInputError(f"{flag}: a trial gets CPUs of its node that are free: leave it out")
        if given.perf_analyzer_image is not None:
            raise BadInputError("--perf-analyzer-image: trials on a cluster use tune's own: leave it out")
    return {"cluster": address, "cluster_cpus": cpus}


def cluster_address(given: argparse.Namespace) -> str | None:
    """Raises BadInputError."""
    try:
        return None if given.cluster is None else read_address(given.cluster)
    except ValueError as error:
        raise BadInputError(f"--cluster {shown(given.cluster)}: {error}") from None


def read_address(text: str) -> str:
    """``auto``, or ``ray://HOST:PORT`` with the port that Ray uses where none is given. Raises ValueError."""
    if text == AUTO:
        return text
    match = re.fullmatch(r"ray://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?/?", text)
    port = int(match[2] or PORT) if match else 0
    if match is None or not 0 < port < 1 << 16:
        raise ValueError("write auto for the cluster that this machine is part of, or ray://HOST:PORT")
    return f"{SCHEME}{match[1]}:{port}"
