"""A clock for tests whose result must not depend on the load of the machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SimulatedClock:
    """A ``Clock`` whose time passes only while a caller sleeps, or if a test changes ``seconds``."""

    seconds: float = 0.0

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float, /) -> None:
        self.seconds += seconds
