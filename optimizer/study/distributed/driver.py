"""Drive one study on the workers of a cluster: send trials, record their events, and repeat lost trials."""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from optimizer.confirmation.plan import ConfirmationPlan
from optimizer.core.budget import Budget
from optimizer.core.errors import DeploymentError
from optimizer.core.files import write_atomically
from optimizer.core.interfaces import ProgressObserver, TrialStore
from optimizer.core.notes import ConfirmationIncomplete, Note, present
from optimizer.core.trial import FreshServer, Trial
from optimizer.measure.measurer import CrashRetry
from optimizer.store.run_folder import RunFolder
from optimizer.study.distributed.messages import (
    ConfirmationEnded,
    ConfirmationPlanned,
    ConfirmationStep,
    ConfirmJob,
    LoadMeasured,
    LogLine,
    SearchJob,
    TrialEnded,
    TrialFailed,
    TrialStarted,
    WorkerFailed,
)
from optimizer.study.distributed.worker import REFERENCES
from optimizer.study.distributed.worker_pool import WorkerEvent, WorkerGroup, WorkerHandle, WorkerLost, WorkerReady
from optimizer.study.scheduler import ScheduledTrial, Scheduler

UNFINISHED_FILE = "running.txt"


class UnfinishedTrials:
    """The numbers of the running trials, in a file of ``folder``, for a resume after a crash.

    The file exists only while there are some.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / UNFINISHED_FILE

    def read(self) -> set[int]:
        """Return the numbers; empty if the file is missing or not written by ``write``."""
        try:
            return {int(word) for word in self._path.read_text().split()}
        except (OSError, ValueError):
            return set()

    def write(self, numbers: Iterable[int]) -> None:
        """Replace the numbers. Raises EnvironmentFault if the disk refuses it."""
        text = " ".join(map(str, sorted(numbers)))
        if text:
            write_atomically(self._path, f"{text}\n")
            return
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()


@dataclass
class EventRecorder:
    """Stores and shows the events of workers, and keeps their notes and the baseline's reference outputs."""

    table: TrialStore
    observer: ProgressObserver
    folder: RunFolder
    on_progress: Callable[[str], None]
    _with_references: set[WorkerHandle] = field(default_factory=set)  # workers that have them
    _notes: dict[WorkerHandle, tuple[Note, ...]] = field(default_factory=dict)  # the latest of each worker

    @property
    def notes(self) -> tuple[Note, ...]:
        """Notes for the user on the deployments of all workers, including those that were lost since."""
        return present(note for notes in self._notes.values() for note in notes)

    def record(self, worker: WorkerHandle, event: WorkerEvent) -> None:
        """Store or show ``event``; its row is on disk when this returns. Other events are ignored.

        Raises EnvironmentFault if the disk refuses it.
        """
        match event:
            case TrialStarted(number, candidate, role):
                self.observer.trial_started(number, candidate, role)
            case LoadMeasured(trial, load, measurement, fresh):
                self.table.append(trial, load, measurement, fresh)
                self.observer.measured(trial.number, load, measurement)
            case TrialFailed(trial):
                self.table.append_failure(trial)
            case ConfirmationStep(trial, best):
                self.observer.trial_finished(trial, best)
            case LogLine(line):
                self.on_progress(f"{worker.host}: {line}")
            case TrialEnded(notes=notes) | ConfirmationEnded(notes=notes):
                self._notes[worker] = notes

    def write_log(self, number: int, text: str) -> Path | None:
        """Write the end of a failed trial's log, which is on a node, to this machine. Return its path."""
        if not text:
            return None
        path = self.folder.server_log.with_name(f"trial-{number}.log")
        write_atomically(path, text)
        return path

    def references_for(self, worker: WorkerHandle) -> dict[str, bytes]:
        """Return the reference outputs by file name, once for each worker; empty while there are none."""
        if worker in self._with_references:
            return {}
        references = {path.name: path.read_bytes() for path in self.folder.path.glob(REFERENCES)}
        if references:
            self._with_references.add(worker)
        return references

    def add_references(self, worker: WorkerHandle, references: Mapping[str, bytes]) -> None:
        """Keep the reference outputs that ``worker`` has taken; the first ones count."""
        if references:
            self._with_references.add(worker)
        for name, content in references.items():
            path = self.folder.path / Path(name).name
            if not path.exists():
                write_atomically(path, content)


