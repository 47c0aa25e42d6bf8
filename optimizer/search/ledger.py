"""What has been tried, kept in an Optuna study: the part that every search method shares."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState, create_trial

from optimizer.problem import Problem
from optimizer.search.encoding import Encoding
from optimizer.search.result import (
    CANDIDATE,
    REASON,
    TRIAL,
    Result,
    attributes,
    describe,
    described,
    result_of,
)
from optimizer.search.workers import WORKER, OneAtATime, Workers
from optimizer.trial import Candidate, Trial

EXPECTED = "expected_concurrency"
ABANDONED = "its worker is gone"
MOST_ABANDONED = 3  # times that a candidate is tried: it may be what its workers died of


class Ledger:
    """Candidates asked for and trials finished, in step with ``study``, which other workers may share.

    Trials that the study already holds count as tried: a study is continued, not repeated. Those that a
    killed process left running are marked failed when the ledger is opened.
    """

    def __init__(self, problem: Problem, study: optuna.Study, workers: Workers | None = None) -> None:
        self.study = study
        self._problem = problem
        self._space = problem.space
        self._workers = workers or OneAtATime()
        self._encoding = Encoding(problem.space)
        self._asked: dict[Candidate, optuna.Trial] = {}
        self._observed: set[Candidate] = set()
        self._recorded: dict[int, Candidate] = {}
        for trial in self._running():
            if trial.user_attrs.get(WORKER) == self._workers.name:
                self._fail(trial)
        self.fail_abandoned()

    def fail_abandoned(self) -> None:
        """What no living worker tries any more is tried no more."""
        for trial in self._running():
            # of many workers one may be about to enter its name
            if not self._is_alive(trial) and (WORKER in trial.user_attrs or not self._workers.are_many):
                self._fail(trial, ABANDONED)

    def abandoned(self) -> list[Candidate]:
        """What workers were trying that are gone, unless it has been tried since, or has cost MOST_ABANDONED."""
        self.fail_abandoned()
        tried = self.tried()
        return [candidate for candidate in self._times_abandoned() if candidate not in tried]

    def tried(self) -> set[Candidate]:
        """Canonical candidates that are finished, or being tried here or by a living worker elsewhere."""
        found = self._observed | self._asked.keys()
        found |= {one for one, times in self._times_abandoned().items() if times >= MOST_ABANDONED}
        for trial in self.study.get_trials(deepcopy=False):
            candidate = self._tried_by(trial)
            if candidate is not None:
                found.add(candidate)
        return found

    def is_exhausted(self, tried: set[Candidate]) -> bool:
        """Whether every candidate of the space is in ``tried``."""
        if len(tried) < len(self._space):
            return False
        return sum(self._space.values_of(candidate) is not None for candidate in tried) >= len(self._space)

    def ask(self, tried: set[Candidate]) -> Candidate | None:
        """The study's next proposal; None where it is invalid or in ``tried``, which the study is told."""
        trial = self.study.ask(self._encoding.distributions)
        trial.set_user_attr(WORKER, self._workers.name)
        candidate = self._encoding.decode(trial.params)
        if candidate is None or candidate in tried or self._is_tried(candidate, but=trial.number):
            self._drop(trial, candidate)
            return None
        self._asked[candidate] = trial
        return candidate

    def enqueue(self, candidate: Candidate) -> None:
        """What is asked for next is a canonical candidate of the space, after those that were entered so before."""
        parameters = self._encoding.encode(candidate)
        assert parameters is not None, candidate
        self.study.enqueue_trial(parameters)

    def start(self, candidate: Candidate, concurrency: int | None = None) -> Candidate | None:
        """Enter a candidate, of the space or not, as being tried, and at which load it is expected to be at its best;
        returns it.

        None where it is tried already. It is entered at once and whole: of several workers that start the same one
        the first has it.
        """
        canonical = self._space.canonical(candidate)
        if canonical in self.tried():
            return None
        parameters = self._encoding.encode(canonical)
        known = {CANDIDATE: describe(canonical), WORKER: self._workers.name}
        entered = create_trial(
            state=TrialState.RUNNING,
            params=parameters or {},
            distributions=self._encoding.distributions if parameters else {},
            user_attrs=known if concurrency is None else {**known, EXPECTED: concurrency},
        )
        trial = optuna.Trial(self.study, self.study._storage.create_new_trial(self.study._study_id, entered))
        if self._is_tried(canonical, before=trial.number):
            self._drop(trial, canonical)
            return None
        self._asked[canonical] = trial
        return candidate

    def running(self) -> list[tuple[Candidate, int]]:
        """What is being tried here or by a living worker elsewhere, with the concurrency that was entered with it."""
        found = []
        for trial in self._running():
            candidate = self._tried_by(trial)
            if candidate is not None and trial.params and EXPECTED in trial.user_attrs:
                found.append((candidate, int(trial.user_attrs[EXPECTED])))
        return found

    def others_run(self) -> bool:
        """Whether a living worker elsewhere is trying something."""
        return any(
            self._tried_by(trial) is not None and trial.user_attrs[WORKER] != self._workers.name
            for trial in self._running()
        )

    def record(self, trial: Trial) -> None:
        """Enter a finished trial, asked for or not; once, however often it is called."""
        candidate = self._space.canonical(trial.candidate)
        asked = self._asked.pop(candidate, None)
        self._observed.add(candidate)
        if self._is_recorded(trial):
            if asked is not None:
                self._drop(asked, candidate)
            return
        result = result_of(trial, self._problem)
        values, constraints = (result.values, result.constraints) if isinstance(result, Result) else (None, {})
        user_attrs = attributes(trial, result)
        if asked is not None and _tell(self.study, asked, self._told(candidate, values), constraints, user_attrs):
            return
        if not self._is_recorded(trial):  # it may be that only the answer was lost
            self._add(candidate, values, constraints, user_attrs)

    def _add(
        self,
        candidate: Candidate,
        values: Sequence[float] | None,
        constraints: Mapping[str, float],
        user_attrs: dict[str, Any],
    ) -> None:
        parameters, values = self._encoding.encode(candidate), self._told(candidate, values)
        trial = create_trial(
            state=TrialState.FAIL if values is None else TrialState.COMPLETE,
            values=values,
            params=parameters or {},
            distributions=self._encoding.distributions if parameters else {},
            constraints=None if values is None else dict(constraints),
            user_attrs=user_attrs,
        )
        self.study.add_trial(trial)

    def _told(self, candidate: Candidate, values: Sequence[float] | None) -> Sequence[float] | None:
        """Samplers search among the parameters that all complete trials have: one without any, from outside the
        space, would leave them none. So it counts as failed."""
        return None if self._encoding.encode(candidate) is None else values

    def _drop(self, trial: optuna.Trial, candidate: Candidate | None) -> None:
        """End a proposal that is not tried. One that repeats a finished trial gets that trial's values.

        Evolution needs that: a generation is over when its population is complete.
        """
        for other in self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            if TRIAL in other.user_attrs and self._candidate(other) == candidate:
                reason = f"repeats trial {other.user_attrs[TRIAL]}"
                _tell(self.study, trial, other.values, other.constraints, {REASON: reason})
                return
        reason = "not valid" if candidate is None else "tried before"
        _tell(self.study, trial, None, {}, {REASON: reason})

    def _is_recorded(self, trial: Trial) -> bool:
        same = describe(trial.candidate)
        return any(
            TRIAL in other.user_attrs and other.user_attrs[CANDIDATE] == same
            for other in self.study.get_trials(deepcopy=False)
        )

    def _is_tried(self, candidate: Candidate, *, before: int | None = None, but: int | None = None) -> bool:
        """By a trial numbered lower than ``before``, or any other one ``but`` that."""
        found = False
        for trial in self.study.get_trials(deepcopy=False):
            if trial.number == but or (before is not None and trial.number >= before):
                continue
            if self._tried_by(trial) != candidate:
                continue
            if TRIAL not in trial.user_attrs and trial.user_attrs[WORKER] == self._workers.name:
                self._fail(trial)  # entered by us without our knowing: the answer was lost
            else:
                found = True
        return found

    def _tried_by(self, trial: FrozenTrial) -> Candidate | None:
        """The canonical candidate of a trial that is recorded or that a living worker tries; else None."""
        if TRIAL in trial.user_attrs:
            return self._candidate(trial)
        return self._entered(trial) if trial.state == TrialState.RUNNING and self._is_alive(trial) else None

    def _entered(self, trial: FrozenTrial) -> Candidate | None:
        if CANDIDATE in trial.user_attrs:
            return self._space.canonical(described(trial.user_attrs[CANDIDATE]))
        return self._encoding.decode(trial.params)

    def _times_abandoned(self) -> Counter[Candidate]:
        trials = self.study.get_trials(deepcopy=False, states=(TrialState.FAIL,)) if self._workers.are_many else []
        lost = [self._entered(trial) for trial in trials if trial.user_attrs.get(REASON) == ABANDONED]
        return Counter(candidate for candidate in lost if candidate is not None)

    def _running(self) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))

    def _is_alive(self, trial: FrozenTrial) -> bool:
        return WORKER in trial.user_attrs and self._workers.is_alive(trial)

    def _fail(self, trial: FrozenTrial, reason: str = "") -> None:
        with contextlib.suppress(UpdateFinishedTrialError, ValueError):  # somebody else did
            if reason:
                self.study._storage.set_trial_user_attr(trial._trial_id, REASON, reason)
            self.study.tell(trial.number, state=TrialState.FAIL)

    def _candidate(self, trial: FrozenTrial) -> Candidate:
        """The canonical candidate of a recorded trial, which changes no more: read once."""
        if trial.number not in self._recorded:
            self._recorded[trial.number] = self._space.canonical(described(trial.user_attrs[CANDIDATE]))
        return self._recorded[trial.number]


def _tell(
    study: optuna.Study,
    trial: optuna.Trial,
    values: Sequence[float] | None,
    constraints: Mapping[str, float],
    user_attrs: Mapping[str, Any],
) -> bool:
    """Finish a trial, failed where ``values`` is None; False where another worker did, taking us for dead."""
    try:
        for key, violation in constraints.items():
            trial.set_constraint(key, violation)
        for key, value in user_attrs.items():
            trial.set_user_attr(key, value)
        study.tell(trial, values, state=TrialState.FAIL if values is None else TrialState.COMPLETE)
    except UpdateFinishedTrialError:
        return False
    return True
