"""A study that is shared, as one of its workers has it open."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import optuna

from optimizer.errors import TuneError
from optimizer.measuring import Record
from optimizer.problem import Problem
from optimizer.search.ledger import Ledger
from optimizer.search.result import finished_trials
from optimizer.sharing.workers import SharedWorkers
from optimizer.store.study import Shared
from optimizer.trial import Candidate, Trial

POLL_SECONDS = 0.5


class SharedStudy:
    """The Others of this worker; a context that it leaves the study with. ``ledger`` is for its searcher."""

    def __init__(
        self, study: optuna.Study, problem: Problem, shared: Shared, folder: Path, *, one_host: bool
    ) -> None:
        """Raises BadInputError where a file is used from several hosts."""
        self._study = study
        self._patience = shared.patience
        self._workers = SharedWorkers(study, shared, folder, one_host=one_host)
        self.number = self._workers.number
        self.ledger = Ledger(problem, study, self._workers)

    def __enter__(self) -> SharedStudy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._patience.end()  # it ends now, whether the database answers or not
        with contextlib.suppress(TuneError):  # who is not told so learns it by the missing heartbeats
            self._workers.leave()

    def claim(self, candidate: Candidate, concurrency: int) -> bool:
        return self.ledger.start(candidate, concurrency) is not None

    def abandoned(self) -> list[Candidate]:
        self._workers.look()
        return self.ledger.abandoned()

    def trials(self) -> list[Trial]:
        return finished_trials(self._study)

    def are_running(self) -> bool:
        return self.ledger.others_run()

    def wait(self, seconds: float) -> None:
        until, before = time.monotonic() + seconds, self._state()
        while (left := until - time.monotonic()) > 0 and self._state() == before:
            time.sleep(min(POLL_SECONDS, left))

    def hand_on(self) -> str:
        """Called when this worker's search has ended: who confirms, where that is not this one; else empty."""
        self._workers.leave()
        self._workers.look()
        rest = self._workers.others_searching()
        if rest:
            go_on = "1 other worker goes on" if rest == 1 else f"{rest} other workers go on"
            return f"{go_on} with the study {self._study.study_name}; the last one confirms what is best"
        if not self._workers.confirms(len(self.trials())):
            return f"another worker of the study {self._study.study_name} confirms what is best"
        return ""

    def gathered(self, own: list[Trial], table: Record) -> list[Trial]:
        """``own`` trials and after them all others of the study, which ``table`` gets as well. What they took is not
        told: it was no time of this run's."""
        candidates, found = {trial.candidate for trial in own}, list(own)
        for trial in self.trials():
            if trial.candidate in candidates:
                continue
            measurements = tuple((load, replace(one, measure_seconds=None)) for load, one in trial.measurements)
            copy = replace(trial, number=len(found), measurements=measurements)
            found.append(copy)
            for load, measurement in measurements:
                table.append(copy, load, measurement)
            if copy.status == "failed":
                table.append_failure(copy)
        return found

    def _state(self) -> list[tuple[int, str]]:
        self.ledger.fail_abandoned()
        self._workers.look()
        return [(trial.number, trial.state.name) for trial in self._study.get_trials(deepcopy=False)]
