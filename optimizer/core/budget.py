"""The wall time and the number of trials that a run may use."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeGuard

from optimizer.core.trial import Trial

CONFIRM_SHARE = 0.4  # share of the time that is reserved for the confirmation


class RunMode(Enum):
    """The parts of a run that a session carries out."""

    SEARCH_AND_CONFIRM = "search and confirm"
    SEARCH = "search"
    CONFIRM = "confirm"

    @property
    def confirm_share(self) -> float:
        """The share of the budget that is reserved for the confirmation."""
        shares = {RunMode.SEARCH_AND_CONFIRM: CONFIRM_SHARE, RunMode.SEARCH: 0.0, RunMode.CONFIRM: 1.0}
        return shares[self]


@dataclass
class Budget:
    """The wall time and the number of trials that a run may use. The time starts when the object is created.

    Attributes:
        seconds: Wall time of the whole run.
        max_trials: Largest number of trials; None for no limit.
        spent_seconds: Time that a resumed run had used before.
        confirm_share: Share of ``seconds`` that is reserved for the confirmation, 0 to 1.
        clock: Returns monotonic seconds; tests and simulations pass their own.
        other_seconds: Part of ``seconds`` for the start of the process and the report.
    """

    seconds: float
    max_trials: int | None = None
    spent_seconds: float = 0.0
    confirm_share: float = CONFIRM_SHARE
    clock: Callable[[], float] = time.monotonic
    other_seconds: float = 0.0
    _started: float = field(init=False)

    def __post_init__(self) -> None:
        self._started = self.clock()

    def seconds_left(self) -> float:
        """Return the time until the measurements have to end; negative after that."""
        return self.seconds - self.other_seconds - self.spent_seconds - (self.clock() - self._started)

    def search_seconds_left(self) -> float:
        """Return the time until the confirmation has to begin; negative after that.

        ``other_seconds`` shorten the confirmation, not the search.
        """
        return (1 - self.confirm_share) * self.seconds - self.spent_seconds - (self.clock() - self._started)


@dataclass(frozen=True, slots=True)
class SpentTime:
    """The time that a run had used of its budget when its latest session began.

    Attributes:
        seconds: Time of all earlier sessions.
        estimated_seconds: Time of the rows that these wrote, with ``at_once`` trials in parallel.
        at_once: Number of parallel trials of the latest session; 1 without a cluster.
    """

    seconds: float = 0.0
    estimated_seconds: float = 0.0
    at_once: int = 1

    def total(self, trials: Sequence[Trial]) -> float:
        """Return the time of all sessions, the latest one included. ``trials`` are all trials of the run."""
        return self.seconds + max(0.0, spent_seconds(trials, self.at_once) - self.estimated_seconds)

    def next_session(self, trials: Sequence[Trial], at_once: int) -> SpentTime:
        """Return the time at the begin of a session that runs ``at_once`` trials in parallel."""
        return SpentTime(self.total(trials), spent_seconds(trials, at_once), at_once)


def read_spent_time(document: object) -> SpentTime:
    """Return the time in run.json. Without a valid one, all trials ran one after another in one session."""
    values = document if isinstance(document, dict) else {}
    seconds, estimated, at_once = (values.get(name) for name in ("seconds", "estimated_seconds", "at_once"))
    if type(at_once) is not int or at_once < 1 or not (_is_time(seconds) and _is_time(estimated)):
        return SpentTime()
    return SpentTime(seconds, estimated, at_once)


def _is_time(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and 0 <= value < math.inf


def spent_seconds(trials: Sequence[Trial], at_once: int = 1) -> float:
    """Return the time that these trials used of the budget: starts of servers, measurements and confirmations.

    The start of a fresh server, and of one after a crash, is taken to be as long as the deployment in the search.
    The search ran ``at_once`` trials in parallel, and the confirmation one server after another. The search of a
    trial that another worker of a shared study measured is no part of this budget.
    """
    searched = confirmed = 0.0
    for trial in trials:
        windows = (*trial.confirmations, *trial.cross_checks)
        start_seconds = trial.deploy_seconds or 0.0
        starts = len(trial.crashes) + (0 if _is_from_other_worker(trial) else 1)
        searched += starts * start_seconds
        searched += sum(measurement.measure_seconds or 0.0 for _, measurement in trial.measurements)
        confirmed += len({window.server for window in windows}) * start_seconds
        confirmed += sum(window.measurement.measure_seconds or 0.0 for window in windows)
    return searched / at_once + confirmed


def _is_from_other_worker(trial: Trial) -> bool:
    """Return whether another worker searched ``trial``: its copies of measurements have no time."""
    return trial.has_served and all(measurement.measure_seconds is None for _, measurement in trial.measurements)