@dataclass
class _ClusterConfirmation:
    """The trials and the plan of a confirmation, which another worker continues if the confirming one is lost."""

    by_number: dict[int, Trial]
    plan: ConfirmationPlan | None
    store_plan: Callable[[ConfirmationPlan], None]

    @property
    def trials(self) -> tuple[Trial, ...]:
        """The trials with their confirmations so far."""
        return tuple(self.by_number.values())

    def apply(self, event: WorkerEvent) -> None:
        """Take over the trials and the plan of an ``event``; others are ignored."""
        match event:
            case ConfirmationEnded(trials):
                self.by_number.update({trial.number: trial for trial in trials})
            case ConfirmationPlanned(plan):
                self.plan = plan
                self.store_plan(plan)
            case LoadMeasured(trial, load, measurement, FreshServer() as fresh):
                earlier = self.by_number[trial.number]
                self.by_number[trial.number] = earlier.with_row(load, measurement, fresh)
            case TrialFailed(trial):
                self.by_number[trial.number] = trial


@dataclass
class ClusterExecutor:
    """Runs the trials of a study on ``workers``, and its confirmation on one of them."""

    workers: WorkerGroup
    recorder: EventRecorder
    _incomplete: ConfirmationIncomplete | None = None

    @property
    def notes(self) -> tuple[Note, ...]:
        return present([*self.workers.notes, *self.recorder.notes, self._incomplete])

    def search(self, scheduler: Scheduler) -> list[Trial]:
        return Driver(self.workers, scheduler, self.recorder).run()

    def confirm(
        self,
        trials: list[Trial],
        budget: Budget,
        plan: ConfirmationPlan | None,
        store_plan: Callable[[ConfirmationPlan], None],
    ) -> list[Trial]:
        """Return the ``trials`` with their confirmations. If the confirming worker is lost, another one continues."""
        state = _ClusterConfirmation({trial.number: trial for trial in trials}, plan, store_plan)
        retry, is_allowed = CrashRetry(), True
        while is_allowed:
            while not (ready := self.workers.ready()):
                self.workers.poll_events()
            worker = ready[0]
            references = self.recorder.references_for(worker)
            self.workers.send(worker, ConfirmJob(state.trials, state.plan, budget.seconds_left(), references))
            if self._follow(worker, state):
                return list(state.trials)
            is_allowed = retry.count_crash()
        self._incomplete = ConfirmationIncomplete(retry.crashes)
        return list(state.trials)

    def _follow(self, confirming: WorkerHandle, state: _ClusterConfirmation) -> bool:
        """Record events in ``state`` until the confirmation ends. Return False if its worker was lost."""
        while True:
            for worker, event in self.workers.poll_events():
                if worker is not confirming:
                    continue
                self.recorder.record(worker, event)
                state.apply(event)
                if isinstance(event, ConfirmationEnded | WorkerFailed | WorkerLost):
                    return isinstance(event, ConfirmationEnded)


