"""How much a search may take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

CONFIRM_SHARE = 0.4  # of the time is kept for confirming what is recommended


@dataclass
class Budget:
    """Wall time and number of configurations that a run may take; ``spent_seconds`` are a resumed run's."""

    seconds: float
    max_trials: int | None = None
    spent_seconds: float = 0.0
    clock: Callable[[], float] = time.monotonic
    _started: float = field(init=False)

    def __post_init__(self) -> None:
        self._started = self.clock()

    def left_seconds(self) -> float:
        return self.seconds - self.spent_seconds - (self.clock() - self._started)

    def search_seconds_left(self) -> float:
        """Until the confirmation has to begin."""
        return (1 - CONFIRM_SHARE) * self.seconds - self.spent_seconds - (self.clock() - self._started)
