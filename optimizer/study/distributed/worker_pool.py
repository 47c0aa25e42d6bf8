"""Start workers on the nodes of a Ray cluster, and keep only those whose measurements are comparable.

Each trial gets the same share of a node's CPUs and GPUs, which decides how many workers fit on the node.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Literal, Protocol, TypeAlias

from optimizer.core.errors import BadInputError, EnvironmentFault, TuneError
from optimizer.core.notes import NodeLeftOut, Note
from optimizer.core.safe_text import one_line
from optimizer.core.stopwatch import Stopwatch
from optimizer.machine.hardware import Fingerprint
from optimizer.options.run_options import RunOptions
from optimizer.study.distributed.messages import (
    ClusterJob,
    ConfirmationEnded,
    ConfirmJob,
    Event,
    TaskBundle,
    TrialEnded,
    WorkerFailed,
)
from optimizer.study.distributed.worker import Worker, WorkerInfo


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node of the cluster with its id in Ray and the CPUs and GPUs that Ray counts on it, used or not."""

    id: str
    host: str
    cpus: int
    gpus: int


@dataclass(frozen=True, slots=True)
class TrialShare:
    """How many CPUs and GPUs each trial gets."""

    cpus: int
    gpus: int

    def count_on(self, node: ClusterNode) -> int:
        """Return how many trials fit on ``node``."""
        count = node.cpus // self.cpus
        return min(count, node.gpus // self.gpus) if self.gpus else count

    def __str__(self) -> str:
        cpus = f"{self.cpus} CPU{'s' if self.cpus > 1 else ''}"
        return f"1 GPU and {cpus}" if self.gpus else cpus


def read_nodes(ray_nodes: Sequence[Mapping[str, Any]]) -> list[ClusterNode]:
    """Return the nodes in ``ray.nodes()`` that are alive and have CPUs."""
    nodes = []
    for entry in ray_nodes:
        resources = entry.get("Resources") or {}
        host = str(entry.get("NodeManagerHostname") or entry.get("NodeManagerAddress"))
        node = ClusterNode(str(entry["NodeID"]), host, int(resources.get("CPU", 0)), int(resources.get("GPU", 0)))
        if entry["Alive"] and node.cpus:
            nodes.append(node)
    return nodes


def share_of(nodes: Sequence[ClusterNode], cpus: int | None) -> TrialShare:
    """Return the share of one trial.

    With ``cpus`` it is these CPUs without a GPU. Otherwise it is one GPU and its part of the CPUs if there are GPUs,
    else all CPUs of the smallest node. Raises EnvironmentFault if no node has that.
    """
    if not nodes:
        raise EnvironmentFault("--cluster: no node of the cluster has CPUs; see `ray status`")
    if cpus is not None:
        largest = max(node.cpus for node in nodes)
        if largest < cpus:
            raise EnvironmentFault(
                f"--cluster-cpus {cpus}: the largest node of the cluster has {largest}; ask for less"
            )
        return TrialShare(cpus, 0)
    with_gpus = [node for node in nodes if node.gpus]
    if with_gpus:
        return TrialShare(max(1, min(node.cpus // node.gpus for node in with_gpus)), 1)
    return TrialShare(min(node.cpus for node in nodes), 0)


HardwareKind = tuple[str, int, tuple[str, ...]]  # CPU, number of CPUs, GPUs


def hardware_kind(info: WorkerInfo) -> HardwareKind:
    """Return the hardware that has to be the same for comparable measurements."""
    return info.hardware.cpu, info.hardware.cpu_count, info.hardware.gpus


def most_common(workers: Sequence[WorkerInfo], preferred: Fingerprint | None) -> WorkerInfo:
    """Return a worker with the hardware of ``preferred`` if there is one, else with the most common hardware."""
    kinds = [hardware_kind(info) for info in workers]
    if preferred is not None and (preferred_kind := (preferred.cpu, preferred.cpu_count, preferred.gpus)) in kinds:
        return workers[kinds.index(preferred_kind)]
    return max(workers, key=lambda info: kinds.count(hardware_kind(info)))


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The worker can be sent jobs."""


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The worker has died, and its job with it."""

    reason: str


WorkerEvent: TypeAlias = Event | WorkerReady | WorkerLost


@dataclass(eq=False)
class WorkerHandle:
    """The driver's side of one worker. ``info`` is known once it has started.

    A worker is ``starting`` until it has described itself, and ``started`` until the task is sent to it. It is
    ``preparing`` until its server has started, ``ready`` for jobs, also while it runs one, and ``leaving`` once its
    node is excluded.
    """

    actor: Any
    node: ClusterNode
    state: Literal["starting", "started", "preparing", "ready", "leaving"] = "starting"
    info: WorkerInfo | None = None
    calls: dict[Any, str] = field(default_factory=dict)  # pending calls: method by Ray's reference to the result

    @property
    def host(self) -> str:
        """Return the name of the worker's host."""
        return self.info.host if self.info else self.node.host


class WorkerGroup(Protocol):
    """The workers of a study, as the driver uses them."""

    @property
    def notes(self) -> Sequence[Note]:
        """Return notes for the user on the workers that were started."""

    def ready(self) -> list[WorkerHandle]:
        """Return the workers that can be sent jobs, including busy ones."""

    def send(self, worker: WorkerHandle, job: ClusterJob) -> None:
        """Send ``job`` to ``worker``."""

    def poll_events(self) -> list[tuple[WorkerHandle, WorkerEvent]]:
        """Return new events; wait for a short time if there are none. Raises TuneError if no worker is left."""


EVENTS_SECONDS = 30.0  # how long one call for events waits on a worker
POLL_SECONDS = 0.5
START_POLL_SECONDS = 0.2
READ_NODES_SECONDS = 5.0  # time between two checks for new nodes
HINT_SECONDS = 60.0  # time without a first worker before the user gets a hint
OTHER_WORKERS_SECONDS = 3.0  # wait after the first worker, before it is decided whose hardware counts
CLOSE_SECONDS = 5.0
NO_WORKER_SECONDS = 120.0  # time without any worker before the run ends
CALLS_AT_ONCE = 4  # parallel calls of one worker: a job, events, close


class WorkerPool:
    """A WorkerGroup of as many workers as the cluster has room for, each with ``share`` for itself.

    ``on_progress`` gets each line for the user, which is in ``notes`` too. ``server_version`` is empty before the
    first trial has ended.
    """

    def __init__(
        self,
        ray: Any,
        options: RunOptions,
        share: TrialShare,
        stopwatch: Stopwatch,
        on_progress: Callable[[str], None],
    ) -> None:
        self._ray, self._options, self._share = ray, options, share
        self._stopwatch, self._on_progress = stopwatch, on_progress
        self.workers: list[WorkerHandle] = []
        self.notes: list[Note] = []
        self.server_version = ""
        self._nodes: list[ClusterNode] = []
        self._excluded: dict[str, NodeLeftOut] = {}  # by node id
        self._actor = ray.remote(Worker)
        self._bundle: Any = None
        self._hardware_kind: HardwareKind | None = None  # the hardware that counts
        self._fingerprint: Fingerprint | None = None
        self._nodes_read_at = -READ_NODES_SECONDS
        self._no_worker_since: float | None = None

    def start(self, preferred: Fingerprint | None) -> WorkerInfo:
        """Start workers and return one of the kind that will be used: that of ``preferred``, else the most common.

        Raises EnvironmentFault if no node can be used.
        """
        started_at, first_started_at, is_hint_shown = time.monotonic(), None, False
        while True:
            self._start_workers()
            started = [worker.info for worker in self.workers if worker.info and worker.state == "started"]
            now = time.monotonic()
            if started and first_started_at is None:
                first_started_at = now
            if first_started_at is not None and (
                len(started) == len(self.workers) or now - first_started_at > OTHER_WORKERS_SECONDS
            ):
                info = most_common(started, preferred)
                self._hardware_kind = hardware_kind(info)
                return info
            self._check_not_hopeless()
            if now - started_at > HINT_SECONDS and not is_hint_shown:
                is_hint_shown = True
                self._on_progress(f"waiting for {self._share} on the cluster; `ray status` shows who uses them")
            list(self._receive(START_POLL_SECONDS))

    def prepare(self, bundle: TaskBundle) -> Fingerprint:
        """Send the task to every worker, now and later. Return the fingerprint that all of them must have.

        It is that of the first worker to be ready. Raises EnvironmentFault if none gets ready.
        """
        self._bundle = self._ray.put(bundle)
        for worker in [worker for worker in self.workers if worker.state == "started"]:
            self._prepare_worker(worker)
        while self._fingerprint is None:
            list(self._receive(START_POLL_SECONDS))
            self._start_workers()
            self._check_not_hopeless()
        return self._fingerprint

    def ready(self) -> list[WorkerHandle]:
        return [worker for worker in self.workers if worker.state == "ready"]

    def send(self, worker: WorkerHandle, job: ClusterJob) -> None:
        call = worker.actor.confirm if isinstance(job, ConfirmJob) else worker.actor.run
        worker.calls[call.remote(job)] = "job"

    def poll_events(self) -> list[tuple[WorkerHandle, WorkerEvent]]:
        """Return new events within POLL_SECONDS, in order for each worker, and exclude the nodes of failed workers.

        Raises EnvironmentFault if no worker is left, BadInputError if a worker reports what no other could do.
        """
        with self._stopwatch.count("cluster"):
            self._start_workers()
            events = list(self._receive(POLL_SECONDS))
        for worker, event in events:
            if isinstance(event, WorkerFailed):
                if event.everywhere:
                    raise BadInputError(event.reason)
                self._exclude(worker, event.reason)
            if isinstance(event, TrialEnded | ConfirmationEnded):
                self.server_version = event.server_version
        if self.ready():
            self._no_worker_since = None
            return events
        now = time.monotonic()
        self._no_worker_since = now if self._no_worker_since is None else self._no_worker_since
        if self._is_hopeless or now - self._no_worker_since > NO_WORKER_SECONDS:
            raise EnvironmentFault(
                f"--cluster: no worker is left: {self._last_reason}; continue with `tune --resume`"
            )
        return events

    def close(self) -> None:
        """End all workers, their servers first."""
        closing = [worker.actor.close.remote() for worker in self.workers if worker.info]
        with contextlib.suppress(Exception):  # Ray raises many kinds of errors for workers that have died
            self._ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS)
        for worker in list(self.workers):
            self._drop(worker)

    @property
    def _is_hopeless(self) -> bool:
        """Return whether there is no worker and none can be expected: each node is excluded."""
        usable = [node for node in self._nodes if node.id not in self._excluded and self._share.count_on(node)]
        return bool(self._excluded) and not usable and all(worker.state == "leaving" for worker in self.workers)

    @property
    def _last_reason(self) -> str:
        return str(list(self._excluded.values())[-1]) if self._excluded else "its nodes are gone; see `ray status`"

    def _check_not_hopeless(self) -> None:
        if self._is_hopeless:
            raise EnvironmentFault(f"--cluster: no node can be used: {self._last_reason}; see `ray status`")

    def _start_workers(self) -> None:
        """Start workers where nodes have room for more, at most every READ_NODES_SECONDS."""
        if time.monotonic() - self._nodes_read_at < READ_NODES_SECONDS:
            return
        self._nodes_read_at = time.monotonic()
        self._nodes = read_nodes(self._ray.nodes())
        for node in self._nodes:
            running = sum(worker.node.id == node.id for worker in self.workers)
            for _ in range(self._share.count_on(node) - running if node.id not in self._excluded else 0):
                self._start_worker(node)

    def _start_worker(self, node: ClusterNode) -> None:
        """Start a worker on ``node``, with a share of it that Ray reserves."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor = self._actor.options(
            num_cpus=self._share.cpus,
            num_gpus=self._share.gpus,
            max_concurrency=CALLS_AT_ONCE,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        ).remote(self._options, self._share.cpus, self._share.gpus, node.cpus)
        worker = WorkerHandle(actor, node)
        worker.calls[actor.start.remote()] = "start"
        self.workers.append(worker)

    def _exclude(self, worker: WorkerHandle, reason: str) -> None:
        """End ``worker`` and use its node no more."""
        if worker.node.id not in self._excluded:
            note = self._excluded[worker.node.id] = NodeLeftOut(worker.host, reason)
            self._note(note)
        worker.state, worker.calls = "leaving", {worker.actor.close.remote(): "close"}

    def _drop(self, worker: WorkerHandle) -> None:
        if worker in self.workers:
            self.workers.remove(worker)
        with contextlib.suppress(Exception):
            self._ray.kill(worker.actor)

    def _note(self, note: Note) -> None:
        self.notes.append(note)
        self._on_progress(str(note))

    def _receive(self, seconds: float) -> Iterator[tuple[WorkerHandle, WorkerEvent]]:
        """Yield the events of calls that return within ``seconds``; do not wait longer than for the first."""
        calls = {ref: worker for worker in self.workers for ref in worker.calls}
        if not calls:
            time.sleep(seconds)  # until there are nodes
            return
        returned, _ = self._ray.wait(list(calls), num_returns=1, timeout=seconds)
        more, _ = self._ray.wait(list(calls), num_returns=len(calls), timeout=0)
        for ref in dict.fromkeys([*returned, *more]):
            worker = calls[ref]
            if worker in self.workers and (method := worker.calls.pop(ref, None)):
                yield from self._handle_return(worker, method, ref)

    def _handle_return(
        self, worker: WorkerHandle, method: str, ref: Any
    ) -> Iterator[tuple[WorkerHandle, WorkerEvent]]:
        """Yield the events of the call ``ref`` of ``method``, which has returned, and continue with the worker."""
        if method == "close":
            self._drop(worker)
            return
        try:
            value = self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            self._handle_error(worker, method, error)
            yield worker, WorkerLost(f"{method} failed: {_last_line(error)}")
            return
        except self._ray.exceptions.RayError as error:
            self._drop(worker)
            yield worker, WorkerLost(_last_line(error))
            return
        if method == "start":
            self._accept(worker, value)
        elif method == "prepare":
            yield from self._check_fingerprint(worker, value)
        elif method == "take_events":
            self._request_events(worker)
            yield from ((worker, event) for event in value)

    def _accept(self, worker: WorkerHandle, info: WorkerInfo) -> None:
        """Add a worker that has started, or exclude its node if it has another version of tritune."""
        worker.info, worker.state = info, "started"
        if info.version != (driver_version := metadata.version("tritune")):
            reason = f"has tritune {info.version}, this machine has {driver_version}; install the same version there"
            self._exclude(worker, reason)
            return
        if info.note and info.note not in self.notes:
            self._note(info.note)
        if self._bundle is not None:
            self._prepare_worker(worker)

    def _prepare_worker(self, worker: WorkerHandle) -> None:
        """Send the task to ``worker``, unless its hardware is of another kind."""
        assert worker.info is not None
        if hardware_kind(worker.info) != self._hardware_kind:
            self._exclude(worker, f"{worker.info.hardware}: measurements there would not be comparable")
            return
        worker.state = "preparing"
        worker.calls[worker.actor.prepare.remote(self._bundle)] = "prepare"

    def _check_fingerprint(
        self, worker: WorkerHandle, fingerprint: Fingerprint
    ) -> Iterator[tuple[WorkerHandle, WorkerEvent]]:
        """Make a prepared worker ready, or exclude its node if its fingerprint differs from that of the first."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint
        if fingerprint != self._fingerprint:
            differences = self._fingerprint.differences(fingerprint)
            self._exclude(worker, f"measurements there would not be comparable ({differences})")
            return
        worker.state = "ready"
        self._request_events(worker)
        yield worker, WorkerReady()

    def _request_events(self, worker: WorkerHandle) -> None:
        worker.calls[worker.actor.take_events.remote(EVENTS_SECONDS)] = "take_events"

    def _handle_error(self, worker: WorkerHandle, method: str, error: Any) -> None:
        """Exclude the node if the fault is its own. Raise the fault if it is one of tune or no node could do it."""
        cause = getattr(error, "cause", None)
        if method == "start" and "No module named 'optimizer'" in str(error):
            self._exclude(worker, "tritune is not installed; pip install 'tritune[ray]' there")
        elif method == "prepare" and isinstance(cause, BadInputError):
            raise BadInputError(str(cause)) from None
        elif isinstance(cause, TuneError):
            self._exclude(worker, str(cause))
        else:
            raise error


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return one_line(lines[-1] if lines else type(error).__name__, 200)
