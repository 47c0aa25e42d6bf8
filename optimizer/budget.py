"""How much a search may take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from optimizer.trial import Trial

CONFIRM_SHARE = 0.4  # of the time is kept for confirming what is recommended


@dataclass
class Budget:
    """Wall time and number of configurations that a run may take; ``spent_seconds`` are a resumed run's.

    ``confirm_share`` of the time is kept from the search.
    """

    seconds: float
    max_trials: int | None = None
    spent_seconds: float = 0.0
    confirm_share: float = CONFIRM_SHARE
    clock: Callable[[], float] = time.monotonic
    _started: float = field(init=False)

    def __post_init__(self) -> None:
        self._started = self.clock()

    def left_seconds(self) -> float:
        return self.seconds - self.spent_seconds - (self.clock() - self._started)

    def search_seconds_left(self) -> float:
        """Until the confirmation has to begin."""
        return (1 - self.confirm_share) * self.seconds - self.spent_seconds - (self.clock() - self._started)


def spent_seconds(trials: Sequence[Trial]) -> float:
    """What a run with these trials has used of its budget."""
    measured = [m for trial in trials for _, m in trial.measurements]
    measured += [again.measurement for trial in trials for again in trial.confirmations]
    return sum(trial.deploy_seconds or 0 for trial in trials) + sum(m.measure_seconds or 0 for m in measured)
