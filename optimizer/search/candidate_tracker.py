"""The state of each candidate of a study across all its workers: tried, running, finished or abandoned."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState, create_trial

from objectives.metrics import Forecast
from optimizer.config.problem import Problem
from optimizer.core.candidate import Candidate
from optimizer.core.trial import LoadPoint, Trial
from optimizer.search.feasibility import beyond_gpu_memory
from optimizer.search.optuna_encoding import (
    CANDIDATE,
    LACKS_GPU_MEMORY,
    REASON,
    TRIAL,
    Encoding,
    TrialScore,
    candidate_from_json,
    candidate_to_json,
    finished_trials,
    score_trial,
    trial_attributes,
)
from optimizer.store.optuna_storage import enter_trial, set_trial_attribute

# keys of an Optuna trial's user attributes: the name of its worker, and the concurrency that is predicted to be best
WORKER, EXPECTED = "worker", "expected_concurrency"
ABANDONED = "abandoned"  # user attribute of a trial whose worker died
UNKNOWN_NUMBER = -1  # number of the first trial of a candidate, which another process recorded
MAX_DEPLOYMENTS = 3  # deployments of a candidate by the search
MAX_ABANDONED = 3  # abandoned trials of a candidate, which may be the reason why its workers died


class StudyWorkers:
    """The workers of a study. This base class stands for a study of one process: other running trials were killed.

    ``are_many``: others may join and leave while the study is open.
    """

    are_many = False

    @property
    def name(self) -> str:
        """The name of this process."""
        return f"{socket.gethostname()}:{os.getpid()}"

    def is_alive(self, trial: FrozenTrial) -> bool:
        """Return whether the worker of a running trial is alive: only this process is."""
        return bool(trial.user_attrs.get(WORKER) == self.name)


class CandidateTracker:
    """Starts, records and looks up the trials of an Optuna study as candidates.

    Trials that the study already holds count as tried: a study is continued, not repeated. Trials of killed
    processes are marked as failed when the tracker is created. All candidates that it returns are canonical.
    """

    def __init__(self, problem: Problem, study: optuna.Study, workers: StudyWorkers | None = None) -> None:
        self.study = study
        self.problem = problem
        self._space = problem.space
        self._workers = workers or StudyWorkers()
        self._encoding = Encoding(problem.space)
        self._recorded_candidates: dict[int, Candidate] = {}  # by the number of the Optuna trial
        self._started_trials: dict[Candidate, optuna.Trial] = {}  # by this process, and not recorded yet
        self._first_numbers: dict[Candidate, int] = {}  # the number of the first trial of each observed candidate
        for trial in self._running_trials():
            if self._is_of_this_worker(trial):
                self._fail(trial)
        self.fail_abandoned()

    def fail_abandoned(self) -> None:
        """Mark running trials as failed if their worker has died."""
        for trial in self._running_trials():
            # a new worker of a shared study may not have stored its name yet
            if not self._is_alive(trial) and (WORKER in trial.user_attrs or not self._workers.are_many):
                self._fail(trial, abandoned=True)

    def abandoned(self) -> list[Candidate]:
        """Return candidates whose worker died, unless they have been tried since or MAX_ABANDONED times."""
        self.fail_abandoned()
        tried = self.tried()
        return [candidate for candidate in self._times_abandoned() if candidate not in tried]

    def tried(self) -> set[Candidate]:
        """Return the candidates that are finished, running on a living worker, or given up.

        Those that do not fit into the memory of a GPU, as another one has shown, are given up without a trial.
        """
        stored = {self._tried_candidate(trial) for trial in self.study.get_trials(deepcopy=False)}
        candidates = {candidate for candidate in stored if candidate is not None}
        given_up = {candidate for candidate, times in self._times_abandoned().items() if times >= MAX_ABANDONED}
        return (
            candidates
            | self._first_numbers.keys()
            | self._started_trials.keys()
            | given_up
            | self._beyond_gpu_memory()
        )

    def repeatable(self, trials: Sequence[Trial]) -> set[Candidate]:
        """Return the candidates of ``trials`` that another deployment can tell more about.

        They were measured, fewer than MAX_DEPLOYMENTS times, and do not run. There are none if other workers may
        join, which could repeat the same candidate at the same time.
        """
        if self._workers.are_many:
            return set()
        deployments, without_result = Counter[Candidate](), set[Candidate]()
        for trial in trials:
            candidate = self._space.canonical(trial.candidate)
            deployments[candidate] += 1
            if not trial.has_served:
                without_result.add(candidate)
        rarely_deployed = {candidate for candidate, times in deployments.items() if times < MAX_DEPLOYMENTS}
        return rarely_deployed - without_result - self._started_trials.keys()

    def is_exhausted(self, tried: set[Candidate]) -> bool:
        """Return whether every candidate of the space is in ``tried``."""
        if len(tried) < len(self._space):
            return False
        return sum(self._space.parameter_values(candidate) is not None for candidate in tried) >= len(self._space)

    def ask(self, tried: set[Candidate]) -> Candidate | None:
        """Start the sampler's next proposal, or return None if it is invalid or in ``tried``."""
        trial = self.study.ask(self._encoding.distributions)
        trial.set_user_attr(WORKER, self._workers.name)
        candidate = self._encoding.decode(trial.params)
        if candidate is None or candidate in tried or not self._is_free(candidate, except_trial=trial.number):
            self._drop(trial, candidate)
            return None
        self._started_trials[candidate] = trial
        return candidate

    def enqueue(self, candidate: Candidate) -> None:
        """Make a canonical candidate of the space the next proposal, after those enqueued before."""
        parameters = self._encoding.encode(candidate)
        assert parameters is not None, candidate
        self.study.enqueue_trial(parameters)

    def start(self, candidate: Candidate, concurrency: int | None = None, *, again: bool = False) -> bool:
        """Store a candidate as running. Return False if it is tried already.

        The trial is stored in one step. If several workers start the same candidate, only the first one gets it. The
        candidate may be outside the space. ``concurrency`` is the one at which it is predicted to be best. ``again``:
        the candidate is one of ``repeatable``.
        """
        canonical = self._space.canonical(candidate)
        if canonical in self.tried() and not again:
            return False
        user_attrs: dict[str, Any] = {CANDIDATE: candidate_to_json(canonical), WORKER: self._workers.name}
        if concurrency is not None:
            user_attrs[EXPECTED] = concurrency
        running = self._create_trial(canonical, state=TrialState.RUNNING, user_attrs=user_attrs)
        trial = optuna.Trial(self.study, enter_trial(self.study, running))
        if not again and not self._is_free(canonical, before=trial.number):
            self._drop(trial, canonical)
            return False
        self._started_trials[canonical] = trial
        if again:
            self._first_numbers.setdefault(canonical, UNKNOWN_NUMBER)
        return True

    def running(self) -> list[tuple[Candidate, int]]:
        """Return the candidates that living workers are trying, with the concurrency of ``start``."""
        loads = []
        for trial in self._running_trials():
            candidate = self._tried_candidate(trial)
            if candidate is not None and trial.params and EXPECTED in trial.user_attrs:
                loads.append((candidate, int(trial.user_attrs[EXPECTED])))
        return loads

    def others_run(self) -> bool:
        """Return whether another living worker is trying a candidate."""
        return any(
            self._tried_candidate(trial) is not None and not self._is_of_this_worker(trial)
            for trial in self._running_trials()
        )

    def record(self, trial: Trial) -> None:
        """Store a finished trial, started here or not. Repeated calls store it once.

        A second trial of a candidate, a control or a repeat, is stored too.
        """
        candidate = self._space.canonical(trial.candidate)
        started = self._started_trials.pop(candidate, None)
        is_second = self._first_numbers.setdefault(candidate, trial.number) != trial.number
        if self._is_recorded(trial, is_second):
            if started is not None:
                self._drop(started, candidate)
            return
        score = score_trial(trial, self.problem)
        values, constraints = (score.values, score.constraints) if isinstance(score, TrialScore) else (None, {})
        if self._encoding.encode(candidate) is None:
            # Samplers use the parameters that all complete trials share. A candidate outside the space has none, so
            # its trial is stored as failed.
            values = None
        user_attrs = trial_attributes(trial, score)
        if started is not None and _tell(self.study, started, values, constraints, user_attrs):
            return
        # the trial may have been stored although the answer was lost
        if not self._is_recorded(trial, is_second):
            finished = self._create_trial(
                candidate,
                state=TrialState.FAIL if values is None else TrialState.COMPLETE,
                values=values,
                constraints=None if values is None else dict(constraints),
                user_attrs=user_attrs,
            )
            self.study.add_trial(finished)

    def _create_trial(self, candidate: Candidate, **arguments: Any) -> FrozenTrial:
        """Return a trial for the study, with ``arguments`` of ``optuna.trial.create_trial``.

        A candidate outside the space has no parameters.
        """
        parameters = self._encoding.encode(candidate)
        distributions = self._encoding.distributions if parameters else {}
        return create_trial(params=parameters or {}, distributions=distributions, **arguments)

    def _drop(self, trial: optuna.Trial, candidate: Candidate | None) -> None:
        """Finish a proposal that is not tried. One that repeats a finished trial gets its values.

        NSGA-II needs them, because a generation ends when its population is complete.
        """
        for other in self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            if TRIAL in other.user_attrs and self._recorded_candidate(other) == candidate:
                reason = f"repeats trial {other.user_attrs[TRIAL]}"
                _tell(self.study, trial, other.values, other.constraints, {REASON: reason})
                return
        reason = "not valid" if candidate is None else "tried before"
        _tell(self.study, trial, None, {}, {REASON: reason})

    def _tried_candidate(self, trial: FrozenTrial) -> Candidate | None:
        """Return the candidate of a trial that is recorded or that a living worker runs."""
        if TRIAL in trial.user_attrs:
            return self._recorded_candidate(trial)
        return self._stored_candidate(trial) if trial.state == TrialState.RUNNING and self._is_alive(trial) else None

    def _recorded_candidate(self, trial: FrozenTrial) -> Candidate:
        """Return the candidate of a recorded trial (cached, as it does not change)."""
        if trial.number not in self._recorded_candidates:
            self._recorded_candidates[trial.number] = self._space.canonical(
                candidate_from_json(trial.user_attrs[CANDIDATE])
            )
        return self._recorded_candidates[trial.number]

    def _stored_candidate(self, trial: FrozenTrial) -> Candidate | None:
        """Return the candidate of a trial in any state; None if its parameters are no valid candidate."""
        if CANDIDATE in trial.user_attrs:
            return self._space.canonical(candidate_from_json(trial.user_attrs[CANDIDATE]))
        return self._encoding.decode(trial.params)

    def _is_recorded(self, trial: Trial, is_second: bool) -> bool:
        """Return whether the study has this trial.

        A trial of the candidate by any worker suffices, unless ``is_second``: then it has to have the same number.
        """
        stored = candidate_to_json(trial.candidate)
        numbers = [
            other.user_attrs[TRIAL]
            for other in self.study.get_trials(deepcopy=False)
            if TRIAL in other.user_attrs and other.user_attrs[CANDIDATE] == stored
        ]
        return trial.number in numbers if is_second else bool(numbers)

    def _is_free(self, candidate: Candidate, *, before: int | None = None, except_trial: int | None = None) -> bool:
        """Return whether no other trial has the candidate.

        With ``before``, only trials with a lower number count. Trials that this process stored, but whose number it
        did not get from the database, are marked as failed.
        """
        is_free = True
        for trial in self.study.get_trials(deepcopy=False):
            if trial.number == except_trial or (before is not None and trial.number >= before):
                continue
            if self._tried_candidate(trial) != candidate:
                continue
            if TRIAL not in trial.user_attrs and self._is_of_this_worker(trial):
                self._fail(trial)
            else:
                is_free = False
        return is_free

    def _beyond_gpu_memory(self) -> set[Candidate]:
        """Return the candidates that need at least as much GPU memory as one that failed for lack of it."""
        failed = self.study.get_trials(deepcopy=False, states=(TrialState.FAIL,))
        if not any(trial.user_attrs.get(LACKS_GPU_MEMORY) for trial in failed):
            return set()
        return beyond_gpu_memory(finished_trials(self.study), self._space.candidates())

    def _times_abandoned(self) -> Counter[Candidate]:
        """Return how often workers died while trying each candidate, if there are many workers."""
        if not self._workers.are_many:
            return Counter()
        failed = self.study.get_trials(deepcopy=False, states=(TrialState.FAIL,))
        abandoned = [self._stored_candidate(trial) for trial in failed if ABANDONED in trial.user_attrs]
        return Counter(candidate for candidate in abandoned if candidate is not None)

    def _running_trials(self) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))

    def _is_of_this_worker(self, trial: FrozenTrial) -> bool:
        return bool(trial.user_attrs.get(WORKER) == self._workers.name)

    def _is_alive(self, trial: FrozenTrial) -> bool:
        return WORKER in trial.user_attrs and self._workers.is_alive(trial)

    def _fail(self, trial: FrozenTrial, *, abandoned: bool = False) -> None:
        with contextlib.suppress(UpdateFinishedTrialError, ValueError):  # another worker finished it
            if abandoned:
                set_trial_attribute(self.study, trial, ABANDONED, True)
            self.study.tell(trial.number, state=TrialState.FAIL)


class TrackedSearcher:
    """The part of a Searcher that all methods share: it records the trials of a study. It predicts nothing."""

    is_exhaustive = False

    def __init__(self, tracker: CandidateTracker) -> None:
        self._tracker = tracker

    def expected_load(self, candidate: Candidate) -> int | None:
        return None

    def forecast(self, candidate: Candidate, load: LoadPoint, speed_probe_ms: float | None) -> Forecast | None:
        return None

    def observe(self, trial: Trial) -> None:
        self._tracker.record(trial)


def _tell(
    study: optuna.Study,
    trial: optuna.Trial,
    values: Sequence[float] | None,
    constraints: Mapping[str, float],
    user_attrs: Mapping[str, Any],
) -> bool:
    """Finish a trial, as failed if ``values`` is None.

    Returns False if another worker finished it because it considered this one dead.
    """
    try:
        for key, violation in constraints.items():
            trial.set_constraint(key, violation)
        for key, value in user_attrs.items():
            trial.set_user_attr(key, value)
        study.tell(trial, values, state=TrialState.FAIL if values is None else TrialState.COMPLETE)
    except UpdateFinishedTrialError:
        return False
    return True
