"""A study in a database that several workers share: claims, heartbeats, and the confirming worker."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import optuna
import psutil
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import fail_stale_trials
from optuna.trial import FrozenTrial, TrialState, create_trial

from optimizer.config.problem import Problem
from optimizer.core.candidate import Candidate
from optimizer.core.errors import BadInputError, TuneError
from optimizer.core.interfaces import TrialStore
from optimizer.core.trial import Trial
from optimizer.machine.hardware import Fingerprint
from optimizer.options.run_options import RunOptions
from optimizer.search.candidate_tracker import WORKER, CandidateTracker, StudyWorkers
from optimizer.search.optuna_encoding import finished_trials
from optimizer.search.optuna_samplers import sampler_for
from optimizer.store.optuna_storage import (
    dialect_of,
    enter_trial,
    has_heartbeats,
    record_heartbeat,
    record_heartbeat_once,
    set_trial_attribute,
    storage_errors,
    storage_of,
    trial_number,
)
from optimizer.store.optuna_study import StudySharing, open_study
from optimizer.store.run_folder import RunFolder
from optimizer.study.scheduler import FIRST_CONCURRENCY, OtherWorkers

JOIN_SECONDS = 1.0  # the thread may be waiting for a database that does not answer


class Heartbeat:
    """Sends heartbeats of a trial until it is stopped. A heartbeat that fails is skipped."""

    def __init__(self, study: optuna.Study, trial_id: int, every_seconds: float, grace_seconds: float) -> None:
        """Send the first heartbeat. Raises EnvironmentFault if the database refuses it."""
        self._study = study
        self._trial_id = trial_id
        self._every_seconds = every_seconds
        self._grace_seconds = grace_seconds
        self._stopped = threading.Event()
        record_heartbeat(study, trial_id)
        self._steady_since = self._last = time.monotonic()
        self._thread = threading.Thread(target=self._send, name="heartbeat", daemon=True)
        self._thread.start()

    @property
    def is_steady(self) -> bool:
        """Return whether all heartbeats of the last grace period were stored without a gap.

        A worker whose own heartbeat lapsed, because the database was gone, must not declare others dead.
        """
        return time.monotonic() - self._steady_since > self._grace_seconds

    def stop(self) -> None:
        """Send no more heartbeats."""
        self._stopped.set()
        self._thread.join(JOIN_SECONDS)

    def _send(self) -> None:
        """Send heartbeats until ``stop``, and note when the last gap between two of them ended."""
        while not self._stopped.wait(self._every_seconds):
            with contextlib.suppress(*storage_errors()):
                # not retried: this thread neither waits for the database nor reports its loss
                record_heartbeat_once(self._study, self._trial_id)
                now = time.monotonic()
                if now - self._last > self._grace_seconds / 2:
                    self._steady_since = now
                self._last = now


# User attributes of a worker's trial.
HOST, PID, STARTED_TICKS = "host", "pid", "started_ticks"  # identify its process
FOLDER = "folder"  # the folder of its run, with the host
ROLE, SEARCH, CONFIRM = "role", "search", "confirm"  # the attribute and its two values
FINISHED_TRIALS = "seen"  # the number of finished trials that it confirms
HAS_HEARTBEAT = "lives"  # set last, after the first heartbeat


class SharedWorkers(StudyWorkers):
    """The workers of ``study``, including this process. Each is a trial of a second study, with a heartbeat.

    Optuna has no heartbeats in a file. Its workers are all on one host, so dead ones are recognized by their process.
    """

    are_many = True
    number: int  # number of this process, unique in the study

    def __init__(self, study: optuna.Study, sharing: StudySharing, folder: Path, *, one_host: bool) -> None:
        """Register this worker. Raises BadInputError if a file is used from several hosts."""
        self._sharing = sharing
        self._identity = {
            HOST: socket.gethostname(),
            PID: os.getpid(),
            STARTED_TICKS: _started_ticks(os.getpid()),
            FOLDER: f"{socket.gethostname()}:{folder.resolve()}",
        }
        self._study = optuna.create_study(
            storage=storage_of(study), study_name=f"{study.study_name} (workers)", load_if_exists=True
        )
        if one_host:
            self._refuse_other_hosts(study.study_name)
        for worker in self._running():
            if worker.user_attrs.get(FOLDER) == self._identity[FOLDER]:  # an earlier session of this run
                self._end(worker.number)
        self._heartbeat: Heartbeat | None = None
        self._confirms = False
        self._enter({ROLE: SEARCH})
        self._first_number = self.number

    @property
    def name(self) -> str:
        """Return the name of this worker, as the trials that it runs record it."""
        return f"{self._identity[HOST]}:{self._identity[PID]}/{self.number}"

    def is_alive(self, trial: FrozenTrial) -> bool:
        """Return whether the worker of ``trial`` has not ended.

        A worker that is not known yet has just started. A trial without a worker's number is from a run that did not
        share the study.
        """
        _, numbered, number = trial.user_attrs.get(WORKER, "").rpartition("/")
        return bool(numbered) and number not in self._ended

    def refresh(self) -> None:
        """Fail the workers that have died. If this one was declared dead after a gap, register it again."""
        if has_heartbeats(self._study):
            if self._heartbeat is not None and self._heartbeat.is_steady:
                fail_stale_trials(self._study)
        else:
            for trial in self._running():
                if trial.user_attrs[HOST] == self._identity[HOST] and not _is_running(trial):
                    self._end(trial.number)
        trials = self._study.get_trials(deepcopy=False)
        self._ended = {str(trial.number) for trial in trials if trial.state.is_finished()}
        if self._has_entered and str(self.number) in self._ended:
            self._enter(self._role)

    def others_searching(self) -> int:
        """Return how many other workers are searching."""
        return sum(
            trial.user_attrs[ROLE] == SEARCH and trial.number != self.number
            for trial in self._running()
            if HAS_HEARTBEAT in trial.user_attrs
        )

    def claim_confirmation(self, finished: int) -> bool:
        """Become the worker that confirms a study of ``finished`` trials. Return False if another one confirms it.

        Another one does if it began to confirm them earlier, and is at work or has ended since this worker joined.
        """
        self._enter({ROLE: CONFIRM, FINISHED_TRIALS: finished})
        earlier = (
            trial
            for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING, TrialState.COMPLETE))
            if trial.number > self._first_number or trial.state == TrialState.RUNNING
        )
        self._confirms = not any(
            trial.user_attrs[ROLE] == CONFIRM
            and trial.number < self.number
            and trial.user_attrs[FINISHED_TRIALS] >= finished
            for trial in earlier
        )
        return self._confirms

    def leave(self, *, is_done: bool = False) -> None:
        """End this worker; its unfinished trial becomes free for others. ``is_done``: it ended without an error."""
        self._has_entered = False
        if self._heartbeat is not None:
            self._heartbeat.stop()
        self._end(self.number, has_confirmed=is_done and self._confirms)

    def _enter(self, role: Mapping[str, Any]) -> None:
        """Register this worker under a new number; ``role`` has its attributes that are not those of the process."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
        self._role, self._has_entered = role, True
        template = create_trial(state=TrialState.RUNNING, user_attrs={**self._identity, **role})
        trial_id = enter_trial(self._study, template)
        self.number = trial_number(self._study, trial_id)
        if has_heartbeats(self._study):
            beats, grace = self._sharing.heartbeat_seconds, self._sharing.grace_seconds
            self._heartbeat = Heartbeat(self._study, trial_id, beats, grace)
        set_trial_attribute(self._study, trial_id, HAS_HEARTBEAT, True)
        self.refresh()

    def _running(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))

    def _end(self, number: int, *, has_confirmed: bool = False) -> None:
        """Mark the worker ``number`` as ended, unless another worker has done so."""
        with contextlib.suppress(UpdateFinishedTrialError, ValueError):  # another worker did
            if has_confirmed:
                self._study.tell(number, 0.0)  # its state is COMPLETE; the value means nothing
            else:
                self._study.tell(number, state=TrialState.FAIL)

    def _refuse_other_hosts(self, name: str) -> None:
        hosts = {trial.user_attrs[HOST] for trial in self._running()} - {self._identity[HOST]}
        if hosts:
            raise BadInputError(
                f"--study-name {name}: {min(hosts)} uses it, and a file can be shared by workers of one host only; "
                "give all workers a database server (--storage postgresql://…), or choose another name"
            )


