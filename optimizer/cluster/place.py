"""A worker as the driver sees it, and what can happen to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from optimizer.cluster.events import Event
from optimizer.cluster.jobs import Job
from optimizer.cluster.share import Node
from optimizer.cluster.worker import About


@dataclass(frozen=True, slots=True)
class Joined:
    """The worker can be sent work."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker is gone, and what it was doing with it."""

    reason: str


Happening: TypeAlias = Event | Joined | Lost


@dataclass(eq=False)
class Place:
    """One worker. ``about`` is known once it has started."""

    actor: Any
    node: Node
    state: Literal["starting", "started", "furnishing", "ready", "leaving"] = "starting"
    about: About | None = None
    waited: dict[Any, str] = field(default_factory=dict)  # what its answers are to: a call's name by Ray's reference

    @property
    def host(self) -> str:
        return self.about.host if self.about else self.node.host


class Crew(Protocol):
    """The workers as a study sees them."""

    def ready(self) -> list[Place]:
        """Those that can be sent work, whether or not they have some."""
        ...

    def send(self, place: Place, job: Job) -> None: ...

    def happened(self) -> list[tuple[Place, Happening]]:
        """What has happened, after a short wait where nothing has. Raises TuneError where nobody can go on."""
        ...
