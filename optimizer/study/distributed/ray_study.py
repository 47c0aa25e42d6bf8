"""Connect to a Ray cluster and run a study on it."""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from optimizer.config.model_config_proto import ModelInstanceGroup
from optimizer.core.errors import EnvironmentFault
from optimizer.core.interfaces import ProgressObserver
from optimizer.core.interrupts import SIGNALS
from optimizer.core.notes import ShareOfNode
from optimizer.core.safe_text import one_line
from optimizer.core.stopwatch import Stopwatch
from optimizer.deploy.visible_gpus import VisibleGpus
from optimizer.machine.cpus import CpuPlacement
from optimizer.machine.hardware import Fingerprint
from optimizer.measure.load_client.arrivals import option_arrivals
from optimizer.options.addresses import LOCAL_CLUSTER, RAY_SCHEME
from optimizer.options.run_options import RunOptions
from optimizer.study.distributed.driver import ClusterExecutor, EventRecorder
from optimizer.study.distributed.messages import pack
from optimizer.study.distributed.worker import WorkerInfo
from optimizer.study.distributed.worker_pool import TrialShare, WorkerPool, read_nodes, share_of
from optimizer.study.environment import Environment
from optimizer.study.study import StudyResult, StudySetup, run_study
from optimizer.study.task import Task

REACH_SECONDS = 5.0  # limit for the connection to the head node


def import_ray() -> Any:
    """Return the module ray. Raises EnvironmentFault if it is not installed."""
    try:
        import ray
    except ImportError:
        raise EnvironmentFault("--cluster needs Ray: pip install 'tritune[ray]', here and on each node") from None
    return ray


@contextlib.contextmanager
def connected(address: str) -> Iterator[Any]:
    """Yield the module ray, connected to the cluster at ``address``.

    Raises EnvironmentFault if there is no cluster or it has another version.
    """
    ray = import_ray()
    if address != LOCAL_CLUSTER:
        _reach(address)
    with _quiet():
        try:
            with _keeping_signal_handlers():
                ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
        except Exception as error:  # Ray raises many kinds of errors if it cannot connect
            raise EnvironmentFault(f"--cluster {address}: {connection_error(error)}") from None
        try:
            yield ray
        finally:
            ray.shutdown()


def connection_error(error: Exception) -> str:
    """Return why there is no connection and how to fix it, in one line."""
    text = str(error)
    versions = re.findall(r"Ray: (\S+)\s+Python: (\S+)", text)
    if "ersion mismatch" in text and len(versions) == 2:
        (ray_there, python_there), (ray_here, python_here) = versions
        return (
            f"the cluster has Ray {ray_there} on Python {python_there}, this machine has Ray {ray_here} on Python "
            f"{python_here}; install the cluster's versions here"
        )
    if isinstance(error, ConnectionError) and "any running Ray" in text:
        return "this machine is not part of a Ray cluster; start one with `ray start --head`, or give ray://HOST:PORT"
    reason = one_line(" ".join(text.split()), 200)
    return f"cannot connect: {reason}; check the cluster with `ray status` on one of its nodes"


def _reach(address: str) -> None:
    """Raise EnvironmentFault if nothing listens at ``address``: Ray's own attempt takes half a minute."""
    host, _, port = address.removeprefix(RAY_SCHEME).rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
    except OSError as error:
        why = error.strerror or str(error)
        raise EnvironmentFault(
            f"--cluster {address}: no answer ({one_line(why, 100)}); is the head node up (`ray start --head`), "
            "and is that the port of its Ray Client server, 10001 by default?"
        ) from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Disable Ray's messages on standard output, where ``--json`` prints a document."""
    from ray._private import worker

    before = getattr(worker, "_worker_logs_enabled", True)
    worker._worker_logs_enabled = False
    try:
        yield
    finally:
        worker._worker_logs_enabled = before


@contextlib.contextmanager
def _keeping_signal_handlers() -> Iterator[None]:
    """Restore the signal handlers that Ray replaces."""
    handlers = {signum: signal.getsignal(signum) for signum in SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for signum, handler in handlers.items():
                signal.signal(signum, handler)


@dataclass(frozen=True)
class ClusterStudy:
    """A study on the workers of a cluster.

    ``environment`` describes a node like all others. It prepares the task, and nothing is deployed with it.
    """

    environment: Environment
    share: TrialShare
    workers: WorkerPool

    @property
    def worker_count(self) -> int:
        """The number of trials at the same time, at least 1."""
        return max(1, len(self.workers.workers))

    def prepare_workers(self, task: Task) -> Fingerprint:
        """Send the task to the workers and return the fingerprint of their measurements. Raises TuneError."""
        kinds = {group.kind for config in task.source.models.values() for group in config.instance_group}
        if not self.share.gpus and ModelInstanceGroup.KIND_GPU in kinds:
            fix = (
                "leave --cluster-cpus out"
                if self.environment.options.cluster_cpus
                else "no node of the cluster has one"
            )
            raise EnvironmentFault(f"{task.source.name}: its instances are KIND_GPU, and trials have no GPU: {fix}")
        if self.share.gpus and not task.on_gpu:
            self.environment.on_progress(
                f"{task.source.name} is served on CPUs, and each trial reserves a GPU: see --cluster-cpus"
            )
        return self.workers.prepare(pack(task, self.environment.options))

    def run(self, setup: StudySetup) -> StudyResult:
        """Search, then confirm."""

        def make_executor(observer: ProgressObserver) -> ClusterExecutor:
            recorder = EventRecorder(setup.table, observer, setup.record.folder, self.environment.on_progress)
            return ClusterExecutor(self.workers, recorder)

        with setup.record.recording_server_version(lambda: self.workers.server_version):
            return run_study(setup, make_executor)


@contextlib.contextmanager
def open_cluster(
    options: RunOptions, stopwatch: Stopwatch, on_progress: Callable[[str], None], preferred: Fingerprint | None
) -> Iterator[ClusterStudy]:
    """Yield a study on the cluster of ``options``; its workers end with the context.

    ``preferred`` is the fingerprint of the run to continue. Raises EnvironmentFault if no node can be used.
    """
    assert options.cluster is not None
    option_arrivals(options.request_times)  # refuse a bad file before anything is started
    with stopwatch.count("set_up"), contextlib.ExitStack() as opening:
        ray = opening.enter_context(connected(options.cluster))
        share = share_of(read_nodes(ray.nodes()), options.cluster_cpus)
        pool = WorkerPool(ray, options, share, stopwatch, on_progress)
        opening.callback(pool.close)
        info = pool.start(preferred)
        opened = opening.pop_all()
    with opened:
        yield ClusterStudy(_environment_of(info, options, share, stopwatch, on_progress), share, pool)


def _environment_of(
    info: WorkerInfo, options: RunOptions, share: TrialShare, stopwatch: Stopwatch, on_progress: Callable[[str], None]
) -> Environment:
    """Return the environment of the driver, which describes the node of the worker with ``info``."""
    server, client = info.placement.server, info.placement.client
    note = ShareOfNode(str(share), 0 if server & client else len(client))
    return Environment(
        options=options,
        hardware=info.hardware,
        gpus=VisibleGpus(info.hardware.gpus, fault=info.gpus_fault),
        stopwatch=stopwatch,
        on_progress=on_progress,
        node_placement=CpuPlacement(server, client, note),
        cpu_quota=info.cpu_quota,
    )
