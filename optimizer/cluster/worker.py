"""A worker: deploys and measures on its share of a node. Ray calls it; it knows nothing of Ray."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from optimizer.budget import Budget
from optimizer.cluster import held_cpus
from optimizer.cluster.events import Broken, Confirmed, Ended, Event, Outbox
from optimizer.cluster.jobs import ConfirmJob, SearchJob
from optimizer.cluster.orphans import end_with_parent
from optimizer.cluster.parcel import Parcel, unpack
from optimizer.confirm.confirmer import Confirmer
from optimizer.deploy import leftovers
from optimizer.errors import BadInputError, TuneError
from optimizer.machine import cpus
from optimizer.machine.cpus import Placement
from optimizer.machine.fingerprint import Fingerprint
from optimizer.machine.gpu_attribution import CHOSEN
from optimizer.machine.hardware import Hardware
from optimizer.machine.speed import SpeedLog
from optimizer.options import RunOptions
from optimizer.stack import Stack
from optimizer.stopwatch import Stopwatch
from optimizer.store.run_folder import RunFolder
from optimizer.task import Task
from optimizer.trial_runner import TrialRunner
from optimizer.untrusted import read_tail

LOG_BYTES = 1 << 16
REFERENCES = "reference*.npz"
DEFAULT_ARRIVALS = RunOptions("").arrivals


@dataclass(frozen=True, slots=True)
class About:
    """Who a worker is. ``note``: what the user should know of its node."""

    host: str
    version: str
    hardware: Hardware
    gpus_fault: str
    placement: Placement
    note: str = ""


class Worker:
    """``own_cpus`` of the ``node_cpus`` that Ray counts on its node are for this process and what it starts."""

    def __init__(self, options: RunOptions, own_cpus: int, own_gpus: int, node_cpus: int) -> None:
        self._options, self._own_cpus, self._own_gpus, self._node_cpus = options, own_cpus, own_gpus, node_cpus
        self._outbox = Outbox()
        self._deadline = 0.0
        self._told_references = self._closed = False

    def about(self) -> About:
        """Takes its CPUs. Raises TuneError where this node cannot do what is asked."""
        end_with_parent()
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray's: the server is to find what it finds without Ray
        if not self._own_gpus:
            os.environ[CHOSEN] = ""
        note = self._take_cpus()
        before = replace(self._options, arrivals=DEFAULT_ARRIVALS)  # a file of them has yet to come
        self._stack = Stack.detect(before, Stopwatch(), self._outbox.say)
        self._folder = leftovers.new_folder()
        return About(
            socket.gethostname(),
            metadata.version("tritune"),
            self._stack.hardware,
            self._stack.gpus.fault,
            self._stack.placement(),
            note,
        )

    def furnish(self, parcel: Parcel) -> Fingerprint:
        """Unpack the model and start its server. Raises TuneError."""
        task, arrivals = unpack(parcel, self._folder)
        self._task: Task = task
        self._stack = replace(self._stack, options=replace(self._options, arrivals=arrivals))
        self._run = RunFolder(self._folder / "run")
        self._run.server_log.parent.mkdir(parents=True)
        fingerprint = self._stack.fingerprint(task)
        self._target = self._stack.target(task, self._run)
        self._target.start()
        self._measuring = self._stack.measuring(task, self._run, self._outbox, self._outbox)
        self._runner = TrialRunner(
            self._target, self._measuring, task.baseline, self._seconds_left, self._stack.stopwatch
        )
        return fingerprint

    def told(self, seconds: float) -> list[Event]:
        """What has happened since; waits for the first event."""
        return self._outbox.take(seconds)

    def run(self, job: SearchJob) -> None:
        """Ends with Ended or Broken among what is told."""
        with self._faults_told():
            self._search(job)

    def confirm(self, job: ConfirmJob) -> None:
        """Ends with Confirmed or Broken among what is told."""
        with self._faults_told():
            self._confirm(job)

    @contextlib.contextmanager
    def _faults_told(self) -> Iterator[None]:
        try:
            yield
        except TuneError as error:
            self._outbox.put(Broken(str(error), _tail(error.log), isinstance(error, BadInputError)))
        except Exception:
            if not self._closed:  # else nobody waits for it
                raise

    def _search(self, job: SearchJob) -> None:
        self._deadline = time.monotonic() + job.seconds_left
        self._runner.log = None
        self._compare_with(job.references)
        trial = self._runner.run(job.trial, job.role, job.rules)
        self._outbox.put(Ended(trial, _tail(self._runner.log), self._references(), self._target.server_version))

    def _confirm(self, job: ConfirmJob) -> None:
        speed, budget = SpeedLog(), Budget(job.seconds_left)
        self._compare_with(job.references)
        confirmer = Confirmer(
            self._task.problem, self._target, self._measuring, budget, list(job.trials), speed.probe
        )
        trials = confirmer.run(self._task.baseline)
        notes = tuple(note for note in (self._measuring.guard.note, speed.note()) if note)
        self._outbox.put(Confirmed(tuple(trials), notes, self._target.server_version))

    def close(self) -> None:
        """Leave nothing on the node. May be called whatever else is going on."""
        self._closed = True
        with contextlib.suppress(AttributeError):  # it was not furnished
            self._target.close()
        with contextlib.suppress(AttributeError):
            shutil.rmtree(self._folder, ignore_errors=True)

    def _seconds_left(self) -> float:
        return self._deadline - time.monotonic()

    def _take_cpus(self) -> str:
        """What is to be said of it."""
        machine = cpus.topology(cpus.available())
        if self._node_cpus <= len(machine.cpus):
            self._held = held_cpus.hold(self._own_cpus, machine, held_cpus.lock_folder())
            if self._held is not None:
                held_cpus.pin(self._held.cpus)
                return ""
            return f"{socket.gethostname()}: its CPUs are taken by trials that Ray does not know of: they share them"
        return (
            f"{socket.gethostname()}: Ray counts {self._node_cpus} CPUs where there are {len(machine.cpus)}: trials "
            "there share them"
        )

    def _compare_with(self, references: Mapping[str, bytes]) -> None:
        """The answers that another worker's baseline gave, where this one has none."""
        if not references or not self._measuring.guard.needs_reference:
            return
        for name, content in references.items():
            (self._run.path / name).write_bytes(content)
        self._told_references = True
        self._measuring = self._stack.measuring(self._task, self._run, self._outbox, self._outbox)
        self._runner.measuring = self._measuring

    def _references(self) -> dict[str, bytes]:
        """Once."""
        if self._told_references or self._measuring.guard.needs_reference:
            return {}
        self._told_references = True
        return {path.name: path.read_bytes() for path in self._run.path.glob(REFERENCES)}


def check_version(about: About) -> None:
    """Raises BadInputError where a worker is of another version than the driver."""
    if about.version != (own := metadata.version("tritune")):
        raise BadInputError(f"has tritune {about.version}, and here it is {own}; install the same there")


def _tail(log: Path | None) -> str:
    try:
        return read_tail(log, LOG_BYTES) if log else ""
    except OSError:
        return ""
