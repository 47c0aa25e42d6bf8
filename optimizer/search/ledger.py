"""What has been tried, kept in an Optuna study: the part that every search method shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import TrialState, create_trial

from optimizer.problem import Problem
from optimizer.search.encoding import Encoding
from optimizer.search.entries import EXPECTED, Entries
from optimizer.search.result import (
    CANDIDATE,
    REASON,
    TRIAL,
    Result,
    attributes,
    describe,
    result_of,
)
from optimizer.search.workers import WORKER, OneAtATime, Workers
from optimizer.trial import Candidate, Trial

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
        self._entries = Entries(study, problem.space, self._encoding, self._workers)
        self._asked: dict[Candidate, optuna.Trial] = {}
        self._observed: set[Candidate] = set()
        self._entries.fail_own()
        self._entries.fail_abandoned()

    def fail_abandoned(self) -> None:
        """What no living worker tries any more is tried no more."""
        self._entries.fail_abandoned()

    def abandoned(self) -> list[Candidate]:
        """What workers were trying that are gone, unless it has been tried since, or has cost MOST_ABANDONED."""
        self._entries.fail_abandoned()
        tried = self.tried()
        return [candidate for candidate in self._entries.times_abandoned() if candidate not in tried]

    def tried(self) -> set[Candidate]:
        """Canonical candidates that are finished, or being tried here or by a living worker elsewhere."""
        given_up = {one for one, times in self._entries.times_abandoned().items() if times >= MOST_ABANDONED}
        return self._entries.tried() | self._observed | self._asked.keys() | given_up

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
        if candidate is None or candidate in tried or self._entries.is_tried(candidate, but=trial.number):
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
        if self._entries.is_tried(canonical, before=trial.number):
            self._drop(trial, canonical)
            return None
        self._asked[canonical] = trial
        return candidate

    def running(self) -> list[tuple[Candidate, int]]:
        """What is being tried here or by a living worker elsewhere, with the concurrency that was entered with it."""
        return self._entries.running()

    def others_run(self) -> bool:
        """Whether a living worker elsewhere is trying something."""
        return self._entries.others_run()

    def record(self, trial: Trial) -> None:
        """Enter a finished trial, asked for or not; once, however often it is called."""
        candidate = self._space.canonical(trial.candidate)
        asked = self._asked.pop(candidate, None)
        self._observed.add(candidate)
        if self._entries.is_recorded(trial):
            if asked is not None:
                self._drop(asked, candidate)
            return
        result = result_of(trial, self._problem)
        values, constraints = (result.values, result.constraints) if isinstance(result, Result) else (None, {})
        user_attrs = attributes(trial, result)
        if asked is not None and _tell(self.study, asked, self._told(candidate, values), constraints, user_attrs):
            return
        if not self._entries.is_recorded(trial):  # it may be that only the answer was lost
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
            if TRIAL in other.user_attrs and self._entries.recorded(other) == candidate:
                reason = f"repeats trial {other.user_attrs[TRIAL]}"
                _tell(self.study, trial, other.values, other.constraints, {REASON: reason})
                return
        reason = "not valid" if candidate is None else "tried before"
        _tell(self.study, trial, None, {}, {REASON: reason})


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
