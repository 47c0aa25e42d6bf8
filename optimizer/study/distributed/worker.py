"""A worker on a node of a Ray cluster: deploys and measures trials on its own share of the node."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TextIO

from optimizer.core.budget import Budget
from optimizer.core.errors import BadInputError, TuneError
from optimizer.core.notes import CpusUsedByOthers, FewerCpusThanRayCounts, Note
from optimizer.core.safe_text import read_tail
from optimizer.deploy import server_process
from optimizer.machine.cpus import CpuPlacement, CpuTopology, read_topology
from optimizer.machine.hardware import Fingerprint, Hardware
from optimizer.machine.nvml import VISIBLE_DEVICES
from optimizer.options.run_options import RunOptions
from optimizer.options.values import usable_cpus
from optimizer.store.run_folder import RunFolder
from optimizer.study.distributed.messages import (
    ConfirmationEnded,
    ConfirmationPlanned,
    ConfirmJob,
    Event,
    Outbox,
    SearchJob,
    TaskBundle,
    TrialEnded,
    WorkerFailed,
    unpack,
)
from optimizer.study.environment import Environment
from optimizer.study.study import LocalExecutor
from optimizer.study.trial_runner import TrialRunner

PARENT_POLL_SECONDS = 1.0
CPUS_WAIT_SECONDS = 10.0  # wait for the CPUs of a worker that is about to end
CPUS_POLL_SECONDS = 0.1


def end_with_parent() -> None:
    """End this process, and with it all its children, soon after its parent has ended.

    Ray's own way of ending the workers of a dead raylet can wait for calls that never return.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent").start()


HeldCpus = Mapping[int, TextIO]  # reserved CPUs with their lock files, which the kernel releases with the process


def lock_folder() -> Path:
    """Return the folder of the locks, one for each user and machine."""
    return Path(tempfile.gettempdir()) / f"tritune_cpus_{os.getuid()}"


def hold_cpus(
    count: int, machine: CpuTopology, folder: Path, wait_seconds: float = CPUS_WAIT_SECONDS
) -> HeldCpus | None:
    """Reserve ``count`` free CPUs, whole cores on one NUMA node if possible. Return None if there are too few.

    They stay reserved until their files are closed. Raises OSError if ``folder`` cannot be written.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    deadline = time.monotonic() + wait_seconds
    while True:
        if held := _try_to_hold(count, machine, folder):
            return held
        if len(machine.cpus) < count or time.monotonic() > deadline:
            return None
        time.sleep(CPUS_POLL_SECONDS)


def pin(cpus: frozenset[int]) -> None:
    """Run this process, all its threads and its future children on ``cpus``."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(thread.name), cpus)


def _try_to_hold(count: int, machine: CpuTopology, folder: Path) -> HeldCpus | None:
    """Return the locks of ``count`` CPUs; None if too few are free. One process at a time chooses."""
    with (folder / "choosing").open("a") as choosing, contextlib.ExitStack() as undo:
        fcntl.flock(choosing, fcntl.LOCK_EX)
        free: dict[int, TextIO] = {}
        for cpu in machine.cpus:
            lock = undo.enter_context((folder / str(cpu)).open("a"))
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                free[cpu] = lock
        chosen = _choose_cpus(count, machine, frozenset(free))
        if chosen is None:
            return None
        undo.pop_all()
        for cpu in machine.cpus - chosen:
            if cpu in free:
                free[cpu].close()
        return {cpu: free[cpu] for cpu in chosen}


def _choose_cpus(count: int, machine: CpuTopology, free: frozenset[int]) -> frozenset[int] | None:
    """Return ``count`` of the ``free`` CPUs: whole cores first, on one NUMA node if possible.

    The node that then has the fewest free CPUs is preferred.
    """
    if len(free) < count:
        return None
    sufficient_nodes = [node & free for node in machine.nodes if len(node & free) >= count]
    preferred = min(sufficient_nodes, key=len, default=free)
    cores = sorted((core & preferred for core in machine.cores), key=lambda core: core not in machine.cores)
    return frozenset([cpu for core in cores for cpu in sorted(core)][:count])


LOG_BYTES = 1 << 16
REFERENCES = "reference*.npz"


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """The facts that a worker reports to the driver. ``note`` is for the user."""

    host: str
    version: str
    hardware: Hardware
    gpus_fault: str
    placement: CpuPlacement
    cpu_quota: float | None
    note: Note | None


