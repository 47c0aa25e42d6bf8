"""What a worker tells the driver, in the order in which it happens."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from objectives.metrics import Measurement
from optimizer.trial import Candidate, LoadPoint, Point, Trial


@dataclass(frozen=True, slots=True)
class Started:
    number: int
    candidate: Candidate
    role: str


@dataclass(frozen=True, slots=True)
class Measured:
    """A row of the table; ``confirmation`` as there."""

    trial: Trial
    load: LoadPoint
    measurement: Measurement
    confirmation: int | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The trial could not be deployed."""

    trial: Trial


@dataclass(frozen=True, slots=True)
class Finished:
    """A turn of the confirmation has ended."""

    trial: Trial
    best: Point | None


@dataclass(frozen=True, slots=True)
class Said:
    line: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A trial has: as it stands, the end of the server's log where it failed, the answers to compare others' with by
    the name of their file, and the version of the server."""

    trial: Trial
    log: str
    references: Mapping[str, bytes]
    server_version: str


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The confirmation has ended: all trials, and what the user should know of it."""

    trials: tuple[Trial, ...]
    notes: tuple[str, ...]
    server_version: str


@dataclass(frozen=True, slots=True)
class Broken:
    """The worker cannot go on: why, and the end of the log that tells more. ``everywhere``: nor could any other."""

    reason: str
    log: str
    everywhere: bool


Event: TypeAlias = Started | Measured | Failed | Finished | Said | Ended | Confirmed | Broken


@dataclass
class Outbox:
    """Events wait here until the driver takes them. It is a Record and a Watcher for whoever measures."""

    _waiting: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)

    def put(self, event: Event) -> None:
        self._waiting.put(event)

    def take(self, seconds: float) -> list[Event]:
        """All that wait; where none does, the first to come within ``seconds``."""
        found: list[Event] = []
        try:
            found.append(self._waiting.get(timeout=seconds))
            while True:
                found.append(self._waiting.get_nowait())
        except queue.Empty:
            return found

    def say(self, line: str) -> None:
        self.put(Said(line))

    # -- as a Record ------------------------------------------------------------------------------------------

    def append(
        self, trial: Trial, load: LoadPoint, measurement: Measurement, confirmation: int | None = None
    ) -> None:
        self.put(Measured(trial, load, measurement, confirmation))

    def append_failure(self, trial: Trial) -> None:
        self.put(Failed(trial))

    def read(self) -> list[Trial]:
        """The table is the driver's."""
        return []

    # -- as a Watcher -----------------------------------------------------------------------------------------

    def trial_started(self, number: int, candidate: Candidate, role: str) -> None:
        self.put(Started(number, candidate, role))

    def measured(self, number: int, load: LoadPoint, measurement: Measurement) -> None:
        """The row tells."""

    def trial_finished(self, trial: Trial, best: Point | None) -> None:
        self.put(Finished(trial, best))
