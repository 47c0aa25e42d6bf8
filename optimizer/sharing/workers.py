"""The workers of a shared study: each a running trial of a second study, kept alive by its heartbeats."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
import psutil
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import fail_stale_trials
from optuna.storages._heartbeat import is_heartbeat_enabled
from optuna.trial import FrozenTrial, TrialState, create_trial

from optimizer.errors import BadInputError
from optimizer.search.workers import WORKER
from optimizer.sharing.heartbeat import Heartbeat
from optimizer.store.study import Shared

# user attributes of a worker's trial; LIVES, set last, says that its heart has begun to beat
HOST, PID, FOLDER, ROLE, SEEN, LIVES = "host", "pid", "folder", "role", "seen", "lives"
SEARCH, CONFIRM = "search", "confirm"


class SharedWorkers:
    """Those of ``study``, this process among them. Where its storage is a file they are all on one host, and are told
    by their processes; Optuna has no heartbeats there."""

    are_many = True
    number: int  # of this process: no other has it

    def __init__(self, study: optuna.Study, shared: Shared, folder: Path, *, one_host: bool) -> None:
        """Raises BadInputError where a file is used from several hosts."""
        self._storage = study._storage
        self._shared = shared
        self._where = {
            HOST: socket.gethostname(),
            PID: os.getpid(),
            FOLDER: f"{socket.gethostname()}:{folder.resolve()}",
        }
        self._study = optuna.create_study(
            storage=self._storage, study_name=f"{study.study_name} (workers)", load_if_exists=True
        )
        if one_host:
            self._refuse_other_hosts(study.study_name)
        for left in self._running():
            if left.user_attrs.get(FOLDER) == self._where[FOLDER]:  # by the run that is continued here
                self._end(left.number)
        self._heartbeat: Heartbeat | None = None
        self._enter({ROLE: SEARCH})

    @property
    def name(self) -> str:
        return f"{self._where[HOST]}:{self._where[PID]}/{self.number}"

    def is_alive(self, trial: FrozenTrial) -> bool:
        """A worker that is not known yet has just begun."""
        return trial.user_attrs.get(WORKER, "").rpartition("/")[2] not in self._ended

    def look(self) -> None:
        """At who is there: workers that have been silent for too long are gone. One that was taken for gone, as when
        it lost the database, comes back as another."""
        if is_heartbeat_enabled(self._storage):
            if self._heartbeat is not None and self._heartbeat.is_steady:
                fail_stale_trials(self._study)
        else:
            for trial in self._running():
                if trial.user_attrs[HOST] == self._where[HOST] and not psutil.pid_exists(trial.user_attrs[PID]):
                    self._end(trial.number)
        trials = self._study.get_trials(deepcopy=False)
        self._ended = {str(trial.number) for trial in trials if trial.state.is_finished()}
        if self._here and str(self.number) in self._ended:
            self._enter(self._role)

    def others_searching(self) -> int:
        return sum(
            trial.user_attrs[ROLE] == SEARCH and trial.number != self.number
            for trial in self._running()
            if LIVES in trial.user_attrs
        )

    def confirms(self, finished: int) -> bool:
        """Whether this worker is to confirm a study of ``finished`` trials: another may be about to, of as many."""
        self._enter({ROLE: CONFIRM, SEEN: finished})
        return not any(
            trial.user_attrs[ROLE] == CONFIRM and trial.number < self.number and trial.user_attrs[SEEN] >= finished
            for trial in self._running()
        )

    def leave(self) -> None:
        """What it was trying is free for others."""
        self._here = False
        if self._heartbeat is not None:
            self._heartbeat.stop()
        self._end(self.number)

    def _enter(self, role: Mapping[str, Any]) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()
        self._role, self._here = role, True
        template = create_trial(state=TrialState.RUNNING, user_attrs={**self._where, **role})
        trial_id = self._storage.create_new_trial(self._study._study_id, template)
        self.number = self._storage.get_trial(trial_id).number
        if is_heartbeat_enabled(self._storage):
            beats, grace = self._shared.heartbeat_seconds, self._shared.grace_seconds
            self._heartbeat = Heartbeat(self._storage, trial_id, beats, grace)  # type: ignore[arg-type]
        self._storage.set_trial_user_attr(trial_id, LIVES, True)
        self.look()

    def _running(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))

    def _end(self, number: int) -> None:
        with contextlib.suppress(UpdateFinishedTrialError, ValueError):  # somebody else did
            self._study.tell(number, state=TrialState.FAIL)

    def _refuse_other_hosts(self, name: str) -> None:
        hosts = {trial.user_attrs[HOST] for trial in self._running()} - {self._where[HOST]}
        if hosts:
            raise BadInputError(
                f"--join {name}: {min(hosts)} is at work on it, and a file is shared by workers of one host only; "
                "give all of them a database server (--storage postgresql://…), or take another name"
            )
