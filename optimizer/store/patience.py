"""A database that does not answer is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from optimizer.errors import EnvironmentFault

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 10.0
MEND = "once it answers, `tune --resume` goes on"


@dataclass
class Patience:
    """``until``, by ``time.monotonic()``, is when waiting ends. ``say`` is told once that it began, and once that it
    is over; ``kept_in`` is where what was measured meanwhile can be found."""

    until: float
    say: Callable[[str], None]
    kept_in: str
    _pause_seconds: float = field(default=0.0, init=False)

    def wait(self, shown: str, cause: str) -> None:
        """A while, each time a longer one. Raises EnvironmentFault where there is no time left."""
        left = self.until - time.monotonic()
        if left <= 0:
            raise EnvironmentFault(
                f"{shown}: the database does not answer: {cause}; what was measured is in {self.kept_in}; {MEND}"
            )
        if not self._pause_seconds:
            self.say(f"{shown}: the database does not answer; waiting, what was measured is in {self.kept_in}")
        self._pause_seconds = min(max(2 * self._pause_seconds, FIRST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)
        time.sleep(min(self._pause_seconds, left))

    def answered(self, shown: str) -> None:
        if self._pause_seconds:
            self._pause_seconds = 0.0
            self.say(f"{shown}: the database answers again")

    def end(self) -> None:
        """From now on nothing is waited for."""
        self.until = 0.0
