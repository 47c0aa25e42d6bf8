"""What has been tried, kept in an Optuna study: the part that every search method shares."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import optuna
import psutil
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
from optimizer.trial import Candidate, Trial

WORKER, EXPECTED = "worker", "expected_concurrency"
ABANDONED_AFTER = timedelta(hours=1)  # a trial of another host that has run this long has lost its worker


class Ledger:
    """Candidates asked for and trials finished, in step with ``study``, which other workers may share.

    Trials that the study already holds count as tried: a study is continued, not repeated. Those that a
    killed process left running are marked failed when the ledger is opened.
    """

    def __init__(self, problem: Problem, study: optuna.Study) -> None:
        self._problem = problem
        self._space = problem.space
        self._study = study
        self._encoding = Encoding(problem.space)
        self._asked: dict[Candidate, optuna.Trial] = {}
        self._observed: set[Candidate] = set()
        self._recorded: dict[int, Candidate] = {}
        self._worker = f"{socket.gethostname()}:{os.getpid()}"
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if not _alive(trial) or trial.user_attrs[WORKER] == self._worker:
                study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)

    def tried(self) -> set[Candidate]:
        """Canonical candidates that are finished, or being tried here or by a living worker elsewhere."""
        found = self._observed | self._asked.keys()
        for trial in self._study.get_trials(deepcopy=False):
            if TRIAL in trial.user_attrs:
                found.add(self._candidate(trial))
            elif trial.state == TrialState.RUNNING and _alive(trial):
                candidate = self._encoding.decode(trial.params)
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
        trial = self._study.ask(self._encoding.distributions)
        trial.set_user_attr(WORKER, self._worker)
        candidate = self._encoding.decode(trial.params)
        if candidate is None or candidate in tried:
            self._drop(trial, candidate)
            return None
        self._asked[candidate] = trial
        return candidate

    def enqueue(self, candidate: Candidate) -> None:
        """What is asked for next is a canonical candidate of the space, after those that were entered so before."""
        parameters = self._encoding.encode(candidate)
        assert parameters is not None, candidate
        self._study.enqueue_trial(parameters)

    def start(self, candidate: Candidate, concurrency: int | None = None) -> Candidate:
        """Enter a canonical candidate of the space as being tried, and at which load it is expected to be at its
        best; returns what to try."""
        self.enqueue(candidate)
        # where another worker took ours from the queue, we may have got its own
        asked = self.ask(self.tried()) or candidate
        if concurrency is not None and asked in self._asked:
            self._asked[asked].set_user_attr(EXPECTED, concurrency)
        return asked

    def running(self) -> list[tuple[Candidate, int]]:
        """What is being tried here or by a living worker elsewhere, with the concurrency that was entered with it."""
        found = []
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            candidate = self._encoding.decode(trial.params) if _alive(trial) else None
            if candidate is not None and EXPECTED in trial.user_attrs:
                found.append((candidate, int(trial.user_attrs[EXPECTED])))
        return found

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
        if asked is None or not _tell(self._study, asked, values, constraints, user_attrs):
            self._add(candidate, values, constraints, user_attrs)

    def _add(
        self,
        candidate: Candidate,
        values: Sequence[float] | None,
        constraints: Mapping[str, float],
        user_attrs: dict[str, Any],
    ) -> None:
        parameters = self._encoding.encode(candidate)
        # Samplers search among the parameters that all complete trials have: one without any, from outside
        # the space, would leave them none.
        complete = values is not None and parameters is not None
        trial = create_trial(
            state=TrialState.COMPLETE if complete else TrialState.FAIL,
            values=values if complete else None,
            params=parameters or {},
            distributions=self._encoding.distributions if parameters else {},
            constraints=dict(constraints) if complete else None,
            user_attrs=user_attrs,
        )
        self._study.add_trial(trial)

    def _drop(self, trial: optuna.Trial, candidate: Candidate | None) -> None:
        """End a proposal that is not tried. One that repeats a finished trial gets that trial's values.

        Evolution needs that: a generation is over when its population is complete.
        """
        for other in self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            if TRIAL in other.user_attrs and self._candidate(other) == candidate:
                reason = f"repeats trial {other.user_attrs[TRIAL]}"
                _tell(self._study, trial, other.values, other.constraints, {REASON: reason})
                return
        reason = "not valid" if candidate is None else "tried before"
        _tell(self._study, trial, None, {}, {REASON: reason})

    def _is_recorded(self, trial: Trial) -> bool:
        same = {TRIAL: trial.number, CANDIDATE: describe(trial.candidate)}
        return any(same.items() <= other.user_attrs.items() for other in self._study.get_trials(deepcopy=False))

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


def _alive(trial: FrozenTrial) -> bool:
    """Whether the worker of a running trial still lives, as far as this host can tell."""
    host, _, pid = trial.user_attrs.get(WORKER, "").rpartition(":")
    if host == socket.gethostname():
        return psutil.pid_exists(int(pid))
    started = trial.datetime_start
    return bool(host) and started is not None and datetime.now() - started < ABANDONED_AFTER