def _is_running(worker: FrozenTrial) -> bool:
    """Return whether the process of a worker on this host runs. A later process may have its PID.

    If /proc hides the processes of other users, any process with its PID counts as the worker.
    """
    pid = worker.user_attrs[PID]
    try:
        return bool(_started_ticks(pid) == worker.user_attrs[STARTED_TICKS])
    except OSError:
        return psutil.pid_exists(pid)


def _started_ticks(pid: int) -> int | None:
    """Return the start of a process in clock ticks since the boot; None for a zombie. Raises OSError."""
    state, *fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    return None if state == b"Z" else int(fields[18])  # field 22 of proc_pid_stat(5)


POLL_SECONDS = 0.5  # pause of a worker that waits for others


class SharedStudy(OtherWorkers):
    """The other workers of a shared study, as a context: this worker leaves the study at its end.

    ``tracker`` records the trials of this worker's searcher.
    """

    def __init__(
        self, study: optuna.Study, problem: Problem, sharing: StudySharing, folder: Path, *, one_host: bool
    ) -> None:
        """Register this worker. Raises BadInputError if a file is used from several hosts."""
        self._study = study
        self._retry = sharing.retry
        self._workers = SharedWorkers(study, sharing, folder, one_host=one_host)
        self.number = self._workers.number
        self._seen: list[tuple[int, str]] = []  # states of the trials at the latest decision
        self.tracker = CandidateTracker(problem, study, self._workers)

    def __enter__(self) -> SharedStudy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._retry.end()  # end now, whether the database answers or not
        with contextlib.suppress(TuneError):  # otherwise others notice the missing heartbeats
            self._workers.leave(is_done=error is None)

    def claim(self, candidate: Candidate) -> bool:
        return self.tracker.start(candidate, FIRST_CONCURRENCY)

    def abandoned(self) -> list[Candidate]:
        self._seen = self._refreshed_states()  # taken first: a trial that ends from now on may change the decision
        return self.tracker.abandoned()

    def trials(self) -> list[Trial]:
        return finished_trials(self._study)

    def are_running(self) -> bool:
        return self.tracker.others_run()

    def wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left_seconds := until - time.monotonic()) > 0:
            time.sleep(min(POLL_SECONDS, left_seconds))
            if self._refreshed_states() != self._seen:
                return

    def leave_search(self) -> str:
        self._workers.leave()
        self._workers.refresh()
        searching = self._workers.others_searching()
        if searching:
            workers = "1 other worker continues" if searching == 1 else f"{searching} other workers continue"
            return f"{workers} the study {self._study.study_name}; the last one confirms the best configuration"
        if not self._workers.claim_confirmation(len(self.trials())):
            return f"another worker of the study {self._study.study_name} confirms the best configuration"
        return ""

    def collect_trials(self, own_trials: list[Trial], table: TrialStore) -> list[Trial]:
        candidates, trials = {trial.candidate for trial in own_trials}, list(own_trials)
        for trial in self.trials():
            if trial.candidate in candidates:
                continue
            measurements = tuple(
                (load, replace(measurement, measure_seconds=None)) for load, measurement in trial.measurements
            )
            # the deployment time of a served candidate is the estimate for its fresh servers
            seconds = None if trial.status == "failed" else trial.deploy_seconds
            copy = replace(trial, number=len(trials), measurements=measurements, deploy_seconds=seconds)
            trials.append(copy)
            for load, measurement in measurements:
                table.append(copy, load, measurement)
            if copy.status == "failed":
                table.append_failure(copy)
        return trials

    def _refreshed_states(self) -> list[tuple[int, str]]:
        """Fail dead workers and their trials. Return number and state of each trial."""
        self._workers.refresh()
        self.tracker.fail_abandoned()
        return [(trial.number, trial.state.name) for trial in self._study.get_trials(deepcopy=False)]


def join(
    options: RunOptions,
    problem: Problem,
    folder: RunFolder,
    fingerprint: Fingerprint | None,
    sharing: StudySharing,
    conditions: Mapping[str, str | None] | None = None,
) -> SharedStudy:
    """Join the study that ``options`` name.

    Raises BadInputError if it cannot be opened, is of another problem or has other ``conditions``, or was measured in
    another environment than ``fingerprint``.
    """
    assert options.storage is not None
    assert options.study_name is not None
    sampler = sampler_for(options.search, options.seed)
    study = open_study(options.storage, options.study_name, problem, sampler, fingerprint, sharing, conditions)
    one_host = "://" not in options.storage or dialect_of(options.storage).startswith("sqlite")  # a file
    joined = SharedStudy(study, problem, sharing, folder.path, one_host=one_host)
    study.sampler = sampler_for(options.search, options.seed + joined.number)  # otherwise all would suggest the same
    return joined
