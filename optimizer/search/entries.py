"""What stands in an Optuna study: who has tried what, and who is trying it."""

from __future__ import annotations

import contextlib
from collections import Counter

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from optimizer.search.encoding import Encoding
from optimizer.search.result import CANDIDATE, REASON, TRIAL, describe, described
from optimizer.search.workers import WORKER, Workers
from optimizer.space import Space
from optimizer.trial import Candidate, Trial

EXPECTED = "expected_concurrency"  # user attribute of a trial, as is WORKER
ABANDONED = "its worker is gone"


class Entries:
    """The trials of ``study`` as candidates, which are canonical."""

    def __init__(self, study: optuna.Study, space: Space, encoding: Encoding, workers: Workers) -> None:
        self._study = study
        self._space = space
        self._encoding = encoding
        self._workers = workers
        self._recorded: dict[int, Candidate] = {}

    def tried(self) -> set[Candidate]:
        """What is finished, or being tried by a living worker."""
        found = {self.tried_by(trial) for trial in self._study.get_trials(deepcopy=False)}
        return {candidate for candidate in found if candidate is not None}

    def tried_by(self, trial: FrozenTrial) -> Candidate | None:
        """By a trial that is recorded or that a living worker tries; else None."""
        if TRIAL in trial.user_attrs:
            return self.recorded(trial)
        return self._entered(trial) if trial.state == TrialState.RUNNING and self._is_alive(trial) else None

    def recorded(self, trial: FrozenTrial) -> Candidate:
        """By a trial that is recorded and changes no more: read once."""
        if trial.number not in self._recorded:
            self._recorded[trial.number] = self._space.canonical(described(trial.user_attrs[CANDIDATE]))
        return self._recorded[trial.number]

    def is_recorded(self, trial: Trial) -> bool:
        same = describe(trial.candidate)
        return any(
            TRIAL in other.user_attrs and other.user_attrs[CANDIDATE] == same
            for other in self._study.get_trials(deepcopy=False)
        )

    def is_tried(self, candidate: Candidate, *, before: int | None = None, but: int | None = None) -> bool:
        """By a trial numbered lower than ``before``, or any other one ``but`` that."""
        found = False
        for trial in self._study.get_trials(deepcopy=False):
            if trial.number == but or (before is not None and trial.number >= before):
                continue
            if self.tried_by(trial) != candidate:
                continue
            if TRIAL not in trial.user_attrs and self._is_own(trial):
                self._fail(trial)  # entered by us without our knowing: the answer was lost
            else:
                found = True
        return found

    def running(self) -> list[tuple[Candidate, int]]:
        """What is being tried by a living worker, with the concurrency that was entered with it."""
        found = []
        for trial in self._running():
            candidate = self.tried_by(trial)
            if candidate is not None and trial.params and EXPECTED in trial.user_attrs:
                found.append((candidate, int(trial.user_attrs[EXPECTED])))
        return found

    def others_run(self) -> bool:
        """Whether a living worker elsewhere is trying something."""
        return any(self.tried_by(trial) is not None and not self._is_own(trial) for trial in self._running())

    def fail_own(self) -> None:
        """What stands there as being tried here, before anything is."""
        for trial in self._running():
            if self._is_own(trial):
                self._fail(trial)

    def fail_abandoned(self) -> None:
        """What no living worker tries any more is tried no more."""
        for trial in self._running():
            # of many workers one may be about to enter its name
            if not self._is_alive(trial) and (WORKER in trial.user_attrs or not self._workers.are_many):
                self._fail(trial, ABANDONED)

    def times_abandoned(self) -> Counter[Candidate]:
        """How often workers were gone before they had tried it; only where there are many."""
        if not self._workers.are_many:
            return Counter()
        trials = self._study.get_trials(deepcopy=False, states=(TrialState.FAIL,))
        lost = [self._entered(trial) for trial in trials if trial.user_attrs.get(REASON) == ABANDONED]
        return Counter(candidate for candidate in lost if candidate is not None)

    def _entered(self, trial: FrozenTrial) -> Candidate | None:
        if CANDIDATE in trial.user_attrs:
            return self._space.canonical(described(trial.user_attrs[CANDIDATE]))
        return self._encoding.decode(trial.params)

    def _running(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))

    def _is_own(self, trial: FrozenTrial) -> bool:
        return bool(trial.user_attrs.get(WORKER) == self._workers.name)

    def _is_alive(self, trial: FrozenTrial) -> bool:
        return WORKER in trial.user_attrs and self._workers.is_alive(trial)

    def _fail(self, trial: FrozenTrial, reason: str = "") -> None:
        with contextlib.suppress(UpdateFinishedTrialError, ValueError):  # somebody else did
            if reason:
                self._study._storage.set_trial_user_attr(trial._trial_id, REASON, reason)
            self._study.tell(trial.number, state=TrialState.FAIL)
