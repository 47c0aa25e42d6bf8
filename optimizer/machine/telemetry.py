"""What happens while a measurement runs: in the server's memory, and on the CPUs through others."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from objectives.metrics import Measurement
from optimizer.interfaces import Endpoint, Samples
from optimizer.machine.cpu_time import Usage, process_tree

DISTURBED = 0.10  # of the CPUs' time taken by others: it is no longer the server alone that was measured


def disturbance(measurement: Measurement) -> str:
    """What disturbed the measurement, in words; empty where nothing did, or nothing is known of it."""
    share = measurement.other_cpu_share
    if share is None or share <= DISTURBED:
        return ""
    return f"other processes or machines took {100 * share:.0f} % of the CPUs while this was measured"


class ProcessTelemetry:
    """Memory of the server's process tree, and the share that others took of ``cpus``: those that the server and
    the load generator may use; None is those of this process. Both are unknown where the server's process is.
    """

    def __init__(self, cpus: frozenset[int] | None = None) -> None:
        self._cpus = cpus

    @contextlib.contextmanager
    def record(self, endpoint: Endpoint) -> Iterator[Samples]:
        samples = Samples()
        if endpoint.server_pid is None:
            yield samples
            return
        before = Usage.now(self._cpus, endpoint.server_pid)
        yield samples
        share = Usage.now(self._cpus, endpoint.server_pid).others_since(before)
        samples.other_cpu_share = None if math.isnan(share) else round(share, 4)
        samples.server_memory_bytes = tree_memory_bytes(endpoint.server_pid)


def tree_memory_bytes(pid: int | None) -> float | None:
    """Proportional set size of a process and all below it, in which shared pages count once; None where it cannot
    be read."""
    import psutil

    if pid is None:
        return None
    try:
        return float(sum(psutil.Process(each).memory_full_info().pss for each in process_tree(pid)))
    except (psutil.Error, AttributeError):
        return None
