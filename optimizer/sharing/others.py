"""What a study's course asks of the other workers of the study."""

from __future__ import annotations

from typing import Protocol

from optimizer.trial import Candidate, Trial


class Others(Protocol):
    """The rest of those who share a study. Each numbers its own trials."""

    def claim(self, candidate: Candidate, concurrency: int) -> bool:
        """Enter ``candidate``, whose sweep begins at ``concurrency``, as tried here. False where another has tried it
        or is trying it."""
        ...

    def abandoned(self) -> list[Candidate]:
        """What workers were trying that are gone, and that nobody has tried since."""
        ...

    def trials(self) -> list[Trial]:
        """All that are finished, this worker's own among them."""
        ...

    def are_running(self) -> bool:
        """Whether another is trying something, after which more may be worth trying."""
        ...

    def wait(self, seconds: float) -> None:
        """At most so long, until something is tried no more, or anew."""
        ...


class Nobody:
    """A study of one worker."""

    def claim(self, candidate: Candidate, concurrency: int) -> bool:
        return True

    def abandoned(self) -> list[Candidate]:
        return []

    def trials(self) -> list[Trial]:
        return []

    def are_running(self) -> bool:
        return False

    def wait(self, seconds: float) -> None:
        """There is nobody to wait for."""