class Worker:
    """A Ray actor. It and its server use ``own_cpus`` of the ``node_cpus`` that Ray counts on its node."""

    def __init__(self, options: RunOptions, own_cpus: int, own_gpus: int, node_cpus: int) -> None:
        self._options, self._own_cpus, self._own_gpus, self._node_cpus = options, own_cpus, own_gpus, node_cpus
        self._outbox = Outbox()
        self._deadline = 0.0
        self._opened = contextlib.ExitStack()  # the server and the folder of the worker
        self._has_shared_references = self._closed = False

    def start(self) -> WorkerInfo:
        """Reserve CPUs and describe the worker. Raises TuneError if this node does not support the options."""
        end_with_parent()
        os.environ.pop("OMP_NUM_THREADS", None)  # set by Ray: the server should run as it does without Ray
        if not self._own_gpus:
            os.environ[VISIBLE_DEVICES] = ""
        note = self._reserve_cpus()
        environment = self._environment = Environment.detect(self._options, self._outbox.send_line)
        self._folder = server_process.new_folder()
        self._opened.callback(shutil.rmtree, self._folder, ignore_errors=True)
        return WorkerInfo(
            host=socket.gethostname(),
            version=metadata.version("tritune"),
            hardware=environment.hardware,
            gpus_fault=environment.gpus.fault,
            placement=environment.placement(),
            cpu_quota=environment.cpu_quota,
            note=note,
        )

    def prepare(self, bundle: TaskBundle) -> Fingerprint:
        """Unpack the task and start its server. Return the fingerprint. Raises TuneError."""
        self._task, arrivals = unpack(bundle, self._folder)
        self._environment = replace(self._environment, options=replace(self._options, request_times=arrivals))
        self._run = RunFolder(self._folder / "run")
        self._run.server_log.parent.mkdir(parents=True)
        fingerprint = self._environment.fingerprint(self._task)
        self._target = self._opened.enter_context(self._environment.open_target(self._task, self._run))
        self._target.start()
        measurer = self._environment.make_measurer(self._task, self._run, self._outbox, self._outbox)
        self._runner = TrialRunner(
            self._target,
            replace(measurer, node=socket.gethostname()),
            self._task.baseline,
            lambda: self._deadline - time.monotonic(),
        )
        return fingerprint

    def take_events(self, seconds: float) -> list[Event]:
        """Return new events; if there are none, wait up to ``seconds`` for the first one."""
        return self._outbox.take(seconds)

    def run(self, job: SearchJob) -> None:
        """Run a trial. The last event is TrialEnded or WorkerFailed."""
        with self._reporting_faults():
            self._deadline = time.monotonic() + job.seconds_left
            self._use_references(job.references)
            ended = self._runner.run(job.trial, job.role, job.rules)
            references, notes = self._new_references(), self._runner.measurer.notes
            self._outbox.put(
                TrialEnded(ended.trial, _tail(ended.log), references, notes, self._target.server_version)
            )

    def confirm(self, job: ConfirmJob) -> None:
        """Confirm the best trials. The last event is ConfirmationEnded or WorkerFailed."""
        with self._reporting_faults():
            self._use_references(job.references)
            executor = LocalExecutor(self._task, self._options, self._target, self._runner.measurer)
            trials = executor.confirm(
                list(job.trials),
                Budget(job.seconds_left),
                job.plan,
                lambda plan: self._outbox.put(ConfirmationPlanned(plan)),
            )
            self._outbox.put(ConfirmationEnded(tuple(trials), executor.notes, self._target.server_version))

    def close(self) -> None:
        """End the server and remove all files from the node. May be called during any other call."""
        self._closed = True
        self._opened.close()

    @contextlib.contextmanager
    def _reporting_faults(self) -> Iterator[None]:
        """Report a TuneError of the context as WorkerFailed."""
        try:
            yield
        except TuneError as error:
            self._outbox.put(WorkerFailed(str(error), _tail(error.log), isinstance(error, BadInputError)))
        except Exception:
            if not self._closed:  # after that, the driver does not wait for the result
                raise

    def _reserve_cpus(self) -> Note | None:
        """Pin this process to CPUs of its own. Return a note if it has to share them."""
        machine, host = read_topology(usable_cpus()), socket.gethostname()
        if self._node_cpus > len(machine.cpus):
            return FewerCpusThanRayCounts(host, self._node_cpus, len(machine.cpus))
        self._held = hold_cpus(self._own_cpus, machine, lock_folder())
        if self._held is None:
            return CpusUsedByOthers(host)
        pin(frozenset(self._held))
        return None

    def _use_references(self, references: Mapping[str, bytes]) -> None:
        """Use the outputs of another worker's baseline if this worker has none."""
        if not references or not self._runner.measurer.output_check.needs_reference:
            return
        for name, content in references.items():
            (self._run.path / name).write_bytes(content)
        self._has_shared_references = True
        self._runner.measurer.output_check = self._environment.make_output_check(self._task, self._run)

    def _new_references(self) -> dict[str, bytes]:
        """Return the reference outputs by file name, the first time that there are some."""
        if self._has_shared_references or self._runner.measurer.output_check.needs_reference:
            return {}
        self._has_shared_references = True
        return {path.name: path.read_bytes() for path in self._run.path.glob(REFERENCES)}


def _tail(log: Path | None) -> str:
    try:
        return read_tail(log, LOG_BYTES) if log else ""
    except OSError:
        return ""