@dataclass
class Driver:
    """Runs the search of one study on ``workers``, one trial on each at a time."""

    workers: WorkerGroup
    scheduler: Scheduler
    recorder: EventRecorder

    def __post_init__(self) -> None:
        self._unfinished = UnfinishedTrials(self.recorder.folder.path)
        self._running: dict[WorkerHandle, ScheduledTrial] = {}
        self._waiting: deque[ScheduledTrial] = deque()  # lost or of an earlier session: they run first
        self._losses: defaultdict[int, CrashRetry] = defaultdict(CrashRetry)

    def run(self) -> list[Trial]:
        """Return all trials by number, including those in the table, once the search is over."""
        earlier, begun = self.recorder.table.read(), self._unfinished.read()
        interrupted = [trial for trial in earlier if trial.number in begun and trial.status == "ok"]
        self.scheduler.resume([trial for trial in earlier if trial not in interrupted])
        self._waiting.extend(ScheduledTrial("resumed", trial) for trial in interrupted)
        while self._assign_all() or self._running or self._waiting:
            may_assign = False
            while not may_assign:
                for worker, event in self.workers.poll_events():
                    may_assign |= self._handle(worker, event)
        return sorted(self.scheduler.trials, key=lambda trial: trial.number)

    def _assign_all(self) -> bool:
        """Send trials to all idle workers. Return False if there is none to send, now or for good."""
        for worker in self.workers.ready():
            if worker in self._running:
                continue
            scheduled = self._next()
            if scheduled is None:
                return False
            self._assign(worker, scheduled)
        return True

    def _next(self) -> ScheduledTrial | None:
        """Return a waiting trial if there is time for it, else the choice of the scheduler; None if it has none."""
        while self._waiting:
            waiting = self._waiting.popleft()
            is_baseline = waiting.trial.candidate == self.scheduler.baseline
            if is_baseline or self.scheduler.budget.search_seconds_left() > 0:
                return waiting
            if waiting.trial.measurements:  # they count, even without time for more
                self._finish(waiting.trial)
        return self.scheduler.next([running.trial for running in self._running.values()])

    def _assign(self, worker: WorkerHandle, scheduled: ScheduledTrial) -> None:
        self._running[worker] = scheduled
        role, trial = scheduled
        self._write_unfinished()
        seconds_left = self.scheduler.budget.search_seconds_left()
        rules, references = self.scheduler.rules(trial.candidate), self.recorder.references_for(worker)
        self.workers.send(worker, SearchJob(trial, role, rules, seconds_left, references))

    def _handle(self, worker: WorkerHandle, event: WorkerEvent) -> bool:
        """Record ``event``. Return whether there may be more to assign."""
        match event:
            case WorkerReady():
                return True
            case TrialEnded(trial, log, references):
                self.recorder.record(worker, event)
                trial = _with_recorded_forecasts(trial, self._running.pop(worker).trial)
                self.recorder.add_references(worker, references)
                self._finish(trial, self.recorder.write_log(trial.number, log))
                return True
            case WorkerFailed() | WorkerLost():
                if worker in self._running:
                    self._lose(self._running.pop(worker), event.reason)
                return True
        if isinstance(event, LoadMeasured):  # workers have no searcher
            measurement = self.scheduler.with_forecast(event.trial.candidate, event.load, event.measurement)
            event = replace(event, measurement=measurement)
        self.recorder.record(worker, event)
        if isinstance(event, LoadMeasured) and worker in self._running:
            running = self._running[worker]
            measurements = (*running.trial.measurements, (event.load, event.measurement))
            trial = replace(running.trial, measurements=measurements, deploy_seconds=event.trial.deploy_seconds)
            self._running[worker] = running._replace(trial=trial)
        return False

    def _lose(self, lost: ScheduledTrial, reason: str) -> None:
        """Repeat a trial whose worker was lost, unless it has lost several workers, so that it may be the cause."""
        retry = self._losses[lost.trial.number]
        if retry.count_crash():
            self._waiting.append(lost)
            return
        trial = lost.trial.with_failure(DeploymentError(f"its worker was lost {retry.crashes} times: {reason}"))
        self.recorder.table.append_failure(trial)
        self._finish(trial)

    def _finish(self, trial: Trial, log: Path | None = None) -> None:
        self.scheduler.record_finished(trial, log)
        self._write_unfinished()
        self.recorder.observer.trial_finished(trial, self.scheduler.best_so_far())

    def _write_unfinished(self) -> None:
        unfinished = (*self._running.values(), *self._waiting)
        self._unfinished.write(scheduled.trial.number for scheduled in unfinished)


def _with_recorded_forecasts(trial: Trial, recorded: Trial) -> Trial:
    """Return the ``trial`` of a worker with the forecasts that were stored with its measurements in ``recorded``."""
    stored = {(load, replace(measurement, forecast=None)): measurement for load, measurement in recorded.measurements}
    measurements = tuple(
        (load, stored.get((load, measurement), measurement)) for load, measurement in trial.measurements
    )
    return replace(trial, measurements=measurements)
